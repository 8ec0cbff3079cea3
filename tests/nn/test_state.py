"""What attention needs as one pytree: caches, pages, microbatches and boundaries."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxscale.inference import generate
from jaxscale.models import (
    Decoder,
    DecoderConfig,
    EncoderModel,
    encoder_preset,
    pool,
    preset,
)
from jaxscale.models.serving import serving_rules
from jaxscale.models.stack import run_stack, unstacked
from jaxscale.nn import AttentionState, attention, attention_state
from jaxscale.nn.blocks import Block
from jaxscale.sharding import (
    REPLICATED,
    MeshConfig,
    dp,
    fsdp_tp,
    make_mesh,
    place,
)
from tests.decoding import decode
from tests.tiers import exhaustive
from tests.tolerances import relative_error


RNG = np.random.default_rng(0)
TOKENS = jnp.asarray(RNG.integers(0, 256, (2, 16)), jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alternating(DecoderConfig):
    """Every layer but each third sees three tokens."""

    def attention(self, layer=0):
        window = None if layer % 3 == 2 else 3
        return dataclasses.replace(super().attention(layer), window=window)


def make(config, **options):
    model = Decoder(config, rngs=nnx.Rngs(0), **options)
    # At their initial size the blocks hardly change the token that goes in.
    model.blocks = jax.tree.map(lambda p: 12 * p if p.ndim == 3 else p, model.blocks)
    return model


def alternating(num_layers):
    plain = dataclasses.asdict(preset("llama_tiny"))
    return Alternating(**(plain | {"num_layers": num_layers}))


by_parts = jax.jit(decode, static_argnums=(2, 3, 4, 5))


@jax.jit
def run(model, tokens, cu_seqlens=None):
    return model(tokens, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("how", ["scanned", "served", *exhaustive("unrolled")])
def test_windows_of_single_layers_reach_decoding(how):
    # Seven layers: a pattern of three, twice, and the beginning of another.
    model = make(alternating(7 if how == "scanned" else 4), scan_layers=True)
    expected = run(model, TOKENS)
    if how == "scanned":  # the windows count: without them the result is another one
        plain = run(with_config(model, "llama_tiny"), TOKENS)
        assert relative_error(expected, plain) > 0.1
    if how == "unrolled":
        model = make(alternating(4), scan_layers=False)
    model = model.for_inference() if how == "served" else model
    got, _ = by_parts(model, TOKENS, 7, 1, 8)
    assert relative_error(got, expected) < 1e-5


def test_single_blocks_that_are_alike_are_traced_once(monkeypatch):
    model = make(alternating(7)).for_inference()
    call, traced = Block.__call__, []

    def counting(self, *args, **kwargs):
        traced.append(self)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(Block, "__call__", counting)
    # Rows of another length than those of other tests, whose traces are kept.
    jax.jit(lambda model, tokens: model(tokens)).trace(model, TOKENS[:, :5])
    assert len(traced) == len({model.config.attention(i) for i in range(7)}) < 7


@pytest.mark.parametrize(
    ("kind", "stacked"),
    [("explicit", True), ("manual", True), *exhaustive(("auto", False))],
)
def test_windows_of_single_layers_decode_on_meshes(kind, stacked):
    # Tokens, which come singly, are whole.
    rules = serving_rules(dataclasses.replace(fsdp_tp(), tokens=None))
    config = alternating(3)
    whole = make(config)
    tokens = TOKENS[:, :9]
    expected = run(whole, tokens)

    def logits(model, tokens):
        return decode(model, tokens, 8, 1)[0]

    if kind == "manual":
        mesh, model = make_mesh(MeshConfig(data=2), jax.devices()[:2]), whole
        rows = PartitionSpec("data")  # and each device has pages of its own
        specs = {"in_specs": (PartitionSpec(), rows), "out_specs": rows}
        logits = jax.shard_map(logits, mesh=mesh, check_vma=False, **specs)
    else:
        mesh = make_mesh({"tensor": 2, "axis_type": kind}, jax.devices()[:2])
        with jax.set_mesh(mesh):
            model = place(make(config, rules=rules), mesh, rules)
    with jax.set_mesh(mesh):
        model = model if stacked else unstacked(model)
        found = jax.jit(logits)(model, tokens)
    assert relative_error(found, expected) < 1e-5


def with_config(model, name):
    """The same parameters under the plain configuration."""
    other = jax.tree.map(lambda p: p, model)
    layers = model.config.num_layers
    other.config = dataclasses.replace(preset(name), num_layers=layers)
    return other


def test_windows_of_single_layers_generate_what_the_whole_sequence_says():
    model = make(alternating(4))
    prompts, new = [[5, 6, 7, 8, 9, 10, 11], [200, 3]], 6
    expected = []
    for prompt in prompts:
        sequence = list(prompt)
        for _ in range(new):
            row = np.zeros((1, 16), np.int32)
            row[0, : len(sequence)] = sequence
            logits = run(model, row)
            sequence.append(int(logits[0, len(sequence) - 1].argmax()))
        expected.append(sequence[len(prompt) :])
    assert generate(model, prompts, max_new_tokens=new) == expected


PAGE = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Paged(AttentionState):
    """Chunks of several sequences in one row; their keys and values lie in pages."""

    pages: Shaped[Array, "L pages 2 K page H"] = dataclasses.field(
        metadata={"axes": (None,) * 6, "carried": True}
    )
    rows: Int[Array, " T"] = dataclasses.field(metadata={"axes": (None,)})
    """Where in the pool the keys of each token go."""
    key_rows: Int[Array, " S"] = dataclasses.field(metadata={"axes": (None,)})
    """Where the keys of each sequence lie, one sequence after the other."""
    cu_q: Int[Array, "1 bounds"] = dataclasses.field(metadata={"axes": (None, None)})
    cu_k: Int[Array, "1 bounds"] = dataclasses.field(metadata={"axes": (None, None)})
    layer: Int[Array, ""] | int = dataclasses.field(default=0, metadata={"axes": ()})

    def at(self, layer, variant):
        return dataclasses.replace(self, layer=layer, variant=variant)

    def attend(self, q, k, v, config, implementation=None):
        new = jnp.stack([k[0], v[0]], 1)  # [T, 2, K, H]
        pages = self.pages.at[self.layer, self.rows // PAGE, :, :, self.rows % PAGE]
        pages = pages.set(new, mode="drop")
        at = self.key_rows
        held = pages.at[self.layer, at // PAGE, :, :, at % PAGE]
        held = held.get(mode="fill", fill_value=0)[None]  # [1, S, 2, K, H]
        out = attention(
            q,
            held[:, :, 0],
            held[:, :, 1],
            cu_seqlens=self.cu_q,
            cu_seqlens_k=self.cu_k,
            causal=True,
            window=config.limits,
        )
        return out, dataclasses.replace(self, pages=pages)


def test_a_form_of_pages_takes_prompts_in_chunks():
    # Three prompts share each step, in pages that hold NaN until they are written.
    model = make(alternating(3))
    prompts = [RNG.integers(0, 256, n).astype(np.int32) for n in (9, 4, 6)]
    order, used, tables = RNG.permutation(8), 0, []
    for prompt in prompts:
        count = -(-len(prompt) // PAGE)
        tables.append(order[used : used + count])
        used += count
    c = model.config
    shape = c.num_layers, len(order), 2, c.num_kv_heads, PAGE, c.head_dim
    pages, past_the_pool = jnp.full(shape, jnp.nan), len(order) * PAGE
    step = jax.jit(Decoder.run)
    hidden = [[] for _ in prompts]
    done = [0, 0, 0]
    for sizes in ((4, 1, 3), (4, 1, 3), (1, 2, 0)):
        tokens, places, rows, key_rows, q, k = [], [], [], [], [0], [0]
        for i, size in enumerate(sizes):
            new, seen = range(done[i], done[i] + size), range(done[i] + size)
            row = lambda p, i=i: tables[i][p // PAGE] * PAGE + p % PAGE  # noqa: E731
            tokens += [prompts[i][p] for p in new]
            places += new
            rows += [row(p) for p in new]
            key_rows += [row(p) for p in seen]
            q.append(q[-1] + size)
            k.append(k[-1] + len(seen))
            done[i] += size

        def padded(values, size, fill):
            return jnp.array([*values, *[fill] * (size - len(values))], jnp.int32)

        state = Paged(
            positions=padded(places, 8, 0)[None],
            pages=pages,
            rows=padded(rows, 8, past_the_pool),
            key_rows=padded(key_rows, 24, past_the_pool),
            cu_q=jnp.array([q], jnp.int32),
            cu_k=jnp.array([k], jnp.int32),
        )
        out, state = step(model, padded(tokens, 8, 0)[None], state)
        pages = state.pages
        for i in range(3):
            hidden[i].append(out[0, q[i] : q[i + 1]])
    assert done == [len(prompt) for prompt in prompts]
    for prompt, got in zip(prompts, hidden, strict=True):
        expected = model.hidden(jnp.asarray(prompt)[None])[0]
        assert relative_error(jnp.concatenate(got), expected) < 1e-5


def test_a_state_goes_through_a_pipeline_with_its_microbatch():
    # Four stages of one layer; each stage picks the state of the microbatch it has.
    config = dataclasses.replace(preset("llama_tiny"), num_layers=4)
    model = make(config)
    stages, batches, shape = 4, 3, (1, 16)
    tokens = RNG.integers(0, 256, (batches, *shape), np.int32)
    cu = np.array([[[0, 5, 14]], [[0, 16, 16]], [[0, 1, 9]]], np.int32)
    states = jax.vmap(lambda cu: attention_state(shape, cu_seqlens=cu))
    states = jax.jit(states)(cu)
    mesh = make_mesh(MeshConfig(pipe=stages), jax.devices()[:stages])

    def stage(blocks, embedded, states):
        rank = jax.lax.axis_index("pipe")

        def tick(x, t):
            x = jax.lax.ppermute(x, "pipe", [(i, i + 1) for i in range(stages - 1)])
            batch = jnp.clip(t - rank, 0, batches - 1)
            x = jnp.where(rank == 0, embedded[batch], x)
            state = jax.tree.map(lambda a: a[batch], states)
            options = {"variants": [None], "remat": "none", "scan": True}
            x, _ = run_stack(blocks, x, state, **options)
            return x, x

        _, out = jax.lax.scan(tick, embedded[0], jnp.arange(batches + stages - 1))
        return out[None, stages - 1 :]

    embedded = jax.jit(model.embed)(tokens.reshape(batches, 16))
    embedded = embedded.reshape(batches, *shape, -1)
    pipeline = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(PartitionSpec("pipe"), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec("pipe"),
        check_vma=False,
    )
    out = jax.jit(pipeline)(model.blocks, embedded, states)[-1]
    alone = jax.jit(lambda model, tokens, cu: model.hidden(tokens, cu_seqlens=cu))
    got = np.asarray(jax.jit(model.norm)(out))
    for batch in range(batches):
        expected = np.asarray(alone(model, tokens[batch], cu[batch]))
        inside = slice(0, int(cu[batch, 0, -1]))
        assert relative_error(got[batch, 0, inside], expected[0, inside]) < 1e-5


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([[0, 5], [0, 17]], r"cu_seqlens\[1\] must end at most at num_tokens=16"),
        ([[0, 9, 5], [0, 5, 16]], r"cu_seqlens\[0\] must not decrease"),
        ([[0, 5], [1, 16]], r"cu_seqlens\[1\] must start at 0"),
        ([[0, 16]], r"shape \(1, 2\), expected the boundaries of 2 rows"),
    ],
)
def test_boundaries_that_do_not_fit_are_refused(bounds, message, no_shape_hook):
    model = make(preset("llama_tiny"))
    with pytest.raises(ValueError, match=message):
        model(TOKENS, cu_seqlens=jnp.array(bounds))


@pytest.mark.parametrize("name", ["llama_tiny", "gpt2_tiny"])
def test_an_id_outside_the_vocabulary_spoils_its_own_sequence_alone(name):
    model, bounds = make(preset(name)), jnp.array([[0, 5, 5, 14, 16], [0, 3, 9, 9, 9]])

    @jax.jit
    def logits_and_gradients(model, tokens):
        def loss(model):
            logits = model(tokens, cu_seqlens=bounds)
            return jax.nn.log_softmax(logits)[0, :5, 0].sum(), logits

        return jax.grad(loss, has_aux=True)(model)

    expected_gradients, expected = logits_and_gradients(model, TOKENS)
    for bad in (-1, 256):
        tokens = TOKENS.at[0, 7].set(bad).at[1, 12].set(bad)  # this in the padding
        gradients, logits = logits_and_gradients(model, tokens)
        assert jnp.isnan(logits[0, 5:14]).all()
        for row, at in ((0, slice(0, 5)), (0, slice(14, 16)), (1, slice(0, 9))):
            assert relative_error(logits[row, at], expected[row, at]) < 1e-5
        for grad, exact in zip(
            jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True
        ):
            if not np.isnan(grad).any():  # that of the projection sees all tokens
                np.testing.assert_allclose(grad, exact, rtol=1e-4, atol=1e-5)
        assert not np.isnan(gradients.blocks.mlp.down.kernel[...]).any()


@pytest.mark.parametrize("pooling", ["first", "mean", "max"])
def test_pooled_sequences_do_not_spoil_each_other(pooling):
    model = EncoderModel(encoder_preset("deberta_v3_tiny"), rngs=nnx.Rngs(0))
    bounds = jnp.array([[0, 5, 14, 16]])
    embed = jax.jit(lambda t: pool(model.hidden(t, cu_seqlens=bounds), bounds, pooling))
    got, expected = embed(TOKENS[:1].at[0, 7].set(300)), embed(TOKENS[:1])
    assert jnp.isnan(got[0, 1]).all()
    assert relative_error(got[0, ::2], expected[0, ::2]) < 1e-5
    # A position outside of its table does the same, and so does a token type.
    bert = EncoderModel(encoder_preset("bert_tiny"), rngs=nnx.Rngs(0))
    places = jnp.arange(16)[None]
    for changes in (
        {"positions": places.at[0, 9].set(64)},
        {"token_types": jnp.zeros_like(places).at[0, 9].set(2)},
    ):
        hidden = bert.hidden(TOKENS[:1], cu_seqlens=bounds, **changes)
        lost = jnp.isnan(hidden).all(axis=-1)[0]
        assert lost.tolist() == [5 <= t < 14 for t in range(16)]
        assert jnp.isnan(hidden).any(axis=-1)[0].tolist() == lost.tolist()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_one_sequence_of_tokens_on_a_mesh(kind):
    """Values and gradients of [T] tokens on a mesh of one device, and of an id lost."""
    rules = dp() if kind == "auto" else fsdp_tp()
    mesh = make_mesh(MeshConfig(axis_type=kind), jax.devices()[:1])
    bounds, tokens = jnp.array([0, 5, 14]), TOKENS[0].at[7].set(999)

    def build(rules):
        config = encoder_preset("bert_tiny")
        return EncoderModel(config, rules=rules, rngs=nnx.Rngs(0))

    @jax.jit
    def run(model):
        def loss(model):
            hidden = model.hidden(tokens, cu_seqlens=bounds)
            return jnp.sin(hidden[:5]).sum(), hidden

        return jax.value_and_grad(loss, has_aux=True)(model)

    model = place(build(rules), mesh, rules)
    with jax.set_mesh(mesh):
        if kind == "auto":  # a constraint of another rank is seen without compiling
            jax.eval_shape(run, model)
            return
        (value, hidden), got = run(model)
    (expected, _), gradients = run(build(REPLICATED))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert jnp.isnan(hidden[5:14]).all()
    for grad, exact in zip(
        jax.tree.leaves(got), jax.tree.leaves(gradients), strict=True
    ):
        np.testing.assert_allclose(grad, exact, atol=1e-5 * float(abs(exact).max() + 1))
