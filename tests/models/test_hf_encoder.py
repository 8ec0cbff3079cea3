"""Encoders in Hugging Face directories against what transformers computed from them.

The fixtures and their outputs come from ``tests/fixtures/make_encoders.py``.
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
import tokenizers

from jaxscale.models import (
    HeadConfig,
    Tokenizer,
    config_from_hf,
    config_to_hf,
    encoder_head,
    encoder_preset,
    load,
    save,
)
from jaxscale.models.families.registry import FAMILIES
from jaxscale.sharding import MeshConfig, fsdp_tp, make_mesh


ENCODERS = Path(__file__).parents[1] / "fixtures" / "encoders"
FAMILY_NAMES = sorted(d.name for d in ENCODERS.iterdir() if "_" not in d.name)
KINDS = ["hidden", "masked_lm", "sequence", "token", "span"]

# The bound of the project; the largest output of the fixtures is about 5.
ATOL = 1e-4


@functools.cache
def fixture(family):
    return safetensors.numpy.load_file(ENCODERS / family / "expected.safetensors")


def prompts(family):
    """The prompts packed in one row: tokens, boundaries and types, if it has them."""
    expected = fixture(family)
    count = sum(key.startswith("ids.") for key in expected)
    ids = [expected[f"ids.{i}"] for i in range(count)]
    ends = np.cumsum([len(row) for row in ids])

    def row(parts):
        tokens = np.full((1, 64), 7, np.int32)
        tokens[0, : ends[-1]] = np.concatenate(parts)
        return tokens

    types = None
    if "types.0" in expected:
        types = row([expected[f"types.{i}"] for i in range(count)])
        types = np.minimum(types, 1)
    # One slot more than there are sequences, and tokens past the last one.
    return row(ids), np.array([[0, *ends, ends[-1]]], np.int32), types


def compose(family, kind, directory):
    """The directory that transformers saved with a head."""
    source = ENCODERS / family
    if kind == "hidden":
        return source
    heads = json.loads((source / "heads.json").read_text())
    base = safetensors.numpy.load_file(source / "model.safetensors")
    tensors = {heads["prefix"] + name: value for name, value in base.items()}
    extra = safetensors.numpy.load_file(source / "heads.safetensors")
    start = f"{kind}/"
    tensors |= {k.removeprefix(start): v for k, v in extra.items() if start in k}
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(heads[kind]))
    safetensors.numpy.save_file(
        tensors, directory / "model.safetensors", metadata={"format": "pt"}
    )
    return directory


def forward(model, tokens, bounds, types):
    """Hidden states, by a program that all heads of a family share, and the answer."""
    body = jax.tree.map(lambda x: x, model)
    body.head = None
    # GPUs would round fp32 products to TF32.
    with jax.default_matmul_precision("highest"):
        hidden = hidden_of(body, tokens, bounds, types)
        return hidden, None if model.head is None else answer_of(model, hidden, bounds)


@jax.jit
def hidden_of(model, tokens, bounds, types):
    return model.hidden(tokens, cu_seqlens=bounds, token_types=types)


@jax.jit
def answer_of(model, hidden, bounds):
    return model.answer(hidden, bounds)


def outputs(model, family):
    """What the model says about each prompt, as the fixture names it."""
    tokens, bounds, types = prompts(family)
    hidden, answer = forward(model, tokens, bounds, types)
    spans = [slice(*pair) for pair in zip(bounds[0], bounds[0, 1:-1], strict=False)]
    hidden = np.asarray(hidden)
    found = {f"hidden.{i}": hidden[0, span] for i, span in enumerate(spans)}
    if answer is None:
        return found
    kind, answer = model.head.config.kind, np.asarray(answer)
    for i, span in enumerate(spans):
        found[f"{kind}.{i}"] = answer[0, i if model.head.config.pools else span]
    return found


def assert_as_transformers(model, family):
    expected = fixture(family)
    for name, got in outputs(model, family).items():
        np.testing.assert_allclose(got, expected[name], rtol=0, atol=ATOL, err_msg=name)


def assert_same_parameters(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def copy(tmp_path):
    """Copies a fixture, so that a test may damage it."""

    def make(name):
        return shutil.copytree(ENCODERS / name, tmp_path / name)

    return make


# ------------------------------------------------------------------------------------
# Values


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_match_transformers(family, kind, tmp_path):
    model = load(compose(family, kind, tmp_path / "file"))
    pools = "pooler.0" in fixture(family)
    found = None if model.head is None else model.head.config.kind
    assert found == (("pooler" if pools else None) if kind == "hidden" else kind)
    assert_as_transformers(model, family)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_bf16_is_as_exact_as_transformers(family, tmp_path):
    directory = compose(family, "masked_lm", tmp_path / "file")
    model = load(directory, param_dtype=jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    expected = fixture(family)
    got = outputs(model, family)
    assert got["hidden.0"].dtype == jnp.bfloat16
    assert got["masked_lm.0"].dtype == jnp.float32
    for kind in ("hidden", "masked_lm"):
        error = max(
            np.abs(np.asarray(value, np.float32) - expected[name]).max()
            for name, value in got.items()
            if name.startswith(kind)
        )
        assert 0 < error <= 2 * expected[f"bf16_error.{kind}"], kind


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_other_keys_of_the_configuration_say_the_same(family):
    configs = [
        config_from_hf(json.loads((ENCODERS / family / name).read_text()))
        for name in ("config.json", "config.other.json")
    ]
    assert configs[0] == configs[1]
    assert configs[0].family == family


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_sharded(family, tmp_path):
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=4))
    rules = dataclasses.replace(fsdp_tp(), vocab=None, act_vocab=None)
    directory = compose(family, "sequence", tmp_path / "file")
    model = load(directory, mesh=mesh, rules=rules)
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.addressable_shards[0].data.shape[1:] == (16, 8)
    with jax.set_mesh(mesh):
        assert_as_transformers(model, family)


@pytest.mark.parametrize(
    ("family", "name"), [("xlm-roberta", "XLMRoberta"), ("camembert", "Camembert")]
)
def test_relatives_of_roberta(family, name, tmp_path):
    """Files of RoBERTa's tensors that name other classes, as transformers has them."""
    directory = compose("roberta", "sequence", tmp_path / "file")
    config = json.loads((directory / "config.json").read_text())
    renamed = [cls.replace("Roberta", name) for cls in config["architectures"]]
    edit_json(directory / "config.json", model_type=family, architectures=renamed)
    model = load(directory)
    assert model.config.family == family
    assert_as_transformers(model, "roberta")
    save(model, tmp_path / "saved")
    values = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (values["model_type"], values["architectures"]) == (family, renamed)
    assert_same_parameters(load(tmp_path / "saved"), model)


def test_names_of_files_converted_from_tensorflow(copy):
    directory = copy("bert")
    file = directory / "model.safetensors"
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): value
        for name, value in safetensors.numpy.load_file(file).items()
    }
    old = {f"bert.{name}": value for name, value in old.items()}
    table = old["bert.embeddings.word_embeddings.weight"]
    # What bert-base-uncased holds besides.
    old |= {
        "bert.embeddings.position_ids": np.arange(40)[None],
        "cls.seq_relationship.weight": np.ones((2, 32), np.float32),
        "cls.predictions.decoder.weight": table,
    }
    extra = safetensors.numpy.load_file(directory / "heads.safetensors")
    start = "masked_lm/"
    old |= {k.removeprefix(start): v for k, v in extra.items() if start in k}
    safetensors.numpy.save_file(old, file, metadata={"format": "pt"})
    edit_json(directory / "config.json", architectures=["BertForPreTraining"])
    assert_as_transformers(load(directory), "bert")
    old["cls.predictions.decoder.weight"] = table + 1
    safetensors.numpy.save_file(old, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"decoder\.weight' .* differs from"):
        load(directory)


# The projection over the vocabulary of each family.
PROJECTIONS = {
    "albert": "predictions.decoder",
    "bert": "cls.predictions.decoder",
    "distilbert": "vocab_projector",
    "modernbert": "decoder",
    "roberta": "lm_head.decoder",
}


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_projections_that_are_not_tied(family, tmp_path):
    directory = compose(family, "masked_lm", tmp_path / "file")
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    edit_json(directory / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=f"lacks the tensor '{PROJECTIONS[family]}"):
        load(directory)

    # What the fixture ties, as a tensor of its own; the bias has one name of two.
    source = FAMILIES[family].tied[f"{PROJECTIONS[family]}.weight"]
    tensors[f"{PROJECTIONS[family]}.weight"] = tensors[source]
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    model = load(directory)
    assert not model.config.tie_embeddings
    assert_as_transformers(model, family)
    save(model, tmp_path / "saved")
    assert_same_parameters(load(tmp_path / "saved"), model)
    # All that the class of transformers has: it warns of what it does not find.
    saved = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors.keys() <= saved.keys() | {k for k in tensors if "pooler" in k}
    assert (saved.keys() - tensors.keys()) <= FAMILIES[family].tied.keys()

    # Of both names, transformers 5 reads that of the projection.
    tensors[f"{PROJECTIONS[family]}.bias"] = np.ones(99, np.float32)
    tensors[f"{PROJECTIONS[family]}.weight"] = np.zeros_like(tensors[source])
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    answers = outputs(load(directory), family)
    np.testing.assert_array_equal(answers["masked_lm.0"], 1)
    np.testing.assert_allclose(
        answers["hidden.0"], fixture(family)["hidden.0"], rtol=0, atol=ATOL
    )


def test_heads_of_labels_need_no_tied_table(tmp_path):
    directory = compose("bert", "sequence", tmp_path / "file")
    edit_json(directory / "config.json", tie_word_embeddings=False)
    assert_as_transformers(load(directory), "bert")


def test_albert_without_an_activation(copy):
    directory = copy("albert")
    values = json.loads((directory / "config.json").read_text())
    assert values.pop("hidden_act") == "gelu_new"
    (directory / "config.json").write_text(json.dumps(values))
    assert_as_transformers(load(directory), "albert")


@pytest.mark.parametrize("scan_layers", [True, False])
def test_albert_with_groups_of_layers(scan_layers, tmp_path):
    directory = compose("albert_groups", "masked_lm", tmp_path / "file")
    model = load(directory, scan_layers=scan_layers)
    config = model.config
    assert (config.num_layers, config.num_blocks) == (14, 6)
    turns = [config.block_of(layer) // 2 for layer in range(0, 14, 2)]
    assert turns == [0, 0, 0, 1, 1, 2, 2]
    assert_as_transformers(model, "albert_groups")
    if not scan_layers:
        assert_as_transformers(model.unstacked(), "albert_groups")
        return
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config == config
    assert_same_parameters(again, model)
    theirs, ours = (
        safetensors.numpy.load_file(place / "model.safetensors")
        for place in (directory, tmp_path / "saved")
    )
    assert {k for k in theirs if "pooler" not in k} == ours.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


@pytest.mark.parametrize("num_layers", [1, 2, 4])
def test_windows_of_few_layers_are_written_and_read(num_layers):
    config = encoder_preset("modernbert_tiny")
    config = dataclasses.replace(config, num_layers=num_layers, global_every=4)
    values = config_to_hf(config)
    assert values["layer_types"].count("full_attention") == 1
    assert config_from_hf(values) == config


def test_another_head_begins_anew(tmp_path):
    directory = compose("bert", "masked_lm", tmp_path / "file")
    assert load(directory, head=None).head is None
    config = config_from_hf(json.loads((directory / "config.json").read_text()))
    head = encoder_head(config, "sequence", labels=("no", "yes"))
    models = [load(directory, head=head, seed=seed) for seed in (0, 0, 1)]
    assert_same_parameters(models[0], models[1])
    kernels = [model.head.output.kernel[...] for model in models]
    assert kernels[0].shape == (32, 2)
    assert abs(kernels[0] - kernels[2]).max() > 1e-3
    hidden = {k: v for k, v in outputs(models[2], "bert").items() if "hidden" in k}
    for name, value in hidden.items():
        np.testing.assert_allclose(value, fixture("bert")[name], rtol=0, atol=ATOL)


# ------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_saved_files_hold_what_was_loaded(family, kind, tmp_path):
    source = compose(family, kind, tmp_path / "file")
    model = load(source)
    save(model, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert again.config == model.config
    assert_same_parameters(again, model)
    theirs, ours = (
        safetensors.numpy.load_file(directory / "model.safetensors")
        for directory in (source, tmp_path / "saved")
    )
    # Heads of tokens have no pooler; the fixture's encoder does.
    theirs = {k: v for k, v in theirs.items() if k in ours or "pooler" not in k}
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].tobytes() == value.tobytes(), name
    saved, original = (
        json.loads((directory / "config.json").read_text())
        for directory in (tmp_path / "saved", source)
    )
    assert saved["architectures"] == original["architectures"]
    assert saved.get("id2label") == original.get("id2label") or kind == "span"


def test_padding_token_that_positions_depend_on(tmp_path):
    model = load(ENCODERS / "roberta")
    names = {"<s>": 0, "<pad>": 1, "</s>": 2, "cat": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, unk_token="cat"))
    save(model, tmp_path, tokenizer=Tokenizer(backend, pad_token="<pad>"))
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["pad_token_id"] == 1
    assert config_from_hf(values) == model.config
    with pytest.raises(ValueError, match="pads with 2, but positions of the model are"):
        save(model, tmp_path, tokenizer=Tokenizer(backend, pad_token="</s>"))


def test_presets_are_written_and_read():
    for name in ("bert_base", "roberta_base", "albert_base", "distilbert_base"):
        config = encoder_preset(name)
        assert config_from_hf(config_to_hf(config)) == config
    config = encoder_preset("modernbert_base")
    values = config_to_hf(config)
    assert values["local_attention"] == 128
    assert values["layer_types"][:4] == [
        *("full_attention", "sliding_attention", "sliding_attention"),
        "full_attention",
    ]
    assert config_from_hf(values) == config


# ------------------------------------------------------------------------------------
# Errors


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (
            "bert",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type 'relative_key' of config.json is not supported",
        ),
        ("roberta", {"is_decoder": True}, "is_decoder True of config.json is not"),
        ("bert", {"add_cross_attention": True}, "add_cross_attention True of"),
        ("bert", {"hidden_act": "silu"}, "hidden_act 'silu' of config.json is not"),
        ("bert", {"num_attention_heads": 5}, "32 of config.json must be a multiple"),
        ("bert", {"hidden_size": None}, "'bert' lacks the key 'hidden_size'"),
        ("bert", {"quantization_config": {}}, "quantization_config {} of config.json"),
        ("bert", {"model_type": "xlnet"}, "model_type 'xlnet' is not supported; use"),
        ("albert", {"num_hidden_groups": 4}, "num_layers 3 must be .* at least 4"),
        ("albert", {"inner_group_num": 0}, "inner_group_num 0 of config.json must be"),
        ("modernbert", {"hidden_activation": "silu"}, "hidden_activation 'silu' of"),
        (
            "modernbert",
            {"layer_types": ["sliding_attention"] * 5},
            r"layer_types \['sliding_attention', .* is not supported",
        ),
        (
            "modernbert",
            {"layer_types": ["full_attention"]},
            r"layer_types \['full_attention'\] of config.json .* of 5 and",
        ),
        (
            "modernbert",
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "factor": 2.0}
                }
            },
            "rope_type 'yarn' of config.json is not supported",
        ),
    ],
)
def test_unsupported_settings(family, changes, message):
    values = json.loads((ENCODERS / family / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        config_from_hf(values | changes)


def test_unsupported_heads(copy):
    directory = copy("bert")
    edit_json(directory / "config.json", architectures=["BertForMultipleChoice"])
    with pytest.raises(ValueError, match=r"\['BertForMultipleChoice'\] of config.json"):
        load(directory)
    assert load(directory, head=None).head is None
    changes = {"architectures": ["BertForTokenClassification"]}
    edit_json(directory / "config.json", **changes, id2label={"0": "a", "2": "b"})
    with pytest.raises(ValueError, match="must number its labels from 0 to 1"):
        load(directory)
    with pytest.raises(ValueError, match="kind 'pooler': transformers has no such"):
        encoder_head(encoder_preset("distilbert_tiny"), "pooler")
    with pytest.raises(ValueError, match="num_labels 0, expected 1 or more"):
        encoder_head(encoder_preset("bert_tiny"), "token")


def test_models_that_transformers_lacks():
    config = dataclasses.replace(encoder_preset("bert_tiny"), position="rope")
    message = "'bert' of transformers needs position='learned' instead of 'rope'"
    with pytest.raises(ValueError, match=message):
        config_to_hf(config)
    head = HeadConfig(kind="sequence", num_labels=2, transform="gelu")
    with pytest.raises(ValueError, match="needs transform='tanh' instead of 'gelu'"):
        config_to_hf(encoder_preset("bert_tiny"), head)


def test_missing_and_unexpected_tensors(copy):
    directory = copy("distilbert")
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    gone = tensors.pop("transformer.layer.1.ffn.lin1.weight")
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the tensor 'transformer\.layer\.1\."):
        load(directory)
    tensors["transformer.layer.1.ffn.lin1.weight"] = gone
    tensors["transformer.layer.2.ffn.lin1.weight"] = gone
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"'transformer\.layer\.2\..* has no place"):
        load(directory)


def test_heads_are_for_encoders():
    head = encoder_head(encoder_preset("bert_tiny"), "span")
    directory = ENCODERS.parent / "models" / "gpt2"
    for given in (None, head):
        with pytest.raises(ValueError, match=r"is for encoders, .* model_type 'gpt2'"):
            load(directory, head=given)
    assert set(FAMILIES) >= set(FAMILY_NAMES)
