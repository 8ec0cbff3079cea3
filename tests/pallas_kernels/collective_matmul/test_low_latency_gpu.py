"""The all-reduce without a barrier on several GPUs."""

import pytest

from tests.pallas_kernels.collective_matmul.own_process import run_checks


pytestmark = pytest.mark.multigpu

PROGRAM = """
from pallas_kernels.collective_matmul import (
    low_latency_all_reduce, make_all_reduce_workspace)
rows, columns = map(int, sys.argv[1:])
reduce = functools.partial(low_latency_all_reduce, axis_name="tensor")
start = functools.partial(
    make_all_reduce_workspace, axis_name="tensor", device=device)

def wanted(y):
    wide = np.asarray(y.astype(jnp.float32))
    return functools.reduce(np.add, wide).astype(y.dtype)

def values():
    for dtype in (jnp.bfloat16, jnp.float16):
        f = everywhere(lambda y: reduce(y, start(y.size, y.dtype))[0])
        for seed in range(5):
            y = drawn((rows, columns), dtype, seed)
            for copy in np.asarray(f(y)):
                assert (copy == wanted(y)).all(), (dtype, seed)

def many():
    # Of changing sign and size: what is read too early is what was there before.
    def f(y):
        want = lax.psum(y.astype(jnp.float32), "tensor")
        def turn(i, carry):
            wrong, workspace = carry
            sign = jnp.where(i % 3 == 0, 1, -1).astype(y.dtype)
            total, workspace = reduce(sign * y, workspace)
            first, workspace = reduce(-sign * y[:1, :8], workspace)
            limit = 0.02 * jnp.abs(want) + 0.02
            off = jnp.abs(total - sign * want) > limit
            off_first = jnp.abs(first + sign * want[:1, :8]) > limit[:1, :8]
            return wrong + jnp.any(off) + jnp.any(off_first), workspace
        return lax.fori_loop(0, 2000, turn, (jnp.int32(0), start(y.size, y.dtype)))[0]
    f = everywhere(f)
    for seed in range(3):
        assert not np.asarray(f(drawn((rows, columns), seed=seed))).any()

def late():
    for slow in range(devices):
        def f(y):
            workspace, sums = start(y.size, y.dtype), []
            for i in range(6):
                total, workspace = reduce(busy(y + i, (slow + i) % devices), workspace)
                sums.append(total)
            return sums
        y = drawn((rows, columns))
        for i, copies in enumerate(everywhere(f)(y)):
            for copy in np.asarray(copies):
                assert (copy == wanted(y + i)).all(), (slow, i)

def programs():
    # Two programs in turn, whose memory is that of others in between.
    one = everywhere(lambda y: reduce(y, start(y.size, y.dtype))[0])
    two = everywhere(lambda y: reduce(-y, start(4 * y.size, y.dtype))[0])
    y = drawn((rows, columns))
    outputs = []
    for _ in range(30):
        outputs.append((1, one(y)))
        other(y)
        outputs.append((-1, two(y)))
    for sign, copies in outputs:
        assert (np.asarray(copies) == sign * wanted(y)).all()
"""


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (16, 4096), (64, 8192)])
def test_on_gpus(rows, columns):
    run_checks(PROGRAM, rows, columns)
