"""The command line: ``jaxscale COMMAND``, also ``python -m jaxscale COMMAND``.

Each command is a module with ``main(arguments) -> exit code``; it is imported when it
is called, so that ``jaxscale --help`` answers at once.
"""

import gc
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from jaxscale import __version__
from jaxscale.checks import pip_install
from jaxscale.cli.errors import RunFailed, UsageError, suggestion
from jaxscale.cli.notices import library_notices, notice
from jaxscale.public import listing


__all__ = ["COMMANDS", "UsageError", "main"]

__dir__ = listing(__all__)

COMMANDS = {
    "quickstart": "train a small model on real text, restore, prune, serve, report",
    "train": "train a preset from scratch, or fine-tune a pretrained model",
    "prune": "prune a trained model, fine-tune it under the masks, report",
    "export": "write the model of a run as a Hugging Face directory",
    "generate": "continue a prompt with a trained or a downloaded model",
    "serve": "start an OpenAI-compatible HTTP server for a model",
    "supervise": "run a command as the processes of a job; restart it after faults",
    "executor": "start and watch the processes of a supervised job on one host",
    "diagnose": "find devices that are slow, stuck or compute wrong values",
    "plan": "rank parallelism layouts of a training step by estimated time",
    "report": "show a finished or running run as one HTML page",
    "schedule": "verify and draw a pipeline-parallel schedule",
    "bench-serve": "benchmark an OpenAI-compatible server under load",
}
"""One line of description per command."""

_OTHER_NAMES = {
    "train": "finetune fine-tune pretrain sft fit",
    "prune": "sparsify",
    "export": "convert save",
    "generate": "chat complete run infer predict",
    "serve": "server api",
    "bench-serve": "bench benchmark",
    "quickstart": "demo tour",
}
_EXTRAS = {"quickstart": "quickstart", "serve": "serve", "bench-serve": "serve"}
_COLUMN = 2 + max(map(len, COMMANDS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that `arguments` name, by default ``sys.argv``.

    Returns:
        The exit code: 0 for success, 2 for a mistake in the arguments, which standard
        error explains, 3 for a run that diverged, 4 for a job that its supervisor has
        given up, 130 after Ctrl-C; otherwise that of the command.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if not arguments or arguments[0] in ("-h", "--help") or arguments == ["help"]:
        print(_help())
        return 0
    name, *rest = arguments
    if name == "help":
        name, rest = rest[0], ["--help"]
    if name in ("--version", "-V", "version"):
        print(f"jaxscale {__version__}")
        return 0
    try:
        if name not in COMMANDS:
            raise UsageError(
                f"{name!r} is no command{_meant(name)}; "
                f"use one of {', '.join(COMMANDS)}"
            )
        # Before JAX and others are imported, which takes seconds, for help too.
        notice(f"{name}, by jaxscale {__version__}: loading its libraries")
        with library_notices():
            return _run(name, rest)
    except UsageError as error:
        print(f"jaxscale: error: {error}", file=sys.stderr)
        return _failed(error, 2)
    except RunFailed as error:
        print(f"jaxscale: {error}", file=sys.stderr)
        return _failed(error, error.code)
    except KeyboardInterrupt:
        print("jaxscale: interrupted", file=sys.stderr)
        return 130


def _meant(name: str) -> str:
    for ours, theirs in _OTHER_NAMES.items():
        if name in theirs.split():
            return f" (did you mean {ours}?)"
    return suggestion(name, COMMANDS)


def _run(name: str, arguments: Sequence[str]) -> int:
    if name == "train":
        supervise = _load("supervise", "train")  # which needs no jax
        if supervise.is_supervised(arguments):
            return supervise.train(arguments)
    return _load(name).main(arguments)


def _failed(error: Exception, code: int) -> int:
    """Return the exit code; a supervised process exits here and does not return."""
    from jaxscale.supervision import leave

    leave(code, error)
    return code


def _load(module: str, command: str | None = None) -> ModuleType:
    """The module of a command, `module` if that is its name."""
    command = command or module
    collects = gc.isenabled()
    gc.disable()  # half a million objects are made, all of which stay
    try:
        return importlib.import_module(f"jaxscale.cli.{module.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if not error.name or error.name.startswith("jaxscale"):
            raise
        extra = _EXTRAS.get(command, "train")
        raise UsageError(
            f"{command} needs {error.name.partition('.')[0]}, which is not installed; "
            + pip_install(extra)
        ) from error
    finally:
        if collects:
            gc.enable()


def _help() -> str:
    commands = "\n".join(f"  {n:{_COLUMN}}{about}" for n, about in COMMANDS.items())
    return f"""usage: jaxscale COMMAND [OPTIONS]

Large Transformers that train and serve faster on NVIDIA GPUs, in JAX.

commands:
{commands}

`jaxscale COMMAND --help` describes the options of a command."""
