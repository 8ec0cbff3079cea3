"""Measurements of devices, in a separate process that may hang or crash.

Run it by ``python -m`` with a `CheckRequest` as JSON. It prints a JSON line before and
after each measurement, so that its reader, `jaxscale.training.diagnosis.suite`, knows
which one hangs.

Arithmetic on whole numbers is exact in any order, so that results are bitwise equal on
every device, whichever algorithm a library chose, and can be checked on the host.
"""

import dataclasses
import functools
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxscale.sharding import initialize
from jaxscale.training.checkpoint.digest import digests
from jaxscale.training.diagnosis.suite import CheckRequest, Measurement


_BATCHES, _CALLS = 5, 4  # of which one rate is the best
_REPEATS = 8  # of the same product, which must have the same bits
_AXIS = "device"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes of the measurements."""

    product: int
    """Rows, columns and depth of the timed matmuls."""
    checked: int
    """The same for the matmuls whose result is checked on the host."""
    memory: int
    """Bytes read and written in device memory."""
    transfer: int
    """Bytes between devices, and from and to the host."""
    collectives: tuple[int, ...]
    """Bytes per device in collectives."""


GPU_SIZES = Sizes(
    product=8192,
    checked=4096,
    memory=2**30,
    transfer=2**28,
    # Of the largest two GPUs send 256 MiB each: beginning a call, which takes 0.1 ms
    # with a process each, is a tenth of the time.
    collectives=(2**20, 2**29),
)
CPU_SIZES = Sizes(
    product=128,
    checked=64,
    memory=2**20,
    transfer=2**18,
    collectives=(2**10, 2**16),
)

type Probe = Callable[[Sequence[Any], Sizes], Iterator[Measurement]]
"""Measurements of some devices."""


def product(devices: Sequence[Any], sizes: Sizes, dtype: Any) -> Iterator[Measurement]:
    """The rate of matmuls on a device, and whether one is correct."""
    (device,) = devices
    precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
    multiply = jax.jit(functools.partial(jnp.matmul, precision=precision))
    n = sizes.product
    a, b = _normal((2, n, n), dtype, device)
    value = _rate(lambda: multiply(a, b), 2 * n**3)
    del a, b

    n, rng = sizes.checked, np.random.default_rng(1)
    left, right = rng.integers(-4, 5, (2, n, n), np.int8)
    exact = jax.jit(
        lambda a, b: jnp.matmul(
            a.astype(dtype),
            b.astype(dtype),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
    )
    found = np.asarray(exact(*jax.device_put((left, right), device)), np.float64)
    # The product with a vector without zeros detects any single wrong element.
    vector = rng.integers(1, 9, n).astype(np.float64)
    wanted = left.astype(np.float64) @ (right.astype(np.float64) @ vector)
    wrong = np.flatnonzero(found @ vector != wanted)
    problem = ""
    if len(wrong):
        problem = f"a product of whole numbers is wrong in {len(wrong)} of {n} rows"
    name = f"matmul {jnp.dtype(dtype).name}"
    yield _measurement(name, devices, value, "FLOP/s", problem=problem)


def memory(devices: Sequence[Any], sizes: Sizes) -> Iterator[Measurement]:
    """The rate at which a device reads and writes its memory."""
    (device,) = devices
    x = _normal((sizes.memory // 4,), jnp.float32, device)
    step = jax.jit(lambda x: x * 0.5 + 1.0, donate_argnums=0)

    def run() -> Any:
        nonlocal x
        x = step(x)
        return x

    value = _rate(run, 2 * sizes.memory)
    yield _measurement("memory", devices, value, "B/s")


def host_link(devices: Sequence[Any], sizes: Sizes) -> Iterator[Measurement]:
    """The rates from and to host memory, pinned if possible."""
    (device,) = devices
    content = _bytes(sizes.transfer)
    kinds = {memory.kind for memory in device.addressable_memories()}
    here = jax.sharding.SingleDeviceSharding(device)
    there, on_device = content, jax.device_put(content, here)
    back: Callable[[], Any] = functools.partial(_fetched, on_device)
    if device.platform == "gpu" and "pinned_host" in kinds:
        pinned = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
        there = jax.device_put(content, pinned)
        back = functools.partial(jax.device_put, on_device, pinned)
    # Each is waited for: transfers may end in another order than they began.
    to = functools.partial(jax.device_put, there, here)
    value = _rate(lambda: jax.block_until_ready(to()), sizes.transfer)
    yield _measurement("from the host", devices, value, "B/s")
    value = _rate(lambda: jax.block_until_ready(back()), sizes.transfer)
    same = np.array_equal(np.asarray(back()), content)
    problem = "" if same else "what came back from it is not what was sent"
    yield _measurement("to the host", devices, value, "B/s", problem=problem)


def bits(devices: Sequence[Any], sizes: Sizes) -> Iterator[Measurement]:
    """A device's results, to be compared with itself and with others."""
    (device,) = devices
    multiply, n = jax.jit(jnp.matmul), sizes.product
    a, b = _normal((2, n, n), jnp.bfloat16, device)
    repeated = {_digest(multiply(a, b)) for _ in range(_REPEATS)}
    problem = "the same product has other bits when repeated" * (len(repeated) > 1)
    whole = np.random.default_rng(3).integers(-4, 5, (2, n, n), np.int8)
    a, b = jax.device_put(whole, device).astype(jnp.bfloat16)
    exact = _digest(jnp.matmul(a, b, preferred_element_type=jnp.float32))
    # Few enough that no partial sum is rounded.
    numbers = whole.ravel()[: 2**21]
    total = jnp.sum(jax.device_put(numbers, device).astype(jnp.float32))
    if int(total) != int(numbers.sum(dtype=np.int64)):
        problem = "a sum of whole numbers is wrong"
    yield _measurement("bits", devices, None, "", bits=exact, problem=problem)


def pair(devices: Sequence[Any], sizes: Sizes) -> Iterator[Measurement]:
    """The rate between two devices of this process, of the slower direction."""
    rates, problem = [], ""
    content = _bytes(sizes.transfer)
    for source, target in itertools.permutations(devices):
        x = jax.device_put(content, source)
        move = functools.partial(jax.device_put, x, target)
        rates.append(_rate(move, sizes.transfer))
        if not np.array_equal(np.asarray(move()), content):
            problem = f"what arrived on {target.id} is not what {source.id} sent"
    yield _measurement("pairs", devices, min(rates), "B/s", problem=problem)


def neighbors(devices: Sequence[Any], sizes: Sizes) -> Iterator[Measurement]:
    """The rate between two devices of different processes, in both directions."""
    x = _spread(devices, sizes.transfer // 4)
    swap = _on_each(devices, lambda x: jax.lax.ppermute(x, _AXIS, [(0, 1), (1, 0)]))
    value = _rate(lambda: swap(x), sizes.transfer)
    wrong = _wrong(swap(x), lambda i: _content(1 - i, sizes.transfer // 4))
    problem = "what arrived is not what was sent" if wrong else ""
    yield _measurement("neighbors", devices, value, "B/s", problem=problem)


def collectives(devices: Sequence[Any], sizes: Sizes) -> Iterator[Measurement]:
    """The rates of all-reduce and all-gather over all devices, by size."""
    n = len(devices)
    reduce = _on_each(devices, lambda x: jax.lax.psum(x, _AXIS))
    gather = _on_each(devices, lambda x: jax.lax.all_gather(x, _AXIS, tiled=True))
    for size in sizes.collectives:
        count = size // 4 // n
        whole, part = _spread(devices, count * n), _spread(devices, count)
        everyones = np.concatenate([_content(i, count) for i in range(n)])
        total = functools.reduce(np.add, (_content(i, count * n) for i in range(n)))
        # The least bytes that each device sends, as in nccl-tests ("bus bandwidth").
        moved = 4 * count * (n - 1)
        for name, run, x, times, wanted in (
            ("all-reduce", reduce, whole, 2, total),
            ("all-gather", gather, part, 1, everyones),
        ):
            value = _rate(functools.partial(run, x), times * moved)
            wrong = _wrong(run(x), lambda i, wanted=wanted: wanted)
            yield _measurement(name, devices, value, "B/s", size=size)
            for device in wrong:
                problem = f"its result of an {name} of {size} bytes is wrong"
                yield _measurement(name, [device], None, "", problem=problem, size=size)


ALONE: Mapping[str, Probe] = {
    "matmul bfloat16": functools.partial(product, dtype=jnp.bfloat16),
    "matmul float32": functools.partial(product, dtype=jnp.float32),
    "memory": memory,
    "host link": host_link,
    "bits": bits,
}
"""Measurements of one device at a time."""


def measure(
    request: CheckRequest,
    emit: Callable[[dict[str, Any]], None],
    alone: Mapping[str, Probe] = ALONE,
) -> None:
    """Measure the devices of this process, and those of all processes together.

    Args:
        request: What is wanted.
        emit: Called with each message: ``devices``, ``begin``, ``measured``, ``end``.
        alone: Measurements of one device at a time, by name.
    """
    said: list[dict[str, Any]] = []
    devices = [d for d in jax.devices() if d.id not in request.without]
    local = [d for d in devices if d.process_index == jax.process_index()]
    on_cpu = devices[:1] and devices[0].platform == "cpu"
    sizes = CPU_SIZES if on_cpu else GPU_SIZES

    def run(name: str, group: Sequence[Any], probe: Probe) -> None:
        ids = [device.id for device in group]
        if [name, ids] in request.skip:
            return
        emit({"begin": name, "ids": ids})
        for found in probe(group, sizes):
            said.append(dataclasses.asdict(found))
            emit({"measured": said[-1]})

    emit({"devices": [_described(device) for device in local]})
    for name, probe in alone.items():
        for device in local:
            run(name, [device], probe)
    for two in itertools.combinations(local, 2):
        run("pairs", two, pair)
    if jax.process_count() > 1:
        emit({"begin": "meeting", "ids": []})
        everyones = _gathered([_described(device) for device in local])
        emit({"devices": list(itertools.chain(*everyones))})
        for two in _neighbors(devices):
            if any(device in local for device in two):
                run("neighbors", two, neighbors)
        emit({"begin": "meeting", "ids": []})
    if len(devices) > 1:
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("neighbors")
        run("collectives", devices, collectives)
    if jax.process_count() > 1:
        emit({"begin": "meeting", "ids": []})
        known = {_about(found) for found in said}
        for found in itertools.chain(*_gathered(said)):
            if _about(found) not in known:  # what several measured, one tells
                known.add(_about(found))
                emit({"measured": found})
    emit({"end": jax.process_index()})


def _about(found: Mapping[str, Any]) -> tuple[Any, ...]:
    return found["name"], tuple(found["devices"]), found["size"]


def _described(device: Any) -> dict[str, Any]:
    return {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "process": device.process_index,
        "host": socket.gethostname(),
    }


def _measurement(
    name: str, devices: Sequence[Any], value: float | None, unit: str, **more: Any
) -> Measurement:
    ids = tuple(device.id for device in devices)
    return Measurement(name=name, devices=ids, value=value, unit=unit, **more)


def _rate(run: Callable[[], Any], work: float) -> float:
    """Work per second in the best of some batches of calls.

    Their number is fixed: processes that communicate make the same calls.
    """
    jax.block_until_ready(run())  # compiled
    seconds = []
    for _ in range(_BATCHES):
        begun = time.perf_counter()
        for _ in range(_CALLS):
            result = run()
        jax.block_until_ready(result)
        seconds.append(time.perf_counter() - begun)
    return _CALLS * work / min(seconds)


def _normal(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
    with jax.default_device(device):
        return jax.random.normal(jax.random.key(0), shape, dtype)


def _fetched(x: Any) -> np.ndarray:
    """A new copy on the host; an array caches its first one."""
    return np.array(jnp.copy(x))


def _digest(x: Any) -> str:
    return digests({"x": x})["x"].value


def _mesh(devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices), (_AXIS,))


def _on_each(devices: Sequence[Any], local: Callable[[Any], Any]) -> Any:
    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(
        local, mesh=_mesh(devices), in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped)


def _content(position: int, count: int) -> np.ndarray:
    """[count] Whole numbers whose sums are exact."""
    numbers = (np.arange(16 * 7) * 7 + position * 3) % 16
    return np.resize(numbers.astype(np.float32), count)


def _bytes(count: int) -> np.ndarray:
    """[count] Bytes without a short period."""
    return np.resize(np.random.default_rng(2).integers(0, 256, 4099, np.uint8), count)


def _spread(devices: Sequence[Any], count: int) -> jax.Array:
    """[devices x count] The content of each device on it."""
    place = NamedSharding(_mesh(devices), PartitionSpec(_AXIS))
    pieces = [
        jax.device_put(_content(i, count), device)
        for i, device in enumerate(devices)
        if device.process_index == jax.process_index()
    ]
    shape = (len(devices) * count,)
    return jax.make_array_from_single_device_arrays(shape, place, pieces)


def _wrong(result: jax.Array, wanted: Callable[[int], np.ndarray]) -> list[Any]:
    """Devices of this process with wrong contents."""
    place: Any = result.sharding
    positions = {device: i for i, device in enumerate(place.mesh.devices.flat)}
    return [
        shard.device
        for shard in result.addressable_shards
        if not np.array_equal(np.asarray(shard.data), wanted(positions[shard.device]))
    ]


def _neighbors(devices: Sequence[Any]) -> list[tuple[Any, Any]]:
    """The first devices of neighboring processes, in two rounds."""
    first: dict[int, Any] = {}
    for device in devices:
        first.setdefault(device.process_index, device)
    pairs = list(itertools.pairwise(first[p] for p in sorted(first)))
    return pairs[::2] + pairs[1::2]


def _gathered(content: Any) -> list[Any]:
    """The values of all processes, in order."""
    mine = np.frombuffer(json.dumps(content).encode(), np.uint8)
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(mine))))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(mine)] = mine
    rows = np.asarray(multihost_utils.process_allgather(padded))
    pairs = zip(rows, sizes.ravel(), strict=True)
    return [json.loads(row[: int(size)].tobytes()) for row, size in pairs]


def main(text: str) -> None:
    """Measure as the request says, and print the results."""

    def emit(said: dict[str, Any]) -> None:
        print(json.dumps(said), flush=True)

    emit({"begin": "start", "ids": []})
    request = CheckRequest(**json.loads(text))
    if request.simulated:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", request.simulated)
    if request.together:
        initialize()
    measure(request, emit)


if __name__ == "__main__":
    main(sys.argv[1])
