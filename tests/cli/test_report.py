"""``jaxscale report``."""

import json
import os
import signal
import subprocess
import sys
import urllib.request

import pytest

from tests.observability.runs import hanging_cube, survived_hang, write


def test_page_and_trace_are_written(command, tmp_path):
    run, trace = survived_hang(tmp_path / "run"), tmp_path / "trace.json"
    code, out, err = command("report", run, "--chrome-trace", trace)
    assert code == 0 and err.strip().endswith("loading its libraries"), err
    assert f"report: {run / 'report.html'}" in out and "from step 1 on" in out
    assert "Held up by rank 5" in (run / "report.html").read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["missing"], "missing is no directory"),
        (["."], "holds no events of a run"),
        ([".", "--serve", "--address", "here"], "address 'here', expected host:port"),
        ([".", "--serve", "--output", "x.html"], "serve writes no files"),
        ([".", "--serve", "--address", "192.0.2.1:0"], "assign requested address"),
    ],
)
def test_mistakes_are_told(command, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    code, _, err = command("report", *options)
    assert code == 2 and message in err and "Traceback" not in err


def test_a_directory_that_cannot_be_written(command, tmp_path):
    run = write(tmp_path / "run", hanging_cube())
    (tmp_path / "file").touch()
    code, _, err = command("report", run, "--output", tmp_path / "file" / "x.html")
    assert code == 2 and "file" in err


def test_serve_ends_on_ctrl_c(tmp_path):
    run = write(tmp_path / "run", hanging_cube())
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxscale", "report", str(run), "--serve"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    try:
        url = process.stdout.readline().split()[1]
        assert url.startswith("http://127.0.0.1:")
        data = json.load(urllib.request.urlopen(url + "data.json", timeout=120))
        assert data["moments"][0]["silent"] == [5]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    assert (process.returncode, out) == (0, "ended\n")
    assert err.startswith("jaxscale: report, by") and err.count("\n") == 1
