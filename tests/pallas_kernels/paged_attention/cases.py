"""Decoding steps with random operands, in pools that are poisoned elsewhere."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import paged_attention, reference
from pallas_kernels.paged_attention.inputs import FP8
from tests.tolerances import RELATIVE, relative_error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a step is made of; `arrays` draws its operands."""

    lengths: tuple[int, ...] = (20, 0, 37)
    num_new: tuple[int, ...] | None = None
    queries: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    page: int = 4
    layers: int = 2
    layer: int = 1
    spare: int = 3
    """Pages of no row."""
    width: int | None = None
    """Pages of a table; None is those that the longest row needs, and two more."""
    dtype: Any = jnp.float32
    pages_dtype: Any = None
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    seed: int = 0
    poison: float = float("nan")
    """What everything holds that no query may see."""

    def arrays(self) -> dict[str, Any]:
        """Arguments of `paged_attention`, as jax and numpy arrays."""
        rng = np.random.default_rng(self.seed)
        rows, (heads, kv_heads) = len(self.lengths), self.heads
        dtype = jnp.dtype(self.pages_dtype or self.dtype)
        counts = [-(-(n + self.queries) // self.page) for n in self.lengths]
        width = self.width or max(counts) + 2
        num_pages = sum(counts) + self.spare
        free = rng.permutation(num_pages)
        # What is past a row's tokens may name any page, and no page at all.
        table = rng.integers(-3, num_pages + 3, (rows, width)).astype(np.int32)
        shape = self.layers, num_pages, 2, kv_heads, self.page, self.head_dim
        pool = np.full(shape, self.poison, np.float32)
        for b, n in enumerate(self.lengths):
            used = min(counts[b], width)
            table[b, :used], free = free[:used], free[used:]
            first = 0 if self.window is None else max(0, n - self.window + 1)
            at = np.arange(first, min(n, width * self.page))
            pool[self.layer, table[b, at // self.page], :, :, at % self.page] = (
                rng.normal(size=(len(at), 2, kv_heads, self.head_dim))
            )
            # Pages that a window has left are no longer the row's.
            table[b, : first // self.page] = rng.integers(-3, num_pages + 3)
        arrays = {
            "q": rng.normal(size=(rows, self.queries, heads, self.head_dim)),
            "kv": rng.normal(size=(rows, self.queries, 2, kv_heads, self.head_dim)),
        }
        if self.num_new is not None:
            for b, count in enumerate(self.num_new):
                arrays["q"][b, count:] = arrays["kv"][b, count:] = self.poison
        arrays = {
            name: jnp.asarray(x, jnp.float32).astype(self.dtype)
            for name, x in arrays.items()
        }
        arrays |= {
            "table": table,
            "lengths": np.array(self.lengths, np.int32),
            "layer": self.layer,
        }
        if self.num_new is not None:
            arrays["num_new"] = np.array(self.num_new, np.int32)
        if dtype == FP8:
            # Powers of two and others; of pages of no row, poison too.
            scales = rng.uniform(0.02, 0.05, shape[:4]).astype(np.float32)
            scales[:, free] = self.poison
            pool /= scales[..., None, None]
            arrays["kv_scales"] = jnp.asarray(scales)
        arrays["pages"] = jnp.asarray(pool, jnp.float32).astype(dtype)
        return arrays

    def options(self) -> dict[str, Any]:
        return {
            "window": self.window,
            "softcap": self.softcap,
            "scale": self.scale,
        }


def bits(x) -> np.ndarray:
    """Equal where numbers are equal bit for bit, NaN too."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def check(case: Case, run=paged_attention, tolerance=None, **options) -> np.ndarray:
    """Compares a step with the definition, and returns its output."""
    arrays = case.arrays()
    out, pages = run(**arrays, **case.options(), **options)
    wanted, wanted_pages = reference.paged_attention(**arrays, **case.options())
    assert out.dtype == arrays["q"].dtype
    assert np.isfinite(wanted).all()
    np.testing.assert_array_equal(bits(pages), bits(wanted_pages))
    tolerance = tolerance or RELATIVE[jnp.dtype(case.dtype)]
    assert relative_error(out, wanted) < tolerance
    return np.asarray(out)


def check_lost_pages(run) -> None:
    """New tokens whose page does not exist are written nowhere."""
    case = Case(
        lengths=(15, 20, 16), queries=2, dtype=jnp.bfloat16, head_dim=64, page=16
    )
    arrays = case.arrays()
    for row, page in ((0, -1), (1, arrays["pages"].shape[1]), (2, -7)):
        arrays["table"][row, 1] = page
    _, pages = run(**arrays)
    changed = np.argwhere((bits(pages) != bits(arrays["pages"])).any(axis=(2, 3, 5)))
    # The first of row 0 alone has a place.
    assert changed.tolist() == [[case.layer, arrays["table"][0, 0], 15]]
