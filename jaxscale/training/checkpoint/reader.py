"""Reading of checkpoints, verified against their records."""

import collections
import contextlib
import dataclasses
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.checks import pip_install
from jaxscale.models.vocabulary import vocabulary_dimensions
from jaxscale.training.checkpoint.array_names import flatten, named_leaves, nest
from jaxscale.training.checkpoint.record import CheckpointRecord
from jaxscale.training.checkpoint.replicas import is_read_here, reading_place, spread
from jaxscale.training.checkpoint.stack_moves import StackMove, stack_ranks
from jaxscale.training.checkpoint.steps import (
    RECORD,
    CheckpointDiffers,
    DamagedCheckpoint,
    texts,
    was_recorded,
)
from jaxscale.training.checkpoint.vocabulary_moves import VocabularyMove


logger = logging.getLogger("jaxscale.training")

SCHEDULE_STEPS = "schedule_steps"
"""Key in the settings of a checkpoint that a run may change."""
HEAD = "head"
"""Key of an encoder's head in these settings."""
_DESCRIBES_MODEL = ("model", "lora", HEAD)


type Move = StackMove | VocabularyMove


@dataclasses.dataclass(kw_only=True)
class Found:
    """The contents of a checkpoint, as they were saved."""

    step: int
    record: CheckpointRecord | None
    """None for a checkpoint of a version without digests."""
    data: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The requested small item."""
    arrays: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arrays by name; at first only what this process has read."""
    wanted: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    """Shape, type and sharding after `CheckpointReader.verify`."""
    moves: Mapping[str, Move] = dataclasses.field(default_factory=dict)
    """Moves of arrays to shapes other than the saved ones."""


class CheckpointReader:
    """A reader for the checkpoints of a directory.

    Damage is a `DamagedCheckpoint` whose message names step, directory and reason.
    """

    def __init__(
        self, directory: Path, manager: Any, config: Mapping[str, Any]
    ) -> None:
        self._directory = directory
        self._manager = manager
        self._config = config
        self._orbax = require_orbax()

    def items(
        self, step: int, *items: str
    ) -> tuple[CheckpointRecord | None, dict[str, Any]]:
        """The record of a checkpoint, if it has one, and small items, verified.

        Raises:
            DamagedCheckpoint: they cannot be read, or differ from what was saved.
        """
        checkpoint = self._directory / str(step)
        is_recorded = (checkpoint / RECORD).is_dir()
        names = [*items, RECORD] if is_recorded else items
        json_items = {name: self._orbax.args.JsonRestore() for name in names}
        with self._reading(step):
            if checkpoint.is_dir() and not is_recorded and was_recorded(checkpoint):
                raise ValueError("its digests are gone")
            args = self._orbax.args.Composite(**json_items)
            restored = self._manager.restore(step, args=args) if names else {}
            found = {name: dict(restored[name]) for name in items}
            if not is_recorded:
                return None, found
            record = CheckpointRecord.from_json(restored[RECORD])
            for name, content in found.items():
                record.check_item(name, content)
        return record, found

    def verify(self, found: Found) -> None:
        """Share what each process has read, and verify it.

        Raises:
            DamagedCheckpoint: it differs from what was saved.
        """
        with self._reading(found.step):
            mine = json.dumps(found.record and found.record.to_json()["checksum"])
            if set(texts(mine)) != {mine}:
                raise ValueError("processes have read different digests")
            found.arrays = {
                name: spread(found.arrays.pop(name, None), x)
                for name, x in found.wanted.items()
            }
            if found.record is not None:
                found.record.check_arrays(found.arrays)
        if found.record is None and found.arrays and jax.process_index() == 0:
            logger.warning(
                "checkpoint %d in %s is of a version without digests: not checked",
                found.step,
                self._directory,
            )

    @contextlib.contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        """Errors of the file formats, many lines long, as `DamagedCheckpoint`."""
        try:
            yield
        except (MemoryError, PermissionError, jax.errors.JaxRuntimeError):
            raise  # the machine's fault
        except Exception as error:
            raise DamagedCheckpoint(
                f"checkpoint {step} in {self._directory} is damaged and not used "
                f"({type(error).__name__}: {first_line(error)})"
            ) from error

    def check_config(self, step: int, saved: Mapping[str, Any]) -> None:
        """Compare the settings of a checkpoint with those of the reading run.

        Raises:
            CheckpointDiffers: they differ.
        """
        if differences := self._differences(saved, {*self._config, *saved}):
            raise CheckpointDiffers(
                f"checkpoint {step} in {self._directory} belongs to another run, with "
                f"{', '.join(differences)}; set these back or choose another output_dir"
            )

    def check_model(self, step: int, saved: Mapping[str, Any]) -> None:
        """Compare the settings that decide a model's outputs with those of its run.

        Raises:
            CheckpointDiffers: they differ.
        """
        described = _DESCRIBES_MODEL if self._config else ()
        if differences := self._differences(saved, {*described} & {*saved}):
            raise CheckpointDiffers(
                f"checkpoint {step} in {self._directory} was made with "
                f"{', '.join(differences)}: the settings of its run, run.json, have "
                "changed since; bring the file back"
            )

    def _differences(
        self, saved: Mapping[str, Any], names: Collection[str]
    ) -> list[str]:
        """The settings that differ from those of a checkpoint, in words."""
        names = {*names} - {SCHEDULE_STEPS}
        if HEAD not in saved:  # an older version did not save it
            names -= {HEAD}
        ours, theirs = (
            flatten({name: x[name] for name in names if name in x})
            for x in (self._config, saved)
        )
        return [
            f"{name} {theirs.get(name)!r} (now {ours.get(name)!r})"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]

    def arrays(
        self,
        target: Any,
        step: int,
        record: CheckpointRecord | None,
        *,
        config: Mapping[str, Any] = MappingProxyType({}),
        data: Mapping[str, Any] = MappingProxyType({}),
        prefix: str = "",
    ) -> Found:
        """The arrays of `target` in the shapes and types that they were saved in.

        Args:
            target: Arrays or `jax.ShapeDtypeStruct` with structure and shardings.
            step: Step of the checkpoint.
            record: What was saved.
            config: The settings of the run that saved it.
            data: A small item to return with them.
            prefix: Prefix of the names of the arrays in the checkpoint.

        Raises:
            DamagedCheckpoint: they cannot be read.
            ValueError: they are not the arrays of `target`.
        """
        wanted = {
            prefix + name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
            for name, x in named_leaves(target).items()
        }
        saved = self._saved(step, record)
        found = {name: x for name, x in saved.items() if name.startswith(prefix)}
        moves = _moves(target, wanted, found, prefix, config.get("model"))
        self._check_arrays(step, wanted, found, moves)
        places = {name: x.sharding for name, x in wanted.items()}
        places |= {name: move.saved.sharding for name, move in moves.items()}
        all_of_them = {
            name: x.update(sharding=places[name]) for name, x in found.items()
        }
        mine: dict[str, jax.ShapeDtypeStruct] = {}
        turns = collections.Counter[Any]()
        for name, x in all_of_them.items():
            place = reading_place(x.sharding, turns[x.sharding])
            turns[x.sharding] += 1
            if is_read_here(place):
                mine[name] = x.update(sharding=place)
        return Found(
            step=step,
            record=record,
            data=dict(data),
            arrays=self._read(step, mine, is_all=len(mine) == len(saved)),
            wanted=all_of_them,
            moves=moves,
        )

    def _read(
        self, step: int, arrays: Mapping[str, jax.ShapeDtypeStruct], *, is_all: bool
    ) -> dict[str, Any]:
        """Some or all arrays of a checkpoint, in its own shapes and types."""
        if not arrays:
            return {}
        ocp, abstract = self._orbax, nest(arrays)
        args = ocp.args.PyTreeRestore(
            abstract,
            restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
            partial_restore=not is_all,
        )
        with self._reading(step):
            restored = self._manager.restore(step, args=ocp.args.Composite(state=args))
            return flatten(restored["state"])

    def _saved(
        self, step: int, record: CheckpointRecord | None
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and type of each array of a checkpoint."""
        with self._reading(step):
            metadata = self._manager.item_metadata(step).state
            if metadata is None:
                raise FileNotFoundError("state/_METADATA")
            arrays = flatten(metadata.tree)
            if record is not None:
                shapes = {name: x.shape for name, x in record.arrays.items()}
                if shapes != {name: tuple(x.shape) for name, x in arrays.items()}:
                    raise ValueError("other arrays are there than were saved")
                arrays = record.arrays
            return {
                name: jax.ShapeDtypeStruct(
                    tuple(x.shape), jax.dtypes.canonicalize_dtype(jnp.dtype(x.dtype))
                )
                for name, x in arrays.items()
            }

    def placed[S](self, target: S, found: Found, *, prefix: str = "") -> S:
        """The arrays with the shapes and types of `target`."""
        leaves = []
        for name, want in named_leaves(target).items():
            x = found.arrays.pop(prefix + name)
            if move := found.moves.get(prefix + name):
                x = move(x)
            if x.dtype != want.dtype:
                x = _cast(x, want)
            leaves.append(x)
        return jax.tree.unflatten(jax.tree.structure(target), leaves)

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
                f"checkpoint {step} in {self._directory} does not fit this model and "
                f"optimizer: it {', '.join(problems[:5])}{more}; use the settings that "
                "it was made with"
            )


def _moves(
    target: Any,
    wanted: Mapping[str, Any],
    found: Mapping[str, Any],
    prefix: str,
    model: Any,
) -> dict[str, Move]:
    """Moves of arrays that were saved for another mesh.

    These are stacks for other pipeline stages, and vocabulary tables with another
    padding.
    """
    model = model if isinstance(model, Mapping) else {}
    num_layers, vocab_size = model.get("num_layers"), model.get("vocab_size")
    moves: dict[str, Move | None] = {}

    def differing(
        paths: Mapping[str, int],
    ) -> Iterator[tuple[str, tuple[int, ...], int]]:
        for path, number in paths.items():
            name = prefix + path
            if name in found and tuple(found[name].shape) != tuple(wanted[name].shape):
                yield name, tuple(found[name].shape), number

    for name, saved, lead in differing(stack_ranks(target)):
        moves[name] = StackMove.between(saved, wanted[name], lead, num_layers)
    if vocab_size is not None:
        for name, saved, at in differing(vocabulary_dimensions(target)):
            moves[name] = VocabularyMove.between(saved, wanted[name], at, vocab_size)
    return {name: move for name, move in moves.items() if move is not None}


def _cast(x: jax.Array, want: Any) -> jax.Array:
    """`x` with the wanted type and sharding."""

    def cast(x: jax.Array) -> jax.Array:
        return jax.device_put(x, jax.memory.Space.Device).astype(want.dtype)

    return jax.jit(cast, out_shardings=want.sharding)(x)


def first_line(error: Exception) -> str:
    """The message of an error, in one line."""
    text = error.strerror if isinstance(error, OSError) else None
    return (text or str(error)).partition("\n")[0][:100]


def require_orbax() -> ModuleType:
    """Import Orbax.

    Raises:
        ImportError: it is not installed.
    """
    try:
        import orbax.checkpoint as ocp
    except ImportError as error:
        raise ImportError(f"checkpoints need Orbax: {pip_install('train')}") from error
    return ocp
