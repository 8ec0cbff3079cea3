"""The devices that a command runs on: settled before any is used, and said."""

import os
import shutil

import jax

from jaxscale.checks import pip_install
from jaxscale.cli.errors import UsageError
from jaxscale.cli.notices import notice


_MOST_DEVICES = 4096  # more take minutes to start
_DRIVER = "/proc/driver/nvidia"


def simulate_devices(count: int | None) -> None:
    """Give the process `count` simulated CPU devices instead of the real ones.

    Args:
        count: Number of devices; None keeps those of the machine.

    Raises:
        UsageError: `count` is not positive, or larger than any machine.
    """
    if count is None:
        return
    if not 1 <= count <= _MOST_DEVICES:
        raise UsageError(f"--devices {count}, expected 1 to {_MOST_DEVICES}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def announce_devices() -> None:
    """Say which devices there are, and whether an NVIDIA GPU is left unused."""
    devices = jax.devices()
    if jax.process_index():
        return
    notice(f"devices: {len(devices)} x {devices[0].device_kind}")
    if devices[0].platform == "cpu" and _has_gpu() and not _asked_for_cpu():
        notice(
            "this machine has an NVIDIA GPU, and this JAX is built for CPUs alone: "
            + pip_install("cuda13")
        )
    if devices[0].platform == "gpu":
        _announce_kernels()


def _announce_kernels() -> None:
    """Say which kernels run on the GPU, and what more an extra would bring."""
    # Here, because it imports every op.
    from pallas_kernels.implementations import implementations, summary

    found = implementations()
    notice(f"kernels: {summary(found)}")
    if not {"mosaic_gpu", "triton"} & set(found.values()):
        notice("kernels in Triton for this GPU: " + pip_install("triton"))


def _asked_for_cpu() -> bool:
    """Whether the user or an option wants the CPU."""
    return "cpu" in (jax.config.jax_platforms or "")


def _has_gpu() -> bool:
    """Whether the driver of an NVIDIA GPU is installed here."""
    return os.path.isdir(_DRIVER) or shutil.which("nvidia-smi") is not None
