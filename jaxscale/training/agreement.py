"""Processes of a job check that their settings agree before they compute together.

Programs of different shapes would deadlock, and different values would be summed
silently. The exchanged arrays have the same shape on all processes.
"""

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxscale import __version__
from jaxscale.training.checkpoint.array_names import flatten
from jaxscale.training.checkpoint.steps import texts
from jaxscale.training.config import TrainConfig
from jaxscale.training.run import to_dict


# Paths of the text may differ: its content is compared when it is read.
_OF_A_HOST = ("data.paths", "data.cache_dir", "data.tokenizer", "source")


def check_same_settings(config: TrainConfig) -> None:
    """Compare the settings and versions of all processes; all must call this.

    Raises:
        ValueError: they differ; the message says in what, and on which processes.
    """
    if jax.process_count() == 1:
        return
    mine = _settings(config)
    text = json.dumps(mine, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if len(set(texts(digest))) == 1:
        return
    if problem := differences([json.loads(other) for other in _whole(text)]):
        raise ValueError(problem)


def of_first_or_error(do: Callable[[], object]) -> None:
    """Run `do` in process 0, and raise its error in all processes.

    Raises:
        ValueError: it failed.
    """
    problem = ""
    if jax.process_index() == 0:
        try:
            do()
        except ValueError as error:
            problem = str(error)
    if problem := texts(problem)[0]:
        raise ValueError(problem)


def differences(settings: Sequence[Mapping[str, Any]]) -> str | None:
    """The differences between the settings of processes, in words; None if there are
    none.

    Example:
        >>> differences([{"steps": 5}, {"steps": 5}, {"steps": 6}])
        'steps is 5 on process 0 and 6 on process 2; start all of them with the same ...
    """
    first, found = settings[0], []
    for name in sorted({name for each in settings for name in each}):
        others = [
            f"{each.get(name)!r} on process {i}"
            for i, each in enumerate(settings)
            if each.get(name) != first.get(name)
        ]
        if others:
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            which = ", ".join(others[:3])
            found.append(
                f"{name} is {first.get(name)!r} on process 0 and {which}{more}"
            )
    if not found:
        return None
    return f"{'; '.join(found)}; start all of them with the same command and versions"


def _settings(config: TrainConfig) -> dict[str, Any]:
    settings = flatten(to_dict(config))
    for name in _OF_A_HOST:
        del settings[name]
    return settings | {
        "version of jaxscale": __version__,
        "version of jax": jax.__version__,
        "version of jaxlib": version("jaxlib"),
        "version of numpy": np.__version__,
        "version of Python": platform.python_version(),
    }


def _whole(text: str) -> list[str]:
    """The text of each process, however long."""
    content = np.frombuffer(text.encode(), np.uint8)
    size = np.asarray(multihost_utils.process_allgather(np.int32(len(content))))
    mine = np.zeros(size.max(), np.uint8)
    mine[: len(content)] = content
    everyones = np.asarray(multihost_utils.process_allgather(mine))
    return [row[:n].tobytes().decode() for row, n in zip(everyones, size, strict=True)]
