"""The device that kernels are built for.

Kernels never ask the hardware. A `DeviceSpec` is handed down from the public function,
so that the same kernel can be traced, interpreted and lowered where there is no GPU.
"""

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from typing import Any

import jax

from pallas_kernels.dispatch import Unsupported


# Largest dynamic shared memory of one block, by compute capability.
_SMEM_BYTES = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}

# Part of the key under which `jax.jit` finds what it has traced and compiled.
_assumed: Any = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """The facts about a GPU that kernels and heuristics depend on."""

    name: str
    """Lower-case name with underscores, as in ``tuned/<name>.json``."""
    num_sms: int
    """Streaming multiprocessors: how many persistent blocks run at a time."""
    smem_bytes: int
    """Largest shared memory of one block, in bytes."""
    compute_capability: tuple[int, int]
    """``(9, 0)`` is Hopper."""

    def __post_init__(self) -> None:
        for field in ("num_sms", "smem_bytes"):
            if getattr(self, field) < 1:
                raise ValueError(
                    f"{field} {getattr(self, field)}, expected a positive number"
                )

    @classmethod
    def current(cls) -> "DeviceSpec | None":
        """The NVIDIA GPU that computations run on, or None where there is none.

        Inside ``with use_device(spec)`` it is that spec; `jax.default_device` counts,
        and so does a mesh of CPUs (`jax.shard_map`, `jax.set_mesh`). The placement of
        arrays does not: it is not known under `jax.jit`.
        """
        if (spec := _assumed.value) is not None:
            return spec
        if _platform() == "cpu":
            return None
        device: Any = jax.config.jax_default_device
        if device is None or isinstance(device, str):
            device = jax.local_devices(backend=device)[0]
        capability = getattr(device, "compute_capability", "")
        if not re.fullmatch(r"\d+\.\d+", str(capability)):  # a CPU, or AMD's "gfx942"
            return None
        major, minor = (int(x) for x in str(capability).split("."))
        return cls(
            name=re.sub(r"[^a-z0-9]+", "_", device.device_kind.lower()).strip("_"),
            num_sms=device.core_count,
            smem_bytes=_SMEM_BYTES.get((major, minor), 49_152),
            compute_capability=(major, minor),
        )


H200 = DeviceSpec(
    name="nvidia_h200",
    num_sms=132,
    smem_bytes=_SMEM_BYTES[9, 0],
    compute_capability=(9, 0),
)
"""NVIDIA H200 SXM, for lowering and interpreting kernels without a GPU."""


@contextlib.contextmanager
def use_device(spec: DeviceSpec) -> Iterator[DeviceSpec]:
    """Makes public ops build their kernels for `spec`, whatever device is there.

    A function that `jax.jit` has compiled for another device is traced again.

    Args:
        spec: the device to assume, for example `H200` to lower kernels on a CPU.

    Example:
        >>> with use_device(H200):
        ...     DeviceSpec.current().num_sms
        132
    """
    with _assumed(spec):
        yield spec


def _platform() -> str | None:
    """The platform of the mesh in use, which a program may have beside the default."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return None if device is None else device.platform


def check_hopper(device: DeviceSpec | None, op_name: str) -> DeviceSpec:
    """Returns the device if the Hopper kernels run on it.

    Raises:
        Unsupported: there is no NVIDIA GPU, or it is of another generation.
    """
    if device is None:
        raise Unsupported(
            f"{op_name}: the Mosaic GPU kernel needs an NVIDIA Hopper GPU and the"
            f" backend is {(_platform() or jax.default_backend())!r}; use"
            " implementation='xla'"
        )
    if device.compute_capability[0] != 9:
        raise Unsupported(
            f"{op_name}: the Mosaic GPU kernel needs compute capability 9.x, got"
            f" {device.compute_capability} ({device.name}); use implementation='xla'"
        )
    return device


def check_smem(num_bytes: int, device: DeviceSpec, what: str) -> None:
    """Checks the shared memory of one block before lowering fails on it.

    Raises:
        Unsupported: it is more than a block of this device can have.
    """
    if num_bytes > device.smem_bytes:
        raise Unsupported(
            f"{what} needs {num_bytes} bytes of shared memory a block and"
            f" {device.name} has {device.smem_bytes}; use smaller tiles or fewer stages"
        )


def resident_clusters(blocks: int, device: DeviceSpec, what: str) -> int:
    """Number of clusters of this size that run at a time, a block to a multiprocessor.

    Raises:
        Unsupported: not one does; a kernel of no blocks would compute nothing.
    """
    clusters = device.num_sms // blocks
    if clusters == 0:
        raise Unsupported(
            f"{what} needs clusters of {blocks} blocks and {device.name} has"
            f" {device.num_sms} multiprocessors; use a config without clusters"
        )
    return clusters
