"""What tests/interpreter adds to the Mosaic GPU interpreter, and that it fails."""

# The private names of jax are typed for what they take while tracing.

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests import interpreter
from tests.interpreter import RaceError, cpu_mesh, interpret_mosaic_gpu, session


P = jax.sharding.PartitionSpec
F32 = jnp.float32
SHAPE = (8, 128)
i32 = jnp.int32


def sharded(body, mesh, *, scratch, shape=SHAPE, dtype=F32, grid=(1,), **kernel):
    """``body`` as a kernel on each device of ``mesh``, rows split over all its axes."""
    spec = P(tuple(mesh.shape))

    def run(*xs):
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct(shape, dtype),
            scratch_types=scratch,
            grid=grid,
            grid_names=("g",),
            **kernel,
        )(*xs)

    return jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def values(rows, columns=128, dtype=F32, seed=0):
    return jax.random.normal(jax.random.key(seed), (rows, columns), F32).astype(dtype)


def neighbor(axis, size, step=1):
    return lax.rem(lax.axis_index(axis) + step, i32(size))


def ring_shift(x_ref, y_ref, smem, barrier, done, *, wait=True, complete=True):
    plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
    plgpu.barrier_wait(barrier)
    to = neighbor("x", 4)
    plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y_ref, to))
    plgpu.wait_smem_to_gmem(0, wait_read_only=not complete)
    pl.semaphore_signal(done, device_id=to)
    if wait:
        pl.semaphore_wait(done)


RING_SCRATCH = [plgpu.SMEM(SHAPE, F32), plgpu.Barrier(), plgpu.SemaphoreType.REGULAR]


def test_ring_shift_on_four_devices():
    x = values(32)
    with interpret_mosaic_gpu(detect_races=True) as run:
        y = np.asarray(sharded(ring_shift, cpu_mesh(x=4), scratch=RING_SCRATCH)(x))
    np.testing.assert_array_equal(y, np.roll(x, 8, axis=0))
    assert not run.races_found and run.kernels == 1


@pytest.mark.parametrize("fault", ["wait", "complete"])
def test_race_of_a_device_that_leaves_too_early(fault, capfd):
    """Without the wait, or with a signal ahead of the data, the peer still writes."""
    body = functools.partial(ring_shift, **{fault: False})
    fn = sharded(body, cpu_mesh(x=4), scratch=RING_SCRATCH)
    with interpret_mosaic_gpu(detect_races=True, allow_races=True) as run:
        fn(values(32)).block_until_ready()
        assert run.races_found
    assert "may have left the kernel" in capfd.readouterr().out
    with pytest.raises(RaceError), interpret_mosaic_gpu(detect_races=True):
        fn(values(32)).block_until_ready()


def push_all_gather(x_ref, y_ref, smem, barrier, *, wait=True):
    """Every device pushes its shard to all, counted by one semaphore for each."""
    me = lax.axis_index("x")
    arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((4,)))
    other = pl.get_global(plgpu.SemaphoreType.REGULAR)
    pl.semaphore_signal(other, 7)  # another allocation: must not be mistaken
    plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
    plgpu.barrier_wait(barrier)
    rows = pl.ds(me * 8, 8)
    plgpu.copy_smem_to_gmem(smem, y_ref.at[rows])
    for r in range(1, 4):
        peer = {"x": neighbor("x", 4, r)}
        plgpu.copy_smem_to_gmem(smem, plgpu.remote_ref(y_ref, peer).at[rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    for r in range(1, 4):
        pl.semaphore_signal(arrived.at[me], device_id={"x": neighbor("x", 4, r)})

    @pl.loop(0, 4)
    def _(source):
        @pl.when(source != me)
        def _():
            if wait:
                pl.semaphore_wait(arrived.at[source], decrement=False)
            plgpu.copy_gmem_to_smem(y_ref.at[pl.ds(source * 8, 8)], smem, barrier)
            plgpu.barrier_wait(barrier)

    pl.semaphore_wait(other, 7)


def test_push_all_gather_with_global_semaphores():
    x = values(32)
    fn = sharded(
        push_all_gather, cpu_mesh(x=4), scratch=RING_SCRATCH[:2], shape=(32, 128)
    )
    with interpret_mosaic_gpu(detect_races=True):
        y = np.asarray(fn(x)).reshape(4, 32, 128)
    for device in range(4):
        np.testing.assert_array_equal(y[device], x)


def test_missing_wait_is_a_race(capfd):
    body = functools.partial(push_all_gather, wait=False)
    fn = sharded(body, cpu_mesh(x=4), scratch=RING_SCRATCH[:2], shape=(32, 128))
    with pytest.raises(RaceError), interpret_mosaic_gpu(detect_races=True):
        fn(values(32)).block_until_ready()
    assert "RACE DETECTED" in capfd.readouterr().out


def test_remote_loads_and_stores_on_a_2d_mesh():
    """Peers named by a dict (other axes stay) and by coordinates of all axes."""

    def body(x_ref, y_ref, done):
        across = {"tp": neighbor("tp", 2)}
        loaded = plgpu.load(plgpu.remote_ref(x_ref, across))
        diagonal = (neighbor("dp", 2), neighbor("tp", 2))
        plgpu.remote_ref(y_ref, diagonal)[...] = loaded
        pl.semaphore_signal(done, 3, device_id=diagonal)
        pl.semaphore_wait(done, 3)
        pl.semaphore_signal(done, device_id=across)  # the pull from x has ended
        pl.semaphore_wait(done)

    x = values(32)
    fn = sharded(body, cpu_mesh(dp=2, tp=2), scratch=[plgpu.SemaphoreType.REGULAR])
    with interpret_mosaic_gpu(detect_races=True):
        y = np.asarray(fn(x)).reshape(2, 2, 8, 128)
    # Device (d, t) holds what device (d', t') loaded from (d', t): only dp flips.
    np.testing.assert_array_equal(y, np.flip(np.asarray(x).reshape(y.shape), axis=0))


def reduce_scatter(x_ref, y_ref, smem, barrier, *, clear=True):
    """All devices add their rows into device 0's output; predicated off elsewhere."""
    ready = pl.get_global(plgpu.SemaphoreType.REGULAR)
    done = pl.get_global(plgpu.SemaphoreType.REGULAR)
    me = lax.axis_index("x")
    smem[...] = jnp.zeros(SHAPE, F32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, y_ref)
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    for device in range(4):
        pl.semaphore_signal(ready, device_id=i32(device))
    if clear:
        pl.semaphore_wait(ready, 4)
    plgpu.copy_gmem_to_smem(x_ref, smem, barrier)
    plgpu.barrier_wait(barrier)
    target = plgpu.remote_ref(y_ref, i32(0))
    plgpu.copy_smem_to_gmem(smem, target, reduction_op="add")
    plgpu.copy_smem_to_gmem(smem, target, predicate=me > 4)  # never
    plgpu.wait_smem_to_gmem(0, wait_read_only=False)
    pl.semaphore_signal(done, device_id=i32(0))

    @pl.when(me == 0)
    def _():
        pl.semaphore_wait(done, 4)


def test_reduce_add_and_predicate():
    x = values(32)
    fn = sharded(reduce_scatter, cpu_mesh(x=4), scratch=RING_SCRATCH[:2])
    with interpret_mosaic_gpu(detect_races=True):
        y = np.asarray(fn(x)).reshape(4, 8, 128)
    np.testing.assert_allclose(
        y[0], np.asarray(x).reshape(4, 8, 128).sum(0), rtol=1e-6, atol=1e-6
    )
    assert not y[1:].any()


def test_reduction_into_what_is_not_yet_cleared_is_a_race():
    body = functools.partial(reduce_scatter, clear=False)
    fn = sharded(body, cpu_mesh(x=4), scratch=RING_SCRATCH[:2])
    with pytest.raises(RaceError), interpret_mosaic_gpu(detect_races=True):
        fn(values(32)).block_until_ready()


TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
BF16 = jnp.bfloat16


def square_matmul(compute, **options):
    """Operands of 64 x 64, and what ``compute(load, a_smem, b_smem, o_ref)`` makes."""

    def body(a_ref, b_ref, o_ref, a_smem, b_smem, barrier):
        def load():
            plgpu.copy_gmem_to_smem(a_ref, a_smem, barrier)
            plgpu.copy_gmem_to_smem(b_ref, b_smem, barrier)
            plgpu.barrier_wait(barrier)

        compute(load, a_smem, b_smem, o_ref)

    a, b = values(64, 64, BF16), values(64, 64, BF16, seed=1)
    tile = plgpu.SMEM((64, 64), BF16, transforms=TILED)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[tile, tile, plgpu.Barrier(num_arrivals=2)],
    )
    with interpret_mosaic_gpu(detect_races=True, **options) as run:
        out = np.asarray(kernel(a, b))
    return np.asarray(a, np.float32), np.asarray(b, np.float32), out, run


def test_wgmma_with_registers():
    def compute(load, a_smem, b_smem, o_ref):
        load()
        a = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA)

        def scope(acc):
            plgpu.wgmma(acc, a * jnp.bfloat16(2), b_smem)
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))

    a, b, out, _ = square_matmul(compute)
    np.testing.assert_allclose(out, 3 * (a @ b), rtol=1e-5, atol=1e-4)


def test_two_views_of_the_same_bytes():
    """TMA from any row into an untiled view, wgmma from the tiled view."""
    swizzled = (plgpu.SwizzleTransform(128),)

    def body(a_ref, b_ref, o_ref, a_smem, views, barrier):
        tiled, untiled = views
        plgpu.copy_gmem_to_smem(a_ref, a_smem, barrier)
        for c in range(2):
            source = b_ref.at[pl.ds(5, 64), pl.ds(64 * c, 64)]
            plgpu.copy_gmem_to_smem(source, untiled.at[c], barrier)
        plgpu.barrier_wait(barrier)

        def scope(acc):
            for c in range(2):
                plgpu.wgmma(acc, a_smem.at[:, pl.ds(64 * c, 64)], tiled.at[c].T)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))

    a, b = values(64, 128, BF16), values(80, 128, BF16, seed=1)
    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), F32),
        scratch_types=[
            plgpu.SMEM((64, 128), BF16, transforms=TILED),
            plgpu.RefUnion(
                plgpu.SMEM((2, 64, 64), BF16, transforms=TILED),
                plgpu.SMEM((2, 64, 64), BF16, transforms=swizzled),
            ),
            plgpu.Barrier(num_arrivals=3),
        ],
    )
    with interpret_mosaic_gpu(detect_races=True):
        out = np.asarray(kernel(a, b))
    want = np.asarray(a, np.float32) @ np.asarray(b, np.float32)[5:69].T
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-4)


def test_views_of_other_bytes_stay_apart():
    """128 columns in tiles of 64 are not rows of 128: stock behavior, an error."""

    def body(x_ref, o_ref, views):
        tiled, rows = views
        rows[...] = x_ref[...]
        o_ref[...] = tiled[...]

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 128), BF16),
        scratch_types=[
            plgpu.RefUnion(
                plgpu.SMEM((64, 128), BF16, transforms=TILED),
                plgpu.SMEM((64, 128), BF16),
            )
        ],
    )
    with (
        pytest.raises(ValueError, match="alias group"),
        interpret_mosaic_gpu(detect_races=True),
    ):
        kernel(values(64, 128, BF16)).block_until_ready()


@pytest.mark.parametrize("how", ["run_state", "store"])
def test_accumulator_that_starts_with_a_value(how):
    def compute(load, a_smem, b_smem, o_ref):
        load()
        start = plgpu.load(a_smem, layout=plgpu.Layout.WGMMA).astype(F32)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)

        def stored(acc):
            acc[...] = start
            multiply(acc)
            return acc[...]

        if how == "run_state":
            o_ref[...] = pl.run_state(multiply)(plgpu.ACC.init(start))
        else:
            o_ref[...] = pl.run_scoped(stored, plgpu.ACC((64, 64), F32))

    a, b, out, _ = square_matmul(compute)
    np.testing.assert_allclose(out, a + a @ b, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("waits", [True, False])
def test_reusing_an_operand_before_wgmma_wait_is_a_race(waits):
    def compute(load, a_smem, b_smem, o_ref):
        def scope(acc):
            load()
            plgpu.wgmma(acc, a_smem, b_smem)
            if waits:
                plgpu.wgmma_wait(0)
            load()
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        o_ref[...] = pl.run_scoped(scope, plgpu.ACC((64, 64), F32))

    *_, run = square_matmul(compute, allow_races=True)
    assert run.races_found != waits


def test_inline_stand_in():
    """A gather of rows through inline_mgpu, as kernels do with cp.async."""
    scale = 3

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()),
    )
    def gather_rows(ctx, x, rows, smem):
        raise AssertionError(f"never traced here {scale}")

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), i32, layout=plgpu.Layout.WG_SPLAT),
    )
    def plus_one(ctx, value):
        raise AssertionError("never traced here")

    def body(x_ref, rows_ref, o_ref, smem):
        first = plus_one(i32(3))  # 4
        gather_rows(x_ref.at[:, pl.ds(0, 128)], rows_ref, smem.at[0])
        plgpu.commit_smem()
        o_ref[...] = smem[0] + first.astype(F32)

    def numpy_gather(x, rows, smem, closure):
        smem[...] = x[rows] * closure["scale"]

    x, rows = values(16, 256), jnp.array([3, 1, 15, 0, 0, 9, 2, 7], i32)
    call = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(SHAPE, F32),
        scratch_types=[plgpu.SMEM((1, *SHAPE), F32)],
    )
    with pytest.raises(NotImplementedError, match="plus_one"), interpret_mosaic_gpu():
        np.asarray(call(x, rows))
    interpreter.register_inline("gather_rows", numpy_gather, writes=(2,))
    interpreter.register_inline("plus_one", lambda value: value + 1)
    try:
        with pytest.raises(ValueError, match="already stands for"):
            interpreter.register_inline("plus_one", abs)
        with interpret_mosaic_gpu(detect_races=True):
            out = np.asarray(call(x, rows))
    finally:
        interpreter.unregister_inline("gather_rows")
        interpreter.unregister_inline("plus_one")
    np.testing.assert_allclose(
        out, 3 * np.asarray(x)[np.asarray(rows), :128] + 4, rtol=1e-6
    )


def consumer_before_producer(x_ref, y_ref, *, signal=True, order=True):
    """Block 0 waits for block 1, which a grid run in order can never satisfy."""
    ready = pl.get_global(plgpu.SemaphoreType.REGULAR)
    block = lax.axis_index("g")

    @pl.when(block == 0)
    def _():
        if order:
            pl.semaphore_wait(ready)
        y_ref[8:] = y_ref[:8] + 1

    @pl.when(block == 1)
    def _():
        y_ref[:8] = x_ref[...]
        if signal:
            pl.semaphore_signal(ready)


def test_blocks_that_wait_for_later_blocks():
    x = values(8)
    fn = sharded(
        consumer_before_producer, cpu_mesh(x=1), scratch=[], shape=(16, 128), grid=(2,)
    )
    with interpret_mosaic_gpu(detect_races=True, concurrent_blocks=True):
        y = np.asarray(fn(x))
    np.testing.assert_array_equal(y, np.concatenate([x, x + 1]))
    with (
        pytest.raises(TimeoutError, match=r"semaphore_wait at .*test_interpreter"),
        interpret_mosaic_gpu(timeout=1),
    ):
        fn(x).block_until_ready()


def test_more_blocks_than_cores():
    """Eighty warpgroups wait at once; no thread of XLA is held up by them."""

    def body(x_ref, y_ref):
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR)
        block, device = lax.axis_index("g"), lax.axis_index("x")
        pl.semaphore_signal(ready, device_id={"x": 1 - device})
        pl.semaphore_wait(ready, 40, decrement=False)
        y_ref[block] = x_ref[block] * 2

    x = values(80)
    fn = sharded(body, cpu_mesh(x=2), scratch=[], grid=(40,), shape=(40, 128))
    with interpret_mosaic_gpu(concurrent_blocks=True):
        np.testing.assert_array_equal(np.asarray(fn(x)), 2 * np.asarray(x))


def ring_step(x):
    return plgpu.kernel(
        ring_shift,
        out_type=jax.typeof(x),
        scratch_types=RING_SCRATCH,
    )(x)


def test_replication_is_checked():
    """Under ``check_vma=True``, which ``jax.shard_map`` sets by default."""
    x, mesh = values(32), cpu_mesh(x=4)
    step = jax.shard_map(
        lambda x: lax.psum(ring_step(x), "x"),
        mesh=mesh, in_specs=P("x"), out_specs=P(),
    )  # fmt: skip
    with interpret_mosaic_gpu():
        y = np.asarray(jax.jit(step)(x))
    np.testing.assert_allclose(y, np.asarray(x).reshape(4, 8, 128).sum(0), rtol=1e-5)


def test_a_kernel_under_checkpoint():
    @jax.custom_vjp
    def tripled(x):
        return triple(x)

    def triple(x):
        def body(x_ref, y_ref):
            y_ref[...] = x_ref[...] * 3

        return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(SHAPE, F32))(x)

    tripled.defvjp(lambda x: (triple(x), None), lambda _, g: (triple(g),))
    x = values(8)

    def loss(x):
        return jnp.sum(jax.checkpoint(lambda x: jnp.sin(tripled(x)))(x))

    with interpret_mosaic_gpu() as run:
        value, grad = jax.tree.map(np.asarray, jax.jit(jax.value_and_grad(loss))(x))
    np.testing.assert_allclose(value, np.sin(3 * np.asarray(x)).sum(), rtol=1e-5)
    np.testing.assert_allclose(grad, 3 * np.cos(3 * np.asarray(x)), rtol=1e-5)
    assert run.kernels == 2  # what has an effect is kept, so not computed again


def test_race_between_blocks():
    body = functools.partial(consumer_before_producer, order=False)
    fn = sharded(body, cpu_mesh(x=1), scratch=[], shape=(16, 128), grid=(2,))
    with (
        pytest.raises(RaceError),
        interpret_mosaic_gpu(detect_races=True, concurrent_blocks=True),
    ):
        fn(values(8)).block_until_ready()


def test_grid_points_in_order_give_no_false_races():
    def body(x_ref, y_ref, smem, barrier):
        rows = pl.ds(lax.axis_index("g") * 8, 8)
        plgpu.copy_gmem_to_smem(x_ref.at[rows], smem, barrier)
        plgpu.barrier_wait(barrier)
        plgpu.copy_smem_to_gmem(smem, y_ref.at[rows])
        plgpu.wait_smem_to_gmem(0)

    x = values(32)
    fn = sharded(
        body, cpu_mesh(x=1), scratch=RING_SCRATCH[:2], shape=(32, 128), grid=(4,)
    )
    with interpret_mosaic_gpu(detect_races=True):
        np.testing.assert_array_equal(np.asarray(fn(x)), x)


def test_copies_begin_at_multiples_of_16_bytes():
    """Along the last axis, where a GPU stops the kernel."""

    def copy(first, x):
        def body(x_ref, y_ref, smem, barrier):
            plgpu.copy_gmem_to_smem(x_ref.at[:, pl.ds(first, 4)], smem, barrier)
            plgpu.barrier_wait(barrier)
            y_ref[...] = smem[...]

        scratch = [plgpu.SMEM((8, 4), F32), plgpu.Barrier()]
        out_type = jax.ShapeDtypeStruct((8, 4), F32)
        return np.asarray(
            jax.jit(plgpu.kernel(body, out_type=out_type, scratch_types=scratch))(x)
        )

    x = values(8)
    with interpret_mosaic_gpu():
        np.testing.assert_array_equal(copy(4, x), x[:, 4:8])
    with (
        pytest.raises(IndexError, match="copy from element 5 of the last axis"),
        interpret_mosaic_gpu(),
    ):
        copy(5, x)


def test_deadlock_on_a_semaphore_ends(capfd):
    def body(x_ref, y_ref, done):
        @pl.when(lax.axis_index("x") != 2)
        def _():
            pl.semaphore_signal(done, device_id=neighbor("x", 4))

        pl.semaphore_wait(done)
        y_ref[...] = x_ref[...]

    fn = sharded(body, cpu_mesh(x=4), scratch=[plgpu.SemaphoreType.REGULAR])
    with (
        pytest.raises(TimeoutError, match=r"waited 1 s for 1, .* stands at 0"),
        interpret_mosaic_gpu(timeout=1),
    ):
        fn(values(32)).block_until_ready()


def test_deadlock_on_a_barrier_ends_and_the_next_kernel_runs():
    def body(x_ref, y_ref, barrier):
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        y_ref[...] = x_ref[...]

    def kernel(arrivals):
        return sharded(
            body, cpu_mesh(x=2), scratch=[plgpu.Barrier(num_arrivals=arrivals)]
        )

    x = values(16)
    with (
        pytest.raises(TimeoutError, match="1 of 2 arrivals came"),
        interpret_mosaic_gpu(timeout=1),
    ):
        kernel(2)(x).block_until_ready()
    with interpret_mosaic_gpu():
        np.testing.assert_array_equal(np.asarray(kernel(1)(x)), x)


def test_patches_are_removed():
    before = {place: getattr(*place) for place in session.EXPECTED}
    with interpret_mosaic_gpu():
        assert session.stock.JaxprInterpreter is session.Interpreter
    assert before == {place: getattr(*place) for place in session.EXPECTED}
    assert session.stock.JaxprInterpreter is not session.Interpreter


def test_other_versions_are_refused(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(jax, "__version__", "0.12.0")
        with (
            pytest.raises(RuntimeError, match=r"0\.12\.0, expected 0\.11\.2; .* adapt"),
            interpret_mosaic_gpu(),
        ):
            pass
    with monkeypatch.context() as patch:
        patch.setattr(session.stock, "resolve_ref", lambda aval, key: None)
        with pytest.raises(RuntimeError, match=r"resolve_ref takes \(aval key\)"):
            interpreter.check_jax()
    with monkeypatch.context() as patch:
        patch.delattr(session.callbacks, "cluster_finished")
        with pytest.raises(RuntimeError, match="cluster_finished is gone"):
            interpreter.check_jax()


def test_multicast_is_refused():
    def body(x_ref, y_ref):
        plgpu.multicast_ref(y_ref, "x")[...] = x_ref[...]

    with (
        pytest.raises(NotImplementedError, match="multicast"),
        interpret_mosaic_gpu(),
    ):
        sharded(body, cpu_mesh(x=2), scratch=[])(values(16))
