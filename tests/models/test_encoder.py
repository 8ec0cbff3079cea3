"""Encoders: packed, padded, scanned and recomputed runs against plain ones."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import (
    ENCODER_PRESETS,
    EncoderModel,
    Head,
    HeadConfig,
    encoder_preset,
    pool,
)
from jaxscale.models.families.bert import roberta_tiny
from jaxscale.nn import PagedRows, empty_pages
from jaxscale.sharding import fsdp_tp, logical_axes
from tests.models.packed_rows import loss_and_gradients, named, packed_rows
from tests.tiers import exhaustive
from tests.tolerances import assert_same_gradients, relative_error


FAMILIES = [name for name in ENCODER_PRESETS if name.endswith("_tiny")]
TOKENS, BOUNDS = packed_rows(2)
TYPES = jnp.asarray(np.random.default_rng(1).integers(0, 2, (2, 16)), jnp.int32)
SPANS = [(0, 0, 5), (0, 5, 14), (1, 0, 16)]
"""Row, begin and end of the sequences."""
SLOTS = [(0, 0), (0, 2), (1, 0)]
"""Row and place among the sequences of each of them."""

MLM = HeadConfig(kind="masked_lm", transform="gelu", transform_norm=True)
HEADS = {
    "masked_lm": MLM,
    "token": HeadConfig(kind="token", num_labels=5),
    "span": HeadConfig(kind="span", num_labels=2, transform="gelu"),
    "sequence": HeadConfig(kind="sequence", num_labels=3, transform="tanh"),
    "mean": HeadConfig(
        kind="sequence",
        num_labels=3,
        pooling="mean",
        transform="gelu",
        transform_norm=True,
        transform_bias=False,
        bias=False,
    ),
    "pooler": HeadConfig(kind="pooler", transform="tanh"),
}


def make(name, **options):
    config = encoder_preset(name) if isinstance(name, str) else name
    model = EncoderModel(config, rngs=nnx.Rngs(0), **options)

    # At their initial size the blocks hardly change the token that goes in, biases do
    # nothing, and all positions are alike.
    def grow(path, p):
        noise = jax.random.normal(jax.random.key(len(path) + p.size), p.shape, p.dtype)
        kernel = "kernel" in jax.tree_util.keystr(path)
        return p + (0.2 if kernel else 0.1) * noise

    return jax.tree_util.tree_map_with_path(grow, model)


# The others differ from these in nothing that packing could break, and their files
# are compared with transformers packed.
@pytest.fixture(scope="module", params=["bert_tiny", "modernbert_tiny"])
def model(request):
    return make(request.param, head=MLM)


def types_of(model):
    return TYPES if model.config.token_types == 2 else None


@jax.jit
def run(model, tokens, cu_seqlens=None, token_types=None):
    return model(tokens, cu_seqlens=cu_seqlens, token_types=token_types)


def is_variable(node):
    return isinstance(node, nnx.Variable)


padded = jax.jit(EncoderModel.padded, static_argnames="token_budget")


@pytest.mark.parametrize(
    "name", ["albert_tiny", *exhaustive("bert_tiny", "deberta_v3_tiny")]
)
def test_blocks_with_parameters_of_their_own(name):
    model = make(name, head=MLM)
    unstacked = model.unstacked()
    assert model.scan_layers and not unstacked.scan_layers
    assert unstacked.unstacked().blocks is not None  # twice is as good as once
    shapes = [p.shape for p in jax.tree.leaves(unstacked.blocks[0])]
    assert shapes == [p.shape[1:] for p in jax.tree.leaves(model.blocks)]
    for part in (unstacked.blocks[0], model.blocks):
        for variable in jax.tree.leaves(part, is_leaf=is_variable):
            assert len(logical_axes(variable)) == variable.ndim
    actual, expected = (run(m, TOKENS, BOUNDS) for m in (unstacked, model))
    assert relative_error(actual[:, :14], expected[:, :14]) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_parameters_are_counted_and_their_axes_named(name):
    config = encoder_preset(name)
    model = jax.eval_shape(lambda: EncoderModel(config, head=MLM, rngs=nnx.Rngs(0)))
    sizes = [p.size for n, p in named(model).items() if not n.startswith("head.")]
    assert sum(sizes) == config.num_parameters()
    for path, variable in jax.tree.leaves_with_path(model, is_leaf=is_variable):
        axes = logical_axes(variable)
        assert len(axes) == variable.ndim, path
        assert len(fsdp_tp().spec(*axes)) == variable.ndim, path
        stacked = "blocks" in jax.tree_util.keystr(path)
        assert (axes[0] == "layers") == stacked, path


@pytest.mark.parametrize(
    "name", ["bert_base", "albert_base", "modernbert_base", "deberta_base"]
)
def test_presets_make_as_many_parameters_as_they_say(name):
    config = encoder_preset(name)
    model = jax.eval_shape(lambda: EncoderModel(config, rngs=nnx.Rngs(0)))
    assert sum(p.size for p in jax.tree.leaves(model)) == config.num_parameters()


def test_packed_and_padded_sequences_equal_rows_of_their_own(model):
    types = types_of(model)
    packed = run(model, TOKENS, BOUNDS, types)
    assert jnp.isfinite(packed).all()
    # Each alone in a row, in front of tokens that must not matter.
    rows = [np.roll(np.asarray(x), -5, 1)[0] for x in (TOKENS, TYPES)]
    tokens, alone_types = (
        jnp.stack([x[1], y]) for x, y in zip((TOKENS, TYPES), rows, strict=True)
    )
    alone_types = None if types is None else alone_types
    bounds = jnp.array([[0, 16, 16, 16, 16], [0, 9, 9, 9, 9]])
    alone = run(model, tokens, bounds, alone_types)
    assert relative_error(packed[1], alone[0]) < 1e-5
    assert relative_error(packed[0, 5:14], alone[1, :9]) < 1e-5

    mask = (jnp.arange(16) < jnp.array([[16], [9]])).astype(jnp.int32)
    options = {"token_types": alone_types, "token_budget": 27}
    got = padded(model, tokens, mask=mask, **options)
    np.testing.assert_allclose(got[0], alone[0], atol=2e-5)
    np.testing.assert_allclose(got[1, :9], alone[1, :9], atol=2e-5)
    assert not got[1, 9:].any()


def test_padded_heads_of_sequences():
    model = make("bert_tiny", head=HEADS["sequence"])
    found = padded(model, TOKENS, lengths=jnp.array([9, 16]), token_budget=32)
    bounds = jnp.array([[0, 9], [0, 16]])
    assert relative_error(found, run(model, TOKENS, bounds)[:, 0]) < 1e-5
    whole = run(model, TOKENS)
    assert relative_error(found[1], whole[1, 0]) < 1e-5
    assert relative_error(run(model, TOKENS[0], bounds[0]), found[:1]) < 1e-5


def test_every_token_sees_both_directions_of_its_sequence_alone(model):
    types = types_of(model)
    changed = run(model, TOKENS.at[:, 9].add(1), BOUNDS, types)
    moved = (changed != run(model, TOKENS, BOUNDS, types)).any(2)
    assert moved[0].tolist() == [5 <= t < 14 for t in range(16)]
    assert moved[1].all()


def test_windows_limit_what_local_layers_see():
    config = dataclasses.replace(encoder_preset("modernbert_tiny"), num_layers=2)
    windows = [config.attention(layer).window for layer in range(2)]
    assert windows == [None, 3]
    ropes = [config.attention(layer).rope for layer in range(2)]
    assert [rope and rope.theta for rope in ropes] == [160_000.0, 10_000.0]
    model = make(config)
    # Layer 1 alone: cut the first one off.
    model.first = jax.tree.map(jnp.zeros_like, model.first)
    moved = (run(model, TOKENS.at[:, 9].add(1)) != run(model, TOKENS)).any((0, 2))
    assert moved.tolist() == [6 <= t <= 12 for t in range(16)]


def test_heads_answer_packed_as_alone():
    packed = jax.random.normal(jax.random.key(0), (2, 16, 32))
    alone = jnp.roll(packed, -5, 1)
    bounds = jnp.array([[0, 9, 9, 9, 9], [0, 11, 11, 11, 11]])
    table = jax.random.normal(jax.random.key(1), (256, 32))
    for kind, config in HEADS.items():
        head = jax.jit(Head(config, 32, vocab_size=256, rngs=nnx.Rngs(0)))
        got, want = head(packed, BOUNDS, table), head(alone, bounds, table)
        assert jnp.isfinite(got).all()
        if config.pools:
            assert relative_error(got[0, 2], want[0, 0]) < 1e-5, kind
        else:
            assert relative_error(got[0, 5:14], want[0, :9]) < 1e-5, kind
        other = head(packed.at[0, 5:14].add(1), BOUNDS, table)
        place = (0, 2) if config.pools else (0, slice(5, 14))
        # Every answer depends on what it is about.
        assert (jnp.abs(other - got)[place].max(-1) > 1e-4).all(), kind


@pytest.mark.parametrize("pooling", ["first", "mean", "max"])
def test_pooling(pooling):
    hidden = jax.random.normal(jax.random.key(0), (2, 16, 8))
    reduce = {"first": lambda x: x[0], "mean": np.mean, "max": np.max}[pooling]
    reduced = np.zeros((2, 4, 8))
    for (row, begin, end), (_, slot) in zip(SPANS, SLOTS, strict=True):
        for i in range(8):
            reduced[row, slot, i] = reduce(np.asarray(hidden[row, begin:end, i]))
    poisoned = hidden.at[0, 14:].set(jnp.nan)
    got = jax.jit(pool, static_argnums=2)(poisoned, BOUNDS, pooling)
    np.testing.assert_allclose(got, reduced, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["deberta_v2_tiny", *exhaustive("albert_tiny", "bert_tiny", "modernbert_tiny")],
)
def test_layers_of_several_calls(name):
    model = make(dataclasses.replace(encoder_preset(name), num_layers=4)).unstacked()
    hidden = jax.jit(EncoderModel.hidden, static_argnames="layers")
    want = hidden(model, TOKENS, cu_seqlens=BOUNDS)
    x = None
    for layers in (range(1), range(1, 3), range(3, 4)):
        # Later calls read no tokens.
        x = hidden(model, TOKENS, cu_seqlens=BOUNDS, layers=layers, given=x)
        model.embed.table[...] = jnp.nan
    np.testing.assert_allclose(x[:, :14], want[:, :14], atol=1e-5)
    with pytest.raises(ValueError, match=r"rows \[B,T\]"):
        model.hidden(TOKENS[0], layers=range(1))


@pytest.mark.parametrize("name", ["modernbert_tiny", *exhaustive("albert_tiny")])
def test_loops_and_recomputation_change_nothing(name):
    layers = {"albert_tiny": 2, "modernbert_tiny": 4}[name]  # each kind once
    config = dataclasses.replace(encoder_preset(name), num_layers=layers)
    expected = loss_and_gradients(make(config, head=MLM), TOKENS, BOUNDS)
    options = {"scan_layers": False, "remat": "full"}
    actual = loss_and_gradients(make(config, head=MLM, **options), TOKENS, BOUNDS)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    assert_same_gradients(actual[1], expected[1])
    gradients = named(expected[1])
    assert all(jnp.isfinite(g).all() for g in gradients.values())
    assert {name for name, g in gradients.items() if (g != 0).any()} == set(gradients)


def test_types():
    low = make("bert_tiny", head=MLM, dtype=jnp.bfloat16)
    assert jax.eval_shape(low.hidden, TOKENS).dtype == jnp.bfloat16
    logits = run(low, TOKENS)
    assert logits.dtype == jnp.float32
    error = relative_error(logits, run(make("bert_tiny", head=MLM), TOKENS))
    assert 1e-4 < error < 0.05


def test_errors(no_shape_hook):
    model = make("bert_tiny")
    with pytest.raises(ValueError, match="tokens per row 65 exceeds max_seq_len 64"):
        model(jnp.zeros((1, 65), jnp.int32))
    with pytest.raises(ValueError, match="exactly one of lengths and mask"):
        model.padded(TOKENS)
    with pytest.raises(ValueError, match="row 1 goes on after a zero"):
        model.padded(TOKENS[:, :3], mask=jnp.array([[1, 1, 0], [1, 0, 1]]))
    with pytest.raises(ValueError, match="token_budget=20 is too small for 25 tokens"):
        model.padded(TOKENS, lengths=jnp.array([9, 16]), token_budget=20)
    with pytest.raises(ValueError, match="token_types given, but the model has no"):
        make("distilbert_tiny")(TOKENS, token_types=TYPES)
    with pytest.raises(ValueError, match="head None: make the model with a head"):
        model.answer(model.hidden(TOKENS))
    with pytest.raises(ValueError, match="remat 'some' is unknown; use one of"):
        EncoderModel(encoder_preset("bert_tiny"), remat="some", rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="causal False: only causal attention can"):
        block = jax.tree.map(lambda p: p[0], model.blocks)
        pages = empty_pages(
            num_layers=1, num_pages=1, page_size=4, num_kv_heads=4, head_dim=8
        )
        zero = jnp.zeros(1, jnp.int32)
        state = PagedRows.of(pages, zero[None], zero, zero + 1)
        block(jnp.zeros((1, 1, 32)), state.at(0, None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 5}, "d_model 32 must be a multiple of num_heads 5"),
        ({"d_ff": 0}, "d_ff 0 must be an integer of at least 1"),
        ({"window": 2.5}, "window 2.5 must be an integer of at least 1"),
        ({"position": "alibi"}, "position 'alibi' is unknown; use one of"),
        ({"norm_eps": 0}, "norm_eps 0 must be positive"),
        ({"norm_eps": float("nan")}, "norm_eps nan must be positive and finite"),
        ({"rope_theta_local": 0.0}, "rope_theta_local 0.0 must be positive"),
        ({"position": "none", "position_offset": 2}, "position_offset 2 has no effect"),
        ({"pre_norm": True, "layer_groups": 1}, "layer_groups 1 needs layers"),
        ({"layer_groups": 0}, "layer_groups 0 must be an integer of at least 1"),
        ({"group_blocks": 2}, "group_blocks 2 has no effect without layer_groups"),
        ({"layer_groups": 3}, "num_layers 2 must be a multiple of .* at least 3"),
        (
            {"num_layers": 3, "layer_groups": 1, "group_blocks": 2},
            "num_layers 3 must be a multiple of group_blocks 2",
        ),
        ({"position": "rope", "num_heads": 32}, "head_dim 1 must be even"),
    ],
)
def test_bad_configurations(changes, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(encoder_preset("bert_tiny"), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "regression"}, "kind 'regression' is unknown; use one of"),
        ({"kind": "span"}, "num_labels 3, expected 2 for kind 'span'"),
        ({"kind": "masked_lm"}, "num_labels 3, expected 0 for kind 'masked_lm'"),
        ({"num_labels": 0}, "num_labels 0, expected 1 or more for kind 'sequence'"),
        ({"labels": ("a",)}, "must name each of num_labels 3"),
        ({"transform": "swish"}, "transform 'swish' is unknown; use one of"),
    ],
)
def test_bad_heads(changes, message, no_shape_hook):
    head = HeadConfig(kind="sequence", num_labels=3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(head, **changes)


@pytest.mark.parametrize("packed", [False, True])
def test_padding_within_a_text_is_not_counted(packed):
    """Positions as transformers' `create_position_ids_from_input_ids` counts them."""
    config = roberta_tiny()
    padding = config.position_offset - 1
    model = EncoderModel(config, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, (2, 12), np.int32)
    tokens[0, [0, 3, 4, 7]] = tokens[1, 11] = padding
    bounds = [0, 5, 12] if packed else [0, 12]
    places = np.zeros_like(tokens)
    for start, end in itertools.pairwise(bounds):
        counted = tokens[:, start:end] != padding
        places[:, start:end] = counted.cumsum(axis=1) * counted + padding
    ends = jnp.asarray([bounds, bounds], jnp.int32) if packed else None
    hidden = jax.jit(EncoderModel.hidden)
    found = hidden(model, jnp.asarray(tokens), cu_seqlens=ends)
    # Places that are given are taken as they are.
    expected = hidden(
        model,
        jnp.asarray(tokens),
        cu_seqlens=ends,
        positions=jnp.asarray(places - config.position_offset),
    )
    np.testing.assert_array_equal(found, expected)
