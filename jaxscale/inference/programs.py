"""What the device does for the serving engine: the functions that are compiled.

The state lies on the device and is donated to each call: `pages`, the pool of keys and
values, with the scales of fp8; `slots`, a row a request, whose columns are
`slots.Column`; and `counts`, how often penalized requests hold each token. The
parameters are a flat tuple, the leaves of `Decoder.for_inference`: flattening a module
takes milliseconds.

Legend: S slots, C columns, B bucket, W pages of a request, L layers, P pages, K
key/value heads, G tokens of a page, H head dim, V vocabulary, D model, T tokens of a
prefill, N chunks of a prefill, E changes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Int16, UInt32

from jaxscale.inference import sampling
from jaxscale.inference.slots import NUM_STOPS, Column, OutFlag, RowFlag
from jaxscale.models.decoder import Decoder
from jaxscale.nn.cache import PagedChunks, PagedRows
from jaxscale.sharding.operations import constrain


KEY_BLOCK = 128
"""The keys of each prompt begin at a multiple of this: a block of a kernel then holds
those of one prompt, and what it adds up does not depend on the others."""

SCORED = 128
"""Tokens of a prompt whose logits exist at a time."""


class Pages(NamedTuple):
    """The pool of keys and values."""

    kv: Any
    """[L, P, 2, K, G, H]."""
    scales: Any = None
    """[L, P, 2, K], those of fp8."""


class Packed(NamedTuple):
    """The chunks of a prefill, one behind the other; one array on its way.

    Between two chunks there is one without tokens, whose keys are what `KEY_BLOCK`
    leaves free.
    """

    tokens: Any
    """[T] ids."""
    positions: Any
    """[T] in their sequences."""
    rows: Any
    """[T] of the pool, where keys and values go; past the pool for padding."""
    targets: Any
    """[T] the token that follows in the prompt, where its log-probability is asked
    for; -1 otherwise."""
    key_rows: Any
    """[keys] rows of the pool that the chunks read."""
    cu_q: Any
    """[2 N + 1] boundaries in T."""
    cu_k: Any
    """[2 N + 1] boundaries in the keys."""
    slots: Any
    """[N] where the token that follows a chunk goes; S where none is drawn."""

    @staticmethod
    def sizes(tokens: int, keys: int, chunks: int) -> "Packed":
        """How long each part is."""
        bounds = 2 * chunks + 1
        return Packed(tokens, tokens, tokens, tokens, keys, bounds, bounds, chunks)

    def split(self, packed: Any) -> "Packed":
        """The parts of one array, which have these sizes."""
        ends = np.cumsum(self)
        return Packed._make(packed[e - n : e] for e, n in zip(ends, self, strict=True))


@dataclasses.dataclass(frozen=True)
class Programs:
    """The functions, with the structure of the parameters."""

    tree: Any
    """Of the flat parameters."""
    num_chunks: int
    """N."""

    def model(self, params: tuple[Array, ...]) -> Decoder:
        """The module that has these parameters."""
        return jax.tree.unflatten(self.tree, params)

    def update(
        self,
        slots: Int[Array, "S C"],
        source: Int[Array, "S"],
        changes: Int[Array, "E 3"],
    ) -> tuple[Int[Array, "S C"]]:
        """Take each row from `source`, then set (row, column) to a value."""
        row, column, value = changes.T
        return (slots[source].at[row, column].set(value, mode="drop"),)

    def decode(
        self,
        params: tuple[Array, ...],
        pages: Pages,
        slots: Int[Array, "S C"],
        *,
        bucket: int,
        steps: int,
    ) -> tuple[Pages, Array, Int[Array, "steps B 3"]]:
        """Draw `steps` tokens of each live row, greedily or with a temperature."""
        model = self.model(params)

        def step(carry: tuple[Pages, Array], _: None) -> tuple[Any, Array]:
            pages, rows = carry
            pages, logits = _logits(model, pages, rows)
            tokens = sampling.draw(logits, rows, rows[:, Column.LENGTH] + 1)
            rows, out = _settle(rows, logits, tokens, rows[:, Column.LENGTH] + 1)
            return (pages, rows), out

        carry = pages, slots[:bucket]
        (pages, rows), out = jax.lax.scan(step, carry, None, length=steps)
        return pages, slots.at[:bucket].set(rows), out

    def forward(
        self,
        params: tuple[Array, ...],
        pages: Pages,
        slots: Int[Array, "S C"],
        *,
        bucket: int,
    ) -> tuple[Pages, Float[Array, "B V"]]:
        """The logits of each live row's next token, for `sample`."""
        # A loop as in `decode`, so that both round alike.
        model = self.model(params)
        step = lambda pages, _: _logits(model, pages, slots[:bucket])  # noqa: E731
        pages, logits = jax.lax.scan(step, pages, None, length=1)
        return pages, logits[0]

    def sample(
        self,
        logits: Float[Array, "B V"],
        slots: Int[Array, "S C"],
        counts: Int16[Array, "S V"],
        extra: Int[Array, "B_plus_1"],
        mask: UInt32[Array, "B words"],
        bias: Int[Array, "B E 2"],
    ) -> tuple[Array, Array, Int[Array, "1 B 43"]]:
        """Draw a token of each live row by all of its settings.

        Args:
            logits: From `forward`.
            slots: The state.
            counts: The state.
            extra: The row of `counts` of each row, S for none; then whether the
                likeliest tokens are to be reported.
            mask: See `sampling.adjusted`.
            bias: See `sampling.adjusted`.
        """
        rows = slots[: len(logits)]
        counted, wanted = extra[:-1], extra[-1] > 0
        own = counts.at[counted].get(mode="fill", fill_value=0)
        allowed = sampling.adjusted(logits, rows, own, mask, bias)
        position = rows[:, Column.LENGTH] + 1
        tokens = sampling.draw_filtered(allowed, rows, position)
        # Nothing is allowed, or a penalty of no size that makes sense gives infinity.
        stuck = ~jnp.isfinite(jnp.max(allowed, axis=-1))
        rows, out = _settle(rows, logits, tokens, position, stuck)
        live = out[:, 0] >= 0
        counted = jnp.where(live, counted, len(counts))
        counts = counts.at[counted, tokens].add(1, mode="drop")
        top = jax.lax.cond(
            wanted, _top, lambda x: jnp.zeros((len(x), 40), jnp.int32), logits
        )
        out = jnp.concatenate([out, top], axis=-1)
        return slots.at[: len(rows)].set(rows), counts, out[None]

    def prefill(
        self,
        params: tuple[Array, ...],
        pages: Pages,
        slots: Int[Array, "S C"],
        packed: Int[Array, "all"],
        *,
        num_tokens: int,
        num_keys: int,
        scored: bool = False,
    ) -> tuple[Any, ...]:
        """Compute chunks of prompts, and draw the token after those that are whole.

        Returns:
            pages, slots, what was drawn [1, N, 3], and with `scored` of each token the
            bits of the log-probability of its target and the likeliest in its place,
            [T, 41].
        """
        model = self.model(params)
        x = Packed.sizes(num_tokens, num_keys, self.num_chunks).split(packed)
        state = PagedChunks(
            positions=x.positions[None],
            pages=pages.kv,
            scales=pages.scales,
            layer=jnp.int32(0),
            rows=x.rows,
            key_rows=x.key_rows,
            cu_q=x.cu_q[None],
            cu_k=x.cu_k[None],
        )
        hidden, state = model.run(x.tokens[None], state)
        pages = pages._replace(kv=state.pages)
        hidden = constrain(hidden, ("batch", None, "act_embed"), model.rules)
        last = jnp.maximum(x.cu_q[1::2] - 1, 0)
        logits = _unembed(model, hidden[0][last])
        rows = slots.at[x.slots].get(mode="fill", fill_value=0)
        length = rows[:, Column.LENGTH]
        rows = rows.at[:, Column.FLAGS].set(int(RowFlag.LIVE))
        tokens = sampling.draw(logits, rows, length)
        rows, out = _settle(rows, logits, tokens, length)
        slots = slots.at[x.slots].set(rows, mode="drop")
        if not scored:
            return pages, slots, out[None]
        return pages, slots, out[None], _scores(model, hidden[0], x.targets)

    def count(
        self,
        counts: Int16[Array, "S V"],
        tokens: Int[Array, "E"],
        head: Int[Array, "3"],
    ) -> tuple[Int16[Array, "S V"]]:
        """Count tokens of a request.

        Args:
            counts: The state.
            tokens: Ids; V for none.
            head: The row; how many of `tokens` belong to the prompt; and whether the
                row starts from nothing.
        """
        row, in_prompt, fresh = head
        old = jnp.where(fresh > 0, jnp.int16(0), counts[row])
        before = jnp.arange(len(tokens)) < in_prompt
        seen = jnp.zeros(old.shape, bool).at[tokens].max(before, mode="drop")
        old = old.at[tokens].add((~before).astype(jnp.int16), mode="drop")
        return (counts.at[row].set(jnp.where(seen, old | sampling.IN_PROMPT, old)),)


def _logits(
    model: Decoder, pages: Pages, rows: Int[Array, "B C"]
) -> tuple[Pages, Float[Array, "B V"]]:
    """The pages with the newest token of each live row, and the logits of the next."""
    live = rows[:, Column.FLAGS] & int(RowFlag.LIVE)
    state = PagedRows.of(
        pages.kv,
        rows[:, Column.TABLE :],
        live * rows[:, Column.LENGTH],
        live,
        scales=pages.scales,
    )
    hidden, state = model.run((live * rows[:, Column.TOKEN])[:, None], state)
    return pages._replace(kv=state.pages), _unembed(model, hidden[:, 0])


def _unembed(model: Decoder, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Logits, whole on each device."""
    logits = model.unembed(hidden[:, None])[:, 0]
    return constrain(logits, (None, None), model.rules)


def _settle(
    rows: Int[Array, "B C"],
    logits: Float[Array, "B V"],
    tokens: Int[Array, "B"],
    length: Int[Array, "B"],
    stuck: Array | bool = False,
) -> tuple[Int[Array, "B C"], Int[Array, "B 3"]]:
    """The rows after drawing `tokens`, and what the host is told.

    Args:
        rows: The state.
        logits: Of the model, before anything was changed.
        tokens: What was drawn.
        length: Tokens in the cache: the position of the drawn token.
        stuck: Rows that may draw no token at all.
    """
    live = rows[:, Column.FLAGS] & int(RowFlag.LIVE) > 0
    logprob, finite = sampling.logprobs(logits, tokens)
    stops = rows[:, Column.STOPS : Column.STOPS + NUM_STOPS]
    stopped = jnp.any(tokens[:, None] == stops, axis=-1)
    stopped &= length >= rows[:, Column.MIN_LENGTH]
    failed = ~finite | stuck
    ended = stopped | failed | (length + 1 >= rows[:, Column.LIMIT])
    said = (
        (OutFlag.ENDED, ended),
        (OutFlag.STOPPED, stopped),
        (OutFlag.NOT_FINITE, failed),
    )
    flags = sum(int(flag) * where.astype(jnp.int32) for flag, where in said)
    bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
    out = jnp.stack([jnp.where(live, tokens, -1), flags, bits], axis=-1)
    after = (
        rows.at[:, Column.TOKEN]
        .set(tokens)
        .at[:, Column.LENGTH]
        .set(length)
        .at[:, Column.FLAGS]
        .set(jnp.where(ended, 0, int(RowFlag.LIVE)))
    )
    return jnp.where(live[:, None], after, rows), out.astype(jnp.int32)


def _top(logits: Float[Array, "B V"]) -> Int[Array, "B 40"]:
    """The likeliest tokens, then the bits of their log-probabilities."""
    tokens, values = sampling.top_logprobs(logits)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([tokens, bits], axis=-1)


def _scores(
    model: Decoder, hidden: Float[Array, "T D"], targets: Int[Array, "T"]
) -> Int[Array, "T 41"]:
    """What the model thinks of the tokens that follow, some of them at a time."""

    def part(x: tuple[Array, Array]) -> Array:
        logits = _unembed(model, x[0])
        logprob, _ = sampling.logprobs(logits, jnp.maximum(x[1], 0))
        bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
        return jnp.concatenate([bits[:, None], _top(logits)], axis=-1)

    size = min(SCORED, len(targets))
    parts = hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size)
    return jax.lax.map(part, parts).reshape(len(targets), -1)
