"""Checkpoints of a run: parameters by name, optimizer, data position, settings."""

import contextlib
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxscale.sharding.rules import STACK_AXES
from jaxscale.training.checkpoint.array_names import named_leaves, nest
from jaxscale.training.checkpoint.reader import (
    CheckpointReader,
    Found,
    first_line,
    require_orbax,
)
from jaxscale.training.checkpoint.record import CheckpointRecord
from jaxscale.training.checkpoint.stack_moves import stack_ranks
from jaxscale.training.checkpoint.steps import (
    ITEMS,
    RECORD,
    CheckpointDiffers,
    CheckpointNotWritten,
    DamagedCheckpoint,
    complete_steps,
    make_writable,
    numbered,
    of_first,
    on_all,
    set_aside,
    set_aside_after,
)


logger = logging.getLogger("jaxscale.training")


class Checkpointer:
    """Save the state of a run in the background, and restore it on any mesh.

    A checkpoint is a directory named by its step with four items: ``state`` (arrays
    under the path of each parameter, so that it outlives changes of the code), ``data``
    (position of the data iterator), ``config`` (settings of the run) and ``digests``,
    which the devices compute of the arrays before the save, and again after reading: a
    byte that changes in host memory, network or disk is detected. It becomes visible by
    a rename when it is complete: leftovers of a killed process are ignored, and removed
    when the next run opens the directory. If the newest checkpoint cannot be read or
    verified, the previous one is used, with a warning in the log; a directory that
    lacks one of the first three items is ignored, one that has lost its digests counts
    as damaged, and one of an older version without digests is used unverified. All
    processes use the same checkpoint, which each of them can read.

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
        source: str | None = None,
        read_only: bool = False,
    ) -> None:
        """Open, and if needed make, a directory of checkpoints.

        Args:
            directory: Directory for this run alone.
            keep: Number of newest checkpoints to keep.
            keep_every: Checkpoints at multiples of this step are never deleted.
            config: Settings that decide what the run computes, as JSON. They are saved
                with each checkpoint and compared when one is restored.
            source: Where the unsaved base weights come from, for errors.
            read_only: Neither save nor clean up, for example beside a running job.

        Raises:
            ImportError: Orbax is not installed.
            ValueError: `keep` or `keep_every` is not positive.
            CheckpointNotWritten: the directory cannot be made or written to.
        """
        if keep < 1:
            raise ValueError(f"keep {keep} must be at least 1 checkpoint")
        if keep_every is not None and keep_every < 1:
            raise ValueError(
                f"keep_every {keep_every} must be at least 1 step, or None"
            )
        self.directory = Path(directory).resolve()
        self._config = dict(config or {})
        self._source = f"source {source}" if source else "the given model"
        self._read_only = read_only
        self._orbax = ocp = require_orbax()
        if not read_only:
            make_writable(self.directory)
            # Orbax would count those that are not whole among those to keep.
            whole = complete_steps(self.directory)
            set_aside(self.directory, set(numbered(self.directory)) - set(whole))
        policies = ocp.checkpoint_managers
        preserve = [policies.LatestN(keep)]
        if keep_every is not None:
            preserve.append(policies.EveryNSteps(keep_every))
        self._policy = policies.AnyPreservationPolicy(preserve)
        self._failed: list[BaseException] = []
        """The error of a background save, which its barrier may hide."""
        self._is_behind = False
        """Whether the result of the last save is still unknown."""
        self._will_close = False
        """Whether it is used in a ``with``, which background saves need."""
        self._open()

    def _open(self) -> None:
        """Have Orbax list the checkpoints, by their directories only.

        A damaged file in one would otherwise prevent it from opening any.
        """
        ocp = self._orbax
        handlers = {item: ocp.JsonCheckpointHandler() for item in (*ITEMS, RECORD)}
        handlers["state"] = ocp.PyTreeCheckpointHandler()
        for handler in handlers.values():
            _telling(handler, self._failed)

        def manager(**options: Any) -> Any:
            return ocp.CheckpointManager(
                self.directory,
                item_names=tuple(handlers),
                item_handlers=handlers,
                options=ocp.CheckpointManagerOptions(
                    lightweight_initialize=True, **options
                ),
            )

        self._manager = self._reading_manager = manager(
            preservation_policy=self._policy,
            # Its option `read_only` does no more than this, but warns of itself twice.
            create=not self._read_only,
            cleanup_tmp_directories=not self._read_only,
        )
        if jax.process_count() > 1:
            # Orbax ends each restore with a barrier of all processes, which one that
            # cannot read would not reach. Each reads alone; then they agree on a
            # checkpoint.
            me = jax.process_index()
            self._reading_manager = manager(
                create=False,
                multiprocessing_options=ocp.options.MultiprocessingOptions(
                    primary_host=me,
                    active_processes={me},
                    barrier_sync_key_prefix=f"process_{me}",
                ),
            )
        self._reader = CheckpointReader(
            self.directory, self._reading_manager, self._config
        )

    def __enter__(self) -> "Checkpointer":
        self._will_close = True
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def steps(self) -> list[int]:
        """The steps that have a complete checkpoint, oldest first."""
        return complete_steps(self.directory)

    def newest(self) -> int | None:
        """The newest of process 0's `steps`; all processes must call this."""
        newest = of_first(max(self.steps, default=-1))
        return None if newest < 0 else newest

    def save(
        self,
        step: int,
        state: Any,
        data_state: Mapping[str, Any],
        *,
        base: Any = None,
    ) -> None:
        """Copy `state` to the host and write it in the background.

        Outside of a ``with`` it returns when everything is on disk: a script that ends
        without `close` stops the writing threads. The arrays may be donated once this
        returns. An existing step is left as it is. Later errors are raised by `check`,
        the next save, `wait` or `close`.

        Args:
            step: Name of the checkpoint.
            state: Any pytree of arrays, for example a `TrainState`.
            data_state: Position of the data iterator, as JSON.
            base: A pytree of arrays that are not saved, such as the base weights of
                adapters; only their digests are, for `restore` to compare.

        Raises:
            ValueError: the directory was opened with `read_only`.
            CheckpointNotWritten: this or the previous one could not be written; older
                ones are unchanged.
        """
        if self._read_only:
            raise ValueError(
                f"checkpoints in {self.directory} were opened with read_only=True; "
                "open them without it to save"
            )
        if step in self._manager.all_steps():
            return
        data = json.loads(json.dumps(dict(data_state)))
        arrays = named_leaves(state)
        record = CheckpointRecord.of(
            arrays,
            self._layers(state),
            base=named_leaves(base),
            data=data,
            config=self._config,
        )
        args = self._orbax.args
        with self._writing():
            self._is_behind = True
            self._manager.save(
                step,
                args=args.Composite(
                    state=args.PyTreeSave(nest(arrays)),
                    data=args.JsonSave(data),
                    config=args.JsonSave(self._config),
                    **{RECORD: args.JsonSave(record.to_json())},
                ),
                force=True,
            )
        if not self._will_close:
            self.wait()

    def restore[S](
        self, target: S, step: int | None = None, *, base: Any = None
    ) -> tuple[S, dict[str, Any]]:
        """The state and the data position of a checkpoint.

        Args:
            target: Arrays or `jax.ShapeDtypeStruct` with the wanted structure, types
                and shardings, on whatever mesh.
            step: Step of the checkpoint, without a fallback; None is the newest
                readable one.
            base: As for `save`; None compares nothing.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            DamagedCheckpoint: the checkpoint of `step`, or every one, cannot be read.
            ValueError: the settings of the run, the parameters or `base` differ; the
                message names them.
        """

        def read(step: int) -> Found:
            record, items = self._reader.items(step, "data", "config")
            self._reader.check_config(step, items["config"])
            return self._reader.arrays(target, step, record, **items)

        found = self._newest(read, step)
        self._check_base(found, base)
        return self._reader.placed(target, found), found.data

    def restore_model[M](
        self, target: M, step: int | None = None, *, base: Any = None
    ) -> M:
        """Only the model, without the optimizer, for evaluation and generation.

        Args:
            target: Module with the wanted types and shardings, for example abstract.
            step: Step of the checkpoint; None is the newest readable one.
            base: As for `save`; None compares nothing.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            DamagedCheckpoint: the checkpoint of `step`, or every one, cannot be read.
            ValueError: the parameters, `base`, or model, adapters or head in the
                settings, if there are any, differ; the message names them.
        """

        def read(step: int) -> Found:
            record, items = self._reader.items(step, "config")
            self._reader.check_model(step, items["config"])
            return self._reader.arrays(target, step, record, **items, prefix="model.")

        found = self._newest(read, step)
        self._check_base(found, base)
        return self._reader.placed(target, found, prefix="model.")

    def config(self, step: int | None = None) -> dict[str, Any]:
        """The settings that a checkpoint was made with.

        Raises:
            FileNotFoundError: there is no checkpoint, or none of `step`.
            DamagedCheckpoint: the checkpoint of `step`, or every one, cannot be read.
        """

        def read(step: int) -> Found:
            record, items = self._reader.items(step, "config")
            return Found(step=step, record=record, data=items["config"])

        return self._newest(read, step).data

    def set_aside_after(self, step: int) -> None:
        """Rename the checkpoints of later steps; see the function of this name."""
        set_aside_after(self.directory, step)
        self.close()
        self._open()

    def check(self) -> None:
        """Raise the error of a background save, without waiting for it.

        Raises:
            CheckpointNotWritten: a save failed; older checkpoints are unchanged.
        """
        if not self._is_behind:
            return
        with self._writing():
            # With several processes, one that cannot write would wait for the others.
            if self._failed:
                error = self._failed[0]
                self._failed.clear()
                if jax.process_count() == 1:
                    self._manager.wait_until_finished()  # it raises it itself, once
                raise error
            self._manager.check_for_errors()
            if not self._manager.is_saving_in_progress():
                self._manager.wait_until_finished()
                self._is_behind = False

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            CheckpointNotWritten: a save failed; older checkpoints are unchanged.
        """
        with self._writing():
            self._manager.wait_until_finished()
            self._is_behind = False

    def close(self) -> None:
        """Wait and release the threads.

        Raises:
            CheckpointNotWritten: a save failed; older checkpoints are unchanged.
        """
        with self._writing():
            self._manager.close()
        if self._reading_manager is not self._manager:
            self._reading_manager.close()

    def _newest(self, read: Callable[[int], Found], step: int | None) -> Found:
        """The result of `read` for the checkpoint of `step`, or the newest good one.

        All processes read the same one, chosen by process 0, and use it if all can.
        """
        self.wait()  # for one that this process still writes
        steps = self.steps
        chosen = of_first(max(steps, default=-1) if step is None else step)
        if chosen < 0:
            raise FileNotFoundError(
                f"there is no checkpoint in {self.directory}; give the output "
                "directory of a run that has saved one"
            )
        if step is not None and not of_first(step in steps):
            raise FileNotFoundError(
                f"there is no checkpoint of step {step} in {self.directory}, only of "
                f"{steps}"
            )
        while chosen >= 0:
            found, problem = on_all(functools.partial(read, chosen))
            if found is not None:
                _, problem = on_all(functools.partial(self._reader.verify, found))
            if found is not None and problem is None:
                return found
            del found  # frees the memory of its arrays
            if step is not None:
                raise DamagedCheckpoint(problem)
            if jax.process_index() == 0:
                logger.warning("%s", problem)
            chosen = of_first(max((s for s in steps if s < chosen), default=-1))
        raise DamagedCheckpoint(
            f"no checkpoint in {self.directory} can be read; choose another output_dir"
        )

    def _check_base(self, found: Found, base: Any) -> None:
        """Compare the base weights with those that the checkpoint was trained on.

        Raises:
            CheckpointDiffers: they differ.
        """
        if base is None or found.record is None:
            return
        if wrong := found.record.differing_base(named_leaves(base)):
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CheckpointDiffers(
                f"checkpoint {found.step} in {self.directory} has adapters of other "
                f"weights than {self._source} holds now ({wrong[0]}{more} differ); "
                "bring back the weights that they were trained on, or begin a new run"
            )

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Errors of the file formats, many lines long, in one line."""
        try:
            yield
        except (MemoryError, jax.errors.JaxRuntimeError):
            raise  # not of the files
        except Exception as error:
            with contextlib.suppress(ValueError):  # of a file of an older one
                self._manager.reload()  # it counts the one that is not there
            code = re.search(r"os_error_code='(\d+)'", str(error))
            reason = os.strerror(int(code[1])) if code else first_line(error)
            raise CheckpointNotWritten(
                f"a checkpoint could not be written to {self.directory} "
                f"({reason}); those of the steps {self.steps} are as they were; "
                "make room, or choose another output_dir"
            ) from error

    def _layers(self, state: Any) -> dict[str, int]:
        """The number of layers of each array that is stored for stages."""
        model: Any = self._config.get("model")
        if not (isinstance(model, Mapping) and "num_layers" in model):
            return {}
        ranks = stack_ranks(state).items()
        staged = [name for name, rank in ranks if rank == len(STACK_AXES)]
        return dict.fromkeys(staged, int(model["num_layers"]))


def _telling(handler: Any, failed: list[BaseException]) -> None:
    """Make a handler of Orbax record the errors of its writes, as they occur."""
    save = handler.async_save

    async def async_save(*args: Any, **options: Any) -> Any:
        futures = await save(*args, **options)
        return [_Told(future, failed) for future in futures or ()]

    handler.async_save = async_save


class _Told:
    """A future of Orbax whose error is recorded."""

    def __init__(self, future: Any, failed: list[BaseException]) -> None:
        self._future, self._failed = future, failed

    def result(self, timeout: float | None = None) -> Any:
        try:
            return self._future.result(timeout)
        except BaseException as error:
            self._failed.append(error)
            raise
