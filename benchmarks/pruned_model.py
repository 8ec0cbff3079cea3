"""What the pruner keeps of a trained model, at the sizes of a larger one.

``python -m benchmarks.pruned_model`` trains the model of `benchmarks.pruning_accuracy`
on a GPU (seed 0), prunes it by ``tw`` and ``tew`` as `jaxscale.pruning` does by
default, ranked over all layers, trains on under each mask, and writes what
`jaxscale.pruning.sparsify` keeps, with the bits per byte of each model, to
``benchmarks/pruned_model.json``. Benchmarks of speed read that file, and make it on a
GPU where it is missing.

Scaled to a matrix of r times the inputs and c times the outputs, every tile stands for
c tiles, each of which keeps r times as many rows, and every dropped column for c
dropped ones: the shares of the tiles, uneven as they are, the share of the columns and
the sparsity stay exactly what they were. A single weight stands for r c of them, so an
output feature has r times as many. Which rows a tile keeps and which columns are left
is drawn at random, since features of the two models have nothing to do with each other.
Where hidden features are left out, inputs of the down projection are those left.

Of the blocks of the model, the one stands for all whose share of kept weights is
nearest to that of the whole. Seven kinds of matrices are told apart by their names:
query, key, value, out, gate, up and down.

Legend: K input features, N output features, C packed output features, T tiles, P rows
that fit into a tile, G columns of a tile, J single weights of an output feature.
"""

import dataclasses
import fcntl
import functools
import json
import pathlib
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import byte_text, records, timing
from benchmarks.pruning_accuracy import SETUPS, Experiment
from jaxscale import models, pruning
from jaxscale.nn import TileSparseLinear
from pallas_kernels.tile_sparse_matmul import SingleWeights, TileSparse


FILE = pathlib.Path(__file__).parent / "pruned_model.json"
TRAINED = "bytes_34m"
"""Name of the model in `benchmarks.pruning_accuracy.SETUPS`."""
UNTRAINED = "untrained"
"""A small one, pruned by size, for tests and ``--quick``: its bits mean nothing."""

MASKS = ("tw", "tew")
SPARSITIES = (0.5, 0.75, 0.9)
SEED = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What is kept of one matrix."""

    shape: tuple[int, int]
    """K and N of the dense matrix."""
    inputs: int
    """Input features that come: fewer than K where hidden features are left out."""
    packed: bool
    """The outputs that are left stay packed, as the next matrix takes them."""
    counts: tuple[int, ...]
    """Rows that each tile keeps, of the tiles that are left."""
    singles: int = 0
    """Weights outside of tiles."""
    most_singles: int = 0
    """The most of them that an output feature has."""
    tile: int
    """G."""

    @property
    def kept(self) -> float:
        """Share of the weights that are kept."""
        return self.weights / (self.shape[0] * self.shape[1])

    @property
    def weights(self) -> int:
        """Number of weights that are kept."""
        return sum(self.counts) * self.tile + self.singles

    def scaled(self, inputs: int, outputs: int) -> "Part":
        """The same for a matrix of [inputs, outputs].

        Raises:
            ValueError: these are no multiples of K and N.
        """
        rows, columns = inputs // self.shape[0], outputs // self.shape[1]
        if (rows * self.shape[0], columns * self.shape[1]) != (inputs, outputs):
            raise ValueError(
                f"a matrix [{inputs}, {outputs}] is no multiple of the trained one, "
                f"{list(self.shape)}"
            )
        return dataclasses.replace(
            self,
            shape=(inputs, outputs),
            inputs=self.inputs * rows,
            counts=tuple(rows * n for n in self.counts for _ in range(columns)),
            singles=self.singles * rows * columns,
            most_singles=self.most_singles * rows,
        )

    def weight(self, seed: int) -> tuple[TileSparse, SingleWeights | None]:
        """Random values where a mask keeps some, the same mask for every seed."""
        rng = np.random.default_rng(0)
        counts = np.array(self.counts, np.int32)
        unit = 64
        room = -(-counts.max(initial=1) // unit) * unit
        rows = np.zeros((len(counts), room), np.int32)  # [T, P]
        for t, count in enumerate(counts):
            found = np.sort(rng.permutation(self.inputs)[:count])
            rows[t] = np.pad(found, (0, room - count), mode="edge")
        width = len(counts) * self.tile
        columns = None
        if not self.packed:
            columns = jnp.asarray(np.sort(rng.permutation(self.shape[1])[:width]))
        kept = jnp.arange(room) < jnp.asarray(counts)[:, None]  # [T, P]
        values = normal(seed, len(counts), room, self.tile)
        weight = TileSparse(
            jnp.where(kept[:, :, None], values, 0),
            jnp.asarray(rows),
            jnp.asarray(counts),
            columns,
            shape=(self.inputs, width if self.packed else self.shape[1]),
        )
        return weight, self._single_weights(seed)

    def _single_weights(self, seed: int) -> SingleWeights | None:
        """As many of each output feature as the one with the most has room for."""
        if not self.singles:
            return None
        shape = self.most_singles, self.shape[1]  # [J, N]
        keys = jax.random.split(jax.random.key(seed + 1))
        # Apart from each other: one of each stretch of the inputs.
        stretch = self.inputs // self.most_singles
        within = jax.random.randint(keys[0], shape, 0, stretch, jnp.int32)
        starts = stretch * jnp.arange(self.most_singles, dtype=jnp.int32)
        values = jax.random.normal(keys[1], shape, jnp.bfloat16)
        return SingleWeights(values, starts[:, None] + within, self.inputs)


def normal(seed: int, *shape: int) -> jax.Array:
    """Random normal bfloat16."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrunedModel:
    """A trained model under every mask."""

    bits: Mapping[str, float]
    """Held-out bits per byte: of ``dense``, ``int8``, ``two_four``, and of masks by
    `label`; none of an untrained one."""
    parts: Mapping[str, Mapping[str, Part]]
    """By the label of a mask, what is kept of each kind of matrix."""

    def part(self, mask: str, sparsity: float, kind: str) -> Part:
        """What a mask keeps of one kind of matrix."""
        return self.parts[label(mask, sparsity)][kind]

    def bits_of(self, name: str) -> dict[str, float]:
        """The metric ``bits_per_byte`` of a row, if it is known."""
        return {"bits_per_byte": self.bits[name]} if name in self.bits else {}


def label(mask: str, sparsity: float) -> str:
    """The key of a mask in the file."""
    return f"{mask} {sparsity:g}"


@functools.cache
def load(name: str) -> PrunedModel:
    """The model that a case names; the trained one is made if its file is missing.

    Raises:
        NotImplementedError: it is missing and there is no GPU to train it on.
    """
    if name == UNTRAINED:
        return _read(untrained())
    if not FILE.exists():
        if not timing.on_gpu():
            raise NotImplementedError(
                f"{FILE.name} is missing: python -m {__spec__.name} makes it on a GPU"
            )
        with open(FILE.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process trains, the others wait
            if not FILE.exists():
                write(trained())
    return _read(json.loads(FILE.read_text(encoding="utf-8")))


def _read(found: Mapping[str, Any]) -> PrunedModel:
    def part(stored: Mapping[str, Any]) -> Part:
        lists = {k: tuple(stored[k]) for k in ("shape", "counts")}
        return Part(**{**stored, **lists}, tile=found["tile"])

    parts = {
        name: {kind: part(stored) for kind, stored in block.items()}
        for name, block in found["masks"].items()
    }
    return PrunedModel(bits=found["bits_per_byte"], parts=parts)


def write(found: Mapping[str, Any]) -> None:
    """Write the file, one matrix a line."""
    head = {key: value for key, value in found.items() if key != "masks"}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    masks = []
    for name, block in found["masks"].items():
        parts = [f"   {json.dumps(k)}: {json.dumps(v)}" for k, v in block.items()]
        masks.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n  }")
    lines.append(' "masks": {\n' + ",\n".join(masks) + "\n }")
    records.replace(FILE, "{\n" + ",\n".join(lines) + "\n}\n")


# --- Making it ------------------------------------------------------------------------


def trained(name: str = TRAINED) -> dict[str, Any]:
    """Train, prune by every mask, train on, and say what is kept."""
    experiment = Experiment(SETUPS[name], SEED)
    control = experiment.tuned(experiment.whole)[0]
    bits = {
        "dense": experiment.bits(control),
        "int8": experiment.bits(_quantized(control)),
    }
    two_four = experiment.masks("two_four", 0.5)
    bits["two_four"] = experiment.bits(experiment.tuned(two_four)[0])
    kept = {}
    # The host ranks weights for the next masks while the GPU trains.
    with ThreadPoolExecutor(4) as pool:
        pending = {
            label(mask, sparsity): pool.submit(_pruned, experiment, mask, sparsity)
            for mask in MASKS
            for sparsity in SPARSITIES
        }
        for key, future in pending.items():
            masks, kept[key] = future.result()
            bits[key] = experiment.bits(experiment.tuned(masks)[0])
            print(f"{key}: {bits[key]:.4f} bits a byte", flush=True)
    return {
        "model": name,
        "seed": SEED,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "tile": SETUPS[name].tile,
        "bits_per_byte": {key: round(value, 5) for key, value in bits.items()},
        "masks": kept,
    }


def _pruned(experiment: Experiment, mask: str, sparsity: float) -> tuple[Any, dict]:
    """A mask of the pruner's default settings, and what it keeps."""
    config = pruning.PruneConfig(
        pattern=mask, sparsity=sparsity, tile=experiment.setup.tile
    )
    masks = pruning.make_model_masks(experiment.dense, experiment.scores, config)
    return masks, parts_of(experiment.dense, masks)


def _quantized(model: Any) -> Any:
    """The blocks with int8 weights; as under masks, the output projection stays."""
    found = models.quantize(model, "int8")
    found.lm_head = model.lm_head
    return found


def untrained() -> dict[str, Any]:
    """A small model whose rows and columns differ in size, as training makes them."""
    tile = 16
    model = models.Decoder(byte_text.decoder(64, 2, 16, 32), rngs=nnx.Rngs(SEED))
    rng = np.random.default_rng(SEED)
    scores = {}
    for name, size in pruning.magnitude_scores(model).items():
        layers, k, n = size.shape
        wide = np.exp(0.5 * rng.standard_normal((layers, k, 1)))
        scores[name] = size * wide * np.exp(0.5 * rng.standard_normal((layers, 1, n)))
    kept = {}
    for mask in MASKS:
        for sparsity in SPARSITIES:
            config = pruning.PruneConfig(pattern=mask, sparsity=sparsity, tile=tile)
            masks = pruning.make_model_masks(model, scores, config)
            kept[label(mask, sparsity)] = parts_of(model, masks)
    return {"tile": tile, "bits_per_byte": {}, "masks": kept}


def parts_of(model: Any, masks: pruning.Masks) -> dict[str, dict[str, Any]]:
    """What `sparsify` keeps of the matrices of the block nearest to the whole."""
    total = sum(kept[0].size for kept in masks.kept.values())
    shares = sum(kept.sum((1, 2)) for kept in masks.kept.values()) / total  # [L]
    block = int(np.argmin(np.abs(shares - (1 - masks.sparsity))))
    found = {}
    for path, layer in nnx.iter_modules(pruning.sparsify(model, masks)):
        if not isinstance(layer, TileSparseLinear):
            continue
        name = ".".join(map(str, path))
        counts = np.asarray(layer.counts[...])[block, 0]  # [T]; stacks are filled up
        shape = masks.kept[name].shape[1:]
        single = masks.kept[name][block] & ~masks.tiled[name][block]
        found[str(path[-1])] = {
            "shape": [int(n) for n in shape],
            "inputs": int(shape[0]),
            "packed": layer.columns is None,
            "counts": [int(n) for n in counts if n] or [0],
            "singles": int(single.sum()),
            "most_singles": int(single.sum(0).max()),
        }
    if found["up"]["packed"]:  # down takes what is left
        width = len(found["up"]["counts"]) * masks.config.tile
        found["down"]["inputs"] = width
    return found


def main() -> int:
    """Make the file anew."""
    if not timing.on_gpu():
        print("there is no GPU to train on; nothing was written", file=sys.stderr)
        return 1
    write(trained())
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
