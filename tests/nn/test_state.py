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
from jaxscale.models import Decoder, DecoderConfig, preset
from jaxscale.models.stack import run_stack
from jaxscale.nn import AttentionState, attention, attention_state
from jaxscale.sharding import MeshConfig, make_mesh
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


@jax.jit
def run(model, tokens, cu_seqlens=None):
    return model(tokens, cu_seqlens=cu_seqlens)


@pytest.mark.parametrize("how", ["scanned", "unrolled", "unstacked"])
def test_windows_of_single_layers_reach_decoding(how):
    # Seven layers: a pattern of three, twice, and the beginning of another.
    model = make(alternating(7), scan_layers=how != "unrolled")
    model = model.unstacked() if how == "unstacked" else model
    expected = run(model, TOKENS)
    # That the windows count: without them the result is another one.
    assert relative_error(expected, run(with_config(model, "llama_tiny"), TOKENS)) > 0.1
    decode = jax.jit(Decoder.decode)
    got, cache = decode(model, TOKENS[:, :7], model.init_cache(2, 20))
    for at in (slice(7, 8), slice(8, 9), slice(9, 16)):
        logits, cache = decode(model, TOKENS[:, at], cache)
        got = jnp.concatenate([got, logits], axis=1)
    assert relative_error(got, expected) < 1e-5


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
    assert generate(model.unstacked(), prompts, max_new_tokens=new) == expected


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
    tokens = jnp.asarray(RNG.integers(0, 256, (batches, *shape)), jnp.int32)
    cu = jnp.array([[[0, 5, 14]], [[0, 16, 16]], [[0, 1, 9]]])
    states = jax.vmap(lambda cu: attention_state(shape, cu_seqlens=cu))(cu)
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

    embedded = model.embed(tokens.reshape(batches, 16)).reshape(batches, *shape, -1)
    pipeline = jax.shard_map(
        stage,
        mesh=mesh,
        in_specs=(PartitionSpec("pipe"), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec("pipe"),
        check_vma=False,
    )
    out = jax.jit(pipeline)(model.blocks, embedded, states)[-1]
    for batch in range(batches):
        expected = model.hidden(tokens[batch], cu_seqlens=cu[batch])
        inside = slice(0, int(cu[batch, 0, -1]))
        got = model.norm(out[batch])[0, inside]
        assert relative_error(got, expected[0, inside]) < 1e-5


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
