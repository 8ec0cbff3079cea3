"""What a function costs, in calls or instructions: neither depends on the host."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jaxscale


_OWN = str(Path(jaxscale.__file__).parent)


def own_calls(function: Callable[[], Any]) -> int:
    """How many functions of jaxscale are called on this thread.

    Those of libraries are left out, since tests have checks of types in between.
    """
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(_OWN)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def own_instructions(function: Callable[[], Any]) -> int:
    """How many instructions of Python jaxscale executes on this thread.

    A loop counts, also one without calls; what a library does in one call does not.
    """
    count = 0

    def note(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        if event == "opcode":
            count += 1
        elif frame.f_code.co_filename.startswith(_OWN):
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return note
        else:
            return None
        return note

    before = sys.gettrace()
    sys._getframe().f_trace_opcodes = True  # Python looks for one when it begins
    sys.settrace(note)
    try:
        function()
    finally:
        sys.settrace(before)
    return count
