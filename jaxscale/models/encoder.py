"""The encoder of BERT, RoBERTa, ALBERT, DistilBERT, ModernBERT and DeBERTa.

Sequences are packed before the embedding and stay packed to the end: no layer computes
on padding. Legend: B packed rows, T tokens per row, S sequences per row, L padded
length, D model, E embedding.
"""

import functools
from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxscale.checks import check_type
from jaxscale.keywords import explain_keywords
from jaxscale.models import encode_layers
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, make_head
from jaxscale.models.pretrained import Pretrained, check_dtype, check_tokens
from jaxscale.models.stack import (
    check_remat,
    look_up,
    lose,
    make_stack,
    run_stack,
    unstacked,
)
from jaxscale.models.vocabulary import rows_in_context
from jaxscale.nn.blocks import Block
from jaxscale.nn.convolution import SequenceConvolution
from jaxscale.nn.disentangled import DisentangledAttention
from jaxscale.nn.embeddings import Embed
from jaxscale.nn.linear import Linear
from jaxscale.nn.norms import LayerNorm
from jaxscale.nn.packing import pack, unpack
from jaxscale.nn.self_attention import Attention, attention_state, token_positions
from jaxscale.sharding.fp8 import Fp8, check_fp8
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules, check_rules
from jaxscale.sharding.shards import per_shard
from pallas_kernels.arrays import concrete


type Partial = tuple[Float[Array, "*B T D"], Sequence[Float[Array, "*B T _"]] | None]
"""What some layers hand to the next ones: the activations behind them, and the next
layer's queries, keys and values where they are computed already."""

_PRESET = "jaxscale.models.encoder_preset('bert_tiny') makes one"


class EncoderModel(Pretrained, nnx.Module):
    """Embedding, a stack of bidirectional blocks, and optionally a head.

    The parameters of the blocks are stacked along a leading ``layers`` axis. The module
    is a pytree: pass it to `jax.jit`, `jax.value_and_grad` and optax as it is.

    Example:
        >>> from jaxscale.models.families.bert import bert_tiny
        >>> head = HeadConfig(kind="sequence", num_labels=3, transform="tanh")
        >>> model = EncoderModel(bert_tiny(), head=head, rngs=nnx.Rngs(0))

        Two sequences, two and three tokens long, packed in one row:

        >>> tokens, bounds = jnp.array([[1, 2, 3, 4, 5]]), jnp.array([[0, 2, 5]])
        >>> model.hidden(tokens, cu_seqlens=bounds).shape
        (1, 5, 32)
        >>> model(tokens, cu_seqlens=bounds).shape
        (1, 2, 3)

        The same two sequences, padded:

        >>> padded = jnp.array([[1, 2, 0], [3, 4, 5]])
        >>> model.padded(padded, lengths=jnp.array([2, 3])).shape
        (2, 3)

    References:
        BERT, arXiv 1810.04805; packing before the embedding: MosaicBERT (arXiv
        2312.17482) and ModernBERT (arXiv 2412.13663). ByteTransformer (arXiv
        2210.03052) packs and unpacks in each layer.
    """

    @explain_keywords
    def __init__(
        self,
        config: EncoderConfig,
        *,
        head: HeadConfig | None = None,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        remat: str = "none",
        scan_layers: bool = True,
        rules: AxisRules = REPLICATED,
        quantization: Fp8 = None,
        attention_implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the parameters; on a mesh, inside `jaxscale.sharding.create`.

        Args:
            config: Shape and variant.
            head: Head on the last layer; None returns its activations.
            dtype: Type of activations and matmuls; norms, rotary angles, softmax and
                logits are always in fp32.
            param_dtype: Type of the parameters.
            remat: Activation checkpointing, a name of `REMAT_POLICIES`.
            scan_layers: Compile one block (or one period of layers that differ) and
                scan over the stack, instead of every block.
            rules: Mesh axes of each logical axis.
            quantization: fp8 matmuls in the linear layers of the blocks, with a scale
                per row (``"fp8"``), per block of 128 numbers (``"fp8_blockwise"``) or
                per tensor (``"fp8_tensorwise"``); the rest, and the parameters, keep
                their types. None computes them in `dtype`.
            attention_implementation: Name of an attention implementation: of
                `pallas_kernels.varlen_attention` with sequence packing, otherwise of
                `pallas_kernels.attention`; None picks one.
            rngs: Source of the keys.

        Raises:
            ValueError: `rules` is no table, `remat` is not the name of a policy, or
                `quantization` is unknown.
        """
        check_type("config", config, EncoderConfig, _PRESET)
        check_type("rngs", rngs, nnx.Rngs, "flax.nnx.Rngs(0) is one")
        check_dtype("dtype", dtype)
        check_dtype("param_dtype", param_dtype)
        check_rules(rules)
        check_remat(remat)
        check_fp8(quantization)
        self.config = config
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.remat = remat
        self.scan_layers = scan_layers
        self.rules = rules
        self.quantization = quantization
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}

        def table(
            count: int,
            row_axis: str | None,
            width: int = config.table_dim,
            rows: int | None = None,
        ) -> Embed:
            return Embed(
                count,
                width,
                rows=rows,
                row_axis=row_axis,
                rules=rules,
                rngs=rngs,
                **types,
            )

        def norm(features: int) -> LayerNorm:
            return LayerNorm(
                features,
                eps=config.norm_eps,
                use_bias=config.norm_bias,
                rules=rules,
                rngs=rngs,
                **types,
            )

        def block(layer: int, rngs: nnx.Rngs) -> Block:
            return Block(
                config.block(layer),
                attention_implementation=attention_implementation,
                attention_type=self.attention_type,
                rules=rules,
                quantization=quantization,
                rngs=rngs,
                **types,
            )

        def projection() -> Linear:
            return Linear(
                config.table_dim,
                config.d_model,
                kernel_axes=(None, "embed"),
                out_axes=("batch", "tokens", "act_embed"),
                use_bias=True,
                rules=rules,
                rngs=rngs,
                **types,
            )

        rows = rows_in_context(config.vocab_size, rules)
        self.embed = table(config.vocab_size, "vocab", rows=rows)
        learned, places = config.position == "learned", config.max_seq_len
        places += config.position_offset
        self.positions = table(places, None) if learned else None
        typed = config.token_types > 0
        self.token_types = table(config.token_types, None) if typed else None
        self.embed_norm = norm(config.table_dim)
        self.embed_out = None if config.embed_dim is None else projection()
        relative = config.relative
        # Never split along its rows: every device reads the whole table.
        self.relative = relative and table(relative.num_entries, None, config.d_model)
        self.relative_norm = norm(config.d_model) if config.relative_norm else None
        self.convolution = (
            SequenceConvolution(
                config.d_model,
                config.convolution,
                activation=config.convolution_activation,
                rules=rules,
                rngs=rngs,
                **types,
            )
            if config.convolution
            else None
        )
        self.convolution_norm = norm(config.d_model) if config.convolution else None
        # The first pre-norm block has one norm less, and the convolution follows the
        # first block, so these cannot be in the stack.
        first = 1 if config.separate_first else 0
        self.first = block(0, rngs) if config.separate_first else None
        count = config.num_blocks - first
        self.blocks = (
            make_stack(functools.partial(block, first), count, rngs) if count else None
        )
        self.norm = norm(config.d_model) if config.pre_norm else None
        self.head = (
            None
            if head is None
            else make_head(config, head, rngs=rngs, rules=rules, **types)
        )

    @property
    def attention_type(self) -> type[Attention]:
        """The class of the attention layers, chosen by the configuration."""
        return Attention if self.config.relative is None else DisentangledAttention

    def relative_table(self) -> Float[Array, "P D"] | None:
        """The table of relative positions, as attention layers read it."""
        if self.relative is None:
            return None
        table = self.relative.table[...].astype(self.dtype)
        table = constrain(table, (None, None), self.rules)
        if self.relative_norm is None:
            return table
        return self.relative_norm(table[None])[0]

    def unstacked(self) -> "EncoderModel":
        """The model for inference, with an unstacked set of parameters per block.

        It runs faster and compiles longer: no parameter is copied out of the stack, and
        there is no loop over it. It cannot be saved.
        """
        return unstacked(self)

    @explain_keywords
    def __call__(
        self,
        tokens: Int[Array, "*B T"],
        *,
        cu_seqlens: Int[Array, "*B seqs_plus_1"] | None = None,
        token_types: Int[Array, "*B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
    ) -> Float[Array, "*B _ _"]:
        """Return the output of the head, or the activations if there is none.

        Token heads return logits per token, [B, T, ...]; sequence heads per sequence,
        [B, S, ...]. Logits are in fp32.

        Args:
            tokens: Token ids of one row or of several.
            cu_seqlens: Boundaries of the sequences, with sequence packing.
            token_types: Segment of each token, 0 or 1 for pairs; 0 if None.
            positions: Position of each token in its sequence; counted if None.

        Raises:
            ValueError: as `hidden`.
        """
        hidden = self.hidden(
            tokens, cu_seqlens=cu_seqlens, token_types=token_types, positions=positions
        )
        return hidden if self.head is None else self.answer(hidden, cu_seqlens)

    def answer(
        self,
        hidden: Float[Array, "*B T D"],
        cu_seqlens: Int[Array, "*B seqs_plus_1"] | None = None,
    ) -> Float[Array, "*B _ _"]:
        """Apply the head to the activations that `hidden` returns.

        Args:
            hidden: The activations.
            cu_seqlens: Boundaries of the sequences, as given to `hidden`.

        Raises:
            ValueError: there is no head.
        """
        if self.head is None:
            raise ValueError("head None: make the model with a head")
        if hidden.ndim == 2:
            bounds = None if cu_seqlens is None else cu_seqlens[None]
            return self.answer(hidden[None], bounds)[0]
        return self.head(hidden, cu_seqlens, self.embed.table[...])

    def output_embedding(
        self,
    ) -> tuple[Float[Array, "width answers"], Float[Array, "answers"] | None]:
        """Kernel and bias of the head's output projection.

        Columns past the vocabulary, which the tables of some meshes have, are padding.

        Raises:
            ValueError: there is no head, or it is a pooler.
        """
        if self.head is None:
            raise ValueError("head None: make the model with a head")
        return self.head.output_embedding(self.embed.table[...])

    @overload
    def hidden(
        self,
        tokens: Int[Array, "*B T"],
        *,
        cu_seqlens: Int[Array, "*B seqs_plus_1"] | None = None,
        token_types: Int[Array, "*B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        checked: bool = False,
        layers: None = None,
        given: None = None,
    ) -> Float[Array, "*B T D"]: ...
    @overload
    def hidden(
        self,
        tokens: Int[Array, "*B T"],
        *,
        cu_seqlens: Int[Array, "*B seqs_plus_1"] | None = None,
        token_types: Int[Array, "*B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        checked: bool = False,
        layers: range | None,
        given: Partial | None = None,
    ) -> Float[Array, "*B T D"] | Partial: ...
    def hidden(
        self,
        tokens: Int[Array, "*B T"],
        *,
        cu_seqlens: Int[Array, "*B seqs_plus_1"] | None = None,
        token_types: Int[Array, "*B T"] | None = None,
        positions: Int[Array, "*B T"] | None = None,
        checked: bool = False,
        layers: range | None = None,
        given: Partial | None = None,
    ) -> Float[Array, "*B T D"] | Partial:
        """The activations of the last layer.

        Args:
            tokens: Token ids: packed rows, or one row without the axis B.
            cu_seqlens: Boundaries: sequence `i` of row `b` is the tokens from
                ``cu_seqlens[b, i]`` to ``cu_seqlens[b, i + 1]``. Tokens past the last
                sequence are padding; their activations are undefined. None: each row is
                one sequence without padding.
            token_types: Segment of each token, 0 or 1 for pairs; None is 0.
            positions: Position of each token in its sequence; counted from its start if
                None.
            checked: All ids, types and positions are known to be in their tables, which
                saves some kernels.
            layers: Which layers to run, of packed rows, so that several programs can
                share a pass; None is all.
            given: What was returned for the layers before, if there are any.

        Returns:
            ``[*B,T,D]``, in `dtype`; a `Partial`, to be the next layers' `given`, if
            the last layer is not among `layers`.

        Raises:
            ValueError: `cu_seqlens` that are not traced do not fit the rows, a row is
                longer than the table of positions, token types are given to a model
                that has none, or `layers` to a row without the axis B.

        Traced token ids and positions outside of their tables cannot be refused: they
        turn the activations of their own sequence to NaN, and no others.
        """
        check_tokens(tokens, (1, 2))
        if tokens.ndim == 1:
            if layers is not None or given is not None:
                raise ValueError("some of the layers are run of rows [B,T], not of [T]")
            rows = [cu_seqlens, token_types, positions]
            bounds, types, places = (None if x is None else x[None] for x in rows)
            hidden = self.hidden(
                tokens[None],
                cu_seqlens=bounds,
                token_types=types,
                positions=places,
                checked=checked,
            )
            # An Explicit axis, of one device too, must not split what is taken away.
            axes = (None, "tokens", "act_embed")
            return constrain(hidden, axes, self.rules)[0]
        if cu_seqlens is None:
            self._check_length("tokens per row", tokens.shape[1])
        config, rules = self.config, self.rules
        state = attention_state(
            tokens.shape,
            cu_seqlens=cu_seqlens,
            positions=positions,
            relative=self.relative_table(),
            rules=rules,
        )
        places = state.positions + config.position_offset
        if config.position_offset and positions is None:
            places = _places(tokens, state.positions, config.position_offset, rules)
        lookups = self._lookups(tokens, places, token_types)
        x, lost = look_up(state, lookups, rules, checked=checked)
        if checked:
            # One kernel sums the rows of all tables. XLA would store those of each.
            x = jax.lax.optimization_barrier(x)
        x = self.embed_norm(x)
        x = embedded = x if self.embed_out is None else self.embed_out(x)
        run = range(config.num_layers) if layers is None else layers
        if self.first is not None:
            x, _ = self.first(x, state.at(0, config.attention(0)))
        if self.convolution is not None and self.convolution_norm is not None:
            # Counted from the start of each sequence, whatever `positions` say.
            places = token_positions(tokens.shape, cu_seqlens, rules)
            x = self.convolution_norm(x + self.convolution(embedded, places))
        projected = None
        if given is not None:
            x, projected = given  # the compiler leaves out what came before
        first = 0 if self.first is None else 1  # of the layers in the stack
        stacked = range(max(run.start, first), run.stop)
        if self.blocks is not None and stacked:
            order = [config.block_of(layer) - first for layer in stacked]
            following = range(run.stop, config.num_layers)[:1]
            variants = [config.attention(layer) for layer in stacked]
            if encode_layers.runs(self.blocks):
                blocks: Any = self.blocks
                order += [config.block_of(layer) - first for layer in following]
                parts = [blocks[i] for i in order]
                x, projected = encode_layers.run(parts, x, projected, state, variants)
            else:
                other = config.layer_groups is not None or layers is not None
                x, _ = run_stack(
                    self.blocks,
                    x,
                    state,
                    variants=variants,
                    remat=self.remat,
                    scan=self.scan_layers,
                    order=order if other else None,
                )
        if run.stop < config.num_layers:
            return x, projected
        x = x if self.norm is None else self.norm(x)
        return lose(x, lost, rules)

    def padded(
        self,
        tokens: Int[Array, "B L"],
        *,
        lengths: Int[Array | np.ndarray, "B"] | None = None,
        mask: Bool[Array | np.ndarray, "B L"]
        | Int[Array | np.ndarray, "B L"]
        | None = None,
        token_types: Int[Array, "B L"] | None = None,
        token_budget: int | None = None,
    ) -> Float[Array, "B *_"]:
        """Pack padded sequences, run the model on them, and unpack.

        Args:
            tokens: Token ids, padded on the right.
            lengths: Length of each sequence; this or `mask`.
            mask: Attention mask: 1 for tokens and 0 for padding.
            token_types: As for `hidden`.
            token_budget: Size of the packed buffer, static; None takes ``B * L``, which
                always suffices but saves only attention.

        Returns:
            [B, L, ...], zero in the padding, or [B, ...] from a sequence head.

        Raises:
            ValueError: not exactly one of `lengths` and `mask` is given, a row of
                `mask` is not ones and then zeros, or the budget is too small; the last
                two only if the values are not traced by `jax.jit`.
        """
        if (lengths is None) == (mask is None):
            raise ValueError("give exactly one of lengths and mask")
        if lengths is None:
            lengths = _lengths(jnp.asarray(mask))
        batch, length = tokens.shape
        self._check_length("padded length", length)
        budget = batch * length if token_budget is None else token_budget
        packed, cu_seqlens = pack(tokens, lengths, budget)
        if token_types is not None:
            token_types, _ = pack(token_types, lengths, budget)
        out = self(packed, cu_seqlens=cu_seqlens, token_types=token_types)
        if self.head is not None and self.head.config.pools:
            return out
        return unpack(out, cu_seqlens, length)

    def _lookups(
        self, tokens: Array, places: Array, token_types: Array | None
    ) -> list[tuple[Array, Embed]]:
        """The indices of tokens in each table that is added to their activations."""
        lookups = [(tokens, self.embed)]
        if self.token_types is not None:
            if token_types is None:
                token_types = jnp.zeros_like(tokens)
            lookups.append((token_types, self.token_types))
        elif token_types is not None:
            raise ValueError(
                "token_types given, but the model has no table of token types; leave "
                "them out"
            )
        if self.positions is not None:
            lookups.append((places, self.positions))
        return lookups


def _places(tokens: Array, positions: Array, offset: int, rules: AxisRules) -> Array:
    """Rows of the table of positions, counted without padding tokens, [B, T]."""

    def local(tokens: Array, positions: Array) -> tuple[Array]:
        counted = (tokens != offset - 1).astype(jnp.int32)
        count = jnp.cumsum(counted, axis=1)
        # Of the tokens before each sequence; it never decreases along a row.
        before = jnp.where(positions == 0, count - counted, 0)
        before = jax.lax.cummax(before, axis=1)
        return ((count - before) * counted + offset - 1,)

    axes = [("batch", None)]
    return per_shard(local, 2 * axes, axes, rules)(tokens, positions)[0]


def _lengths(mask: Array) -> Array:
    """Number of ones that each row of a mask begins with."""
    lengths = mask.astype(jnp.int32).sum(axis=1)
    values = concrete(mask)
    if values is not None:
        falls = np.diff(values.astype(np.int8), axis=1) > 0
        if (rows := np.flatnonzero(falls.any(axis=1))).size:
            raise ValueError(
                f"mask must hold ones and then zeros in each row, but row {rows[0]} "
                "goes on after a zero; move the padding to the right"
            )
    return lengths
