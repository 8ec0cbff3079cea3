"""``jaxscale supervise -- COMMAND`` and ``jaxscale train --supervise``."""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxscale.cli.errors import RunFailed, UsageError, usage_errors
from jaxscale.cli.options import parse
from jaxscale.supervision import GaveUp, SuperviseConfig, supervise
from jaxscale.supervision.driver import DIRECTORY


_FLAG = "--supervise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SuperviseCommand:
    """The options of ``jaxscale supervise``."""

    output_dir: Path
    """Output directory of the run; the driver keeps its files in `supervisor/`."""
    config: Annotated[SuperviseConfig, tyro.conf.arg(name="")] = SuperviseConfig()
    """Processes and deadlines."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the settings cannot work; nothing was started.
        RunFailed: the job keeps failing.
    """
    options, command = list(arguments), []
    if "--" in options:
        at = options.index("--")
        options, command = options[:at], options[at + 1 :]
    parsed = parse(
        SuperviseCommand,
        options,
        prog="jaxscale supervise",
        description="Run `-- COMMAND` as the processes of a job, watch them, and start "
        "them again after faults. The command must continue what it has saved.",
    )
    if not command:
        raise UsageError("there is no command; end with -- python my_training.py ...")
    return _supervise(command, parsed.output_dir, parsed.config)


def is_supervised(arguments: Sequence[str]) -> bool:
    """Whether the arguments of ``jaxscale train`` ask for a supervisor."""
    return any(_is_ours(word) for word in arguments)


def train(arguments: Sequence[str]) -> int:
    """Run ``jaxscale train`` under a supervisor, without importing jax here.

    Raises:
        UsageError: the settings cannot work.
        RunFailed: the job keeps failing.
    """
    ours, theirs = _split(arguments)
    if {"-h", "--help"} & {*theirs}:
        ours = ["--help"]
    config = parse(
        SuperviseConfig,
        ours,
        prog="jaxscale train RUN --supervise",
        description="Options of the supervisor, with --supervise. before their names.",
    )
    directory = _output_dir(theirs)
    resumes = "--resume" in theirs or "--resume=auto" in theirs
    known = (directory / DIRECTORY).is_dir()
    if (directory / "run.json").exists() and not (resumes or known):
        raise UsageError(
            f"output_dir {directory} already holds a run; add --resume to continue it, "
            "or choose another directory"
        )
    resume = [] if resumes else ["--resume", "auto"]
    command = [sys.executable, "-m", "jaxscale", "train", *theirs, *resume]
    return _supervise(command, directory, config)


def _supervise(command: list[str], directory: Path, config: SuperviseConfig) -> int:
    try:
        with usage_errors():
            return supervise(command, directory, config)
    except GaveUp as error:
        raise RunFailed(str(error), error.code) from None


def _is_ours(word: str) -> bool:
    return word == _FLAG or word.startswith(f"{_FLAG}.")


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The options of the supervisor, without their prefix, and all others."""
    ours, theirs, words = [], [], list(arguments)
    while words:
        word = words.pop(0)
        if not _is_ours(word):
            theirs.append(word)
        elif word != _FLAG:
            ours.append("--" + word.removeprefix(f"{_FLAG}."))
            if "=" not in word and words and not words[0].startswith("--"):
                ours.append(words.pop(0))
    return ours, theirs


def _output_dir(options: Sequence[str]) -> Path:
    for word, following in zip(options, [*options[1:], ""], strict=True):
        name, _, value = word.replace("_", "-").partition("=")
        if name == "--output-dir" and (value or following):
            return Path(word.partition("=")[2] or following)
    raise UsageError(
        "--supervise needs --output-dir, where the supervisor keeps its state"
    )
