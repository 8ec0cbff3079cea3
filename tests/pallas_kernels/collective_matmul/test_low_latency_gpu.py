"""The all-reduce without a barrier on several GPUs, in processes that end."""

import os
import subprocess
import sys

import jax
import pytest


pytestmark = pytest.mark.multigpu

PROGRAM = """
import functools, sys, jax, jax.numpy as jnp, numpy as np
from jax import lax
from pallas_kernels.collective_matmul.all_reduce import (
    low_latency_all_reduce, make_workspace)
from pallas_kernels.mosaic import DeviceSpec
P = jax.sharding.PartitionSpec
rows, columns = map(int, sys.argv[1:3])
devices = max(n for n in (2, 4, 8) if n <= len(jax.devices()))
mesh = jax.make_mesh((devices,), ("tensor",), (jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:devices])
device = DeviceSpec.current()
reduce = functools.partial(low_latency_all_reduce, axis_name="tensor")
start = functools.partial(make_workspace, axis_name="tensor", device=device)

def everywhere(f):
    def local(y):
        return jax.tree.map(lambda a: a[None], f(y[0]))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tensor"),
                                 out_specs=P("tensor"), check_vma=False))

def drawn(dtype, seed=0):
    values = np.random.default_rng(seed).normal(size=(devices, rows, columns))
    return jnp.asarray(values.astype(np.float32)).astype(dtype)

def wanted(y):
    wide = np.asarray(y.astype(jnp.float32))
    return functools.reduce(np.add, wide).astype(y.dtype)

def busy(y, late):
    big = jnp.zeros((2048, 2048), y.dtype)
    work = lambda: lax.fori_loop(0, 20, lambda _, a: a @ a, big)[0, 0]
    return y + lax.cond(lax.axis_index("tensor") == late, work, lambda: big[0, 0])

def values():
    for dtype in (jnp.bfloat16, jnp.float16):
        f = everywhere(lambda y: reduce(y, start(y.size, y.dtype))[0])
        for seed in range(5):
            y = drawn(dtype, seed)
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
        assert not np.asarray(f(drawn(jnp.bfloat16, seed))).any()

def late():
    for slow in range(devices):
        def f(y):
            workspace, sums = start(y.size, y.dtype), []
            for i in range(6):
                total, workspace = reduce(busy(y + i, (slow + i) % devices), workspace)
                sums.append(total)
            return sums
        y = drawn(jnp.bfloat16)
        for i, copies in enumerate(everywhere(f)(y)):
            for copy in np.asarray(copies):
                assert (copy == wanted(y + i)).all(), (slow, i)

def programs():
    # Two programs in turn, whose memory is that of others in between.
    one = everywhere(lambda y: reduce(y, start(y.size, y.dtype))[0])
    two = everywhere(lambda y: reduce(-y, start(4 * y.size, y.dtype))[0])
    other = everywhere(lambda y: jnp.full((4, 1024, 1024), jnp.nan) + y[0, 0])
    y = drawn(jnp.bfloat16)
    outputs = []
    for _ in range(30):
        outputs.append((1, one(y)))
        other(y)
        outputs.append((-1, two(y)))
    for sign, copies in outputs:
        assert (np.asarray(copies) == sign * wanted(y)).all()

for check in (values, many, late, programs):
    check()
    print("done:", check.__name__, flush=True)
"""


@pytest.mark.parametrize(("rows", "columns"), [(1, 64), (16, 4096), (64, 8192)])
def test_on_gpus(rows, columns):
    """In a process of its own, which a deadlock would not let end."""
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(rows), str(columns)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
