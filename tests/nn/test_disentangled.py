"""Disentangled attention and the convolution of DeBERTa, against plain numpy."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import EncoderModel, encoder_preset
from jaxscale.nn import (
    DisentangledAttention,
    DisentangledConfig,
    PagedRows,
    RelativePositions,
    SequenceConvolution,
    attention_state,
    empty_pages,
)
from jaxscale.sharding import REPLICATED, MeshConfig, fsdp_tp, make_mesh, place
from pallas_kernels.dispatch import Unsupported
from tests.tiers import exhaustive
from tests.tolerances import assert_same_step


BOUNDS = np.array([[0, 5, 5, 14], [0, 1, 16, 16]])
WIDTH = 12
RELATIVE = {
    "shared": RelativePositions(span=4, max_distance=8),
    "own": RelativePositions(span=3, share_projections=False),
    "content to position": RelativePositions(
        span=4, max_distance=8, position_to_content=False
    ),
    "position to content": RelativePositions(
        span=3, content_to_position=False, share_projections=False
    ),
}


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make(relative):
    config = DisentangledConfig(
        num_heads=3,
        num_kv_heads=3,
        head_dim=4,
        use_bias=True,
        use_out_bias=True,
        causal=False,
        relative=relative,
    )
    layer = DisentangledAttention(WIDTH, config, rngs=nnx.Rngs(0))
    return jax.tree.map(lambda p: 0.4 * random(*p.shape, seed=p.size), layer)


def by_hand(layer, x, table, bounds):
    """One sequence, one head at a time, in float64."""
    relative = layer.relative

    def project(linear, x):
        kernel, bias = (
            np.asarray(p[...], np.float64) for p in (linear.kernel, linear.bias)
        )
        return (x @ kernel + bias).reshape(len(x), 3, 4)

    position_key = layer.position_key or layer.key
    position_query = layer.position_query or layer.query
    out = np.zeros((len(x), 3, 4))
    for begin, end in itertools.pairwise(bounds):
        rows = x[begin:end]
        distance = np.arange(end - begin)[:, None] - np.arange(end - begin)
        entries = relative.buckets.entry(distance)
        q, k, v = (project(p, rows) for p in (layer.query, layer.key, layer.value))
        for head in range(3):
            scores = q[:, head] @ k[:, head].T
            if relative.content_to_position:
                keys = project(position_key, table)[entries][:, :, head]  # [T, T, H]
                scores += np.einsum("ih,ijh->ij", q[:, head], keys)
            if relative.position_to_content:
                queries = project(position_query, table)[entries][:, :, head]
                scores += np.einsum("jh,ijh->ij", k[:, head], queries)
            scores /= np.sqrt(4 * (1 + relative.num_terms))
            weights = np.exp(scores)
            weights /= weights.sum(axis=1, keepdims=True)
            out[begin:end, head] = weights @ v[:, head]
    kernel, bias = (np.asarray(p[...]) for p in (layer.out.kernel, layer.out.bias))
    return out.reshape(len(x), WIDTH) @ kernel + bias


@pytest.mark.parametrize("name", RELATIVE)
def test_attention_is_what_the_formula_says(name):
    layer = make(RELATIVE[name])
    x, table = random(2, 16, WIDTH), random(layer.relative.num_entries, WIDTH, seed=1)

    @jax.jit
    def run(layer, x, cu_seqlens, table):
        state = attention_state(x.shape[:2], cu_seqlens=cu_seqlens, relative=table)
        return layer(x, state)[0]

    packed = run(layer, x, jnp.asarray(BOUNDS), table)
    for row, bounds in enumerate(BOUNDS):
        expected = by_hand(layer, x[row], table, bounds)
        inside = slice(0, bounds[-1])
        np.testing.assert_allclose(packed[row, inside], expected[inside], atol=2e-5)
    whole = run(layer, x, None, table)
    for row in range(2):
        expected = by_hand(layer, x[row], table, [0, 16])
        np.testing.assert_allclose(whole[row], expected, atol=2e-5)


def test_errors(no_shape_hook):
    layer = make(RELATIVE["shared"])
    x, table = jnp.ones((1, 4, WIDTH)), jnp.ones((8, WIDTH))
    state = attention_state((1, 4))
    with pytest.raises(ValueError, match=r"relative None: .* needs the table"):
        layer(x, state)
    with pytest.raises(ValueError, match="causal False: only causal attention can"):
        pages = empty_pages(
            num_layers=1, num_pages=1, page_size=8, num_kv_heads=3, head_dim=4
        )
        zero = jnp.zeros(1, jnp.int32)
        state = PagedRows.of(pages, zero[None], zero, zero + 4, 4)
        layer(x, dataclasses.replace(state, relative=table))
    state = attention_state((1, 4), relative=table)
    layer.implementation = "cudnn"
    with pytest.raises(Unsupported, match="cudnn attention cannot add relative"):
        layer(x, state)
    with pytest.raises(ValueError, match="leave nothing of relative positions"):
        RelativePositions(span=3, content_to_position=False, position_to_content=False)
    with pytest.raises(ValueError, match="span must be an integer of at least 1"):
        RelativePositions(span=0)
    for changes, message in (
        ({"causal": True}, "causal True of disentangled attention must be False"),
        ({"num_kv_heads": 1}, "num_kv_heads 1 of disentangled attention must be 3"),
        ({"window": 4}, "window 4 of disentangled attention must be None"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(layer.config, **changes)


@pytest.mark.parametrize("activation", ["gelu", "relu", "tanh"])
def test_convolution(activation):
    layer = SequenceConvolution(6, 5, activation=activation, rngs=nnx.Rngs(0))
    layer = jax.tree.map(lambda p: random(*p.shape), layer)
    x = random(2, 16, 6, seed=1)
    positions = np.zeros((2, 16), np.int32)
    expected = np.zeros((2, 16, 6))
    kernel, bias = np.asarray(layer.kernel[...]), np.asarray(layer.bias[...])
    for row, bounds in enumerate(BOUNDS):
        for begin, end in itertools.pairwise(bounds):
            positions[row, begin:end] = np.arange(end - begin)
            padded = np.pad(x[row, begin:end], ((2, 2), (0, 0)))
            for t in range(end - begin):
                taps = padded[t : t + 5]
                expected[row, begin + t] = np.einsum("wc,wcd->d", taps, kernel) + bias
    act = {"gelu": lambda x: jax.nn.gelu(x, approximate=False)}
    expected = {"relu": jax.nn.relu, "tanh": jnp.tanh, **act}[activation](expected)
    got = jax.jit(lambda layer, x, p: layer(x, p))(layer, x, positions)
    for row, bounds in enumerate(BOUNDS):
        inside = slice(0, bounds[-1])
        np.testing.assert_allclose(got[row, inside], expected[row, inside], atol=2e-5)


def test_errors_of_the_convolution(no_shape_hook):
    with pytest.raises(ValueError, match="taps 4 must be odd and positive"):
        SequenceConvolution(6, 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="activation 'swish' is unknown"):
        unknown: Any = "swish"
        SequenceConvolution(6, 3, activation=unknown, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative": None}, "relative_norm True needs relative"),
        ({"position": "rope"}, "rope .* of disentangled attention must be None"),
        ({"convolution": 3, "pre_norm": True}, "convolution 3 needs a first layer"),
        ({"convolution": 3, "layer_groups": 1}, "convolution 3 needs a first layer"),
        ({"convolution": -1}, "convolution -1 must be an integer of at least 0"),
        ({"convolution_activation": "swish"}, "convolution_activation 'swish' is unkn"),
    ],
)
def test_bad_configurations(changes, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(encoder_preset("deberta_v3_tiny"), **changes)


# ------------------------------------------------------------------------------------
# Split over devices


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (8, 16)), jnp.int32)
ROWS = jnp.tile(jnp.asarray(BOUNDS), (4, 1))


def make_model(rules, **options):
    config = encoder_preset("deberta_v2_tiny")
    model = EncoderModel(config, rules=rules, rngs=nnx.Rngs(0), **options)
    # At their initial size the layers hardly change what goes in.
    return jax.tree.map(lambda p: 8 * p if p.ndim > 1 else p, model)


def loss(model, tokens, cu_seqlens):
    wave = jnp.cos(jnp.arange(14.0)[:, None] + jnp.arange(32.0))
    return (model(tokens, cu_seqlens=cu_seqlens)[:, :14] * wave).mean()


gradients = jax.jit(jax.value_and_grad(loss))


@pytest.fixture(scope="module")
def expected():
    return gradients(make_model(REPLICATED), TOKENS, ROWS)


@pytest.mark.parametrize("kind", ["explicit", *exhaustive("auto")])
def test_split_over_devices(kind, expected):
    rules = fsdp_tp()
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, axis_type=kind))
    model = place(make_model(rules), mesh, rules)
    rows = jax.NamedSharding(mesh, rules.spec("batch", None))
    tokens, bounds = jax.device_put((TOKENS, ROWS), rows)
    with jax.set_mesh(mesh):
        assert_same_step(gradients(model, tokens, bounds), expected, 2e-5)


def test_loops_and_recomputation_change_nothing(expected):
    model = make_model(REPLICATED, scan_layers=False, remat="full")
    assert_same_step(gradients(model, TOKENS, ROWS), expected, 2e-5)
