"""The product with a quantized weight compiled for H200s: spills and copies."""

import pytest

from tests import manifest
from tests.compiled import compile_for_h200
from tests.registers import kernels


CASES = {case.name: case for case in manifest.quantized_matmul_cases()}


@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b_qkv_int8_m2",
        "llama3_8b_gate_up_int8_m2",
        "llama3_8b_out_fp8_m128",
        "llama3_8b_gate_up_fp8_m32",
        "llama3_8b_gate_up_int8_m2048",
        "llama3_8b_gate_up_fp8_m2048",
        "llama2_7b_down_tp4_int8_m2",
    ],
)
def test_nothing_is_spilled_and_no_weight_is_written(name):
    found = compile_for_h200(kernels, "quantized_matmul", name)
    assert [(k.name, k.spilled) for k in found.kernels] == [("quantized_matmul", 0)]
    _, weight, _ = CASES[name].arguments
    assert found.written(weight.size) == []
