"""Several low-rank adapters (LoRA) of one decoder, to serve them together.

Legend: B batch, T tokens, D input features, F output features, L layers, N adapters,
R ranks of all layers that are joined.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.serving import mesh_of
from jaxscale.nn.blocks import Block
from jaxscale.nn.joined import side_by_side
from jaxscale.nn.linear import Linear
from jaxscale.nn.lora import LowRank, LowRankStack
from jaxscale.nn.quantized_linear import QuantizedLinear
from jaxscale.nn.tile_sparse_linear import TileSparseLinear
from jaxscale.sharding.parameters import place


_LAYERS = {
    "attention": (("query", "key", "value"), "out"),
    "mlp": (("gate", "up"), "down"),
}
"""The layers of a part of a block: those that may be fused, and the one after them."""

type Factors = tuple[Float[np.ndarray, "L D rank"], Float[np.ndarray, "L rank F"]]
"""A and B of a layer, where B has the scale in it; zeros for blocks without any."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """The factors of an adapter, on the host."""

    factors: Mapping[str, Factors]
    """By the name of the layer in its block, as ``attention.query``."""


class AdapterStack(nnx.Module):
    """The factors of N adapters for the layers of a decoder."""

    def __init__(
        self, names: Sequence[str], blocks: Sequence[Mapping[str, LowRankStack]]
    ) -> None:
        """Take over the factors.

        Args:
            names: Of the adapters; the index of the first is 1.
            blocks: Of each block, by the path of the layer.
        """
        self.names = tuple(names)
        self.paths = tuple(map(tuple, blocks))
        self.blocks = nnx.List([nnx.List(block.values()) for block in blocks])


def adapter_of(model: Decoder) -> Adapter:
    """The adapter of a model that `jaxscale.nn.add_adapters` has made."""
    layers = (
        (".".join(map(str, path[1:-1])), node)
        for path, node in nnx.iter_modules(model)
        if isinstance(node, LowRank)
    )
    return Adapter(
        factors={
            name: (np.asarray(node.a[...]), np.asarray(node.scale * node.b[...]))
            for name, node in layers
        }
    )


def adapter_names(model: Decoder) -> tuple[str, ...]:
    """The adapters of a model; the index of the first is 1."""
    return () if model.adapters is None else model.adapters.names


def checkpoint_config(model: Decoder) -> DecoderConfig:
    """The shape of the checkpoint of a model, in inference form or not."""
    blocks: Any = model.blocks
    block = blocks if isinstance(blocks, Block) else blocks[0]
    heads = model.config.num_kv_heads // block.attention.repeats
    return dataclasses.replace(model.config, num_kv_heads=heads)


def with_adapters(model: Decoder, adapters: Mapping[str, Adapter]) -> Decoder:
    """The model as `Decoder.for_inference` gives it, with adapters to choose from.

    Its outputs are unchanged until `use_adapters` assigns adapters to tokens.

    Args:
        model: A decoder, also one with weights of 8 bits.
        adapters: By name; they take the place of those that it has.

    Raises:
        ValueError: an adapter does not fit the model, has a number that is not finite,
            or is for a layer that pruning has made sparse.

    Example:
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> factors = np.ones((2, 32, 1)), np.ones((2, 1, 32))
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> ones = Adapter(factors={"attention.query": factors})
        >>> adapter_names(with_adapters(model, {"ones": ones}))
        ('ones',)
    """
    result: Any = jax.tree.map(lambda p: p, model.for_inference())
    result.adapters = None
    for name, adapter in adapters.items():
        _check(name, adapter, result)
    if not adapters:
        return result
    mesh, where = mesh_of(result), jax.tree.leaves(result)[0].sharding
    blocks = []
    for number, block in enumerate(result.blocks):
        stacks = {}
        for path, layer, parts in _layers(block):
            stack = _stack(layer, parts, list(adapters.values()), number)
            if stack is not None:
                stacks[path] = (
                    jax.device_put(stack, where)
                    if mesh is None
                    else place(stack, mesh, result.rules)
                )
        blocks.append(stacks)
    result.adapters = nnx.data(AdapterStack(tuple(adapters), blocks))
    return result


def use_adapters(model: Decoder, index: Int[Array, "B T"]) -> Decoder:
    """A copy of a model whose tokens use the adapters of these indices; 0 is none."""
    result: Any = jax.tree.map(lambda p: p, model)
    stack, result.adapters = result.adapters, None
    for block, paths, layers in zip(
        result.blocks, stack.paths, stack.blocks, strict=True
    ):
        for path, low_rank in zip(paths, layers, strict=True):
            part, name = path.split(".")
            low_rank.index = nnx.data(index)
            getattr(getattr(block, part), name).low_rank = nnx.data(low_rank)
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Part:
    """One of the layers whose columns lie side by side in one of a served block."""

    name: str
    size: int
    """Output features."""
    repeats: int = 1
    """How many heads side by side are one of the checkpoint."""
    head_dim: int = 1
    """Features of a head."""

    def columns(self, b: np.ndarray) -> np.ndarray:
        """The columns of B as the layer has them."""
        heads = b.reshape(*b.shape[:-1], -1, 1, self.head_dim)
        return np.repeat(heads, self.repeats, axis=-2).reshape(*b.shape[:-1], -1)


def _layers(block: Block) -> Iterator[tuple[str, Any, list[_Part]]]:
    """The linear layers of a served block: path, layer, and those that it joins."""
    for part, (inputs, output) in _LAYERS.items():
        module = getattr(block, part)
        groups = [("joined", inputs), *((name, (name,)) for name in (*inputs, output))]
        for attribute, names in groups:
            layer = getattr(module, attribute)
            if layer is None:
                continue
            if attribute != "joined":
                sizes = [_features(layer)[1]]
            elif isinstance(layer, TileSparseLinear):  # gate and up, alike
                sizes = [_features(layer)[1] // len(names)] * len(names)
            else:
                sizes = [size for size, _ in layer.parts]
                names = names[-len(sizes) :]  # a sparse query is not among them
            parts = []
            for name, size in zip(names, sizes, strict=True):
                heads = {}
                if name in ("key", "value"):
                    heads = {
                        "repeats": module.repeats,
                        "head_dim": module.config.head_dim,
                    }
                parts.append(_Part(name=f"{part}.{name}", size=size, **heads))
            yield f"{part}.{attribute}", layer, parts


def _features(layer: Any) -> tuple[int, int]:
    """Input and output features of a layer of any kind."""
    if isinstance(layer, QuantizedLinear):
        return layer.kernel.shape[1], layer.features
    return layer.shape if isinstance(layer, TileSparseLinear) else layer.kernel.shape


def _check(name: str, adapter: Adapter, model: Decoder) -> None:
    """Raise where an adapter does not fit the blocks of a served model."""
    blocks: Any = model.blocks
    known = [
        {
            part.name: (layer, part)
            for _, layer, parts in _layers(block)
            for part in parts
        }
        for block in blocks
    ]
    if not adapter.factors:
        raise ValueError(f"adapter {name!r} is for no layer; train it again")
    for layer_name, (a, b) in adapter.factors.items():
        if layer_name not in known[0]:
            raise ValueError(
                f"adapter {name!r} is for the layer {layer_name}, which the model "
                f"lacks; its layers are {', '.join(known[0])}"
            )
        for layer, _ in (block[layer_name] for block in known):
            if isinstance(layer, Linear | QuantizedLinear):
                continue
            raise ValueError(
                f"adapter {name!r} is for the layer {layer_name}, which pruning has "
                f"made a {type(layer).__name__}; serve the dense model"
            )
        layer, part = known[0][layer_name]
        shapes = a.shape[0], a.shape[1], b.shape[-1]
        wanted = len(blocks), _features(layer)[0], part.size // part.repeats
        if shapes != wanted:
            raise ValueError(
                f"adapter {name!r} has [layers, in, out] {list(shapes)} for "
                f"{layer_name}, but the model {list(wanted)}; it was trained on "
                "another model"
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise ValueError(
                f"adapter {name!r} has a number for {layer_name} that is NaN or "
                "infinite; train it again"
            )


def _stack(
    layer: Any, parts: Sequence[_Part], adapters: Sequence[Adapter], number: int
) -> LowRankStack | None:
    """The factors of all adapters for a layer of block `number`; None without any.

    Layers that are joined read one input: A has the columns of all of them, and B is
    block-diagonal. So each costs two matmuls, however many layers it fuses.
    """
    ranks = [
        max((x.factors[p.name][0].shape[-1] for x in adapters if p.name in x.factors),
            default=0)
        for p in parts
    ]  # fmt: skip
    if not (total := sum(ranks)):
        return None
    a = np.zeros((_features(layer)[0], len(adapters), total), np.float32)
    bs = [np.zeros((len(adapters), total, part.size), np.float32) for part in parts]
    for n, adapter in enumerate(adapters):
        for part, b, end, rank in zip(parts, bs, np.cumsum(ranks), ranks, strict=True):
            if part.name in adapter.factors:
                down, up = (x[number] for x in adapter.factors[part.name])
                own = slice(end - rank, end - rank + down.shape[-1])
                a[:, n, own] = down
                b[n, own] = part.columns(up)
    columns = [jnp.asarray(b.reshape(-1, b.shape[-1])) for b in bs]
    shards = getattr(layer, "shards", 1)
    beside = side_by_side(columns, shards) if len(parts) > 1 else columns[0]
    return LowRankStack(jnp.asarray(a.reshape(len(a), -1)), beside, total, layer)
