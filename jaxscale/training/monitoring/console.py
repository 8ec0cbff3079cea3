"""Console output of a run: a progress bar in a terminal, log lines in batch jobs."""

import dataclasses
import io
import math
import shlex
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxscale import __version__
from jaxscale.observability.bar import in_jupyter
from jaxscale.training.config import TrainConfig
from jaxscale.training.layerwise import of_muon
from jaxscale.training.monitoring.monitor import ProgressBar, Record, Writer


_FORMATS = {
    "loss": "loss {:.4f}",
    "eval_loss": "held-out loss {:.4f}",
    "eval_accuracy": "held-out accuracy {:.1%}",
    "grad_norm": "gradient norm {:.3g}",
    "lr": "learning rate {:.3g}",
    "step_seconds": "{:.3g} s a step",
    "tokens_per_second_per_device": "{:,.0f} tokens/s a device",
    "mfu_causal": "MFU {:.1%}",
}
_NOT_FINITE = ("loss", "eval_loss", "grad_norm")


class LineWriter(Writer):
    """Plain lines with the time, flushed at once: for logs of batch jobs.

    Example:
        >>> file = io.StringIO()
        >>> LineWriter(file).note("start after step 0 of 2")
        >>> date, time, text = file.getvalue().split(maxsplit=2)
        >>> text.strip()
        'start after step 0 of 2'
    """

    def __init__(self, file: io.TextIOBase | None = None) -> None:
        """Choose the file; None is the current standard output of each line."""
        self._file = file
        self._total = 0

    def start(self, first_step: int, total_steps: int) -> None:
        """Print where the run starts."""
        self._total = total_steps
        self.note(f"start after step {first_step} of {total_steps}")

    def note(self, text: str) -> None:
        """Print `text` after the time."""
        say(text, self._file)

    def write(self, record: Record) -> None:
        """Print the main numbers of a record."""
        shown = [
            text.format(value)
            for name, text in _FORMATS.items()
            if (value := record.get(name)) is not None
        ]
        shown += [
            f"{name.replace('_', ' ')} is not finite"
            for name in _NOT_FINITE
            if name in record and record[name] is None
        ]
        if record.get("eval_batches_held_out"):
            shown.append(
                f"{record['eval_batches']} of {record['eval_batches_held_out']} "
                "held-out batches"
            )
        if record.get("skipped"):
            shown.append(f"{record['skipped']} updates skipped")
        self.note(f"step {record['step']} of {self._total}: {', '.join(shown)}")


def say(text: str, file: io.TextIOBase | None = None) -> None:
    """Print a line after the time, flushed at once."""
    print(time.strftime("%Y-%m-%d %H:%M:%S"), text, file=file, flush=True)


def shows_bar() -> bool:
    """True if a progress bar can be shown: in a terminal and in Jupyter."""
    return sys.stdout.isatty() or in_jupyter()


def console_writer() -> Writer:
    """A `ProgressBar` if one can be shown, otherwise a `LineWriter`.

    Raises:
        ImportError: rich is not installed.
    """
    bar = ProgressBar()  # which says what to install if rich is missing
    return bar if shows_bar() else LineWriter()


def describe(config: TrainConfig, mesh: Mesh, state: Any) -> list[str]:
    """Lines that describe a run: versions, devices, mesh, size, memory, settings."""
    parameters = nnx.state(state.model, nnx.Param)
    count = sum(math.prod(x.shape) for x in jax.tree.leaves(parameters))
    lines = [f"{name}: {text}" for name, text in facts(config, mesh).items()]
    lines.append(
        f"model: {count:,} parameters; parameters and moments take "
        f"{_size(_bytes_of_a_device(state))} of {_memory(mesh)}"
    )
    if config.optimizer.kind == "muon":
        lines += _of_each_kind(parameters)
    for name, values in settings(config).items():
        shown = " ".join(f"{key}={value}" for key, value in values.items())
        lines.append(f"settings of {name}: {shown}")
    return lines


def _of_each_kind(parameters: Any) -> list[str]:
    """Lines that list the parameters of Muon and of AdamW."""
    names: dict[bool, list[str]] = {True: [], False: []}
    for path, by_muon in jax.tree_util.tree_leaves_with_path(of_muon(parameters)):
        names[by_muon].append(jax.tree_util.keystr(path, simple=True, separator="."))
    return [
        f"{kind} takes {', '.join(names[by_muon]) or 'nothing'}"
        for by_muon, kind in ((True, "muon"), (False, "adamw"))
    ]


def facts(config: TrainConfig, mesh: Mesh) -> dict[str, str]:
    """Versions, devices, mesh and command of a run, each by its name."""
    axes = [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]
    kind = mesh.devices.flat[0].device_kind
    found = {
        "versions": f"jaxscale {__version__}, jax {jax.__version__}, "
        f"Python {sys.version.split()[0]}",
        "devices": f"{mesh.size} x {kind} in {jax.process_count()} process(es)",
        "mesh": f"{' x '.join(axes) or 'one device'}, rules {config.rules}",
    }
    command = command_line()
    return found if command is None else found | {"command": command}


def command_line() -> str | None:
    """The command that began this process, or None in a notebook."""
    if in_jupyter():
        return None
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def settings(config: TrainConfig) -> dict[str, dict[str, Any]]:
    """The settings of a run in groups: model, data, optimizer, mesh, and the run's own.

    Args:
        config: The settings of the run.
    """
    values = dataclasses.asdict(config)
    groups = {n: values.pop(n) for n in ("model", "data", "optimizer", "mesh")}
    return {**groups, "the run": values}


def peak_memory(mesh: Mesh) -> str | None:
    """The peak memory in use on a device of this process, in words.

    Args:
        mesh: The devices; the result is None for kinds that do not report it.
    """
    peaks = list(_stats(mesh, "peak_bytes_in_use"))
    return f"{_size(max(peaks))} of {_memory(mesh)}" if peaks else None


def _bytes_of_a_device(state: Any) -> int:
    """Bytes of `state` per device; optimizer state on the host does not count."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
        if x.sharding.memory_kind != "pinned_host"
    )


def _memory(mesh: Mesh) -> str:
    limits = list(_stats(mesh, "bytes_limit"))
    return f"{_size(min(limits))} a device" if limits else "the memory of a device"


def _stats(mesh: Mesh, name: str) -> Iterable[int]:
    """A memory statistic of each device of this process that reports it."""
    for device in mesh.local_devices:
        stats = device.memory_stats() or {}
        if name in stats:
            yield stats[name]


def _size(num_bytes: int) -> str:
    """Bytes as text.

    Example:
        >>> _size(3 * 2**30 // 2), _size(10_000)
        ('1.5 GiB', '0.0095 MiB')
    """
    if num_bytes >= 2**30:
        return f"{num_bytes / 2**30:.3g} GiB"
    return f"{num_bytes / 2**20:.2g} MiB"
