"""Pooling after an encoder, and heads for the usual tasks.

Legend: B packed rows, T tokens per row, S sequences per row, D model, E embedding, V
vocabulary, C labels.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jaxscale.checks import check_choice
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.vocabulary import real_logits, rows_in_context
from jaxscale.nn.embeddings import NORMAL_INIT, zero_behind
from jaxscale.nn.linear import Linear
from jaxscale.nn.norms import LayerNorm
from jaxscale.nn.packing import cu_seqlens_of_rows
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.shards import per_shard
from pallas_kernels.segment_mean import segment_mean
from pallas_kernels.varlen_attention import segment_ids_from_cu_seqlens


type HeadKind = Literal["masked_lm", "sequence", "token", "span", "pooler"]
type Problem = Literal["single_label", "multi_label", "regression"]
type Pooling = Literal["first", "mean", "max"]
type HeadActivation = Literal["gelu", "gelu_tanh", "relu", "tanh"]

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """A head: its task, and the layers between encoder and logits.

    Example:
        >>> HeadConfig(kind="sequence", num_labels=3, transform="tanh").pools
        True
    """

    kind: HeadKind
    """``masked_lm``: logits of the vocabulary for each token. ``token``: logits of the
    labels for each token. ``span``: start and end logits of extractive question
    answering, for each token. ``sequence``: logits of the labels for each sequence.
    ``pooler``: the transformed vector of each sequence, without labels."""
    num_labels: int = 0
    """Labels, C; 2 for ``span``, 0 for ``masked_lm`` and ``pooler``."""
    labels: tuple[str, ...] = ()
    """Names of the labels; empty where they have none."""
    problem: Problem = "single_label"
    """Problem type of a ``sequence`` head: one label of several (softmax), any number
    of labels (sigmoids), or regression."""
    pooling: Pooling = "first"
    """Pooling of a sequence: its first token, or the mean or maximum of all."""
    transform: HeadActivation | None = None
    """Activation of a projection before the last one; None is no such projection."""
    transform_bias: bool = True
    """Bias of that projection."""
    transform_norm: bool = False
    """A layer norm follows it."""
    bias: bool = True
    """Bias of the last projection."""

    def __post_init__(self) -> None:
        for name, kind in (
            ("kind", HeadKind),
            ("problem", Problem),
            ("pooling", Pooling),
            ("transform", HeadActivation),
        ):
            if name != "transform" or self.transform is not None:
                check_choice(name, getattr(self, name), kind)
        unlabeled = self.kind in ("masked_lm", "pooler")
        fits = self.num_labels == 0 if unlabeled else self.num_labels > 0
        if not fits or (self.kind == "span" and self.num_labels != 2):
            expected = {"span": "2"}.get(self.kind, "0" if unlabeled else "1 or more")
            raise ValueError(
                f"num_labels {self.num_labels}, expected {expected} for kind "
                f"{self.kind!r}"
            )
        if self.problem != "single_label" and self.kind != "sequence":
            raise ValueError(
                f"problem {self.problem!r} is for kind 'sequence', not {self.kind!r}; "
                "leave it out"
            )
        if self.labels and len(self.labels) != self.num_labels:
            raise ValueError(
                f"labels {self.labels} must name each of num_labels {self.num_labels}"
            )
        if self.kind == "pooler" and self.transform is None:
            raise ValueError("transform None leaves nothing of a pooler; give 'tanh'")

    @property
    def pools(self) -> bool:
        """True if there is one output per sequence, not per token."""
        return self.kind in ("sequence", "pooler")


def pool(
    hidden: Float[Array, "B T D"],
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None,
    pooling: Pooling = "mean",
    rules: AxisRules = REPLICATED,
    *,
    dtype: DTypeLike | None = None,
) -> Float[Array, "B S D"]:
    """One vector for each packed sequence.

    Args:
        hidden: Activations of packed rows.
        cu_seqlens: Boundaries of the sequences; None: each row is one.
        pooling: The first token, or the mean or maximum over the tokens, in fp32.
        rules: Mesh axes of each logical axis.
        dtype: Type of the vectors; None is that of `hidden`.

    Returns:
        Vectors in `dtype`; zeros for empty sequences.

    Example:
        >>> hidden = jnp.array([[[1.0], [3.0], [5.0], [9.0]]])
        >>> pool(hidden, jnp.array([[0, 2, 3, 3]]))[0, :, 0]
        Array([2., 5., 0.], dtype=float32)
    """
    check_choice("pooling", pooling, Pooling)
    batch, num_tokens, _ = hidden.shape
    if cu_seqlens is None:
        cu_seqlens = cu_seqlens_of_rows(batch, num_tokens)

    def one_row(hidden: Array, cu: Array) -> Array:
        empty = (cu[1:] == cu[:-1])[:, None]  # [S, 1]
        if pooling == "first":
            first = hidden[jnp.minimum(cu[:-1], num_tokens - 1)]  # [S, D]
            return jnp.where(empty, jnp.zeros((), hidden.dtype), first)
        ids = segment_ids_from_cu_seqlens(cu, num_tokens)
        values = hidden.astype(jnp.float32)
        ids = jnp.where(ids < 0, cu.shape[0] - 1, ids)
        out = jax.ops.segment_max(values, ids, cu.shape[0])[:-1]  # [S, D]
        return jnp.where(empty, 0, out)

    def rows(hidden: Array, cu: Array) -> tuple[Array]:
        if pooling == "mean":
            out = segment_mean(hidden, cu)
        else:
            out = jax.vmap(one_row)(hidden, cu)
        return (out.astype(dtype or hidden.dtype),)

    tokens, out = ("batch", None, "act_embed"), ("batch", None, "act_embed")
    hidden = constrain(hidden, tokens, rules)
    return per_shard(rows, [tokens, ("batch", None)], [out], rules)(hidden, cu_seqlens)[
        0
    ]


class Head(nnx.Module):
    """The layers of a `HeadConfig`.

    Example:
        >>> config = HeadConfig(kind="sequence", num_labels=3, transform="tanh")
        >>> head = Head(config, 8, rngs=nnx.Rngs(0))
        >>> head(jnp.ones((1, 5, 8)), jnp.array([[0, 2, 5]])).shape
        (1, 2, 3)
    """

    def __init__(
        self,
        config: HeadConfig,
        d_model: int,
        *,
        vocab_size: int | None = None,
        table_dim: int | None = None,
        tied: bool = True,
        norm_eps: float = 1e-12,
        norm_bias: bool = True,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the layers.

        Args:
            config: The head.
            d_model: Features of the encoder.
            vocab_size: Tokens that ``masked_lm`` chooses from.
            table_dim: Features of the table of tokens, if not `d_model`.
            tied: ``masked_lm`` multiplies by that table instead of a kernel of its own.
            norm_eps: Epsilon of the layer norm.
            norm_bias: True if the layer norm has a bias.
            dtype: Type of the computation; logits are in fp32.
            param_dtype: Type of the parameters.
            rules: Mesh axes of each logical axis.
            rngs: Source of the keys.
        """
        self.config = config
        self.dtype = dtype
        self.rules = rules
        types: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
        masked_lm = config.kind == "masked_lm"
        if masked_lm and vocab_size is None:
            raise ValueError("vocab_size None: a masked_lm head needs the vocabulary")
        width = (table_dim or d_model) if masked_lm else d_model
        answers = columns = (vocab_size or 0) if masked_lm else config.num_labels
        if masked_lm:
            columns = rows_in_context(answers, rules)
        self.answers = answers
        column_axis = "vocab" if masked_lm else None
        tied = tied and masked_lm

        def transform() -> Linear:
            return Linear(
                d_model,
                width,
                kernel_axes=("embed", None),
                out_axes=("batch", None if config.pools else "tokens", "act_embed"),
                use_bias=config.transform_bias,
                rules=rules,
                rngs=rngs,
                **types,
            )

        def output() -> Linear:
            return Linear(
                width,
                columns,
                kernel_axes=("embed", column_axis),
                out_axes=("batch", None, "act_vocab" if masked_lm else None),
                use_bias=config.bias,
                kernel_init=zero_behind(NORMAL_INIT, 1, answers),
                rules=rules,
                rngs=rngs,
                **types,
            )

        def norm() -> LayerNorm:
            return LayerNorm(
                width,
                eps=norm_eps,
                use_bias=norm_bias,
                rules=rules,
                rngs=rngs,
                **types,
            )

        self.transform = None if config.transform is None else transform()
        self.norm = norm() if config.transform_norm else None
        self.output = None if tied or config.kind == "pooler" else output()
        zeros = partitioned(jax.nn.initializers.zeros, column_axis)
        bias = zeros(rngs.params(), (columns,), param_dtype) if tied else None
        self.bias = None if bias is None or not config.bias else nnx.Param(bias)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
        table: Float[Array, "V E"] | None = None,
    ) -> Float[Array, "B _ _"]:
        """Logits in fp32 for each token or each sequence; a pooler's vectors.

        Args:
            hidden: Activations of the encoder.
            cu_seqlens: Boundaries of packed sequences; None: each row is one.
            table: The table of tokens, for a tied ``masked_lm`` head.
        """
        x = self.features(hidden, cu_seqlens)
        if self.config.kind == "pooler":
            return x
        kernel, bias = self.output_embedding(table)
        masked_lm = self.config.kind == "masked_lm"
        axes = ("batch", None, "act_vocab" if masked_lm else None)
        logits = contract(
            "btd,dv->btv",
            constrain(x, ("batch", None, "act_embed"), self.rules),
            kernel.astype(self.dtype),
            ("embed", "vocab" if masked_lm else None),
            axes,
            self.rules,
            preferred_element_type=jnp.float32,
        )
        if bias is not None:
            logits += constrain(bias.astype(jnp.float32), axes[-1:], self.rules)
        return real_logits(logits, self.answers, self.rules)

    def features(
        self,
        hidden: Float[Array, "B T D"],
        cu_seqlens: Int[Array, "B seqs_plus_1"] | None = None,
    ) -> Float[Array, "B _ width"]:
        """Return the input of the last projection: pooled and transformed."""
        x = hidden
        if self.config.pools:
            x = pool(x, cu_seqlens, self.config.pooling, self.rules)
        if self.transform is not None and self.config.transform is not None:
            x = constrain(x, ("batch", None, "act_embed"), self.rules)
            x = _ACTIVATIONS[self.config.transform](self.transform(x))
        return x if self.norm is None else self.norm(x)

    def output_embedding(
        self, table: Float[Array, "V E"] | None = None
    ) -> tuple[Float[Array, "width answers"], Float[Array, "answers"] | None]:
        """Kernel and bias of the last projection; `table` if it is tied.

        Raises:
            ValueError: the head has no projection, or it is tied and `table` is
                missing.
        """
        if self.output is not None:
            bias = self.output.bias
            return self.output.kernel[...], None if bias is None else bias[...]
        if self.config.kind == "pooler":
            raise ValueError("kind 'pooler' has no output projection")
        if table is None:
            raise ValueError("table None: a tied masked_lm head needs it")
        return table.T, None if self.bias is None else self.bias[...]  # [E, V], [V]


def make_head(config: EncoderConfig, head: HeadConfig, **options: Any) -> Head:
    """The head for an encoder of `config`; `options` as for `Head`."""
    return Head(
        head,
        config.d_model,
        vocab_size=config.vocab_size,
        table_dim=config.table_dim,
        tied=config.tie_embeddings,
        norm_eps=config.norm_eps,
        norm_bias=config.norm_bias,
        **options,
    )
