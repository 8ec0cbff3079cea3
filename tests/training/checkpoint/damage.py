"""Checkpoints as crashes and full disks leave them."""

import os
from pathlib import Path

import pytest


READS_GO_ON = pytest.mark.filterwarnings(
    "ignore:(?s)Exception ignored in. None.*Event loop is closed"
    ":pytest.PytestUnraisableExceptionWarning"
)
"""For tests that read what is damaged: where a read fails, Orbax closes its event loop
beside others that have not ended, and these complain in a thread of tensorstore."""


def damage(step: Path, how: str) -> None:
    """Damage the directory of a step."""
    state = step / "state"
    if how == "cut off":
        for file in state.rglob("d/*"):
            os.truncate(file, file.stat().st_size // 2)
    elif how == "no metadata":
        (state / "_METADATA").unlink()
    elif how == "empty metadata":
        (state / "_METADATA").write_text("")
    elif how == "no position":
        (step / "data" / "metadata").unlink()
