"""`train --supervise` and `supervise`: what the ranks are told, and what is refused."""

import sys

import pytest

from jaxscale.cli import supervise
from jaxscale.cli.errors import UsageError
from jaxscale.supervision import GaveUp
from jaxscale.supervision.config import SuperviseConfig


@pytest.fixture
def jobs(monkeypatch):
    """What would be started."""
    found = []
    monkeypatch.setattr(supervise, "supervise", lambda *job: found.append(job) or 0)
    return found


def test_options_go_to_the_supervisor_or_to_the_ranks(command, jobs, tmp_path):
    code, _, err = command(
        *("train", "llama_tiny", "--steps", "3", "--supervise"),
        *("--supervise.processes", "4", "--output-dir", tmp_path),
        *("--supervise.deadlines.step=5", "--supervise.no-replay", "--devices", "2"),
    )
    assert code == 0, err
    ((words, directory, config),) = jobs
    assert words[:4] == [sys.executable, "-m", "jaxscale", "train"]
    assert words[4:] == [
        *("llama_tiny", "--steps", "3", "--output-dir", str(tmp_path)),
        *("--devices", "2", "--resume", "auto"),
    ]
    assert directory == tmp_path
    assert (config.processes, config.replay, config.deadlines.step) == (4, False, 5)


def test_help_describes_the_supervisor(command, jobs):
    code, out, _ = command("train", "llama_tiny", "--supervise", "--help")
    assert code == 0 and jobs == []
    assert "--supervise. before their names" in out and "--deadlines.step" in out


def test_a_run_that_is_there_is_continued_if_it_is_meant(command, jobs, tmp_path):
    (tmp_path / "run.json").touch()
    train = ("train", "llama_tiny", "--supervise", f"--output-dir={tmp_path}")
    code, _, err = command(*train)
    assert code == 2 and "already holds a run; add --resume to continue it" in err
    assert command(*train, "--resume")[0] == 0
    assert jobs[-1][0].count("--resume") == 1
    (tmp_path / "supervisor").mkdir()  # the same command, after the driver was killed
    assert command(*train)[0] == 0
    assert jobs[-1][0][-2:] == ["--resume", "auto"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "llama_tiny", "--supervise"], "--supervise needs --output-dir"),
        (
            ["train", "x", "--output-dir", "o", "--supervise.process", "2"],
            "Unrecognized options: --process",
        ),
        (
            ["train", "x", "--output-dir", "o", "--supervise.processes", "0"],
            "processes 0 must be an integer of at least 1",
        ),
        (["supervise", "--output-dir", "o"], "there is no command; end with -- python"),
        (["supervise", "--", "true"], "--output-dir"),
        (["executor"], "--driver"),
        (["executor", "--driver", "a:1", "--grace", "0"], "grace 0.0 must be positive"),
    ],
)
def test_mistakes_are_explained(
    command, jobs, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    code, _, err = command(*arguments)
    assert code == 2 and message in err, err
    assert jobs == [] and list(tmp_path.iterdir()) == []


def test_a_job_that_is_given_up_has_an_exit_code(command, monkeypatch, tmp_path):
    def fail(*job):
        raise GaveUp("three starts in a row reached nothing")

    monkeypatch.setattr(supervise, "supervise", fail)
    code, _, err = command("supervise", "--output-dir", tmp_path, "--", "false")
    assert code == 4 and "three starts in a row" in err and "Traceback" not in err


def test_the_command_may_have_options_of_its_own(jobs, tmp_path):
    arguments = ["--output-dir", str(tmp_path), "--", "python", "a.py", "--", "--x"]
    assert supervise.main(arguments) == 0
    assert jobs == [(["python", "a.py", "--", "--x"], tmp_path, SuperviseConfig())]
    with pytest.raises(UsageError, match="there is no command"):
        supervise.main([*arguments[:3]])
