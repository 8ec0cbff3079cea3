"""The product of scaled 8-bit operands compiled for H200s: spills and copies."""

import pytest

from tests import manifest
from tests.compiled import compile_for_h200
from tests.registers import kernels


CASES = {case.name: case for case in manifest.scaled_matmul_cases()}


@pytest.mark.parametrize(
    "name",
    [
        "cube_8192",
        "cube_4096_per_tensor",
        "llama3_8b_qkv_dx_m8192",
        "llama3_70b_qkv_tp4_m2048",
        "llama3_8b_out_m512",
        "llama3_8b_down_blocks",
        "llama3_8b_up_dw_blocks",
    ],
)
def test_nothing_is_spilled_and_no_operand_is_written(name):
    found = compile_for_h200(kernels, "scaled_matmul", name)
    assert [(k.name, k.spilled) for k in found.kernels] == [("scaled_matmul", 0)]
    assert found.written(min(x.size for x in CASES[name].arguments[:2])) == []
