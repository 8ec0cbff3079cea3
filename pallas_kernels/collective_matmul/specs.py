"""Tensor-parallel layers of real models: one list for tests, tuner and benchmarks."""

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """A bfloat16 matmul ``[M,k] x [k,n]``, in global sizes.

    The column-parallel matmul of a block all-gathers rows and splits n over devices,
    the row-parallel one splits k and reduce-scatters (or all-reduces) rows; each device
    computes ``1/D`` of it.
    """

    name: str
    """Model and layer."""
    kind: Literal["all_gather", "reduce_scatter"]
    """Pattern of the layer in training; `matmul_all_reduce` takes the latter."""
    n: int
    """Output features."""
    k: int
    """Input features."""

    def local(self, size: int) -> tuple[int, int]:
        """Output and input features on each of `size` devices.

        Example:
            >>> SPECS[0].name, SPECS[0].local(4)
            ('llama70b_qkv', (2560, 8192))
        """
        if self.kind == "all_gather":
            return self.n // size, self.k
        return self.n, self.k // size


SPECS: tuple[Spec, ...] = (
    Spec(name="llama70b_qkv", kind="all_gather", n=10240, k=8192),
    Spec(name="llama70b_o", kind="reduce_scatter", n=8192, k=8192),
    Spec(name="llama70b_gate_up", kind="all_gather", n=57344, k=8192),
    Spec(name="llama70b_down", kind="reduce_scatter", n=8192, k=28672),
    Spec(name="llama8b_qkv", kind="all_gather", n=6144, k=4096),
    Spec(name="llama8b_o", kind="reduce_scatter", n=4096, k=4096),
    Spec(name="llama8b_gate_up", kind="all_gather", n=28672, k=4096),
    Spec(name="llama8b_down", kind="reduce_scatter", n=4096, k=14336),
    Spec(name="gpt3_up", kind="all_gather", n=49152, k=12288),
    Spec(name="gpt3_down", kind="reduce_scatter", n=12288, k=49152),
)
"""The layers that are tested, tuned and benchmarked."""

ROWS = (16, 64, 512, 1024, 2048, 4096, 8192, 16384)
"""M, tokens per step on all devices."""

TENSOR_PARALLEL = (2, 4)
"""D, devices of the axis."""
