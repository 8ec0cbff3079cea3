"""Digests of arrays, on the devices: 64 bits that do not depend on sharding or layout.

The digest of an array with the elements x[i], i in C order, is a pair of sums

    sum_i a(i),  sum_i a(i) w(i)  mod 2^32,  a(i) = mix(bits(x[i]) ^ mix(i)),  w(i) odd.

`mix` and multiplication by an odd number are bijections, so one changed element of up
to 32 bits always changes both sums; of other changes one in about 2^63 goes undetected.
(Sums of bits times w(i) would miss two sign changes: 2^31 times an even number.)

Sums of integers are exact in any order: each device sums its shards, reading them once,
and the result is the same on every mesh. Layers that are stored for pipeline stages
have the indices of the plain stack, and zeros at empty places add nothing.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from jaxscale.models.stack_layout import StackLayout
from jaxscale.sharding.rules import as_tuple
from jaxscale.training.checkpoint.array_names import named_leaves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Digest:
    """The digest of an array, and the replicas with another digest."""

    value: str
    """16 hexadecimal digits, of the replica that a checkpoint saves."""
    odd: tuple[Any, ...]
    """Devices whose shard differs from that of most of its replicas."""
    tied: bool = False
    """Whether there is no majority, so that some of `odd` may be right."""


def digests(
    arrays: Mapping[str, Any], layers: Mapping[str, int] | None = None
) -> dict[str, Digest]:
    """The digests of arrays, each computed where the array is.

    All processes must call this together, and get the same result: they exchange 8
    bytes per array and device.

    Args:
        arrays: Arrays of any type and sharding, by name.
        layers: Number of layers of arrays that are stored [v, p, k, ...], for the
            chunks and stages of a pipeline.

    Example:
        >>> w = jnp.arange(6.0)
        >>> one, two = digests({"w": w, "v": w.reshape(2, 3)}).values()
        >>> one == two, one == digests({"w": w.at[3].set(-3.0)})["w"]
        (True, False)
    """
    layers = layers or {}
    placed = {name: _placed(x) for name, x in arrays.items()}
    parts = _parts(placed, layers)
    return {
        name: _digest(x.sharding, x.shape, parts[name]) for name, x in placed.items()
    }


def differing(found: Mapping[str, Digest]) -> str | None:
    """Which replicas differ, in words; None if none do."""
    odd = {name: digest.odd for name, digest in found.items() if digest.odd}
    if not odd:
        return None
    devices = sorted({d for some in odd.values() for d in some}, key=lambda d: d.id)
    where = ", ".join(f"{d} (process {d.process_index})" for d in devices)
    more = f" and {len(odd) - 1} more arrays" if len(odd) > 1 else ""
    if any(digest.tied for digest in found.values()):
        than = ", none of which is that of most devices"
    else:
        than = " from those of most devices"
    return f"replicas of {next(iter(odd))}{more} differ on {where}{than}"


class ReplicasDiffer(RuntimeError):
    """A device's replica of an array differs from the others."""

    def __init__(
        self, message: str, processes: Sequence[int] = (), *, sure: bool = True
    ) -> None:
        super().__init__(message)
        self.processes = tuple(processes)
        """Processes of the named devices."""
        self.sure = sure
        """False if some of them may be right, for lack of a majority."""


def check_replicas(tree: Any) -> None:
    """Compare the replicas of each array of a pytree, on the devices.

    Replicas are computed in the same way, so a device that computes wrong values shows
    in its replicas. All processes must call this together, and wait for the arrays. An
    array that is split over all devices has no replicas.

    Args:
        tree: Any pytree of arrays, for example a `TrainState`.

    Raises:
        ReplicasDiffer: replicas differ; the message names the devices that differ from
            the majority. With two replicas there is none, and both are named.
    """
    found = digests(named_leaves(tree))
    if text := differing(found):
        odd = {device for digest in found.values() for device in digest.odd}
        raise ReplicasDiffer(
            f"{text}: their memory or their arithmetic is wrong; leave them out, and "
            "go on from a checkpoint before",
            sorted({device.process_index for device in odd}),
            sure=not any(digest.tied for digest in found.values()),
        )


def _placed(x: Any) -> Array:
    """`x` on a mesh, of a single device if it had none."""
    x = jnp.asarray(x)
    if isinstance(x.sharding, NamedSharding):
        return x
    (device,) = x.sharding.device_set
    mesh = Mesh(np.array([device]), ("device",))
    kind = x.sharding.memory_kind
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(), memory_kind=kind))


def _parts(
    placed: Mapping[str, Array], layers: Mapping[str, int]
) -> dict[str, np.ndarray]:
    """[devices, 2] of each array: the sums of each device over its shards.

    Devices exchange the sums of all arrays of a mesh together. With one program per
    array, many would wait for other devices at the same time, for which CPUs may lack
    threads.
    """
    by_mesh: dict[Mesh, list[str]] = {}
    for name, x in placed.items():
        place: Any = x.sharding
        by_mesh.setdefault(place.mesh, []).append(name)
    found: dict[str, np.ndarray] = {}
    for mesh, names in by_mesh.items():
        with jax.set_mesh(mesh):
            parts = [
                _summing(x.sharding, x.shape, layers.get(name))(x)
                for name, x in ((name, placed[name]) for name in names)
            ]
            together = np.asarray(_gathering(mesh)(*parts))
        found |= dict(zip(names, together, strict=True))
    return found


@functools.cache
def _gathering(mesh: Mesh) -> Callable[..., UInt32[Array, "arrays devices 2"]]:
    """The program that all-gathers the parts of some arrays."""

    def gather(*parts: Array) -> Array:
        return jax.lax.all_gather(jnp.stack(parts), mesh.axis_names, axis=1, tiled=True)

    rows, whole = PartitionSpec(mesh.axis_names), PartitionSpec()
    return jax.jit(
        jax.shard_map(
            gather, mesh=mesh, in_specs=rows, out_specs=whole, check_vma=False
        )
    )


def _digest(place: Any, shape: tuple[int, ...], parts: np.ndarray) -> Digest:
    replicas = _replicas(place, shape)
    sums = parts[replicas]  # [pieces, replicas, 2]
    high, low = sums[:, 0].sum(axis=0, dtype=np.uint32)
    odd, tied = set(), False
    for piece in np.flatnonzero((sums != sums[:, :1]).any(axis=(1, 2))):
        _, which, counts = np.unique(
            sums[piece], axis=0, return_inverse=True, return_counts=True
        )
        most = counts[which.ravel()] * 2 > len(replicas[piece])
        odd |= set(replicas[piece][~most].tolist())
        tied = tied or not most.any()
    devices = place.mesh.devices.flat
    return Digest(
        value=f"{high:08x}{low:08x}",
        odd=tuple(devices[i] for i in sorted(odd)),
        tied=tied,
    )


@functools.cache
def _replicas(place: Any, shape: tuple[int, ...]) -> np.ndarray:
    """[pieces, replicas] The positions in the mesh of the devices with each piece."""
    holders: dict[Any, list[int]] = {}
    pieces = place.devices_indices_map(shape)
    for position, device in enumerate(place.mesh.devices.flat):
        key = tuple((s.start, s.stop) for s in pieces[device])
        holders.setdefault(key, []).append(position)
    return np.array(list(holders.values()))


@functools.cache
def _summing(
    place: Any, shape: tuple[int, ...], num_layers: int | None
) -> Callable[[Array], UInt32[Array, "devices 2"]]:
    """The program that makes the `_parts` of an array, without communication."""
    mesh, on_host = place.mesh, place.memory_kind == "pinned_host"
    axes = [as_tuple(entry) for entry in place.spec]
    axes += [()] * (len(shape) - len(axes))
    first, empty = _first_indices(shape, num_layers)

    def local(x: Array) -> Array:
        begins = [
            jax.lax.axis_index(names) * size if names else 0
            for names, size in zip(axes, x.shape, strict=True)
        ]

        def part(table: np.ndarray) -> Array:  # of the leading dimensions
            lead = table.ndim
            piece = jax.lax.dynamic_slice(table, begins[:lead], x.shape[:lead])
            return piece.reshape(*piece.shape, *[1] * (x.ndim - lead))

        index = part(first)
        for axis in range(first.ndim, x.ndim):
            count = jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) + begins[axis]
            index = index * np.uint32(shape[axis]) + count.astype(jnp.uint32)
        return _sums(x, index, None if empty is None else part(empty))[None]

    def program(x: Array) -> Array:
        if on_host:
            x = jax.device_put(x, jax.memory.Space.Device)
        spec, rows = place.spec, PartitionSpec(mesh.axis_names)
        summed = jax.shard_map(
            local, mesh=mesh, in_specs=spec, out_specs=rows, check_vma=False
        )
        return summed(x)

    return jax.jit(program)


def _first_indices(
    shape: tuple[int, ...], num_layers: int | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The start of each leading index, and the empty places, if any.

    An array of layers [v, p, k, ...] has a table [v, p, k] of each; others have 0.
    """
    if num_layers is None:
        return np.zeros((), np.uint32), None
    places = StackLayout.of_array(shape, num_layers).places
    empty = places < 0
    first = np.where(empty, num_layers, places).astype(np.uint32)
    return first, empty if empty.any() else None


def _sums(x: Array, index: Array, empty: Array | None) -> UInt32[Array, "2"]:
    """The sums over elements with these indices."""
    words = _words(x)  # [..., n]
    n = words.shape[-1]
    hashed = _mix(index[..., None] * np.uint32(n) + np.arange(n, dtype=np.uint32))
    mixed = _mix(words ^ hashed)
    if empty is not None:
        mixed = jnp.where(empty[..., None] & (words == 0), np.uint32(0), mixed)
    weighted = mixed * (hashed | np.uint32(1))
    zero = np.uint32(0)
    # One reduction of both, so that the array is read once.
    sums = jax.lax.reduce(
        (mixed, weighted), (zero, zero), _add_pairs, tuple(range(mixed.ndim))
    )
    return jnp.stack(sums)


def _add_pairs(a: Any, b: Any) -> Any:
    return a[0] + b[0], a[1] + b[1]


def _words(x: Array) -> UInt32[Array, "... n"]:
    """The bits of each element in words of up to 32 bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.iscomplexobj(x):
        return jnp.concatenate([_words(x.real), _words(x.imag)], axis=-1)
    if x.dtype == jnp.bool_:
        return x[..., None].astype(jnp.uint32)
    bits = jax.dtypes.itemsize_bits(x.dtype)
    if bits > 32:
        return jax.lax.bitcast_convert_type(x, jnp.uint32)
    unsigned = jax.lax.bitcast_convert_type(x, f"uint{bits}")
    return unsigned[..., None].astype(jnp.uint32)


def _mix(x: Array) -> Array:
    """A bijection of 32 bits in which each bit depends on all (Mueller's hash)."""
    for factor in (0x45D9F3B, 0x45D9F3B):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
