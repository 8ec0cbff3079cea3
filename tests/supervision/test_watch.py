"""Faults and suspects, from what ranks say, without processes."""

import dataclasses

import pytest

from jaxscale.supervision.config import Deadlines, SuperviseConfig
from jaxscale.supervision.protocol import Exited, Moved
from jaxscale.supervision.watch import Spikes, Watch


DEADLINES = Deadlines(start=100, compile=900, step=30, step_factor=10, save=300)


def moved(rank, phase, step=0, text=""):
    kind = "fault" if text or phase == "not_finite" else "host"
    return Moved(ranks=[rank], cycle=1, step=step, phase=phase, kind=kind, text=text)


def exited(rank, code, tail=""):
    return Exited(rank=rank, cycle=1, code=code, tail=tail)


def watching(ranks=3, step=0, seconds=1.0):
    """A watch whose ranks have done `step` steps, and the time."""
    watch, now = Watch(range(ranks), DEADLINES, now=0.0), 0.0
    for number in range(1, step + 1):
        now += seconds
        for rank in range(ranks):
            for phase in ("begin", "data", "dispatched", "done"):
                watch.moved(moved(rank, phase, number), now)
    return watch, now


@pytest.mark.parametrize(
    ("phase", "limit"),
    [
        ("start", 100),
        ("meet", 100),
        ("joined", 900),
        ("restore", 900),
        ("compile", 900),
        ("begin", 30),
        ("data", 30),
        ("dispatched", 30),
        ("save", 300),
        ("saved", 30),
        ("eval", 900),
        ("evaluated", 30),
        ("finish", 300),
        ("bye", 300),
        ("stopped", 300),
    ],
)
def test_each_phase_has_its_deadline(phase, limit):
    watch, now = watching(step=3)
    for rank in range(3):
        watch.moved(moved(rank, phase, 4), now)
    assert watch.fault(now + limit - 0.1) is None
    fault = watch.fault(now + limit + 0.1)
    assert fault.kind == "stall" and f"deadline {limit} s" in fault.reason
    assert fault.step == 3


def test_the_first_step_may_compile():
    watch, now = watching(step=0)
    for phase in ("begin", "data", "dispatched"):
        for rank in range(3):
            watch.moved(moved(rank, phase, 1), now)
    assert watch.fault(now + 899) is None
    assert watch.fault(now + 901).kind == "stall"


def test_slow_steps_may_take_ten_times_as_long_as_usual():
    watch, now = watching(step=9, seconds=20.0)
    assert watch.fault(now + 199) is None
    assert watch.fault(now + 201).kind == "stall"


def test_one_that_saves_lets_the_others_wait():
    watch, now = watching(step=5)
    watch.moved(moved(0, "save", 5), now)
    for rank in (1, 2):
        watch.moved(moved(rank, "dispatched", 6), now)
    assert watch.fault(now + 299) is None
    assert watch.fault(now + 301).kind == "stall"


def test_one_that_stands_still_is_noticed_while_others_still_move():
    watch, now = watching(step=5)
    watch.moved(moved(0, "begin", 6), now + 25)
    watch.moved(moved(2, "begin", 6), now + 25)
    assert "rank 1 said nothing for 31 s" in watch.fault(now + 31).reason
    # A driver on a busy host may look late, when those that wait are silent as well.
    assert "rank 1 said nothing for 61 s" in watch.fault(now + 61).reason


def test_of_several_that_fail_the_killed_one_is_named():
    watch, now = watching(step=5)
    watch.moved(moved(0, "error", 5, "XlaRuntimeError: reset by peer"), now)
    watch.exited(exited(0, 1), now)
    watch.exited(exited(2, -9), now + 0.01)
    fault = watch.fault(now)
    assert (fault.kind, fault.suspects) == ("exit", (2,))
    assert "rank 2 died in dispatched of step 5 by SIGKILL" in fault.reason


def test_of_a_killed_rank_and_one_that_aborted_after_it_the_killed_one_is_named():
    """Whichever is heard of first; JAX aborts a process without its coordinator."""
    watch, now = watching(step=5)
    watch.exited(exited(1, -6), now)
    assert not watch.is_settled  # somebody else may be the cause
    watch.exited(exited(2, -6), now)
    watch.exited(exited(0, -9), now + 0.2)
    assert watch.is_settled
    fault = watch.fault(now)
    assert fault.suspects == (0,) and "rank 0 died in" in fault.reason


def test_who_aborts_alone_is_named():
    watch, now = watching(step=5)
    watch.exited(exited(1, -6), now)
    assert watch.fault(now).suspects == (1,)


def test_wrong_values_come_before_the_errors_that_follow():
    watch, now = watching(step=5)
    watch.moved(moved(1, "error", 5, "ReplicasDiffer: differ"), now)
    for rank in (1, 0):
        said = moved(rank, "wrong_values", 5, "differ")
        watch.moved(dataclasses.replace(said, suspects=[2], sure=False), now)
    fault = watch.fault(now)
    assert (fault.kind, fault.step, fault.suspects) == ("wrong_values", 5, (2,))
    assert not fault.sure and "no majority tells" in fault.why


def test_of_several_errors_the_first_is_named():
    watch, now = watching(step=5)
    watch.moved(moved(1, "error", 5, "KeyError: 'x'"), now)
    assert not watch.is_settled
    watch.moved(moved(0, "error", 5, "XlaRuntimeError: reset by peer"), now + 0.01)
    watch.exited(exited(1, 1, "the end"), now + 0.02)
    watch.exited(exited(0, 1), now + 0.02)
    assert watch.is_settled
    fault = watch.fault(now)
    assert fault.suspects == (1,) and "KeyError: 'x'" in fault.reason
    assert fault.final == 0 and watch.tail(1) == "the end"


@pytest.mark.parametrize(
    ("phase", "text", "code", "final"),
    [
        ("joined", "UsageError: steps 0", 2, 2),
        ("start", "", 2, 2),
        ("meet", "UsageError: process 0 cannot listen on its port", 2, 0),
        ("dispatched", "Diverged: the run diverged", 3, 3),
        ("dispatched", "Diverged: the run diverged", None, 3),  # not gone yet
        ("dispatched", "RuntimeError: out of memory", 1, 0),
    ],
)
def test_what_would_end_alike_is_final(phase, text, code, final):
    watch, now = watching()
    watch.moved(moved(0, phase, 0), now)
    if text:
        watch.moved(moved(0, "error", 0, text), now)
    if code is not None:
        watch.exited(exited(0, code), now)
    assert watch.fault(now).final == final


@pytest.mark.parametrize("code", [0, 1])
def test_ranks_that_someone_has_stopped_may_finish_their_checkpoint(code):
    watch, now = watching(step=7)
    for rank in range(3):
        watch.moved(moved(rank, "stopped", 7), now)
        assert watch.fault(now) is None
        watch.moved(moved(rank, "bye", 7), now)
        watch.exited(exited(rank, code), now)
    assert watch.gone and not watch.finished
    assert watch.fault(now).kind == "stopped"


def test_one_that_does_not_stop_with_the_others_is_noticed():
    watch, now = watching(step=7)
    for rank in (0, 2):
        watch.moved(moved(rank, "stopped", 7), now)
        watch.exited(exited(rank, 1), now)
    assert watch.fault(now + 29) is None
    fault = watch.fault(now + 31)
    assert fault.kind == "stall" and fault.reason.startswith("rank 1 said nothing")


def test_all_that_leave_well_are_finished():
    watch, now = watching(step=7)
    for rank in range(3):
        assert not watch.finished
        watch.exited(exited(rank, 0), now)
    assert watch.finished and watch.fault(now + 10**6) is None


def test_a_step_that_is_not_finite_is_a_fault_once():
    watch, now = watching(step=8)
    for step in (5, 6, 7):  # one after the other
        watch.moved(moved(1, "not_finite", step), now)
    fault = watch.fault(now)
    assert (fault.kind, fault.step) == ("not_finite", 5)
    assert watch.fault(now, known=[5]) is None
    watch.moved(moved(1, "not_finite", 9), now)
    assert watch.fault(now, known=[5]).step == 9


def test_a_loss_far_above_the_last_ones_is_a_spike():
    spikes = Spikes(2.0, {})
    watch = Watch(range(1), DEADLINES, now=0.0, spikes=spikes)

    def done(step, loss):
        watch.moved(
            Moved(
                ranks=[0], cycle=1, step=step, phase="done", kind="device", loss=loss
            ),
            float(step),
        )
        return watch.fault(float(step))

    assert done(1, 9.0) is None  # nothing is usual yet
    assert all(done(step, 3.0) is None for step in range(2, 12))
    assert done(12, 5.9) is None
    assert done(13, 0.0) is None  # unknown
    fault = done(14, 6.1)
    assert (fault.kind, fault.step) == ("spike", 14)
    assert watch.fault(14.0, skipped=[14]) is None
    assert done(15, 9.0).step == done(16, 8.0).step == 14  # where it began
    assert watch.fault(16.0, skipped=[14]).step == 15
    # Computed again, it is compared with what was usual then.
    again = Spikes(2.0, spikes.limits)
    assert not again.add(13, 100.0) and not again.add(14, 5.9)
    assert again.add(14, 6.1)


HEALTHY = """Thread 0x02 (most recent call first):
  File "/lib/threading.py", line 9 in wait
Current thread 0x01 (most recent call first):
  File "/x/monitor.py", line 300 in log
  File "/x/loop.py", line 160 in fit
"""
HUNG = HEALTHY.replace("monitor.py", "data.py").replace("log", "__next__")


def test_suspects_are_behind_elsewhere_or_silent():
    watch, now = watching(ranks=5, step=5)
    for rank in (0, 1, 3, 4):
        watch.moved(moved(rank, "begin", 6), now)
    assert watch.suspects({}) == {2: "it is behind, in dispatched of step 5"}
    stacks = {0: HEALTHY, 1: HEALTHY, 2: HEALTHY, 3: "", 4: HUNG}
    assert watch.suspects(stacks) == {
        2: "it is behind, in dispatched of step 5",
        3: "it does not answer",
        4: "it stands elsewhere: data.py:300 __next__",
    }


def test_where_nobody_stands_out_all_are_suspect():
    watch, _ = watching(ranks=2, step=5)
    nobody = dict.fromkeys(range(2), "nobody stands out")
    assert watch.suspects({0: HEALTHY, 1: HUNG}) == nobody  # one against one
    assert watch.suspects({}) == nobody


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"processes": 0}, "processes 0 must be an integer of at least 1"),
        ({"processes": 3, "hosts": 2}, "processes 3 is not divisible by hosts 2"),
        ({"processes": 2, "hosts": 2}, "address '127.0.0.1:0' is not reached from"),
        ({"address": "here"}, "address 'here', expected host:port"),
        ({"address": "a:70000"}, "port from 0 to 65535"),
        ({"coordinator_port": 70000}, "coordinator_port 70000, expected 0 to 65535"),
        ({"spike": 0.5}, "spike 0.5, expected more than 1 times the usual loss"),
        ({"spike": float("nan")}, "spike nan, expected more than 1 times"),
        ({"backoff": float("nan")}, "backoff nan must be positive and finite"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        SuperviseConfig(**options)
