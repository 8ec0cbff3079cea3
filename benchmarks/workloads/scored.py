"""A trained model pruned by every pattern and score that benchmarks compare."""

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxscale import pruning


PATTERNS: dict[str, dict[str, Any]] = {
    "element_wise": {"pattern": "ew"},
    "vector_wise": {"pattern": "vw"},
    "block_wise": {"pattern": "bw"},
    "two_four": {"pattern": "2:4"},
    "tile_wise_k": {"pattern": "tw_k"},
    "tile_wise": {"pattern": "tw", "permute": False},
    "tile_wise_narrow": {"pattern": "tw", "permute": False, "narrow": True},
    "tile_wise_apriori": {"pattern": "tw", "permute": False, "apriori": 0.5},
    "tew": {"pattern": "tew", "permute": False, "single_fraction": 0.1},
    "tile_wise_permuted": {"pattern": "tw"},
    "tew_permuted": {"pattern": "tew", "single_fraction": 0.1},
    "tile_wise_bounded": {"pattern": "tw", "bounded": True},
    "tew_bounded": {"pattern": "tew", "single_fraction": 0.03, "bounded": True},
    "tile_24": {"pattern": "tw24", "fours_in_order": False},
    "tile_24_bounded": {"pattern": "tw24", "fours_in_order": False, "bounded": True},
}
"""Settings of `pruning.PruneConfig` by Taylor scores; `narrow` has half the columns in
a tile, and each layer of `bounded` keeps at least 0.6 of the mean share: between 2:4,
which prunes all alike, and a ranking of all that prunes a layer as it likes. Tiles
times 2:4 gather in every layer."""

SCORES: dict[str, dict[str, Any]] = {
    "magnitude": {"score": "magnitude"},
    "wanda": {"score": "wanda", "scope": "layer"},
    "sparsegpt": {"score": "sparsegpt", "scope": "layer", "update": True},
    "updated": {"update": True},
}
"""Other scores and updates, of which `updated` is by Taylor scores."""

SCORED = ("element_wise", "two_four", "tile_wise_permuted", "tew_permuted")

MORE: dict[str, dict[str, Any]] = {
    f"{name}_{more}": PATTERNS[name] | settings
    for name in SCORED
    for more, settings in SCORES.items()
} | {
    f"{name}_updated": PATTERNS[name] | {"update": True}
    for name in ("tile_wise_bounded", "tew_bounded", "tile_24", "tile_24_bounded")
}
"""Some patterns by them."""


class Scored:
    """A dense model with its scores, and what becomes of it."""

    def __init__(
        self,
        model: Any,
        loss: Callable[[Any, Any], Any],
        batches: Sequence[Any],
        *,
        tile: int,
        block: int = 32,
    ) -> None:
        """Describe it; scores are made when they are needed.

        Args:
            model: The dense model.
            loss: Of a model on a batch, a scalar.
            batches: That scores are measured on.
            tile: Columns of a tile.
            block: Side of a block.
        """
        self.model, self.tile, self.block = model, tile, block
        self._loss, self._batches = loss, batches
        self._made: dict[Any, concurrent.futures.Future[Any]] = {}
        self._lock = threading.Lock()

    def _once[T](self, key: Any, make: Callable[[], T]) -> T:
        """What `make` returned for a key; a second thread waits for the first."""
        with self._lock:
            known = self._made.get(key)
            future = known or self._made.setdefault(key, concurrent.futures.Future())
        if known is None:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    @property
    def products(self) -> dict[str, np.ndarray]:
        """Those of the inputs of each layer."""
        of = self.model, self._loss, self._batches
        return self._once("products", lambda: pruning.input_products(*of))

    def scores(self, name: str) -> pruning.Scores:
        """The scores of a name in the command line of `jaxscale prune`."""
        return self._once(name, lambda: self._scored(name))

    def _scored(self, name: str) -> pruning.Scores:
        if name == "magnitude":
            return pruning.magnitude_scores(self.model)
        if name == "sparsegpt":
            return pruning.sparsegpt_scores(self.model, self.products)
        measure = {"taylor": pruning.taylor_scores, "wanda": pruning.wanda_scores}[name]
        return measure(self.model, self._loss, self._batches)

    def masks(self, name: str, sparsity: float) -> pruning.Masks:
        """What a pattern keeps; names that differ in what follows share it."""
        settings = dict((PATTERNS | MORE)[name])
        score = settings.pop("score", "taylor")
        settings.pop("update", None)
        tile = self.tile // 2 if settings.pop("narrow", False) else self.tile
        # The first rows were measured without a bound.
        least = 0.6 * (1 - sparsity) if settings.pop("bounded", False) else 0.0
        config = pruning.PruneConfig(
            **settings,
            sparsity=sparsity,
            max_layer_sparsity=1 - least,
            tile=tile,
            block=self.block,
        )
        return self._once(
            (score, repr(config)),
            lambda: pruning.make_model_masks(self.model, self.scores(score), config),
        )

    def updated(self, name: str, masks: pruning.Masks) -> Any:
        """The dense model, or that whose kept weights make up for the others."""
        if not (PATTERNS | MORE).get(name, {}).get("update"):
            return self.model

        def update() -> tuple[Any, Any]:
            return masks, pruning.update_weights(self.model, masks, self.products)

        # The masks stay, and so does what their id means.
        return self._once(("updated", id(masks)), update)[1]

    def pruned(self, name: str, masks: pruning.Masks) -> Any:
        """The model under masks, before any training."""
        return pruning.apply_masks(self.updated(name, masks), masks)

    def multiplied(self, masks: pruning.Masks) -> float:
        """The part of the dense matmuls of pruned layers that tiles multiply."""

        def count() -> tuple[Any, float]:
            return masks, multiplied(self.model, masks)

        return self._once(("multiplied", id(masks)), count)[1]


def multiplied(model: Any, masks: pruning.Masks) -> float:
    """The part of the dense matmuls of pruned layers that tiles multiply."""
    sparse = pruning.sparsify(model, masks, dense_above=1.0, separate=True)
    masks = masks.separated()
    kept = size = 0
    for name, mask in masks.kept.items():
        layer = functools.reduce(_part, name.split("."), sparse)
        kept += int(np.asarray(layer.counts[...]).sum()) * masks.config.tile
        size += mask.size
    return kept / size


def _part(node: Any, name: str) -> Any:
    return node[int(name)] if name.isdigit() else getattr(node, name)
