"""The executor of a host: starts its ranks, receives their events, obeys the driver.

Each rank is a separate process group. The kernel kills it when the executor dies, even
if it is stopped or hangs. When the driver dies the ranks continue, and the executor
waits for another driver; after a while it has them save and exit.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.supervision import handshake, phases, protocol, state
from jaxscale.supervision.events import VARIABLE


ALIVE_SECONDS = 1.0
_LAST_WORDS_SECONDS = 5.0  # a socket of this host is read sooner, unless it is busy
_REPORT_SECONDS, _HOSTS_A_SECOND = 0.05, 6000
_STACK_SECONDS, _STACK_PAUSE = 2.0, 0.05  # a rank that is stopped writes none
_RETRY_SECONDS = 0.25
_LEAVE_SECONDS = 60.0
_TAIL, _STACK = 2**12, 2**15  # bytes, and JSON may write six for one
_PR_SET_PDEATHSIG = 1


def report_seconds(hosts: int) -> float:
    """Seconds between an executor's reports on its ranks, while nothing is wrong.

    The driver receives a bounded number of reports per second, for any number of ranks.

    Example:
        >>> report_seconds(8), report_seconds(1536)
        (0.05, 0.256)
    """
    return max(_REPORT_SECONDS, hosts / _HOSTS_A_SECOND)


class RankProcess:
    """A process of the job on this host."""

    def __init__(
        self, number: int, process: asyncio.subprocess.Process, printed: int
    ) -> None:
        """Wrap a process that leads a group."""
        self.number, self.process = number, process
        self.printed = printed
        """Bytes of its log from before this start."""
        self.speaks = False
        """Whether it has connected, and so handles SIGUSR1."""
        self.silent = asyncio.Event()
        """Set once all its messages were read."""
        self.exited: protocol.Exited | None = None

    def signal(self, number: int) -> None:
        """Send a signal to the whole group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


class Executor:
    """Runs until the driver sends `Quit`, or stays away."""

    def __init__(self, driver: str, secret: str, *, name: str, grace: float) -> None:
        """Describe the host.

        Args:
            driver: ``host:port`` of the driver.
            secret: Secret of the job.
            name: Name of this host in messages.
            grace: Seconds to wait for a lost driver.
        """
        self._driver, self._secret = driver, secret
        self._name, self._grace = name, grace
        self._channel: protocol.Channel | None = None
        # The ranks get a separate secret, which is valid for their executor only.
        self._rank_secret = secrets.token_hex()
        self._address = ""
        self._cycle, self._directory = 0, Path()
        self._seconds = report_seconds(1)
        self._numbers: list[int] = []
        self._ranks: dict[int, RankProcess] = {}
        """Of these numbers, those that could be started."""
        self._newest: dict[tuple[int, str], protocol.Moved] = {}
        self._untold: dict[tuple[int, str, int], protocol.Moved] = {}
        self._measured: list[protocol.Measured] = []
        self._faults: list[protocol.Moved] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> int:
        """Serve the driver; the exit code.

        Raises:
            OSError: there was no driver to begin with.
        """
        server = await asyncio.start_server(
            self._hear, "127.0.0.1", 0, limit=protocol.LONGEST_LINE
        )
        self._address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._spawn(self._report())
        try:
            while await self._connect():
                with contextlib.suppress(OSError):
                    if await self._serve():
                        return 0
                self._channel = None
                await asyncio.sleep(_RETRY_SECONDS)
            await self._leave()
            return 1
        finally:
            self._signal(signal.SIGKILL)
            for task in self._tasks:
                task.cancel()
            server.close()

    async def _connect(self) -> bool:
        """Connect to the driver, within the grace time."""
        problem: OSError | None = None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._grace):
                while True:
                    try:
                        channel = await protocol.connect(self._driver, self._secret)
                        break
                    except protocol.ProtocolError:
                        raise
                    except OSError as error:
                        problem = error
                    await asyncio.sleep(_RETRY_SECONDS)
                self._greet(channel)
                return True
        if not self._cycle:
            raise ConnectionError(
                f"no driver answers at {self._driver} within {self._grace:g} s "
                f"({problem}); check that it runs and that the address is right"
            )
        return False

    def _greet(self, channel: protocol.Channel) -> None:
        """Introduce this host, and report past events to a restarted driver."""
        channel.send(
            protocol.Host(
                name=self._name,
                address=_own_address(self._driver),
                cycle=self._cycle,
                ranks=sorted(self._ranks),
            )
        )
        if not self._ranks:
            channel.send(protocol.Idle(port=_free_port()))
        channel.send(*protocol.merged(self._newest.values()), *self._faults)
        for rank in self._ranks.values():
            if rank.exited is not None:
                channel.send(rank.exited)
        self._channel = channel

    async def _serve(self) -> bool:
        """Obey the driver until it disconnects; True if the job is over."""
        channel = self._channel
        assert channel is not None
        while True:
            match await channel.receive():
                case protocol.Start() as start:
                    await self._start(start)
                case protocol.Stacks():
                    await self._stacks(channel)
                case protocol.Terminate():
                    self._signal(signal.SIGTERM)
                case protocol.Kill():
                    await self._kill()
                    channel.send(protocol.Idle(port=_free_port()))
                case protocol.Diagnose() as wanted:
                    channel.send(await _diagnosis(wanted))
                case protocol.Quit():
                    return True
                case other:
                    raise protocol.ProtocolError(f"a driver does not say {other}")

    async def _start(self, start: protocol.Start) -> None:
        await self._kill()
        self._cycle, self._directory = start.cycle, Path(start.directory)
        self._numbers = start.ranks
        self._seconds = report_seconds(start.processes // len(start.ranks))
        self._newest, self._untold, self._faults = {}, {}, []
        self._measured = []
        for index, number in enumerate(start.ranks):
            try:
                await self._start_rank(
                    start, number, _environment(start, number, index)
                )
            except (OSError, ValueError) as error:  # no such command or directory
                self._tell(self._exit(number, 127, str(error)))

    async def _start_rank(
        self, start: protocol.Start, number: int, environment: dict[str, str]
    ) -> None:
        place = {
            "address": self._address,
            "secret": self._rank_secret,
            "rank": number,
            "cycle": start.cycle,
            "resume_before": start.resume_before,
            "is_first": start.is_first,
            "skips": start.skips,
            "stacks": str(self._file("stacks", number)),
        }
        self._directory.mkdir(parents=True, exist_ok=True)
        with self._file("log", number).open("ab", buffering=0) as log:
            with contextlib.suppress(OSError):  # a full disk
                log.write(f"--- cycle {start.cycle}\n".encode())
            printed = log.tell()
            process = await asyncio.create_subprocess_exec(
                *start.command,
                env=environment | {VARIABLE: json.dumps(place)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
        rank = self._ranks[number] = RankProcess(number, process, printed)
        self._spawn(self._wait(rank))

    def _file(self, kind: str, rank: int) -> Path:
        return self._directory / f"{kind}-{rank}.txt"

    async def _wait(self, rank: RankProcess) -> None:
        code = await rank.process.wait()
        rank.signal(signal.SIGKILL)  # children that it has left behind
        if rank.speaks:  # its last messages may still be in transit
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_SECONDS):
                    await rank.silent.wait()
        tail = _tail(self._file("log", rank.number), _TAIL, rank.printed)
        rank.exited = self._exit(rank.number, code, tail)
        self._flush()  # earlier messages come first
        self._tell(rank.exited)

    def _exit(self, rank: int, code: int, tail: str) -> protocol.Exited:
        return protocol.Exited(rank=rank, cycle=self._cycle, code=code, tail=tail)

    async def _hear(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Serve the connection of a rank."""
        channel = protocol.Channel(reader, writer)
        with contextlib.closing(channel), contextlib.suppress(OSError):
            await channel.shake_hands(handshake.welcome(self._rank_secret))
            joined = await channel.receive()
            rank = self._ranks.get(getattr(joined, "rank", -1))
            if not isinstance(joined, protocol.Joined) or rank is None:
                return
            rank.speaks = joined.cycle == self._cycle
            try:
                await self._take(channel, joined.rank)
            finally:
                rank.silent.set()

    async def _take(self, channel: protocol.Channel, rank: int) -> None:
        """Process the messages of a rank, to its end."""
        while True:
            message = await channel.receive()
            if not isinstance(message, protocol.Moved | protocol.Measured):
                return
            if message.cycle != self._cycle or message.ranks != [rank]:
                return
            if isinstance(message, protocol.Measured):
                self._measured.append(message)
            elif message.kind == "fault":
                self._flush()
                self._faults.append(message)
                self._tell(message)
            else:
                self._keep(message)

    def _keep(self, message: protocol.Moved) -> None:
        """Keep the newest phase and the newest done step of each rank, to be reported.

        Of one rank all steps are kept, for their losses.
        """
        kept = (phases.COMPILE, phases.DONE, phases.STOPPED)  # whatever comes after
        about = message.phase if message.phase in kept else "place"
        (rank,) = message.ranks
        losses = about == phases.DONE and rank == min(self._ranks)
        place = rank, about
        untold = (*place, message.step if losses else 0)
        # Older ones are dropped, so that reports are in the order of time.
        self._newest.pop(place, None)
        self._untold.pop(untold, None)
        self._newest[place] = self._untold[untold] = message

    async def _report(self) -> None:
        """Report to the driver where the ranks are, and that this host is alive."""
        loop, told = asyncio.get_running_loop(), 0.0
        while True:
            await asyncio.sleep(self._seconds)
            self._flush()
            if loop.time() - told >= ALIVE_SECONDS:
                told = loop.time()
                self._tell(protocol.Alive())

    def _flush(self) -> None:
        if self._untold or self._measured:
            self._tell(*protocol.merged([*self._untold.values(), *self._measured]))
        self._untold, self._measured = {}, []

    def _tell(self, *messages: protocol.Message) -> None:
        if self._channel is not None:
            self._channel.send(*messages)

    async def _stacks(self, channel: protocol.Channel) -> None:
        """Have the ranks write their stacks, and send them."""
        asked = [
            rank for rank in self._ranks.values() if rank.speaks and not rank.exited
        ]
        files = [self._file("stacks", rank.number) for rank in asked]
        before = sizes = [_size(file) for file in files]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                rank.process.send_signal(signal.SIGUSR1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STACK_SECONDS):
                # Until all have written, and none has more to write.
                while sizes != (sizes := [_size(file) for file in files]) or any(
                    map(int.__eq__, sizes, before)
                ):
                    await asyncio.sleep(_STACK_PAUSE)
        for number in self._numbers:
            text = _tail(self._file("stacks", number), _STACK)
            answer = text if self._ranks.get(number) in asked else ""
            # Escaped it may be longer, and too long a line would end the connection.
            answer = answer.encode("ascii", "replace").decode()
            channel.send(protocol.Stack(rank=number, text=answer))

    async def _kill(self) -> None:
        self._signal(signal.SIGKILL)
        for rank in self._ranks.values():
            await rank.process.wait()
        self._ranks = {}

    async def _leave(self) -> None:
        """Have the ranks save and exit, since no driver comes back."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                for rank in self._ranks.values():
                    await rank.process.wait()

    def _signal(self, number: int) -> None:
        for rank in self._ranks.values():
            if rank.process.returncode is None:
                rank.signal(number)

    def _spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _environment(
    start: protocol.Start,
    rank: int,
    index: int,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """The variables that `initialize` reads, and a compilation cache of the run."""
    mine = {key: value for key, value in environ.items() if key != protocol.SECRET}
    mine |= {
        "JAX_COORDINATOR_ADDRESS": start.coordinator,
        "JAX_NUM_PROCESSES": str(start.processes),
        "JAX_PROCESS_ID": str(rank),
        "PYTHONUNBUFFERED": "1",
    }
    if (several := len(start.ranks)) > 1:  # an equal share, or one GPU each
        visible = [d for d in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        each = max(1, len(visible) // several)
        share = visible[index * each : (index + 1) * each] or [str(index)]
        mine["CUDA_VISIBLE_DEVICES"] = ",".join(share)
    mine["JAX_COMPILATION_CACHE_DIR"] = state.programs(Path(start.directory), environ)
    mine.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
    return mine


async def _diagnosis(wanted: protocol.Diagnose) -> protocol.Diagnosed:
    command = wanted.command or [
        *(sys.executable, "-m", _SELF_CHECK),
        *(wanted.directory, str(wanted.seconds)),
    ]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
    except OSError as error:
        return protocol.Diagnosed(code=127, text=f"{command[0]}: {error.strerror}")
    try:
        async with asyncio.timeout(wanted.seconds):
            output, _ = await process.communicate()
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        text = f"{command[0]} did not end within {wanted.seconds:g} s"
        return protocol.Diagnosed(code=124, text=text)
    text = output[-_TAIL:].decode(errors="replace")
    return protocol.Diagnosed(code=process.returncode or 0, text=text)


_SELF_CHECK = "jaxscale.supervision.self_check"
_LIBC = ctypes.CDLL(None)


def _die_with_parent() -> None:
    """In a new process: have the kernel kill it when the executor dies."""
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


def _tail(file: Path, most: int, start: int = 0) -> str:
    """The end of a file, after byte `start`."""
    try:
        with file.open("rb") as stream:
            end = stream.seek(0, os.SEEK_END)
            stream.seek(max(end - most, min(start, end)))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _own_address(driver: str) -> str:
    """The address of this host in the network of the driver."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(
            *protocol.split_address(driver), type=socket.SOCK_DGRAM
        )
        family, kind, *_, address = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            own = probe.getsockname()[0]
            return f"[{own}]" if ":" in own else own
    return socket.gethostname()


def main(driver: str, *, name: str = "", grace: float = 300.0) -> int:
    """Run an executor; the secret is in the environment.

    Args:
        driver: ``host:port`` of the driver.
        name: Name of this host in messages.
        grace: Seconds to wait for a lost driver.

    Raises:
        ValueError: there is no secret, or the address is malformed.
        OSError: no driver answers.
    """
    protocol.split_address(driver)
    secret = os.environ.get(protocol.SECRET, "")
    if not secret:
        raise ValueError(
            f"the environment variable {protocol.SECRET} is not set; give executors "
            "and driver the same long random text"
        )
    name = name or socket.gethostname()
    return asyncio.run(Executor(driver, secret, name=name, grace=grace).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], name=sys.argv[2]))
