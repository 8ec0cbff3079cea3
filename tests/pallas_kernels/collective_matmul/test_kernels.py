"""The Hopper kernels on a CPU: interpreted with races looked for, lowered for CUDA."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu.launch_context import LaunchContext

from pallas_kernels.collective_matmul import (
    CollectiveConfig,
    mosaic_gpu_gather,
    mosaic_gpu_reduce,
)
from pallas_kernels.collective_matmul.communicator import Chunks
from pallas_kernels.collective_matmul.config import (
    Call,
    CollectiveProblem,
    candidates,
    heuristic,
)
from pallas_kernels.collective_matmul.layout import RowLayout
from pallas_kernels.collective_matmul.specs import SPECS
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul import MatmulConfig
from pallas_kernels.matmul import mosaic_gpu as matmul_kernel
from pallas_kernels.matmul.config import Problem
from pallas_kernels.mosaic import H200
from tests.interpreter import cpu_mesh, interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tiers import exhaustive, first
from tests.tolerances import RELATIVE, relative_error


BF16, FP16 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)
SMALL = CollectiveConfig(tile_m=128, tile_n=64, stages=2)
WIDE = CollectiveConfig(tile_m=128, tile_n=320, stages=2, store_slots=2)
P = jax.sharding.PartitionSpec
REDUCTIONS = {
    "reduce_scatter": (mosaic_gpu_reduce.matmul_reduce_scatter, P("data", "tensor")),
    "all_reduce": (mosaic_gpu_reduce.matmul_all_reduce, P("data")),
}
KIND_AND_TRANSFER = [
    ("reduce_scatter", "pull"),
    ("reduce_scatter", "push"),
    ("all_reduce", "pull"),
]


def by_device(x, axis, devices):
    """`x` scaled by the number of the device that holds it: a wrong source shows."""
    rows = x.shape[axis]
    scale = 1 + jnp.arange(rows) * devices // rows
    return x * jnp.expand_dims(scale, range(1, x.ndim - axis)).astype(x.dtype)


def wide(x):
    return np.asarray(x, np.float32)


def call_of(x, transposed, **options):
    return Call(
        axis_name="tensor",
        size=jax.lax.axis_size("tensor"),
        rhs_transposed=transposed,
        out_dtype=x.dtype,
        **options,
    )


def gather(mesh, x, ws, *, config, num_sms=1, transposed=False, keep=True):
    device = dataclasses.replace(H200, num_sms=num_sms)

    def local(x, ws):
        call = call_of(x, transposed, return_gathered=keep)
        return mosaic_gpu_gather.all_gather_matmul(x, ws, call, config, device)

    w_spec = P("tensor") if transposed else P(None, "tensor")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data", "tensor"), w_spec),
        out_specs=(P("data", None, "tensor"), P("data")),
        check_vma=False,
    )(x, ws)


def reduce(mesh, xs, ws, *, kind, config, num_sms=1, transposed=False):
    device = dataclasses.replace(H200, num_sms=num_sms)
    op, out_spec = REDUCTIONS[kind]

    def local(xs, ws):
        return op(xs, ws, call_of(xs[0], transposed), config, device)

    w_spec = P(None, "tensor") if transposed else P("tensor")
    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data", None, "tensor"), w_spec),
        out_specs=out_spec,
        check_vma=False,
    )(xs, ws)


def normal(seed, shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


# Rows of all devices, columns and depth of one; several tiles, rows that end within a
# tile and that are no multiple of 8, columns past the end, weights that share a gather,
# leading axes, more tiles than blocks.
CASES = {
    "plain": {"rows": 256, "columns": (128,), "depth": (128,)},
    "several": {"rows": 400, "columns": (64, 192), "depth": (64, 128), "batch": 2},
    "ragged": {"rows": 2 * 131, "columns": (192,), "depth": (64,)},
    "stored_transposed": {"rows": 256, "columns": (128,), "depth": (64,), "t": True},
    "fp16": {"rows": 256, "columns": (64,), "depth": (192,), "dtype": FP16},
    "padded": {"rows": 2 * 72, "columns": (100,), "depth": (72, 68)},
    "padded_transposed": {"rows": 144, "columns": (68, 64), "depth": (100,), "t": True},
}
PARALLEL = {
    "pairs_of_rows": dataclasses.replace(SMALL, cluster="m"),
    "pairs_of_columns": dataclasses.replace(SMALL, cluster="n"),
    "many_buffers": dataclasses.replace(SMALL, buffers=4, group=2),
    "little_at_a_time": dataclasses.replace(SMALL, buffer_bytes=1024, piece_chunks=3),
}


@pytest.mark.parametrize("name", CASES)
def test_all_gather_matmul(name):
    check_gather(cpu_mesh(data=1, tensor=2), config=SMALL, **CASES[name])


@pytest.mark.parametrize("name", ["plain", "several", "ragged"])
def test_gathered_rows_that_nobody_wants(name):
    mesh = cpu_mesh(data=1, tensor=2)
    check_gather(mesh, config=SMALL, **CASES[name], keep=False)


@pytest.mark.parametrize("order", ["rows", "k"])
def test_own_rows_are_copied_only_where_they_are_wanted(order, monkeypatch):
    counts = []
    real = RowLayout.pieces_of_block

    def pieces_of_block(self, count):
        counts.append(count)
        return real(self, count)

    monkeypatch.setattr(RowLayout, "pieces_of_block", pieces_of_block)
    problem = CollectiveProblem(
        kind="all_gather", m=1024, n=(128,), k=(1024,), devices=4, dtype=BF16
    )
    config = dataclasses.replace(SMALL, gather_order=order, buffer_bytes=1024)
    for keep in (False, True):
        lowered(problem, config, keep=keep)
    unwanted, wanted = counts
    assert 4 * unwanted == 3 * wanted


def check_gather(
    mesh,
    *,
    rows,
    columns,
    depth,
    batch=1,
    t=False,
    dtype=BF16,
    config,
    keep=True,
    **how,
):
    devices = mesh.shape["tensor"]
    x = by_device(normal(1, (batch, rows, depth[0]), dtype), 1, devices)
    ws = [normal(i, (depth[0], n * devices), dtype) for i, n in enumerate(columns)]
    stored = tuple(w.T if t else w for w in ws)
    races = {"detect_races": not how} | how
    with interpret_mosaic_gpu(**races):
        run = functools.partial(
            gather,
            mesh,
            config=config,
            num_sms=1 + bool(how),
            transposed=t,
            keep=keep,
        )
        outs, gathered = jax.tree.map(np.asarray, jax.jit(run)(x, stored))
    if keep:
        np.testing.assert_array_equal(wide(gathered), wide(x))
    else:
        assert gathered is None
    for out, w in zip(outs, ws, strict=True):
        assert out.dtype == dtype
        assert relative_error(out, wide(x) @ wide(w)) < RELATIVE[dtype]


K_ORDER = CollectiveConfig(
    tile_m=64, tile_n=128, split="n", stages=2, buffer_bytes=1024, gather_order="k"
)
# A step brings at most 1,024 bytes of a row, and may end within a stage of the ring.
STEPS = {
    "two_steps": {"rows": 2 * 72, "columns": (128, 192), "depth": (1024,), "batch": 2},
    "steps_end_within_stages": {"rows": 2 * 67, "columns": (192,), "depth": (704,)},
    "transposed": {"rows": 32, "columns": (68, 100), "depth": (1060,), "t": True},
    "one_step": {"rows": 128, "columns": (128,), "depth": (192,), "dtype": FP16},
}


@pytest.mark.parametrize("name", first(STEPS, "steps_end_within_stages", "one_step"))
def test_gathers_in_the_order_of_k(name):
    check_gather(cpu_mesh(data=1, tensor=2), config=K_ORDER, **STEPS[name])


@pytest.mark.exhaustive  # as over two, and in the order of rows over four
@pytest.mark.parametrize("keep", [False, True])
def test_gathers_in_the_order_of_k_over_four_devices(keep):
    config = dataclasses.replace(K_ORDER, buffers=3, piece_chunks=8)
    case = {"rows": 4 * 72, "columns": (128,), "depth": (640,)}
    check_gather(cpu_mesh(data=1, tensor=4), config=config, keep=keep, **case)


@pytest.mark.parametrize("cluster", ["m", *exhaustive("n")])
def test_pairs_of_blocks_gather_in_the_order_of_k(cluster):
    config = dataclasses.replace(K_ORDER, cluster=cluster)
    case = {"rows": 144, "columns": (256,), "depth": (640,), "concurrent_blocks": True}
    check_gather(cpu_mesh(data=1, tensor=2), config=config, **case)


@pytest.mark.parametrize(
    ("name", "kind", "transfer"),
    first(
        [(name, *how) for name in CASES for how in KIND_AND_TRANSFER],
        *((name, "reduce_scatter", "pull") for name in CASES),
        *((name, *how) for name in ("several", "ragged") for how in KIND_AND_TRANSFER),
    ),
)
def test_reductions(name, kind, transfer):
    config = dataclasses.replace(SMALL, transfer=transfer)
    check_reduction(cpu_mesh(data=1, tensor=2), kind=kind, config=config, **CASES[name])


def check_reduction(
    mesh, *, kind, rows, columns, depth, batch=1, t=False, dtype=BF16, config, **how
):
    devices = mesh.shape["tensor"]
    xs, ws = [], []
    for i, k in enumerate(depth):
        xs.append(normal(i, (batch, rows, k * devices), dtype))
        w = by_device(normal(10 + i, (k * devices, columns[0]), dtype), 0, devices)
        ws.append(w)
    stored = tuple(w.T if t else w for w in ws)
    races = {"detect_races": not how} | how
    with interpret_mosaic_gpu(**races):
        run = functools.partial(
            reduce, mesh, kind=kind, config=config, num_sms=1 + bool(how), transposed=t
        )
        y = np.asarray(jax.jit(run)(tuple(xs), stored))
    want = sum(wide(x) @ wide(w) for x, w in zip(xs, ws, strict=True))
    assert y.dtype == dtype
    assert relative_error(y, want) < RELATIVE[dtype]


@pytest.mark.parametrize(
    ("kind", "transfer"), first(KIND_AND_TRANSFER, ("reduce_scatter", "push"))
)
def test_reductions_over_four_devices(kind, transfer):
    """Which of the peers holds what is plain only with more than one."""
    case = {"rows": 4 * 72, "columns": (128,), "depth": (64,), "batch": 2}
    config = dataclasses.replace(SMALL, transfer=transfer)
    check_reduction(cpu_mesh(data=1, tensor=4), kind=kind, config=config, **case)


def test_sums_that_are_as_wide_as_a_tile():
    """Then rows of the result are a line, which must end where a device's rows do."""
    config = dataclasses.replace(SMALL, tile_n=128)
    case = {"rows": 4 * 72, "columns": (128,), "depth": (64,), "batch": 2}
    mesh = cpu_mesh(data=1, tensor=4)
    check_reduction(mesh, kind="all_reduce", config=config, **case)


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_blocks_side_by_side(name, kind):
    """Depth of one stage: consumers run as far apart as they can."""
    mesh = cpu_mesh(data=1, tensor=2)
    case = {"rows": 512, "columns": (128,), "depth": (64,), "concurrent_blocks": True}
    if kind == "all_gather":
        check_gather(mesh, config=PARALLEL[name], **case)
    else:
        check_reduction(mesh, kind=kind, config=PARALLEL[name], **case)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
def test_one_axis_of_two(kind):
    case = {"batch": 2, **CASES["plain"]}
    mesh = cpu_mesh(data=2, tensor=2)
    if kind == "all_gather":
        check_gather(mesh, config=SMALL, **case)
    else:
        check_reduction(mesh, kind=kind, config=SMALL, **case)


def test_four_devices_and_two_kernels_in_one_program():
    mesh = cpu_mesh(data=1, tensor=4)
    x = by_device(normal(1, (1, 512, 64)), 1, 4)
    up, down = normal(2, (64, 256)), 0.1 * normal(3, (256, 64))

    @jax.jit
    def both(x, up, down):
        ((hidden,), _) = gather(mesh, x, (up,), config=SMALL)
        return reduce(mesh, (hidden,), (down,), kind="reduce_scatter", config=SMALL)

    with interpret_mosaic_gpu(detect_races=True) as run:
        y = np.asarray(both(x, up, down))
        assert run.kernels == 2
    hidden = wide((wide(x) @ wide(up)).astype(BF16))
    assert relative_error(y, hidden @ wide(down)) < RELATIVE[BF16]


@pytest.mark.parametrize("columns", [64, 192, 320, 4160, 8192, 12288, 28672])
@pytest.mark.parametrize("rows", [8, 24, 128])
def test_chunks_are_lines_that_fill_a_buffer(rows, columns):
    """Each element of some rows is in one of their chunks, next to those around it."""
    chunks = Chunks.of(rows, columns, BF16, 8192)
    height, width = chunks.shape
    assert height == 1 or width == columns
    assert chunks.smem_bytes(1) <= 8192 and width % 8 == 0
    seen = np.zeros((rows, columns), int)
    for index in range(chunks.count(rows)):
        row, column = (int(part.start) for part in chunks.window(jnp.int32(index)))
        seen[row : row + height, column : column + width] += 1
    assert (seen == 1).all()


def test_tiles_wider_than_half_of_the_columns():
    config = dataclasses.replace(SMALL, tile_n=128)
    case = {"rows": 256, "columns": (192,), "depth": (64,)}
    check_reduction(
        cpu_mesh(data=1, tensor=2), kind="reduce_scatter", config=config, **case
    )


@pytest.mark.parametrize("stored_transposed", [False, True])
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_tiles_of_two_products(kind, stored_transposed):
    """And a number of store buffers that does not divide the five chunks of a tile."""
    case: Any = {
        "rows": 256,
        "columns": (448,),
        "depth": (128,),
        "t": stored_transposed,
    }
    mesh = cpu_mesh(data=1, tensor=2)
    if kind == "all_gather":
        check_gather(mesh, config=WIDE, **case)
    else:
        # Of the two views of the ring for a transposed weight, the interpreter takes
        # any two stages for one: no races can be looked for.
        how: Any = {"concurrent_blocks": True} if stored_transposed else {}
        check_reduction(mesh, kind=kind, config=WIDE, **case, **how)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_one_shot(rows):
    """Every device adds up in the same order: all have the same bits."""
    mesh = cpu_mesh(data=1, tensor=4)
    x, w = normal(1, (1, rows, 256)), by_device(normal(2, (256, 128)), 0, 4)
    config = dataclasses.replace(SMALL, one_shot=True)
    run = functools.partial(reduce, mesh, kind="all_reduce", config=config, num_sms=2)
    with interpret_mosaic_gpu(detect_races=True):
        y = jax.jit(run)((x,), (w,))
        copies = [np.asarray(shard.data) for shard in y.addressable_shards]
    for copy in copies:
        np.testing.assert_array_equal(wide(copy), wide(copies[0]))
    assert relative_error(copies[0], wide(x) @ wide(w)) < RELATIVE[BF16]


def test_gathered_products_equal_those_of_the_plain_kernel_bit_for_bit():
    x, w = normal(1, (1, 256, 192)), normal(2, (192, 128))
    mesh = cpu_mesh(data=1, tensor=2)
    plain = MatmulConfig(tile_m=128, tile_n=64, stages=2, store_slots=1)
    device = dataclasses.replace(H200, num_sms=1)
    with interpret_mosaic_gpu():
        ((y,), _) = jax.jit(functools.partial(gather, mesh, config=SMALL))(x, (w,))
        want = matmul_kernel.matmul(
            x[0], w, config=plain, device=device, out_dtype=BF16
        )
        np.testing.assert_array_equal(wide(y[0]), wide(want))


def lowered(problem, config, keep=True):
    """The text of a kernel for devices that need not exist."""
    devices = problem.devices
    gathers = problem.kind == "all_gather"
    (k,), (n,) = problem.k, problem.n
    x = jax.ShapeDtypeStruct((1, problem.m, k if gathers else k * devices), BF16)
    w_shape = (k, n * devices) if gathers else (k * devices, n)
    w = jax.ShapeDtypeStruct(w_shape, BF16)

    def run(x, w):
        if gathers:
            return gather(None, x, (w,), config=config, num_sms=132, keep=keep)
        return reduce(None, (x,), (w,), kind=problem.kind, config=config, num_sms=132)

    # Raises if the kernel asks for multicast, or for too much shared memory.
    return lower_for_cuda(run, x, w, mesh={"data": 1, "tensor": devices}, kernels=1)


def problem_of(spec, devices, rows, kind=None):
    n, k = spec.local(devices)
    return CollectiveProblem(
        kind=kind or spec.kind, m=rows, n=(n,), k=(k,), devices=devices, dtype=BF16
    )


@pytest.mark.exhaustive  # tuned and heuristic choices are those of the manifest
@pytest.mark.parametrize("spec", SPECS[:2], ids=lambda spec: spec.name)
def test_every_candidate_of_the_tuner_lowers(spec):
    problem = problem_of(spec, 4, 8192)
    found = candidates(problem, H200)
    assert len(found) >= 6
    for config in found:
        lowered(problem, config)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize("columns", [64, 128, 192, 256, 320, 7168])
def test_every_candidate_fits(kind, columns):
    problem = CollectiveProblem(
        kind=kind, m=8192, n=(columns,), k=(1024,), devices=4, dtype=BF16
    )
    product = Problem(m=2048, n=columns, k=1024, dtype=BF16, out_dtype=BF16)
    for config in candidates(problem, H200):
        tiles = matmul_kernel.Tiles(problem=product, config=config)
        width = 1024 if kind == "all_gather" else config.tile_n
        chunks = Chunks.of(config.tile_m, width, BF16, config.buffer_bytes)
        need = chunks.smem_bytes(config.buffers)
        assert tiles.smem_bytes + need <= H200.smem_bytes, config


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("all_gather", {}),
        ("reduce_scatter", {}),
        ("reduce_scatter", {"transfer": "push"}),
        ("all_reduce", {}),
        ("all_reduce", {"one_shot": True}),
    ],
)
def test_addresses_of_peers_are_looked_up_on_the_device(kind, changes, monkeypatch):
    """What the host looks up stays as it is in a recorded CUDA graph."""
    looked_up = []
    real = LaunchContext.to_remote

    def to_remote(self, *args, on_host=False, **options):
        looked_up.append(on_host)
        return real(self, *args, on_host=on_host, **options)

    monkeypatch.setattr(LaunchContext, "to_remote", to_remote)
    problem = CollectiveProblem(
        kind=kind, m=1024, n=(384,), k=(320,), devices=4, dtype=BF16
    )
    lowered(problem, dataclasses.replace(SMALL, **changes))
    assert looked_up and not any(looked_up)


@pytest.mark.parametrize(
    ("kind", "m", "n", "k", "tile_n", "cluster"),
    [
        ("all_gather", 8192, 14336, 8192, 320, "m"),
        ("all_gather", 2560, 14336, 8192, 320, "m"),  # blocks pair up across devices
        ("all_gather", 8192, 2560, 8192, 256, "none"),  # links are nearly the bound
        ("reduce_scatter", 512, 8192, 8192, 256, "none"),  # a row block an owner
        ("reduce_scatter", 8192, 192, 8192, 128, "m"),
        ("reduce_scatter", 8192, 4096, 1024, 256, "none"),  # links are the bound
        ("reduce_scatter", 8192, 4096, 3584, 256, "m"),
        ("all_reduce", 8192, 14336, 8192, 256, "m"),
    ],
)
def test_what_the_heuristic_chooses(kind, m, n, k, tile_n, cluster):
    problem = CollectiveProblem(kind=kind, m=m, n=(n,), k=(k,), devices=4, dtype=BF16)
    config = heuristic(problem, H200)
    assert (config.tile_n, config.cluster) == (tile_n, cluster)


@pytest.mark.parametrize(
    ("m", "dtype", "order"),
    [
        (512, "bfloat16", "k"),
        (2048, "bfloat16", "k"),
        (2560, "bfloat16", "rows"),
        (2048, "float8_e4m3fn", "rows"),
    ],
)
def test_few_rows_come_in_the_order_of_k(m, dtype, order):
    problem = CollectiveProblem(
        kind="all_gather", m=m, n=(2560,), k=(8192,), devices=4, dtype=jnp.dtype(dtype)
    )
    assert heuristic(problem, H200).gather_order == order


@pytest.mark.parametrize(
    ("kind", "m", "k", "transfer"),
    [
        ("reduce_scatter", 2048, 2048, "push"),
        ("reduce_scatter", 8192, 1024, "push"),
        ("reduce_scatter", 8192, 2048, "pull"),
        ("all_reduce", 8192, 1024, "pull"),
    ],
)
def test_sums_that_the_links_bound_are_written_to_their_owners(kind, m, k, transfer):
    problem = CollectiveProblem(
        kind=kind, m=m, n=(8192,), k=(k,), devices=4, dtype=BF16
    )
    assert heuristic(problem, H200).transfer == transfer
    found = {config.transfer for config in candidates(problem, H200)}
    assert found == ({"pull", "push"} if kind == "reduce_scatter" else {"pull"})


@pytest.mark.parametrize("rows", [16, 512])
def test_one_shot_serves_decoding(rows):
    problem = problem_of(SPECS[1], 4, rows, "all_reduce")
    assert heuristic(problem, H200).one_shot == (rows == 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tile_n": 256, "stages": 8}, "bytes of shared memory"),
        ({"tile_m": 64, "tile_n": 128, "split": "n"}, "split='n'"),
        ({"cluster": "m"}, "3 row blocks of a device"),
        ({"tile_n": 320, "stages": 3, "kind": "all_reduce"}, "at most 256 columns"),
    ],
)
def test_configs_that_do_not_fit(changes, message):
    changes = {"kind": "reduce_scatter", **changes}
    problem = CollectiveProblem(
        kind=changes.pop("kind"), m=768, n=(256,), k=(128,), devices=2, dtype=BF16
    )
    config = dataclasses.replace(CollectiveConfig(), **changes)
    with pytest.raises(Unsupported, match=message):
        lowered(problem, config)


def test_a_gpu_without_room_for_a_cluster():
    """A kernel of no blocks left its outputs as they were."""
    problem = CollectiveProblem(
        kind="all_gather", m=154, n=(128, 192), k=(256,), devices=2, dtype=BF16
    )
    small = dataclasses.replace(H200, num_sms=1)
    assert heuristic(problem, small).cluster == "none"
    call = Call(axis_name="tensor", size=2, out_dtype=BF16)
    paired = dataclasses.replace(SMALL, cluster="m")
    with pytest.raises(Unsupported, match="clusters of 2 blocks and nvidia_h200 has 1"):
        RowLayout.of(call, paired, small, batch=1, rows=77)


def test_narrow_weights_need_a_narrow_tile():
    problem = CollectiveProblem(
        kind="all_gather", m=256, n=(64,), k=(128,), devices=2, dtype=BF16
    )
    with pytest.raises(Unsupported, match="64 columns with tile_n=256"):
        lowered(problem, CollectiveConfig())
    with pytest.raises(Unsupported, match="cluster='n'"):
        lowered(problem, dataclasses.replace(SMALL, cluster="n"))
    assert heuristic(problem, H200).tile_n == 64


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"buffers": 1}, "buffers 1, expected an integer of at least 2"),
        ({"minor": "n"}, "minor 'n', expected 'm'"),
        ({"transfer": "copy"}, "transfer 'copy', expected 'pull' or 'push'"),
        ({"buffer_bytes": 3000}, "buffer_bytes 3000, expected a power of two"),
        ({"gather_order": "n"}, "gather_order 'n', expected 'rows' or 'k'"),
        ({"piece_chunks": 0}, "piece_chunks 0, expected an integer of at least 1"),
    ],
)
def test_bad_configs(changes, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        CollectiveConfig(**changes)
