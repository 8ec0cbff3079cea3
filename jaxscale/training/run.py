"""The directory of a run: its settings and tokenizer.

``run.json`` makes a directory the directory of a run. It also contains the tokenizer,
the checkpoints and the metrics, so that the directory alone is enough to resume the run
or to generate from it.
"""

import contextlib
import dataclasses
import json
import platform
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from jaxscale import __version__
from jaxscale.models import Tokenizer
from jaxscale.models.hf.checksums import write_checksums
from jaxscale.models.tokenizer_files import files_of
from jaxscale.supervision.driver import DIRECTORY as SUPERVISOR
from jaxscale.training.checkpoint.reader import HEAD, SCHEDULE_STEPS
from jaxscale.training.checkpoint.steps import complete_steps, settings_of
from jaxscale.training.config import TrainConfig
from jaxscale.training.lock import LOCK_FILE, keep
from jaxscale.training.monitoring.console import command_line
from jaxscale.training.optimizer import check_same_schedule


RUN_FILE = "run.json"
FAILED_FILE = "run.failed.json"
"""Name of that file if the run ended before its first checkpoint."""
MASKS_FILE = "masks.safetensors"
"""File of the masks, if the run is of a pruned model."""


# Data settings that may change, since the text itself and its position are compared.
_FREE = (
    *("paths", "suffixes", "text_field", "pair_field", "label_field"),
    *("tokenizer", "control_tokens", "cache_dir", "batch_size", "prefetch"),
)


def to_dict(config: Any) -> dict[str, Any]:
    """A dataclass as JSON values: dictionaries, lists, strings and numbers.

    Example:
        >>> from jaxscale.sharding import MeshConfig
        >>> to_dict(MeshConfig(tensor=2))["tensor"]
        2
    """
    return json.loads(json.dumps(dataclasses.asdict(config), default=str))


def from_dict[C](kind: type[C], values: dict[str, Any], prefix: str = "") -> C:
    """The dataclass of a result of `to_dict`.

    Raises:
        ValueError: `values` has an unknown field, lacks one, or has a value of another
            type.

    Example:
        >>> from jaxscale.sharding import MeshConfig
        >>> from_dict(MeshConfig, to_dict(MeshConfig(tensor=2))) == MeshConfig(tensor=2)
        True
        >>> from_dict(MeshConfig, {"tensor": "2"})
        Traceback (most recent call last):
        ...
        ValueError: tensor is '2', expected int
    """
    hints = typing.get_type_hints(kind)
    unknown = sorted(set(values) - set(hints))
    if unknown:
        raise ValueError(
            f"{kind.__name__} has no field {unknown[0]!r}; the file was written by "
            "another version of jaxscale"
        )
    fields: Any = dataclasses.fields(typing.cast(Any, kind))
    for field in fields:
        defaults = (field.default, field.default_factory)
        if field.name not in values and defaults == (dataclasses.MISSING,) * 2:
            raise ValueError(f"{prefix}{field.name} is missing, expected a value")
    return kind(
        **{
            name: _revive(hints[name], value, f"{prefix}{name}")
            for name, value in values.items()
        }
    )


def _revive(hint: Any, value: Any, name: str) -> Any:
    hint = getattr(hint, "__value__", hint)  # of a `type` alias
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in args:
            return None
        hints = [h for h in args if h is not types.NoneType]
        # Of several dataclasses, the first that has all fields; they differ in these.
        hint = next((h for h in hints if _has_fields(h, value)), hints[0])
        return _revive(hint, value, name)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return from_dict(typing.cast(Any, hint), value, f"{name}.")
    if origin is tuple and isinstance(value, list):
        return tuple(_revive(args[0], x, name) for x in value)
    if origin is typing.Literal and any(
        value == one and type(value) is type(one) for one in args
    ):
        return value
    if hint is Path and isinstance(value, str):
        return Path(value)
    allowed = (int, float) if hint is float else (hint,)
    if type(value) in allowed:
        return value
    expected = hint.__name__ if isinstance(hint, type) else hint
    raise ValueError(f"{name} is {value!r:.80}, expected {expected}")


def _has_fields(hint: Any, value: Any) -> bool:
    if not dataclasses.is_dataclass(hint) or not isinstance(value, dict):
        return False
    return set(value) <= {field.name for field in dataclasses.fields(hint)}


def checkpoint_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that a run's checkpoints save and compare."""
    return config.identity() | {
        HEAD: None if config.head is None else to_dict(config.head),
        SCHEDULE_STEPS: config.optimizer.schedule_steps or config.steps,
    }


def is_run(directory: Path) -> bool:
    """True if `directory` is the directory of a run."""
    return (directory / RUN_FILE).is_file()


@runtime_checkable
class Text(Protocol):
    """The data of a run: `TextData`, or `LabeledText`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the text."""
        ...

    @property
    def fingerprint(self) -> str:
        """Equal for equal tokens to train on."""
        ...


def write(directory: Path, config: TrainConfig, text: Text) -> None:
    """Make `directory` the directory of the run of `config` on `text`.

    No other process writes to it from now on, until `fit` has ended.

    Raises:
        ValueError: it cannot be made, or another process writes to it.
    """
    keep(directory)
    content = {
        "jaxscale": __version__,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "command": command_line(),
        "text": text.fingerprint,
        "config": to_dict(dataclasses.replace(config, step=None)),
    }
    # By a rename: a killed process leaves the file whole, so the run can be resumed.
    draft = directory / f".{RUN_FILE}"
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(directory / RUN_FILE)
    (directory / FAILED_FILE).unlink(missing_ok=True)
    text.tokenizer.save(directory)
    write_checksums(directory, files_of(directory))


@contextlib.contextmanager
def given_up_on_failure(directory: Path) -> Iterator[None]:
    """Free `directory` for another run if this one fails without a checkpoint.

    Its files stay, and ``run.json`` becomes ``run.failed.json``.
    """
    try:
        yield
    except BaseException:
        if jax.process_index() == 0 and not _saved(directory) and is_run(directory):
            (directory / RUN_FILE).replace(directory / FAILED_FILE)
        raise


def read_config(directory: Path) -> TrainConfig:
    """The settings of the run in `directory`.

    Raises:
        ValueError: the file is damaged, or another version of jaxscale wrote it.
    """
    content = _read(directory)
    try:
        return from_dict(TrainConfig, content["config"])
    except ValueError as error:
        raise ValueError(f"{directory / RUN_FILE}: {error}") from error


def check_free(directory: Path, config: TrainConfig, *, resume: bool) -> None:
    """Check that the run of `config` may write into `directory`.

    A run without a checkpoint may be resumed with other settings.

    Raises:
        ValueError: the directory has another run or other files, or is a file, there is
            no checkpoint of ``config.step``, or another number of steps would change
            the schedule of the run.
    """
    saved, step = _saved(directory), config.step
    if step is not None and not saved:
        raise ValueError(
            f"step {step} goes back to a checkpoint, and output_dir {directory} has "
            f"none; leave it out, or set steps to {step} for the length of a run"
        )
    if step is not None and not (resume and step in saved):
        raise ValueError(
            f"step {step} must be a checkpoint of a run that --resume continues; in "
            f"output_dir {directory} there are those of the steps {saved}"
        )
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"output_dir {directory} is a file; choose a directory")
    # The supervisor of the run is there before it, and so is the lock.
    if not directory.exists() or all(
        p.name == SUPERVISOR or LOCK_FILE in p.name for p in directory.iterdir()
    ):
        return
    if not is_run(directory):
        if (directory / FAILED_FILE).is_file() and not saved:
            return
        raise ValueError(
            f"output_dir {directory} holds files that are no run of jaxscale; "
            "choose another directory"
        )
    if not resume:
        raise ValueError(
            f"output_dir {directory} already holds a run; add --resume to continue it, "
            "or choose another directory"
        )
    if not saved:
        return
    done = saved[-1] if step is None else step
    if done > config.steps:
        raise ValueError(
            f"steps {config.steps}, but the run in output_dir {directory} has done "
            f"{done} already; raise steps, or choose another directory"
        )
    saved_config = read_config(directory)
    before, now = _identity(saved_config), _identity(config)
    for name in sorted(before.keys() | now.keys()):
        if before.get(name) != now.get(name):
            raise ValueError(
                f"output_dir {directory} belongs to another run: its {name} is "
                f"{before.get(name)!r}, this one's {now.get(name)!r}; use the same "
                "settings, or choose another directory"
            )
    planned = _planned(directory, saved if step is None else [step])
    if planned is None:
        planned = saved_config.optimizer.schedule_steps or saved_config.steps
    check_same_schedule(config.optimizer, config.steps, planned)


def check_text(directory: Path, text: Text) -> None:
    """Check that a resumed run has the text that it was started with.

    Raises:
        ValueError: the text has changed.
    """
    if not (is_run(directory) and _saved(directory)):
        return
    if _read(directory)["text"] != text.fingerprint:
        raise ValueError(
            f"output_dir {directory} belongs to a run on other text: the files, the "
            "tokenizer or the Python that provides the corpus have changed; bring them "
            "back, or choose another directory"
        )


def _saved(directory: Path) -> list[int]:
    return complete_steps(directory / "checkpoints")


def _planned(directory: Path, steps: list[int]) -> int | None:
    """Updates that the newest checkpoint's schedule was made for; None if unknown.

    ``run.json`` has the number of the last start, which may have ended before it saved
    anything with its new schedule.
    """
    for step in reversed(steps):
        settings = settings_of(directory / "checkpoints" / str(step))
        if settings is not None:  # else damaged: the run resumes from the previous one
            planned = settings.get(SCHEDULE_STEPS)
            if planned is None or type(planned) is int:
                return planned
    return None


def _read(directory: Path) -> dict[str, Any]:
    file = directory / RUN_FILE
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    except RecursionError:
        raise ValueError(
            f"{file} is damaged: it is nested too deeply; bring back the file that the "
            "run has written"
        ) from None
    whole = isinstance(content, dict) and {"text", "config"} <= set(content)
    if not whole or not isinstance(content["config"], dict):
        raise ValueError(f"{file} is damaged: it lacks the settings of the run")
    return content


def _identity(config: TrainConfig) -> dict[str, Any]:
    """The settings that a resumed run may not change, by dotted name.

    The paths of the text may change: `check_text` compares its content.
    """
    data = to_dict(config.data)
    for name in _FREE:
        del data[name]
    return _flat(config.identity() | {"data": data})


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted names."""
    flat = {}
    for name, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
