"""The settings of `jaxscale.training.planning.search`."""

import dataclasses
import math
from typing import Literal

from jaxscale.checks import check_choice, check_integers, check_range
from jaxscale.training.hardware import HARDWARE, Hardware
from jaxscale.training.planning.cost_model import Remat, TensorParallel


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
"""The choices of a layout; a field that is set fixes its choice."""

MOMENTS = {"mu_dtype": "float32", "nu_dtype": "float32", "memory_kind": "device"}
"""Optimizer settings that a plan takes as given, with their defaults."""

_MOST_GPUS = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan for; the search chooses what is None.

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
    """Sequences per global batch; by default about four million tokens."""
    seq_len: int | None = None
    """Tokens per sequence; by default the model's limit, at most 8,192."""
    pipe: int | None = None
    """Pipeline-parallel stages."""
    tensor: int | None = None
    """Tensor-parallel shards; by default at most the GPUs of a host."""
    context: int | None = None
    """Context-parallel shards; by default each has at least 4,096 tokens of a
    sequence."""
    data: int | None = None
    """Data-parallel replicas."""
    fsdp: int | None = None
    """FSDP or ZeRO shards; by default none, a host's GPUs, or all."""
    zero: Literal[1, 2, 3] | None = None
    """ZeRO stage: fsdp shards optimizer state (1), gradients too (2), parameters too
    (3)."""
    chunks: int | None = None
    """Model chunks per pipeline stage (virtual stages)."""
    rows: int | None = None
    """Sequences per microbatch of one data-parallel group."""
    remat: Remat | None = None
    """Activation checkpointing policy."""
    mu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the first moment."""
    nu_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the second moment."""
    memory_kind: Literal["device", "pinned_host"] = "device"
    """Where optimizer state is stored between steps; pinned_host is host memory."""
    quantization: Literal["fp8", "fp8_blockwise", "fp8_tensorwise"] | None = None
    """fp8 in the matmuls of the blocks, with a scale per row (fp8), per block or per
    operand; None is bf16."""
    tensor_parallel: TensorParallel | None = None
    """How tensor parallelism communicates; None is fused kernels within a host, else
    XLA. With fp8_blockwise it is always XLA."""
    memory_share: float = 0.9
    """Fraction of GPU memory that a step may use."""
    host_gpus: int | None = None
    """GPUs per host, joined by fast links; by default as usual for this GPU."""
    nic: float | None = None
    """Network bandwidth per GPU between hosts, in GB/s; by default as usual for this
    GPU."""

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
        if self.quantization is not None:
            kinds = ("fp8", "fp8_blockwise", "fp8_tensorwise")
            check_choice("quantization", self.quantization, kinds)
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
        """The figures of `gpu`, with `host_gpus` and `nic`."""
        hardware = HARDWARE[self.gpu]
        return dataclasses.replace(
            hardware,
            nic=hardware.nic if self.nic is None else self.nic * 1e9,
            host_gpus=self.host_gpus or hardware.host_gpus,
        )

    @property
    def moment_bytes(self) -> int:
        """Bytes of optimizer state per parameter."""
        return sum(4 if x == "float32" else 2 for x in (self.mu_dtype, self.nu_dtype))

    @property
    def communication(self) -> TensorParallel:
        """How tensor parallelism communicates.

        Fused kernels need a single process, and there are none for blocks in fp8.
        """
        if self.quantization == "fp8_blockwise":
            return "xla"
        one_host = self.gpus <= self.hardware.host_gpus
        return self.tensor_parallel or ("fused" if one_host else "xla")
