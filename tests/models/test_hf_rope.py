"""Exports say the same rotary embeddings to transformers 4.57 and 5.

Both readers are written here as the configurations and `modeling_rope_utils` of the two
versions read a file; they know nothing of ours.
"""

import dataclasses
import json
import math

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.models.families.gemma import gemma2_tiny, gemma3_tiny, gemma_tiny
from jaxscale.models.families.gpt_neox import neox_tiny
from jaxscale.models.families.llama import llama_tiny
from jaxscale.models.families.mistral import mistral_tiny
from jaxscale.models.families.modernbert import modernbert_tiny
from jaxscale.models.families.qwen import qwen2_tiny, qwen3_tiny
from jaxscale.models.families.registry import config_from_hf, config_to_hf
from jaxscale.nn.embeddings import RopeScaling


SCALINGS = {
    "none": None,
    "linear": RopeScaling(kind="linear", factor=4.0),
    "llama3": RopeScaling(factor=8.0, original_max_position_embeddings=32),
    "yarn": RopeScaling(
        kind="yarn", factor=4.0, original_max_position_embeddings=32, beta_fast=8.0
    ),
    "dynamic": RopeScaling(
        kind="dynamic", factor=4.0, original_max_position_embeddings=128
    ),
}
FAMILIES = {
    "llama": llama_tiny,
    "mistral": mistral_tiny,
    "qwen2": qwen2_tiny,
    "qwen3": qwen3_tiny,
    "gemma": gemma_tiny,
    "gemma2": gemma2_tiny,
    "gemma3_text": gemma3_tiny,
    "gpt_neox": neox_tiny,
}


def read_by_4(values, local):
    """Base, scaling and rotated share of a layer, as transformers 4.57 reads them."""
    scaling = values.get("rope_scaling")
    match values["model_type"]:
        case "gpt_neox":
            return values.get("rotary_emb_base", 1e4), scaling, values["rotary_pct"]
        case "gemma3_text" if local:
            return values.get("rope_local_base_freq", 1e4), None, 1.0
        case "gemma3_text":
            return values.get("rope_theta", 1e6), scaling, 1.0
        case "modernbert" if local:
            return values.get("local_rope_theta", 1e4), scaling, 1.0
        case "modernbert":
            return values.get("global_rope_theta", 1.6e5), scaling, 1.0
    return values.get("rope_theta", 1e4), scaling, 1.0


def read_by_5(values, local):
    """The same for transformers 5."""
    scaling, rope = values.get("rope_scaling"), values.get("rope_parameters") or {}
    if values["model_type"] in ("gemma3_text", "modernbert"):
        rope = dict(rope["sliding_attention" if local else "full_attention"])
        rope |= {} if local else scaling or {}
    else:
        rope = dict(scaling or rope)
    theta, share = values.get("rope_theta", 1e4), 1.0
    if values["model_type"] == "gpt_neox":
        theta, share = values.get("rotary_emb_base", 1e4), values["rotary_pct"]
    theta = rope.pop("rope_theta", theta)
    return theta, rope, rope.pop("partial_rotary_factor", share)


def frequencies(theta, scaling, share, head_dim, longest):
    """Frequencies and factor of cosine and sine of a sequence of 300 tokens."""
    dim = int(head_dim * share)
    pairs = np.arange(0, dim, 2) / dim
    kind = "default" if scaling is None else scaling["rope_type"]
    if kind == "default":
        return theta**-pairs, 1.0
    factor = scaling["factor"]
    if kind == "linear":
        return theta**-pairs / factor, 1.0
    if kind == "dynamic":
        stretch = factor * 300 / longest - (factor - 1)
        return (theta * stretch ** (dim / (dim - 2))) ** -pairs, 1.0
    freq, original = theta**-pairs, scaling["original_max_position_embeddings"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = original * freq / (2 * math.pi)
        smooth = (turns - low) / (high - low)
        between = (1 - smooth) * freq / factor + smooth * freq
        slow = np.where(turns < low, freq / factor, between)
        return np.where(turns > high, freq, slow), 1.0
    assert kind == "yarn"
    ends = [
        dim * math.log(original / (scaling[beta] * 2 * math.pi)) / 2 / math.log(theta)
        for beta in ("beta_fast", "beta_slow")
    ]
    low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0, 1)
    return freq * (1 - ramp) + freq / factor * ramp, 0.1 * math.log(factor) + 1


def check(config, layers):
    values = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(values) == config
    for layer in layers:
        attention = config.attention(layer)
        rope, head_dim = attention.rope, config.head_dim
        ours = rope.inv_freq(head_dim)
        if rope.is_dynamic:
            ours = np.asarray(rope.dynamic_inv_freq(head_dim, jnp.array([[300]])))
        local = attention.window is not None
        for read in (read_by_4, read_by_5):
            theirs, factor = frequencies(*read(values, local), head_dim, 128)
            np.testing.assert_allclose(ours.reshape(-1), theirs, rtol=1e-5)
            assert rope.attention_factor == pytest.approx(factor)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_decoders_are_read_alike_by_both_versions(family, kind):
    config = dataclasses.replace(
        FAMILIES[family](), rope_theta=700.0, rope_scaling=SCALINGS[kind]
    )
    if family == "gemma3_text":
        config = dataclasses.replace(config, rope_theta_local=50.0)
    assert config_to_hf(config)["model_type"] == family
    check(config, range(config.num_layers))


def test_modernbert_is_read_alike_by_both_versions():
    config = modernbert_tiny()
    config = dataclasses.replace(config, rope_theta=700.0, rope_theta_local=50.0)
    check(config, range(config.num_layers))
