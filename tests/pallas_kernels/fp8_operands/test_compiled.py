"""Kernels of 8-bit operands compiled for H200s: spills, launches, what is written."""

import pytest

from tests import manifest
from tests.compiled import compile_for_h200
from tests.registers import kernels


CASES = {case.name: case for case in manifest.fp8_operand_cases()}


@pytest.mark.parametrize("name", ["blocks_3584", "blocks_4096"])
def test_kernels_of_blocks_spill_nothing(name):
    found = compile_for_h200(kernels, "fp8_operands", name)
    assert len(found.kernels) == 6
    assert {k.spilled for k in found.kernels} == {0}
    # Scales of blocks are transposed, and nothing larger is written.
    assert sum(w.size for w in found.written(1)) < 0.2 * 8192 * 4096


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("llama3_8b_hidden_8192", ["quantize_rows", "transpose_rows"]),
        ("llama3_8b_mlp_gradient_8192", ["quantize_rows", "transpose_rows"]),
        ("llama3_8b_up", ["quantize_rows", "transpose_rows"]),
        ("llama3_8b_up_per_tensor", ["quantize_and_transpose", "transpose"]),
        ("llama3_8b_hidden_8192_norm", ["quantize_rms_norm"]),
        ("llama3_8b_mlp_8192_gated", ["quantize_gated_gradients", "quantize_gated"]),
        ("llama2_7b_mlp_8192_gated", ["quantize_gated_gradients", "quantize_gated"]),
    ],
)
def test_nothing_is_spilled_and_little_is_written_besides(name, names):
    found = compile_for_h200(kernels, "fp8_operands", name)
    assert [(k.name, k.spilled) for k in found.kernels] == [(n, 0) for n in names]
    operand, *others = CASES[name].arguments
    rounded = 3 if len(others) == 2 else 1  # a gated product and two gradients
    # The largest of each column that each block has seen, and no second operand.
    assert sum(w.size for w in found.written(1)) < 0.13 * rounded * operand.size
    assert len(found.thunks) <= 2 * rounded + 1


def test_what_a_step_rounds_as_it_is_computed():
    """No weight of a norm is converted first, and no half of a product copied."""
    found = compile_for_h200(kernels, "fp8_operands", "llama3_8b_served_128")
    spilled = {kernel.name: kernel.spilled for kernel in found.kernels}
    assert spilled == {"quantize_rms_norm": 0, "quantize_gated": 0}
    # Besides both kernels only the largest of each column, which no layer asks for.
    assert len(found.thunks) <= 2 * 2 + 1
    assert "copy(" not in found.hlo and "slice(" not in found.hlo
