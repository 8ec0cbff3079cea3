"""Gathers without a barrier: interpreted, call after call, and lowered."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul import CollectiveConfig, mosaic_gpu_gather
from pallas_kernels.collective_matmul.communicator import Chunks
from pallas_kernels.collective_matmul.config import Call
from pallas_kernels.collective_matmul.layout import RowLayout, cut_tiles, grid
from pallas_kernels.collective_matmul.low_latency_gather import (
    low_latency_all_gather_matmul,
)
from pallas_kernels.collective_matmul.workspace import (
    ARRIVED,
    READY,
    Counters,
    make_gather_workspace,
)
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.mosaic_gpu import Columns
from pallas_kernels.mosaic import H200, unmarked
from pallas_kernels.mosaic.counters import await_counter, raise_counter
from tests.interpreter import cpu_mesh, interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
P = jax.sharding.PartitionSpec
SMALL = dataclasses.replace(H200, num_sms=2)
ROWS = CollectiveConfig(tile_m=128, tile_n=64, stages=2)
PAUSE = 2500
"""Reads of a counter, by which one that is late waits while others go on."""
IN_ORDER_OF_K = dataclasses.replace(
    ROWS, gather_order="k", buffer_bytes=1024, piece_chunks=8
)


def drawn(seed, *shape):
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values.astype(BF16))


def wide(x):
    return np.asarray(x, np.float32)


def over_devices(mesh, f, check_vma=False):
    return jax.jit(
        jax.shard_map(
            f,
            mesh=mesh,
            in_specs=(P("tensor"), P(None, "tensor")),
            out_specs=(P(None, "tensor"), P("tensor")),
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize("config", [ROWS, IN_ORDER_OF_K], ids=["rows", "k"])
@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("devices", [2, 4])
def test_calls_of_several_sizes_with_one_workspace(devices, push, config):
    rows, depth = 136, 1024 if config is IN_ORDER_OF_K else 128
    sizes = (rows, 64, 8, rows)

    def run(x, w):
        workspace = make_gather_workspace(
            rows, depth, BF16, axis_name="tensor", device=SMALL, push=push
        )
        ys = []
        for i, size in enumerate(sizes):
            y, workspace = low_latency_all_gather_matmul(
                (i + 1) * x[:size],
                w,
                workspace,
                axis_name="tensor",
                device=SMALL,
                config=config,
            )
            ys.append(y)
        return ys, (workspace.counters[None], workspace.turns[None])

    x, w = drawn(0, devices * rows, depth), drawn(1, depth, devices * 64)
    with interpret_mosaic_gpu(concurrent_blocks=True, timeout=60) as found:
        ys, (counters, turns) = over_devices(cpu_mesh(tensor=devices), run)(x, w)
        for i, (y, size) in enumerate(zip(ys, sizes, strict=True)):
            parts = wide(x).reshape(devices, rows, depth)[:, :size]
            want = (i + 1) * parts.reshape(-1, depth) @ wide(w)
            assert relative_error(y, want) < RELATIVE[BF16], i
        assert found.kernels == 1 + len(sizes)
    assert (np.asarray(turns) == len(sizes) % 2).all()
    last = (len(sizes) - 1) % 2
    counters = np.asarray(counters)
    assert (counters[:, last, READY] == devices - 1).all()
    assert not counters[:, 1 - last].any()  # for the next call


def calls_in_one_kernel(xs, w, *, form, device):
    """The results of several gathers by one kernel, in which devices drift apart.

    The interpreter lets devices begin and end a kernel together, which hardware without
    a barrier does not. Blocks of one device do meet before and after a call, as its
    kernels follow each other, and only in between are its rows in memory.
    """
    devices, (rows, depth), calls = lax.axis_size("tensor"), xs[0].shape, len(xs)
    call = Call.over("tensor", out_dtype=w.dtype)
    layout = RowLayout.of(call, ROWS, device, batch=1, rows=rows)
    tiles = cut_tiles([xs[0][None]], [w], call, ROWS)
    chunks = Chunks.of(8, depth, w.dtype, ROWS.buffer_bytes)
    plan = mosaic_gpu_gather.Plan(
        layout=layout,
        columns=Columns(tiles=tiles),
        chunks=chunks,
        scales=None,
        keep=False,
        form=form,
    )
    everyone = 3 * layout.num_blocks  # warpgroups

    def body(*refs, **scratch):
        refs = list(refs)
        sources, (w_ref, *workspace, x, met) = refs[:calls], refs[calls : -calls - 1]
        outs, gathered = refs[-calls - 1 : -1], refs[-1]
        gathered = [] if form == "push" else [gathered]

        def pause(late):
            turns = jnp.where(late, PAUSE, 0)
            lax.fori_loop(0, turns, lambda _, n: n + met[0], jnp.int32(0))

        def meet(number):
            raise_counter(met.at[pl.ds(number, 1)])  # pyright: ignore[reportCallIssue]
            await_counter(met.at[pl.ds(number, 1)], everyone)

        for i, (source, out) in enumerate(zip(sources, outs, strict=True)):
            # One device is late: its rows, or what one of its blocks moves.
            late, kind = lax.axis_index("tensor") == i % devices, i % 3
            first = (layout.block == 0) & (lax.axis_index("warpgroup") == 0)

            @pl.when(first)
            def _begin(source=source, late=late & (kind == 0)):
                pause(late)
                x[...] = source[...]

            class Late(Counters):
                def begin(self, turn, late=late & (layout.block == kind - 1)):
                    pause(late)
                    super().begin(turn)

            meet(2 * i)
            given = [x, w_ref, *workspace, out, *gathered]
            roles = mosaic_gpu_gather.Roles.of(plan, given, scratch)
            parts: Any = roles.signals
            dataclasses.replace(roles, signals=Late(*parts)).run()
            meet(2 * i + 1)

            @pl.when(first)
            def _end():
                x[...] = jnp.full(x.shape, jnp.nan, x.dtype)

    def kernel(w, *xs):
        slabs = (devices, rows, depth)
        workspace = [
            jnp.zeros((2, ARRIVED + plan.arrivals), jnp.int32),
            jnp.zeros((2, layout.num_blocks), jnp.int32),
        ]
        if form == "push":
            workspace.insert(0, jnp.full((2, *slabs), jnp.nan, w.dtype))
        workspace.append(jnp.full((1, rows, depth), jnp.nan, w.dtype))
        workspace.append(jnp.zeros(2 * calls, jnp.int32))
        out = jax.ShapeDtypeStruct((devices, rows, w.shape[1]), w.dtype)
        *outs, _ = plgpu.kernel(
            body,
            out_type=[*[out] * calls, jax.ShapeDtypeStruct(slabs, w.dtype)],
            **grid(layout, tiles[0], chunks, device),
        )(*[x[None] for x in xs], w, *map(jax.new_ref, workspace))
        return [y.reshape(-1, w.shape[1]) for y in outs]

    return unmarked(kernel)(w, *xs)


# Three pieces for one peer, so that both blocks move some; one piece for each of three,
# so that one of these gets nothing from block 0, which tells that its device is ready.
# (Two devices that push need not wait for that at the end: block 0 has a piece for the
# only peer.)
@pytest.mark.parametrize("form", ["pull", "push"])
@pytest.mark.parametrize(("devices", "rows"), [(2, 24), (4, 8)])
def test_devices_that_drift_apart(devices, rows, form):
    depth, calls = 64, 6
    xs = [drawn(i, devices * rows, depth) for i in range(calls)]
    w = drawn(100, depth, devices * 64)
    f = jax.shard_map(
        lambda xs, w: calls_in_one_kernel(xs, w, form=form, device=SMALL),
        mesh=cpu_mesh(tensor=devices),
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
        check_vma=False,
    )
    with interpret_mosaic_gpu(concurrent_blocks=True, timeout=60):
        for x, y in zip(xs, jax.jit(f)(xs, w), strict=True):
            assert relative_error(y, wide(x) @ wide(w)) < RELATIVE[BF16]


@pytest.mark.parametrize(
    ("made_for", "message"),
    [
        (
            {"rows": 128, "push": False},
            "has 4 counters, expected 6 for 1 x 144",
        ),
        ({"device": dataclasses.replace(SMALL, num_sms=4)}, "4 blocks, expected 2"),
        ({"rows": 130}, r"\(2, 2, 136, 128\), .*at least 144, 128\]"),
        ({"depth": 256}, r"\(2, 2, 144, 256\), .*at least 144, 128\]"),
        ({"batch": 2}, r"\(2, 4, 144, 128\), .*\[2, 2, at least"),
        ({"dtype": jnp.dtype(jnp.float16)}, "type float16 and .*, expected bfloat16"),
    ],
    ids=lambda case: "_".join(case) if isinstance(case, dict) else "",
)
def test_workspaces_that_do_not_fit(made_for, message):
    fitting = {"rows": 144, "depth": 128, "dtype": BF16, "device": SMALL, "push": True}

    def run(x, w):
        workspace = make_gather_workspace(axis_name="tensor", **fitting | made_for)
        options = {"axis_name": "tensor", "device": SMALL, "config": ROWS}
        y, workspace = low_latency_all_gather_matmul(x, w, workspace, **options)
        return y, workspace.counters[None]

    x, w = (jax.ShapeDtypeStruct(shape, BF16) for shape in ((288, 128), (128, 128)))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(over_devices(cpu_mesh(tensor=2), run), x, w)


def shapes_of(x, w, *, devices=2, rhs_transposed=False, mapped=None):
    """The result's shape; of rows and columns of all devices, in bfloat16."""

    def run(x, w):
        rows, depth = x.shape
        workspace = make_gather_workspace(
            rows, depth, x.dtype, axis_name="tensor", device=H200
        )
        options = {"axis_name": "tensor", "rhs_transposed": rhs_transposed}

        def call(x, w):
            y, _ = low_latency_all_gather_matmul(
                x, w, workspace, device=H200, **options
            )
            return y

        return call(x, w) if mapped is None else mapped(call, x, w)

    x, w = (jax.ShapeDtypeStruct(shape, BF16) for shape in (x, w))
    f = over_devices(cpu_mesh(tensor=devices), lambda x, w: (run(x, w), jnp.zeros(1)))
    return jax.eval_shape(f, x, w)[0].shape


def test_a_depth_of_few_divisors_has_counters():
    assert shapes_of((128, 64 * 257), (64 * 257, 256)) == (128, 256)


def test_mistakes():
    with pytest.raises(ValueError, match="as many input features"):
        shapes_of((128, 128), (256, 256))
    with pytest.raises(ValueError, match="rhs_transposed=True"):
        shapes_of((128, 128), (128, 512), rhs_transposed=True)
    with pytest.raises(Unsupported, match="has 3 devices"):
        shapes_of((192, 128), (128, 384), devices=3)

    def gradient(call, x, w):
        return jax.grad(lambda x: call(x, w).astype(jnp.float32).sum())(x)

    with pytest.raises(NotImplementedError, match="has no gradients"):
        shapes_of((128, 128), (128, 256), mapped=gradient)


@pytest.mark.parametrize("push", [False, True], ids=["pull", "push"])
@pytest.mark.parametrize("devices", [2, 4])
def test_lowered_for_cuda(devices, push):
    """No kernel but the first has a barrier, and none has semaphores to clear."""
    rows, depth = 512, 4096

    def run(x, w):
        workspace = make_gather_workspace(
            rows, depth, BF16, axis_name="tensor", device=H200, push=push
        )
        ys = []
        for _ in range(3):
            y, workspace = low_latency_all_gather_matmul(
                x, w, workspace, axis_name="tensor", device=H200
            )
            ys.append(y)
        return ys

    mapped = jax.shard_map(
        run,
        in_specs=(P("tensor"), P(None, "tensor")),
        out_specs=P(None, "tensor"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((devices * rows, depth), BF16)
    w = jax.ShapeDtypeStruct((depth, devices * 1536), BF16)
    text = lower_for_cuda(mapped, x, w, mesh={"tensor": devices}, kernels=4)
    assert text.count("skip_device_barrier = true") == 3
    assert text.count("skip_device_barrier = false") == 1
    assert not re.search(r"tensor<\d+xi32>", text)  # where semaphores would be
