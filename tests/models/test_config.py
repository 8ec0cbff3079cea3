"""Presets have their published sizes, and impossible shapes are refused."""

import dataclasses
import math

import pytest

from jaxscale.models.config import DecoderConfig
from jaxscale.models.families.gpt import gpt2_small, gpt2_tiny
from jaxscale.models.families.llama import llama2_70b, llama_tiny
from jaxscale.models.presets import PRESETS, preset
from jaxscale.nn import RopeScaling
from jaxscale.sharding.rules import REPLICATED, fsdp_tp


PUBLISHED_SIZES = {
    # Counted from the released checkpoints.
    "gpt2_small": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "gptj_6b": 6_050_882_784,
    "llama1_7b": 6_738_415_616,
    "llama1_13b": 13_015_864_320,
    "llama1_33b": 32_528_943_616,
    "llama1_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_1_405b": 405_853_388_800,
    "llama3_2_1b": 1_235_814_400,
    "llama3_2_3b": 3_212_749_824,
}


@pytest.mark.parametrize("name", sorted(PUBLISHED_SIZES))
def test_presets_have_the_published_number_of_parameters(name):
    assert preset(name).num_parameters() == PUBLISHED_SIZES[name]


def test_every_preset_is_a_configuration():
    for name, function in PRESETS.items():
        assert isinstance(function(), DecoderConfig), name


def test_an_unknown_preset_names_those_like_it():
    with pytest.raises(ValueError, match=r"'gpt5' is unknown; did you mean .*gpt2_xl"):
        preset("gpt5")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 must be a multiple of num_kv_heads 3"),
        ({"d_model": 0}, "d_model 0 must be positive"),
        ({"vocab_size": -1}, "vocab_size -1 must be positive"),
        ({"window": 0}, "window 0 must be positive and finite, or None"),
        (
            {"window_pattern": (4, 4, 4)},
            "of 3 layers .* num_layers 2; .* 1 or 2 layers",
        ),
        ({"window_pattern": (0,)}, r"window_pattern \(0,\) must be a tuple"),
        ({"window_pattern": [4]}, r"window_pattern \[4\] must be a tuple"),
        ({"window_pattern": (True,)}, r"window_pattern \(True,\) must be a tuple"),
        ({"window_pattern": (4,), "window": 4}, "the place of window 4; set one"),
        ({"attention_softcap": -1.0}, "attention_softcap -1.0 must be positive"),
        ({"norm_eps": 0.0}, "norm_eps 0.0 must be positive"),
        ({"norm_eps": math.nan}, "norm_eps nan must be positive and finite"),
        ({"rope_theta": math.nan}, "rope_theta nan must be positive and finite"),
        ({"attention_softcap": math.nan}, "attention_softcap nan must be positive and"),
        ({"attention_softcap": math.inf}, "attention_softcap inf must be positive and"),
        ({"logit_softcap": 0.0}, "logit_softcap 0.0 must be positive and finite"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar 0 must be positive"),
        ({"rope_theta_local": 50.0}, "rope_theta_local 50.0 has no effect without win"),
        ({"output_norms": True, "parallel_block": True}, "no place in a parallel_bloc"),
        (
            {"position": "learned", "scale_embeddings": True},
            "scale_embeddings True would scale the table of learned positions",
        ),
        ({"rotary_dim": 10}, "rotary_dim 10 must be even and between 2 and head_dim"),
        ({"rotary_dim": 3}, "rotary_dim 3 must be even"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"rope_theta": 0.0}, "rope_theta 0.0 must be positive"),
        ({"norm": "batchnorm"}, r"norm 'batchnorm' is unknown; use one of \('rmsn"),
        ({"activation": "mish"}, r"activation 'mish' is unknown; use one of \('swig"),
        (
            {"rotary_dim": 2, "rope_scaling": RopeScaling(kind="dynamic", factor=2.0)},
            "needs at least 4 rotated features instead of 2",
        ),
        ({"position": "alibi"}, r"position 'alibi' is unknown; use one of \('rope'"),
        ({"position": "learned", "rotary_dim": 4}, "rotary_dim 4 has no effect"),
        ({"tie_embeddings": True, "lm_head_bias": True}, "set tie_embeddings=False"),
    ],
)
def test_impossible_settings_name_the_argument(change, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(llama_tiny(), **change)


def test_flops_follow_the_formula_by_hand():
    config = llama_tiny()  # D=32 L=2 N=4 K=2 H=8 F=64 V=256
    kernels = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64) + 32 * 256
    attention = 12 * 2 * 4 * 8  # times keys
    assert config.flops_per_token(64, causal=False) == 6 * kernels + attention * 64
    assert config.flops_per_token(64, causal=True) == 6 * kernels + attention * 32
    windowed = dataclasses.replace(config, window=16)
    # The mean of min(t, 16) over 0 <= t <= 64.
    keys = (16 * 16 / 2 + 48 * 16) / 64
    assert windowed.flops_per_token(64, causal=True) == 6 * kernels + attention * keys
    assert windowed.flops_per_token(64, causal=False) == 6 * kernels + attention * 16
    half = dataclasses.replace(config, window_pattern=(16, None))
    assert half.flops_per_token(64, causal=True) == pytest.approx(
        6 * kernels + attention * (keys + 32) / 2
    )
    assert windowed.flops_per_token(8, causal=True) == config.flops_per_token(
        8, causal=True
    )


def sizes(**axes):
    return {"data": 1, "fsdp": 1, "pipe": 1, "tensor": 1} | axes


@pytest.mark.parametrize(
    ("config", "mesh", "message"),
    [
        (gpt2_small(), sizes(tensor=8), "num_heads 12 is not divisible by 8"),
        (llama2_70b(), sizes(tensor=16), "num_kv_heads 8 is not divisible by 16"),
        (llama_tiny(), sizes(fsdp=3), "d_model 32 is not divisible by 3"),
    ],
)
def test_a_model_that_does_not_divide_over_the_mesh_is_refused(config, mesh, message):
    config.check_mesh(mesh, REPLICATED)
    with pytest.raises(ValueError, match=message):
        config.check_mesh(mesh, fsdp_tp())


def test_check_mesh_looks_at_the_batch_and_at_missing_axes():
    config = gpt2_tiny()
    mesh = sizes(data=2, fsdp=2, tensor=2)
    config.check_mesh(mesh, fsdp_tp(), batch_size=8, num_tokens=64)
    with pytest.raises(ValueError, match=r"batch_size 6 is not divisible by 4.*'data'"):
        config.check_mesh(mesh, fsdp_tp(), batch_size=6)
    with pytest.raises(ValueError, match="num_tokens 63 is not divisible by 2"):
        config.check_mesh(mesh, fsdp_tp(), num_tokens=63)
    with pytest.raises(ValueError, match=r"mesh axes \['fsdp', 'tensor'\]"):
        config.check_mesh({"data": 8}, fsdp_tp())
