"""Named runs: what ``jaxscale train NAME`` starts from.

A run is a Python function without arguments that returns a `TrainConfig`. Every model
preset is the name of a run that trains it from scratch; ``module:function`` names a
function of your own, for example ``my_runs:wide_llama`` in ``my_runs.py``.
"""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.cli.errors import UsageError, suggestion
from jaxscale.models import ENCODER_PRESETS, PRESETS
from jaxscale.models.hf.hub import is_hub_name
from jaxscale.recipes.runs import from_preset
from jaxscale.training import TrainConfig


def find_run(name: str) -> TrainConfig:
    """The settings of the run called `name`, or made by ``module:function``.

    Raises:
        UsageError: there is no such run, its function fails, or returns something else.
    """
    presets = [*PRESETS, *ENCODER_PRESETS]
    if name in presets:
        return from_preset(name)
    if ":" not in name:
        raise UsageError(
            f"{name!r} is no run{suggestion(name, presets)}; use one of "
            f"{', '.join(presets)}, module:function for your own, "
            "or --from SOURCE for a model that has weights"
        )
    with _user_errors(name):
        config = _import(name)()
    if not isinstance(config, TrainConfig):
        raise UsageError(
            f"{name} returned {type(config).__name__}, expected a TrainConfig"
        )
    return config


def is_source(name: str) -> bool:
    """Whether the first word of ``jaxscale train`` is a model with weights, no run."""
    if name in PRESETS or name in ENCODER_PRESETS:
        return False
    return Path(name).is_dir() or is_hub_name(name)


def _import(name: str) -> Any:
    module, _, function = name.partition(":")
    # The command starts in its own directory, not in that of the user's file.
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise
        raise UsageError(
            f"{name}: there is no module {module!r} here or among the installed ones; "
            "write my_runs:small for the function small in my_runs.py"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


@contextlib.contextmanager
def _user_errors(name: str) -> Iterator[None]:
    """Report what goes wrong in the user's module in a line, with its place."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{name} failed: {type(error).__name__}: {error} "
            f"({place.filename}:{place.lineno})"
        ) from error
