"""fp8 matmuls of real models: one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledMatmulSpec:
    """A named fp8 matmul ``[m,k] x [n,k]^T``, quantized from bfloat16."""

    name: str
    """Model, layer and rows."""
    m: int
    """Rows: tokens per step."""
    n: int
    """Columns: output features."""
    k: int
    """Contracted dimension: input features."""
    types: tuple[str, str] = ("float8_e4m3fn", "float8_e4m3fn")
    """Types of both operands; gradients are float8_e5m2."""
    by_row: bool = True
    """A scale per row of both operands; otherwise one per tensor."""


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
_GRADIENT = ("float8_e5m2", "float8_e4m3fn")

SPECS: tuple[ScaledMatmulSpec, ...] = (
    *(
        ScaledMatmulSpec(name=f"cube_{n}{scales}", m=n, n=n, k=n, by_row=by_row)
        for n in (4096, 8192)
        for scales, by_row in (("", True), ("_per_tensor", False))
    ),
    *(
        ScaledMatmulSpec(name=f"{layer}_m{m}", m=m, n=n, k=k)
        for layer, (n, k) in _LAYERS.items()
        for m in (2048, 8192)
    ),
    *(
        ScaledMatmulSpec(name=f"{layer}_dx_m8192", m=8192, n=k, k=n, types=_GRADIENT)
        for layer, (n, k) in list(_LAYERS.items())[:4]
    ),
    ScaledMatmulSpec(name="llama3_8b_out_m512", m=512, n=4096, k=4096),
)
"""Every shape that is lowered in the tests, tuned and benchmarked."""
