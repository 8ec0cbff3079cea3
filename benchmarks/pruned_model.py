"""What the pruner keeps of a trained model, at the sizes of a larger one.

``python -m benchmarks.pruned_model`` trains a model of bytes as
`benchmarks.pruning_accuracy` does, but in the proportions of LLaMA-3 8B, on a GPU (seed
0), prunes it by ``tw``, ``tew`` and ``tw24`` as `jaxscale.pruning` does by
default, ranked over all layers, updates the kept weights, trains on under each mask
(and under 2:4 alike), and writes what
`jaxscale.pruning.sparsify` keeps, with the bits per byte of each model, to
``benchmarks/pruned_model.json``. Benchmarks of speed read that file, and make it on a
GPU where it is missing. Where it is there, masks that it lacks are added, and those of
patterns that the command names (``python -m benchmarks.pruned_model tw tew``) made
anew: their bits are those of the dense model in it and what they lose in the training
at hand.

Scaled to a matrix of r times the inputs and c times the outputs, every tile stands for
c tiles, each of which keeps r times as many rows, and every dropped column for c
dropped ones: the shares of the tiles, uneven as they are, the share of the columns and
the sparsity stay exactly what they were. Rows that are there for single weights are
mostly zeros, as many as in the model. Which rows a tile keeps, which of its values are
zero and which columns are left is drawn at random, since features of the two models
have nothing to do with each other.
Where hidden features are left out, inputs of the down projection are those left.

Every block of the model is there, so that what is timed keeps just what the model does
whose bits per byte stand beside it. Seven kinds of matrices are told apart by their
names: query, key, value, out, gate, up and down. Those of which so much is kept that
`sparsify` leaves them dense are dense here.

Legend: K input features, N output features, C packed output features, T tiles, P rows
that fit into a tile, G columns of a tile.
"""

import dataclasses
import fcntl
import functools
import json
import operator
import pathlib
import sys
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measure import records, timing
from benchmarks.pruning_accuracy import SETUPS, Experiment
from benchmarks.workloads import byte_text
from jaxscale import models, pruning
from jaxscale.models.stack import unstacked
from jaxscale.nn import TileSparseLinear
from jaxscale.nn.linear import Linear
from jaxscale.pruning.layers import linears, replace_linears
from pallas_kernels.tile_sparse_matmul import TileSparse
from pallas_kernels.tile_sparse_matmul.format_24 import BLOCK, random_24


FILE = pathlib.Path(__file__).parent / "pruned_model.json"
TRAINED = "bytes_27m"
"""Name of the model in `benchmarks.pruning_accuracy.SETUPS`: LLaMA-3 8B in proportion,
at an eighth of its width."""
UNTRAINED = "untrained"
"""A small one, pruned by size, for tests and ``--quick``: its bits mean nothing."""

LAYERS = {TRAINED: SETUPS[TRAINED].model.num_layers, UNTRAINED: 2}
"""Blocks of the models."""

MASKS = ("tw", "tew")
SPARSITIES = (0.5, 0.75, 0.9)
SPARSITIES_24 = (0.5, 0.6, 0.65, 0.75, 0.8, 0.85)
"""Of tiles times 2:4 (``tw24``), which keep half of what tiles do."""
SEED = 0
SCALE = 0.02
"""Of weights, as models are initialized."""
UPDATED = "tile_wise_permuted_updated"
"""As all masks are trained: after `pruning.update_weights`."""


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
    weights: int
    """Number of weights that are kept: less than the tiles have where they keep rows
    for single ones."""
    tile: int
    """G."""
    dense: bool = False
    """So much is kept that the layer stays dense."""
    two_of_four: bool = False
    """Two of four weights are kept inside the rows of tiles."""
    granularity: int = 1
    """Rows are kept in aligned groups of so many: 64 where a layer keeps all, in order,
    and nothing is gathered."""

    @property
    def kept(self) -> float:
        """Share of the weights that are kept."""
        return self.weights / (self.shape[0] * self.shape[1])

    @property
    def multiplied(self) -> float:
        """Share of the dense matmul that the tiles take."""
        if self.dense:
            return 1.0
        return sum(self.counts) * self.tile / (self.shape[0] * self.shape[1])

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
            weights=self.weights * rows * columns,
        )

    def weight(self, seed: int) -> Any:
        """Random values where a mask keeps some, the same mask for every seed."""
        rng = np.random.default_rng(0)
        counts = np.array(self.counts, np.int32)
        unit, own = 64, self.granularity
        room = -(-counts.max(initial=1) // unit) * unit
        rows = np.zeros((len(counts), room), np.int32)  # [T, P]
        for t, count in enumerate(counts):
            groups = rng.permutation(self.inputs // own)[: count // own]
            found = np.sort((groups[:, None] * own + np.arange(own)).ravel())
            rows[t, :count] = found
            rows[t, count:] = found[-1] if count else 0
        width = len(counts) * self.tile
        columns = None
        if not self.packed:
            columns = jnp.asarray(np.sort(rng.permutation(self.shape[1])[:width]))
        whole = max(int(counts.sum()) * self.tile, 1)
        all_kept = self.weights == whole or self.two_of_four
        share = None if all_kept else self.weights / whole
        w = TileSparse(
            _values(seed, share, jnp.asarray(counts), room, self.tile),
            jnp.asarray(rows),
            jnp.asarray(counts),
            columns,
            shape=(self.inputs, width if self.packed else self.shape[1]),
            granularity=self.granularity,
        )
        if self.two_of_four:
            return random_24(w, jax.random.key(seed, impl="rbg"))
        return w

    def linear(
        self, layer: Linear, seed: int, *, implementation: str | None = None
    ) -> TileSparseLinear:
        """The sparse form of a dense layer, with random values of its size.

        Args:
            layer: The dense layer; its weight is not read.
            seed: Of the values.
            implementation: Of `tile_sparse_matmul`; None picks one.
        """
        return TileSparseLinear(
            _stacked(self.weight(seed), layer.dtype),
            split=None,
            kernel_axes=layer.kernel_axes,
            out_axes=layer.out_axes,
            zeros_stay=self.weights < sum(self.counts) * self.tile,
            dtype=layer.dtype,
            rules=layer.rules,
            implementation=implementation,
        )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _values(
    seed: int, share: float | None, counts: jax.Array, room: int, tile: int
) -> jax.Array:
    """[T, P, G], random in a share of the values of kept rows; None is all of them."""
    shape = len(counts), room, tile
    kept = (jnp.arange(room) < counts[:, None])[:, :, None]  # [T, P, 1]
    if share is not None:
        key = jax.random.key(0, impl="rbg")
        kept &= jax.random.uniform(key, shape, jnp.float32) < share
    # The bit generator of the hardware: threefry compiles for seconds, and a model has
    # dozens of shapes.
    key = jax.random.key(seed, impl="rbg")
    return jnp.where(kept, jax.random.normal(key, shape, jnp.bfloat16), 0)


@functools.partial(jax.jit, static_argnums=1)  # one program for each shape
def _stacked(weight: Any, dtype: Any) -> Any:
    """A weight of the size that models are initialized with, as a layer has it."""
    values = (weight.values * SCALE).astype(dtype)
    if isinstance(weight, TileSparse):
        return TileSparse.stack([weight.with_values(values)])
    w = dataclasses.replace(weight, values=values)
    return jax.tree.map(lambda leaf: leaf[None], w)


def normal(seed: int, *shape: int) -> jax.Array:
    """Random normal bfloat16."""
    return _normal(seed, shape)


@functools.partial(jax.jit, static_argnums=1)
def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrunedModel:
    """A trained model under every mask."""

    bits: Mapping[str, float]
    """Held-out bits per byte: of ``dense``, ``int8``, ``two_four``, and of masks by
    `label`; none of an untrained one."""
    blocks: Mapping[str, Sequence[Mapping[str, Part]]]
    """By the label of a mask, what is kept of each kind of matrix in each block."""

    def of(self, mask: str, sparsity: float) -> Sequence[Mapping[str, Part]]:
        """What a mask keeps of each block.

        Raises:
            NotImplementedError: the file lacks the mask.
        """
        if (key := label(mask, sparsity)) not in self.blocks:
            raise NotImplementedError(
                f"{FILE.name} lacks {key}: python -m {__spec__.name} adds it on a GPU"
            )
        return self.blocks[key]

    def parts(self, mask: str, sparsity: float, kind: str) -> list[Part]:
        """What a mask keeps of one kind of matrix, block by block."""
        return [block[kind] for block in self.of(mask, sparsity)]

    def layers(
        self, mask: str, sparsity: float, count: int
    ) -> list[Mapping[str, Part]]:
        """What a mask keeps of each block of a model of `count` blocks.

        A block of the trained model stands for as many neighbors as the model has more.
        """
        blocks = self.of(mask, sparsity)
        return [blocks[i * len(blocks) // count] for i in range(count)]

    def bits_of(self, name: str) -> dict[str, float]:
        """The metric ``bits_per_byte`` of a row, if it is known."""
        return {"bits_per_byte": self.bits[name]} if name in self.bits else {}


def layers_for(
    config: models.DecoderConfig, name: str, mask: str, sparsity: float
) -> list[Mapping[str, Part]]:
    """What a mask of a trained model keeps in each block of a decoder, by kind.

    Args:
        config: Of the decoder; its sizes are multiples of the trained model's.
        name: Of the trained model.
        mask: One of `masks`.
        sparsity: Of the mask.
    """
    wide, heads = config.d_model, config.num_heads * config.head_dim
    few = config.num_kv_heads * config.head_dim
    sizes = {
        "query": (wide, heads),
        **dict.fromkeys(("key", "value"), (wide, few)),
        "out": (heads, wide),
        **dict.fromkeys(("gate", "up"), (wide, config.d_ff)),
        "down": (config.d_ff, wide),
    }
    return [
        {kind: part.scaled(*sizes[kind]) for kind, part in block.items()}
        for block in load(name).layers(mask, sparsity, config.num_layers)
    ]


def with_sparse_layers(
    model: Any, blocks: Sequence[Mapping[str, Part]], seed: int
) -> Any:
    """A decoder as `jaxscale.pruning.sparsify` makes it with ``separate``.

    Pruned layers have random values, and those that keep most of their weights stay as
    they are, as `jaxscale serve` has them.

    Args:
        model: The dense decoder, or its shapes; its blocks are not stacked.
        blocks: What each block keeps.
        seed: Of the values.
    """
    makers = {}
    for place, name in enumerate(linears(model)):
        _, block, *path = name.split(".")
        part = blocks[int(block)][path[-1]]
        if not part.dense:
            own = seed + 1000 * (place + 1)
            makers[name] = functools.partial(part.linear, seed=own)
    return replace_linears(model, makers)


def masks() -> list[tuple[str, float]]:
    """All masks and their sparsities."""
    plain = [(mask, sparsity) for mask in MASKS for sparsity in SPARSITIES]
    return [*(("tw24", sparsity) for sparsity in SPARSITIES_24), *plain]


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
                make()
    return _read(json.loads(FILE.read_text(encoding="utf-8")))


def _read(found: Mapping[str, Any]) -> PrunedModel:
    def part(stored: Mapping[str, Any], name: str) -> Part:
        lists = {k: tuple(stored[k]) for k in ("shape", "counts")}
        half = name.startswith("tw24")
        return Part(**{**stored, **lists}, tile=found["tile"], two_of_four=half)

    blocks = {
        name: [{kind: part(own, name) for kind, own in block.items()} for block in each]
        for name, each in found["masks"].items()
    }
    return PrunedModel(bits=found["bits_per_byte"], blocks=blocks)


def write(found: Mapping[str, Any]) -> None:
    """Write the file, one matrix per line."""
    head = {key: value for key, value in found.items() if key != "masks"}
    lines = [f" {json.dumps(k)}: {json.dumps(v)}" for k, v in head.items()]
    masks = []
    for name, blocks in found["masks"].items():
        each = []
        for block in blocks:
            parts = [f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in block.items()]
            each.append("   {\n" + ",\n".join(parts) + "\n   }")
        masks.append(f"  {json.dumps(name)}: [\n" + ",\n".join(each) + "\n  ]")
    lines.append(' "masks": {\n' + ",\n".join(masks) + "\n }")
    records.replace(FILE, "{\n" + ",\n".join(lines) + "\n}\n")


# --- Making it ------------------------------------------------------------------------


def make(
    name: str = TRAINED,
    known: Mapping[str, Any] | None = None,
    anew: Collection[str] = (),
) -> None:
    """Train, prune by every mask, train on, and write what is kept.

    A new file is there once it has every mask: others read it. One that is there grows
    mask by mask.

    Args:
        name: Of the model.
        known: What the file says: masks that it has are left as they are.
        anew: Patterns of which they are not.
    """
    experiment = Experiment(SETUPS[name], SEED)
    control = experiment.tuned(experiment.whole)[0]
    dense = experiment.bits(control)
    print(f"dense: {dense:.4f} bits a byte", flush=True)
    if known is None:
        two_four = experiment.masks("two_four", 0.5)
        known = {
            "model": name,
            "seed": SEED,
            "device": jax.devices()[0].device_kind,
            "jax": jax.__version__,
            "tile": SETUPS[name].tile,
            "bits_per_byte": {
                "dense": dense,
                "int8": experiment.bits(_quantized(control)),
                "two_four": experiment.bits(experiment.tuned(two_four, UPDATED)[0]),
            },
            "masks": {},
        }
    bits, kept = dict(known["bits_per_byte"]), dict(known["masks"])
    wanted = {label(*each) for each in masks()} if not kept else set()
    # The host ranks and updates weights for the next masks while the GPU trains. More
    # threads would wait for the interpreter.
    with ThreadPoolExecutor(2) as pool:
        pending = {
            key: pool.submit(_pruned, experiment, *each)
            for each in masks()
            if (key := label(*each)) not in kept or key not in bits or each[0] in anew
        }
        for key, future in pending.items():
            found, kept[key] = future.result()
            lost = experiment.bits(experiment.tuned(found, UPDATED)[0]) - dense
            bits[key] = bits["dense"] + lost
            print(f"{key}: {bits[key]:.4f} bits a byte", flush=True)
            rounded = {each: round(value, 5) for each, value in bits.items()}
            if wanted <= {*kept}:
                write({**known, "bits_per_byte": rounded, "masks": kept})


def _pruned(experiment: Experiment, mask: Any, sparsity: float) -> tuple[Any, list]:
    """A mask of the pruner, with no bound for a layer, and what it keeps.

    The weights that it leaves are updated here, too: for `Experiment.tuned`.
    """
    config = pruning.PruneConfig(
        pattern=mask,
        sparsity=sparsity,
        max_layer_sparsity=1.0,
        tile=experiment.setup.tile,
    )
    scores = experiment.scored.scores("taylor")
    masks = pruning.make_model_masks(experiment.dense, scores, config)
    experiment.scored.updated(UPDATED, masks)
    return masks, parts_of(experiment.dense, masks)


def _quantized(model: Any) -> Any:
    """The blocks with int8 weights; as under masks, the output projection stays."""
    found = models.quantize(model, "int8")
    found.lm_head = model.lm_head
    return found


def untrained() -> dict[str, Any]:
    """A small model whose rows and columns differ in size, as training makes them."""
    tile = 16
    model = models.Decoder(
        byte_text.decoder(64, LAYERS[UNTRAINED], 16, 32), rngs=nnx.Rngs(SEED)
    )
    rng = np.random.default_rng(SEED)
    scores = {}
    for name, size in pruning.magnitude_scores(model).items():
        layers, k, n = size.shape
        wide = np.exp(0.5 * rng.standard_normal((layers, k, 1)))
        scores[name] = size * wide * np.exp(0.5 * rng.standard_normal((layers, 1, n)))
    kept = {}
    for mask, sparsity in masks():
        pattern: Any = mask
        config = pruning.PruneConfig(pattern=pattern, sparsity=sparsity, tile=tile)
        found = pruning.make_model_masks(model, scores, config)
        kept[label(mask, sparsity)] = parts_of(model, found)
    return {"tile": tile, "bits_per_byte": {}, "masks": kept}


def parts_of(model: Any, masks: pruning.Masks) -> list[dict[str, dict[str, Any]]]:
    """What `sparsify` keeps of the matrices of each block, and which stay dense."""
    compressed = masks.config.pattern == "tw24"  # for which no layer is too full
    sparse = pruning.sparsify(
        model,
        masks,
        dense_above=1.0,
        separate=True,
        compress=compressed and masks.config.tile % BLOCK == 0,
    )
    masks = masks.separated()
    dense = [] if compressed else pruning.dense_layers(unstacked(model), masks)
    found: list[dict[str, dict[str, Any]]] = [{} for _ in sparse.blocks]
    for name in masks:
        _, block, *path = name.split(".")
        layer = operator.attrgetter(".".join(path))(sparse.blocks[int(block)])
        found[int(block)][path[-1]] = {
            "shape": list(masks[name].shape),
            "inputs": layer.shape[0],
            "packed": layer.columns is None,
            "counts": layer.counts[0].tolist(),
            "weights": int(np.count_nonzero(layer.values[...])),
            "dense": name in dense,
            "granularity": layer.granularity,
        }
    return found


def main(anew: Sequence[str] | None = None) -> int:
    """Make the file, or what it lacks, and the patterns that the command names anew."""
    if not timing.on_gpu():
        print("there is no GPU to train on; nothing was written", file=sys.stderr)
        return 1
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else None
    make(known=known, anew=sys.argv[1:] if anew is None else anew)
    print(f"wrote {FILE}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
