"""Pallas GPU kernels of jaxscale, usable without the rest of it.

Each op is a package: `pallas_kernels.matmul`, `pallas_kernels.varlen_attention`. The
names here are what the ops share: the error of an implementation that cannot serve its
arguments, and the device that kernels are built for.
"""

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, DeviceSpec, use_device


__all__ = ["H200", "DeviceSpec", "Unsupported", "use_device"]
