"""Gathers without a barrier on several GPUs, in processes that end."""

import os
import subprocess
import sys

import jax
import pytest


pytestmark = pytest.mark.multigpu

PROGRAM = """
import functools, sys, jax, jax.numpy as jnp, numpy as np
from jax import lax
from pallas_kernels.collective_matmul import all_gather_matmul
from pallas_kernels.collective_matmul.low_latency_gather import (
    low_latency_all_gather_matmul)
from pallas_kernels.collective_matmul.workspace import make_gather_workspace
from pallas_kernels.mosaic import DeviceSpec
P = jax.sharding.PartitionSpec
rows, depth, columns, push = map(int, sys.argv[1:5])
checks = sys.argv[5:]
devices = max(n for n in (2, 4, 8) if n <= len(jax.devices()))
mesh = jax.make_mesh((devices,), ("tensor",), (jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:devices])
device = DeviceSpec.current()
gather = functools.partial(
    low_latency_all_gather_matmul, axis_name="tensor", device=device)
barrier = functools.partial(
    all_gather_matmul, axis_name="tensor", implementation="mosaic_gpu")
start = lambda: make_gather_workspace(
    rows, depth, jnp.bfloat16, axis_name="tensor", device=device, push=bool(push))

def everywhere(f):
    def local(*operands):
        return jax.tree.map(lambda a: a[None], f(*(a[0] for a in operands)))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tensor"),
                                 out_specs=P("tensor"), check_vma=False))

def drawn(shape, seed=0):
    values = np.random.default_rng(seed).normal(size=(devices, *shape))
    return jnp.asarray(values.astype(np.float32)).astype(jnp.bfloat16)

x, w = drawn((rows, depth)), drawn((depth, columns), 1)

def busy(x, late):
    big = jnp.zeros((2048, 2048), x.dtype)
    work = lambda: lax.fori_loop(0, 20, lambda _, a: a @ a, big)[0, 0]
    return x + lax.cond(lax.axis_index("tensor") == late, work, lambda: big[0, 0])

def values():
    one = everywhere(lambda x, w: (gather(x, w, start())[0], barrier(x, w)))
    for seed in range(3):
        got, want = one(drawn((rows, depth), seed), w)
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
    other = everywhere(lambda x, w: jnp.full((4, 1024, 1024), jnp.nan) + x[0, 0])
    want = np.asarray(everywhere(barrier)(x, w))
    few = np.asarray(everywhere(lambda x, w: barrier(-x[:8], w))(x, w))
    outputs = []
    for _ in range(20):
        outputs.append((one(x, w), want))
        other(x, w)
        outputs.append((two(x, w), few))
    for got, want in outputs:
        assert (np.asarray(got) == want).all()

for check in checks:
    globals()[check]()
    print("done:", check, flush=True)
"""

CHECKS = ("values", "many", "late", "programs")


@pytest.mark.parametrize("push", [0, 1], ids=["pull", "push"])
@pytest.mark.parametrize(("rows", "depth"), [(64, 1024), (512, 4096)])
def test_on_gpus(rows, depth, push):
    """In a process of its own, which a deadlock would not let end."""
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs")
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    sizes = [str(size) for size in (rows, depth, 1536, push)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *sizes, *CHECKS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
