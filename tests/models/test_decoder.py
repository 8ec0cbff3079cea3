"""Decoders: packed, scanned, recomputed and incremental runs against plain ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, preset
from jaxscale.nn import PagedRows
from jaxscale.sharding import fsdp_tp, logical_axes
from pallas_kernels.mosaic import H200, use_device
from tests.decoding import decode, nan_pages
from tests.lowering import CUSTOM_CALL, lower_for_cuda
from tests.models.packed_rows import loss_and_gradients, named, packed_rows
from tests.tolerances import assert_same_gradients, relative_error


FAMILIES = ["llama_tiny", "gptj_tiny", "gpt2_tiny", "gemma3_tiny"]
TOKENS, BOUNDS = packed_rows(2)


def make(name, config=None, **options):
    model = Decoder(config or preset(name), rngs=nnx.Rngs(0), **options)
    # At their initial size the blocks hardly change the token that goes in.
    model.blocks = jax.tree.map(lambda p: 12 * p if p.ndim == 3 else p, model.blocks)
    return model


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make(request.param)


by_parts = jax.jit(decode, static_argnums=(2, 3, 4, 5))


@jax.jit
def run(model, tokens, cu_seqlens=None):
    return model(tokens, cu_seqlens=cu_seqlens)


def test_parameters_are_counted_and_their_axes_named(model):
    config = model.config
    assert sum(p.size for p in jax.tree.leaves(model)) == config.num_parameters()
    variables, _ = jax.tree_util.tree_flatten_with_path(
        model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    for path, variable in variables:
        axes = logical_axes(variable)
        assert len(axes) == variable.ndim, path
        assert len(fsdp_tp().spec(*axes)) == variable.ndim, path
        stacked = "blocks" in jax.tree_util.keystr(path)
        assert (axes[0] == "layers") == stacked, path


def test_names_of_parameters(model):
    norm = ["scale", "bias"] if model.config.norm == "layernorm" else ["scale"]
    heads = ["query.kernel", "key.kernel", "value.kernel", "out.kernel"]
    expected = {"embed.table"}
    expected |= {f"norm.{n}" for n in norm}
    expected |= {f"blocks.attention_norm.{n}" for n in norm}
    expected |= {f"blocks.attention.{n}" for n in heads}
    expected |= {"blocks.mlp.up.kernel", "blocks.mlp.down.kernel"}
    extra = {
        "llama_tiny": {
            "blocks.mlp_norm.scale",
            "blocks.mlp.gate.kernel",
            "lm_head.kernel",
        },
        "gptj_tiny": {
            "blocks.mlp.up.bias",
            "blocks.mlp.down.bias",
            "lm_head.kernel",
            "lm_head.bias",
        },
        "gpt2_tiny": {
            "positions.table",
            "blocks.mlp_norm.scale",
            "blocks.mlp_norm.bias",
            "blocks.mlp.up.bias",
            "blocks.mlp.down.bias",
            *(f"blocks.attention.{n}.bias" for n in ("query", "key", "value", "out")),
        },
        "gemma3_tiny": {
            "blocks.mlp_norm.scale",
            "blocks.mlp.gate.kernel",
            "blocks.attention_out_norm.scale",
            "blocks.mlp_out_norm.scale",
            "blocks.attention.query_norm.scale",
            "blocks.attention.key_norm.scale",
        },
    }
    name = next(n for n in FAMILIES if preset(n) == model.config)
    actual = {key.removesuffix(".value") for key in named(model)}
    assert actual == expected | extra[name]


@pytest.mark.parametrize("name", ["gpt2_small", "gptj_6b", "llama2_70b", "llama3_2_1b"])
def test_presets_make_as_many_parameters_as_they_say(name):
    config = preset(name)
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    assert sum(p.size for p in jax.tree.leaves(model)) == config.num_parameters()


def test_no_token_sees_a_later_one(model):
    logits = run(model, TOKENS)
    changed = run(model, TOKENS.at[:, 9].add(1))
    np.testing.assert_array_equal(logits[:, :9], changed[:, :9])
    assert (jnp.abs(logits - changed).max((0, 2))[9:] > 1e-4).all()


def test_packed_sequences_equal_rows_of_their_own(model):
    packed = run(model, TOKENS, BOUNDS)
    padded = jnp.zeros((2, 16), jnp.int32)
    padded = padded.at[0, :5].set(TOKENS[0, :5]).at[1, :9].set(TOKENS[0, 5:14])
    apart = run(model, padded)
    assert relative_error(packed[0, :5], apart[0, :5]) < 1e-5
    assert relative_error(packed[0, 5:14], apart[1, :9]) < 1e-5
    assert relative_error(packed[1], run(model, TOKENS)[1]) < 1e-5
    assert jnp.isfinite(packed).all()


def test_every_parameter_has_a_finite_gradient(model):
    _, gradients = loss_and_gradients(model, TOKENS)
    assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradients))
    nonzero = {name for name, g in named(gradients).items() if (g != 0).any()}
    assert nonzero == set(named(model))


@pytest.fixture(scope="module")
def packed_gradients():
    """Of a llama whose first row is packed and second row whole."""
    return loss_and_gradients(make("llama_tiny"), TOKENS, BOUNDS)


def test_gradients_of_packed_sequences_equal_those_of_rows(packed_gradients):
    model = make("llama_tiny")

    def loss(model):
        padded = jnp.zeros((4, 16), jnp.int32).at[3].set(TOKENS[1])
        for row, (begin, end) in enumerate([(0, 5), (5, 14), (14, 16)]):
            padded = padded.at[row, : end - begin].set(TOKENS[0, begin:end])
        logits = jax.nn.log_softmax(model(padded))
        first = jnp.concatenate([logits[0, :5], logits[1, :9], logits[2, :2]])
        logits = jnp.stack([first, logits[3]])[:, :14]
        return -jnp.take_along_axis(logits, TOKENS[:, 1:15, None], -1).mean()

    expected, gradients = jax.jit(jax.value_and_grad(loss))(model)
    np.testing.assert_allclose(packed_gradients[0], expected, rtol=1e-6)
    assert_same_gradients(packed_gradients[1], gradients)


def test_recomputation_changes_nothing(packed_gradients):
    model = make("llama_tiny", remat="attention")
    actual = loss_and_gradients(model, TOKENS, BOUNDS)
    np.testing.assert_allclose(actual[0], packed_gradients[0], rtol=1e-6)
    assert_same_gradients(actual[1], packed_gradients[1])


def test_a_loop_over_layers_equals_the_scan(packed_gradients):
    looped = make("llama_tiny", scan_layers=False, remat="full")
    actual = loss_and_gradients(looped, TOKENS, BOUNDS)
    np.testing.assert_allclose(actual[0], packed_gradients[0], rtol=1e-6)
    assert_same_gradients(actual[1], packed_gradients[1])


def test_full_recomputation_keeps_less():
    def kept_by(remat):
        model = make("llama_tiny", remat=remat)
        _, pull = jax.vjp(lambda m: m.hidden(TOKENS), model)
        return sum(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size"))

    assert kept_by("full") < kept_by("dots_no_batch") < kept_by("none")


def test_steps_equal_the_whole_row(model):
    # A prompt, and several at once; single tokens are those of the next test.
    logits, _ = by_parts(model, TOKENS, 7, 9)
    assert relative_error(logits, run(model, TOKENS)) < 1e-5


def test_prompts_of_different_lengths(model):
    # Row 0 holds 3 tokens of its prompt, row 1 all 6; then both go on.
    prompts = TOKENS[:, :6].at[0, 3:].set(255)
    step, unembed = jax.jit(Decoder.run), jax.jit(Decoder.unembed)
    table = jnp.array([[4, 0], [1, 3]])
    lengths, new = jnp.zeros(2, jnp.int32), jnp.array([3, 6])
    state = PagedRows.of(nan_pages(model, 5, 4), table, lengths, new, 6)
    expected = run(model, TOKENS)
    hidden, state = step(model, prompts, state)
    logits = unembed(model, hidden)
    assert relative_error(logits[0, :3], expected[0, :3]) < 1e-5
    assert relative_error(logits[1], expected[1, :6]) < 1e-5
    for _ in range(2):
        lengths, new, rows = lengths + new, jnp.array([1, 1]), jnp.arange(2)
        state = PagedRows.of(state.pages, table, lengths, new)
        hidden, state = step(model, TOKENS[rows, lengths][:, None], state)
        logits = unembed(model, hidden)
        assert relative_error(logits[:, 0], expected[rows, lengths]) < 1e-5


@pytest.mark.parametrize(
    ("windows", "seen"),
    [
        ({"window": 3, "num_layers": 1}, 3),
        ({"window_pattern": (3, 4)}, 6),  # itself, and 2 + 3 before
    ],
)
def test_a_window_limits_what_a_token_sees_with_and_without_pages(windows, seen):
    model = make("", dataclasses.replace(preset("llama_tiny"), **windows))
    model.blocks = jax.tree.map(lambda w: 8 * w, model.blocks)
    logits = run(model, TOKENS)
    changed = run(model, TOKENS.at[:, 4].add(1))
    moved = jnp.abs(logits - changed).max((0, 2)) > 1e-5
    assert moved.tolist() == [4 <= t < 4 + seen for t in range(16)]
    assert relative_error(run(model, TOKENS, BOUNDS)[1], logits[1]) < 1e-5
    assert relative_error(by_parts(model, TOKENS, 8, 8)[0], logits) < 1e-5


def test_a_softcap_with_and_without_pages():
    plain = make("llama_tiny")
    config = dataclasses.replace(preset("llama_tiny"), attention_softcap=0.1)
    capped = make("", config)
    logits = run(capped, TOKENS)
    assert relative_error(logits, run(plain, TOKENS)) > 1e-2
    assert relative_error(run(capped, TOKENS, BOUNDS)[1], logits[1]) < 1e-5
    assert relative_error(by_parts(capped, TOKENS, 8, 8)[0], logits) < 1e-5


def test_types():
    exact = make("llama_tiny")
    options = {"dtype": jnp.bfloat16, "param_dtype": jnp.float32}
    low = make("llama_tiny", **options)
    loss, gradients = jax.eval_shape(loss_and_gradients, low, TOKENS)
    assert jax.eval_shape(low.hidden, TOKENS).dtype == jnp.bfloat16
    assert loss.dtype == jnp.float32
    assert {g.dtype for g in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    logits = run(low, TOKENS)
    assert logits.dtype == jnp.float32
    assert 1e-4 < relative_error(logits, run(exact, TOKENS)) < 0.05
    stored = Decoder(preset("llama_tiny"), param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert {p.dtype for p in jax.tree.leaves(stored)} == {jnp.dtype("bfloat16")}
    assert jax.eval_shape(stored.hidden, TOKENS).dtype == jnp.float32


def test_whole_rows_lower_for_a_gpu_without_one():
    """A CPU has no cuDNN, which would run rows as short as these."""
    model = jax.eval_shape(lambda: make("llama_tiny", dtype=jnp.bfloat16))

    def loss(model, tokens):
        return model(tokens).astype(jnp.float32).sum()

    with use_device(H200):
        text = lower_for_cuda(jax.grad(loss), model, TOKENS)
    assert CUSTOM_CALL in text


def test_positions_can_be_given(model):
    expected = run(model, TOKENS[:, :8])
    positions = jnp.tile(jnp.arange(8), (2, 1))
    place = jax.jit(lambda at: model(TOKENS[:, :8], positions=at))
    assert relative_error(place(positions), expected) < 1e-6
    shifted = place(positions + 3)
    if model.config.position == "rope":  # only distances count
        assert relative_error(shifted, expected) < 1e-4
    else:
        assert relative_error(shifted, expected) > 1e-3


def test_errors(no_shape_hook):
    gpt2 = make("gpt2_tiny")
    with pytest.raises(ValueError, match="tokens per row 65 exceeds max_seq_len 64"):
        gpt2(jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(ValueError, match="remat 'some' is unknown; use one of"):
        Decoder(preset("gpt2_tiny"), remat="some", rngs=nnx.Rngs(0))


def test_packed_rows_may_be_longer_than_the_table_of_positions():
    gpt2 = make("gpt2_tiny")
    tokens = jnp.zeros((1, 80), jnp.int32)
    bounds = jnp.array([[0, 40, 80]])
    logits = run(gpt2, tokens, bounds)
    assert jnp.isfinite(logits).all()
    np.testing.assert_allclose(logits[0, :40], logits[0, 40:], rtol=1e-5, atol=1e-6)
    # A sequence that is too long is not silently given another position's vector.
    assert jnp.isnan(run(gpt2, tokens, jnp.array([[0, 66, 80]]))[0, 64:66]).all()
