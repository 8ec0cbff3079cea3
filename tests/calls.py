"""What a function costs, in calls: that does not depend on the host."""

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
