r"""Pruning schedules, and training under masks.

A schedule is a sequence of stages, each a step and a sparsity. In `fit` a `Pruner` is a
hook that prunes at the stages and a gradient transform that keeps pruned weights at
zero in between. The masks are part of the optimizer state: they are saved and restored
with it, they change without recompiling the step, and the moments of pruned weights are
zero.
"""

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jaxscale.pruning.config import PruneConfig
from jaxscale.pruning.fours import Fours
from jaxscale.pruning.layers import choose
from jaxscale.pruning.masks import Masks, Scores, apply_masks, make_model_masks
from jaxscale.pruning.scores import magnitude_scores


PAPER_STAGES = (
    *(0.25, 0.35, 0.5, 0.55, 0.6, 0.65),
    *(0.7, 0.75, 0.8, 0.85, 0.9, 0.95),
)
"""Sparsities of the paper's stages for BERT."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """A step of a schedule.

    Example:
        >>> paper = [Stage(step=0, sparsity=0.5), Stage(step=100, sparsity=0.75)]
        >>> max(paper, key=lambda stage: stage.step).sparsity
        0.75
    """

    step: int
    """Prune after this many steps; 0 is before the first."""
    sparsity: float
    """Prune to this sparsity."""


def one_shot(sparsity: float) -> tuple[Stage, ...]:
    """Prune once, before the first step."""
    return (Stage(step=0, sparsity=sparsity),)


def paper_stages(sparsity: float, steps_per_stage: int) -> tuple[Stage, ...]:
    """The paper's list up to `sparsity`, with equally many steps after each stage.

    Args:
        sparsity: Sparsity of the last stage, between 0 and 1.
        steps_per_stage: Training steps per stage.

    Example:
        >>> [stage.sparsity for stage in paper_stages(0.6, 10)]
        [0.25, 0.35, 0.5, 0.55, 0.6]
    """
    below = [each for each in PAPER_STAGES if each < sparsity]
    return _evenly([*below, sparsity], steps_per_stage)


def cubic_stages(
    sparsity: float, stages: int, steps_per_stage: int
) -> tuple[Stage, ...]:
    r"""Fast at first, slower towards the end.

    :math:`s_i = s (1 - (1 - i / n)^3)` for stage :math:`i` of :math:`n`.

    Args:
        sparsity: Sparsity of the last stage, between 0 and 1.
        stages: Number of stages, n.
        steps_per_stage: Training steps per stage.

    Example:
        >>> [round(stage.sparsity, 3) for stage in cubic_stages(0.75, 3, 10)]
        [0.528, 0.722, 0.75]

    References:
        Zhu and Gupta, "To prune, or not to prune" (arXiv 1710.01878).
    """
    if stages < 1:
        raise ValueError(f"stages {stages}, expected at least 1")
    shares = [1 - (1 - i / stages) ** 3 for i in range(1, stages + 1)]
    return _evenly([sparsity * share for share in shares], steps_per_stage)


def _evenly(sparsities: Sequence[float], steps: int) -> tuple[Stage, ...]:
    if steps < 1:
        raise ValueError(f"steps_per_stage {steps}, expected at least 1")
    return tuple(Stage(step=i * steps, sparsity=s) for i, s in enumerate(sparsities))


class MaskState(NamedTuple):
    """The optimizer state of masked gradients."""

    codes: dict[str, Any]
    """Code of each weight, by layer: 0 pruned, 1 in a tile, 2 a single weight, -1
    pruned in a tile. With tw24 also its `Fours`, under longer names."""


_COLUMNS, _ROWS = "_tile_columns", "_tile_rows"  # no dots: names of arrays nest


def mask_gradients(masks: Masks) -> optax.GradientTransformation:
    """Set the gradients of pruned weights to zero.

    It is the first in the chain, before gradient clipping: then clipping and moments
    see only kept weights, and a weight set to zero by `apply_masks` stays zero under
    weight decay and any learning rate.

    Args:
        masks: The first masks; a `Pruner` changes them at its stages.
    """
    codes = _codes(masks)

    def init(params: Any) -> MaskState:
        kernels = {}
        for path, node in _variables(params):
            if (name := _layer(path)) in codes:
                code = jnp.asarray(codes[name])
                kernels[name] = jax.tree.map(lambda _, c=code: c, node)
        for name in set(codes) - set(masks.kept):
            kernels[name] = jnp.asarray(codes[name])
        return MaskState(codes=kernels)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        return _masked(updates, state.codes), state

    return optax.GradientTransformation(init, update)


class Pruner:
    """Prune a model during training, as a hook and a gradient transform of `fit`.

    Example::

        pruner = Pruner(PruneConfig(sparsity=0.75), one_shot(0.75))
        model = pruner.start(model)  # pruned to the sparsity of step 0
        result = fit(
            config,
            model=model,
            hooks=[pruner],
            gradient_transforms=[pruner.transform],
            ...
        )
        masks = pruner.masks_of(result.state)
    """

    def __init__(
        self,
        config: PruneConfig,
        stages: Sequence[Stage],
        *,
        scores: Callable[[Any], Scores] = magnitude_scores,
        update: Callable[[Any, Masks], Any] | None = None,
        on_stage: Callable[[int, Masks], None] | None = None,
    ) -> None:
        """Check the schedule.

        Args:
            config: Pattern and layers; its sparsity is that of the last stage.
            stages: Steps and sparsities, both increasing.
            scores: Importance of the weights of a model; called at each stage.
            update: Changes the kept weights of a model for the masks of a stage, as
                `update_weights` does; None leaves them.
            on_stage: Called with the step and the masks when a stage is done.

        Raises:
            ValueError: there is no stage, or steps or sparsities do not increase.
        """
        if not stages:
            raise ValueError("stages is empty; give at least one, as one_shot does")
        for before, after in itertools.pairwise(stages):
            if before.step >= after.step or before.sparsity > after.sparsity:
                raise ValueError(
                    f"stages {before} and {after}: steps must rise, and sparsities "
                    "must not fall"
                )
            if config.pattern == "tw24" and before.sparsity == after.sparsity:
                raise ValueError(
                    f"stages {before} and {after}: with tw24 sparsities must rise, as "
                    "the last stage alone takes two of four"
                )
        self.config = config
        self.stages = tuple(stages)
        for stage in stages:
            self._config(stage)  # raises
        self._scores = scores
        self._update = update
        self._on_stage = on_stage
        self._first: Masks | None = None

    @property
    def transform(self) -> optax.GradientTransformation:
        """The transform for ``gradient_transforms`` of `fit`; after `start`."""
        if self._first is None:
            raise ValueError("transform is known after start(model); call that first")
        return mask_gradients(self._first)

    def start(self, model: Any) -> Any:
        """A copy of `model`, pruned for the first step.

        Raises:
            ValueError: as `make_model_masks`.
        """
        first = self.stages[0]
        if first.step == 0:
            self._first = self._masks(model, first, None)
            model = self._updated(model, self._first)
        else:
            whole = Stage(step=0, sparsity=0.0)
            plain = dataclasses.replace(self.config, pattern="ew")
            ones = make_model_masks(
                model, magnitude_scores(model), plain.with_sparsity(whole.sparsity)
            )
            self._first = dataclasses.replace(ones, config=self.config)
        if self.config.pattern == "tw24" and not self._first.fours:
            none = {
                name: Fours.none(kept.shape, self.config.tile)
                for name, kept in self._first.kept.items()
            }
            self._first = dataclasses.replace(self._first, fours=none)
        return apply_masks(model, self._first)

    def __call__(self, step: int, state: Any, metrics: Any = None) -> Any:
        """The hook: the pruned state if `step` is a stage, else None.

        Args:
            step: Updates so far.
            state: The `TrainState` after them.
            metrics: Not used; hooks of `fit` are given them.
        """
        del metrics
        stage = next((s for s in self.stages if s.step == step and step), None)
        if stage is None:
            return None
        masks = self._masks(state.model, stage, self.masks_of(state))
        model = self._updated(state.model, masks)
        return set_masks(dataclasses.replace(state, model=model), masks)

    def masks_of(self, state: Any) -> Masks:
        """The current masks of a `TrainState`, for example a restored one.

        Raises:
            ValueError: the state has not been trained with `transform`.
        """
        found = [
            node
            for node in jax.tree.leaves(state.opt_state, is_leaf=_is_masks)
            if _is_masks(node)
        ]
        if len(found) != 1:
            raise ValueError(
                f"the state holds {len(found)} sets of masks, expected one: pass "
                "gradient_transforms=[pruner.transform] to fit"
            )
        codes = {
            name: np.asarray(jax.device_get(jax.tree.leaves(node)[0]))
            for name, node in found[0].codes.items()
        }
        done = [s for s in self.stages if s.step <= int(state.step)]
        config = self._config(done[-1]) if done else self.config.with_sparsity(0.0)
        kernels = {n: c for n, c in codes.items() if not n.endswith((_COLUMNS, _ROWS))}
        fours = {}
        if config.pattern == "tw24" and config.sparsity:
            fours = {
                name: Fours(columns=codes[name + _COLUMNS], rows=codes[name + _ROWS])
                for name in kernels
                if name + _ROWS in codes
            }
        return Masks(
            config=config,
            kept={name: code > 0 for name, code in kernels.items()},
            tiled={name: abs(code) == 1 for name, code in kernels.items()},
            chosen=choose(state.model, self.config.dense),
            fours=fours,
        )

    def _config(self, stage: Stage) -> PruneConfig:
        """The settings of a stage.

        Of tw24 the last stage alone takes two of four, in the tiles that those before
        it have left: a row that went later would leave other fours.
        """
        last = self.config.with_sparsity(self.stages[-1].sparsity)
        if self.config.pattern != "tw24" or stage.sparsity == last.sparsity:
            return self.config.with_sparsity(stage.sparsity)
        tiles = last.whole_rows
        return tiles.with_sparsity(min(stage.sparsity, tiles.sparsity))

    def _updated(self, model: Any, masks: Masks) -> Any:
        return model if self._update is None else self._update(model, masks)

    def _masks(self, model: Any, stage: Stage, previous: Masks | None) -> Masks:
        config = self._config(stage)
        if previous is not None and previous.sparsity == 0:
            previous = None  # nothing is pruned yet, and there are no tiles
        masks = make_model_masks(model, self._scores(model), config, previous=previous)
        if self._on_stage is not None:
            self._on_stage(stage.step, masks)
        return masks


def set_masks(state: Any, masks: Masks) -> Any:
    """A training state with other masks, for the same layers.

    Pruned weights and their moments become zero, and the optimizer keeps them zero.

    Args:
        state: A `TrainState` whose optimizer has `mask_gradients`; it is donated.
        masks: The new masks.
    """
    # The shardings stay the same, as the step was compiled for them.
    places = jax.tree.map(lambda x: x.sharding, state)
    prune = jax.jit(_prune_state, donate_argnums=0, out_shardings=places)
    return prune(state, _codes(masks))


def _prune_state(state: Any, codes: Mapping[str, Any]) -> Any:
    """A training state with pruned weights, and their moments, set to zero."""

    def replace(node: Any) -> Any:
        if not _is_masks(node):
            return node
        return MaskState(
            codes={
                name: jax.tree.map(
                    # Masks of tiles alone have no fours.
                    lambda x, n=name: codes[n] if n in codes else jnp.full_like(x, -1),
                    variable,
                )
                for name, variable in node.codes.items()
            }
        )

    opt_state = jax.tree.map(replace, state.opt_state, is_leaf=_is_masks)
    layers = [name for path, _ in _variables(state.model) if (name := _layer(path))]
    return dataclasses.replace(
        state,
        model=_masked(state.model, codes),
        opt_state=_masked(opt_state, codes, layers),
    )


def _masked(
    tree: Any, codes: Mapping[str, Any], layers: Collection[str] | None = None
) -> Any:
    """A tree with zeros for everything that belongs to pruned weights, for example
    moments.

    Args:
        tree: A model, or a tree with its structure.
        codes: Codes of the masks, by layer.
        layers: Names of all layers, if `tree` has prefixes before them, as for the
            moments of an optimizer; one name may be the end of another.
    """

    def mask(path: Any, node: Any) -> Any:
        name = _layer(path)
        if _is_masks(node) or name is None:
            return node
        if layers is not None:
            ends = [n for n in layers if f".{name}".endswith(f".{n}")]
            name = max(ends, key=len, default="")
        if name not in codes:
            return node
        (kept,) = jax.tree.leaves(codes[name])

        def zeroed(x: jax.Array) -> jax.Array:
            x = jax.device_put(x, jax.memory.Space.Device)  # may be on the host
            return jnp.where(kept > 0, x, jnp.zeros_like(x))

        return jax.tree.map(zeroed, node)

    return jax.tree_util.tree_map_with_path(
        mask, tree, is_leaf=lambda n: isinstance(n, nnx.Variable) or _is_masks(n)
    )


def _variables(tree: Any) -> list[tuple[Any, Any]]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return leaves


def _layer(path: Any) -> str | None:
    """The layer whose kernel a path names."""
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    return name.removesuffix(".kernel") if name.endswith(".kernel") else None


def _is_masks(node: Any) -> bool:
    return isinstance(node, MaskState)


def _codes(masks: Masks) -> dict[str, np.ndarray]:
    found = {}
    for name, kept in masks.kept.items():
        tiled = masks.tiled[name].astype(np.int8)
        found[name] = np.where(kept, 2 - tiled, -tiled)
    for name, fours in masks.fours.items():
        found[name + _COLUMNS], found[name + _ROWS] = fours.columns, fours.rows
    return found
