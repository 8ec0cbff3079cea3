"""A decoder layer in one launch on each of several GPUs, which add up within it."""

import pytest

from tests.pallas_kernels.collective_matmul.own_process import run_checks


pytestmark = pytest.mark.multigpu

PROGRAM = """
from pallas_kernels.decode_layer.config import Problem
from tests.pallas_kernels.decode_layer import test_decode_layer as one_device
from tests.pallas_kernels.decode_layer.test_peers import (
    begin, layer_of, local_problem, split, whole)
m, size, kind = map(int, sys.argv[1:])
problem = Problem(
    m=m, d_model=256 * size, d_ff=896 * size, features=256 * size, heads=2 * size,
    kv_heads=devices, head_dim=128, bias=size == 4,
    weights=["bfloat16", "int8", "float8_e4m3fn"][kind])
local = local_problem(problem, devices)
given = one_device.operands(problem)
stacked = split(problem, given, devices)
changes = [{"attended": given["attended"] * jnp.bfloat16(x)} for x in (1, -1, 0.5)]
inputs = jnp.stack([split(problem, given | change, devices)["attended"]
                    for change in changes], axis=1)

def on_all(fn):
    # `fn` of a layer of this device, and what its attention gives in some calls.
    def on_one(*arrays):
        given, inputs = jax.tree.map(lambda a: a[0], arrays)
        def layer(attended, workspace):
            here = given | {"attended": attended}
            *made, workspace = layer_of(local, here, workspace, device)
            return made, workspace
        return jax.tree.map(lambda a: a[None], fn(layer, inputs))
    f = jax.jit(jax.shard_map(on_one, mesh=mesh, in_specs=P("tensor"),
                              out_specs=P("tensor"), check_vma=False))
    return lambda: f(stacked, inputs)

def in_turn(layer, inputs, change=lambda i, x: x):
    workspace, found = begin(problem, device), []
    for i in range(len(changes)):
        made, workspace = layer(change(i, inputs[i]), workspace)
        found.append(made)
    return found

def same(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))

usual = on_all(in_turn)()

def values():
    for change, made in zip(changes, usual, strict=True):
        found = whole(problem, made, devices)
        one_device.check(problem, given | change, found)

def many():
    # Each other call has other inputs: what is read too early is another's.
    def f(layer, inputs):
        def turn(i, carry):
            wrong, workspace = carry
            for attended, wanted in zip(inputs, first, strict=True):
                made, workspace = layer(attended, workspace)
                wrong += sum(jnp.any(a != b) for a, b in zip(made, wanted, strict=True))
            return wrong, workspace
        first = in_turn(layer, inputs)
        return lax.fori_loop(0, 500, turn, (jnp.int32(0), begin(problem, device)))[0]
    assert not np.asarray(on_all(f)()).any()

def late():
    for slow in range(devices):
        def change(i, x):
            return busy(x, (slow + i) % devices)
        same(on_all(functools.partial(in_turn, change=change))(), usual)

def programs():
    # Two programs in turn, whose memory is that of others in between.
    one = on_all(in_turn)
    two = on_all(functools.partial(in_turn, change=lambda i, x: -x))
    inverse, found = two(), []
    for _ in range(10):
        found.append((one(), usual))
        other(jnp.zeros((devices, 8)))
        found.append((two(), inverse))
    for made, wanted in found:
        same(made, wanted)
"""


@pytest.mark.parametrize(
    ("m", "size", "kind"), [(3, 4, 0), (16, 4, 1), (16, 4, 2), (1, 16, 1), (32, 16, 0)]
)
def test_on_gpus(m, size, kind):
    run_checks(PROGRAM, m, size, kind)
