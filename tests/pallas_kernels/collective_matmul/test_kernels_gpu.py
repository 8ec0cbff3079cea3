"""The kernels on several GPUs: values, repeatability, reuse, stragglers, meshes."""

import dataclasses
import functools
import itertools
import os
import random
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.collective_matmul import (
    CollectiveConfig,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.matmul import matmul
from tests.pallas_kernels.collective_matmul.test_kernels import by_device, normal
from tests.tolerances import RELATIVE, relative_error


pytestmark = pytest.mark.multigpu
BF16, FP16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
P = jax.sharding.PartitionSpec
KINDS = {
    "all_gather": all_gather_matmul,
    "reduce_scatter": matmul_reduce_scatter,
    "all_reduce": matmul_all_reduce,
}
SPECS = {
    "all_gather": (P("tensor"), P(None, "tensor"), P(None, "tensor")),
    "reduce_scatter": (P(None, "tensor"), P("tensor"), P("tensor")),
    "all_reduce": (P(None, "tensor"), P("tensor"), P()),
}
CONFIGS = {
    "heuristic": None,
    "alone": CollectiveConfig(),
    "pairs_of_columns": CollectiveConfig(cluster="n"),
    "widest": CollectiveConfig(tile_n=320, stages=3, store_slots=2, cluster="m"),
    "many_buffers": CollectiveConfig(tile_n=128, buffers=4, piece_chunks=2),
    "push": CollectiveConfig(tile_n=128, transfer="push"),
    "push_by_pairs": CollectiveConfig(transfer="push", cluster="m"),
    "order_of_k": CollectiveConfig(
        gather_order="k", store_slots=1, buffers=8, buffer_bytes=1024
    ),
}


def gpus(*sizes, names=("tensor",)):
    count = int(np.prod(sizes))
    if len(jax.devices()) < count:
        pytest.skip(f"needs {count} GPUs")
    auto = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.make_mesh(sizes, names, auto, devices=jax.devices()[:count])


def every_gpu():
    return gpus(max(n for n in (2, 4, 8) if n <= len(jax.devices())))


def split(kind, mesh, *, before=None, **options):
    """An op of global matrices on a mesh."""
    op = functools.partial(
        KINDS[kind], axis_name="tensor", implementation="mosaic_gpu", **options
    )

    def local(x, w):
        return op(x if before is None else before(x), w)

    *in_specs, out_specs = SPECS[kind]
    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=tuple(in_specs),
            out_specs=out_specs,
            check_vma=False,
        )
    )


def operands(kind, mesh, rows, columns, depth, dtype=BF16):
    """x and w whose parts on each device are scaled by its number."""
    devices = mesh.shape["tensor"]
    if kind == "all_gather":
        x = by_device(normal(1, (rows, depth), dtype), 0, devices)
        return x, normal(2, (depth, columns * devices), dtype)
    x = normal(1, (rows, depth * devices), dtype)
    return x, by_device(normal(2, (depth * devices, columns), dtype), 0, devices)


def exact(x, w):
    with jax.default_matmul_precision("highest"):
        return np.asarray(x, np.float32) @ np.asarray(w, np.float32)


def poison(shape, dtype):
    """Leaves NaN in freed memory of every GPU, where outputs will lie."""
    for device in jax.devices():
        with jax.default_device(device):
            jax.block_until_ready([jnp.full(shape, jnp.nan, dtype) for _ in range(4)])


# Sums of an all-reduce are handed on in boxes of at most 256 columns.
KIND_AND_CONFIG = sorted(
    {*itertools.product(KINDS, CONFIGS)}
    - {("all_reduce", "widest")}
    - {(kind, "order_of_k") for kind in KINDS if kind != "all_gather"}
    - {
        (kind, config)
        for kind in KINDS
        for config in ("push", "push_by_pairs")
        if kind != "reduce_scatter"
    }
)


@pytest.mark.parametrize(("kind", "config"), KIND_AND_CONFIG)
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_values_and_repeatability(kind, dtype, config):
    mesh = every_gpu()
    x, w = operands(kind, mesh, 2048, 512, 1024, dtype)
    f = split(kind, mesh, config=CONFIGS[config])
    poison((2048, 4096), dtype)
    y = f(x, w)
    assert relative_error(y, exact(x, w)) < RELATIVE[dtype]
    for _ in range(5):
        assert (f(x, w) == y).all()


@pytest.mark.parametrize(
    ("kind", "tile_n", "columns"),
    [
        ("reduce_scatter", 320, 512),
        ("reduce_scatter", 256, 320),
        ("reduce_scatter", 192, 256),
        ("reduce_scatter", 128, 192),
        ("all_reduce", 256, 320),
        ("all_reduce", 192, 256),
        ("all_reduce", 128, 192),
    ],
)
def test_columns_that_end_within_a_tile(kind, tile_n, columns):
    """The first call counts: later ones find the sums of the one before."""
    mesh = every_gpu()
    x, w = operands(kind, mesh, 2048, columns, 512)
    stages = 3 if tile_n == 320 else 4
    f = split(kind, mesh, config=CollectiveConfig(tile_n=tile_n, stages=stages))
    for sign in (1, -1):
        poison((2048, 2048), BF16)
        y = f(sign * x, w)
        assert relative_error(y, sign * exact(x, w)) < RELATIVE[BF16]


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (3, 320), (5, 2560)])
def test_one_shot_of_any_size(rows, columns):
    """Parts of a chunk must not end in what another device has sent."""
    mesh = every_gpu()
    x, w = operands("all_reduce", mesh, rows, columns, 256)
    config = CollectiveConfig(tile_n=64, one_shot=True)
    f = split("all_reduce", mesh, config=config)
    for sign in (1, -1) * 10:
        y = f(sign * x, w)
        assert relative_error(y, sign * exact(x, w)) < RELATIVE[BF16]


@pytest.mark.parametrize("kind", [*KINDS, "all_gather in the order of k"])
def test_random_rows(kind):
    mesh = every_gpu()
    devices = mesh.shape["tensor"]
    draw = random.Random(0)
    kind, *in_order_of_k = kind.split(" in ")
    config = CONFIGS["order_of_k"] if in_order_of_k else None
    config = config and dataclasses.replace(config, tile_n=64)
    for _ in range(6):
        rows = devices * draw.randrange(1, 700)
        columns = 64 * draw.randrange(1, 12)
        depth = 64 * draw.randrange(1, 60 if in_order_of_k else 12)
        x, w = operands(kind, mesh, rows, columns, depth)
        y = split(kind, mesh, config=config)(x, w)
        assert relative_error(y, exact(x, w)) < RELATIVE[BF16], (rows, columns, depth)


def test_gathered_rows_are_exact_and_products_those_of_the_plain_kernel():
    mesh = every_gpu()
    x, w = operands("all_gather", mesh, 4096, 1024, 2048)
    op = functools.partial(
        all_gather_matmul,
        axis_name="tensor",
        return_gathered=True,
        implementation="mosaic_gpu",
        config=CollectiveConfig(cluster="m"),
    )
    *in_specs, out_spec = SPECS["all_gather"]
    run = jax.shard_map(
        op,
        mesh=mesh,
        in_specs=tuple(in_specs),
        out_specs=(out_spec, P()),
        check_vma=False,
    )
    y, gathered = jax.jit(run)(x, w)
    assert (gathered == x).all()
    plain = functools.partial(
        matmul, implementation="mosaic_gpu", config=CollectiveConfig(cluster="m")
    )
    columns = w.shape[1] // mesh.shape["tensor"]
    want = jax.jit(plain)(x, w[:, :columns])
    assert (np.asarray(y[:, :columns]) == np.asarray(want)).all()


@pytest.mark.parametrize("rows_of_device", [256, 131])
@pytest.mark.parametrize("kind", [*KINDS, "all_gather in the order of k"])
def test_many_calls_back_to_back(kind, rows_of_device):
    """Buffers and semaphores are reused at once; nothing is looked at in between.

    Every other call has operands of the other sign: what is read too early is what the
    call before left in the same place, and would not show if that were the same.
    """
    mesh = every_gpu()
    rows = rows_of_device * mesh.shape["tensor"]
    kind, *in_order_of_k = kind.split(" in ")
    depth = 1024 if in_order_of_k else 128
    config = CONFIGS["order_of_k"] if in_order_of_k else None
    x, w = operands(kind, mesh, rows, 320, depth)
    f = split(kind, mesh, config=config)
    want = f(x, w)
    assert relative_error(want, exact(x, w)) < RELATIVE[BF16]

    @jax.jit
    def many(x, w, want):
        def turn(i, wrong):
            sign = jnp.where(i % 2 == 0, 1, -1).astype(BF16)
            y = f(sign * x, w)
            return wrong + jnp.any(y != sign * want).astype(jnp.int32)

        return lax.fori_loop(0, 1000, turn, jnp.int32(0))

    assert many(x, w, want) == 0
    outputs = [(sign, f(sign * x, w)) for sign in (1, -1) * 25]
    assert all(bool((y == sign * want).all()) for sign, y in outputs)


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_one_slow_device(kind, late):
    mesh = every_gpu()
    x, w = operands(kind, mesh, 1024, 256, 512)

    def work(x):
        """Milliseconds of products on one device."""
        big = jnp.zeros((4096, 4096), BF16)
        busy = lax.fori_loop(0, 50, lambda _, a: a @ a, big)
        return x + busy[0, 0]

    def before(x):
        return lax.cond(lax.axis_index("tensor") == late, work, lambda x: x, x)

    y = split(kind, mesh, before=before)(x, w)
    assert relative_error(y, exact(x, w)) < RELATIVE[BF16]


@pytest.mark.parametrize("tensor_first", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_each_axis_of_two(kind, tensor_first):
    names = ("tensor", "data") if tensor_first else ("data", "tensor")
    mesh = gpus(2, 2, names=names)
    x = jnp.stack([operands(kind, mesh, 512, 256, 512)[0] * (1 + i) for i in range(2)])
    w = operands(kind, mesh, 512, 256, 512)[1]
    x_spec, w_spec, out_spec = SPECS[kind]
    op = functools.partial(KINDS[kind], axis_name="tensor", implementation="mosaic_gpu")
    run = jax.shard_map(
        op,
        mesh=mesh,
        in_specs=(P("data", *x_spec), w_spec),
        out_specs=P("data", *out_spec),
        check_vma=False,
    )
    y = jax.jit(run)(x, w)
    for got, rows in zip(y, x, strict=True):
        assert relative_error(got, exact(rows, w)) < RELATIVE[BF16]


def test_two_kernels_and_another_collective_in_one_program_with_gradients():
    mesh = every_gpu()
    x = normal(1, (2048, 512))
    up, down = 0.05 * normal(2, (512, 2048)), 0.05 * normal(3, (2048, 512))

    def layer(implementation, x, up, down):
        options = {"axis_name": "tensor", "implementation": implementation}
        hidden = all_gather_matmul(x, up, **options)
        y = matmul_reduce_scatter(jax.nn.silu(hidden), down, **options)
        norm = lax.psum(jnp.sum(jnp.square(y.astype(jnp.float32))), "tensor")
        return y * lax.rsqrt(norm).astype(y.dtype)

    def loss(x, up, down, implementation):
        run = jax.shard_map(
            functools.partial(layer, implementation),
            mesh=mesh,
            in_specs=(P("tensor"), P(None, "tensor"), P("tensor")),
            out_specs=P("tensor"),
        )
        return jnp.sum(jnp.sin(run(x, up, down).astype(jnp.float32)))

    grad = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    got, want = (grad(x, up, down, name) for name in ("mosaic_gpu", "xla"))
    for g, r in zip(got, want, strict=True):
        assert relative_error(g, r) < RELATIVE[BF16]


@pytest.mark.parametrize("rhs_transposed", [False, True])
def test_several_weights_share_a_gather_and_several_products_a_sum(rhs_transposed):
    mesh = every_gpu()
    devices = mesh.shape["tensor"]
    x = by_device(normal(1, (2, 520, 256)), 1, devices)
    ups = [normal(2 + i, (256, n * devices)) for i, n in enumerate((320, 64))]
    hidden = [normal(4 + i, (2, 520, k * devices)) for i, k in enumerate((192, 128))]
    downs = [normal(6 + i, (k * devices, 320)) for i, k in enumerate((192, 128))]
    stored = lambda ws: tuple(w.T if rhs_transposed else w for w in ws)  # noqa: E731
    options = {
        "axis_name": "tensor",
        "rhs_transposed": rhs_transposed,
        "implementation": "mosaic_gpu",
        "config": CollectiveConfig(tile_n=64, stages=6),
    }

    def both(x, ups, hidden, downs):
        gathered = all_gather_matmul(x, ups, **options)
        return gathered, matmul_reduce_scatter(hidden, downs, **options)

    columns, rows = P(None, "tensor"), P("tensor")
    if rhs_transposed:
        columns, rows = rows, columns
    run = jax.shard_map(
        both,
        mesh=mesh,
        in_specs=(P(None, "tensor"), columns, P(None, None, "tensor"), rows),
        out_specs=(P(None, None, "tensor"), P(None, "tensor")),
        check_vma=False,
    )
    outs, total = jax.jit(run)(x, stored(ups), tuple(hidden), stored(downs))
    for out, w in zip(outs, ups, strict=True):
        assert relative_error(out, exact(x, w)) < RELATIVE[BF16]
    want = sum(exact(h, w) for h, w in zip(hidden, downs, strict=True))
    assert relative_error(total, want) < RELATIVE[BF16]


def test_scan_over_layers_with_remat_and_donated_operands():
    mesh = every_gpu()
    x = normal(1, (1024, 256))
    # Small enough that rounding does not grow from layer to layer.
    ups, downs = 0.05 * normal(2, (4, 256, 1024)), 0.02 * normal(3, (4, 1024, 256))

    def layers(implementation, x, ups, downs):
        options = {"axis_name": "tensor", "implementation": implementation}

        @jax.checkpoint
        def layer(x, weights):
            hidden = jax.nn.silu(all_gather_matmul(x, weights[0], **options))
            return x + matmul_reduce_scatter(hidden, weights[1], **options), None

        return lax.scan(layer, x, (ups, downs))[0]

    def step(x, ups, downs, implementation):
        run = jax.shard_map(
            functools.partial(layers, implementation),
            mesh=mesh,
            in_specs=(P("tensor"), P(None, None, "tensor"), P(None, "tensor")),
            out_specs=P("tensor"),
        )

        def loss(ups, downs):
            return jnp.sum(jnp.sin(run(x, ups, downs).astype(jnp.float32)))

        return jax.grad(loss, (0, 1))(ups, downs)

    def grads(implementation):
        donated = jax.jit(step, static_argnums=3, donate_argnums=(1, 2))
        return donated(x, jnp.copy(ups), jnp.copy(downs), implementation)

    for got, want in zip(grads("mosaic_gpu"), grads("xla"), strict=True):
        assert relative_error(got, want) < RELATIVE[BF16]


OVERLAPPED = """
import functools, sys, jax, jax.numpy as jnp
from jax import lax
from jaxscale.sharding import launch_in_order
launch_in_order()
from pallas_kernels.collective_matmul import all_gather_matmul, matmul_reduce_scatter
P = jax.sharding.PartitionSpec
mesh = jax.make_mesh((2, 2), ("data", "tensor"), (jax.sharding.AxisType.Auto,) * 2)
options = {"axis_name": "tensor", "implementation": "mosaic_gpu"}
draw = functools.partial(jax.random.normal, dtype=jnp.bfloat16)
normal = lambda i, shape: 0.1 * draw(jax.random.key(i), shape)
x, up, down = normal(1, (2048, 512)), normal(2, (512, 2048)), normal(3, (2048, 512))
big = normal(4, (4096, 4096))

def local(x, up, down, big):
    def turn(_, carry):
        x, big = carry
        # Nothing orders the sum over one axis and the kernels over the other.
        total = 0.5 * lax.psum(big, "data")
        hidden = all_gather_matmul(x, up, **options)
        y = matmul_reduce_scatter(hidden, down, **options)
        return x + 0 * y, total
    return lax.fori_loop(0, 300, turn, (x, big))

run = jax.jit(jax.shard_map(local, mesh=mesh, check_vma=False,
    in_specs=(P("tensor"), P(None, "tensor"), P("tensor"), P("data")),
    out_specs=(P("tensor"), P("data"))))
for options_of_xla in ({}, {"xla_gpu_enable_latency_hiding_scheduler": True}):
    program = run.lower(x, up, down, big).compile(options_of_xla or None)
    y, total = jax.block_until_ready(program(x, up, down, big))
    assert (y == x).all()
print("done")
"""


def test_a_collective_of_another_axis_beside_the_kernels():
    """In a process of its own, which a deadlock would not let end."""
    gpus(2, 2, names=("data", "tensor"))
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", OVERLAPPED],
        capture_output=True,
        text=True,
        timeout=180,
        env=environment,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr[-2000:]


def test_captured_into_a_cuda_graph():
    """Arrays that move on one GPU alone: only there is the graph recorded anew."""
    mesh = every_gpu()
    for kind in KINDS:
        x, w = operands(kind, mesh, 1024, 256, 512)
        f = split(kind, mesh)

        def several(x, w, f=f):
            return [f(sign * x, w) for sign in (1, -1) * 3]

        lowered = jax.jit(several).lower(x, w)
        graph = lowered.compile({"xla_gpu_graph_min_graph_size": 1})
        plain = lowered.compile({"xla_gpu_enable_command_buffer": ""})
        held = []
        for turn in range(12):
            device = mesh.devices.flat[turn % mesh.size]
            for kib in (64, 256, 1024):
                held.append(jnp.zeros((kib, 1024), jnp.int8, device=device))
            scale = turn + 1
            for got, want in zip(graph(scale * x, w), plain(scale * x, w), strict=True):
                assert (got == want).all(), (kind, turn)
