"""What commands say while they work: at once, on standard error, and of idle GPUs."""

import contextlib
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

from jaxscale import cli
from jaxscale.cli import devices, diagnose
from jaxscale.cli.notices import library_notices
from pallas_kernels import H200, use_device
from tests.pallas_kernels.triton_compiled import DEVICES
from tests.pallas_kernels.triton_interpreter import installed


# Ends the process at the first import of what takes long to load.
STUB = """
import os, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "numpy", "rich", "tyro", "flax"):
            os.write(2, b"IMPORT\\n")
            os._exit(7)

sys.meta_path.insert(0, Stop())
"""


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_a_line_is_said_before_anything_large_is_imported(command, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(STUB)
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    found = subprocess.run(
        [sys.executable, "-m", "jaxscale", command, "runs/tiny"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert found.returncode == 7 and found.stdout == ""
    said, imported = found.stderr.splitlines()
    assert said.startswith(f"jaxscale: {command}, by jaxscale ")
    assert imported == "IMPORT"


def test_what_the_library_logs_is_said_once(capsys, caplog):
    logger = logging.getLogger("jaxscale.training")
    before = logging.getLogger("jaxscale")
    state = before.level, before.propagate, list(before.handlers)
    with library_notices():
        logger.info("tokenizing %d documents", 3)
        logger.debug("not this")
    assert capsys.readouterr().err == "jaxscale: tokenizing 3 documents\n"
    assert caplog.records == []
    assert (before.level, before.propagate, before.handlers) == state


BAR = """
import logging
from jaxscale.cli.notices import library_notices
from jaxscale.observability.bar import Bar

with library_notices():
    bar = Bar("train", 3)
    bar.update(1, "loss 1")
    logging.getLogger("jaxscale.training").warning("stopped by a signal")
    bar.close()
"""


def test_a_warning_stands_above_the_bar_of_a_terminal():
    ours, theirs = os.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        process = subprocess.Popen(
            [sys.executable, "-c", BAR],
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "PYTHONPATH": os.getcwd(), "TERM": "xterm"},
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the other end is closed
            while part := screen.read(4096):
                shown += part
        assert process.wait() == 0
    # The line of the bar is cleared, takes the warning, and the bar goes on below.
    assert b"\x1b[2Kjaxscale: stopped by a signal\r\ntrain " in shown


@pytest.mark.parametrize(
    ("platform", "asked", "gpu", "told"),
    [
        ("cpu", None, True, True),
        ("cpu", "cpu", True, False),
        ("cpu", None, False, False),
        ("gpu", None, True, False),
    ],
)
def test_a_gpu_that_jax_cannot_use_is_said(
    monkeypatch, capsys, platform, asked, gpu, told
):
    kind = SimpleNamespace(platform=platform, device_kind="a kind")
    monkeypatch.setattr(jax, "devices", lambda: [kind, kind])
    monkeypatch.setattr(devices, "_asked_for_cpu", lambda: asked == "cpu")
    monkeypatch.setattr(devices, "_has_gpu", lambda: gpu)
    monkeypatch.setattr(devices, "_announce_kernels", lambda: None)
    devices.announce_devices()
    first, *rest = capsys.readouterr().err.splitlines()
    assert first == "jaxscale: devices: 2 x a kind"
    assert bool(rest) == told
    if told:
        assert "has an NVIDIA GPU, and this JAX is built for CPUs" in rest[0]
        assert "[cuda13]" in rest[0]


def test_the_kernels_of_a_gpu_are_said_in_a_line(monkeypatch, capsys):
    kind = SimpleNamespace(platform="gpu", device_kind="a kind")
    monkeypatch.setattr(jax, "devices", lambda: [kind])
    for spec, line, more in (
        (H200, "mosaic_gpu for varlen_attention, ", []),
        (DEVICES[80], "xla for varlen_attention, ", ["[triton]"]),
    ):
        with use_device(spec):
            devices.announce_devices()
        _, kernels, *hints = capsys.readouterr().err.splitlines()
        assert kernels.startswith(f"jaxscale: kernels: {line}")
        assert len(hints) == len(more)
        assert all(word in hint for word, hint in zip(more, hints, strict=True))


def test_diagnose_has_a_table_of_them(monkeypatch):
    installed(monkeypatch)
    with use_device(DEVICES[80]):
        lines = dict(line.split() for line in diagnose._kernels().splitlines())
    assert lines["op"] == "implementation"
    assert lines["varlen_attention"] == "triton" and lines["matmul"] == "xla"


def test_a_gpu_is_known_by_its_driver_or_its_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(devices, "_DRIVER", str(tmp_path / "nvidia"))
    assert not devices._has_gpu()
    (tmp_path / "nvidia").mkdir()
    assert devices._has_gpu()
    (tmp_path / "nvidia").rmdir()
    (tmp_path / "nvidia-smi").touch(mode=0o755)
    assert devices._has_gpu()
