"""DeBERTa in Hugging Face directories against what transformers computed from them.

The fixtures and their answers come from ``tests/fixtures/make_deberta.py``.
"""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from jaxscale.models import (
    ENCODER_PRESETS,
    config_from_hf,
    config_to_hf,
    encoder_preset,
    load,
    save,
)
from jaxscale.nn import RelativePositions
from jaxscale.sharding import MeshConfig, fsdp_tp, make_mesh


FIXTURES = Path(__file__).parents[1] / "fixtures" / "deberta"
NAMES = sorted(directory.name for directory in FIXTURES.iterdir())
ATOL = 1e-4


@functools.cache
def expected(name):
    return safetensors.numpy.load_file(FIXTURES / name / "expected.safetensors")


def packed(name):
    """The prompts in one row, with a slot and tokens to spare."""
    ids = [expected(name)[f"ids.{i}"] for i in range(4)]
    ends = np.cumsum([len(row) for row in ids])

    def row(key):
        tokens = np.full((1, 64), 1, np.int32)
        tokens[0, : ends[-1]] = np.concatenate(
            [expected(name)[f"{key}.{i}"] for i in range(4)]
        )
        return tokens

    types = row("types") if "types.0" in expected(name) else None
    return row("ids"), np.array([[0, *ends, ends[-1]]], np.int32), types


@jax.jit
def forward(model, tokens, bounds, types):
    with jax.default_matmul_precision("highest"):
        hidden = model.hidden(tokens, cu_seqlens=bounds, token_types=types)
        return hidden, model.answer(hidden, bounds)


def answers(model, name):
    """What the model says about each prompt, as the fixture names it."""
    tokens, bounds, types = packed(name)
    hidden, logits = map(np.asarray, forward(model, tokens, bounds, types))
    found = {}
    for i in range(4):
        span = slice(bounds[0, i], bounds[0, i + 1])
        found[f"hidden.{i}"] = hidden[0, span]
        found[f"logits.{i}"] = logits[0, i if model.head.config.pools else span]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_answers_match_transformers(name):
    model = load(FIXTURES / name)
    for key, value in answers(model, name).items():
        np.testing.assert_allclose(value, expected(name)[key], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", ["v1", "v2_convolution", "v3"])
def test_bf16_is_as_exact_as_transformers(name):
    model = load(FIXTURES / name, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    exact = expected(name)
    errors = dict.fromkeys(("hidden", "logits"), (0.0, 0.0))
    for key, value in answers(model, name).items():
        ours, theirs = (
            np.abs(np.asarray(x, np.float32) - exact[key]).max()
            for x in (value, exact[f"bf16_{key}"])
        )
        kind = key.split(".")[0]
        errors[kind] = max(errors[kind][0], ours), max(errors[kind][1], theirs)
    for kind, (ours, theirs) in errors.items():
        assert 0 < ours <= 2 * theirs, kind


def test_sharded():
    """Heads, of which each has its query, key and value in one tensor, are split."""
    mesh, rules = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4)), fsdp_tp()
    model = load(FIXTURES / "v1", mesh=mesh, rules=rules)
    kernel = model.blocks.attention.key.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (3, 16, 8)
    with jax.set_mesh(mesh):
        for key, value in answers(model, "v1").items():
            np.testing.assert_allclose(value, expected("v1")[key], rtol=0, atol=ATOL)


def test_configurations():
    def read(name):
        values = json.loads((FIXTURES / name / "config.json").read_text())
        return config_from_hf(values)

    v3 = read("v3")
    assert v3.relative == RelativePositions(span=8, max_distance=24)
    assert (v3.position, v3.token_types, v3.relative_norm) == ("none", 0, True)
    assert read("v3_legacy") == v3
    linear = RelativePositions(
        span=10, position_to_content=False, share_projections=False
    )
    assert read("linear_c2p").relative == linear
    assert not read("linear_c2p").relative_norm
    v2 = read("v2_convolution")
    assert (v2.position, v2.token_types, v2.convolution) == ("learned", 2, 3)
    assert not v2.relative.share_projections
    assert (v2.key_bias, v2.family) == (True, "deberta-v2")
    v1 = read("v1")
    assert v1.relative == RelativePositions(span=64, share_projections=False)
    assert (v1.key_bias, v1.family, v1.relative_norm) == (False, "deberta", False)
    assert read("v1_far").relative.span == 10


@pytest.mark.parametrize("name", NAMES)
def test_saved_files_hold_what_was_loaded(name, tmp_path):
    model = load(FIXTURES / name)
    save(model, tmp_path)
    again = load(tmp_path)
    assert (again.config, again.head.config) == (model.config, model.head.config)
    for ours, theirs in zip(
        jax.tree.leaves(again), jax.tree.leaves(model), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    theirs, ours = (
        safetensors.numpy.load_file(directory / "model.safetensors")
        for directory in (FIXTURES / name, tmp_path)
    )
    theirs.pop("mask_predictions.bias", None)
    # The head is written under the names that transformers takes by default.
    theirs = {
        key.replace("lm_predictions.lm_head.bias", "cls.predictions.bias").replace(
            "lm_predictions.lm_head.", "cls.predictions.transform."
        ): value
        for key, value in theirs.items()
    }
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        np.testing.assert_array_equal(ours[key], value)


def test_presets_are_written_and_read():
    for name in ENCODER_PRESETS:
        if "deberta" in name:
            config = encoder_preset(name)
            assert config_from_hf(config_to_hf(config)) == config


def test_unused_tables_of_positions(tmp_path):
    """Some published files hold them, though the configuration has no use for them."""
    directory = shutil.copytree(FIXTURES / "v3", tmp_path / "v3")
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "deberta.embeddings.position_embeddings.weight"
    tensors[name] = np.ones((64, 32), np.float32)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    assert load(directory).positions is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_attention": False}, r"relative_attention False and pos_att_type"),
        ({"pos_att_type": ["p2p"]}, r"pos_att_type \['p2p'\] of config.json are not"),
        ({"pos_att_type": None}, r"leave nothing of relative positions"),
        ({"embedding_size": 16}, r"embedding_size 16 of config.json is not supported"),
        ({"attention_head_size": 9}, r"attention_head_size 9 of config.json is not"),
        ({"conv_kernel_size": 4}, r"convolution 4 must be odd"),
        ({"conv_kernel_size": 3, "conv_groups": 2}, r"conv_groups 2 of config.json"),
        ({"hidden_act": "silu"}, r"hidden_act 'silu' of config.json is not supported"),
    ],
)
def test_unsupported_settings(changes, message):
    values = json.loads((FIXTURES / "v3" / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        config_from_hf(values | changes)


def test_unsupported_settings_of_v1():
    values = json.loads((FIXTURES / "v1" / "config.json").read_text())
    for changes, message in (
        ({"talking_head": True}, "talking_head True of config.json is not supported"),
        ({"pos_att_type": ["p2p"]}, "not supported for model_type 'deberta'; expected"),
    ):
        with pytest.raises(ValueError, match=message):
            config_from_hf(values | changes)
    bucketed = RelativePositions(span=8, max_distance=24, share_projections=False)
    config = dataclasses.replace(config_from_hf(values), relative=bucketed)
    with pytest.raises(ValueError, match="'deberta' of transformers needs relative="):
        config_to_hf(config)
