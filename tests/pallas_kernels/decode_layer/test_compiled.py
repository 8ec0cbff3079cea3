"""A decoder layer compiled for H200s: one kernel, no spills, no weight copied."""

import pytest

from tests.compiled import compile_for_h200
from tests.registers import kernels
from tests.tiers import exhaustive


@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b_m64",
        "llama3_8b_m32_fp8",
        "llama3_8b_m32_uneven75",
        *exhaustive(
            "llama3_8b_m1",
            "qwen2_7b_m8",
            "llama3_8b_m32_int8",
            "llama3_8b_m1_sparse75",
        ),
    ],
)
def test_it_is_one_launch_and_spills_nothing(name):
    found = compile_for_h200(kernels, "decode_layer", name)
    assert [(k.name, k.spilled) for k in found.kernels] == [("decode_layer", 0)]
    # The other one clears the semaphores.
    started = [x for x in found.thunks if x.split()[0] != "kCommandBuffer"]
    assert [x.split()[0] for x in started] == ["kCustomKernel", "kCustomCall"]
    assert found.count("copy") == found.count("transpose") == 0
