"""Plotly, which is optional, and imported when something is drawn."""

import importlib
from types import ModuleType


def plotly(module: str) -> ModuleType:
    """A module of plotly, such as ``graph_objects``.

    Raises:
        ImportError: plotly is missing; the message names the extra.
    """
    try:
        return importlib.import_module(f"plotly.{module}")
    except ImportError as error:
        raise ImportError(
            "plots need plotly; install it with: pip install 'jaxscale[train]'"
        ) from error
