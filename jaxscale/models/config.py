"""The hyperparameters of a decoder-only Transformer.

Legend: L layers, N query heads, K key/value heads, H head dim, D model, F hidden,
V vocabulary.
"""

import dataclasses
import math
import numbers
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from jaxscale.checks import check_choice, check_positive
from jaxscale.keywords import explained
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import GATED, Activation, BlockConfig, Norm
from jaxscale.nn.embeddings import RopeConfig, RopeScaling
from jaxscale.sharding.rules import AxisRules


type Position = Literal["rope", "learned"]


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Shape and variant of a decoder; the defaults are those of LLaMA.

    Example:
        >>> config = DecoderConfig(
        ...     vocab_size=256, d_model=64, num_layers=2, num_heads=4,
        ...     num_kv_heads=2, head_dim=16, d_ff=128, max_seq_len=128,
        ... )
        >>> config.num_parameters()
        106816
        >>> dataclasses.replace(config, num_kv_heads=3)
        Traceback (most recent call last):
        ...
        ValueError: num_heads 4 must be a multiple of num_kv_heads 3
    """

    vocab_size: int
    """Rows of the embedding table, V."""
    d_model: int
    """Width of the residual stream, D."""
    num_layers: int
    """Number of blocks, L."""
    num_heads: int
    """Query heads, N."""
    num_kv_heads: int
    """Key and value heads, K; each serves N / K query heads."""
    head_dim: int
    """Features of a head, H."""
    d_ff: int
    """Hidden features of the feed-forward network, F."""
    max_seq_len: int
    """Context length of training, in tokens; a hard limit with learned positions."""
    norm: Norm = "rmsnorm"
    """Normalization before attention, feed-forward network and output; the scale of
    `rmsnorm_1p` is one plus its parameter (Gemma)."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    activation: Activation = "swiglu"
    """`swiglu` and `geglu` have a gate projection; `gelu` and `geglu` are exact,
    `gelu_tanh` (GPT-2) and `geglu_tanh` approximate."""
    position: Position = "rope"
    """Rotary embeddings in every attention, or a learned table added once."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    rope_theta_local: float | None = None
    """The base in layers with a `window`, which then have no `rope_scaling` (Gemma 3);
    None: all layers have `rope_theta`."""
    rope_scaling: RopeScaling | None = None
    """Context extension of the rotary frequencies."""
    rotary_dim: int | None = None
    """Rotated features of a head; None rotates all."""
    rope_interleaved: bool = False
    """Rotate features (2i, 2i+1) as GPT-J does instead of (i, i + rotary_dim/2)."""
    parallel_block: bool = False
    """Parallel block: attention and feed-forward network share one norm and are summed
    (GPT-J)."""
    parallel_mlp_norm: bool = False
    """The feed-forward network of a `parallel_block` has a norm of its own (NeoX)."""
    output_norms: bool = False
    """Also normalize the outputs of attention and feed-forward network (Gemma 2)."""
    scale_embeddings: bool = False
    """Embeddings are multiplied by the root of `d_model` (Gemma)."""
    attention_bias: bool = False
    """Bias in the query, key and value projections."""
    attention_out_bias: bool = False
    """Bias in the projection after attention."""
    mlp_bias: bool = False
    """Bias in the feed-forward network."""
    lm_head_bias: bool = False
    """Bias in the output projection, which must not be tied."""
    tie_embeddings: bool = False
    """The output projection is the transposed embedding table."""
    window: int | None = None
    """Sliding window: a token attends to this many tokens, itself included."""
    global_layers: tuple[int, ...] = ()
    """Numbers of the layers with global attention in spite of `window`, ascending."""
    window_pattern: tuple[int | None, ...] = ()
    """Repeating pattern of windows over the layers, instead of `window`: with (512,
    None) every second layer has global attention. Its length divides `num_layers`."""
    qk_norm: bool = False
    """RMS norm of each head's queries and keys before the rotary embedding (Qwen3)."""
    attention_softcap: float | None = None
    """Attention logits become ``softcap * tanh(logits / softcap)``."""
    query_pre_attn_scalar: int | None = None
    """Attention logits are divided by the root of this; None takes `head_dim`."""
    logit_softcap: float | None = None
    """The same softcap for the logits of the vocabulary (Gemma 2)."""

    def __post_init__(self) -> None:
        self._check_sizes()
        self._check_choices()
        self._check_positions()

    def _check_sizes(self) -> None:
        for name in (
            "vocab_size",
            "d_model",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "d_ff",
            "max_seq_len",
        ):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral):
                raise ValueError(f"{name} {value!r} must be an integer")
            if value < 1:
                raise ValueError(f"{name} {value} must be positive")
        for name in (
            "window",
            "attention_softcap",
            "logit_softcap",
            "query_pre_attn_scalar",
            "rope_theta_local",
        ):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(
                    f"{name} {value} must be positive and finite, or None for none"
                )
        self._check_windows()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} must be a multiple of "
                f"num_kv_heads {self.num_kv_heads}"
            )
        check_positive(self, "norm_eps")

    def _check_windows(self) -> None:
        if self.rope_theta_local is not None and not (
            self.window or any(self.window_pattern)
        ):
            raise ValueError(
                f"rope_theta_local {self.rope_theta_local} has no effect without "
                "window; set window, or leave rope_theta_local None"
            )
        layers = range(self.num_layers)
        known = {i for i in self.global_layers if isinstance(i, int) and i in layers}
        if self.global_layers and self.window is None:
            raise ValueError(
                f"global_layers {self.global_layers} has no effect without window; "
                "set window, or leave global_layers empty"
            )
        if self.global_layers != tuple(sorted(known)):
            raise ValueError(
                f"global_layers {self.global_layers} must be ascending numbers of "
                f"layers, from 0 to {self.num_layers - 1}"
            )
        pattern = self.window_pattern
        if not isinstance(pattern, tuple) or not all(map(_is_window, pattern)):
            raise ValueError(
                f"window_pattern {pattern!r} must be a tuple with a positive number of "
                "tokens, or None for the whole sequence, for each layer of a period"
            )
        if pattern and self.window is not None:
            raise ValueError(
                f"window_pattern {pattern} takes the place of window {self.window}; "
                "set one of them"
            )
        if pattern and self.num_layers % len(pattern):
            fitting = [n for n in layers if n and self.num_layers % n == 0]
            raise ValueError(
                f"window_pattern {pattern} of {len(pattern)} layers does not repeat "
                f"through num_layers {self.num_layers}; give a window for each of "
                f"{' or '.join(map(str, [*fitting, self.num_layers]))} layers"
            )

    def _check_choices(self) -> None:
        for name, kind in (
            ("norm", Norm),
            ("activation", Activation),
            ("position", Position),
        ):
            check_choice(name, getattr(self, name), kind)
        if self.parallel_mlp_norm and not self.parallel_block:
            raise ValueError(
                "parallel_mlp_norm True has no effect without parallel_block: a serial "
                "block has two norms anyway; set one of them"
            )
        if self.output_norms and self.parallel_block:
            raise ValueError(
                "output_norms True has no place in a parallel_block, whose two parts "
                "are summed at once; set one of them to False"
            )
        if self.lm_head_bias and self.tie_embeddings:
            raise ValueError(
                "lm_head_bias True needs an output projection of its own; set "
                "tie_embeddings=False"
            )

    def _check_positions(self) -> None:
        if self.position == "learned":
            if self.scale_embeddings:
                raise ValueError(
                    "scale_embeddings True would scale the table of learned positions "
                    "with the tokens; set it to False or position='rope'"
                )
            for name in ("rope_scaling", "rotary_dim", "rope_theta_local"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"{name} {value} has no effect with position 'learned'; "
                        "leave it None or set position='rope'"
                    )
            return
        dim = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if dim < 2 or dim % 2 or dim > self.head_dim:
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            raise ValueError(
                f"{name} {dim} must be even and between 2 and head_dim "
                f"{self.head_dim} to be rotated"
            )
        check_positive(self, "rope_theta")
        scaling = self.rope_scaling
        if scaling is not None and scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta {self.rope_theta} must exceed 1 for the ramp of "
                f"rope_scaling {scaling}; give the base of the pretrained model"
            )
        if scaling is not None and scaling.kind == "dynamic" and dim < 4:
            raise ValueError(
                f"rope_scaling {scaling} needs at least 4 rotated features instead of "
                f"{dim}"
            )

    @property
    def max_cache_len(self) -> int | None:
        """Maximum tokens of a sequence with a KV cache; None is no limit.

        With dynamic rotary scaling it is the original length: beyond it every key would
        have to be rotated anew for each new token.
        """
        if self.position == "learned":
            return self.max_seq_len
        if self.rope_scaling is not None and self.rope_scaling.kind == "dynamic":
            return self.rope_scaling.original_max_position_embeddings
        return None

    @property
    def num_mlp_kernels(self) -> int:
        """Kernels of the feed-forward network: gate, up and down, or up and down."""
        return 3 if self.activation in GATED else 2

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None is global attention."""
        count = self.num_layers
        if self.window_pattern:
            return self.window_pattern * (count // len(self.window_pattern))
        full = set(self.global_layers)
        return tuple(None if i in full else self.window for i in range(count))

    def without_pattern(self) -> "DecoderConfig":
        """The same windows as `window` and `global_layers`, as files express them.

        Windows of several sizes stay a pattern, which no file can express.
        """
        windows = self.windows
        sizes = sorted({w for w in windows if w is not None})
        if not self.window_pattern or len(sizes) > 1:
            return self
        full = tuple(i for i, window in enumerate(windows) if window is None)
        return dataclasses.replace(
            self,
            window_pattern=(),
            window=sizes[0] if sizes else None,
            global_layers=full if sizes else (),
        )

    def attention(self, layer: int = 0) -> AttentionConfig:
        """The attention of one layer."""
        window = self.windows[layer]
        local = self.rope_theta_local if window is not None else None
        rope = RopeConfig(
            theta=self.rope_theta if local is None else local,
            rotary_dim=self.rotary_dim,
            interleaved=self.rope_interleaved,
            scaling=self.rope_scaling if local is None else None,
        )
        return AttentionConfig(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            use_bias=self.attention_bias,
            use_out_bias=self.attention_out_bias,
            rope=rope if self.position == "rope" else None,
            window=window,
            softcap=self.attention_softcap,
            query_pre_attn_scalar=self.query_pre_attn_scalar,
            qk_norm_eps=self.norm_eps if self.qk_norm else None,
            qk_norm_1p=self.qk_norm and self.norm == "rmsnorm_1p",
        )

    def block(self) -> BlockConfig:
        """The configuration of one block."""
        return BlockConfig(
            d_model=self.d_model,
            d_ff=self.d_ff,
            attention=self.attention(),
            norm=self.norm,
            norm_eps=self.norm_eps,
            activation=self.activation,
            mlp_bias=self.mlp_bias,
            parallel=self.parallel_block,
            parallel_mlp_norm=self.parallel_mlp_norm,
            output_norms=self.output_norms,
            num_layers=self.num_layers,
        )

    def num_parameters(self) -> int:
        """Parameters of the whole model, a tied table counted once."""
        d, v = self.d_model, self.vocab_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norm = 2 * d if self.norm == "layernorm" else d
        block = self._block_matmul_parameters()
        one_norm = self.parallel_block and not self.parallel_mlp_norm
        block += norm if one_norm else 2 * norm
        block += 2 * norm * self.output_norms
        block += 2 * self.head_dim * self.qk_norm
        block += (q + 2 * kv) * self.attention_bias + d * self.attention_out_bias
        block += (d + (self.num_mlp_kernels - 1) * self.d_ff) * self.mlp_bias
        total = self.num_layers * block + v * d + norm
        total += self.max_seq_len * d if self.position == "learned" else 0
        total += 0 if self.tie_embeddings else d * v
        return total + v * self.lm_head_bias

    def flops_per_token(self, seq_len: int, causal: bool) -> float:
        """Floating-point operations of forward and backward pass for one token.

        ``6 M + 12 L N H keys``, where M counts the parameters in matmuls (blocks and
        output projection; no look-ups, norms or biases) and `keys` is the average
        number of keys per query: ``seq_len`` in the full convention, as if nothing were
        masked, and ``seq_len / 2`` in the causal one. In a layer with a window w <
        seq_len they are ``w`` and ``w - w**2 / (2 seq_len)``. Recomputation (remat) is
        not counted: the result measures useful work.

        Args:
            seq_len: Tokens of a sequence.
            causal: Count only the unmasked half of the attention matrix.

        Example:
            >>> from jaxscale.models.families.llama import llama2_7b
            >>> round(llama2_7b().flops_per_token(4096, causal=True) / 1e9, 1)
            42.9

        References:
            PaLM, arXiv 2204.02311, appendix B (the full convention).
        """
        if seq_len < 1:
            raise ValueError(f"seq_len {seq_len} must be positive")
        keys = 0.0  # of all layers
        for window in self.windows:
            seen = min(seq_len, window or seq_len)
            keys += seen - seen**2 / (2 * seq_len) if causal else seen
        matmul = self.num_layers * self._block_matmul_parameters()
        matmul += self.d_model * self.vocab_size
        return 6 * matmul + 12 * self.num_heads * self.head_dim * keys

    def _block_matmul_parameters(self) -> int:
        heads = 2 * (self.num_heads + self.num_kv_heads) * self.head_dim
        return self.d_model * (heads + self.num_mlp_kernels * self.d_ff)

    def check_mesh(
        self,
        mesh_sizes: Mapping[str, int],
        rules: AxisRules,
        *,
        batch_size: int | None = None,
        num_tokens: int | None = None,
    ) -> None:
        """Check, before anything is compiled, that the model divides over a mesh.

        A vocabulary need not: tables are padded (`jaxscale.models.vocabulary`).

        Args:
            mesh_sizes: Size of each mesh axis, as ``dict(mesh.shape)``.
            rules: Mesh axes of each logical axis.
            batch_size: Global batch size, checked if given.
            num_tokens: Tokens per sequence, checked if given.

        Raises:
            ValueError: the rules use an axis that the mesh lacks, or a size is not
                divisible by the mesh axes that it is split over.

        Example:
            >>> from jaxscale.models.families.gpt import gpt2_small
            >>> from jaxscale.sharding.rules import fsdp_tp
            >>> sizes = {"data": 1, "fsdp": 2, "pipe": 1, "tensor": 8}
            >>> gpt2_small().check_mesh(sizes, fsdp_tp())
            Traceback (most recent call last):
            ...
            ValueError: num_heads 12 is not divisible by 8, the product of the mesh axes
            ('tensor',) ...
        """
        divided: list[Divided] = [
            ("num_heads", self.num_heads, ("heads", "act_heads")),
            ("num_kv_heads", self.num_kv_heads, ("kv_heads", "act_kv_heads")),
            ("d_ff", self.d_ff, ("mlp", "act_mlp")),
            ("d_model", self.d_model, ("embed", "act_embed", "norm")),
            ("num_layers", self.num_layers, ("layers",)),
            ("batch_size", batch_size, ("batch",)),
            ("num_tokens", num_tokens, ("tokens",)),
        ]
        check_division(divided, mesh_sizes, rules)


def _is_window(value: Any) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return value is None or (whole and int(value) > 0)


type Divided = tuple[str, int | None, tuple[str, ...]]
"""A size of a model, by its name, and the logical axes that it is split over."""


def check_division(
    divided: Iterable[Divided], mesh_sizes: Mapping[str, int], rules: AxisRules
) -> None:
    """Raise if the rules use a missing mesh axis, or one that does not divide a size.

    Example:
        >>> from jaxscale.sharding.rules import AxisRules
        >>> rules = AxisRules(mlp="tensor")
        >>> check_division([("d_ff", 6, ("mlp",))], {"tensor": 2}, rules)
    """
    missing = sorted(rules.placing - set(mesh_sizes))
    if missing:
        raise ValueError(
            f"the rules use the mesh axes {missing}, but the mesh has only "
            f"{sorted(mesh_sizes)}; make it with jaxscale.sharding.make_mesh"
        )
    for name, size, logical_axes in divided:
        for axis in logical_axes if size is not None else ():
            names = rules.spec(axis)[0] or ()
            names = (names,) if isinstance(names, str) else names
            ways = 1
            for mesh_axis in names:
                ways *= mesh_sizes[mesh_axis]
            if size is not None and size % ways:
                raise ValueError(
                    f"{name} {size} is not divisible by {ways}, the product of the "
                    f"mesh axes {tuple(names)} that the rules split {axis!r} over; "
                    f"change {name}, make these mesh axes smaller, or set "
                    f"{axis}=None in the rules"
                )
