"""Matmuls of real models: one list for tests, tuner and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatmulSpec:
    """A named bfloat16 matmul ``[m,k] x [k,n]``."""

    name: str
    """Model, layer and rows."""
    m: int
    """Rows: tokens per step."""
    n: int
    """Columns: output features."""
    k: int
    """Contracted dimension: input features."""


# Output and input features of the matmuls of one layer.
_LAYERS = {
    "llama3_8b_qkv": (6144, 4096),
    "llama3_8b_out": (4096, 4096),
    "llama3_8b_gate_up": (28672, 4096),
    "llama3_8b_down": (4096, 14336),
    "llama3_70b_qkv_tp4": (2560, 8192),
    "llama3_70b_gate_up_tp4": (14336, 8192),
    "llama3_70b_out_tp4": (8192, 2048),
    "llama3_70b_down_tp4": (8192, 7168),
}

SPECS: tuple[MatmulSpec, ...] = (
    MatmulSpec(name="cube_4096", m=4096, n=4096, k=4096),
    MatmulSpec(name="cube_8192", m=8192, n=8192, k=8192),
    *(
        MatmulSpec(name=f"{layer}_m{m}", m=m, n=n, k=k)
        for layer, (n, k) in _LAYERS.items()
        for m in (512, 2048, 8192)
    ),
    MatmulSpec(name="decode_128", m=128, n=8192, k=8192),
)
"""Every shape that is lowered in the tests, tuned and benchmarked."""
