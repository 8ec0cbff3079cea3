"""The command line before any command runs: help, version, what is missing."""

import errno
import gc
import subprocess
import sys

import pytest

from jaxscale import __version__, cli
from jaxscale.cli.errors import RunFailed, UsageError, training_errors, usage_errors
from jaxscale.training import CheckpointNotWritten, Diverged, ReplicasDiffer


def test_help_names_every_command(capsys):
    for arguments in ([], ["-h"], ["--help"], ["help"]):
        assert cli.main(arguments) == 0
        text = capsys.readouterr().out
        for name, about in cli.COMMANDS.items():
            assert f"  {name} " in text and about in text


def test_version(capsys):
    for word in ("--version", "-V", "version"):
        assert cli.main([word]) == 0
        assert capsys.readouterr().out == f"jaxscale {__version__}\n"


def test_help_of_a_command(capsys):
    assert cli.main(["help", "train"]) == 0
    assert capsys.readouterr().out.startswith("usage: jaxscale train")


def test_an_unknown_command_is_named_with_a_guess(capsys):
    assert cli.main(["tarin"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "jaxscale: error: 'tarin' is no command (did you mean train?); use one of "
        "quickstart, train, prune, export, generate, serve, supervise, executor, "
        "diagnose, plan, report, schedule, bench-serve\n"
    )


def test_a_command_of_another_program_names_ours(capsys):
    assert cli.main(["fine-tune"]) == 2
    assert "no command (did you mean train?)" in capsys.readouterr().err


def test_python_dash_m_answers_without_importing_jax():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "jaxscale", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.startswith("usage: jaxscale COMMAND")
    assert "| jax\n" not in result.stderr and "| numpy\n" not in result.stderr


def test_a_missing_package_is_named_with_its_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    for name in [m for m in sys.modules if m.startswith("jaxscale.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    assert cli.main(["generate", "--help"]) == 2
    assert capsys.readouterr().err == (
        f"jaxscale: generate, by jaxscale {__version__}: loading its libraries\n"
        "jaxscale: error: generate needs tyro, which is not installed; "
        "pip install '.[train]' in a clone of jaxscale\n"
    )


def test_only_what_the_library_rejects_is_a_mistake_of_usage():
    for error in (ValueError("a"), PermissionError("b"), ImportError("c")):
        with pytest.raises(UsageError, match=str(error)), usage_errors():
            raise error
    with pytest.raises(RuntimeError), usage_errors():
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Diverged("a"), 3),
        (CheckpointNotWritten("b"), 4),
        (ReplicasDiffer("c", [1]), 5),
    ],
)
def test_how_a_run_may_end(error, code):
    with pytest.raises(RunFailed, match=str(error)) as raised, training_errors():
        raise error
    assert raised.value.code == code


def test_a_full_disk_ends_a_run_with_the_code_of_what_was_not_written():
    full = OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")
    told = r"No space left on device \(metrics.jsonl\): .* make room"
    with pytest.raises(RunFailed, match=told) as raised, training_errors():
        raise full
    assert raised.value.code == 4
    with pytest.raises(PermissionError), training_errors():
        raise PermissionError(errno.EACCES, "no")


def test_no_collection_while_libraries_are_imported(monkeypatch):
    """Passes over half a million objects that stay are a sixth of that time."""
    seen = []
    load = cli.importlib.import_module

    def importing(name):
        seen.append(gc.isenabled())
        return load(name)

    monkeypatch.setattr(cli.importlib, "import_module", importing)
    assert cli._load("schedule").main is not None
    assert {*seen} == {False} and gc.isenabled()
