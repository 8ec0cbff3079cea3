"""What a plan of `jaxscale.training.planning.search` is asked for."""

import dataclasses
import math
from typing import Literal

from jaxscale.checks import check_choice, check_integers, check_range
from jaxscale.training.hardware import HARDWARE, Hardware
from jaxscale.training.planning.cost_model import (
    JAXSCALE_FUSED,
    JAXSCALE_XLA,
    Program,
    Remat,
)


CHOICES = (
    "pipe",
    "tensor",
    "context",
    "data",
    "fsdp",
    "zero",
    "chunks",
    "rows",
    "remat",
)
"""What a layout decides; each may be given instead."""

MOMENTS = {"mu_dtype": "float32", "nu_dtype": "float32", "memory_kind": "device"}
"""What a plan takes as given of the optimizer, with the defaults."""

_MOST_GPUS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What is planned for; a layout decides what is None.

    Example:
        >>> PlanConfig(gpus=64, gpu="h300")
        Traceback (most recent call last):
        ...
        ValueError: gpu 'h300' is unknown; use one of ('h200', 'h100', 'a100', 'b200')
    """

    gpus: int
    """GPUs of the entire run."""
    gpu: str = "h200"
    """Kind of the GPUs: h200, h100, a100 or b200."""
    batch_size: int | None = None
    """Rows of a batch; by default about four million tokens."""
    seq_len: int | None = None
    """Tokens of a row; by default what the model allows, at most 8,192."""
    pipe: int | None = None
    """Stages of the pipeline."""
    tensor: int | None = None
    """Shards of heads and hidden features; by default at most the GPUs of a host."""
    context: int | None = None
    """Parts of a row; by default each has at least 4,096 tokens."""
    data: int | None = None
    """Copies of the parameters."""
    fsdp: int | None = None
    """Shards of parameters or moments; by default none, a host's, or all."""
    zero: Literal[1, 2, 3] | None = None
    """What fsdp shards: moments, gradients too, or parameters too."""
    chunks: int | None = None
    """Parts of the layers that each stage holds."""
    rows: int | None = None
    """Rows of a microbatch of one group."""
    remat: Remat | None = None
    """What the backward pass computes again."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the first moment is kept."""
    nu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which the second moment is kept."""
    memory_kind: Literal["device", "pinned_host"] = "device"
    """Where moments are between steps: pinned_host is the memory of the host."""
    tensor_parallel: Literal["fused", "xla"] | None = None
    """Who communicates; None is the fused kernels inside one host, else XLA."""
    memory_share: float = 0.9
    """Part of a GPU's memory that the step may take."""
    host_gpus: int | None = None
    """GPUs of a host, with fast links among them; by default of the kind."""
    nic: float | None = None
    """GB/s that each GPU reaches between hosts; by default of the kind."""

    def __post_init__(self) -> None:
        check_choice("gpu", self.gpu, tuple(HARDWARE))
        check_integers(self, 1, "gpus")
        if self.gpus > _MOST_GPUS:
            raise ValueError(f"gpus {self.gpus} must be at most {_MOST_GPUS}")
        given = [name for name in CHOICES if getattr(self, name) is not None]
        sizes = ("batch_size", "seq_len", "host_gpus")
        given += [name for name in sizes if getattr(self, name) is not None]
        check_integers(self, 1, *(name for name in given if name != "remat"))
        if self.zero is not None:
            check_choice("zero", self.zero, (1, 2, 3))
        if self.remat is not None:
            check_choice("remat", self.remat, Remat)
        if self.tensor_parallel is not None:
            check_choice("tensor_parallel", self.tensor_parallel, ("fused", "xla"))
        for name in ("mu_dtype", "nu_dtype"):
            check_choice(name, getattr(self, name), ("float32", "bfloat16"))
        check_choice("memory_kind", self.memory_kind, ("device", "pinned_host"))
        check_range(self, 0.01, 1, "memory_share")
        if self.nic is not None and not 0 < self.nic < math.inf:
            raise ValueError(f"nic {self.nic} must be positive and finite")
        axes = ("pipe", "tensor", "context", "data", "fsdp")
        product = math.prod(getattr(self, axis) or 1 for axis in axes)
        if self.gpus % product:
            written = ", ".join(
                f"{axis} {getattr(self, axis)}" for axis in axes if getattr(self, axis)
            )
            raise ValueError(
                f"gpus {self.gpus} are not divisible by the product {product} of "
                f"{written}; change one of them"
            )

    @property
    def hardware(self) -> Hardware:
        """The GPUs."""
        hardware = HARDWARE[self.gpu]
        return dataclasses.replace(
            hardware,
            nic=hardware.nic if self.nic is None else self.nic * 1e9,
            host_gpus=self.host_gpus or hardware.host_gpus,
        )

    @property
    def moment_bytes(self) -> int:
        """Bytes of a parameter in both moments."""
        return sum(4 if x == "float32" else 2 for x in (self.mu_dtype, self.nu_dtype))

    @property
    def program(self) -> Program:
        """What runs: the fused kernels are for the GPUs of one process."""
        one_host = self.gpus <= self.hardware.host_gpus
        who = self.tensor_parallel or ("fused" if one_host else "xla")
        return JAXSCALE_FUSED if who == "fused" else JAXSCALE_XLA
