"""A decode step over a paged KV cache: ours, and attention to a contiguous cache.

Every row has `context` tokens in the cache and one new token (or some: drafts), which
our implementations append, in place. The baselines get keys and values that lie one
behind another, the new ones among them, laid out as they want them before they are
timed: they neither append nor look up pages. ``copy_share`` is the rate at which the
cache is read over that of a copy from memory to memory of the same device, which reads
and writes as much; it is measured once a run.
"""

import functools
import importlib
import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.measure import command, timing
from benchmarks.measure.harness import Benchmark, Case, Jax, Params, Torch
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.specs import SPECS, PagedSpec


QUICK = (
    PagedSpec(
        name="tiny",
        batch=3,
        context=21,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page=8,
    ),
    PagedSpec(
        name="tiny_drafts_window",
        batch=2,
        context=21,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        page=8,
        queries=3,
        window=6,
    ),
    PagedSpec(
        name="tiny_fp8",
        batch=2,
        context=21,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        page=8,
        dtype="float8_e4m3fn",
    ),
)
FP8_SCALE = 0.02
"""Random numbers that are normal fit into fp8 so."""


def case(spec: PagedSpec) -> Case:
    """One problem."""
    return Case(
        spec.name,
        {
            "batch": spec.batch,
            "context": spec.context,
            "heads": f"{spec.num_heads}/{spec.num_kv_heads}",
            "head_dim": spec.head_dim,
            "queries": spec.queries,
            "page": spec.page,
            "dtype": spec.dtype,
            "window": spec.window or "none",
        },
    )


def spec_of(params: Params) -> PagedSpec:
    """The spec that a case was made from, without its name."""
    sizes = {
        name: params[name]
        for name in ("batch", "context", "head_dim", "queries", "page", "dtype")
    }
    heads, kv_heads = map(int, params["heads"].split("/"))
    window = None if params["window"] == "none" else params["window"]
    return PagedSpec(
        name="", num_heads=heads, num_kv_heads=kv_heads, window=window, **sizes
    )


def inputs(params: Params, key: jax.Array) -> tuple[Any, ...]:
    """q, kv, pages and scales, which are random; table and lengths."""
    spec = spec_of(params)
    rows, new, size = spec.batch, spec.queries, spec.head_dim
    keys = jax.random.split(key, 5)
    num_pages = rows * spec.width
    pool = 1, num_pages, 2, spec.num_kv_heads

    @functools.partial(jax.jit, static_argnums=1)
    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    pages, scales = normal(keys[2], (*pool, spec.page, size)), None
    if spec.dtype != "bfloat16":
        scales = jax.random.uniform(keys[3], pool) * FP8_SCALE + FP8_SCALE
        wide = pages.astype(jnp.float32) / scales[..., None, None]
        pages = wide.astype(spec.dtype)
    return (
        normal(keys[0], (rows, new, spec.num_heads, size)),
        normal(keys[1], (rows, new, 2, spec.num_kv_heads, size)),
        pages,
        scales,
        jax.random.permutation(keys[4], num_pages).reshape(rows, -1),
        jnp.full(rows, spec.context, jnp.int32),
    )


def attend(params: Params, implementation: str | None) -> Callable[..., Any]:
    """The public call."""
    spec = spec_of(params)

    def step(
        q: Any, kv: Any, pages: Any, scales: Any, table: Any, lengths: Any
    ) -> tuple[Any, Any]:
        return paged_attention(
            q,
            kv,
            pages,
            0,
            table,
            lengths,
            kv_scales=scales,
            window=spec.window,
            implementation=implementation,
        )

    return step


def definition(params: Params) -> Callable[..., jax.Array]:
    """The portable implementation in fp32; what is stored in 8 bits is that."""
    step = attend(params, "xla")

    def out(*arrays: Any) -> jax.Array:
        q, kv, pages, scales, *rest = arrays
        if scales is not None:
            pages = pages.astype(spec_of(params).dtype)
        return step(q, kv, pages, scales, *rest)[0]

    return out


class Remembered:
    """A function of inputs that are made ready once.

    Args:
        prepare: From the inputs what `run` takes.
        run: Returns the output, and what it takes the next time.
    """

    def __init__(self, prepare: Callable[..., Any], run: Callable[..., Any]):
        self.prepare, self.run = prepare, run
        self.ready: dict[int, tuple[Any, Any]] = {}

    def __call__(self, *arrays: Any) -> Any:
        """The output."""
        key = id(arrays[2])
        # The inputs are kept, so that no others take their identity.
        _, ready = self.ready.pop(key, (None, None))
        ready = self.prepare(*arrays) if ready is None else ready
        out, after = self.run(ready)
        self.ready[key] = arrays, after
        return out

    def memory(self, *arrays: Any) -> float:
        """Most bytes of a call in JAX beyond what is ready."""
        step = jax.jit(self.run, donate_argnums=0)
        return timing.program_bytes(step.lower(self.prepare(*arrays)).compile())


def ours(name: str | None) -> Jax:
    """An implementation of `paged_attention`, with pages that it gives up."""

    def make(params: Params) -> Callable[..., Any]:
        step = attend(params, name)
        jitted = jax.jit(
            lambda pages, rest: step(*rest[:2], pages, *rest[2:]), donate_argnums=0
        )

        def prepare(q: Any, kv: Any, pages: Any, *rest: Any) -> Any:
            return jnp.copy(pages), (q, kv, *rest)

        def run(ready: Any) -> Any:
            pages, rest = ready
            out, pages = jitted(pages, rest)
            return out, (pages, rest)

        return Remembered(prepare, run)

    return Jax(make, jit=False)


def plain(params: Params) -> PagedSpec:
    """The spec, if baselines can serve it.

    Raises:
        NotImplementedError: Drafts, a window or fp8.
    """
    spec = spec_of(params)
    if spec.queries > 1 or spec.window is not None or spec.dtype != "bfloat16":
        raise NotImplementedError("one new token, no window, 16 bits")
    return spec


@functools.partial(jax.jit, static_argnums=0)
def contiguous(spec: PagedSpec, kv: Any, pages: Any, table: Any) -> jax.Array:
    """Keys and values of each row, the new ones among them: [2, B, S, K, H]."""
    found = jnp.moveaxis(pages[0][table], 4, 2)  # [B, W, G, 2, K, H]
    found = found.reshape(spec.batch, -1, *found.shape[3:])[:, : spec.context]
    return jnp.moveaxis(jnp.concatenate([found, kv], axis=1), 2, 0)


def cudnn(params: Params) -> Callable[..., Any]:
    """Attention by cuDNN, as JAX calls it."""
    spec = plain(params)
    if not timing.on_gpu():
        raise NotImplementedError("cuDNN needs a GPU")
    run = jax.jit(
        functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    )

    def prepare(q: Any, kv: Any, pages: Any, scales: Any, table: Any, _: Any) -> Any:
        del scales
        return (q, *contiguous(spec, kv, pages, table))

    return Remembered(prepare, lambda ready: (run(*ready), ready))


def jax_paged(params: Params) -> Callable[..., Any]:
    """The deprecated kernel that JAX ships, by Pallas-Triton."""
    spec = plain(params)
    if not timing.on_gpu():
        raise NotImplementedError("Pallas-Triton needs a GPU")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = importlib.import_module(
            "jax.experimental.pallas.ops.gpu.paged_attention"
        )
    rows = spec.batch
    # At a time as much as two stages of it fit in shared memory, and no split without
    # a token. The pages that each split has are so many blocks.
    block = max(1, 128 // spec.page)
    splits = min(16, 1 << (-(-spec.width // block) - 1).bit_length())
    width = splits * block

    def prepare(q: Any, kv: Any, pages: Any, scales: Any, table: Any, _: Any) -> Any:
        del scales
        pages = attend(params, "xla")(
            q, kv, pages, None, table, jnp.full(rows, spec.context, jnp.int32)
        )[1]
        k, v = jnp.moveaxis(pages[0], (1, 2), (0, 1))  # [K, P, G, H] each
        table = jnp.pad(table, ((0, 0), (0, -spec.width % width)))
        lengths = jnp.full(rows, spec.context + 1, jnp.int32)
        return q[:, 0] * spec.head_dim**-0.5, k, v, table, lengths

    run = jax.jit(
        functools.partial(
            module.paged_attention, k_splits=splits, pages_per_compute_block=block
        )
    )
    return Remembered(prepare, lambda ready: (run(*ready)[:, None], ready))


def torch_sdpa(params: Params) -> Callable[..., Any]:
    """PyTorch's scaled_dot_product_attention."""
    spec = plain(params)
    import torch

    def prepare(q: Any, kv: Any, pages: Any, scales: Any, table: Any, _: Any) -> Any:
        del scales
        arrays = (jnp.from_dlpack(x) for x in (kv, pages, table))
        k, v = contiguous(spec, *arrays)
        heads_first = (torch.from_dlpack(x).transpose(1, 2) for x in (k, v))
        return (q.transpose(1, 2), *(x.contiguous() for x in heads_first))

    def run(ready: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            *ready, enable_gqa=spec.num_heads != spec.num_kv_heads
        )
        return out.transpose(1, 2), ready

    return Remembered(prepare, run)


def torch_flash(params: Params) -> Callable[..., Any]:
    """FlashAttention's attention to a cache, where it is installed."""
    spec = plain(params)
    if importlib.util.find_spec("flash_attn") is None:
        raise NotImplementedError("flash_attn is not installed")
    import torch

    flash = importlib.import_module("flash_attn").flash_attn_with_kvcache

    def prepare(q: Any, kv: Any, pages: Any, scales: Any, table: Any, _: Any) -> Any:
        del scales
        arrays = (jnp.from_dlpack(x) for x in (kv, pages, table))
        k, v = (torch.from_dlpack(x) for x in contiguous(spec, *arrays))
        return q, k, v

    return Remembered(prepare, lambda ready: (flash(*ready), ready))


@functools.cache
def copy_rate() -> float:
    """Bytes per second that a copy on the device reads and writes."""
    count = 2**30 if timing.on_gpu() else 2**20
    x = jax.random.normal(jax.random.key(0), (count,), jnp.bfloat16)
    if timing.torch_is_there():
        import torch

        source = torch.from_dlpack(x)
        target, times = torch.empty_like(source), []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
    else:
        copy, times = jax.jit(jnp.copy), []
        for _ in range(6):
            start = time.perf_counter()
            jax.block_until_ready(copy(x))
            times.append(time.perf_counter() - start)
    return 2 * x.nbytes / statistics.median(times)


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Share of the rate of a copy."""
    rate = spec_of(params).kv_bytes() / seconds
    return {"copy_share": rate / copy_rate(), "tb_per_s": rate / 1e12}


BENCHMARK = Benchmark(
    name="paged_attention",
    cases=[case(spec) for spec in SPECS],
    quick_cases=[case(spec) for spec in QUICK],
    kernels=("paged_attention",),
    inputs=inputs,
    reference=definition,
    implementations={
        "mosaic_gpu": ours("mosaic_gpu"),
        "triton": ours("triton"),
        "xla": ours("xla"),
        "cudnn": Jax(cudnn, jit=False),
        "jax_paged": Jax(jax_paged, jit=False),
        "torch_sdpa": Torch(torch_sdpa),
        "torch_flash": Torch(torch_flash),
    },
    metrics=metrics,
    selectors={"batch": "batch", "context": "context"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
