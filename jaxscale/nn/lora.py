r"""Low-rank adapters (LoRA) of linear layers.

A layer with a kernel :math:`W` computes :math:`x W + \frac{\alpha}{r} (x A) B`. `A` and
`B` are trained; all other parameters become `Frozen`, which gradients, optimizers and
checkpoints leave out, since these take `nnx.Param` alone.

Legend: D input features, F output features, r or R rank, N adapters.
"""

import dataclasses
import difflib
import fnmatch
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from jaxscale.keywords import explained
from jaxscale.nn.linear import Linear
from jaxscale.sharding.operations import contract
from jaxscale.sharding.parameters import logical_axes


class Frozen(nnx.Variable):
    """A parameter that is not trained."""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, and the layers that get one.

    Example:
        >>> LoraConfig(rank=8).scale
        2.0

    References:
        LoRA, arXiv 2106.09685.
    """

    rank: int = 0
    """Rank of the adapters; 0 makes none, and the whole model is trained."""
    alpha: float = 16.0
    """The output of an adapter is scaled by alpha / rank."""
    layers: tuple[str, ...] = ("*",)
    """Linear layers of the blocks that get an adapter, by name or pattern, whole as
    ``blocks.attention.query`` or the last part alone, as ``query``; by default all."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank {self.rank}, expected at least 1, or 0 for none")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"alpha {self.alpha}, expected above 0 and finite")
        if not self.layers:
            raise ValueError("layers is empty; name a layer, or set rank to 0")

    @property
    def scale(self) -> float:
        """Alpha / rank."""
        return self.alpha / self.rank if self.rank else 0.0


class LowRank(nnx.Module):
    """The adapter of a linear layer; zero at first, since `b` is."""

    def __init__(self, layer: Linear, config: LoraConfig, *, rngs: nnx.Rngs) -> None:
        """Make the parameters, in fp32, split as the kernel of `layer` is.

        Args:
            layer: The layer, or a stack of them.
            config: Rank and scale.
            rngs: Source of the keys.
        """
        *stack, features, outputs = layer.kernel.shape
        *stacked, in_axis, out_axis = logical_axes(layer.kernel)
        # U(-1 / sqrt(D), 1 / sqrt(D)), as peft draws it.
        width = 1 / math.sqrt(features)
        shape = (*stack, features, config.rank)
        self.a = nnx.Param(
            jax.random.uniform(rngs.params(), shape, jnp.float32, -width, width),
            out_sharding=(*stacked, in_axis, None),
            eager_sharding=False,
        )
        self.b = nnx.Param(
            jnp.zeros((*stack, config.rank, outputs), jnp.float32),
            out_sharding=(*stacked, None, out_axis),
            eager_sharding=False,
        )
        self.scale = config.scale

    def __call__(
        self,
        x: Float[Array, "B *T D"],
        layer: Linear,
        out_axes: tuple[str | None, ...],
    ) -> Float[Array, "B *T F"]:
        """What the adapter adds to the projection of `x` by `layer`."""
        b = self.scale * self.b[...]
        return _through(x, self.a[...], b, layer, out_axes)

    def delta(self) -> Float[Array, "*L D F"]:
        """What the adapter adds to the kernel, in fp32."""
        product = jnp.matmul(
            self.a[...], self.b[...], precision=jax.lax.Precision.HIGHEST
        )
        return self.scale * product


class LowRankStack(nnx.Module):
    r"""The adapters of a layer, of which each token uses one or none, for inference.

    The factors of N adapters lie side by side, each padded with zeros to the rank R of
    the largest, :math:`A` [D, N R] and :math:`B` [N R, F], in which the scale is. Of
    :math:`x A` a token keeps the R numbers of its own adapter:

    .. math:: y = (x A \odot m) B, \quad m_j = [\lfloor j / R \rfloor + 1 = i]

    for the index :math:`i` of the token, from 1 on; 0 keeps none. So tokens of all
    adapters and of the model itself share two dense matmuls, without a gather or a
    sort. A call reads every factor once, N R (D + F) numbers, and computes 2 T N R (D +
    F) FLOPs for T tokens. To gather factors would read R (D + F) numbers for each
    token, which is less only where fewer than N tokens are computed. With N = 8 and R =
    16, the factors of a layer of 4,096 features have 6% of the bytes of its kernel.

    Example:
        >>> layer = Linear(4, 8, rngs=nnx.Rngs(0))
        >>> stack = LowRankStack(jnp.ones((4, 2)), jnp.ones((2, 8)), 1, layer)
        >>> stack.index = nnx.data(jnp.array([[0, 2]]))
        >>> print(stack(jnp.ones((1, 2, 4)), layer, layer.out_axes)[0, :, 0])
        [0. 4.]

    References:
        S-LoRA, arXiv 2311.03285, and Punica, arXiv 2310.18547, gather the factors of
        each token in kernels of their own, for thousands of adapters.
    """

    index: Any = None
    """[B, T], the adapter of each token; 0 is none."""

    def __init__(
        self,
        a: Float[Array, "D NR"],
        b: Float[Array, "NR F"],
        rank: int,
        layer: Any,
    ) -> None:
        """Take over the factors, split as the kernel of `layer` is.

        Args:
            a: The first factors, side by side.
            b: The second ones, below each other, times the scale of their adapter.
            rank: R.
            layer: The layer; they are stored in the type of its computation.
        """
        in_axis, out_axis = layer.kernel_axes

        def kept(array: Array, *axes: str | None) -> Frozen:
            array = jnp.asarray(array, layer.dtype)
            return Frozen(array, out_sharding=axes, eager_sharding=False)

        self.a, self.b = kept(a, in_axis, None), kept(b, None, out_axis)
        self.rank = rank

    def __call__(
        self,
        x: Float[Array, "B T D"],
        layer: Any,
        out_axes: tuple[str | None, ...],
    ) -> Float[Array, "B T F"]:
        """What the adapter of each token adds to its projection by `layer`."""
        a, b = self.a[...], self.b[...]
        owner = jnp.arange(a.shape[1]) // self.rank + 1
        return _through(x, a, b, layer, out_axes, self.index[..., None] == owner)


def _through(
    x: Float[Array, "B *T D"],
    a: Float[Array, "D R"],
    b: Float[Array, "R F"],
    layer: Any,
    out_axes: tuple[str | None, ...],
    keep: Bool[Array, "B *T R"] | None = None,
) -> Float[Array, "B *T F"]:
    """``(x @ a) @ b``, where `keep` masks ``x @ a``."""
    rows = "abcdefgh"[: x.ndim - 1]
    in_axis, out_axis = layer.kernel_axes
    low = contract(
        f"{rows}i,ir->{rows}r",
        x.astype(layer.dtype),
        a.astype(layer.dtype),
        (in_axis, None),
        ("batch", *[None] * (x.ndim - 1)),
        layer.rules,
    )
    if keep is not None:
        low = jnp.where(keep, low, 0)
    return contract(
        f"{rows}r,ro->{rows}o",
        low,
        b.astype(layer.dtype),
        (None, out_axis),
        out_axes,
        layer.rules,
    )


def add_adapters[M](model: M, config: LoraConfig, *, seed: int = 0) -> M:
    """A copy of `model` of which the adapters, and the head of an encoder, are trained.

    It shares the arrays of `model`. Its outputs are the same at first.

    Args:
        model: A `Decoder`, an `EncoderModel`, or another module with linear layers in
            ``blocks``.
        config: Rank, scale and layers; the rank must not be 0.
        seed: Decides the parameters `a`.

    Raises:
        ValueError: a name fits no layer, or the rank is 0.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> adapted = add_adapters(model, LoraConfig(rank=2, layers=("query", "value")))
        >>> sorted(nnx.state(adapted, nnx.Param)["blocks"]["attention"])
        ['query', 'value']
    """
    if config.rank == 0:
        raise ValueError("rank 0 makes no adapters; give at least 1")

    def freeze(path: tuple[Any, ...], node: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if isinstance(node, nnx.Param) and not name.startswith("head."):
            return _as(Frozen, node)
        return node

    copy = jax.tree_util.tree_map_with_path(
        freeze, model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    rngs = nnx.Rngs(seed)
    for layer in _chosen(_layers(copy), config).values():
        layer.low_rank = nnx.data(LowRank(layer, config, rngs=rngs))
    return copy


def merge_adapters[M](model: M) -> M:
    """A copy of `model` with its adapters added to the kernels.

    Args:
        model: What `add_adapters` made, trained or not; another model comes back as it
            is.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> merged = merge_adapters(add_adapters(model, LoraConfig(rank=2)))
        >>> jax.tree.structure(merged) == jax.tree.structure(model)
        True
    """

    def thaw(node: Any) -> Any:
        return _as(nnx.Param, node) if isinstance(node, Frozen) else node

    copy = jax.tree.map(
        thaw, model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    for layer in _layers(copy).values():
        if layer.low_rank is not None:
            layer.kernel = _as(nnx.Param, layer.kernel, layer.merged)
            del layer.low_rank
    return copy


def _layers(model: Any) -> dict[str, Linear]:
    """The linear layers of the blocks by name."""
    found = {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(model)
        if isinstance(node, Linear) and path[:1] == ("blocks",)
    }
    return dict(sorted(found.items()))


def _chosen(layers: dict[str, Linear], config: LoraConfig) -> dict[str, Linear]:
    def fits(name: str, pattern: str) -> bool:
        last = name.rpartition(".")[2]
        return any(fnmatch.fnmatchcase(word, pattern) for word in (name, last))

    for pattern in config.layers:
        if not any(fits(name, pattern) for name in layers):
            close = difflib.get_close_matches(pattern, layers, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"lora.layers {pattern!r} is no linear layer of the blocks{hint}; they "
                f"are {', '.join(layers)}"
            )
    return {n: la for n, la in layers.items() if any(fits(n, p) for p in config.layers)}


def _as(kind: type[nnx.Variable], variable: Any, value: Any = None) -> Any:
    """A variable of another kind, with the same notes."""
    notes = {**variable.get_metadata(), "eager_sharding": False}
    return kind(variable.get_value() if value is None else value, **notes)
