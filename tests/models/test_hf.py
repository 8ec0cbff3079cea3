"""Hugging Face directories against what transformers computed from them.

The fixtures and their logits come from ``tests/fixtures/make_models.py``.
"""

import dataclasses
import json
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
from jax.sharding import NamedSharding

from jaxscale.inference import generate
from jaxscale.models import Tokenizer, load, save
from jaxscale.models.decoder import Decoder
from jaxscale.models.families.registry import DECODERS
from jaxscale.models.hf import files as hf_files
from jaxscale.models.hf import reading as hf_reading
from jaxscale.models.hf import tensors as hf_tensors
from jaxscale.sharding import MeshConfig, fsdp_tp, make_mesh, megascale_3d, shardings
from tests.decoding import decode


MODELS = Path(__file__).parents[1] / "fixtures" / "models"
FAMILIES = sorted(directory.name for directory in MODELS.iterdir())
VARIANTS = [
    "gemma2",
    "gemma3",
    "mistral",
    "qwen2",
    "qwen3_windows",
    "neox",
    "neox_serial",
]
PACKED = [
    *("gpt2", "gptj", "llama3_gqa", "qwen3_windows", "llama_dynamic"),
    *("gemma", "gemma2", "gemma3"),
]
SHARDED_MESH = MeshConfig(data=2, fsdp=2, pipe=1, tensor=2)

BUFFERS = {pattern for family in DECODERS for pattern in family.buffers}

# The bound of the project; the largest logit of the fixtures is about 6.
ATOL = 1e-4


def expected(name):
    """Prompts and their fp32 logits, as lists."""
    tensors = safetensors.numpy.load_file(MODELS / name / "expected.safetensors")
    count = len(tensors) // 2
    return [
        [tensors[f"{kind}.{i}"] for i in range(count)] for kind in ("ids", "logits")
    ]


def weights(directory):
    """Every tensor of a directory but the ignored buffers."""
    files = sorted(Path(directory).glob("model*.safetensors"))
    tensors = {k: v for f in files for k, v in safetensors.numpy.load_file(f).items()}
    return {
        name: value
        for name, value in tensors.items()
        if not any(re.search(pattern, name) for pattern in BUFFERS)
    }


def padded(ids):
    """Prompts as rows; a causal model does not see what comes after."""
    rows = np.zeros((len(ids), max(map(len, ids))), np.int32)
    for row, prompt in zip(rows, ids, strict=True):
        row[: len(prompt)] = prompt
    return jnp.asarray(rows)


by_parts = jax.jit(decode, static_argnums=(2, 3, 4, 5))


@jax.jit
def forward(model, tokens, cu_seqlens=None):
    # GPUs would round fp32 products to TF32.
    with jax.default_matmul_precision("highest"):
        return model(tokens, cu_seqlens=cu_seqlens)


def assert_logits(model, name):
    ids, logits = expected(name)
    for got, want in zip(forward(model, padded(ids)), logits, strict=True):
        np.testing.assert_allclose(got[: len(want)], want, rtol=0, atol=ATOL)


def parameters(model):
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_same_parameters(got, want):
    got, want = parameters(got), parameters(want)
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(got[name], want[name])


@pytest.fixture
def copy(tmp_path):
    """Copies a fixture, so that a test may damage it."""

    def make(name):
        return shutil.copytree(MODELS / name, tmp_path / Path(name).name)

    return make


def edit_weights(directory, change):
    file = directory / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    change(tensors)
    safetensors.numpy.save_file(tensors, file, metadata={"format": "pt"})


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


# ------------------------------------------------------------------------------------
# Values


# Those of the test of packed rows are compared there.
@pytest.mark.parametrize("name", [n for n in FAMILIES if n not in PACKED])
def test_logits_match_transformers(name):
    assert_logits(load(MODELS / name, dtype=jnp.float32), name)


@pytest.mark.parametrize(
    "name", ["gpt2", "neox", "llama_yarn", "qwen3_windows", "gemma3"]
)
def test_logits_of_pages_match_transformers(name):
    ids, logits = expected(name)
    model = load(MODELS / name)
    # A prompt, a token, and several at once.
    got, _ = by_parts(model, padded(ids[:1]), 7, 1, 4)
    np.testing.assert_allclose(got[0], logits[0], rtol=0, atol=ATOL)


@pytest.mark.parametrize("name", PACKED)
def test_packed_logits_match_transformers(name):
    ids, logits = expected(name)
    model = load(MODELS / name)
    ends = np.cumsum([len(prompt) for prompt in ids])
    tokens = np.full((1, 64), 7, np.int32)
    tokens[0, : ends[-1]] = np.concatenate(ids)
    # One slot more than there are sequences, and rows past the last one.
    cu_seqlens = jnp.asarray([[0, *ends, ends[-1]]], jnp.int32)
    got = forward(model, jnp.asarray(tokens), cu_seqlens)[0, : ends[-1]]
    np.testing.assert_allclose(got, np.concatenate(logits), rtol=0, atol=ATOL)


def test_dynamic_rope_of_whole_rows_and_pages():
    """The base grows with a sequence beyond the ten tokens of the original length."""
    ids, logits = expected("llama_dynamic")
    model = load(MODELS / "llama_dynamic")
    for prompt, want in zip(ids, logits, strict=True):
        got = forward(model, padded([prompt]))[0]
        np.testing.assert_allclose(got, want, rtol=0, atol=ATOL)
    tokens = padded(ids[2:3])
    got, _ = by_parts(model, tokens, 4, tokens.shape[1] - 4)
    np.testing.assert_allclose(got[0], logits[2], rtol=0, atol=ATOL)
    with pytest.raises(ValueError, match=r"max_len 11 exceeds 10, .* dynamic rotary"):
        generate(model, [[1, 2, 3]], max_new_tokens=8)
    assert len(generate(model, [[1, 2, 3]], max_new_tokens=7)[0]) == 7


def test_bf16_weights_stay_bf16():
    model = load(MODELS / "llama_bf16")
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    exact = load(MODELS / "llama_bf16", param_dtype=jnp.float32)
    assert {leaf.dtype for leaf in jax.tree.leaves(exact)} == {jnp.dtype(jnp.float32)}
    for ours, theirs in zip(
        jax.tree.leaves(model), jax.tree.leaves(exact), strict=True
    ):
        np.testing.assert_array_equal(ours.astype(jnp.float32), theirs)
    # The computation is in bf16 too: close, and not the same.
    ids, _ = expected("llama_bf16")
    error = abs(forward(model, padded(ids)) - forward(exact, padded(ids))).max()
    assert 1e-3 < error < 0.3

    @jax.jit
    def gradient_norms(model):
        grads = jax.grad(lambda m: forward(m, padded(ids)).var())(model)
        leaves = jax.tree.leaves(grads)
        return jnp.stack([jnp.linalg.norm(g.astype(jnp.float32)) for g in leaves])

    norms = gradient_norms(model)
    assert ((norms > 0) & jnp.isfinite(norms)).all()


def test_options_of_load():
    mesh = make_mesh(SHARDED_MESH)
    options = {"mesh": mesh, "rules": fsdp_tp(), "param_dtype": jnp.bfloat16}
    options |= {"dtype": jnp.float32, "remat": "full"}
    model = load(MODELS / "gptj", **options)
    assert isinstance(model, Decoder)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
    assert (model.dtype, model.remat, model.rules) == (jnp.float32, "full", fsdp_tp())
    assert model.blocks.mlp.up.kernel.sharding.mesh == mesh


def test_fused_projection_of_gpt2_is_split():
    model = load(MODELS / "gpt2")
    attention = model.blocks.attention
    for layer in range(2):
        prefix = f"transformer.h.{layer}.attn.c_attn"
        fused = weights(MODELS / "gpt2")
        kernel, bias = fused[f"{prefix}.weight"], fused[f"{prefix}.bias"]
        for i, part in enumerate((attention.query, attention.key, attention.value)):
            columns = slice(32 * i, 32 * (i + 1))
            np.testing.assert_array_equal(part.kernel[layer], kernel[:, columns])
            np.testing.assert_array_equal(part.bias[layer], bias[columns])


def test_fused_projection_of_neox_is_split_by_heads():
    attention = load(MODELS / "neox").blocks.attention
    prefix = "gpt_neox.layers.1.attention.query_key_value"
    fused = weights(MODELS / "neox")
    kernel = fused[f"{prefix}.weight"].reshape(2, 3, 16, 32)  # [N, 3, H, D]
    bias = fused[f"{prefix}.bias"].reshape(2, 3, 16)
    for i, part in enumerate((attention.query, attention.key, attention.value)):
        want = kernel[:, i].reshape(32, 32).T  # [D, N * H]
        np.testing.assert_array_equal(part.kernel[1], want)
        np.testing.assert_array_equal(part.bias[1], bias[:, i].reshape(32))


# ------------------------------------------------------------------------------------
# Shardings


@pytest.mark.parametrize(
    "name", ["gpt2", "gptj", "llama3_gqa", "qwen3", "neox", "gemma3"]
)
def test_sharded_load_equals_unsharded(name):
    mesh, rules = make_mesh(SHARDED_MESH), fsdp_tp()
    model = load(MODELS / name, mesh=mesh, rules=rules)
    wanted = parameters(shardings(model, mesh, rules))
    split = 0
    for path, leaf in parameters(model).items():
        assert leaf.sharding == wanted[path]
        split += not leaf.sharding.is_fully_replicated
    assert split >= 8
    assert_same_parameters(model, load(MODELS / name))
    if name in ("gpt2", "gemma3"):
        with jax.set_mesh(mesh):
            assert_logits(model, name)


@pytest.mark.parametrize("name", ["qwen3", "neox"])
def test_explicit_mesh(name):
    mesh = make_mesh(dataclasses.replace(SHARDED_MESH, axis_type="explicit"))
    model = load(MODELS / name, mesh=mesh, rules=fsdp_tp())
    with jax.set_mesh(mesh):
        assert_logits(model, name)


def test_layers_split_over_pipe():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, pipe=2, tensor=2))
    model = load(MODELS / "gpt2", mesh=mesh, rules=megascale_3d())
    kernel = model.blocks.attention.query.kernel[...]
    assert kernel.addressable_shards[0].data.shape == (1, 16, 16)
    assert_same_parameters(model, load(MODELS / "gpt2"))


def test_replicated_on_a_mesh():
    mesh = make_mesh(SHARDED_MESH)
    model = load(MODELS / "llama_mha", mesh=mesh)
    for leaf in jax.tree.leaves(model):
        assert isinstance(leaf.sharding, NamedSharding)
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.mesh == mesh


def test_each_shard_reads_only_its_slice(monkeypatch):
    reads = []
    original = hf_files.Checkpoint.read

    def read(self, name, index, target):
        reads.append((name, target.shape))
        original(self, name, index, target)

    monkeypatch.setattr(hf_files.Checkpoint, "read", read)
    load(MODELS / "llama3_gqa", mesh=make_mesh(SHARDED_MESH), rules=fsdp_tp())
    gate = [shape for name, shape in reads if name.endswith("0.mlp.gate_proj.weight")]
    # [56, 32] in four pieces, each read once although two devices hold it.
    assert gate == [(28, 16)] * 4
    norm = [shape for name, shape in reads if name == "model.norm.weight"]
    assert norm == [(32,)]


def test_files_are_read_several_pieces_at_a_time(monkeypatch):
    """Otherwise one core of a machine copies all of the weights."""
    original, two = hf_files.Checkpoint.read, threading.Barrier(2)

    def read(self, name, index, target):
        if "mlp.up_proj" in name:
            two.wait(120)  # raises where nobody else comes
        original(self, name, index, target)

    monkeypatch.setattr(hf_files.Checkpoint, "read", read)
    monkeypatch.setattr(hf_reading, "_READERS", 2)
    monkeypatch.setattr(hf_reading, "_PIECE", 1000)
    load(MODELS / "llama3_gqa")
    assert not two.broken


@pytest.mark.parametrize("name", ["gpt2", "llama3_gqa", "neox"])
def test_a_parameter_is_read_in_pieces(name, monkeypatch):
    """A table, or a parameter of one block, would otherwise be read by one core."""
    whole, reads = load(MODELS / name), []
    original = hf_files.Checkpoint.read

    def read(self, name, index, target):
        reads.append(name)
        original(self, name, index, target)

    monkeypatch.setattr(hf_files.Checkpoint, "read", read)
    monkeypatch.setattr(hf_reading, "_PIECE", 1000)
    assert_same_parameters(load(MODELS / name), whole)
    assert any(reads.count(name) > 4 for name in reads)


def test_indivisible_sharding_names_the_parameter():
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, pipe=2, tensor=2))
    with pytest.raises(ValueError, match=r"of shape \(3, .*cannot be split as"):
        load(MODELS / "llama3_sharded", mesh=mesh, rules=megascale_3d())


# ------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize("name", FAMILIES)
def test_saved_tensors_are_those_of_the_file(name, tmp_path):
    save(load(MODELS / name), tmp_path)
    saved, original = weights(tmp_path), weights(MODELS / name)
    if name == "gpt2_hub":
        original = {f"transformer.{k}": v for k, v in original.items()}
    assert saved.keys() == original.keys()
    for tensor, value in original.items():
        assert saved[tensor].dtype == value.dtype
        assert saved[tensor].shape == value.shape
        assert saved[tensor].tobytes() == value.tobytes()
    modes = {file.stat().st_mode for file in tmp_path.iterdir()}
    assert len(modes) == 1
    config = json.loads((tmp_path / "config.json").read_text())
    theirs = json.loads((MODELS / name / "config.json").read_text())
    assert config["architectures"] == theirs["architectures"]
    assert config["dtype"] == theirs.get("dtype", theirs.get("torch_dtype"))


@pytest.mark.parametrize("name", ["gptj", "llama_bf16", *VARIANTS])
def test_saved_model_is_the_same(name, tmp_path):
    model = load(MODELS / name)
    save(model, tmp_path)
    again = load(tmp_path)
    assert again.config == model.config
    assert_same_parameters(again, model)


def test_sharded_model_in_several_files(tmp_path):
    name = "llama3_sharded"
    mesh = make_mesh(MeshConfig(data=2, fsdp=4, pipe=1, tensor=1))
    model = load(MODELS / name, mesh=mesh, rules=fsdp_tp())
    save(model, tmp_path, max_shard_bytes=50_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [f.name for f in files] == sorted(set(index["weight_map"].values()))
    assert len(files) == 3
    for file in files:
        held = safetensors.numpy.load_file(file)
        assert sum(v.nbytes for v in held.values()) <= 50_000
        assert {index["weight_map"][name] for name in held} == {file.name}
    original = weights(MODELS / name)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in original.values())
    assert_same_parameters(load(tmp_path), load(MODELS / name))

    # A second save replaces the files of the first.
    save(model, tmp_path)
    assert [f.name for f in tmp_path.glob("model*")] == ["model.safetensors"]
    assert_same_parameters(load(tmp_path), load(MODELS / name))


def test_failed_save_leaves_the_old_files(tmp_path, monkeypatch):
    model = load(MODELS / "llama_mha")
    save(model, tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(hf_tensors, "_to_host", fail)
    with pytest.raises(OSError, match="disk full"):
        save(model, tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_tokenizer_is_saved_beside_the_model(tmp_path):
    model = load(MODELS / "llama_mha")
    vocab = {name: i for i, name in enumerate(("to", "be", "<s>", "</s>", "<pad>"))}
    tokenizer = Tokenizer(
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="to")),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    save(model, tmp_path, tokenizer=tokenizer)
    assert repr(Tokenizer.from_file(tmp_path)) == repr(tokenizer)
    config = json.loads((tmp_path / "config.json").read_text())
    ids = [config[f"{role}_token_id"] for role in ("bos", "eos", "pad")]
    assert ids == [2, 3, 4]
    too_many = Tokenizer.train(["to be"], vocab_size=257)
    with pytest.raises(ValueError, match="tokenizer has 257 tokens, but vocab_size of"):
        save(model, tmp_path, tokenizer=too_many)


# ------------------------------------------------------------------------------------
# Errors


def test_missing_tensor(copy):
    directory = copy("llama3_gqa")
    gone = "model.layers.1.mlp.up_proj.weight"
    edit_weights(directory, lambda tensors: tensors.pop(gone))
    message = (
        rf"llama3_gqa lacks the tensor '{gone}', expected with shape \(56, 32\) for "
        r"blocks\.mlp\.up\.kernel"
    )
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_missing_first_tensor(copy):
    directory = copy("llama3_gqa")
    edit_weights(directory, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"lacks the tensor 'model\.embed_tokens\.wei"):
        load(directory)


def test_untied_file_without_an_output_projection(copy):
    directory = copy("llama3_tied")
    edit_json(directory / "config.json", tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"lacks the tensor 'lm_head\.weight'"):
        load(directory)


def test_unexpected_tensor(copy):
    directory = copy("llama3_gqa")
    extra = "model.layers.2.mlp.up_proj.weight"
    edit_weights(
        directory,
        lambda tensors: tensors.update({extra: np.ones((56, 32), np.float32)}),
    )
    message = rf"tensor '{extra}' of .*/model\.safetensors has no place .* \(56, 32\)"
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_misshapen_tensor(copy):
    directory = copy("gpt2")
    name = "transformer.h.0.attn.c_attn.weight"
    edit_weights(
        directory, lambda tensors: tensors.update({name: tensors[name].T.copy()})
    )
    message = (
        rf"tensor '{name}' of .*/model\.safetensors has the shape \(96, 32\), expected "
        r"shape \(32, 96\) for blocks\.attention\.query\.kernel and"
    )
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_tied_model_that_stores_its_table_twice(copy):
    directory = copy("llama3_tied")
    table = weights(directory)["model.embed_tokens.weight"]
    edit_weights(directory, lambda t: t.update({"lm_head.weight": table}))
    assert_same_parameters(load(directory), load(MODELS / "llama3_tied"))
    edit_weights(directory, lambda t: t.update({"lm_head.weight": table + 1}))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' .* differs from"):
        load(directory)


def test_types_that_do_not_fit(copy):
    directory = copy("llama3_gqa")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_weights(directory, lambda t: t.update({name: t[name].astype(np.float16)}))
    with pytest.raises(ValueError, match=rf"'{name}' is float16, but .* is float32"):
        load(directory)
    model = load(directory, param_dtype=jnp.float32)
    assert model.blocks.mlp.up.kernel.dtype == jnp.float32
    edit_weights(directory, lambda t: t.update({name: t[name].astype(np.int8)}))
    with pytest.raises(ValueError, match=rf"'{name}' of .* has the type I8; expected"):
        load(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, -40])
def test_truncated_file(copy, keep):
    file = copy("llama_mha") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete safet"):
        load(file.parent)


def test_missing_shard(copy):
    directory = copy("llama3_sharded")
    (directory / "model-00002-of-00003.safetensors").unlink()
    message = r"index\.json names the shard 'model-00002-of-00003\.safetensors', which"
    with pytest.raises(FileNotFoundError, match=message):
        load(directory)


def test_index_that_disagrees_with_its_shards(copy):
    directory = copy("llama3_sharded")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    other = weight_map | {"model.norm.weight": "model-00001-of-00003.safetensors"}
    edit_json(index, weight_map=other)
    with pytest.raises(ValueError, match=r"model-00001.* lacks 'model\.norm\.weight'"):
        load(directory)
    edit_json(index, weight_map=None)
    with pytest.raises(ValueError, match=r"index\.json has no 'weight_map'"):
        load(directory)


def test_tensor_in_two_shards(copy):
    directory = copy("llama3_sharded")
    first, *_, last = sorted(directory.glob("model-*.safetensors"))
    tensors = safetensors.numpy.load_file(last)
    name, value = next(iter(safetensors.numpy.load_file(first).items()))
    tensors[name] = value + 1
    safetensors.numpy.save_file(tensors, last)
    message = rf"{last.name} holds '{re.escape(name)}', and so does {first.name}"
    with pytest.raises(ValueError, match=message):
        load(directory)


def test_missing_files(copy, tmp_path):
    with pytest.raises(
        FileNotFoundError, match="'nobody' is no directory, and no name"
    ):
        load("nobody")
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist; give a"):
        load(tmp_path)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(
        FileNotFoundError, match=r"of a run: .* `jaxscale export .* DIR`"
    ):
        load(tmp_path)
    directory = copy("gpt2")
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    message = r"neither model\.safetensors nor .*; convert \['pytorch_model\.bin'\]"
    with pytest.raises(FileNotFoundError, match=message):
        load(directory)


def test_damaged_or_foreign_config(copy):
    directory = copy("gpt2")
    edit_json(directory / "config.json", model_type="whisper")
    with pytest.raises(ValueError, match="model_type 'whisper' is not supported"):
        load(directory)
    (directory / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        load(directory)


@pytest.mark.parametrize("shard", ["../model.safetensors", "/dev/zero", r"..\m"])
def test_shards_outside_the_directory(copy, shard):
    directory = copy("llama3_sharded")
    index = directory / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    other = directory.parent / "model.safetensors"
    shutil.copy(directory / next(iter(weight_map.values())), other)
    edit_json(index, weight_map=dict.fromkeys(weight_map, shard))
    with pytest.raises(ValueError, match="is not a path inside"):
        load(directory)


@pytest.mark.parametrize("name", ["llama3_gqa", "gpt2", "neox", "../encoders/bert"])
def test_sizes_that_the_file_does_not_have(copy, name):
    """Found before anything of that size is made."""
    directory = copy(name)
    file = directory / "config.json"
    values = json.loads(file.read_text())
    layers = next(k for k in ("num_hidden_layers", "n_layer") if k in values)
    for key, size in ((layers, 10**9), (layers, 9999), ("vocab_size", 10**9)):
        file.write_text(json.dumps(values | {key: size}))
        with pytest.raises(ValueError, match=str(size)):
            load(directory)


def test_more_labels_than_the_file_has(copy):
    directory = copy("../encoders/bert")
    edit_json(
        directory / "config.json",
        architectures=["BertForSequenceClassification"],
        num_labels=10**9,
        id2label=None,
    )
    with pytest.raises(ValueError, match=r"tensor 'classifier\.weight'"):
        load(directory)


def test_bad_targets_of_save(tmp_path):
    model = load(MODELS / "llama_mha")
    with pytest.raises(ValueError, match="max_shard_bytes 0 must be positive"):
        save(model, tmp_path, max_shard_bytes=0)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="must be a directory, not a file"):
        save(model, tmp_path / "file")
