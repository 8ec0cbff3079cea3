"""Checkpoints of a run: parameters by name, optimizer, data position, settings."""

import contextlib
import functools
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from jaxscale.training.stack_moves import StackMove, stack_ranks


logger = logging.getLogger("jaxscale.training")

_ITEMS = ("state", "data", "config")


class DamagedCheckpoint(ValueError):
    """Files of a checkpoint are missing or cut off; its message names it."""


class Checkpointer:
    """Saves the state of a run in the background, and brings it back on any mesh.

    A checkpoint is a directory named by its step with three items: ``state`` (arrays
    under the path of each parameter, so that it outlives changes of the code), ``data``
    (position of the data iterator) and ``config`` (settings of the run). It becomes
    visible by a rename when all of it is written: what a killed process leaves behind
    is ignored, and removed when the next run opens the directory. Where the newest one
    cannot be read, for example after a disk was full, the one before is taken, with a
    line on the log; a directory that lacks an item counts for nothing. Of several
    processes all take the same one, which each of them can read.

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
            directory: Directory for this run alone.
            keep: Number of the newest checkpoints that are kept.
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
        if not read_only:  # Orbax would count them among those to keep
            whole = complete_steps(self.directory)
            _set_aside(self.directory, set(_numbered(self.directory)) - set(whole))
        items: dict[str, Any] = {
            "item_names": _ITEMS,
            "item_handlers": {
                "state": ocp.PyTreeCheckpointHandler(),
                "data": ocp.JsonCheckpointHandler(),
                "config": ocp.JsonCheckpointHandler(),
            },
        }
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
            **items,
        )
        self._reader = self._manager
        if jax.process_count() > 1:
            # Orbax ends each restore with a meeting of all processes, to which one that
            # cannot read would not come. Each reads alone; what is taken, they agree.
            me = jax.process_index()
            self._reader = ocp.CheckpointManager(
                self.directory,
                options=ocp.CheckpointManagerOptions(
                    create=False,
                    read_only=True,
                    multiprocessing_options=ocp.options.MultiprocessingOptions(
                        primary_host=me,
                        active_processes={me},
                        barrier_sync_key_prefix=f"process_{me}",
                    ),
                ),
                **items,
            )

    def __enter__(self) -> "Checkpointer":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps of which there is a complete checkpoint, oldest first."""
        return complete_steps(self.directory)

    def newest(self) -> int | None:
        """The newest of `steps`, as process 0 sees them; all processes must ask."""
        newest = _of_first(max(self.steps, default=-1))
        return None if newest < 0 else newest

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
            step: Step of the checkpoint; None is the newest that can be read.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            DamagedCheckpoint: that of `step`, or every one, cannot be read.
            ValueError: the settings of the run or the parameters differ; the message
                names them.
        """
        args = self._orbax.args

        def read(step: int) -> tuple[S, dict[str, Any]]:
            with self._reading(step):
                items = self._reader.restore(
                    step,
                    args=args.Composite(
                        data=args.JsonRestore(), config=args.JsonRestore()
                    ),
                )
                data, config = dict(items["data"]), dict(items["config"])
            self._check_config(step, config)
            return self._restore_arrays(target, step, prefix=""), data

        return self._newest(read, step)

    def restore_model[M](self, target: M, step: int | None = None) -> M:
        """The model alone, without the optimizer, for evaluation and generation.

        Args:
            target: Module with the wanted types and shardings, for example abstract.
            step: Step of the checkpoint; None is the newest that can be read.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            DamagedCheckpoint: that of `step`, or every one, cannot be read.
            ValueError: the parameters differ; the message names them.
        """

        def read(step: int) -> M:
            return self._restore_arrays(target, step, prefix="model.")

        return self._newest(read, step)

    def config(self, step: int | None = None) -> dict[str, Any]:
        """The settings that a checkpoint was made with.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            DamagedCheckpoint: that of `step`, or every one, cannot be read.
        """
        args = self._orbax.args

        def read(step: int) -> dict[str, Any]:
            with self._reading(step):
                restored = self._reader.restore(
                    step, args=args.Composite(config=args.JsonRestore())
                )
                return dict(restored["config"])

        return self._newest(read, step)

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps; see the function of this name."""
        set_aside_after(self.directory, step)
        self._manager.reload()

    def wait(self) -> None:
        """Return when everything is on disk; raises what went wrong on the way."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Wait and release the threads."""
        self._manager.close()
        if self._reader is not self._manager:
            self._reader.close()

    def _newest[R](self, read: Callable[[int], R], step: int | None) -> R:
        """What `read` finds in the checkpoint of `step`, or in the newest it can.

        All processes read the same one, which process 0 names, and take it if all can.
        """
        self.wait()  # for one that this process still writes
        steps = self.steps
        chosen = _of_first(max(steps, default=-1) if step is None else step)
        if chosen < 0:
            raise FileNotFoundError(
                f"there is no checkpoint in {self.directory}; give the output "
                "directory of a run that has saved one"
            )
        if step is not None and not _of_first(step in steps):
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.directory}, only of "
                f"{steps}"
            )
        while chosen >= 0:
            result, problem = _on_all(functools.partial(read, chosen))
            if problem is None:
                return result  # pyright: ignore[reportReturnType]
            if step is not None:
                raise DamagedCheckpoint(problem)
            if jax.process_index() == 0:
                logger.warning("%s", problem)
            chosen = _of_first(max((s for s in steps if s < chosen), default=-1))
        raise DamagedCheckpoint(
            f"no checkpoint in {self.directory} can be read; choose another output_dir"
        )

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Errors of the file formats, many lines long, as `DamagedCheckpoint`."""
        try:
            yield
        except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise  # the machine's fault
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            raise DamagedCheckpoint(
                f"checkpoint {step} in {self.directory} is damaged and not used "
                f"({type(error).__name__}: {reason[:100]})"
            ) from error

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
        with self._reading(step):
            metadata = self._reader.item_metadata(step).state
            if metadata is None:
                raise FileNotFoundError("state/_METADATA")
            saved = _flatten(metadata.tree)
        found = {name: x for name, x in saved.items() if name.startswith(prefix)}
        moves = self._moves(target, wanted, found, prefix)
        self._check_arrays(step, wanted, found, moves)
        read = {name: move.saved for name, move in moves.items()}
        abstract = _nest(
            {
                name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
                for name, x in {**wanted, **read}.items()
            }
        )
        ocp = self._orbax
        args = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=bool(prefix),
        )
        with self._reading(step):
            restored = self._reader.restore(step, args=ocp.args.Composite(state=args))
        arrays = _flatten(restored["state"])
        for name, move in moves.items():
            arrays[name] = move(arrays[name])
        return jax.tree.unflatten(
            jax.tree.structure(target), [arrays[name] for name in wanted]
        )

    def _moves(
        self,
        target: Any,
        wanted: Mapping[str, Any],
        found: Mapping[str, Any],
        prefix: str,
    ) -> dict[str, StackMove]:
        """How stacks that were saved for other stages of a pipeline come over."""
        moves = {}
        model = self._config.get("model")
        num_layers = model.get("num_layers") if isinstance(model, Mapping) else None
        for path, lead in stack_ranks(target).items():
            name = prefix + path
            if name not in found:
                continue
            saved, x = tuple(found[name].shape), wanted[name]
            if saved != tuple(x.shape):
                move = StackMove.between(saved, x, lead, num_layers)
                moves |= {} if move is None else {name: move}
        return moves

    def _check_arrays(
        self,
        step: int,
        wanted: Mapping[str, Any],
        found: Mapping[str, Any],
        moved: Collection[str],
    ) -> None:
        problems = [f"lacks {name}" for name in wanted if name not in found]
        problems += [f"has {name} too" for name in found if name not in wanted]
        problems += [
            f"has {name} of shape {tuple(found[name].shape)} instead of {x.shape}"
            for name, x in wanted.items()
            if name in found
            and name not in moved
            and tuple(found[name].shape) != tuple(x.shape)
        ]
        if problems:
            more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
            raise ValueError(
                f"checkpoint {step} in {self.directory} does not fit this model and "
                f"optimizer: it {', '.join(problems[:5])}{more}; use the settings that "
                "it was made with"
            )


def complete_steps(directory: str | os.PathLike[str]) -> list[int]:
    """The steps of which there is a checkpoint with all its items, oldest first.

    Args:
        directory: Directory of the checkpoints; it need not exist.
    """
    path = Path(directory)
    return sorted(
        step
        for step in _numbered(path)
        if all((path / str(step) / item).is_dir() for item in _ITEMS)
    )


def set_aside_after(directory: str | os.PathLike[str], step: int) -> None:
    """Rename the checkpoints of later steps than `step`, ``12`` to ``12.aside``.

    A run that is continued from `step` then writes its own.

    Args:
        directory: Directory of the checkpoints; no `Checkpointer` may be writing to it.
        step: The newest that stays.
    """
    path = Path(directory)
    _set_aside(path, {other for other in _numbered(path) if other > step})


def _set_aside(directory: Path, steps: set[int]) -> None:
    if jax.process_index() == 0:
        for step in steps:
            aside = directory / f"{step}.aside"
            shutil.rmtree(aside, ignore_errors=True)
            (directory / str(step)).rename(aside)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("checkpoints set aside")


def _numbered(directory: Path) -> list[int]:
    """The entries whose name is a step, complete or not."""
    names = [path.name for path in directory.glob("*")]
    return [int(name) for name in names if name.isdecimal() and name == str(int(name))]


def _of_first(number: int) -> int:
    """The number that process 0 gives."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def _on_all[R](read: Callable[[], R]) -> tuple[R | None, str | None]:
    """What `read` finds, or why the first process that finds damage cannot read.

    Raises:
        RuntimeError: another process ran into something other than damage.
    """
    result, error, text = None, None, ""
    try:
        result = read()
    except Exception as caught:
        error, text = caught, f"{type(caught).__name__}: {caught}"
    failed = [(process, text) for process, text in enumerate(_texts(text)) if text]
    if not failed:
        return result, None
    damage = f"{DamagedCheckpoint.__name__}: "
    for process, text in failed:
        if not text.startswith(damage):
            raise error or RuntimeError(f"process {process} cannot go on: {text}")
    process, text = failed[0]
    seen_by = f" [process {process}]" if jax.process_count() > 1 else ""
    return None, text.removeprefix(damage) + seen_by


def _texts(text: str) -> list[str]:
    """The text of each process, in their order."""
    if jax.process_count() == 1:
        return [text]
    mine = np.zeros(1024, np.uint8)
    content = text.encode()[: len(mine)]
    mine[: len(content)] = np.frombuffer(content, np.uint8)
    everyones = np.asarray(multihost_utils.process_allgather(mine))
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in everyones]


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
