"""Rows that several devices share: attention of one device, sequences across pieces."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxscale.models import EncoderModel, encoder_preset
from jaxscale.nn import AttentionConfig
from jaxscale.nn.context import all_tokens, own_part, own_tokens, state_of_part
from jaxscale.sharding import dp, make_mesh
from pallas_kernels.varlen_attention import varlen_attention


T, N, K, H = 48, 4, 2, 8
NAMES = ("context",)
# An empty sequence, ends inside and between pieces of 6 or 12, padding; one sequence
# and no padding; a short one and much padding.
CU_SEQLENS = jnp.asarray([[0, 10, 10, 24, 25, 41], [0, *[T] * 5], [0, *[5] * 5]])


def on_devices(fn, count, *specs):
    mesh = make_mesh({"context": count, "tensor": 2}, jax.devices()[: 2 * count])
    return mesh, jax.jit(
        jax.shard_map(
            fn,
            mesh=mesh,
            axis_names=set(NAMES),
            in_specs=P(),
            out_specs=specs,
            check_vma=False,
        )
    )


@functools.cache
def problem():
    rng = np.random.default_rng(0)
    q, k, v, dy = (
        jnp.asarray(rng.normal(size=(3, T, heads, H)), jnp.float32)
        for heads in (N, K, K, N)
    )
    inside = jnp.arange(T) < CU_SEQLENS[:, -1:]
    return q, k, v, jnp.where(inside[..., None, None], dy, 0), inside


@pytest.mark.parametrize(("window", "count"), [(None, 4), (7, 2)])
def test_attention_and_gradients_are_those_of_one_device(window, count):
    q, k, v, dy, inside = problem()
    config = AttentionConfig(num_heads=N, num_kv_heads=K, head_dim=H, window=window)

    @jax.jit
    def alone(q, k, v, dy):
        def attend(*x):
            return varlen_attention(*x, CU_SEQLENS, **config.options)

        y, pull = jax.vjp(attend, q, k, v)
        return y, *pull(dy)

    # Padding may hold anything.
    poisoned = (jnp.where(inside[..., None, None], x, jnp.nan) for x in (q, k, v))

    def shared(*arrays):
        *own, dy = (own_tokens(x, NAMES) for x in arrays)
        part = own[0].shape[:2]
        state = state_of_part(part, cu_seqlens=CU_SEQLENS, rules=dp())
        out, back = jax.vjp(lambda *x: state.attend(*x, config)[0], *own)
        return tuple(all_tokens(x, NAMES) for x in (out, *back(dy)))

    _, run = on_devices(shared, count, P(), P(), P(), P())
    got = run(*poisoned, dy)
    for x, y in zip(got, alone(q, k, v, dy), strict=True):
        x, y = (np.asarray(a)[np.asarray(inside)] for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=2e-6)


def test_devices_have_pieces_from_both_ends_and_count_positions_on():
    rows = jnp.arange(2 * 8).reshape(2, 8)

    def fn():
        own = own_tokens(rows, NAMES)
        state = state_of_part(
            own.shape, cu_seqlens=jnp.array([[0, 3, 8]] * 2), rules=dp()
        )
        lengths = state.sequence_lengths()
        return own, all_tokens(own, NAMES), state.positions, lengths

    _, run = on_devices(fn, 2, P(None, NAMES), P(), P(None, NAMES), P(None, NAMES))
    own, whole, positions, lengths = run()
    np.testing.assert_array_equal(own[0], [0, 1, 6, 7, 2, 3, 4, 5])
    np.testing.assert_array_equal(whole, rows)
    np.testing.assert_array_equal(positions[1], [0, 1, 3, 4, 2, 0, 1, 2])
    np.testing.assert_array_equal(lengths[0], [3, 3, 5, 5, 3, 5, 5, 5])


def test_a_sequence_is_lost_on_all_devices():
    marked = np.zeros((1, 8), bool)
    marked[0, 7] = True  # of the device with both ends

    def fn():
        state = state_of_part((1, 4), cu_seqlens=jnp.array([[0, 3, 8]]), rules=dp())
        found = state.in_sequence_with(own_tokens(jnp.asarray(marked), NAMES))
        return (all_tokens(found, NAMES),)

    _, run = on_devices(fn, 2, P())
    np.testing.assert_array_equal(run()[0][0], [False] * 3 + [True] * 5)


def test_what_cannot_be_shared_is_refused():
    config = AttentionConfig(num_heads=N, num_kv_heads=K, head_dim=H, causal=False)
    encoder = EncoderModel(encoder_preset("bert_tiny"), rules=dp(), rngs=nnx.Rngs(0))

    def run(fn):
        mesh, mapped = on_devices(fn, 2, P())
        with jax.set_mesh(mesh):
            jax.eval_shape(mapped)

    def attend():
        q, k = jnp.ones((1, 4, N, H)), jnp.ones((1, 4, K, H))
        return (state_of_part((1, 4), rules=dp()).attend(q, k, k, config)[0],)

    for fn, message in (
        (lambda: (own_tokens(jnp.ones((1, 6)), NAMES),), r"6 tokens .* by 4.* 4 or 8"),
        (lambda: (own_tokens(jnp.ones((1, 3)), NAMES),), r"use rows of 4 tokens"),
        (attend, "causal False: the mesh axes"),
        (lambda: (encoder.hidden(jnp.ones((1, 8), int)),), "only decoders can do"),
        (lambda: (own_part({}, dp()),), "batch is a dict.*PackedBatch alone"),
    ):
        with pytest.raises(ValueError, match=message):
            run(fn)
