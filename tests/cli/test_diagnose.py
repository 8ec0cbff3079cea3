"""``jaxscale diagnose``: table, JSON and exit code; the checks are tested elsewhere."""

import json

import pytest

from jaxscale import cli
from jaxscale.cli import diagnose as command
from jaxscale.training import Diagnosis, Finding, Measurement


DEVICES = tuple(
    {"id": i, "kind": "NVIDIA H200", "platform": "gpu", "process": 0, "host": "n1"}
    for i in range(2)
)
MEASURED = (
    Measurement(name="matmul bfloat16", devices=(0,), value=751e12),
    Measurement(name="matmul bfloat16", devices=(1,), value=500e12),
    Measurement(name="memory", devices=(0,), value=4.1e12),
    Measurement(name="pairs", devices=(0, 1), value=380e9),
    Measurement(name="all-reduce", devices=(0, 1), value=301e9, size=2**20),
)
SLOW = Finding(devices=(1,), text="matmul bfloat16: 500 TFLOP/s, too few")
HOST = Finding(devices=(), text="/tmp cannot be written")


@pytest.fixture
def found(monkeypatch):
    """Have the checks find this; gives the settings that they got."""
    asked = []

    def give(*findings, **more):
        fields = {"devices": DEVICES, "measurements": MEASURED, "notes": ("a note",)}
        result = Diagnosis(**fields | {"findings": findings} | more)
        monkeypatch.setattr(
            command, "diagnose", lambda config, **k: asked.append((config, k)) or result
        )
        return asked

    return give


def test_the_table_names_the_fault(found, capsys):
    asked = found(SLOW, HOST)
    assert cli.main(["diagnose", "--directory", "/data", "--gpus", "2"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[:3]] == [
        *("results", "ok", "FAULT")
    ]
    assert "gpu 1 (NVIDIA H200, n1)  500 TFLOP/s" in lines[2]
    assert "4100 GB/s" in lines[1] and "380 GB/s" in lines[2]
    assert lines[3] == "all-reduce of 1,048,576 bytes over 2 devices: 301 GB/s"
    assert "from the host" not in lines[0]  # was not measured
    # A supervisor keeps the last line.
    assert lines[-1] == (
        "device 1: matmul bfloat16: 500 TFLOP/s, too few; /tmp cannot be written"
    )
    (config, options), *_ = asked
    assert config.gpus == 2 and options == {"directory": "/data"}


def test_json_goes_to_a_file_or_to_standard_output(found, capsys, tmp_path):
    asked, file = found(), tmp_path / "found.json"
    assert cli.main(["diagnose", "--json", str(file), "--no-host"]) == 0
    assert capsys.readouterr().out.endswith("nothing is wrong\n")
    saved = json.loads(file.read_text())
    assert saved["ok"] and saved["measurements"][1]["value"] == 500e12
    assert asked[0][1] == {"directory": None}
    found(SLOW)
    assert cli.main(["diagnose", "--json", "-"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert not printed["ok"] and printed["findings"][0]["devices"] == [1]


def test_of_several_processes_one_reports(found, capsys):
    found(SLOW, first=False)
    assert cli.main(["diagnose", "--together"]) == 1
    assert capsys.readouterr().out == ""


def test_settings_that_cannot_work(found, capsys, tmp_path):
    found()
    assert cli.main(["diagnose", "--least-share", "2"]) == 2
    assert "least_share 2.0, expected 0 to 1" in capsys.readouterr().err
    assert cli.main(["diagnose", "--json", str(tmp_path / "no" / "file")]) == 2
