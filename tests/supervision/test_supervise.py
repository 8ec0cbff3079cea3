"""The supervisor around ranks that need no jax: faults, and a trace without a gap."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxscale.supervision import (
    Deadlines,
    GaveUp,
    SuperviseConfig,
    protocol,
    read_events,
    supervise,
)
from jaxscale.supervision.driver import Driver
from jaxscale.supervision.executor import _environment
from jaxscale.supervision.state import DONE, State, read
from tests.supervision.clock import goes_while
from tests.supervision.fake_rank import unbroken
from tests.tiers import exhaustive


STEPS = 24
STALL = 1.0
WAIT = 120.0  # s, for what comes at once on a machine with nothing else to do
ROOT = Path(__file__).parents[2]


def config(**options):
    deadlines = Deadlines(step=STALL, host=60)
    return SuperviseConfig(
        **{"processes": 2, "backoff": 0.1, "deadlines": deadlines} | options
    )


def command(out, *faults, steps=STEPS):
    module = "tests.supervision.fake_rank"
    return [sys.executable, "-m", module, str(out), str(steps), *faults]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run ranks with faults: the exit code, what the driver said, its faults.

    Deadlines count from the first fault to the end of its cycle.
    """
    monkeypatch.chdir(ROOT)
    struck, lines = tmp_path / "struck", []
    is_due = lambda driver: driver._state.cycle == 1 and struck.exists()  # noqa: E731
    monkeypatch.setattr(Driver, "_take", goes_while(is_due))

    def call(*faults, **options):
        job = command(tmp_path, *faults)
        code = supervise(job, tmp_path, config(**options), report=lines.append)
        return code, lines, driver_events(tmp_path)

    call.lines = lines
    return call


def driver_events(out):
    file = out / "supervisor" / "events-driver.jsonl"
    return read_events(file) if file.exists() else []


def losses(out):
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def nothing_runs(out):
    """No rank and no executor of a job is left, or will be in a moment."""

    def others():
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                words = (process / "cmdline").read_bytes()
                if str(out).encode() in words and process.name != str(os.getpid()):
                    yield words

    wait_until(lambda: not [*others()])


@pytest.mark.parametrize(
    ("fault", "kind", "reason"),
    [
        ("kill:1:10", "exit", "rank 1 died in dispatched of step 10 by SIGKILL"),
        ("raise:1:10", "error", "rank 1 failed .* RuntimeError: injected"),
        ("stop:1:10", "stall", r"said nothing for .* \(deadline 1 s\)"),
        ("gil:1:10", "stall", r"said nothing for .* \(deadline 1 s\)"),
        ("nan:0:10", "not_finite", "loss or gradients of step 10 were not"),
        ("wrong:0:10", "wrong_values", "wrong values at step 10: differ"),
        ("executor:1:10", "lost", "the executor of ranks 0, 1 has gone"),
        ("term:1:10", "stopped", "the ranks were asked to stop, not by the"),
        *exhaustive(
            ("segfault:0:10", "exit", "rank 0 died in .* of step 10 by SIGSEGV"),
            ("loop:0:10", "stall", r"said nothing for .* \(deadline 1 s\)"),
        ),
    ],
)
def test_a_fault_is_noticed_and_the_trace_has_no_gap(
    run, tmp_path, monkeypatch, fault, kind, reason
):
    if kind != "stall":  # it is noticed by itself
        monkeypatch.setattr(Driver, "_take", goes_while(lambda driver: False))
    code, lines, (event, again) = run(fault)
    assert code == 0, lines
    assert losses(tmp_path) == unbroken(STEPS)
    assert (event["kind"], event["name"], event["cycle"]) == ("fault", kind, 1)
    assert re.search(reason, event["args"]["reason"])
    assert (again["name"], again["cycle"]) == ("running", 2)
    nothing_runs(tmp_path)


def beginning(directory, ranks):
    """The message that starts ranks."""
    return protocol.Start(
        cycle=1,
        ranks=ranks,
        processes=len(ranks),
        coordinator="",
        command=[],
        directory=str(directory / "supervisor"),
        resume_before=0,
        is_first=True,
        skips=[],
    )


@pytest.mark.parametrize(
    ("visible", "processes", "shares"),
    [
        ("4,5,6,7", 2, ["4,5", "6,7"]),
        ("0,1,2,3", 4, ["0", "1", "2", "3"]),
        ("0,1,2", 2, ["0", "1"]),
        (None, 2, ["0", "1"]),
        ("0,1", 1, ["0,1"]),
        (None, 1, [None]),
    ],
)
def test_processes_of_a_host_share_its_gpus(tmp_path, visible, processes, shares):
    start = beginning(tmp_path, [*range(processes)])
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    found = [_environment(start, i, i, given) for i in range(processes)]
    assert [own.get("CUDA_VISIBLE_DEVICES") for own in found] == shares


def test_compiled_programs_are_of_the_user_alone(run, tmp_path, monkeypatch):
    """To load one can run any code; a cache of the user's own is theirs to guard."""
    start = beginning(tmp_path, [0])
    folder = tmp_path / "supervisor" / "compiled"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert _environment(start, 0, 0, {})["JAX_COMPILATION_CACHE_DIR"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o720)
    refused = f"others may write to {folder}, and to load a program can run any code: "
    with pytest.raises(ValueError, match=refused):
        _environment(start, 0, 0, {})
    with pytest.raises(ValueError, match=refused):
        run()
    assert not (tmp_path / "metrics.jsonl").exists()
    own = {"JAX_COMPILATION_CACHE_DIR": "/own"}
    assert _environment(start, 0, 0, own)["JAX_COMPILATION_CACHE_DIR"] == "/own"


def test_an_executor_that_is_silent_is_replaced(run, tmp_path):
    """Its ranks go on, maybe to the end, and are not heard."""
    deadlines = Deadlines(host=1)
    code, lines, events = run("executor-stop:1:10", deadlines=deadlines)
    assert code == 0, lines
    assert losses(tmp_path) == unbroken(STEPS)
    assert events[0]["name"] == "lost"
    assert re.search(r"on .* said nothing for 1", events[0]["args"]["reason"])
    assert "is dropped: it is silent" in lines[1]
    nothing_runs(tmp_path)


def test_an_executor_that_dies_during_the_check_is_replaced(run, tmp_path):
    deadlines = Deadlines(diagnose=10**4)  # nobody waits for its answer
    diagnose = "sh -c 'kill -9 $PPID'"
    code, lines, _ = run("kill:1:10", diagnose=diagnose, deadlines=deadlines)
    assert code == 0, lines
    assert losses(tmp_path) == unbroken(STEPS)
    assert not any("not used any more" in line for line in lines)


def test_the_culprit_of_a_stall_is_named_with_its_stack(run, tmp_path, monkeypatch):
    def others_wait(driver):
        places = driver._watch.places() if driver._watch else {}
        waits = [places.get(rank) == (12, "dispatched") for rank in (0, 1)]
        return all(waits) and driver._state.cycle == 1

    monkeypatch.setattr(Driver, "_take", goes_while(others_wait))
    code, lines, (event, _) = run("loop:2:10", processes=3)
    assert code == 0, lines
    (suspect,) = event["args"]["suspects"]
    assert suspect.startswith("rank 2: it ")
    stack = (tmp_path / "supervisor" / "stacks-1-2.txt").read_text()
    assert "in break_" in stack and "fake_rank.py" in stack


def test_faults_in_a_row_are_survived(run, tmp_path):
    faults = ("kill:0:3", "raise:1:8", "segfault:0:13", "executor:0:17", "kill:1:22")
    code, lines, _ = run(*faults)
    assert code == 0, lines
    assert losses(tmp_path) == unbroken(STEPS)
    assert sum(" ended: " in line for line in lines) == len(faults)


def test_it_gives_up_and_says_why(run, tmp_path):
    with pytest.raises(GaveUp) as raised:
        run("raise!:1:10", idle_cycles=2)
    said = str(raised.value)
    assert re.match(r"gave up after cycle \d: 2 starts in a row reached no step", said)
    assert "rank 1 failed in " in said and "RuntimeError: injected. It last" in said
    assert "It last printed 'RuntimeError: injected'. Logs, stacks and" in said
    assert said.endswith("; the same command tries again.")
    assert raised.value.code == 4
    waits = [line for line in run.lines if "next start in" in line]
    assert waits and waits[0].endswith("in 0.1 s")
    nothing_runs(tmp_path)
    # It was told to try again, and finds the run where it was.
    code, _, _ = run()
    assert code == 0 and losses(tmp_path) == unbroken(STEPS)


def test_steps_that_cannot_be_saved_are_no_progress(run, tmp_path):
    """A full disk: a start gets a little further than the one before, in vain."""
    with pytest.raises(GaveUp) as raised:
        run("unsaved:0:6", "unsaved!:0:7")
    assert re.match(
        r"gave up after cycle 4: 3 starts in a row saved nothing after step 4\. The "
        r"last one: rank 0 failed in .*: CheckpointNotWritten: no space left",
        str(raised.value),
    )
    waits = [line for line in run.lines if "next start in" in line]
    assert [line.split()[-2] for line in waits] == ["0.1", "0.1", "0.2"]
    assert not any("not used any more" in line for line in run.lines)
    assert run()[0] == 0 and losses(tmp_path) == unbroken(STEPS)  # there is room again


def test_what_is_wanted_once_is_not_wanted_at_the_next_start(run, tmp_path):
    def wishes():
        return (tmp_path / "wishes-1").read_text().split()

    assert run("kill:1:0", "kill:1:9", "kill:1:15")[0] == 0
    # The first start had nothing to go on from yet.
    assert wishes() == ["granted", "granted", "None", "None"]
    assert run("kill:1:0", "kill:1:9", "kill:1:15")[0] == 0  # a job of its own
    assert wishes()[4:] == ["granted"]
    with pytest.raises(GaveUp):
        run("raise!:1:0")
    assert run("raise:1:24")[0] == 0
    assert wishes()[-1] == "granted"  # another command
    assert losses(tmp_path) == unbroken(STEPS)


def test_a_mistake_in_the_command_is_not_tried_again(run, tmp_path):
    with pytest.raises(GaveUp, match="another start would end alike") as raised:
        run("usage:1:1")
    assert raised.value.code == 2 and len(run.lines) == 2
    with pytest.raises(GaveUp, match="rank 0 left in start of step 0 with code 127"):
        supervise(["/nowhere/at/all"], tmp_path, config(idle_cycles=1), report=print)


def test_a_step_that_is_not_finite_again_is_left_alone(run, tmp_path):
    code, lines, events = run("nan!:0:10")
    assert code == 0, lines
    assert [e["name"] for e in events] == ["not_finite", "running"]
    code, lines, events = run(replay=False)
    assert code == 0 and len(events) == 2


def test_a_spike_that_goes_away_was_the_machine(run, tmp_path):
    code, lines, (event, _) = run("spike:0:16", spike=3.0)
    assert code == 0, lines
    assert event["name"] == "spike" and event["args"]["suspects"] == []
    assert "the loss of step 16 was far above those before" in lines[1]
    assert losses(tmp_path) == unbroken(STEPS)


def test_batches_are_left_out_at_a_spike_that_comes_back(run, tmp_path):
    code, lines, events = run("spike!:0:16", spike=3.0, skip_batches=3)
    assert code == 0, lines
    assert [e["name"] for e in events if e["kind"] == "fault"] == ["spike", "spike"]
    assert any("3 batches are left out" in line for line in lines)
    # The checkpoint of step 16 was not used: its own batch had the spike.
    assert losses(tmp_path) == unbroken(STEPS, left_out=(16, 17, 18))
    # Started again, the job knows.
    (tmp_path / "checkpoint-20").unlink()
    (tmp_path / "checkpoint-24").unlink()
    assert run(spike=3.0, skip_batches=3)[0] == 0
    assert losses(tmp_path) == unbroken(STEPS, left_out=(16, 17, 18))


@pytest.mark.parametrize("start", [3, *exhaustive(2)])
def test_a_start_that_dies_before_it_restores_goes_back_all_the_same(
    run, tmp_path, start
):
    """To compute a spike again, or to leave batches out."""
    faults = "spike!:0:16", f"kill:1:-{start}"
    code, lines, _ = run(*faults, spike=3.0, skip_batches=3)
    assert code == 0, lines
    assert losses(tmp_path) == unbroken(STEPS, left_out=(16, 17, 18))
    assert read(tmp_path / "supervisor").resume_before == 0


def test_a_driver_that_was_killed_goes_back_all_the_same(tmp_path):
    spike = ("--processes", "2", "--spike", "3", "--skip-batches", "3")
    faults = "spike!:0:16", "loop:1:-3"
    job = driver(tmp_path, *faults, options=spike, idle_cycles=2)
    wait_until((tmp_path / "struck-loop:1:-3").exists)
    job.kill()
    job.wait()
    os.kill(starts(tmp_path, 1)[-1], signal.SIGKILL)
    job = driver(tmp_path, *faults, options=spike, idle_cycles=2)
    assert job.wait(WAIT) == 0
    assert losses(tmp_path) == unbroken(STEPS, left_out=(16, 17, 18))


def test_a_job_after_one_that_was_done_uses_its_newest_checkpoint(tmp_path):
    State(secret="x", resume_before=8, ended=DONE).write(tmp_path)
    assert read(tmp_path).resume_before == 0


def test_a_driver_that_was_killed_finds_its_ranks(tmp_path):
    job = driver(tmp_path, "hold:0:12")
    reach(tmp_path, 6)
    job.kill()
    job.wait()
    reach(tmp_path, 11)  # without it
    job = driver(tmp_path, "hold:0:12")
    go_on(tmp_path)
    assert job.wait(WAIT) == 0
    assert {e["cycle"] for e in read_events(tmp_path / "events-1.jsonl")} == {1}
    assert losses(tmp_path) == unbroken(STEPS)
    nothing_runs(tmp_path)


def test_a_driver_that_was_killed_hears_of_a_fault_meanwhile(tmp_path):
    job = driver(tmp_path, "hold:0:7", "kill:1:10")
    reach(tmp_path, 6)
    job.kill()
    job.wait()
    # As if it had been killed before it heard of any step.
    file = tmp_path / "supervisor" / "state.json"
    known = json.loads(file.read_text()) | {"under_way": False, "best": 0}
    file.write_text(json.dumps(known))
    (process,) = starts(tmp_path, 1)
    go_on(tmp_path)
    wait_until(lambda: not Path(f"/proc/{process}").exists())
    job = driver(tmp_path, "hold:0:7", "kill:1:10")
    assert job.wait(WAIT) == 0
    assert {e["cycle"] for e in read_events(tmp_path / "events-1.jsonl")} == {1, 2}
    assert losses(tmp_path) == unbroken(STEPS)


def test_a_signal_to_the_driver_has_the_ranks_save(tmp_path):
    job = driver(tmp_path, "hold:0:12")
    reach(tmp_path, 6)
    job.send_signal(signal.SIGTERM)
    assert job.wait(WAIT) == 1
    assert "the same command continues" in (tmp_path / "driver.txt").read_text()
    steps = [int(file.name[11:]) for file in tmp_path.glob("checkpoint-*")]
    assert max(losses(tmp_path)) == max(steps)
    nothing_runs(tmp_path)
    assert driver(tmp_path, "hold:0:12").wait(WAIT) == 0
    assert losses(tmp_path) == unbroken(STEPS)


def test_a_terminal_that_is_closed_does_not_end_the_job(tmp_path):
    job = driver(tmp_path, "hold:0:12")
    reach(tmp_path, 2)
    job.send_signal(signal.SIGHUP)
    said = "the job goes on: SIGTERM stops it"
    wait_until(lambda: said in (tmp_path / "driver.txt").read_text())
    go_on(tmp_path)
    assert job.wait(WAIT) == 0
    assert losses(tmp_path) == unbroken(STEPS)


def test_a_second_signal_does_not_wait(tmp_path):
    job = driver(tmp_path, "loop:1:3")
    wait_until((tmp_path / "struck").exists)
    job.send_signal(signal.SIGINT)
    time.sleep(0.3)  # it waits for the ranks; an equal signal might come as one
    job.send_signal(signal.SIGTERM)
    assert job.wait(WAIT) == 1
    assert "have not stopped: they are killed" in (tmp_path / "driver.txt").read_text()
    nothing_runs(tmp_path)


def test_hosts_come_by_themselves_and_a_bad_one_is_left_out(tmp_path):
    """Of three executors two are used; the check fails on one, and the third helps."""
    check = tmp_path / "check.sh"
    check.write_text(
        "tr '\\0' ' ' < /proc/$PPID/cmdline | grep -q ' b $' && "
        "echo broken fan && exit 3\nexit 0\n"
    )
    job = driver(tmp_path, "kill!:1:10", options=two_hosts(check))
    executor(tmp_path, "a")
    executor(tmp_path, "b")
    reach(tmp_path, 2)
    executor(tmp_path, "c")
    assert job.wait(WAIT) == 4
    said = (tmp_path / "driver.txt").read_text()
    assert "cycle 1: 2 ranks on a, b" in said
    assert "host b is not used any more: broken fan" in said
    assert "cycle 2: 2 ranks on a, c" in said
    nothing_runs(tmp_path)


def test_a_host_that_computes_wrong_values_again_is_left_out(tmp_path):
    """Its check finds nothing; the other host, which said it, stays."""
    check = tmp_path / "check.sh"
    name = "tr '\\0' '\\n' < /proc/$PPID/cmdline | tail -n 1"
    check.write_text(f"{name} >> {tmp_path}/checked\n")
    job = driver(tmp_path, "wrong!:0:10", options=two_hosts(check), idle_cycles=2)
    executor(tmp_path, "a")
    executor(tmp_path, "b")
    reach(tmp_path, 2)
    # Two: where the last checkpoint comes late, there is a cycle more, and one of them
    # is left out as well.
    executor(tmp_path, "c")
    executor(tmp_path, "d")
    assert job.wait(WAIT) == 4  # it is always at the same step
    said = (tmp_path / "driver.txt").read_text()
    assert "suspects: rank 1: its values are not those of most replicas" in said
    assert "host b is not used any more: it computed wrong values again" in said
    assert (tmp_path / "checked").read_text().split()[:2] == ["b", "b"]
    assert "cycle 2: 2 ranks on a, b" in said
    assert re.search("cycle 3: 2 ranks on a, [cd]", said)
    nothing_runs(tmp_path)


def test_of_two_replicas_that_differ_both_hosts_are_checked(tmp_path):
    check = tmp_path / "check.sh"
    check.touch()
    job = driver(tmp_path, "tied!:0:10", options=two_hosts(check), idle_cycles=2)
    executor(tmp_path, "a")
    executor(tmp_path, "b")
    assert job.wait(WAIT) == 4
    said = (tmp_path / "driver.txt").read_text()
    assert "rank 0: its replicas are not those of others, and no majority tells" in said
    assert "gave up after cycle 2: one of the hosts a, b has computed wrong val" in said
    assert "not used any more" not in said


def test_a_slow_rank_is_named_while_the_job_goes_on(run, tmp_path):
    code, lines, events = run("slow:1:0", processes=3)
    assert code == 0, lines
    assert losses(tmp_path) == unbroken(STEPS)
    assert re.match(
        r"slow: rank 1 on \S+ takes .* times as long .*\(computing", lines[1]
    )
    assert [(e["kind"], e["name"]) for e in events] == [("host", "slow")]
    assert events[0]["args"]["ranks"] == [1]
    assert events[0]["args"]["factors"][0] > 3


@pytest.mark.parametrize("excludes", [True, *exhaustive(False)])
def test_a_slow_host_is_left_out_where_that_is_asked_for(tmp_path, excludes):
    check = tmp_path / "check.sh"
    check.touch()
    options = [*two_hosts(check), *(["--exclude-slow"] if excludes else [])]
    # Steps are short, and host c may take long to come: a late one waits for it.
    late, steps = STEPS * excludes, 2 * STEPS
    job = driver(tmp_path, f"slow:b:{late}", options=options, steps=steps)
    executor(tmp_path, "a")
    executor(tmp_path, "b")
    reach(tmp_path, 2)
    executor(tmp_path, "c")
    assert job.wait(WAIT) == 0
    assert losses(tmp_path) == unbroken(steps)
    said = (tmp_path / "driver.txt").read_text()
    assert "slow: rank 1 on b takes" in said
    assert ("host b is not used any more: it is slow" in said) == excludes
    assert ("cycle 2: 2 ranks on a, c" in said) == excludes
    if excludes:  # the ranks have saved: no step was computed again
        events = read_events(tmp_path / "events-0.jsonl")
        begun = [e["step"] for e in events if e["name"] == "begin"]
        assert begun == list(range(1, steps + 1))
    nothing_runs(tmp_path)


def two_hosts(check):
    hosts = ["--processes", "2", "--hosts", "2", "--address", "127.0.0.2:0"]
    return [*hosts, "--diagnose", f"sh {check}"]


def test_what_cannot_begin_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"{address} cannot be listened at"):
            supervise("true", tmp_path, config(address=address))
    with pytest.raises(ValueError, match="command is empty"):
        supervise("", tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be made: Not a directory"):
        supervise("true", tmp_path / "file")
    assert supervise("true", tmp_path, report=lambda line: None) == 0
    state = tmp_path / "supervisor" / "state.json"
    assert state.stat().st_mode & 0o77 == 0
    state.write_text('{"secret": "x", "surprise": 1}')
    with pytest.raises(ValueError, match=r"state\.json is damaged or of another vers"):
        supervise("true", tmp_path)
    state.unlink()
    job = driver(tmp_path, "hold:0:12")
    reach(tmp_path, 2)
    with pytest.raises(ValueError, match=f"another driver, process {job.pid}, works"):
        supervise("true", tmp_path)
    go_on(tmp_path)
    assert job.wait(WAIT) == 0


@pytest.mark.parametrize(
    ("secret", "address", "message"),
    [
        ("", "127.0.0.1:1", "JAXSCALE_SECRET is not set; give executors and driver"),
        ("x", "nonsense", "address 'nonsense', expected host:port"),
        (
            "x",
            "127.0.0.1:1",
            "no driver answers at 127.0.0.1:1 within 2 s .*Connect call",
        ),
    ],
)
def test_an_executor_without_a_driver(secret, address, message):
    found = subprocess.run(
        [
            sys.executable,
            "-m",
            "jaxscale",
            "executor",
            "--driver",
            address,
            "--grace",
            "2",
        ],
        capture_output=True,
        text=True,
        env=os.environ | {"JAXSCALE_SECRET": secret},
        cwd=ROOT,
    )
    assert found.returncode == 2 and re.search(message, found.stderr), found.stderr


children = []


@pytest.fixture(autouse=True)
def ended():
    """No process of a test outlives it."""
    yield
    for process in children:
        for _ in range(2):  # a driver ends its ranks at the second
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(0.2)
        process.wait(WAIT)
    children.clear()


def child(words, log=None):
    environment = os.environ | {"JAXSCALE_SECRET": "of the test"}
    process = subprocess.Popen(words, stdout=log, stderr=log, cwd=ROOT, env=environment)
    children.append(process)
    return process


def driver(out, *faults, options=("--processes", "2"), idle_cycles=1, steps=STEPS):
    """The driver as a process of its own."""
    words = [sys.executable, "-m", "jaxscale", "supervise", "--output-dir", str(out)]
    words += [*options, "--backoff", "0.1", "--idle-cycles", f"{idle_cycles}"]
    words += ["--deadlines.host", "60", "--deadlines.reconnect", "120"]
    words += ["--deadlines.step", "900", "--", *command(out, *faults, steps=steps)]
    with (out / "driver.txt").open("a") as log:
        return child(words, log)


def executor(out, name):
    state = out / "supervisor" / "state.json"
    wait_until(lambda: state.exists() and json.loads(state.read_text())["port"])
    address = "127.0.0.2:{}".format(json.loads(state.read_text())["port"])
    module = "jaxscale.supervision.executor"
    return child([sys.executable, "-m", module, address, name])


def starts(out, rank):
    """The processes that a rank has had."""
    events = read_events(out / f"events-{rank}.jsonl")
    return [e["args"]["pid"] for e in events if e["name"] == "start"]


def go_on(out):
    """Let go the rank that has the fault ``hold``."""
    (out / "go").touch()


def reach(out, step):
    """Wait until a step is done."""
    file = out / "metrics.jsonl"
    wait_until(lambda: file.exists() and max(losses(out), default=0) >= step)


def wait_until(done, seconds=WAIT):
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)
