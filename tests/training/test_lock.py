"""One process at a time writes to a directory, and dead ones hold nothing."""

import dataclasses
import json
import logging
import os
import subprocess
import sys

import pytest

from jaxscale.supervision import EventLog
from jaxscale.training import lock
from jaxscale.training.lock import LOCK_FILE, keep, locked


HOLD = """
import sys
from pathlib import Path
from jaxscale.training.lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process that holds the lock of a directory."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout and process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_told_who_holds_it(other, tmp_path, caplog):
    found = (tmp_path / LOCK_FILE).read_bytes()
    with (
        pytest.raises(ValueError, match=f"in use by process {other.pid} on .* since"),
        locked(tmp_path),
    ):
        pass
    assert (tmp_path / LOCK_FILE).read_bytes() == found
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]
    other.kill()
    other.wait()
    with caplog.at_level(logging.WARNING), locked(tmp_path), locked(tmp_path):
        held = json.loads((tmp_path / LOCK_FILE).read_text())
        assert held["pid"] == os.getpid()
    assert f"the lock of process {other.pid} on" in caplog.text
    assert list(tmp_path.iterdir()) == []


def test_a_restarted_job_takes_over_its_own_lock(tmp_path, monkeypatch):
    """Of a host that does not answer any more."""
    owner = lock._Owner(host="gone", pid=1, started="1", since="then", supervised=True)
    content = json.dumps(dataclasses.asdict(owner))
    monkeypatch.setattr(EventLog, "supervised", True)
    for is_first in (True, False):
        log = EventLog(is_first=is_first)
        monkeypatch.setattr(lock, "current", lambda log=log: log)
        (tmp_path / LOCK_FILE).write_text(content)
        if is_first:
            with pytest.raises(ValueError, match="on gone since"), locked(tmp_path):
                pass
        else:
            with locked(tmp_path):
                pass


@pytest.mark.parametrize("content", ["", "{", '{"pid": 1}', "[]"])
def test_a_lock_of_another_host_is_stale_when_nothing_beats(tmp_path, content):
    path = tmp_path / LOCK_FILE
    path.write_text(content)
    with pytest.raises(ValueError, match="in use by another process"), locked(tmp_path):
        pass
    os.utime(path, (0, 0))
    with locked(tmp_path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_folders_are_given_back_where_nothing_was_written(tmp_path):
    with locked(tmp_path / "runs" / "a"):
        assert (tmp_path / "runs" / "a").is_dir()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "file").touch()
    with (
        pytest.raises(ValueError, match="is a file; choose"),
        locked(tmp_path / "file"),
    ):
        pass


def test_a_lock_that_is_kept_is_given_back_by_the_next_one(tmp_path):
    """A script writes the settings of its run, trains, and writes what it has made."""
    path = tmp_path / "run" / LOCK_FILE
    for _ in range(2):  # a notebook of which cells run twice
        keep(path.parent)
        keep(path.parent)
        assert path.exists()
    with locked(path.parent):
        with locked(path.parent):
            pass
        assert path.exists()
    assert not path.exists()


SCRIPT = """
import os, sys
from pathlib import Path
from jaxscale.training.lock import LOCK_FILE, keep
keep(Path(sys.argv[1]))
child = os.fork()
if child == 0:
    sys.exit()  # and not the lock of the script
os.waitpid(child, 0)
assert (Path(sys.argv[1]) / LOCK_FILE).exists()
"""


def test_a_lock_that_is_kept_ends_with_its_process(tmp_path):
    subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "run"], check=True)
    assert list(tmp_path.iterdir()) == []
