"""Configurations of transformers 4 and 5 are read; those of 5 are written."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from jaxscale.models.families.gemma import gemma2_tiny, gemma3_tiny, gemma_tiny
from jaxscale.models.families.gpt import gpt2_tiny, gptj_tiny
from jaxscale.models.families.gpt_neox import neox_tiny
from jaxscale.models.families.llama import llama_tiny
from jaxscale.models.families.mistral import mistral_tiny
from jaxscale.models.families.modernbert import modernbert_tiny
from jaxscale.models.families.registry import FAMILIES, config_from_hf, config_to_hf
from jaxscale.models.hf.keys import Keys
from jaxscale.models.presets import PRESETS
from jaxscale.nn.embeddings import RopeScaling


MODELS = Path(__file__).parents[1] / "fixtures" / "models"
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 128,
    "n_positions": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
}
GPTJ = GPT2 | {"model_type": "gptj", "rotary_dim": 8}

# What the published files say, in their keys.
PUBLISHED = {
    "gpt2_small": {
        "activation_function": "gelu_new",
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-05,
        "model_type": "gpt2",
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "gptj_6b": {
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-05,
        "model_type": "gptj",
        "n_embd": 4096,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 28,
        "n_positions": 2048,
        "rotary": True,
        "rotary_dim": 64,
        "scale_attn_weights": True,
        "tie_word_embeddings": False,
        "vocab_size": 50400,
    },
    "llama2_7b": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "llama3_1_8b": {
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "llama3_2_1b": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
}


PUBLISHED |= {
    "mistral_7b": {
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 32000,
    },
    "qwen2_5_7b": {
        "hidden_act": "silu",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 152064,
    },
    "qwen3_0_6b": {
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "pythia_1_4b": {
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "model_type": "gpt_neox",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "rotary_emb_base": 10000,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    },
}
_GEMMA = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
}
PUBLISHED |= {
    "gemma_2b": _GEMMA
    | {
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 16384,
        "max_position_embeddings": 8192,
        "model_type": "gemma",
        "num_attention_heads": 8,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "vocab_size": 256000,
    },
    "gemma2_27b": _GEMMA
    | {
        "attn_logit_softcapping": 50.0,
        "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "gemma3_1b": _GEMMA
    | {
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
}
MISTRAL, QWEN2 = PUBLISHED["mistral_7b"], PUBLISHED["qwen2_5_7b"]


def read(directory, name="config.json"):
    return json.loads((directory / name).read_text())


@pytest.mark.parametrize("directory", sorted(MODELS.iterdir()), ids=lambda d: d.name)
def test_old_and_new_keys_say_the_same(directory):
    ours = config_from_hf(read(directory))
    assert config_from_hf(read(directory, "config.other.json")) == ours
    # The two files do differ in their keys.
    styles = {
        frozenset({"torch_dtype", "dtype"} & set(read(directory, name)))
        for name in ("config.json", "config.other.json")
    }
    assert styles == {frozenset({"torch_dtype"}), frozenset({"dtype"})}


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_published_files_give_the_presets(name):
    assert config_from_hf(PUBLISHED[name]) == PRESETS[name]()


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mistral_7b", 7_241_732_096),
        ("qwen2_5_7b", 7_615_616_512),
        ("qwen3_0_6b", 596_049_920),
        ("qwen3_8b", 8_190_735_360),
        ("pythia_1_4b", 1_414_647_808),
        ("gemma_2b", 2_506_172_416),
        ("gemma_7b", 8_537_680_896),
        ("gemma2_2b", 2_614_341_888),
        ("gemma2_9b", 9_241_705_984),
        ("gemma2_27b", 27_227_128_320),
        ("gemma3_270m", 268_098_176),
        ("gemma3_1b", 999_885_952),
    ],
)
def test_sizes_are_those_of_the_published_weights(name, count):
    assert PRESETS[name]().num_parameters() == count


def test_windows_of_layers():
    windows = {"use_sliding_window": True, "sliding_window": 512}
    config = config_from_hf(QWEN2 | windows | {"max_window_layers": 20})
    assert (config.window, config.global_layers) == (512, tuple(range(20)))
    assert [config.attention(i).window for i in (0, 19, 20, 27)] == [None, None] + [
        512
    ] * 2
    # All layers are global, and so are those without use_sliding_window.
    assert config_from_hf(QWEN2 | windows).window is None
    types = ["full_attention", "sliding_attention"] * 14
    config = config_from_hf(QWEN2 | windows | {"layer_types": types})
    assert config.global_layers == tuple(range(0, 28, 2))
    assert config_to_hf(config)["layer_types"] == types
    with pytest.raises(ValueError, match=r"layer_types .* for each of 28 layers wit"):
        config_from_hf(QWEN2 | {"layer_types": types})
    # A pattern is written as what it does to each layer, if there is one window.
    pattern = dataclasses.replace(
        config, window=None, global_layers=(), window_pattern=(None, 512)
    )
    assert config_from_hf(config_to_hf(pattern)) == config
    two = dataclasses.replace(pattern, window_pattern=(512, 256))
    with pytest.raises(
        ValueError, match=r"window_pattern=\(\) instead of \(512, 256\)"
    ):
        config_to_hf(two)
    # In Gemma 2 every second layer is global, and null switches a softcap off.
    gemma2 = PUBLISHED["gemma2_27b"]
    assert config_from_hf(gemma2).global_layers == tuple(range(1, 46, 2))
    types = ["full_attention"] * 46
    config = config_from_hf(
        gemma2 | {"layer_types": types, "final_logit_softcapping": None}
    )
    assert (config.window, config.logit_softcap) == (None, None)
    assert config_from_hf(config_to_hf(config)) == config
    # Mistral's default is a window; null is none.
    without = {k: v for k, v in MISTRAL.items() if k != "sliding_window"}
    assert config_from_hf(without).window == 4096
    config = config_from_hf(MISTRAL | {"sliding_window": None})
    assert config.window is None
    assert config_to_hf(config)["model_type"] == "llama"  # which computes the same


def test_values_of_a_llama3():
    config = config_from_hf(read(MODELS / "llama3_gqa"))
    assert (config.d_model, config.d_ff, config.num_layers) == (32, 56, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope_theta == 5000.0
    assert config.rope_scaling == RopeScaling(
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_the_round_trip(name):
    config = PRESETS[name]()
    values = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(values) == config
    assert "torch_dtype" not in values


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "gelu"},
        {"tie_embeddings": False},
        {"d_ff": 72},
    ],
)
def test_variants_of_gpt2_survive_the_round_trip(change):
    config = dataclasses.replace(gpt2_tiny(), **change)
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True, "attention_out_bias": True},
        {"mlp_bias": True},
        {"head_dim": 24},
        {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
        {"rope_scaling": RopeScaling(kind="yarn", factor=4.0, beta_fast=8.0)},
        {
            "rope_scaling": RopeScaling(
                kind="dynamic", factor=4.0, original_max_position_embeddings=128
            )
        },
        {
            "rope_scaling": RopeScaling(
                kind="yarn", factor=2.0, attention_factor=1.5, truncate=False
            )
        },
    ],
)
def test_variants_of_llama_survive_the_round_trip(change):
    config = dataclasses.replace(llama_tiny(), **change)
    assert config_from_hf(config_to_hf(config)) == config


def test_defaults_of_the_first_llama_files():
    config = config_from_hf(LLAMA)
    assert (config.num_kv_heads, config.head_dim) == (4, 8)
    assert (config.rope_theta, config.rope_scaling) == (10_000.0, None)
    assert not config.tie_embeddings
    assert config_from_hf(GPT2).tie_embeddings


def test_yarn_whose_logits_are_scaled_by_two_numbers():
    scaling = {"type": "yarn", "factor": 40.0, "mscale": 0.7, "mscale_all_dim": 1.0}
    config = config_from_hf(LLAMA | {"rope_scaling": scaling})
    factor = config.attention().rope.attention_factor
    growth = 0.1 * math.log(40)
    assert factor == pytest.approx((0.7 * growth + 1) / (growth + 1))
    # The context of pretraining is the longest one where the file does not say.
    assert config.rope_scaling.original_max_position_embeddings == 128


def test_where_two_keys_speak_of_rope_that_of_transformers_5_counts():
    old = {"type": "linear", "factor": 4.0}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    both = LLAMA | {"rope_scaling": old, "rope_parameters": new}
    config = config_from_hf(both)
    assert (config.rope_scaling.factor, config.rope_theta) == (4.0, 10_000.0)
    config = config_from_hf(both | {"rope_theta": 3e5})
    assert (config.rope_scaling.factor, config.rope_theta) == (4.0, 3e5)
    config = config_from_hf(both | {"rope_scaling": None, "rope_theta": 3e5})
    assert (config.rope_scaling.factor, config.rope_theta) == (2.0, 5e5)
    neox = PUBLISHED["pythia_1_4b"]
    part = {"rope_parameters": {**new, "partial_rotary_factor": 0.5}}
    config = config_from_hf(neox | part | {"rope_scaling": old})
    assert (config.rope_scaling.factor, config.rope_theta) == (4.0, 10_000.0)
    assert config.rotary_dim == 32
    assert config_from_hf(neox | part).rotary_dim == 64
    scaling = {"rope_type": "linear", "factor": 4.0}
    kinds = {"full_attention": {"rope_type": "default", "rope_theta": 3e5}}
    config = config_from_hf(
        PUBLISHED["gemma3_1b"] | {"rope_scaling": scaling, "rope_parameters": kinds}
    )
    assert (config.rope_scaling.factor, config.rope_theta) == (4.0, 3e5)


@pytest.mark.parametrize("kind", ["yarn", "llama3"])
def test_original_length_outside_of_the_scaling(kind):
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    values = LLAMA | {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    config = config_from_hf(values)
    assert config.rope_scaling.original_max_position_embeddings == 32


def test_a_factor_of_null_is_the_growth_of_the_length():
    scaling = {"rope_type": "yarn", "factor": None}
    values = LLAMA | {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    assert config_from_hf(values).rope_scaling.factor == 4.0


@pytest.mark.parametrize("key", ["mscale", "mscale_all_dim", "beta_fast", "beta_slow"])
def test_zero_is_the_default_of_yarn(key):
    plain = {"rope_type": "yarn", "factor": 40.0, "rope_theta": 5e5}
    expected = config_from_hf(LLAMA | {"rope_scaling": plain})
    zero = plain | {"mscale": 0.7, "mscale_all_dim": 1.0} | {key: 0}
    if key.startswith("beta"):
        zero = plain | {key: 0}
    assert config_from_hf(LLAMA | {"rope_scaling": zero}) == expected


def test_qwen3_without_the_size_of_a_head():
    values = {k: v for k, v in PUBLISHED["qwen3_0_6b"].items() if k != "head_dim"}
    assert config_from_hf(values | {"hidden_size": 512}).head_dim == 128


def test_the_first_gemma_means_the_approximation():
    values = {k: v for k, v in PUBLISHED["gemma_2b"].items() if "hidden_act" not in k}
    for name in ("gelu", "gelu_pytorch_tanh", None):
        config = config_from_hf(values | {"hidden_act": name})
        assert config.activation == "geglu_tanh"
    # Of Gemma 2 the exact one is what it says.
    gemma2 = PUBLISHED["gemma2_27b"] | {"hidden_activation": "gelu"}
    assert config_from_hf(gemma2).activation == "geglu"
    exact = dataclasses.replace(gemma_tiny(), activation="geglu")
    with pytest.raises(ValueError, match="activation='geglu_tanh' instead of 'geglu'"):
        config_to_hf(exact)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks(number):
    """Whether a family reads them or not."""
    for values in (
        {"initializer_range": number},
        {"rope_scaling": {"rope_type": "default", "factor": number}},
        {"rope_parameters": {"long_factor": [1.0, number]}},
    ):
        with pytest.raises(ValueError, match=r"(range|factor) -?(nan|inf) of config"):
            config_from_hf(LLAMA | values)


def test_llama3_scaling_without_the_original_length():
    scaling = {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = config_from_hf(LLAMA | {"rope_parameters": scaling})
    assert config.rope_scaling is not None
    assert config.rope_scaling.original_max_position_embeddings == 128


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"model_type None is not supported; use one of \['albert', 'bert', "),
        (LLAMA | {"model_type": "mamba"}, "model_type 'mamba' is not supported"),
        (
            {k: v for k, v in MISTRAL.items() if k != "num_key_value_heads"},
            "model_type 'mistral' lacks the key 'num_key_value_heads'",
        ),
        (
            {k: v for k, v in LLAMA.items() if k != "hidden_size"},
            "config.json of model_type 'llama' lacks the key 'hidden_size'",
        ),
        (
            {k: v for k, v in GPTJ.items() if k != "rotary_dim"},
            "config.json of model_type 'gptj' lacks the key 'rotary_dim'",
        ),
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu' .* expected 'silu'"),
        (LLAMA | {"sliding_window": 16}, "sliding_window 16 .* expected None"),
        (LLAMA | {"rms_norm_eps": None}, "lacks the key 'rms_norm_eps'"),
        (LLAMA | {"hidden_size": "64"}, "hidden_size '64' .* an integer from 1"),
        (LLAMA | {"vocab_size": "128"}, "vocab_size '128' .* an integer from 1"),
        (GPTJ | {"rotary_dim": None}, "lacks the key 'rotary_dim'"),
        (LLAMA | {"hidden_size": 30}, "hidden_size 30 .* multiple of num_attention_h"),
        (
            LLAMA | {"rope_scaling": {"type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported; use 'default', 'linear', 'llama3',",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "lacks the key 'factor'",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported",
        ),
        (
            LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
            "lacks the key 'low_freq_factor'",
        ),
        (
            LLAMA | {"partial_rotary_factor": 0.5},
            "partial_rotary_factor 0.5 is not sup",
        ),
        (LLAMA | {"rope_theta": 10**400}, "rope_theta 10{9}.* a number from 1e-37 to"),
        (LLAMA | {"rms_norm_eps": 1e-300}, "rms_norm_eps 1e-300 .* from 1e-37 to 1e"),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_theta": 5e5}}},
            "full_attention .* of config.json is not supported for model_type 'llama'",
        ),
        (
            LLAMA | {"rope_theta": 1, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "rope_theta 1.0 must exceed 1",
        ),
        (
            LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor 0.5 is not supported",
        ),
        (
            LLAMA | {"quantization_config": {"bits": 4}},
            "quantization_config .'bits': 4. of config.json is not supported",
        ),
        (
            GPT2 | {"activation_function": "silu"},
            "activation_function 'silu' of conf",
        ),
        (
            GPT2 | {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx True .* expected False",
        ),
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights False"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention True"),
        (GPTJ | {"tie_word_embeddings": True}, "tie_word_embeddings True"),
        (GPTJ | {"rotary": False}, "rotary False .* expected True"),
        (
            PUBLISHED["gemma_2b"] | {"hidden_activation": "relu"},
            "hidden_activation 'relu' .* for model_type 'gemma' beside hidden_act",
        ),
        (
            PUBLISHED["gemma2_27b"] | {"use_bidirectional_attention": True},
            "use_bidirectional_attention True .* expected False",
        ),
        (
            PUBLISHED["gemma2_27b"] | {"sliding_window": None},
            "layer_types .* for each of 46 layers without a sliding window",
        ),
        (
            PUBLISHED["gemma3_1b"] | {"attn_logit_softcapping": 50.0},
            "attn_logit_softcapping 50.0 .* expected None",
        ),
        (
            PUBLISHED["gemma3_1b"]
            | {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}},
            "lacks the key 'factor'",
        ),
        (
            PUBLISHED["gemma3_1b"]
            | {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "linear", "factor": 2.0}
                }
            },
            "rope_parameters of sliding_attention .* expected rope_type 'default'",
        ),
    ],
)
def test_settings_that_the_decoder_lacks(values, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        config_from_hf(values)


TWICE = RopeScaling(kind="linear", factor=2.0)
LINEAR = dataclasses.replace(TWICE, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    ("config", "change", "same"),
    [
        (llama_tiny, {"rotary_dim": 8}, {"rotary_dim": None}),
        (llama_tiny, {"query_pre_attn_scalar": 8}, {"query_pre_attn_scalar": None}),
        (gemma2_tiny, {"query_pre_attn_scalar": None}, {"query_pre_attn_scalar": 16}),
        (gemma3_tiny, {"rope_theta_local": None}, {"rope_theta_local": 1e6}),
        (modernbert_tiny, {"rope_theta_local": None}, {"rope_theta_local": 160000.0}),
        (llama_tiny, {"rope_scaling": LINEAR}, {"rope_scaling": TWICE}),
        (
            neox_tiny,
            {"head_dim": 100, "d_model": 200, "rotary_dim": 58},
            {"head_dim": 100, "d_model": 200, "rotary_dim": 58},
        ),
    ],
)
def test_two_ways_to_say_one_thing(config, change, same):
    """A file has one of them, which says the same."""
    written = config_to_hf(dataclasses.replace(config(), **change))
    assert config_from_hf(written) == dataclasses.replace(config(), **same)


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (
            llama_tiny,
            {"lm_head_bias": True},
            "LlamaForCausalLM, needs lm_head_bias=False",
        ),
        (mistral_tiny, {"global_layers": (1,)}, "MistralForCausalLM, needs global_l"),
        (neox_tiny, {"parallel_mlp_norm": False}, "needs parallel_mlp_norm=True inst"),
        (llama_tiny, {"rotary_dim": 4}, "rotary_dim=None instead of 4"),
        (
            llama_tiny,
            {"attention_out_bias": True},
            "attention_out_bias=False instead of True",
        ),
        (gpt2_tiny, {"mlp_bias": False}, "GPT2LMHeadModel, needs mlp_bias=True instea"),
        (gpt2_tiny, {"num_kv_heads": 2}, "num_kv_heads=4 instead of 2"),
        (gptj_tiny, {"rope_theta": 5e5}, "GPTJForCausalLM, needs rope_theta=10000.0"),
        (gptj_tiny, {"activation": "swiglu"}, "activation='gelu_tanh' instead of 'swi"),
    ],
)
def test_decoders_that_transformers_lacks(config, change, message):
    with pytest.raises(ValueError, match=message):
        config_to_hf(dataclasses.replace(config(), **change))


WRONG = {
    bool: ["false", 0, [True]],
    int: ["64", -5, 1.5, math.nan, True, 10**18],
    float: ["1", -1.0, math.nan, True, [1.0]],
    str: [3, ["gelu"], True],
    list: [3, [3]],
    dict: ["linear", [1]],
}
"""What each type of value is not."""


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_values_of_the_wrong_kind(name, no_shape_hook, monkeypatch):
    """No key that a family reads takes a value of another kind."""
    read = set()
    for method in ("get", "__getitem__"):
        plain = getattr(Keys, method)

        def recorded(self, key, *default, plain=plain):
            read.add(key)
            return plain(self, key, *default)

        monkeypatch.setattr(Keys, method, recorded)
    for file in sorted(MODELS.parent.rglob("config.json")):
        values = json.loads(file.read_text())
        if values["model_type"] != name:
            continue
        read.clear()
        FAMILIES[name].read(Keys(values))
        keys = [key for key in sorted(read) if values.get(key) is not None]
        assert len(keys) > 5
        for key in keys:
            for value in WRONG[type(values[key])]:
                with pytest.raises(ValueError, match=key):
                    config_from_hf(values | {key: value})
