"""An encoder layer compiled for H200s: one kernel, no spills, no weight copied."""

import pytest

from tests.compiled import compile_for_h200
from tests.registers import kernels
from tests.tiers import exhaustive


@pytest.mark.parametrize(
    "name",
    [
        "bert_base_m256",
        "bert_base_m1024",
        *exhaustive("bert_base_m512", "bert_large_m256", "minilm_m256"),
    ],
)
def test_it_is_one_launch_and_spills_nothing(name):
    found = compile_for_h200(kernels, "encode_layer", name)
    assert [(k.name, k.spilled) for k in found.kernels] == [("encode_layer", 0)]
    assert not found.serialized
    # The other one clears the counters.
    started = [x for x in found.thunks if x.split()[0] != "kCommandBuffer"]
    assert [x.split()[0] for x in started] == ["kCustomKernel", "kCustomCall"]
    assert found.count("copy") == found.count("transpose") == 0
