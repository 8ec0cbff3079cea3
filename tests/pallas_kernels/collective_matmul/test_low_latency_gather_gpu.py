"""Gathers without a barrier on several GPUs."""

import pytest

from tests.pallas_kernels.collective_matmul.own_process import run_checks


pytestmark = pytest.mark.multigpu

PROGRAM = """
from pallas_kernels.collective_matmul import (
    all_gather_matmul, low_latency_all_gather_matmul, make_gather_workspace)
rows, depth, columns, push = map(int, sys.argv[1:])
gather = functools.partial(
    low_latency_all_gather_matmul, axis_name="tensor", device=device)
barrier = functools.partial(
    all_gather_matmul, axis_name="tensor", implementation="mosaic_gpu")
start = lambda: make_gather_workspace(
    rows, depth, jnp.bfloat16, axis_name="tensor", device=device, push=bool(push))
x, w = drawn((rows, depth)), drawn((depth, columns), seed=1)

def values():
    one = everywhere(lambda x, w: (gather(x, w, start())[0], barrier(x, w)))
    for seed in range(3):
        got, want = one(drawn((rows, depth), seed=seed), w)
        assert (np.asarray(got) == np.asarray(want)).all(), seed
    wide = np.asarray(x.astype(jnp.float32)).reshape(-1, depth)[::7]
    for d in range(devices):
        want = wide @ np.asarray(w[d].astype(jnp.float32))
        got = np.asarray(one(x, w)[0][d].astype(jnp.float32))[::7]
        assert np.abs(got - want).max() < 0.01 * np.abs(want).max()

def many():
    # Powers of two, by which results are scaled exactly: what is read too early is
    # what was there before. And fewer rows in between.
    def f(x, w):
        want, few = barrier(x, w), barrier(x[:8], w)
        def turn(i, carry):
            wrong, workspace = carry
            scale = jnp.where(i % 3 == 0, -2, 0.5 + (i % 2)).astype(x.dtype)
            scale = jnp.where(scale == 1.5, 1, scale)
            y, workspace = gather(scale * x, w, workspace)
            z, workspace = gather(-scale * x[:8], w, workspace)
            wrong += jnp.any(y != scale * want) + 1000 * jnp.any(z != -scale * few)
            return wrong, workspace
        return lax.fori_loop(0, 500, turn, (jnp.int32(0), start()))[0]
    f = everywhere(f)
    for _ in range(3):
        found = np.asarray(f(x, w))
        assert not found.any(), found

def late():
    def f(x, w):
        workspace, wrong, want = start(), jnp.int32(0), barrier(x, w)
        for i in range(8):
            y, workspace = gather(
                busy(2 ** (i % 3) * x, i // 2 % devices), w, workspace)
            wrong += jnp.any(y != 2 ** (i % 3) * want)
        return wrong
    found = np.asarray(everywhere(f)(x, w))
    assert not found.any(), found

def programs():
    # Two programs in turn, whose memory is that of others in between.
    one = everywhere(lambda x, w: gather(x, w, start())[0])
    two = everywhere(lambda x, w: gather(-x[:8], w, start())[0])
    want = np.asarray(everywhere(barrier)(x, w))
    few = np.asarray(everywhere(lambda x, w: barrier(-x[:8], w))(x, w))
    outputs = []
    for _ in range(20):
        outputs.append((one(x, w), want))
        other(x)
        outputs.append((two(x, w), few))
    for got, want in outputs:
        assert (np.asarray(got) == want).all()
"""


@pytest.mark.parametrize("push", [0, 1], ids=["pull", "push"])
@pytest.mark.parametrize(("rows", "depth"), [(64, 1024), (512, 4096)])
def test_on_gpus(rows, depth, push):
    run_checks(PROGRAM, rows, depth, 1536, push)
