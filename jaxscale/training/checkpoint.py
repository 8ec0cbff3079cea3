"""Checkpoints of a run: parameters by name, optimizer, data position, settings."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
from flax import nnx


_ITEMS = ("state", "data", "config")


class Checkpointer:
    """Saves the state of a run in the background, and brings it back on any mesh.

    A checkpoint is a directory named by its step with three items: ``state`` (arrays
    under the path of each parameter, so that it outlives changes of the code), ``data``
    (position of the data iterator) and ``config`` (settings of the run). It becomes
    visible by a rename when all of it is written: what a killed process leaves behind
    is ignored, and removed when the next run opens the directory.

    Example:
        >>> import tempfile, jax.numpy as jnp
        >>> directory = tempfile.mkdtemp()
        >>> with Checkpointer(directory) as checkpointer:
        ...     checkpointer.save(3, {"w": jnp.arange(4.0)}, {"row": 12})
        >>> with Checkpointer(directory, read_only=True) as checkpointer:
        ...     state, data = checkpointer.restore({"w": jnp.zeros(4)})
        >>> state["w"].tolist(), data
        ([0.0, 1.0, 2.0, 3.0], {'row': 12})
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        config: Mapping[str, Any] | None = None,
        read_only: bool = False,
    ) -> None:
        """Open, and if needed make, a directory of checkpoints.

        Args:
            directory: Of this run alone.
            keep: How many of the newest checkpoints are kept.
            keep_every: Checkpoints at multiples of this step are kept for good.
            config: Settings that decide what the run computes, as JSON. They are saved
                with each checkpoint and compared when one is restored.
            read_only: Neither save nor clean up, for example beside a running job.

        Raises:
            ImportError: Orbax is not installed.
            ValueError: `keep` or `keep_every` is not positive.
        """
        if keep < 1:
            raise ValueError(f"keep {keep} must be at least 1 checkpoint")
        if keep_every is not None and keep_every < 1:
            raise ValueError(
                f"keep_every {keep_every} must be at least 1 step, or None"
            )
        self.directory = Path(directory).resolve()
        self._config = dict(config or {})
        self._orbax = ocp = _require_orbax()
        policies = ocp.checkpoint_managers
        preserve = [policies.LatestN(keep)]
        if keep_every is not None:
            preserve.append(policies.EveryNSteps(keep_every))
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policies.AnyPreservationPolicy(preserve),
                create=not read_only,
                cleanup_tmp_directories=not read_only,
                read_only=read_only,
            ),
            item_names=_ITEMS,
            item_handlers={
                "state": ocp.PyTreeCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "config": ocp.JsonCheckpointHandler(),
            },
        )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, data_state: Mapping[str, Any]) -> None:
        """Copy `state` to the host and write it in the background.

        The arrays may be donated once this returns. A step that is there already is
        left as it is.

        Args:
            step: Name of the checkpoint.
            state: Any pytree of arrays, for example a `TrainState`.
            data_state: Position of the data iterator, as JSON.
        """
        if step in self._manager.all_steps():
            return
        args = self._orbax.args
        self._manager.save(
            step,
            args=args.Composite(
                state=args.PyTreeSave(_nest(named_leaves(state))),
                data=args.JsonSave(dict(data_state)),
                config=args.JsonSave(self._config),
            ),
            force=True,
        )

    def restore[S](
        self, target: S, step: int | None = None
    ) -> tuple[S, dict[str, Any]]:
        """The state and the data position of a checkpoint.

        Args:
            target: Arrays or `jax.ShapeDtypeStruct` with the wanted structure, types
                and shardings, on whatever mesh.
            step: Which checkpoint; None is the newest.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            ValueError: the settings of the run or the parameters differ; the message
                names them.
        """
        step = self._find(step)
        args = self._orbax.args
        items = self._manager.restore(
            step,
            args=args.Composite(data=args.JsonRestore(), config=args.JsonRestore()),
        )
        self._check_config(step, items["config"])
        return self._restore_arrays(target, step, prefix=""), dict(items["data"])

    def restore_model[M](self, target: M, step: int | None = None) -> M:
        """The model alone, without the optimizer, for evaluation and generation.

        Args:
            target: Module with the wanted types and shardings, for example abstract.
            step: Which checkpoint; None is the newest.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            ValueError: the parameters differ; the message names them.
        """
        return self._restore_arrays(target, self._find(step), prefix="model.")

    def config(self, step: int | None = None) -> dict[str, Any]:
        """The settings that a checkpoint was made with.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
        """
        args = self._orbax.args
        restored = self._manager.restore(
            self._find(step), args=args.Composite(config=args.JsonRestore())
        )
        return dict(restored["config"])

    def wait(self) -> None:
        """Return when everything is on disk; raises what went wrong on the way."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait and release the threads."""
        self._manager.close()

    def _find(self, step: int | None) -> int:
        steps = self.steps
        if not steps:
            raise FileNotFoundError(
                f"there is no checkpoint in {self.directory}; give the output "
                "directory of a run that has saved one"
            )
        if step is not None and step not in steps:
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.directory}, only of "
                f"{steps}"
            )
        return steps[-1] if step is None else step

    def _check_config(self, step: int, saved: Mapping[str, Any]) -> None:
        ours, theirs = _flatten(self._config), _flatten(saved)
        differences = [
            f"{name} {theirs.get(name)!r} (now {ours.get(name)!r})"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
        if differences:
            raise ValueError(
                f"checkpoint {step} in {self.directory} belongs to another run, with "
                f"{', '.join(differences)}; set these back or choose another output_dir"
            )

    def _restore_arrays[S](self, target: S, step: int, *, prefix: str) -> S:
        wanted = {prefix + name: leaf for name, leaf in named_leaves(target).items()}
        saved = self._manager.item_metadata(step).state.tree
        found = {n: x for n, x in _flatten(saved).items() if n.startswith(prefix)}
        self._check_arrays(step, wanted, found)
        abstract = _nest(
            {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for name, x in wanted.items()
            }
        )
        ocp = self._orbax
        restored = self._manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.PyTreeRestore(
                    abstract,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                    partial_restore=bool(prefix),
                )
            ),
        )
        arrays = _flatten(restored["state"])
        return jax.tree.unflatten(
            jax.tree.structure(target), [arrays[name] for name in wanted]
        )

    def _check_arrays(
        self, step: int, wanted: Mapping[str, Any], found: Mapping[str, Any]
    ) -> None:
        problems = [f"lacks {name}" for name in wanted if name not in found]
        problems += [f"has {name} too" for name in found if name not in wanted]
        problems += [
            f"has {name} of shape {tuple(found[name].shape)} instead of {x.shape}"
            for name, x in wanted.items()
            if name in found and tuple(found[name].shape) != tuple(x.shape)
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"checkpoint {step} in {self.directory} does not fit this model and "
                f"optimizer: it {', '.join(problems[:5])}{more}; use the settings that "
                "it was made with"
            )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path, for example ``model.blocks.mlp.up.kernel``.

    The value of an `nnx.Variable` has the name of the variable.

    Example:
        >>> named_leaves({"a": [1, 2], "b": {"c": 3}})
        {'a.0': 1, 'a.1': 2, 'b.c': 3}
    """
    variables, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, nnx.Variable)
    )
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, node in variables
        for leaf in jax.tree.leaves(node)
    }


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Names with dots as dictionaries of dictionaries."""
    nested: dict[str, Any] = {}
    for name, leaf in flat.items():
        *parents, last = name.split(".")
        node = nested
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return nested


def _flatten(nested: Any, prefix: str = "") -> dict[str, Any]:
    """The inverse of `_nest`; lists are compared as a whole."""
    if not isinstance(nested, Mapping):
        return {prefix: nested}
    flat: dict[str, Any] = {}
    for key, node in nested.items():
        flat |= _flatten(node, f"{prefix}.{key}" if prefix else str(key))
    return flat


def _require_orbax() -> ModuleType:
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(
            "jaxscale.training.checkpoint needs Orbax: pip install 'jaxscale[train]'"
        ) from error
    return ocp
