"""The driver of a job: watches its ranks through the executors, and restarts them.

It does none of the job's work and does not import jax, so it survives when a rank
crashes. Its state is in a file (`State`): killed and restarted by the same command, it
finds the executors, which have continued.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxscale.supervision import limits, protocol, state
from jaxscale.supervision.config import SuperviseConfig
from jaxscale.supervision.host_requests import failing_hosts, kill_ranks, stacks_of
from jaxscale.supervision.hosts import ConnectedHost, Hosts
from jaxscale.supervision.telemetry import SlowNews, Telemetry
from jaxscale.supervision.watch import STOPPED, Fault, Spikes, Watch


DIRECTORY = "supervisor"
"""Folder of the driver in the output directory: its state, logs, stacks and faults."""
GAVE_UP = 4
"""Exit code of a driver that has given up."""

_SETTLE_SECONDS = 3.0  # a busy host may notice the end of a rank late
_SHORT_SECONDS = 0.1
_LONGEST_BACKOFF = 60.0
_LONGEST_MOMENT = 0.5
_SHOWN = 8


class GaveUp(RuntimeError):
    """The job cannot continue; the message is a paragraph that says why."""

    def __init__(self, message: str, code: int = GAVE_UP) -> None:
        super().__init__(message)
        self.code = code


class Driver:
    """Run a job to its end."""

    def __init__(
        self,
        command: Sequence[str],
        directory: Path,
        config: SuperviseConfig,
        *,
        report: Callable[[str], None],
    ) -> None:
        """Describe a job whose ranks run `command`, which must resume by itself."""
        self._command, self._config, self._report = list(command), config, report
        self._output, self._directory = directory, directory / DIRECTORY
        self._stop = 0
        """Stop signals so far; a second one does not wait for the ranks."""
        self._watch: Watch | None = None
        """The watch of the running cycle."""
        self._telemetry = Telemetry(directory, config.processes)
        self._slow: SlowNews | None = None
        """The ranks that are slow in this cycle."""
        self._now = 0.0
        """Seconds that the driver has listened: the clock of deadlines."""
        self._since: float | None = None
        """Time of the last fault, until a step is done again."""
        self._reached = 0
        """The newest step done before this cycle."""

    async def run(self) -> int:
        """Run the job; the exit code.

        Raises:
            ValueError: another driver works here, the state is damaged, others may
                write to the compiled programs, the address cannot be listened on, or
                the limit of open files is too low.
            GaveUp: the job keeps failing.
        """
        with state.locked(self._directory):
            self._state = state.read(
                self._directory, os.environ.get(protocol.SECRET, "")
            )
            state.programs(self._directory)  # raises if others may write
            limits.allow_connections(2 * self._config.hosts)  # spare ones too
            self._hosts = Hosts(
                self._state.secret, self._directory, report=self._report
            )
            config = self._config
            spikes = {int(s): limit for s, limit in self._state.spikes.items()}
            self._spikes = Spikes(config.spike, spikes)
            self._state.port = await self._hosts.listen(
                config.address, self._state.port
            )
            self._save()
            self._on_signals()
            try:
                async with self._telemetry.served(config.metrics_address):
                    code = await self._job()
                self._end("stopped" if code else state.DONE)
                return code
            except GaveUp as error:
                self._end(str(error))
                raise
            finally:
                await self._hosts.close()

    async def _job(self) -> int:
        """Run cycles until one succeeds."""
        if self._state.running:
            await self._adopt()
        while True:
            if self._watch is None:
                await self._start()
            fault = None if self._watch is None else await self._follow(self._watch)
            done = self._watch is not None and self._watch.finished
            if self._watch is None or (self._stop and not done):
                step = self._state.best
                self._report(f"stopped after step {step}; the same command continues")
                return STOPPED
            if fault is None:
                last = self._watch.tail(0).strip().splitlines()[-1:]
                self._report(": ".join(["all ranks are done", *last]))
                return 0
            await self._recover(fault, self._watch)
            self._watch = None

    # Start

    async def _start(self) -> None:
        """Start a cycle when there are enough hosts, unless asked to stop."""
        hosts = await self._enough_hosts()
        if self._stop:
            return
        config, job, first = self._config, self._state, hosts[0]
        job.cycle, job.running, self._reached = job.cycle + 1, True, job.best
        job.under_way = job.under_way and job.command == self._command
        job.command = self._command
        self._save()
        count = config.processes // len(hosts)
        port = config.coordinator_port or first.port
        for i, host in enumerate(hosts):
            host.port, host.cycle = None, job.cycle
            host.ranks = list(range(i * count, (i + 1) * count))
            host.send(
                protocol.Start(
                    cycle=job.cycle,
                    ranks=host.ranks,
                    processes=config.processes,
                    coordinator=f"{first.address}:{port}",
                    command=self._command,
                    directory=str(self._directory.resolve()),
                    resume_before=job.resume_before,
                    is_first=not job.under_way,
                    skips=[[int(step), n] for step, n in job.skips.items()],
                )
            )
        names = ", ".join(host.name for host in hosts[:_SHOWN])
        names += f" and {len(hosts) - _SHOWN:,} more" if len(hosts) > _SHOWN else ""
        self._report(f"cycle {job.cycle}: {config.processes} ranks on {names}")
        self._begin_watch()

    def _begin_watch(self) -> None:
        config, ranks = self._config, range(self._config.processes)
        self._watch = Watch(ranks, config.deadlines, self._now, self._spikes)
        self._telemetry.started(self._state.cycle)
        self._slow = None

    async def _enough_hosts(self) -> list[ConnectedHost]:
        """As many hosts as needed, ordered by name."""
        needed, excluded = self._config.hosts, self._state.excluded
        begun, deadline = time.monotonic(), self._config.deadlines.hosts
        why = [f"{name} ({reason})" for name, reason in excluded.items()]
        without = f", without those that are not used any more: {why}" if why else ""
        while not self._stop:
            idle = [host for host in self._hosts if host.port is not None]
            usable = [host for host in idle if host.name not in excluded]
            if len(usable) >= needed:
                return usable[:needed]
            if needed == 1 and socket.gethostname() in excluded:
                raise GaveUp(f"no host is left{without}")
            if needed == 1 and not len(self._hosts):
                before = self._state.executor
                self._state.executor = self._hosts.start_local(before)
                if before != self._state.executor:
                    self._save()
            if time.monotonic() - begun > deadline:
                raise GaveUp(
                    f"only {len(usable)} of {needed} hosts are there after "
                    f"{deadline:g} s{without}; start `jaxscale executor --driver "
                    f"{self._hosts.address}` on more"
                )
            await self._take()
        return []

    async def _adopt(self) -> None:
        """Continue with the ranks that a previous driver has started."""
        self._begin_watch()
        self._reached = self._state.best
        self._report(f"cycle {self._state.cycle} goes on: waiting for its executors")
        seconds = self._config.deadlines.reconnect
        await self._until(lambda: not self._missing(), seconds)

    def _missing(self) -> list[int]:
        """Ranks that are on no executor."""
        ours = [host.ranks for host in self._hosts if host.cycle == self._state.cycle]
        if sum(map(len, ours)) == self._config.processes:  # each is on one host
            return []
        there = {rank for ranks in ours for rank in ranks}
        return sorted(set(range(self._config.processes)) - there)

    # Watch

    async def _follow(self, watch: Watch) -> Fault | None:
        """Watch a cycle until it succeeds, fails, or is asked to stop."""
        while not watch.finished:
            await self._take()
            self._note(watch)
            if self._stop:
                self._hosts.broadcast(protocol.Terminate())
                seconds = self._config.deadlines.save
                await self._until(lambda: watch.gone or self._stop > 1, seconds)
                if not watch.gone:
                    self._report("the ranks have not stopped: they are killed")
                    await self._kill()
                return None
            fault = self._lost_hosts(watch) or await self._leave_slow_host(watch)
            if fault is None and self._fault(watch) is not None:
                # Failing ranks report why, and exit.
                await self._until(lambda: False, _SHORT_SECONDS)
                await self._until(lambda: watch.is_settled, _SETTLE_SECONDS)
                fault = self._fault(watch)
            if fault is not None:
                return fault
        return None

    def _fault(self, watch: Watch) -> Fault | None:
        known = self._state.replayed if self._config.replay else range(sys.maxsize)
        skipped = {int(step) for step in self._state.skips}
        return watch.fault(self._now, known=known, skipped=skipped)

    def _lost_hosts(self, watch: Watch) -> Fault | None:
        if missing := self._missing():
            return watch.lost(missing, "has gone")
        for host in self._hosts:
            silence = self._now - host.heard
            if host.ranks and silence > self._config.deadlines.host:
                reason = f"on {host.name} said nothing for {silence:.3g} s"
                return watch.lost(host.ranks, reason)
        return None

    async def _take(self) -> None:
        """Process the executors' messages, for a moment."""
        begun = time.monotonic()
        await self._hosts.take(self._understand)
        # While the driver itself is paused it hears nothing, and nobody is late.
        self._now += min(time.monotonic() - begun, _LONGEST_MOMENT)

    async def _until(self, done: Callable[[], bool], seconds: float) -> None:
        """Process the executors' messages until `done`, or for a time."""
        until = time.monotonic() + seconds
        while not done() and time.monotonic() < until:
            await self._take()

    def _understand(self, host: ConnectedHost, message: Any) -> None:
        now = host.heard = self._now
        job, watch = self._state, self._watch
        current = job.running and getattr(message, "cycle", 0) == job.cycle
        if current:
            self._telemetry.heard(message)
        match message:
            case protocol.Host() if message.ranks and not current:
                host.send(protocol.Kill())  # of a cycle that is over
            case protocol.Moved() if watch is not None and current:
                watch.moved(message, now)
            case protocol.Exited() if watch is not None and current:
                watch.exited(message, now)
            case protocol.Idle():
                host.port, host.ranks = message.port, []
            case protocol.Stack():
                host.stacks[message.rank] = message.text
            case protocol.Diagnosed():
                host.diagnosis = message

    def _note(self, watch: Watch) -> None:
        """Record the progress of the job."""
        if watch.has_state and not self._state.under_way:
            self._state.get_under_way(watch.began)
            self._reached = min(self._reached, self._state.best)
            self._save()
        # Not at the start: until all have restored, the next start must go back as
        # well.
        if watch.has_state and self._state.resume_before:
            self._state.resume_before = 0
            self._save()
        if watch.step > self._state.best:
            self._state.best = watch.step
        if self._since is not None and watch.step > 0:
            took = time.time() - self._since
            self._report(f"step {watch.step} is done, {took:.1f} s after the fault")
            self._record("running", watch.step, since=self._since)
            self._since = None
        news = self._telemetry.slow_news(
            (host.name, host.ranks) for host in self._hosts
        )
        if news is not None:
            self._slow = news
            self._report(news.line)
            self._record("slow", watch.step, since=time.time(), **news.args)

    async def _leave_slow_host(self, watch: Watch) -> Fault | None:
        """Have the ranks save and exit, if a spare host can replace a slow one."""
        if not (self._config.exclude_slow and self._slow and self._slow.hosts):
            return None
        excluded = self._state.excluded
        spare = [
            h for h in self._hosts if h.port is not None and h.name not in excluded
        ]
        if not spare:
            return None
        host = self._slow.hosts[0]
        self._hosts.broadcast(protocol.Terminate())
        await self._until(lambda: watch.gone, self._config.deadlines.save)
        self._exclude(host, f"it is slow ({self._slow.line.removeprefix('slow: ')})")
        reason = f"host {host} is slow, and {spare[0].name} takes its place"
        return Fault(kind="slow", reason=reason, step=watch.step)

    # Recover

    async def _recover(self, fault: Fault, watch: Watch) -> None:
        """Identify the suspects, kill the remaining ranks, and prepare a restart.

        Raises:
            GaveUp: another start would not help.
        """
        job, since = self._state, time.time()
        ranks_of = {host.name: list(host.ranks) for host in self._hosts}
        suspects = dict.fromkeys(fault.suspects, fault.why)
        stacks = dict[int, str]()
        if fault.kind in ("stall", "exit", "error"):
            seconds = self._config.deadlines.host / 2
            stacks = await stacks_of(self._hosts, self._until, seconds)
            if fault.kind == "stall":
                suspects = watch.suspects(stacks)
        await self._kill()
        job.running = False
        self._telemetry.failed(fault.kind)
        if fault.kind in ("not_finite", "spike"):
            self._compute_again(fault)
        else:
            job.count(self._reached, watch.began, is_unsaved=fault.kind == "unsaved")
        who = [f"rank {n}: {why}" for n, why in sorted(suspects.items())]
        where = "; ".join(who) or "none"
        self._report(f"cycle {job.cycle} ended: {fault.reason}; suspects: {where}")
        self._record(
            fault.kind,
            watch.step,
            since=since,
            kind="fault",
            reason=fault.reason,
            suspects=who,
        )
        self._save()
        self._keep_stacks(stacks)  # many files, after the others were notified
        self._give_up_if_useless(fault, watch, suspects)
        names = [name for name, ranks in ranks_of.items() if {*ranks} & {*suspects}]
        if fault.kind != "unsaved":  # no host is to blame for a disk that is full
            await self._diagnose(names)
        if fault.kind == "wrong_values":
            self._distrust(names, fault)
        self._since = since
        await self._back_off()

    def _compute_again(self, fault: Fault) -> None:
        """Go back before a step: what recurs was not a hardware fault."""
        job, step = self._state, str(fault.step)
        job.resume_before = fault.step
        if fault.kind == "not_finite":
            job.replayed.append(fault.step)
        elif step in job.spikes:
            job.skips[step] = count = self._config.skip_batches
            self._report(f"step {step} is a spike again: {count} batches are left out")
        else:
            job.spikes[step] = self._spikes.limits[fault.step]

    def _give_up_if_useless(
        self, fault: Fault, watch: Watch, suspects: Collection[int]
    ) -> None:
        job, config = self._state, self._config
        tails = [watch.tail(rank).strip() for rank in suspects]
        said = next((tail.splitlines()[-1] for tail in tails if tail), "")
        last = f" It last printed {said!r}." if said else ""
        if fault.final:
            raise GaveUp(
                f"{fault.reason}; another start would end alike.{last}", fault.final
            )
        if job.idle >= config.idle_cycles:
            unsaved = f"saved nothing after step {job.began}"
            idle = f"reached no step after {job.best}"
            what = unsaved if fault.kind == "unsaved" else idle
            raise GaveUp(
                f"gave up after cycle {job.cycle}: {job.idle} starts in a row {what}. "
                f"The last one: {fault.reason}.{last} Logs, "
                f"stacks and the list of faults are in {self._directory}; the same "
                "command tries again."
            )

    def _keep_stacks(self, stacks: Mapping[int, str]) -> None:
        for rank, text in stacks.items():
            if text:
                name = f"stacks-{self._state.cycle}-{rank}.txt"
                with contextlib.suppress(OSError):  # a full disk
                    (self._directory / name).write_text(text)

    async def _kill(self) -> None:
        """Kill all ranks; an executor that does not respond is killed too."""
        seconds = self._config.deadlines.host
        await kill_ranks(self._hosts, self._until, seconds, self._report)
        if self._config.hosts == 1 and not len(self._hosts):
            self._hosts.end_local(self._state.executor)

    async def _diagnose(self, names: Collection[str]) -> None:
        """Have suspect hosts run the self-check, and exclude those that fail."""
        failed = await failing_hosts(
            self._hosts,
            self._until,
            self._config.deadlines.diagnose,
            names=names,
            command=shlex.split(self._config.diagnose),
            directory=str(self._output.resolve()),
        )
        for name, why in failed.items():
            self._exclude(name, why)
        self._save()

    def _exclude(self, name: str, why: str) -> None:
        if name not in self._state.excluded:
            self._state.excluded[name] = why
            self._report(f"host {name} is not used any more: {why}")

    def _distrust(self, names: Collection[str], fault: Fault) -> None:
        """Exclude a host that computed wrong values again, if it is known which.

        Raises:
            GaveUp: one of several hosts keeps computing wrong values.
        """
        job, most = self._state, self._config.idle_cycles
        known = fault.sure or len(names) == 1
        for name in names:
            job.wrong[name] = job.wrong.get(name, 0) + 1
            if known and job.wrong[name] > 1:
                self._exclude(name, "it computed wrong values again")
        self._save()
        if not known and min((job.wrong[n] for n in names), default=0) >= most:
            raise GaveUp(
                f"gave up after cycle {job.cycle}: one of the hosts {', '.join(names)} "
                f"has computed wrong values {most} times, and with so few replicas it "
                "is not known which; run `jaxscale diagnose` on them, leave one out, "
                "or train with three replicas"
            )

    async def _back_off(self) -> None:
        if self._state.idle:
            seconds = self._config.backoff * 2 ** (self._state.idle - 1)
            seconds = min(seconds, _LONGEST_BACKOFF)
            self._report(f"nothing new was reached: next start in {seconds:g} s")
            await self._until(lambda: self._stop > 0, seconds)

    # Keep

    def _save(self) -> None:
        try:
            self._state.write(self._directory)
        except OSError as error:  # the ranks continue, as long as this driver does
            self._report(f"its state cannot be written: {error}")

    def _end(self, how: str) -> None:
        self._state.running, self._state.ended = False, how
        self._save()

    def _record(self, name: str, step: int, **event: Any) -> None:
        try:
            state.record(self._directory, self._state.cycle, name, step, **event)
        except OSError as error:
            self._report(f"an event is lost: {error}")

    def _on_signals(self) -> None:
        def stop() -> None:
            self._stop += 1

        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, stop)
            hung_up = "the terminal is closed, and the job goes on: SIGTERM stops it"
            loop.add_signal_handler(signal.SIGHUP, self._report, hung_up)
