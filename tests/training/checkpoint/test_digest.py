"""Digests against numpy: every layout, every changed bit, and replicas that differ."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models.stack_layout import StackLayout
from jaxscale.sharding import make_mesh
from jaxscale.training import ReplicasDiffer, check_replicas
from jaxscale.training.checkpoint import digest as digest_module
from jaxscale.training.checkpoint.digest import digests


def mix(x):
    for _ in range(2):
        x = ((x ^ (x >> 16)) * 0x45D9F3B) % 2**32
    return x ^ (x >> 16)


def reference(x):
    """The digest by the formula, in Python's integers."""
    x = np.ascontiguousarray(x)
    bits = x.view(f"uint{8 * x.dtype.itemsize}").ravel()
    first = second = 0
    for i, word in enumerate(bits.tolist()):
        a = mix(word ^ mix(i))
        first, second = first + a, second + a * (mix(i) | 1)
    return f"{first % 2**32:08x}{second % 2**32:08x}"


def digest(x, layers=None):
    found = digests({"x": x}, layers and {"x": layers})["x"]
    assert found.odd == ()
    return found.value


def values(shape, dtype="float32", seed=0):
    x = np.random.default_rng(seed).standard_normal(shape) * 100
    return np.asarray(x, np.float32).astype(dtype)


def broken_on(x, device_id):
    """`x` with one element in the memory of one device a little off.

    By more than its last bit, which the rounding of an update may take away.
    """
    shards = []
    for shard in x.addressable_shards:
        piece = np.array(shard.data)
        if shard.device.id == device_id:
            piece.ravel()[-1] *= 1.001
        shards.append(jax.device_put(piece, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "float8_e4m3fn"]
)
def test_formula(dtype):
    x = values((3, 5), dtype)
    assert digest(x) == reference(x) == digest(jnp.asarray(x))


def test_keys_and_scalars_and_nothing():
    key = jax.random.key(3)
    assert digest(key) == reference(np.asarray(jax.random.key_data(key)))
    assert digest(jnp.int32(-7)) == reference(np.array([-7], np.int32))
    assert digest(jnp.zeros((0, 3))) == 16 * "0"


COLLECTIVE = re.compile(r" (all-|reduce-scatter|collective-)\S*\(")


@pytest.mark.parametrize(
    "spec",
    [(), ("fsdp", "tensor"), (None, ("data", "tensor")), ("tensor", None, "fsdp")],
    ids=str,
)
@pytest.mark.parametrize("kind", ["device", "pinned_host"])
def test_the_same_on_every_mesh(mesh, spec, kind):
    x = values((4, 8, 2))
    place = NamedSharding(mesh, PartitionSpec(*spec), memory_kind=kind)
    placed = jax.device_put(x, place)
    assert digest(placed) == reference(x)
    program = digest_module._summing(place, x.shape, None).lower(placed)
    assert not COLLECTIVE.search(program.compile().as_text())


def test_what_devices_exchange(mesh):
    place = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    parts = [jax.ShapeDtypeStruct((8, 2), jnp.uint32, sharding=place)] * 3
    program = digest_module._gathering(mesh).lower(*parts).compile().as_text()
    (found,) = (line for line in program.splitlines() if COLLECTIVE.search(line))
    assert re.search(r"= u32\[[38,12]+\]\S* all-gather\(", found)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 1), (3, 1)])
def test_layers_of_a_pipeline_are_those_of_the_plain_stack(mesh, stages, chunks):
    x = values((6, 2, 4), "bfloat16")
    layout = StackLayout(num_layers=6, stages=stages, chunks=chunks)
    placed = np.array(layout.arrange_array(jnp.asarray(x)))
    assert layout.is_even == (placed.size == x.size)
    assert digest(placed, 6) == reference(x)
    spec = [None, "fsdp" if stages % 2 == 0 else None, None, None, ("data", "tensor")]
    place = NamedSharding(mesh, PartitionSpec(*spec))
    assert digest(jax.device_put(placed, place), 6) == reference(x)
    if not layout.is_even:  # also what is nobody's layer must be what was saved
        placed[tuple(np.argwhere(layout.places < 0)[0])][1, 2] = 1
        assert digest(placed, 6) != reference(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_every_changed_bit_is_seen(dtype):
    x = values((2, 3), dtype)
    changed = {}
    for byte in range(x.nbytes):
        for bit in range(8):
            raw = bytearray(x.tobytes())
            raw[byte] ^= 1 << bit
            changed[f"{byte} {bit}"] = np.frombuffer(raw, x.dtype).reshape(x.shape)
    found = {d.value for d in digests(changed).values()}
    assert len(found) == 8 * x.nbytes and reference(x) not in found


def test_changes_that_a_sum_of_bits_would_not_see():
    x = values((4, 4))
    variants = {"as it was": x, "transposed": x.T, "signs": x.copy(), "rows": x[::-1]}
    variants["signs"][[0, 2], [1, 3]] *= -1
    assert len({d.value for d in digests(variants).values()}) == 4


def test_replicas_that_differ_are_named(mesh):
    """Split over fsdp, so that four devices have the same half."""
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    x = values((4, 6))
    good = jax.device_put(x, place)
    broken = broken_on(good, 5)
    found = digests({"good": good, "broken": broken})
    assert found["good"].odd == ()
    assert [device.id for device in found["broken"].odd] == [5]
    assert found["broken"].value == reference(x)  # what a checkpoint would hold
    check_replicas({"a": good})
    message = r"replicas of b\.c differ on \S*5 \(process 0\) from those of most"
    with pytest.raises(ReplicasDiffer, match=message) as raised:
        check_replicas({"a": good, "b": {"c": broken}})
    assert (raised.value.processes, raised.value.sure) == ((0,), True)

    pair = make_mesh({"data": 2}, jax.devices()[:2])
    halves = [jax.device_put(np.float32(i), d) for i, d in enumerate(jax.devices()[:2])]
    broken = jax.make_array_from_single_device_arrays(
        (), NamedSharding(pair, PartitionSpec()), halves
    )
    with pytest.raises(ReplicasDiffer, match="none of which is that of m") as raised:
        check_replicas({"x": broken})  # which one, two cannot tell
    assert not raised.value.sure and len(digests({"x": broken})["x"].odd) == 2
