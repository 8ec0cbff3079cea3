"""Runs of pytest that are cut off, and go on."""

import json


pytest_plugins = ["pytester"]

TESTS = """
    import os
    import pytest

    def test_good():
        pass

    def test_bad():
        assert "mended" in os.environ, "not yet"

    @pytest.mark.skip
    def test_elsewhere():
        pass
"""


def test_what_passed_is_left_out_and_errors_are_kept(pytester, monkeypatch):
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds
    pytester.makepyfile(TESTS)
    path = pytester.path / "results.jsonl"
    arguments = ("-p", "tests.resume", "-p", "xdist", "--resume", path, "-n")

    def lines():
        found = [json.loads(text) for text in path.read_text().splitlines()]
        return {line["test"].partition("::")[2]: line for line in found}

    run = pytester.runpytest_inprocess(*arguments, 0)
    run.assert_outcomes(passed=1, failed=1, skipped=1)
    first = lines()
    assert {test: line["outcome"] for test, line in first.items()} == {
        "test_good": "passed",
        "test_bad": "failed",
        "test_elsewhere": "skipped",
    }
    assert "AssertionError: not yet" in first["test_bad"]["error"]
    # The process was ended while it wrote.
    path.write_text(f'{path.read_text()}{{"test": "cut o\n')
    monkeypatch.setenv("mended", "1")
    run = pytester.runpytest_inprocess(*arguments, 2)
    run.assert_outcomes(passed=1, skipped=1)
    path.write_text(path.read_text().replace('{"test": "cut o\n', ""))
    assert lines()["test_bad"]["outcome"] == "passed"
