"""Vocabularies that do not divide over the devices, against the same on one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from jaxscale.models import (
    Decoder,
    EncoderModel,
    encoder_head,
    encoder_preset,
    load,
    preset,
    quantize,
    save,
)
from jaxscale.models.vocabulary import vocabulary_rows
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import MeshConfig, create, fsdp_tp, make_mesh, place
from jaxscale.training import masked_lm_loss, next_token_loss
from tests.tiers import exhaustive


V = 257
RULES = fsdp_tp()
RNG = np.random.default_rng(0)
BATCH = jax.tree.map(
    jnp.asarray,
    PackedBatch(
        tokens=RNG.integers(0, V, (4, 16), np.int32),
        targets=RNG.integers(0, V, (4, 16), np.int32),
        loss_mask=RNG.random((4, 16)) < 0.8,
        cu_seqlens=np.array([[0, 7, 15]] * 4, np.int32),
    ),
)
MODELS = {  # tied or not; a bound of the logits; biases of them
    "gpt2": "gpt2_tiny",
    "llama": "llama_tiny",
    "gemma": "gemma2_tiny",
    "gptj": "gptj_tiny",
    "bert": "bert_tiny",
}


def mesh_of(tensor, kind="auto", fsdp=1):
    config = MeshConfig(fsdp=fsdp, tensor=tensor, axis_type=kind)
    return make_mesh(config, jax.devices()[: tensor * fsdp])


def make(name, **options):
    sizes = {"vocab_size": V, "num_layers": 1, "global_layers": ()}
    if name == "bert":
        del sizes["global_layers"]
        config = dataclasses.replace(encoder_preset(MODELS[name]), **sizes)
        head = encoder_head(config, "masked_lm")
        model = EncoderModel(config, head=head, rngs=nnx.Rngs(0), **options)
    else:
        config = dataclasses.replace(preset(MODELS[name]), **sizes)
        model = Decoder(config, rngs=nnx.Rngs(0), **options)
    # Biases that are not zero, and larger weights, so that all of it matters.
    return jax.tree.map(lambda p: 4 * p + (p.ndim == 1) * 0.1, model)


def zeroed(model):
    """`model` with the padding of its vocabulary zero again, behind biases of 0.1."""
    return jax.tree.map(
        lambda p: p.at[V:].set(0) if p.ndim == 1 and p.shape[0] > V else p, model
    )


def split(name, mesh):
    with jax.set_mesh(mesh):
        return place(zeroed(make(name, rules=RULES)), mesh, RULES)


@functools.partial(jax.jit, static_argnums=0)
def results(name, model, batch):
    """Loss, gradients, and logits of packed sequences."""
    options = {"chunk_size": 5, "z_loss": 1e-3}
    loss = (masked_lm_loss if name == "bert" else next_token_loss)(**options)
    found = jax.value_and_grad(loss, has_aux=True)(model, batch)
    return *found, model(batch.tokens, cu_seqlens=batch.cu_seqlens)


def assert_padded_alike(actual, wanted, **tolerance):
    """Equal but for rows of padding, which are exactly zero."""
    for (path, x), y in zip(
        jax.tree.leaves_with_path(actual), jax.tree.leaves(wanted), strict=True
    ):
        x, inside = np.array(x), tuple(map(slice, y.shape))
        np.testing.assert_allclose(x[inside], y, **tolerance, err_msg=str(path))
        x[inside] = 0
        assert not x.any(), path


def test_rows_are_added_only_where_a_vocabulary_does_not_divide():
    sizes = {"data": 4, "fsdp": 2, "pipe": 2, "tensor": 2}
    assert vocabulary_rows(50_257, {"tensor": 1}, RULES) == 50_257
    assert vocabulary_rows(50_257, sizes, RULES) == 50_304
    assert vocabulary_rows(50_258, sizes, RULES) == 50_258
    assert vocabulary_rows(50_257, {"tensor": 6}, RULES) == 50_304
    assert vocabulary_rows(50_257, {"tensor": 5}, RULES) == 50_560
    by_logits = dataclasses.replace(RULES, vocab=None)
    assert vocabulary_rows(50_257, sizes, by_logits) == 50_304


@pytest.mark.parametrize(
    ("name", "tensor", "kind"),
    [
        *exhaustive(("gemma", 4, "auto")),
        ("gptj", 2, "explicit"),
        ("bert", 2, "auto"),
    ],
)
def test_loss_gradients_and_logits_are_those_of_one_device(name, tensor, kind):
    (loss, sums), gradients, logits = results(name, make(name), BATCH)
    mesh = mesh_of(tensor, kind, fsdp=4 // tensor)
    model = split(name, mesh)
    assert model.embed.table.shape[0] == 384
    assert_padded_alike(model, make(name), rtol=1e-6)
    with jax.set_mesh(mesh):
        (got, got_sums), got_gradients, got_logits = results(name, model, BATCH)
    assert got_logits.shape == logits.shape == (4, 16, V)
    inside = np.s_[:, : BATCH.cu_seqlens[0, -1]]
    np.testing.assert_allclose(got_logits[inside], logits[inside], atol=2e-5)
    np.testing.assert_allclose([got, *got_sums[:4]], [loss, *sums[:4]], rtol=1e-5)
    scale = max(np.abs(g).max() for g in jax.tree.leaves(gradients))
    assert_padded_alike(got_gradients, gradients, atol=2e-5 * scale)


@pytest.mark.parametrize("packed", [True, False])
def test_an_id_of_the_padding_is_no_token(packed):
    mesh = mesh_of(2)
    model = create(lambda: zeroed(make("llama", rules=RULES)), mesh, RULES)
    tokens = BATCH.tokens.at[0, 9].set(V)
    bounds = BATCH.cu_seqlens if packed else None
    with jax.set_mesh(mesh):
        hidden = jax.jit(lambda m, t: m.hidden(t, cu_seqlens=bounds))(model, tokens)
    lost = np.isnan(hidden).any(-1)
    assert lost[0, 9] and not lost[1:].any()
    assert not packed or not lost[0, :7].any()


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_files_have_the_rows_of_the_vocabulary(name, tmp_path):
    model = make(name)
    save(model, tmp_path / "one")
    padded = load(tmp_path / "one", mesh=mesh_of(2), rules=RULES)
    assert padded.embed.table.shape[0] == 384
    assert_padded_alike(padded, model, rtol=0)
    save(padded, tmp_path / "two")
    assert padded.embed.table.shape[0] == 384
    one, two = (load_file(tmp_path / d / "model.safetensors") for d in ("one", "two"))
    assert sorted(one) == sorted(two)
    for tensor in one:
        np.testing.assert_array_equal(one[tensor], two[tensor])
    again = load(tmp_path / "two")
    assert again.embed.table.shape[0] == V == again.config.vocab_size


@pytest.mark.parametrize("weights", [None, "int8"])
def test_a_model_goes_from_mesh_to_mesh_for_serving(weights):
    """The rows of a served model are those of its mesh; so are its logits."""
    model, mesh = make("gptj", rules=RULES), mesh_of(2)

    def serve(mesh):
        if weights is None:
            return model.for_inference(mesh)
        return quantize(model, weights, mesh=mesh)

    want, served = serve(None)(BATCH.tokens), serve(mesh)
    assert served.embed.table.shape[0] == 384
    with jax.set_mesh(mesh):
        got = jax.jit(lambda m: m(BATCH.tokens))(served)
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, atol=2e-5)
    if weights is None:
        one = served.for_inference(mesh_of(1))
        assert one.embed.table.shape[0] == V
        np.testing.assert_array_equal(one.embed.table[...], model.embed.table[...])
