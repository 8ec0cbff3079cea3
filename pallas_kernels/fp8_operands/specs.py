"""Operands of real models: one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8OperandSpec:
    """A named operand ``[m,k]`` that is quantized to fp8 in both layouts."""

    name: str
    """Model, operand and rows."""
    m: int
    """Rows: tokens per step, or input features of a weight."""
    k: int
    """Columns: features."""
    x_dtype: str = "bfloat16"
    """Type before quantization; weights are float32."""
    dtype: str = "float8_e4m3fn"
    """Type after quantization; gradients are float8_e5m2."""


SPECS: tuple[Fp8OperandSpec, ...] = (
    *(
        Fp8OperandSpec(name=f"llama3_8b_{name}_{m}", m=m, k=k)
        for name, k in (("hidden", 4096), ("mlp", 14336))
        for m in (2048, 8192)
    ),
    Fp8OperandSpec(
        name="llama3_8b_hidden_gradient_8192", m=8192, k=4096, dtype="float8_e5m2"
    ),
    Fp8OperandSpec(
        name="llama3_8b_mlp_gradient_8192", m=8192, k=14336, dtype="float8_e5m2"
    ),
    Fp8OperandSpec(
        name="llama3_8b_key_gradient_8192", m=8192, k=1024, dtype="float8_e5m2"
    ),
    Fp8OperandSpec(name="llama3_8b_mlp_tp4_8192", m=8192, k=3584),
    Fp8OperandSpec(name="llama2_7b_mlp_8192", m=8192, k=11008),  # 43 times 256
    Fp8OperandSpec(
        name="llama3_8b_key_gradient_tp4_8192", m=8192, k=256, dtype="float8_e5m2"
    ),
    Fp8OperandSpec(name="llama3_8b_up", m=4096, k=14336, x_dtype="float32"),
    Fp8OperandSpec(name="llama3_8b_down", m=14336, k=4096, x_dtype="float32"),
    Fp8OperandSpec(name="llama3_8b_down_bf16", m=14336, k=4096),
)
"""Every shape that is lowered in the tests and benchmarked."""
