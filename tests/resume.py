"""Pytest's results on disk as they come: ``pytest --resume FILE``.

A run on a machine that is lent for minutes may be cut off at any time. Each test that
ends adds a line of JSON to the file, with its seconds and traceback; tracebacks are
printed at once; and what the file says has passed is left out when the same command
runs again. The file is that of one commit: delete it when the code has changed.
"""

import json
from pathlib import Path
from typing import Any

import pytest


__all__ = ["Resume"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--resume",
        type=Path,
        metavar="FILE",
        help="add results to this file, and leave out the tests that passed in it",
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--resume")) is not None:
        config.pluginmanager.register(Resume(config, path), "resume")


class Resume:
    """Writes results in the process that prints; leaves tests out in all of them."""

    def __init__(self, config: pytest.Config, path: Path) -> None:
        self.config = config
        # In a worker: what had passed when the first of them started.
        found = getattr(config, "workerinput", {}).get("passed")
        self.path = path if found is None else None
        self.passed = _passed(path) if found is None else set(found)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["passed"] = sorted(self.passed)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        left_out = [item for item in items if item.nodeid in self.passed]
        items[:] = [item for item in items if item.nodeid not in self.passed]
        self.config.hook.pytest_deselected(items=left_out)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.path is None or (report.passed and report.when != "call"):
            return
        error = report.longreprtext if report.failed else ""
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 2),
            "worker": getattr(report, "worker_id", ""),
            "error": error,
        }
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)
        if error:
            print(f"\n{report.nodeid}\n{error}", flush=True)


def _passed(path: Path) -> set[str]:
    """The tests of which the last line says so; a line may be cut off."""
    outcomes = {}
    for text in path.read_text().splitlines() if path.exists() else []:
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        outcomes[line["test"]] = line["outcome"]
    return {test for test, outcome in outcomes.items() if outcome == "passed"}
