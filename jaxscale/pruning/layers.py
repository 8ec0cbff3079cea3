"""The prunable layers of a model by name, and replacement of modules.

A stack of layers is one weight [L, K, N]: ``blocks.mlp.up``; ``blocks.mlp.up.0`` is
its first layer.

Legend: L layers, K input features, N output features.
"""

import dataclasses
import difflib
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Float

from jaxscale.nn.blocks import MLP
from jaxscale.nn.linear import Linear
from jaxscale.nn.tile_sparse_linear import TileSparseLinear


def linears(model: Any) -> dict[str, Linear]:
    """The linear layers that can be pruned, by name, in the order of their names.

    These are the layers of blocks, without output projections and those of small
    embeddings.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> list(linears(Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))))[-3:]
        ['blocks.mlp.down', 'blocks.mlp.gate', 'blocks.mlp.up']
    """
    found = {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(model)
        if isinstance(node, Linear) and not {"vocab", None} & {*node.kernel_axes}
    }
    return dict(sorted(found.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeedForward:
    """The names of the projections of a feed-forward network."""

    inputs: tuple[str, ...]
    """Gate, if there is one, and up."""
    down: str
    """The down projection."""


def feed_forwards(model: Any) -> list[FeedForward]:
    """The feed-forward networks of a model; a stack of layers is one.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> feed_forwards(Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0)))[0].inputs
        ('blocks.mlp.gate', 'blocks.mlp.up')
    """
    found = []
    for path, node in nnx.iter_modules(model):
        if isinstance(node, MLP):
            name = ".".join(map(str, path))
            inputs = ("up",) if node.gate is None else ("gate", "up")
            found.append(
                FeedForward(
                    inputs=tuple(f"{name}.{each}" for each in inputs),
                    down=f"{name}.down",
                )
            )
    return found


def choose(model: Any, dense: Sequence[str] = ()) -> dict[str, list[int]]:
    """The layers to prune: the name of each weight and the indices in its stack.

    A weight that is not stacked has the single index 0.

    Args:
        model: The model.
        dense: Names or patterns of layers that stay dense.

    Raises:
        ValueError: a name fits no layer of the model, or the model is sparse already.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> choose(model, dense=["blocks.attention.*", "*.0"])["blocks.mlp.up"]
        [1]
    """
    check_dense(model)
    names = {
        name: layer_names(name, layer.kernel.shape)
        for name, layer in linears(model).items()
    }
    known = [*names, *(each for stack in names.values() for each in stack)]
    for pattern in dense:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            close = difflib.get_close_matches(pattern, known, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(
                f"dense {pattern!r} is no layer of the model{hint}; its layers are "
                f"{', '.join(names)}"
            )

    def stays_dense(*names: str) -> bool:
        return any(fnmatch.fnmatchcase(n, p) for n in names for p in dense)

    chosen = {
        name: [i for i, each in enumerate(stack) if not stays_dense(name, each)]
        for name, stack in names.items()
    }
    return {name: places for name, places in chosen.items() if places}


def check_dense(model: Any) -> None:
    """Raise if a layer of the model is sparse already."""
    for path, node in nnx.iter_modules(model):
        if isinstance(node, TileSparseLinear):
            raise ValueError(
                f"layer {'.'.join(map(str, path))} is sparse already; prune the dense "
                "model that it was made from"
            )


def layer_names(name: str, shape: Sequence[int]) -> list[str]:
    """The name of each layer of a weight: its own, or one per layer of a stack."""
    return [name] if len(shape) == 2 else [f"{name}.{i}" for i in range(shape[0])]


def matrices(weight: np.ndarray) -> np.ndarray:
    """A weight as a stack, [L, K, N], whether or not it is one."""
    return weight.reshape(-1, *weight.shape[-2:])


def kernels(model: Any, names: Iterable[str]) -> dict[str, Float[np.ndarray, "..."]]:
    """The kernels of layers, unsharded and in fp32, on the host.

    Raises:
        ValueError: a kernel is on devices of other processes.
    """
    layers = linears(model)
    arrays = {}
    for name in names:
        kernel = layers[name].kernel[...]
        if not kernel.is_fully_addressable:
            raise ValueError(
                f"layer {name} is spread over several processes; prune in one process, "
                "from a checkpoint"
            )
        arrays[name] = np.asarray(jax.device_get(kernel)).astype(np.float32)
    return arrays


def replace_linears(
    model: Any, replacements: Mapping[str, Callable[[Linear], nnx.Module]]
) -> Any:
    """A copy of `model`, which shares its arrays, with some modules replaced.

    Args:
        model: The model, which is not changed.
        replacements: The new module for the layer of each name.
    """
    copy = jax.tree.map(lambda x: x, model)
    modules = {".".join(map(str, path)): m for path, m in nnx.iter_modules(copy)}
    layers = linears(copy)
    for name, make in replacements.items():
        parent, _, last = name.rpartition(".")
        setattr(modules[parent], last, make(layers[name]))
    return copy
