"""Replicated arrays are read once, and broadcast over the devices.

Otherwise each process would read all of a replicated array: a thousand times the same
bytes from a shared disk. Here one replica of each array is read, by the processes that
hold it, and broadcast as a bitwise sum in which the others are zeros, so that no value
changes. Arrays take turns in the replica that is read, so the processes share the work.
(Orbax's `SingleReplicaArrayHandler` reads all of them in one process, sums floats, and
needs a mesh in which no process holds devices of two replicas.)
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from jaxscale.sharding.rules import as_tuple


def reading_place(place: Any, turn: int) -> Any:
    """Sharding to read an array at: `place` itself, or one replica of it."""
    axes = _replica_axes(place)
    if not axes:
        return place
    mesh = place.mesh
    sizes = [mesh.shape[name] for name in axes]
    where = np.unravel_index(turn % math.prod(sizes), sizes)
    chosen = dict(zip(axes, where, strict=True))
    devices = mesh.devices
    for axis, name in enumerate(mesh.axis_names):
        if name in chosen:
            devices = devices.take([chosen[name]], axis)
    one = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
    return NamedSharding(one, place.spec)  # the others get it over the devices


def is_read_here(place: Any) -> bool:
    """Whether this process holds a part of an array at `place`."""
    return bool(place.addressable_devices)


def spread(x: Array | None, wanted: jax.ShapeDtypeStruct) -> Array:
    """Broadcast an array of which one replica was read; all processes must call this.

    Args:
        x: The array as read at its `reading_place`; None on other processes.
        wanted: Its shape, type and sharding.
    """
    place: Any = wanted.sharding
    axes = _replica_axes(place)
    if not axes:
        assert x is not None  # every process has read its part
        return x
    mesh, spec = place.mesh, place.spec
    shape = place.shard_shape(wanted.shape)
    read = {} if x is None else {s.device: s.data for s in x.addressable_shards}
    # No operation on a single device's shard: the caller may have set the whole mesh.
    parts = [
        read[device]
        if device in read
        else jnp.zeros(shape, wanted.dtype, device=device)
        for device in place.addressable_devices
    ]
    apart = jax.make_array_from_single_device_arrays(
        wanted.shape, NamedSharding(mesh, spec), parts
    )
    # Its replicas differ, so the program must see each of them separately.
    add = jax.shard_map(
        functools.partial(_sum_of_bits, axes=axes),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    whole = jax.jit(add)(apart)
    return jax.device_put(whole, place)


def _replica_axes(place: Any) -> tuple[str, ...]:
    """The mesh axes along which other processes hold replicas."""
    if jax.process_count() == 1 or not isinstance(place, NamedSharding):
        return ()
    mesh: Any = place.mesh
    used = {name for entry in place.spec for name in as_tuple(entry)}
    axes = [(i, n) for i, n in enumerate(mesh.axis_names) if n not in used]
    processes = np.vectorize(lambda device: device.process_index)(mesh.devices)
    first = processes
    for axis, _ in axes:
        first = first.take([0], axis)
    if (processes == first).all():
        return ()
    return tuple(name for _, name in axes if mesh.shape[name] > 1)


def _sum_of_bits(x: Array, axes: tuple[str, ...]) -> Array:
    """The bitwise sum over replicas, all but one of which are zeros."""
    dtype = x.dtype
    if dtype == jnp.bool_:
        return jax.lax.psum(x.astype(jnp.uint8), axes).astype(jnp.bool_)
    if jnp.iscomplexobj(x):
        real, imag = _sum_of_bits(x.real, axes), _sum_of_bits(x.imag, axes)
        return jax.lax.complex(real, imag)
    bits = jnp.dtype(f"uint{jax.dtypes.itemsize_bits(dtype)}")
    words = jax.lax.bitcast_convert_type(x, bits)
    return jax.lax.bitcast_convert_type(jax.lax.psum(words, axes), dtype)
