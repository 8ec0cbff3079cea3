"""The hyperparameters of an encoder.

Legend: L layers, N heads, H head dim, D model, E embedding, F hidden, V vocabulary.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.checks import check_choice, check_integers, check_positive
from jaxscale.keywords import explained
from jaxscale.models.config import Divided, check_division
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import GATED, Activation, BlockConfig
from jaxscale.nn.convolution import ConvolutionActivation
from jaxscale.nn.disentangled import DisentangledConfig, RelativePositions
from jaxscale.nn.embeddings import RopeConfig
from jaxscale.sharding.rules import AxisRules


type EncoderPosition = Literal["learned", "rope", "none"]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """Shape and variant of an encoder; the defaults are those of BERT.

    Example:
        >>> config = EncoderConfig(
        ...     vocab_size=256, d_model=64, num_layers=2, num_heads=4, d_ff=128,
        ...     max_seq_len=128,
        ... )
        >>> config.head_dim, config.num_parameters()
        (16, 91776)
        >>> dataclasses.replace(config, num_heads=3)
        Traceback (most recent call last):
        ...
        ValueError: d_model 64 must be a multiple of num_heads 3
    """

    family: str = "bert"
    """The ``model_type`` of transformers, which decides heads, tensor names and
    configuration keys of files."""
    vocab_size: int
    """Rows of the table of tokens, V."""
    d_model: int
    """Width of the residual stream, D."""
    num_layers: int
    """Number of layers, L."""
    num_heads: int
    """Attention heads, N."""
    d_ff: int
    """Hidden features of the feed-forward network, F."""
    max_seq_len: int
    """Longest sequence, in tokens; a hard limit with learned positions."""
    embed_dim: int | None = None
    """Width of the tables, E; None is D. A narrower one is projected up (ALBERT)."""
    token_types: int = 2
    """Rows of the table of token types (segments); 0 is no table."""
    position: EncoderPosition = "learned"
    """A learned table added to the tokens, rotary embeddings, or neither."""
    position_offset: int = 0
    """Row of the position table for the first token (RoBERTa: 2). The token with the id
    one less is padding: within a sequence it takes the row before and is not counted,
    as in transformers."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_theta_local: float | None = None
    """The base for layers with a window; None is `rope_theta`."""
    relative: RelativePositions | None = None
    """A table of relative positions that attention reads (DeBERTa)."""
    relative_norm: bool = False
    """A layer norm on that table."""
    convolution: int = 0
    """Kernel size of a convolution parallel to the first layer, odd; 0 is none
    (DeBERTa-v2)."""
    convolution_activation: ConvolutionActivation = "gelu"
    """Activation of that convolution."""
    window: int | None = None
    """Sliding window on each side in local layers; None makes all layers global."""
    global_every: int = 1
    """Period of global layers if there is a window: layers 0, n, 2n, ... have none."""
    norm_eps: float = 1e-12
    """Added to the variance."""
    norm_bias: bool = True
    """Layer norms have a bias."""
    pre_norm: bool = False
    """``x + f(norm(x))`` and a last norm (ModernBERT) instead of ``norm(x + f(x))``.
    The first attention layer then reads the normalized embedding directly."""
    activation: Activation = "gelu"
    """Activation of the feed-forward network."""
    attention_bias: bool = True
    """Bias in the four projections of attention."""
    key_bias: bool = True
    """With `attention_bias`: bias in the key projections, of content and relative
    positions (not in DeBERTa v1)."""
    mlp_bias: bool = True
    """Bias in the feed-forward network."""
    layer_groups: int | None = None
    """Groups of consecutive layers that share parameters (ALBERT; usually 1); None:
    each layer has its own."""
    group_blocks: int = 1
    """Blocks per group, which the layers of the group repeat in turn."""
    tie_embeddings: bool = True
    """The output projection of the masked-language-model head is the transposed token
    table."""

    def __post_init__(self) -> None:
        sizes = "vocab_size", "d_model", "num_layers", "num_heads", "d_ff"
        check_integers(self, 1, *sizes, "max_seq_len", "global_every")
        check_integers(self, 0, "token_types", "position_offset")
        check_integers(self, 1, "group_blocks")
        for name in ("embed_dim", "window", "layer_groups"):
            if getattr(self, name) is not None:
                check_integers(self, 1, name)
        if self.d_model % self.num_heads:
            raise ValueError(
                f"d_model {self.d_model} must be a multiple of num_heads "
                f"{self.num_heads}"
            )
        check_positive(self, "norm_eps", "rope_theta")
        if self.rope_theta_local is not None:
            check_positive(self, "rope_theta_local")
        check_choice("position", self.position, EncoderPosition)
        check_choice("activation", self.activation, Activation)
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even to be rotated")
        if self.position != "learned" and self.position_offset:
            raise ValueError(
                f"position_offset {self.position_offset} has no effect with position "
                f"{self.position!r}; set it to 0"
            )
        self._check_groups()
        self._check_relative()

    def _check_groups(self) -> None:
        if self.layer_groups is None:
            if self.group_blocks > 1:
                raise ValueError(
                    f"group_blocks {self.group_blocks} has no effect without "
                    "layer_groups; set layer_groups, or leave group_blocks 1"
                )
            return
        if self.pre_norm:
            raise ValueError(
                f"layer_groups {self.layer_groups} needs layers that are alike, and "
                "with pre_norm=True the first one has a norm less; set pre_norm=False "
                "or layer_groups=None"
            )
        if self.num_layers % self.group_blocks or self.num_layers < self.num_blocks:
            raise ValueError(
                f"num_layers {self.num_layers} must be a multiple of group_blocks "
                f"{self.group_blocks} and at least {self.num_blocks}, so many blocks "
                f"as layer_groups {self.layer_groups} have together"
            )

    def _check_relative(self) -> None:
        check_integers(self, 0, "convolution")
        if self.convolution and self.convolution % 2 == 0:
            raise ValueError(
                f"convolution {self.convolution} must be odd, so that as many tokens "
                "come out as go in"
            )
        self.attention(0)  # checks what relative positions allow
        if self.relative_norm and self.relative is None:
            raise ValueError(
                "relative_norm True needs relative, the table that it normalizes"
            )
        if self.convolution and (self.pre_norm or self.layer_groups is not None):
            raise ValueError(
                f"convolution {self.convolution} needs a first layer of its own and a "
                f"norm after it; set pre_norm {self.pre_norm} to False and "
                f"layer_groups {self.layer_groups} to None"
            )
        check_choice(
            "convolution_activation", self.convolution_activation, ConvolutionActivation
        )

    @property
    def head_dim(self) -> int:
        """Features of a head, H."""
        return self.d_model // self.num_heads

    @property
    def table_dim(self) -> int:
        """Width of the tables of tokens, positions and types, E."""
        return self.embed_dim or self.d_model

    @property
    def separate_first(self) -> bool:
        """True if the first layer is not part of the stack."""
        return self.pre_norm or self.convolution > 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks that have parameters of their own."""
        if self.layer_groups is None:
            return self.num_layers
        return self.layer_groups * self.group_blocks

    def block_of(self, layer: int) -> int:
        """The block number of each layer.

        Example:
            >>> from jaxscale.models.families.albert import albert_tiny
            >>> config = dataclasses.replace(
            ...     albert_tiny(), num_layers=8, layer_groups=2, group_blocks=2
            ... )
            >>> [config.block_of(layer) for layer in range(8)]
            [0, 1, 0, 1, 2, 3, 2, 3]
        """
        if self.layer_groups is None:
            return layer
        turn, place = divmod(layer, self.group_blocks)
        # Groups that cannot have the same size are divided as transformers does.
        turns = self.num_layers // self.group_blocks
        return int(turn / (turns / self.layer_groups)) * self.group_blocks + place

    def attention(self, layer: int) -> AttentionConfig:
        """The attention of one layer."""
        local = self.window is not None and layer % self.global_every != 0
        theta = self.rope_theta
        if local and self.rope_theta_local is not None:
            theta = self.rope_theta_local
        options: dict[str, Any] = {
            "num_heads": self.num_heads,
            "num_kv_heads": self.num_heads,
            "head_dim": self.head_dim,
            "use_bias": self.attention_bias,
            "use_out_bias": self.attention_bias,
            "use_key_bias": self.key_bias,
            "rope": RopeConfig(theta=theta) if self.position == "rope" else None,
            "window": self.window if local else None,
            "causal": False,
        }
        if self.relative is None:
            return AttentionConfig(**options)
        return DisentangledConfig(**options, relative=self.relative)

    def block(self, layer: int = 0) -> BlockConfig:
        """The configuration of one layer."""
        return BlockConfig(
            d_model=self.d_model,
            d_ff=self.d_ff,
            attention=self.attention(layer),
            norm="layernorm",
            norm_eps=self.norm_eps,
            norm_bias=self.norm_bias,
            post_norm=not self.pre_norm,
            attention_norm=not (self.pre_norm and layer == 0),
            activation=self.activation,
            mlp_bias=self.mlp_bias,
            num_layers=self.num_layers,
        )

    def num_parameters(self) -> int:
        """Parameters of the encoder without a head."""
        d, e = self.d_model, self.table_dim
        norm = 1 + self.norm_bias
        block = self._block_matmul_parameters() + 2 * d * norm
        key_bias = self.attention_bias and self.key_bias
        block += d * (3 * self.attention_bias + key_bias)
        block += (d + (self._num_mlp_kernels - 1) * self.d_ff) * self.mlp_bias
        layers = self.num_blocks
        # With pre_norm the last norm makes up for the one that the first layer lacks.
        total = layers * block + e * norm
        rows = self.vocab_size + self.token_types
        if self.position == "learned":
            rows += self.max_seq_len + self.position_offset
        total += rows * e + (0 if self.embed_dim is None else (e + 1) * d)
        if self.relative is not None:
            total += self.relative.num_entries * d + self.relative_norm * d * norm
            if not self.relative.share_projections:
                keys = self.relative.content_to_position * (d + key_bias)
                queries = self.relative.position_to_content * (d + self.attention_bias)
                total += layers * d * (keys + queries)
        if self.convolution:
            total += self.convolution * d * d + d + d * norm
        return total

    def flops_per_token(self, seq_len: int, causal: bool = False) -> float:
        """Floating-point operations of forward and backward pass for one token.

        ``6 M + 12 N H keys``, summed over the layers: M counts the parameters in
        matmuls, including the output projection over the vocabulary and the rows of
        relative positions, and `keys` is ``seq_len`` or, in a layer with a window, its
        width.

        Args:
            seq_len: Tokens of a sequence.
            causal: As for decoders. An encoder has no causal mask, so it makes no
                difference.
        """
        del causal
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} must be positive")
        keys = 0
        for layer in range(self.num_layers):
            window = self.attention(layer).window
            keys += seq_len if window is None else min(seq_len, 2 * window + 1)
        matmul = self.num_layers * self._block_matmul_parameters()
        matmul += self.table_dim * self.vocab_size
        if self.embed_dim is not None:
            matmul += self.embed_dim * self.d_model
        matmul += self.convolution * self.d_model**2
        if self.relative is not None:
            # Queries, or keys, times every row of the table.
            terms = self.relative.num_terms * self.relative.num_entries
            matmul += self.num_layers * terms * self.d_model
        return 6.0 * matmul + 12.0 * self.d_model * keys

    @property
    def _num_mlp_kernels(self) -> int:
        return 3 if self.activation in GATED else 2

    def _block_matmul_parameters(self) -> int:
        return self.d_model * (4 * self.d_model + self._num_mlp_kernels * self.d_ff)

    def check_mesh(
        self,
        mesh_sizes: Mapping[str, int],
        rules: AxisRules,
        *,
        batch_size: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """As `DecoderConfig.check_mesh`; `num_tokens` are those of a row."""
        heads = ("heads", "act_heads", "kv_heads", "act_kv_heads")
        layers = self.num_blocks - self.separate_first
        divided: list[Divided] = [
            ("num_heads", self.num_heads, heads),
            ("d_ff", self.d_ff, ("mlp", "act_mlp")),
            ("d_model", self.d_model, ("embed", "act_embed", "norm")),
            ("embed_dim", self.embed_dim, ("embed", "act_embed", "norm")),
            ("num_layers", layers, ("layers",)),
            ("batch_size", batch_size, ("batch",)),
            ("num_tokens", num_tokens, ("tokens",)),
        ]
        check_division(divided, mesh_sizes, rules)
