"""Checks of kernels without a barrier on several GPUs, in processes that end."""

import os
import subprocess
import sys

import jax
import pytest


BEGIN = """
import functools, sys, jax, jax.numpy as jnp, numpy as np
from jax import lax
from pallas_kernels.mosaic import DeviceSpec
P = jax.sharding.PartitionSpec
devices = max(n for n in (2, 4, 8) if n <= len(jax.devices()))
mesh = jax.make_mesh((devices,), ("tensor",), (jax.sharding.AxisType.Auto,),
                     devices=jax.devices()[:devices])
device = DeviceSpec.current()

def everywhere(f):
    def local(*operands):
        return jax.tree.map(lambda a: a[None], f(*(a[0] for a in operands)))
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("tensor"),
                                 out_specs=P("tensor"), check_vma=False))

def drawn(shape, dtype=jnp.bfloat16, seed=0):
    values = np.random.default_rng(seed).normal(size=(devices, *shape))
    return jnp.asarray(values.astype(np.float32)).astype(dtype)

def busy(x, late):
    big = jnp.zeros((2048, 2048), x.dtype)
    work = lambda: lax.fori_loop(0, 20, lambda _, a: a @ a, big)[0, 0]
    return x + lax.cond(lax.axis_index("tensor") == late, work, lambda: big[0, 0])

other = everywhere(lambda x: jnp.full((4, 1024, 1024), jnp.nan) + x.ravel()[0])
"""
"""What the checks have in common; memory that `other` takes is that of none of them."""

END = """
for check in (values, many, late, programs):
    check()
    print("done:", check.__name__, flush=True)
"""


def run_checks(program: str, *arguments: int) -> None:
    """Runs checks in a process of their own, which a deadlock would not let end.

    Args:
        program: Defines functions ``values``, ``many``, ``late`` and ``programs``.
        arguments: What it finds in ``sys.argv``.
    """
    if len(jax.devices()) < 2:
        pytest.skip("needs 2 GPUs")
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + program + END, *map(str, arguments)],
        env=os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
