"""Matmuls with quantized weights of real models: one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuantizedMatmulSpec:
    """A named matmul ``[m,k] x [n,k]^T`` of bfloat16 and an 8-bit weight."""

    name: str
    """Model, layer, type of the weight and tokens."""
    m: int
    """Tokens per step."""
    n: int
    """Output features."""
    k: int
    """Input features."""
    weight_dtype: str
    """int8 or float8_e4m3fn."""
    out_dtype: str = "bfloat16"
    """Type of the output; logits are float32."""


_LAYERS = {
    "llama3_8b_qkv": (6144, 4096),
    "llama3_8b_out": (4096, 4096),
    "llama3_8b_gate_up": (28672, 4096),
    "llama3_8b_down": (4096, 14336),
    "llama3_8b_head": (128256, 4096),
    "llama2_7b_down_tp4": (4096, 2752),
}

SPECS: tuple[QuantizedMatmulSpec, ...] = tuple(
    QuantizedMatmulSpec(
        name=f"{layer}_{short}_m{m}",
        m=m,
        n=n,
        k=k,
        weight_dtype=dtype,
        out_dtype="float32" if "head" in layer else "bfloat16",
    )
    for layer, (n, k) in _LAYERS.items()
    for short, dtype in (("int8", "int8"), ("fp8", "float8_e4m3fn"))
    for m in (2, 32, 128, 2048)
    if m <= 128 or "head" not in layer
)
"""Every shape that is lowered in the tests and benchmarked."""
