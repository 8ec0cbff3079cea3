"""The driver's judgment of the ranks' messages: whether there is a fault, and who
caused it.

Nothing here waits, sends or starts: messages of ranks go in, a `Fault` comes out.
"""

import collections
import dataclasses
import re
import signal
import statistics
from collections.abc import Container, Iterable, Mapping
from typing import Literal

from jaxscale.supervision import phases
from jaxscale.supervision.config import Deadlines
from jaxscale.supervision.protocol import Exited, Moved


USAGE, DIVERGED, STOPPED = 2, 3, 1
"""Exit codes of ``jaxscale train`` after which there is no restart, and of a run that a
signal has ended with a checkpoint."""

_LOSSES, _FEWEST_LOSSES = 64, 8
_UNSAVED = "CheckpointNotWritten:"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a job must be restarted."""

    kind: Literal[
        "exit",
        "error",
        "unsaved",
        "stall",
        "lost",
        "not_finite",
        "wrong_values",
        "spike",
        "stopped",
        "slow",
    ]
    reason: str
    """Description in one sentence."""
    step: int
    """The newest step done, or the one that was not finite or a loss spike."""
    suspects: tuple[int, ...] = ()
    """Ranks that may have caused it."""
    why: str = "it failed first"
    """The evidence."""
    sure: bool = True
    """False if only some of them caused it, and it is not known which."""
    final: int = 0
    """The exit code of the job, if another start would end in the same way."""


@dataclasses.dataclass
class _Rank:
    heard: float
    step: int = 0
    phase: str = phases.START
    done: int = -1
    """The newest step that is done, in this cycle."""
    error: str = ""
    failed: float = float("inf")
    stopped: bool = False
    """Whether a signal has ended its run."""
    code: int | None = None
    tail: str = ""
    limit: str = "start"
    """The name of its current deadline; empty once it has exited."""

    @property
    def has_failed(self) -> bool:
        # The exit code of a program may say that its run was stopped, or not.
        well = self.stopped and self.code in (None, 0, STOPPED) and not self.error
        return self.failed < float("inf") and not well

    @property
    def place(self) -> tuple[int, int]:
        return self.step, phases.ORDER.get(self.phase, 0)

    @property
    def deadline(self) -> str:
        """The name of the deadline of its phase."""
        if self.code is not None:
            return ""
        # The first step compiles, and connects the devices.
        return phases.DEADLINES.get(self.phase, "compile" if self.done < 0 else "step")


class Spikes:
    """Losses of the recent steps, and which of them are spikes.

    Example:
        >>> spikes = Spikes(2.0, {})
        >>> [spikes.add(step, 1.0) for step in range(1, 9)]
        [False, False, False, False, False, False, False, False]
        >>> spikes.add(9, 2.5), spikes.limits
        (True, {9: 2.0})
    """

    def __init__(self, factor: float, limits: Mapping[int, float]) -> None:
        """Start without losses.

        Args:
            factor: A loss above this many times the median of the previous ones is a
                spike; 0 is off.
            limits: Spike thresholds of recomputed steps.
        """
        self._factor, self._losses = factor, dict[int, float]()
        self.limits = dict(limits)
        """The thresholds of the steps that were spikes."""

    def add(self, step: int, loss: float) -> bool:
        """Add the loss of a step; True if it is a spike."""
        if not self._factor or loss <= 0:
            return False
        limit = self.limits.get(step)
        if limit is None:
            before = sorted(s for s in self._losses if s < step)[-_LOSSES:]
            if len(before) >= _FEWEST_LOSSES:
                usual = statistics.median(self._losses[s] for s in before)
                limit = self._factor * usual
        if limit is not None and loss > limit:
            self.limits[step] = limit
            return True
        self._losses[step] = loss
        if len(self._losses) > 4 * _LOSSES:
            del self._losses[min(self._losses)]
        return False


class Watch:
    """Follows the ranks of one cycle.

    Everything that is needed after each message is kept up to date: only the end of a
    cycle loops over all ranks.

    Example:
        >>> watch = Watch([0, 1], Deadlines(start=60), now=0.0)
        >>> watch.fault(now=59.0) is None
        True
        >>> watch.fault(now=61.0).reason
        'ranks 0, 1 said nothing for 61 s, in start (deadline 60 s)'
    """

    def __init__(
        self,
        ranks: Iterable[int],
        deadlines: Deadlines,
        now: float,
        spikes: Spikes | None = None,
    ) -> None:
        """Start when the processes start, or reconnect, at `now` in seconds."""
        self._deadlines, self._spikes = deadlines, spikes
        self._spiked: set[int] = set()
        self._ranks = {rank: _Rank(heard=now) for rank in ranks}
        # Not a plain dict, which steps over all entries deleted from its front.
        self._live = collections.OrderedDict.fromkeys(self._ranks)
        """Ranks that have not exited, the longest silent first."""
        self._limits = collections.Counter(r.limit for r in self._ranks.values())
        """Number of ranks per deadline."""
        self._failed: set[int] = set()
        self._failing: set[int] = set()
        self._stopped: set[int] = set()
        self._stateless = set(self._ranks)
        """Ranks that have not reached a state to resume from."""
        self._step = -1
        self._durations: collections.deque[float] = collections.deque(maxlen=64)
        self._done_at: tuple[int, float] | None = None
        self._not_finite: set[int] = set()
        self._wrong: Moved | None = None
        self.began: int | None = None
        """The step that the ranks resume from, if it was reported."""

    @property
    def step(self) -> int:
        """The newest step that a rank has done in this cycle; -1 before the first."""
        return self._step

    @property
    def has_state(self) -> bool:
        """Whether all ranks have reached a state to resume from."""
        return not self._stateless

    @property
    def finished(self) -> bool:
        """Whether all have exited, and have done all steps."""
        well = not self._failed and not self._stopped
        return self.gone and well and not any(r.code for r in self._ranks.values())

    @property
    def gone(self) -> bool:
        """Whether all have exited."""
        return not self._live

    @property
    def is_settled(self) -> bool:
        """Whether all failing ranks have exited, and one of them by itself.

        JAX aborts a process when it has lost another, whose end may not be known yet.
        """
        aborted = all(self._ranks[n].code == -signal.SIGABRT for n in self._failed)
        return not self._failing and not (self._failed and aborted)

    def places(self) -> dict[int, tuple[int, str]]:
        """Step and phase of each rank."""
        return {n: (rank.step, rank.phase) for n, rank in self._ranks.items()}

    def tail(self, rank: int) -> str:
        """The end of a rank's output, once it has exited."""
        return self._ranks[rank].tail

    def moved(self, message: Moved, now: float) -> None:
        """Process a message of a rank; other cycles are ignored."""
        known = [n for n in message.ranks if n in self._ranks]
        if not known:
            return
        if message.phase == phases.NOT_FINITE:
            self._not_finite.add(message.step)
        elif message.phase == phases.WRONG_VALUES:
            self._wrong = message
        elif message.phase == phases.DONE:
            self._step = max(self._step, message.step)
            self._measure(message.step, now)
            if self._spikes and self._spikes.add(message.step, message.loss):
                self._spiked.add(message.step)
        elif message.phase == phases.COMPILE:
            self.began = message.step
        for number in known:
            rank = self._ranks[number]
            rank.heard = now
            if message.phase == phases.ERROR:
                rank.error = rank.error or message.text or "an error without a text"
                rank.failed = min(rank.failed, now)
            elif message.phase == phases.DONE:
                rank.done = max(rank.done, message.step)
            elif message.phase in phases.ORDER:
                rank.step, rank.phase = message.step, message.phase
                rank.stopped = rank.stopped or message.phase == phases.STOPPED
            self._note(number, rank)

    def _note(self, number: int, rank: _Rank) -> None:
        """Update the state of all ranks, after a message or exit of one."""
        if rank.code is None:
            self._live.move_to_end(number)
        else:
            self._live.pop(number, None)
        if rank.limit != (limit := rank.deadline):
            self._limits[rank.limit] -= 1
            self._limits[limit] += 1
            rank.limit = limit
        if number in self._stateless and rank.place[1] >= phases.ORDER[phases.COMPILE]:
            self._stateless.remove(number)
        if not rank.error and not rank.stopped and rank.code is None:
            return  # nearly always
        for numbers, belongs in (
            (self._failed, rank.has_failed),
            (self._failing, bool(rank.error) and rank.code is None),
            (self._stopped, rank.stopped),
        ):
            (numbers.add if belongs else numbers.discard)(number)

    def exited(self, message: Exited, now: float) -> None:
        """Process the end of a process."""
        rank = self._ranks.get(message.rank)
        if rank is not None and rank.code is None:
            rank.code, rank.tail = message.code, message.tail
            if message.code != 0:
                rank.failed = min(rank.failed, now)
            self._note(message.rank, rank)

    def fault(
        self,
        now: float,
        *,
        known: Container[int] = (),
        skipped: Container[int] = (),
    ) -> Fault | None:
        """The fault, if there is one.

        Args:
            now: The time, in seconds.
            known: Steps that may be non-finite: they were so before, and following ones
                may be.
            skipped: Steps whose loss may be a spike: batches were skipped there.
        """
        if self._wrong is not None:  # all ranks fail, after they have reported this
            return _wrong_values(self._wrong)
        if self._failed:
            return self._failure(sorted(self._failed))
        if self.gone and self._stopped:
            reason = "the ranks were asked to stop, not by the driver, and have saved"
            return Fault(kind="stopped", reason=reason, step=self.step)
        bad = self._not_finite
        news = [s for s in bad if s not in known and s - 1 not in bad]
        if news:
            reason = f"loss or gradients of step {min(news)} were not finite"
            return Fault(kind="not_finite", reason=reason, step=min(news))
        # The first one: a later checkpoint contains the effect of its batch.
        if spiked := [s for s in self._spiked if s not in skipped]:
            reason = f"the loss of step {min(spiked)} was far above those before"
            return Fault(kind="spike", reason=reason, step=min(spiked))
        return self._stall(now)

    def lost(self, ranks: Iterable[int], reason: str) -> Fault:
        """The fault that the executor of some ranks does not answer."""
        reason = f"the executor of {_named(ranks)} {reason}"
        return Fault(kind="lost", reason=reason, step=self.step)

    def suspects(self, stacks: Mapping[int, str]) -> dict[int, str]:
        """The ranks that hold up the others, with the evidence."""
        live = {n: rank for n, rank in self._ranks.items() if rank.code is None}
        silent = {n: "it does not answer" for n in live if not stacks.get(n)}
        first = min((rank.place for rank in live.values()), default=None)
        behind = {
            n: f"it is behind, in {rank.phase} of step {rank.step}"
            for n, rank in live.items()
            if rank.place == first
        }
        calls = {n: main_thread(text) for n, text in stacks.items() if text}
        calls = {n: names for n, names in calls.items() if n in live}
        groups = collections.Counter(calls.values())
        usual, count = groups.most_common(1)[0] if groups else ("", 0)
        elsewhere = {}
        if 2 * count > sum(groups.values()):
            elsewhere = {
                n: f"it stands elsewhere: {names.partition(' < ')[0]}"
                for n, names in calls.items()
                if names != usual
            }
        if len(behind) == len(live) > 1:
            behind = {}
        if len(silent) == len(live) > 1:
            silent = {}
        nobody = dict.fromkeys(live, "nobody stands out")
        return {**elsewhere, **behind, **silent} or nobody

    def _measure(self, step: int, now: float) -> None:
        if self._done_at is not None and step > self._done_at[0]:
            before, at = self._done_at
            self._durations.append((now - at) / (step - before))
        if self._done_at is None or step > self._done_at[0]:
            self._done_at = (step, now)

    def _failure(self, failed: list[int]) -> Fault:
        ranks = self._ranks
        # Within milliseconds of a killed rank the others fail as well; some by an
        # abort, as JAX ends a process that has lost its coordinator.
        killed = [n for n in failed if (ranks[n].code or 0) < 0]
        killed = [n for n in killed if ranks[n].code != -signal.SIGABRT] or killed
        first = min(killed or failed, key=lambda n: ranks[n].failed)
        rank = ranks[first]
        where = f"in {rank.phase} of step {rank.step}"
        kind, reason = "error", f"rank {first} failed {where}: {rank.error}"
        if rank in [ranks[n] for n in killed]:
            kind = "exit"
            reason = f"rank {first} died {where} by {_signal(-(rank.code or 0))}"
        elif not rank.error:
            kind, reason = "exit", f"rank {first} left {where} with code {rank.code}"
        elif rank.error.startswith(_UNSAVED):
            kind = "unsaved"
        return Fault(
            kind=kind,
            reason=reason,
            step=self.step,
            suspects=tuple(killed or [first]),
            final=_final(rank),
        )

    def _stall(self, now: float) -> Fault | None:
        if not self._live:
            return None
        # A rank that saves makes the others wait in the next step, and so on.
        doing = [name for name, count in self._limits.items() if name and count]
        limit = max(map(self._deadline, doing))
        if now - self._ranks[next(iter(self._live))].heard <= limit:
            return None
        late = {n: r for n in self._live if now - (r := self._ranks[n]).heard > limit}
        # At a late look those that wait for the first ones are silent for long too.
        first = min(rank.place for rank in late.values())
        late = {n: rank for n, rank in late.items() if rank.place == first}
        silence = now - min(rank.heard for rank in late.values())
        phase = next(iter(late.values())).phase
        reason = (
            f"{_named(late)} said nothing for {silence:.3g} s, in {phase} "
            f"(deadline {limit:g} s)"
        )
        return Fault(kind="stall", reason=reason, step=self.step)

    def _deadline(self, name: str) -> float:
        deadlines = self._deadlines
        if name != "step":
            return getattr(deadlines, name)
        usual = statistics.median(self._durations) if self._durations else 0.0
        return max(deadlines.step, deadlines.step_factor * usual)


def _wrong_values(said: Moved) -> Fault:
    why = "its values are not those of most replicas"
    if not said.sure:
        why = "its replicas are not those of others, and no majority tells who is right"
    return Fault(
        kind="wrong_values",
        reason=f"wrong values at step {said.step}: {said.text}",
        step=said.step,
        suspects=tuple(said.suspects),
        why=why,
        sure=said.sure,
    )


def _final(rank: _Rank) -> int:
    """The exit code of a rank that would always end like this, otherwise 0."""
    codes = {"UsageError": USAGE, "Diverged": DIVERGED}
    code = codes.get(rank.error.partition(":")[0], rank.code or 0)
    # If the coordinator's port was taken, another one may be free.
    taken = rank.phase in (phases.START, phases.MEET) and "cannot listen" in rank.error
    return code if code in codes.values() and not taken else 0


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _named(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    shown = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def main_thread(stack: str) -> str:
    """The calls of the main thread, innermost first, from the output of `faulthandler`.

    Example:
        >>> main_thread('''Thread 0x02 (most recent call first):
        ...   File "/lib/queue.py", line 9 in get
        ... Thread 0x01 (most recent call first):
        ...   File "/run/loop.py", line 3 in fit
        ...   File "/run/main.py", line 1 in main''')
        'loop.py:3 fit < main.py:1 main'
    """
    main = re.split(r"^(?:Current thread|Thread) ", stack, flags=re.MULTILINE)[-1]
    frames = re.findall(r'File "(?:[^"]*/)?([^"/]+)", line (\d+) in (\S+)', main)
    return " < ".join(f"{file}:{line} {name}" for file, line, name in frames)
