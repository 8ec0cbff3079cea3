"""The feed-forward network and the Transformer block.

Legend: B batch, T tokens, D model, F hidden.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import Initializer
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxscale.checks import check_choice, check_type
from jaxscale.keywords import explain_keywords, explained
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.embeddings import NORMAL_INIT
from jaxscale.nn.joined import JoinedLinear, Parts, join_inputs
from jaxscale.nn.linear import (
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    norm_in_fp8,
    project_and_sum,
    project_together,
    rounds_rows,
    takes_norm,
)
from jaxscale.nn.norms import LayerNorm, RMSNorm
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.self_attention import Attention, AttentionState, attention_state
from jaxscale.nn.tile_sparse_linear import (
    TileSparseLinear,
    can_join_sparse,
    join_sparse,
)
from jaxscale.sharding.decode_all_reduce import reduce_through
from jaxscale.sharding.fp8 import Fp8
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.tensor_parallel import TensorParallel, feed_forward
from pallas_kernels.matmul.activations import activate


type Norm = Literal["rmsnorm", "rmsnorm_1p", "layernorm"]
type Activation = Literal["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu"]


GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh"}
"""Activation of the gate, for feed-forward networks with a gate projection."""


class MLP(nnx.Module):
    """Feed-forward network.

    ``down(act(gate(x)) * up(x))`` with SiLU for SwiGLU and GELU for GeGLU,
    ``down(act(up(x)))`` otherwise.

    Example:
        >>> mlp = MLP(8, 16, activation="swiglu", rngs=nnx.Rngs(0))
        >>> mlp(jnp.ones((1, 3, 8))).shape
        (1, 3, 8)

    References:
        GLU Variants Improve Transformer, arXiv 2002.05202.
    """

    @explain_keywords
    def __init__(
        self,
        d_model: int,
        d_ff: int,
        *,
        activation: Activation = "swiglu",
        use_bias: bool = False,
        out_init: Initializer = NORMAL_INIT,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        tensor_parallel: TensorParallel = None,
        quantization: Fp8 = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the projections.

        Args:
            d_model: Features of the input and the output.
            d_ff: Hidden features.
            activation: ``"swiglu"``, ``"geglu"``, ``"gelu"`` (both exact),
                ``"geglu_tanh"``, ``"gelu_tanh"`` or ``"relu"``.
            use_bias: Bias in every projection.
            out_init: Initializer of the down projection.
            dtype: Type of the computation.
            param_dtype: Type of the parameters.
            rules: Mesh axes of each logical axis.
            tensor_parallel: Communication, see `jaxscale.sharding.column_parallel`.
            quantization: Quantization of the projections, see `jaxscale.nn.Linear`.
            rngs: Source of the random keys.
        """
        check_choice("activation", activation, Activation)
        self.activation = activation

        options: dict[str, Any] = {
            "use_bias": use_bias,
            "dtype": dtype,
            "param_dtype": param_dtype,
            "rules": rules,
            "tensor_parallel": tensor_parallel,
            "quantization": quantization,
            "rngs": rngs,
        }

        def project_in() -> ColumnParallelLinear:
            return ColumnParallelLinear(
                d_model,
                d_ff,
                kernel_axes=("embed", "mlp"),
                out_axes=("batch", None, "act_mlp"),
                **options,
            )

        self.gate = project_in() if activation in GATED else None
        self.up = project_in()
        self.joined: JoinedLinear | TileSparseLinear | None = None
        self.down = RowParallelLinear(
            d_ff,
            d_model,
            kernel_axes=("mlp", "embed"),
            out_axes=("batch", "tokens", "act_embed"),
            kernel_init=out_init,
            **options,
        )

    @property
    def inputs(self) -> tuple[Any, ...]:
        """The layers that read the input."""
        if self.joined is not None:
            return (self.joined,)
        return (self.up,) if self.gate is None else (self.gate, self.up)

    def join_inputs(self, shards: int) -> None:
        """Merge gate and up projection into one matmul.

        See `JoinedLinear`, and `join_sparse` for pruned ones.
        """
        if self.gate is None:
            return
        join_inputs(self, ("gate", "up"), shards)
        if can_join_sparse(self.inputs):
            self.joined = nnx.data(join_sparse(self.inputs))
            self.gate = self.up = None

    @property
    def activations(self) -> tuple[str | None, ...]:
        """The activation of each of `inputs`.

        The activation of a gate is left to `join`: the kernel that multiplies reads the
        gate anyway, and a matmul would not hide it.
        """
        if self.activation in GATED:
            return (None,) * len(self.inputs)
        return (self.activation,)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Transform each token; all-gather the input and reduce-scatter the result."""
        if not self.is_sparse:
            return _dense_network(self, x)
        # Activations between sparse layers stay feature-major.
        x = constrain(x, ("batch", None, "act_embed"), self.down.rules)
        projected = [
            layer(x, activation, feature_major=(False, True))
            for layer, activation in zip(self.inputs, self.activations, strict=True)
        ]
        down: Any = self.down
        return down(self.join(projected, along=0), feature_major=(True, False))

    def hidden(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """Return the input of `down`, if not all layers are sparse."""
        return self.join(project_together(self.inputs, x, self.activations))

    @property
    def is_sparse(self) -> bool:
        """True once pruning has made all layers sparse."""
        layers = (*self.inputs, self.down)
        return all(isinstance(layer, TileSparseLinear) for layer in layers)

    def join(
        self, projected: Sequence[Float[Array, "..."]], along: int = -1
    ) -> Float[Array, "..."]:
        """Join the activated outputs of `inputs` into the input of `down`.

        Args:
            projected: The outputs.
            along: Their axis of features.
        """
        if isinstance(self.joined, Parts):  # which its devices may share
            projected = self.joined.split(*projected)
        elif self.joined is not None:
            projected = jnp.split(projected[0], 2, axis=along)
        *gate, up = projected
        return activate(gate[0], GATED[self.activation]) * up if gate else up


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Shape and variant of a Transformer block.

    Example:
        >>> heads = AttentionConfig(num_heads=4, num_kv_heads=4, head_dim=8)
        >>> BlockConfig(d_model=32, d_ff=64, attention=heads).norm
        'rmsnorm'
    """

    d_model: int
    """Width of the residual stream."""
    d_ff: int
    """Hidden features of the feed-forward network."""
    attention: AttentionConfig
    """Settings of the attention layer."""
    norm: Norm = "rmsnorm"
    """Normalization of the input of attention and feed-forward network; the scale of
    `rmsnorm_1p` is one plus its parameter (Gemma)."""
    norm_eps: float = 1e-5
    """Added to the variance."""
    norm_bias: bool = True
    """Layer norms have a bias."""
    post_norm: bool = False
    """``norm(x + attention(x))`` as in BERT instead of ``x + attention(norm(x))``."""
    attention_norm: bool = True
    """False: attention reads the residual stream as it is (pre-norm only)."""
    output_norms: bool = False
    """Also normalize the outputs of attention and feed-forward network (Gemma 2)."""
    activation: Activation = "swiglu"
    """Activation of the feed-forward network."""
    mlp_bias: bool = False
    """Bias in the feed-forward network."""
    parallel: bool = False
    """Parallel block: ``x + attention(norm(x)) + mlp(norm(x))`` with a shared norm."""
    parallel_mlp_norm: bool = False
    """The feed-forward network of a parallel block has a norm of its own (NeoX)."""
    num_layers: int = 1
    """Depth of the model, which scales the initialization of residual projections."""

    def __post_init__(self) -> None:
        if self.post_norm and (self.parallel or not self.attention_norm):
            raise ValueError(
                f"post_norm True has two norms, of which parallel {self.parallel} and "
                f"attention_norm {self.attention_norm} leave one; set post_norm=False"
            )
        if self.output_norms and (self.post_norm or self.parallel):
            raise ValueError(
                f"output_norms True needs a serial pre-norm block; set post_norm "
                f"{self.post_norm} and parallel {self.parallel} to False"
            )
        if self.parallel_mlp_norm and not self.parallel:
            raise ValueError("parallel_mlp_norm True needs parallel=True")
        if self.parallel and not self.attention_norm:
            raise ValueError(
                "parallel True needs attention_norm=True, the only norm of the block"
            )


def make_norm(
    kind: Norm,
    features: int,
    eps: float,
    *,
    use_bias: bool = True,
    dtype: DTypeLike = jnp.float32,
    param_dtype: DTypeLike = jnp.float32,
    rules: AxisRules = REPLICATED,
    rngs: nnx.Rngs,
) -> RMSNorm | LayerNorm:
    """The normalization layer named `kind`; only layer norms have a bias.

    Args:
        kind: ``"rmsnorm"``, ``"rmsnorm_1p"`` (one is added to its scale) or
            ``"layernorm"``.
        features: Size of the normalized dimension.
        eps: Added to the variance.
        use_bias: Give a layer norm a bias.
        dtype: Type of the result; statistics are in fp32.
        param_dtype: Type of the parameters.
        rules: Mesh axes of each logical axis.
        rngs: Source of the random keys.

    Raises:
        ValueError: no layer has this name.

    Example:
        >>> type(make_norm("layernorm", 8, 1e-5, rngs=nnx.Rngs(0))).__name__
        'LayerNorm'
    """
    check_choice("norm", kind, Norm)
    options: dict[str, Any] = {"dtype": dtype, "param_dtype": param_dtype}
    options |= {"eps": eps, "rules": rules, "rngs": rngs}
    if kind != "layernorm":
        return RMSNorm(features, plus_one=kind == "rmsnorm_1p", **options)
    return LayerNorm(features, use_bias=use_bias, **options)


def _after_norm(mlp: MLP, norm: RMSNorm | LayerNorm | None, x: Array) -> Array:
    """``mlp(norm(x))``; in fp8 the norm is rounded in the pass that computes it.

    No method, since `flax.nnx.tabulate` takes no modules as arguments of one.
    """
    if norm is None:
        return mlp(x)
    rounds = rounds_rows(mlp.inputs, x.dtype) or takes_norm(mlp.inputs, norm)
    if mlp.is_sparse or not rounds:
        return mlp(norm(x))
    return _dense_network(mlp, x, norm)


def _dense_network(
    mlp: MLP, x: Array, norm: RMSNorm | LayerNorm | None = None
) -> Array:
    """A network whose layers are not all sparse, after a norm if there is one."""
    out = _network_in_fp8(mlp, x, norm)
    if out is None:
        out = _down(mlp, project_together(mlp.inputs, x, mlp.activations, norm))
    return out


def _down(mlp: MLP, projected: Sequence[Array]) -> Array:
    """The end of a network, after its inputs."""
    down: Any = mlp.down
    both = isinstance(mlp.joined, QuantizedLinear) and mlp.joined.shards == 1
    if both and isinstance(down, QuantizedLinear):
        out = down.after_gate(projected[0], GATED[mlp.activation])
        if out is not None:
            return out
    return down(mlp.join(projected))


def _network_in_fp8(
    mlp: MLP, x: Array, norm: RMSNorm | LayerNorm | None
) -> Array | None:
    """The result if the whole network rounds what it computes as it goes."""
    layers: list[Any] = [mlp.gate, mlp.up, mlp.down]
    gate, up, down = layers
    if (
        gate is None
        or not rounds_rows(layers, x.dtype)
        or mlp.joined is not None
        or gate.bias is not None
        or up.bias is not None
    ):
        return None
    x, rms = norm_in_fp8(norm, layers, x)
    out = feed_forward(
        x,
        [layer.factor for layer in layers],
        kernel_axes=[layer.kernel_axes for layer in layers],
        out_axes=down.out_axes,
        activation=GATED[mlp.activation],
        rules=down.rules,
        tensor_parallel=down.tensor_parallel,
        quantization=down.quantization,
        norm=rms,
    )
    return None if out is None else down.add_bias(out)


def norm_of_sum(
    norm: RMSNorm | LayerNorm,
    layer: Linear | TileSparseLinear,
    h: Float[Array, "B T _in"],
    residual: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """``norm(residual + layer(h))``, with bias, sum and norm in one kernel if possible.

    The kernel is for layer norms after dense layers; each device runs it on its own
    tokens.
    """
    whole = not layer.rules.mesh_axes(["act_embed"])
    if (
        isinstance(norm, LayerNorm)
        and isinstance(layer, RowParallelLinear)
        and residual.dtype == layer.dtype
        and whole
    ):
        if norm.dtype == layer.dtype:
            shift = None if norm.bias is None else norm.bias[...]
            behind = residual, norm.scale[...], shift, norm.eps
            if (out := layer.in_place(h, *behind)) is not None:
                return out
        product, bias = layer.apart(h)
        return norm.of_sum(product, residual, bias)
    # As in the kernel the sum is not rounded: in fp16 it may exceed 65,504.
    return norm(residual.astype(jnp.float32) + layer(h).astype(jnp.float32))


class Block(nnx.Module):
    """Transformer block: pre-norm, serial or parallel, or post-norm.

    Between blocks tokens are split over the tensor axis (sequence parallelism, arXiv
    2205.05198). Attention and feed-forward network each all-gather their input once,
    for all their projections, and reduce-scatter their output; in a parallel block one
    all-gather and one reduce-scatter serve both.

    Example:
        >>> heads = AttentionConfig(num_heads=4, num_kv_heads=2, head_dim=8)
        >>> config = BlockConfig(d_model=32, d_ff=64, attention=heads)
        >>> block = Block(config, rngs=nnx.Rngs(0))
        >>> from jaxscale.nn import attention_state
        >>> state = attention_state((1, 5))
        >>> x, state = block(jnp.ones((1, 5, 32)), state)
        >>> x.shape
        (1, 5, 32)

    References:
        Pre-norm, arXiv 2002.04745; post-norm, arXiv 1706.03762. The residual
        projections start at ``0.02 / sqrt(2 num_layers)`` as in GPT-2. Parallel form:
        GPT-J, PaLM (arXiv 2204.02311).
    """

    @explain_keywords
    def __init__(
        self,
        config: BlockConfig,
        *,
        attention_implementation: str | None = None,
        attention_type: type[Attention] = Attention,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        rules: AxisRules = REPLICATED,
        tensor_parallel: TensorParallel = None,
        quantization: Fp8 = None,
        rngs: nnx.Rngs,
    ) -> None:
        """Make the layers.

        Args:
            config: Shape and variant.
            attention_implementation: Name of an attention implementation: of
                `pallas_kernels.varlen_attention` with sequence packing, otherwise of
                `pallas_kernels.attention`; None picks one.
            attention_type: Class of the attention layer, made from
                ``config.attention``.
            dtype: Type of the computation.
            param_dtype: Type of the parameters.
            rules: Mesh axes of each logical axis.
            tensor_parallel: Communication, see `jaxscale.sharding.column_parallel`.
            quantization: Quantization of the projections, see `jaxscale.nn.Linear`.
            rngs: Source of the random keys.
        """
        check_type("config", config, BlockConfig, "model_config.block() makes one")
        self.parallel = config.parallel
        self.post_norm = config.post_norm
        self.shares: Any = None
        """How the blocks of a GPU share pruned weights in a launch that decodes a
        layer; see `jaxscale.models.decode_layers.share_out`."""
        out_init = jax.nn.initializers.normal(0.02 / math.sqrt(2 * config.num_layers))

        def norm() -> RMSNorm | LayerNorm:
            return make_norm(
                config.norm,
                config.d_model,
                config.norm_eps,
                use_bias=config.norm_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                rules=rules,
                rngs=rngs,
            )

        self.attention_norm = norm() if config.attention_norm else None
        self.attention = attention_type(
            config.d_model,
            config.attention,
            out_init=out_init,
            implementation=attention_implementation,
            dtype=dtype,
            param_dtype=param_dtype,
            rules=rules,
            tensor_parallel=tensor_parallel,
            quantization=quantization,
            rngs=rngs,
        )
        one_norm = config.parallel and not config.parallel_mlp_norm
        self.mlp_norm = None if one_norm else norm()
        self.attention_out_norm = norm() if config.output_norms else None
        self.mlp_out_norm = norm() if config.output_norms else None
        self.mlp = MLP(
            config.d_model,
            config.d_ff,
            activation=config.activation,
            use_bias=config.mlp_bias,
            out_init=out_init,
            dtype=dtype,
            param_dtype=param_dtype,
            rules=rules,
            tensor_parallel=tensor_parallel,
            quantization=quantization,
            rngs=rngs,
        )

    @explain_keywords
    def __call__(
        self, x: Float[Array, "B T D"], state: Any = None
    ) -> tuple[Float[Array, "B T D"], Any]:
        """Transform the residual stream `x`.

        Args:
            x: The residual stream.
            state: Positions of the tokens, and the keys and values that they attend to;
                made by `attention_state`. None is one sequence per row.

        Returns:
            The residual stream, and the state with the keys and values of the tokens.
        """
        if state is None:
            state = attention_state(x.shape[:2], rules=self.attention.rules)
        with reduce_through(state.workspace) as held:
            x, state = self._run(x, state)
        return x, dataclasses.replace(state, workspace=held.workspace)

    def _run[State: AttentionState](
        self, x: Array, state: State
    ) -> tuple[Array, State]:
        attention, mlp = self.attention, self.mlp
        pre_norm = None if self.post_norm else self.attention_norm
        if self.parallel:
            count = len(attention.inputs)
            activations = (*[None] * count, *mlp.activations)
            if self.mlp_norm is None:
                projected = project_together(
                    [*attention.inputs, *mlp.inputs], x, activations, pre_norm
                )
            else:
                projected = [
                    *project_together(attention.inputs, x, norm=pre_norm),
                    *project_together(mlp.inputs, x, mlp.activations, self.mlp_norm),
                ]
            heads = attention.split_heads(projected[:count])  # [B, T, N or K, H]
            attended, state = attention.attend(heads, state)
            hidden = attention.join_heads(attended), mlp.join(projected[count:])
            return x + project_and_sum([attention.out, mlp.down], hidden), state
        projected = project_together(
            attention.inputs, x, norm=pre_norm
        )  # [B, T, N H], [B, T, K H] twice
        heads = attention.split_heads(projected)  # [B, T, N or K, H]
        attended, state = attention.attend(heads, state)
        joined = attention.join_heads(attended)  # [B, T, N H]
        if self.post_norm and self.attention_norm and self.mlp_norm:
            # The normalized input is read twice, by a matmul and by a sum. Without the
            # barriers XLA would compute it twice.
            x = norm_of_sum(self.attention_norm, attention.out, joined, x)
            x = jax.lax.optimization_barrier(x)
            if mlp.is_sparse:
                x = self.mlp_norm(x + mlp(x))
            else:
                x = norm_of_sum(self.mlp_norm, mlp.down, mlp.hidden(x), x)
            return jax.lax.optimization_barrier(x), state
        attended = attention.out(joined)
        if self.attention_out_norm is not None:
            attended = self.attention_out_norm(attended)
        x = x + attended
        h = _after_norm(mlp, self.mlp_norm, x)
        if self.mlp_out_norm is not None:
            h = self.mlp_out_norm(h)
        return x + h, state
