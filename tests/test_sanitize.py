"""What `tests.sanitize` makes of the end of a process."""

import sys
from pathlib import Path

import pytest

from tests.sanitize import TESTS, check, excerpt


ROOT = Path(__file__).parent / "pallas_kernels"


@pytest.mark.parametrize(
    ("program", "verdict"),
    [
        ("print('1 passed in 2s')", "clean"),
        ("print('1 skipped in 2s')", "not passed"),
        ("print('1 passed in 2s'); raise SystemExit(99)", "faults"),
        ("print('1 failed, 1 passed in 2s'); raise SystemExit(1)", "not passed"),
        ("import time; time.sleep(60)", "out of time"),
    ],
)
def test_verdicts(program, verdict):
    seconds = 0.2 if verdict == "out of time" else 60
    assert check((sys.executable, "-c", program), seconds)[0] == verdict


def test_the_tests_are_there():
    for node in TESTS.values():
        path, _, name = node.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text()


def test_what_the_sanitizer_found_is_shown_before_the_end():
    lines = [*(f"traceback {i}" for i in range(50)), "1 failed"]
    lines.insert(10, "========= Error: Race reported between Write and Read")
    shown = excerpt("\n".join(lines)).splitlines()
    assert shown[0].strip().startswith("========= Error")
    assert shown[1:] == [f"    {line}" for line in lines[-20:]]
