"""The compiled functions of the inference engine.

The state is on the device and is donated to each call: `pages`, the KV cache, with its
fp8 scales; `slots`, one row per request, with the columns of `batch_rows.Column`;
`counts`, token counts of requests with penalties; and with draft tokens `history`, the
tokens of each row that are in its pages. The parameters are a flat tuple, the leaves of
`Decoder.for_inference`: flattening a module takes milliseconds.

Legend: S slots, C columns, B bucket, R tokens per row and step (1 + draft tokens), M
tokens of the longest request, W pages of a request, L layers, P pages, K key/value
heads, G tokens of a page, H head dim, V vocabulary, D model, T tokens of a prefill, N
chunks of a prefill, E changes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int16, UInt32

from jaxscale.inference.engine import sampling
from jaxscale.inference.engine.prefill_batch import PrefillBatch
from jaxscale.inference.engine.scheduling.batch_rows import (
    NUM_STOPS,
    Column,
    OutFlag,
    RowFlag,
)
from jaxscale.inference.engine.speculation import look_up, verify, write_history
from jaxscale.models.adapters import use_adapters
from jaxscale.models.decoder import Decoder
from jaxscale.nn.cache import PagedChunks, PagedMixed, PagedRows, clear_tails
from jaxscale.sharding.decode_all_reduce import ReduceWorkspace, Sums
from jaxscale.sharding.operations import constrain


SCORED = 128
"""Prompt tokens whose logits are computed at a time."""


ADAPTED = "_lora"
"""End of the names of the programs whose rows may use adapters."""

_DECODED = ["params", "pages", "slots", "history"]
STATE = {
    "move": (["pages"], ["pages"]),
    "update": (["slots"], ["slots"]),
    "count": (["counts"], ["counts"]),
    "remember": (["history"], ["history"]),
    "reorder": (["history"], ["history"]),
    "decode": (_DECODED, _DECODED[1:]),
    "speculate": (_DECODED, _DECODED[1:]),
    "forward": (_DECODED, ["pages", "history", "logits"]),
    "sample": (["logits", "slots", "counts"], ["slots", "counts"]),
    "prefill": (["params", "pages", "slots"], ["pages", "slots"]),
    "mixed": (["params", "pages", "slots"], ["pages", "slots"]),
}
STATE |= {
    name + ADAPTED: (["adapted_params", *taken[1:]], given)
    for name, (taken, given) in STATE.items()
    if taken[0] == "params"
}
"""What a program takes of the state before its inputs, and what its first results take
the place of."""


class Pages(NamedTuple):
    """The page pool of the KV cache."""

    kv: Any
    """[L, P, 2, K, G, H]."""
    scales: Any = None
    """[L, P, 2, K], fp8 scales."""


@dataclasses.dataclass(frozen=True)
class DecodePrograms:
    """The functions, with the structure of the parameters."""

    tree: Any
    """Tree structure of the flat parameters, with adapters if the model has them."""
    num_chunks: int
    """N."""
    ngrams: tuple[int, int] = (1, 1)
    """Shortest and longest n-gram of the draft lookup."""
    gathers: bool = False
    """Whether attention of prompts gathers keys and values instead of reading pages."""

    def model(self, params: tuple[Array, ...]) -> Decoder:
        """The module with these parameters."""
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
        history: Int[Array, "S M"] | None,
        *,
        bucket: int,
        steps: int,
        drafts: int = 0,
        sums: Sums | None = None,
    ) -> tuple[Pages, Array, Array | None, Int[Array, "steps B R 3"]]:
        """Sample tokens of each live row, greedily or with a temperature.

        A row gains a token per step, plus one per accepted draft token. With `sums` the
        layers all-reduce without XLA.
        """
        model = self.model(params)

        def step(carry: tuple[Any, ...], _: None) -> tuple[Any, Array]:
            pages, rows, history, workspace = carry
            tokens, num_new, history = self._tokens(rows, history, drafts)
            pages, logits, workspace = _logits(
                model, pages, rows, tokens, num_new, workspace
            )
            drawn, hits = verify(logits, rows, tokens, num_new)
            first = rows[:, Column.LENGTH] + 1
            rows, out = _settle(rows, logits, drawn, first, hits=hits)
            drafted = jnp.arange(1, 1 + drafts) < num_new[:, None]
            flags = jnp.where(drafted, int(OutFlag.DRAFTED), 0)
            return (pages, rows, history, workspace), out.at[:, 1:, 1].add(flags)

        workspace = None if sums is None else sums.begin()
        carry = pages, slots[:bucket], history, workspace
        carry, out = jax.lax.scan(step, carry, None, length=steps)
        pages, rows, history, _ = carry
        return pages, slots.at[:bucket].set(rows), history, out

    def forward(
        self,
        params: tuple[Array, ...],
        pages: Pages,
        slots: Int[Array, "S C"],
        history: Int[Array, "S M"] | None,
        *,
        bucket: int,
        sums: Sums | None = None,
    ) -> tuple[Pages, Array | None, Float[Array, "B V"]]:
        """The logits of each live row's next token, for `sample`; see `decode`."""
        model, rows = self.model(params), slots[:bucket]

        def step(carry: tuple[Any, ...], _: None) -> tuple[Any, Array]:
            pages, history, workspace = carry
            tokens, num_new, history = self._tokens(rows, history)
            pages, logits, workspace = _logits(
                model, pages, rows, tokens, num_new, workspace
            )
            return (pages, history, workspace), logits

        # A loop as in `decode`, so that both round equally.
        carry = pages, history, None if sums is None else sums.begin()
        (pages, history, _), logits = jax.lax.scan(step, carry, None, length=1)
        return pages, history, logits[0]

    def _tokens(
        self,
        rows: Int[Array, "B C"],
        history: Int[Array, "S M"] | None,
        drafts: int = 0,
    ) -> tuple[Int[Array, "B R"], Int[Array, "B"], Array | None]:
        """The newest token of each live row and its draft tokens, their number, and the
        history with them: rejected drafts are past its end, as in the pages.
        """
        num_new = rows[:, Column.FLAGS] & int(RowFlag.LIVE)
        tokens = (num_new * rows[:, Column.TOKEN])[:, None]
        length = rows[:, Column.LENGTH]
        if history is None:
            return tokens, num_new, None
        history = write_history(history, length, tokens, num_new)
        if drafts:
            shortest, longest = self.ngrams
            guesses, any_found = look_up(
                history[: len(rows)],
                length,
                drafts=drafts,
                shortest=shortest,
                longest=longest,
            )
            # The last token of a row is never cached.
            room = jnp.maximum(rows[:, Column.LIMIT] - 2 - length, 0)
            num_new *= 1 + jnp.where(any_found, jnp.minimum(room, drafts), 0)
            tokens = jnp.concatenate([tokens, guesses], axis=1)
            history = write_history(history, length, tokens, num_new)
        return tokens, num_new, history

    def sample(
        self,
        logits: Float[Array, "B V"],
        slots: Int[Array, "S C"],
        counts: Int16[Array, "S V"],
        extra: Int[Array, "B_plus_1"],
        mask: UInt32[Array, "B words"],
        bias: Int[Array, "B E 2"],
    ) -> tuple[Array, Array, Int[Array, "1 B 1 43"]]:
        """Sample a token of each live row by all of its settings.

        Args:
            logits: The result of `forward`.
            slots: The state.
            counts: The state.
            extra: The row of `counts` of each row, S for none; then whether to report
                the most likely tokens.
            mask: See `sampling.adjusted`.
            bias: See `sampling.adjusted`.
        """
        rows = slots[: len(logits)]
        counted, wanted = extra[:-1], extra[-1] > 0
        own = counts.at[counted].get(mode="fill", fill_value=0)
        allowed = sampling.adjusted(logits, rows, own, mask, bias)
        position = rows[:, Column.LENGTH] + 1
        tokens = sampling.draw_filtered(allowed, rows, position)[:, None]
        # Nothing is allowed, or an absurdly large penalty gives infinity.
        stuck = ~jnp.isfinite(jnp.max(allowed, axis=-1))
        rows, out = _settle(rows, logits, tokens, position, stuck=stuck)
        live = out[:, 0, 0] >= 0
        counted = jnp.where(live, counted, len(counts))
        counts = counts.at[counted, tokens[:, 0]].add(1, mode="drop")
        top = jax.lax.cond(
            wanted, _top, lambda x: jnp.zeros((len(x), 40), jnp.int32), logits
        )
        out = jnp.concatenate([out, top[:, None]], axis=-1)
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
        """Prefill chunks of prompts, and sample the token after complete prompts.

        Returns:
            pages, slots, the sampled tokens [1, N, 1, 3], and with `scored` for each
            token the bits of the log-probability of its target and the most likely
            tokens at its position, [T, 41].
        """
        model = self.model(params)
        adapted = model.adapters is not None
        x = self._unpacked(packed, num_tokens, slots, adapted)
        if adapted:
            model = use_adapters(model, x.adapters[None])
        state = PagedChunks(
            positions=x.positions[None], **self._chunks(pages, x, num_keys)
        )
        hidden, state = model.run(x.tokens[None], state)
        pages = pages._replace(kv=state.pages)
        hidden = constrain(hidden, ("batch", None, "act_embed"), model.rules)
        logits = _unembed(model, hidden[0][_ends(x)])
        slots, out = _begin(slots, x, logits)
        if not scored:
            return pages, slots, out
        return pages, slots, out, _scores(model, hidden[0], x.targets)

    def mixed(
        self,
        params: tuple[Array, ...],
        pages: Pages,
        slots: Int[Array, "S C"],
        packed: Int[Array, "all"],
        *,
        num_tokens: int,
        num_keys: int,
        bucket: int,
    ) -> tuple[Pages, Array, Int[Array, "1 N 1 3"], Int[Array, "1 B 1 3"]]:
        """`prefill` and a step of `decode` in one pass over the weights.

        Rows that go live with a token of this prefill are not decoded yet.
        """
        model = self.model(params)
        x = self._unpacked(packed, num_tokens, slots)
        rows = slots[:bucket]
        newest, num_new, _ = self._tokens(rows, None)
        length = jnp.where(num_new > 0, rows[:, Column.LENGTH], 0)
        state = PagedMixed(
            positions=jnp.concatenate([x.positions, length])[None],
            **self._chunks(pages, x, num_keys),
            table=rows[:, Column.TABLE :],
            lengths=length,
            num_new=num_new,
        )
        tokens = jnp.concatenate([x.tokens, newest[:, 0]])
        hidden, state = model.run(tokens[None], state)
        pages = pages._replace(kv=state.pages)
        hidden = constrain(hidden, ("batch", None, "act_embed"), model.rules)
        last = jnp.concatenate([_ends(x), num_tokens + jnp.arange(bucket)])
        logits = _unembed(model, hidden[0][last])  # [N + B, V]
        first, of_rows = jnp.split(logits, [self.num_chunks])
        position = rows[:, Column.LENGTH] + 1
        drawn = sampling.draw(of_rows, rows, position)
        rows, out = _settle(rows, of_rows, drawn[:, None], position)
        slots, begun = _begin(slots.at[:bucket].set(rows), x, first)
        return pages, slots, begun, out[None]

    def _unpacked(
        self,
        packed: Int[Array, "all"],
        num_tokens: int,
        slots: Int[Array, "S C"],
        adapted: bool = False,
    ) -> PrefillBatch:
        """The parts of the input of a prefill."""
        n, width = self.num_chunks, slots.shape[1] - Column.TABLE
        x = PrefillBatch.sizes(num_tokens, n, width, adapted=adapted).split(packed)
        return x._replace(table=x.table.reshape(n, width))

    def _chunks(self, pages: Pages, x: PrefillBatch, max_keys: int) -> dict[str, Any]:
        """The pages and the chunks of a prefill, as `PagedChunks` takes them."""
        # What gathers leaves out what is past the end of a sequence.
        kv = pages.kv if self.gathers else clear_tails(pages.kv, x.table, x.ends)
        return {
            "pages": kv,
            "scales": pages.scales,
            "layer": jnp.int32(0),
            "rows": x.rows,
            "cu_q": x.cu_q,
            "prompt_table": x.table,
            "ends": x.ends,
            "max_keys": max_keys,
        }

    def remember(
        self,
        history: Int[Array, "S M"],
        tokens: Int[Array, "M"],
        row: Int[Array, "1"],
    ) -> tuple[Int[Array, "S M"]]:
        """Set a row of the history to `tokens`."""
        return (history.at[row].set(tokens),)

    def reorder(
        self, history: Int[Array, "S M"], source: Int[Array, "S"]
    ) -> tuple[Int[Array, "S M"]]:
        """Take each row from `source`."""
        return (history[source],)

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
            head: The row; how many of `tokens` belong to the prompt; and whether to
                reset the row.
        """
        row, in_prompt, fresh = head
        old = jnp.where(fresh > 0, jnp.int16(0), counts[row])
        before = jnp.arange(len(tokens)) < in_prompt
        seen = jnp.zeros(old.shape, bool).at[tokens].max(before, mode="drop")
        old = old.at[tokens].add((~before).astype(jnp.int16), mode="drop")
        return (counts.at[row].set(jnp.where(seen, old | sampling.IN_PROMPT, old)),)


def _logits(
    model: Decoder,
    pages: Pages,
    rows: Int[Array, "B C"],
    tokens: Int[Array, "B R"],
    num_new: Int[Array, "B"],
    workspace: ReduceWorkspace | None,
) -> tuple[Pages, Float[Array, "B_times_R V"], ReduceWorkspace | None]:
    """The pages with the first `num_new` tokens of each row, the logits of the tokens
    that follow, and the workspace for the next all-reduce.
    """
    if model.adapters is not None:
        index = jnp.repeat(rows[:, Column.ADAPTER], tokens.shape[1])
        model = use_adapters(model, index[:, None])
    length = jnp.where(num_new > 0, rows[:, Column.LENGTH], 0)
    state = PagedRows.of(
        pages.kv,
        rows[:, Column.TABLE :],
        length,
        num_new,
        tokens.shape[1],
        scales=pages.scales,
        workspace=workspace,
    )
    # Rows of one token, [B R, 1]: sequence parallelism would split longer ones by
    # tokens.
    state = dataclasses.replace(state, positions=state.positions.reshape(-1, 1))
    hidden, state = model.run(tokens.reshape(-1, 1), state)
    logits = _unembed(model, hidden[:, 0])
    return pages._replace(kv=state.pages), logits, state.workspace


def _ends(x: PrefillBatch) -> Int[Array, "N"]:
    """Where the last token of each chunk is."""
    return jnp.maximum(x.cu_q[1:] - 1, 0)


def _begin(
    slots: Int[Array, "S C"], x: PrefillBatch, logits: Float[Array, "N V"]
) -> tuple[Int[Array, "S C"], Int[Array, "1 N 1 3"]]:
    """The rows with the token sampled after each complete prompt, and the results."""
    rows = slots.at[x.slots].get(mode="fill", fill_value=0)
    length = rows[:, Column.LENGTH]
    rows = rows.at[:, Column.FLAGS].set(int(RowFlag.LIVE))
    tokens = sampling.draw(logits, rows, length)
    rows, out = _settle(rows, logits, tokens[:, None], length)
    return slots.at[x.slots].set(rows, mode="drop"), out[None]


def _unembed(model: Decoder, hidden: Float[Array, "B D"]) -> Float[Array, "B V"]:
    """Logits, unsharded on each device."""
    logits = model.unembed(hidden[:, None])[:, 0]
    return constrain(logits, (None, None), model.rules)


def _settle(
    rows: Int[Array, "B C"],
    logits: Float[Array, "B_times_R V"],
    tokens: Int[Array, "B R"],
    start: Int[Array, "B"],
    *,
    stuck: Array | bool = False,
    hits: Bool[Array, "B D"] | None = None,
) -> tuple[Int[Array, "B C"], Int[Array, "B R 3"]]:
    """The rows after sampling `tokens`, and the results for the host.

    Args:
        rows: The state.
        logits: Unmodified logits of the model.
        tokens: The sampled tokens.
        start: Position of the first of them.
        stuck: Rows without any allowed token.
        hits: Accepted drafts; a token counts if all drafts before it are accepted.
    """
    live = rows[:, Column.FLAGS] & int(RowFlag.LIVE) > 0
    found = sampling.logprobs(logits, tokens.reshape(-1))
    logprob, finite = (x.reshape(tokens.shape) for x in found)
    at = start[:, None] + jnp.arange(tokens.shape[1])
    stops = rows[:, None, Column.STOPS : Column.STOPS + NUM_STOPS]
    stopped = jnp.any(tokens[..., None] == stops, axis=-1)
    stopped &= at >= rows[:, Column.MIN_LENGTH, None]
    failed = ~finite | jnp.asarray(stuck)[..., None]
    ended = stopped | failed | (at + 1 >= rows[:, Column.LIMIT, None])
    real = live[:, None]
    if hits is not None:
        goes_on = (hits & ~ended[:, :-1]).astype(jnp.int32)
        goes_on = jnp.cumprod(goes_on, axis=1) > 0
        real = jnp.concatenate([real, real & goes_on], axis=1)
    said = (
        (OutFlag.ENDED, ended),
        (OutFlag.STOPPED, stopped),
        (OutFlag.NOT_FINITE, failed),
    )
    flags = sum(int(flag) * where.astype(jnp.int32) for flag, where in said)
    bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
    out = jnp.where(
        real[..., None],
        jnp.stack([tokens, flags, bits], axis=-1),
        jnp.array([-1, 0, 0]),
    )
    last = jnp.sum(real, axis=1, keepdims=True) - 1
    newest = jnp.take_along_axis(tokens, jnp.maximum(last, 0), axis=1)
    ends = jnp.any(real & ended, axis=1)
    changed = {
        Column.TOKEN: newest[:, 0],
        Column.LENGTH: start + last[:, 0],
        Column.FLAGS: jnp.where(ends, 0, int(RowFlag.LIVE)),
    }
    # By number of the column: an index would be checked by a launch of its own.
    column, after = jnp.arange(rows.shape[1]), rows
    for number, value in changed.items():
        after = jnp.where(column == int(number), value[:, None], after)
    return jnp.where(live[:, None], after, rows), out.astype(jnp.int32)


def _top(logits: Float[Array, "B V"]) -> Int[Array, "B 40"]:
    """The most likely tokens, then the bits of their log-probabilities."""
    tokens, values = sampling.top_logprobs(logits)
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.concatenate([tokens, bits], axis=-1)


def _scores(
    model: Decoder, hidden: Float[Array, "T D"], targets: Int[Array, "T"]
) -> Int[Array, "T 41"]:
    """Log-probabilities of the tokens that follow, in chunks."""

    def part(x: tuple[Array, Array]) -> Array:
        logits = _unembed(model, x[0])
        logprob, _ = sampling.logprobs(logits, jnp.maximum(x[1], 0))
        bits = jax.lax.bitcast_convert_type(logprob, jnp.int32)
        return jnp.concatenate([bits[:, None], _top(logits)], axis=-1)

    size = min(SCORED, len(targets))
    parts = hidden.reshape(-1, size, hidden.shape[-1]), targets.reshape(-1, size)
    return jax.lax.map(part, parts).reshape(len(targets), -1)
