"""Masks of a model: made from scores, applied, saved and loaded."""

import dataclasses
import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy
from flax import nnx
from jaxtyping import Bool, Float

from jaxscale.nn.linear import Linear
from jaxscale.pruning.config import PruneConfig
from jaxscale.pruning.fours import Fours
from jaxscale.pruning.layers import (
    check_dense,
    choose,
    feed_forwards,
    layer_names,
    linears,
    matrices,
)
from jaxscale.pruning.matrix import Matrix
from jaxscale.pruning.tilewise import check_units, make_masks


type Scores = Mapping[str, Float[np.ndarray, "..."]]
"""Importance of each weight, by the name of the layer; [L, K, N] for a stack."""

_VERSION = "2"
_WITHOUT_DIGEST = "1"
"""The previous version, whose files have no digest to check."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Masks:
    """The masks of all chosen layers.

    Example:
        >>> from jaxscale.models import Decoder, preset
        >>> from jaxscale.pruning import magnitude_scores, make_model_masks
        >>> model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> config = PruneConfig(pattern="tw", tile=8, sparsity=0.75)
        >>> masks = make_model_masks(model, magnitude_scores(model), config)
        >>> masks.sparsity, masks["blocks.mlp.up"].shape
        (0.75, (2, 32, 64))
    """

    config: PruneConfig
    """Settings that the masks were made from."""
    kept: Mapping[str, Bool[np.ndarray, "..."]]
    """The mask of each layer by name, [K, N] or [L, K, N]: true where a weight is kept.
    Layers of a stack that stay dense keep everything."""
    tiled: Mapping[str, Bool[np.ndarray, "..."]]
    """The part of each mask in tiles: all but the single weights of ``tew``."""
    chosen: Mapping[str, list[int]]
    """The indices in each stack that were pruned."""
    fours: Mapping[str, Fours] = dataclasses.field(default_factory=dict)
    """With tw24, the tiles of each layer and the order of their rows."""

    def __getitem__(self, name: str) -> Bool[np.ndarray, "..."]:
        return self.kept[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.kept)

    def of(self, names: Collection[str]) -> "Masks":
        """The masks of some of the layers."""

        def some[T](table: Mapping[str, T]) -> dict[str, T]:
            return {name: x for name, x in table.items() if name in names}

        return dataclasses.replace(
            self,
            kept=some(self.kept),
            tiled=some(self.tiled),
            chosen=some(self.chosen),
            fours=some(self.fours),
        )

    @property
    def sparsity(self) -> float:
        """The fraction of the chosen layers' weights that is pruned."""
        parts = [
            matrices(self.kept[name])[i]
            for name, places in self.chosen.items()
            for i in places
        ]
        return 1 - sum(int(p.sum()) for p in parts) / sum(p.size for p in parts)

    def separated(self) -> "Masks":
        """The masks of the unstacked model.

        Of a stack ``blocks.mlp.up`` the mask of the first layer is that of
        ``blocks.0.mlp.up``. Layers that were not chosen are left out.
        """
        kept, tiled, chosen, fours = {}, {}, {}, {}
        for name, places in self.chosen.items():
            blocks, _, rest = name.partition(".")
            for i in places:
                stacked = blocks == "blocks" and self.kept[name].ndim == 3
                each = f"{blocks}.{i}.{rest}" if stacked else name
                kept[each] = self.kept[name][i] if stacked else self.kept[name]
                tiled[each] = self.tiled[name][i] if stacked else self.tiled[name]
                chosen[each] = [0]
                if name in self.fours:
                    fours[each] = self.fours[name].layer(i)
        return dataclasses.replace(
            self, kept=kept, tiled=tiled, chosen=chosen, fours=fours
        )

    def save(self, path: str | Path) -> None:
        """Write the masks into a safetensors file, one bit per weight."""
        tensors, shapes = {}, {}
        for name, kept in self.kept.items():
            tensors[f"{name}.kept"] = np.packbits(kept)
            tensors[f"{name}.tiled"] = np.packbits(self.tiled[name])
            shapes[name] = list(kept.shape)
        for name, fours in self.fours.items():
            tensors[f"{name}.columns"] = fours.columns
            tensors[f"{name}.rows"] = fours.rows
        header = {
            "format": "jaxscale_masks",
            "version": _VERSION,
            "config": json.dumps(
                dataclasses.asdict(self.config),
                default=lambda number: number.item(),  # of numpy
            ),
            "shapes": json.dumps(shapes),
            "chosen": json.dumps({n: list(p) for n, p in self.chosen.items()}),
        }
        header["digest"] = _digest(header, tensors)
        # `save_file` would make a file that only its owner can read.
        Path(path).write_bytes(safetensors.numpy.save(tensors, metadata=header))

    @classmethod
    def load(cls, path: str | Path) -> "Masks":
        """Read masks that `save` wrote.

        Raises:
            ValueError: the file is not a file of masks, of another version, or damaged;
                a version without a digest is read unchecked.
        """
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                header = file.metadata() or {}
                bits = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from error
        version = header.get("version")
        known = version in (_VERSION, _WITHOUT_DIGEST)
        if header.get("format") != "jaxscale_masks" or not known:
            raise ValueError(
                f"{path} holds {header.get('format')!r} of version {version!r}, "
                f"expected jaxscale_masks {_VERSION}; prune again"
            )
        digest = header.pop("digest", None)
        if version != _WITHOUT_DIGEST and digest != _digest(header, bits):
            raise ValueError(
                f"{path} is damaged: its digest differs; bring the file back, or prune "
                "again"
            )
        try:
            return cls._from_file(header, bits)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error

    @classmethod
    def _from_file(
        cls, header: Mapping[str, str], bits: Mapping[str, np.ndarray]
    ) -> "Masks":
        shapes = json.loads(header["shapes"])

        def unpack(part: str) -> dict[str, np.ndarray]:
            found = {}
            for name, shape in shapes.items():
                packed, size = bits[f"{name}.{part}"], math.prod(shape)
                if packed.size != -(-size // 8):
                    raise ValueError(f"{name}.{part} has {packed.size} bytes")
                mask = np.unpackbits(packed, count=size).reshape(shape)
                found[name] = mask.astype(np.bool_)
            return found

        fours = {}
        for name, shape in shapes.items():
            if f"{name}.rows" in bits:
                columns, rows = bits[f"{name}.columns"], bits[f"{name}.rows"]
                fours[name] = Fours(columns=columns, rows=rows)
                if rows.shape[:-2] != tuple(shape[:-2]) or rows.shape[-1] != shape[-2]:
                    raise ValueError(f"{name}.rows has shape {rows.shape}")
        config = json.loads(header["config"])
        return cls(
            config=PruneConfig(**config | {"dense": tuple(config["dense"])}),
            kept=unpack("kept"),
            tiled=unpack("tiled"),
            chosen=json.loads(header["chosen"]),
            fours=fours,
        )


def _digest(header: Mapping[str, str], bits: Mapping[str, np.ndarray]) -> str:
    """A digest of the contents of a file of masks."""
    digest = hashlib.sha256(json.dumps(header, sort_keys=True).encode())
    for name in sorted(bits):
        digest.update(f"{name} {bits[name].dtype} {bits[name].shape}".encode())
        digest.update(bits[name].tobytes())
    return digest.hexdigest()


def make_model_masks(
    model: Any,
    scores: Scores,
    config: PruneConfig,
    *,
    previous: Masks | None = None,
) -> Masks:
    """The masks of the layers of a model, ranked together.

    Args:
        model: Any model of `jaxscale.nn.Linear` layers.
        scores: Importance of each weight, as `magnitude_scores` gives it.
        config: Pattern, sparsity, layers.
        previous: Masks of an earlier stage; weights that they pruned stay pruned.

    Raises:
        ValueError: a name in ``config.dense`` is unknown, the model is sparse already,
            scores are missing or have another shape than the weight, units do not
            divide a layer, or `previous` has pruned more.
    """
    chosen = choose(model, config.dense)
    layers = linears(model)
    related = _related(model) if config.hidden_together else {}
    entries: list[Matrix] = []
    for name in sorted(chosen, key=lambda name: name in related):
        places = chosen[name]
        shape = layers[name].kernel.shape
        score = _of_layer(scores, name, shape, "scores")
        before: list[np.ndarray] | None = None
        if previous is not None:
            before = [
                matrices(_of_layer(part, name, shape, "masks before"))
                for part in (previous.kept, previous.tiled)
            ]
        rows, columns = layer_shards(layers[name], config.shards)
        shares, fed_by = related.get(name, (None, None))
        for i in places:
            entries.append(
                Matrix(
                    name=layer_names(name, shape)[i],
                    scores=matrices(score)[i],
                    shares=shares and layer_names(shares, shape)[i],
                    fed_by=fed_by and layer_names(fed_by, shape)[i],
                    previous=None if before is None else before[0][i],
                    previous_tiled=None if before is None else before[1][i],
                    row_shards=rows,
                    column_shards=columns,
                )
            )
    names = [entry.name for entry in entries]
    made = dict(zip(names, make_masks(entries, config), strict=True))
    kept, tiled, fours = {}, {}, {}
    for name, places in chosen.items():
        shape = layers[name].kernel.shape
        kept[name] = np.ones(shape, np.bool_)
        tiled[name] = np.ones(shape, np.bool_)
        for i in places:
            mask = made[layer_names(name, shape)[i]]
            matrices(kept[name])[i] = mask.kept
            matrices(tiled[name])[i] = mask.tiled
            if mask.fours is not None:
                if name not in fours:
                    fours[name] = Fours.none(shape, config.tile)
                own = fours[name].layer(i)
                own.columns[...], own.rows[...] = mask.fours.columns, mask.fours.rows
    return Masks(config=config, kept=kept, tiled=tiled, chosen=chosen, fours=fours)


def _related(model: Any) -> dict[str, tuple[str | None, str | None]]:
    """Map each layer to the one that shares its columns and the one that feeds it."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for network in feed_forwards(model):
        first, *others = network.inputs
        found |= dict.fromkeys(others, (first, None))
        found[network.down] = (None, first)
    return found


def check_layers(model: Any, config: PruneConfig) -> None:
    """Raise the errors of `make_model_masks`, before scores are made.

    Args:
        model: An NNX module.
        config: Pattern, sparsity and layers.

    Raises:
        ValueError: a name in ``config.dense`` is unknown, no layer is left, the model
            is sparse already, or units do not divide a layer.
    """
    layers = linears(model)
    chosen = choose(model, config.dense)
    if not chosen:
        make_masks([], config)  # raises
    for name, places in chosen.items():
        shape = layers[name].kernel.shape
        rows, columns = layer_shards(layers[name], config.shards)
        for i in places:
            matrix = Matrix(
                name=layer_names(name, shape)[i],
                scores=np.broadcast_to(np.float32(1), shape[-2:]),
                row_shards=rows,
                column_shards=columns,
            )
            check_units(matrix, config)


def apply_masks(model: Any, masks: Masks) -> Any:
    """A copy of `model` in which every pruned weight is zero.

    Args:
        model: An NNX module with the layers that the masks name.
        masks: From `make_model_masks`.

    Raises:
        ValueError: the model lacks a layer of the masks, its weight has another shape,
            or it is sparse already.

    Example:
        >>> from flax import nnx
        >>> from jaxscale import models, pruning
        >>> model = models.Decoder(models.preset("llama_tiny"), rngs=nnx.Rngs(0))
        >>> config = pruning.PruneConfig(sparsity=0.75, tile=8)
        >>> scores = pruning.magnitude_scores(model)
        >>> masks = pruning.make_model_masks(model, scores, config)
        >>> up = pruning.apply_masks(model, masks).blocks.mlp.up.kernel[...]
        >>> bool((up == 0).mean() > 0.5)
        True
    """
    check_masks(model, masks)
    layers = linears(model)
    arrays = {
        name: jax.device_put(kept, layers[name].kernel[...].sharding)
        for name, kept in masks.kept.items()
    }

    def mask(path: tuple[Any, ...], node: Any) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        kept = arrays.get(name.removesuffix(".kernel"))
        if kept is None or not name.endswith(".kernel"):
            return jax.tree.map(jnp.copy, node)
        return jax.tree.map(lambda w: jnp.where(kept, w, jnp.zeros_like(w)), node)

    return jax.tree_util.tree_map_with_path(
        mask, model, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )


def check_masks(model: Any, masks: Masks) -> None:
    """Raise if masks do not fit a model.

    Raises:
        ValueError: as `apply_masks`.
    """
    check_dense(model)
    layers = linears(model)
    for name, kept in masks.kept.items():
        if name not in layers:
            raise ValueError(
                f"the masks are for a layer {name}, which the model lacks; its layers "
                f"are {', '.join(layers)}"
            )
        shape = layers[name].kernel.shape
        for mask in (kept, masks.tiled[name]):
            if mask.shape != shape:
                raise ValueError(
                    f"the mask of layer {name} has shape {mask.shape}, expected "
                    f"{shape} as its weight has"
                )
            if mask.dtype != np.bool_:
                raise ValueError(
                    f"the mask of layer {name} has type {mask.dtype}, expected bool"
                )


def _of_layer(
    table: Mapping[str, np.ndarray], name: str, shape: tuple[int, ...], what: str
) -> np.ndarray:
    if name not in table:
        raise ValueError(
            f"{what} lack the layer {name}; make them from this model, with the same "
            "layers left dense"
        )
    if table[name].shape != tuple(shape):
        raise ValueError(
            f"the {what} of layer {name} have shape {table[name].shape}, expected "
            f"{tuple(shape)} as its weight has"
        )
    return table[name]


def layer_shards(layer: Linear, number: int) -> tuple[int, int]:
    """Return into how many of `number` shards rows and columns of a layer are split."""
    row, column = (
        number if axis is not None and "tensor" in layer.rules.mesh_axes([axis]) else 1
        for axis in layer.kernel_axes
    )
    return row, column
