"""What moving keys and values costs: Flover's reordering, against page tables.

The requests of the second half of a batch move into the first half, whose requests have
ended, so that the smaller batch can be computed. ``mosaic_gpu`` and ``xla`` move their
keys and values, as an engine with contiguous caches must; ``page_table`` moves the rows
of the page tables, as ours does. ``copy_share`` is the rate at which keys and values
are read and written over that of a copy from memory to memory of the same device;
``page_table`` copies nothing, and a copy would have to be so many times as fast.

How much of the time of requests that is: ``python -m benchmarks.serving --impl jaxscale
contiguous``.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Case, Jax, Params
from benchmarks.paged_attention import Remembered, copy_rate
from pallas_kernels.move_pages import move_pages
from pallas_kernels.move_pages.specs import SPECS, MoveSpec


QUICK = (
    MoveSpec(
        name="tiny",
        requests=2,
        context=20,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        page=8,
    ),
    MoveSpec(
        name="tiny_fp8",
        requests=1,
        context=20,
        num_layers=2,
        num_kv_heads=2,
        head_dim=16,
        page=8,
        dtype="float8_e4m3fn",
    ),
)

_COLUMNS = 32
"""What a request has on the device besides its page table, in numbers of 32 bits."""


def case(spec: MoveSpec) -> Case:
    """One problem."""
    return Case(
        spec.name,
        {
            "requests": spec.requests,
            "context": spec.context,
            "layers": spec.num_layers,
            "kv_heads": spec.num_kv_heads,
            "head_dim": spec.head_dim,
            "page": spec.page,
            "dtype": spec.dtype,
        },
    )


def spec_of(params: Params) -> MoveSpec:
    """The spec that a case was made from, without its name."""
    sizes = {
        name: params[name]
        for name in ("requests", "context", "head_dim", "page", "dtype")
    }
    heads = {"num_layers": params["layers"], "num_kv_heads": params["kv_heads"]}
    return MoveSpec(name="", **heads, **sizes)


def inputs(params: Params, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random pages; which move, request by request, and where to."""
    spec = spec_of(params)
    keys = jax.random.split(key)

    @jax.jit
    def normal(key: jax.Array) -> jax.Array:
        return jax.random.normal(key, spec.shape, jnp.bfloat16).astype(spec.dtype)

    order = jax.random.permutation(keys[1], spec.num_pages)
    return normal(keys[0]), order[: spec.moves], order[spec.moves : 2 * spec.moves]


def last_page(params: Params) -> Callable[..., jax.Array]:
    """What the last page that moves holds in the last layer."""

    def out(pages: jax.Array, source: jax.Array, _: jax.Array) -> jax.Array:
        stored = pages[-1, source[-1]].astype(spec_of(params).dtype)
        return stored.astype(jnp.float32)

    return out


def moved(name: str) -> Jax:
    """An implementation of `move_pages`, with pages that it gives up."""

    def make(params: Params) -> Callable[..., Any]:
        del params

        @functools.partial(jax.jit, donate_argnums=0)
        def step(pages: Any, source: Any, target: Any) -> tuple[Any, Any]:
            pages = move_pages(pages, source, target, implementation=name)
            return pages[-1, target[-1]].astype(jnp.float32), pages

        def run(ready: Any) -> Any:
            pages, *ids = ready
            out, pages = step(pages, *ids)
            return out, (pages, *ids)

        prepare = lambda pages, *ids: (jnp.copy(pages), *ids)  # noqa: E731
        return Remembered(prepare, run)

    return Jax(make, jit=False)


def page_table(params: Params) -> Callable[..., Any]:
    """Rows of tables that move; the pages stay."""
    spec = spec_of(params)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(slots: Any, order: Any, pages: Any) -> tuple[Any, Any]:
        slots = slots[order]
        return pages[-1, slots[spec.requests - 1, -1]].astype(jnp.float32), slots

    def prepare(pages: Any, source: Any, target: Any) -> Any:
        ids = jnp.stack([target, source]).reshape(2 * spec.requests, -1)
        slots = jnp.pad(ids.astype(jnp.int32), ((0, 0), (_COLUMNS, 0)))
        rows = jnp.arange(2 * spec.requests)
        # The second half comes first, and stays where it was, which is nobody's.
        return slots, jnp.where(rows < spec.requests, rows + spec.requests, rows), pages

    def run(ready: Any) -> Any:
        slots, order, pages = ready
        out, slots = step(slots, order, pages)
        return out, (slots, order, pages)

    return Remembered(prepare, run)


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Share of the rate of a copy."""
    rate = 2 * spec_of(params).moved_bytes() / seconds
    return {"copy_share": rate / copy_rate(), "tb_per_s": rate / 1e12}


BENCHMARK = Benchmark(
    name="move_pages",
    cases=[case(spec) for spec in SPECS],
    quick_cases=[case(spec) for spec in QUICK],
    kernels=("move_pages",),
    inputs=inputs,
    reference=last_page,
    implementations={
        "mosaic_gpu": moved("mosaic_gpu"),
        "xla": moved("xla"),
        "page_table": Jax(page_table, jit=False),
    },
    metrics=metrics,
    selectors={"requests": "requests", "context": "context"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
