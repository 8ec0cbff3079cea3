"""Start-up of a multi-process job, with a check that all processes are there.

`jax.distributed.initialize` ends the process without an exception when the coordinator
cannot be reached or a process is missing. `initialize` therefore connects the processes
first, over the coordinator's port: process 0 waits for one line from each of the
others, all of them learn what is wrong, and only then JAX starts its service there.
"""

import collections
import contextlib
import errno
import itertools
import logging
import os
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, BinaryIO

import jax

from jaxscale.sharding.launchers import Cluster, detect, split_address
from jaxscale.supervision import current, phases
from jaxscale.supervision.limits import allow_connections


_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.25
_SILENT_SECONDS, _LAST_WORD_SECONDS = 5.0, 2.0
_HELLO, _WAIT, _LONGEST_LINE = "jaxscale", "wait", 512


_started: Cluster | None = None


def initialize(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    local_device_ids: Sequence[int] | None = None,
    timeout: float = 120.0,
) -> Cluster:
    """Join the processes of a job, before any other use of JAX.

    Under Slurm (``srun``), Open MPI (``mpirun``), ``torchrun`` and the JAX jobs of
    Kubeflow no argument is needed; a plain Kubernetes Indexed Job sets two variables
    (see `detect`). A single process returns at once, so any script may call this. A
    second call returns the result of the first.

    Args:
        coordinator: ``host:port`` of process 0, a port that is free there and that the
            other hosts can reach.
        num_processes: Number of processes of the job.
        process_id: Number of this process, from 0.
        local_device_ids: GPUs of this host for this process. By default all, or the
            one of its local rank where a launcher starts several on a host.
        timeout: Seconds to wait for the other processes.

    Returns:
        The cluster: number of this process, number of processes, coordinator, launcher.

    Raises:
        ValueError: an argument or variable is missing, malformed or contradicts
            another process, or the port is taken.
        TimeoutError: the coordinator or another process did not answer in time; the
            message says who, where, and what to check.

    Example:
        >>> initialize().num_processes
        1
    """
    global _started
    if jax.distributed.is_initialized():
        return _started or Cluster(
            process_id=jax.process_index(),
            num_processes=jax.process_count(),
            launcher="jax",
        )
    cluster = detect(
        os.environ,
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
        local_device_ids=local_device_ids,
    )
    if cluster.coordinator is None:
        current().emit(phases.JOINED, 0)
        return cluster
    _log.info(
        "process %d of %d: %s", cluster.process_id, cluster.num_processes, cluster
    )
    deadline = time.monotonic() + timeout
    current().emit(phases.MEET, 0)
    if cluster.process_id == 0:
        _await_others(cluster, timeout, deadline)
    else:
        _report_to_coordinator(cluster, timeout, deadline)
    jax.distributed.initialize(
        coordinator_address=cluster.coordinator,
        num_processes=cluster.num_processes,
        process_id=cluster.process_id,
        local_device_ids=cluster.local_device_ids,
        cluster_detection_method="deactivate",
        initialization_timeout=max(30, int(timeout)),
    )
    _started = cluster
    current().emit(phases.JOINED, 0)
    return cluster


class _Meeting:
    """Process 0: collect a line from each other process, then release all.

    One thread serves all connections, so a silent one delays no other.
    """

    def __init__(self, cluster: Cluster, server: socket.socket) -> None:
        self._cluster, self._server = cluster, server
        self._selector = selectors.DefaultSelector()
        self._arrived: dict[int, socket.socket] = {}
        self._left: set[int] = set()
        """Processes that connected and disconnected."""
        self._numbers: dict[socket.socket, int] = {}
        self._heard: dict[socket.socket, bytes] = {}
        """Connections without a complete line yet, the longest silent first."""
        self._until = collections.OrderedDict[socket.socket, float]()

    def wait(self, timeout: float, deadline: float) -> None:
        """Wait for all processes.

        Raises:
            TimeoutError: a process is missing.
            ValueError: processes contradict each other.
        """
        others = self._cluster.num_processes - 1
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        try:
            while len(self._arrived) < others:
                now = time.monotonic()
                if now >= deadline:
                    raise TimeoutError(self._tell(self._who_is_missing(timeout)))
                self._forget_silent(now)
                until = min([deadline, *itertools.islice(self._until.values(), 1)])
                for key, _ in self._selector.select(until - now):
                    self._hear(key.fileobj)
            # Closed before the answer: whoever connects now reaches the service of JAX.
            self._server.close()
            self._tell("ok")
        finally:
            for connection in (*self._numbers, *self._heard):
                connection.close()
            self._selector.close()
            self._server.close()

    def _hear(self, source: Any) -> None:
        if source is self._server:
            self._accept()
        elif source in self._heard:
            self._greet(source)
        elif source in self._numbers and not _waits(source):
            self._lose(source)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._server.accept()
                connection.setblocking(False)
                self._selector.register(connection, selectors.EVENT_READ)
                self._heard[connection] = b""
                self._until[connection] = time.monotonic() + _SILENT_SECONDS

    def _forget_silent(self, now: float) -> None:
        while self._until and next(iter(self._until.values())) <= now:
            self._drop(next(iter(self._until)))

    def _drop(self, connection: socket.socket) -> None:
        del self._heard[connection], self._until[connection]
        self._selector.unregister(connection)
        connection.close()

    def _lose(self, connection: socket.socket) -> None:
        """Forget a process that disconnected; it reconnects if it is restarted."""
        number = self._numbers.pop(connection)
        del self._arrived[number]
        self._left.add(number)
        self._selector.unregister(connection)
        connection.close()

    def _greet(self, connection: socket.socket) -> None:
        """Admit one process, or tell all what is wrong; ignore strangers."""
        try:
            said = connection.recv(_LONGEST_LINE)
        except OSError:
            said = b""
        line = self._heard[connection] + said
        if said and b"\n" not in line and len(line) < _LONGEST_LINE:
            self._heard[connection] = line
            return
        words = line.decode(errors="replace").split()
        known = b"\n" in line and len(words) == 3 and words[0] == _HELLO
        if not known or not (words[1] + words[2]).isdecimal():
            self._drop(connection)
            return
        index, count = int(words[1]), int(words[2])
        same = self._arrived.get(index)
        if same is not None and not _waits(same):
            self._lose(same)
        if problem := self._problem(index, count):
            _send(connection, problem)
            where = connection.getpeername()[0]
            raise ValueError(f"{self._tell(problem)} (a process at {where})")
        del self._heard[connection], self._until[connection]
        self._numbers[connection] = index
        self._arrived[index] = connection
        self._left.discard(index)
        _send(connection, _WAIT)

    def _problem(self, index: int, count: int) -> str:
        ours = self._cluster.num_processes
        if count != ours:
            return (
                f"process {index} has num_processes={count}, but process 0 has "
                f"{ours}; start all processes with the same number"
            )
        if not 1 <= index < count or index in self._arrived:
            return (
                f"two processes have process_id={index}; give each its own number from "
                f"0 to {count - 1}"
            )
        return ""

    def _tell(self, line: str) -> str:
        """Send `line` to all connected processes, and return it."""
        for connection in self._arrived.values():
            _send(connection, line)
        return line

    def _who_is_missing(self, seconds: float) -> str:
        cluster = self._cluster
        everyone = set(range(1, cluster.num_processes))
        missing = sorted(everyone - self._arrived.keys() - self._left)
        left, texts = sorted(self._left), []
        if missing:
            texts.append(
                f"{len(missing)} of {cluster.num_processes} processes "
                f"({_shown(missing)}) did not reach process 0 at {cluster.coordinator}"
            )
        if left:
            texts.append(f"{len(left)} ({_shown(left)}) came and left again")
        return (
            f"{', and '.join(texts)} within {seconds:g} s; check that they run, that "
            f"the host leads to this machine ({socket.gethostname()}), and that no "
            "firewall closes the port"
        )


def _await_others(cluster: Cluster, timeout: float, deadline: float) -> None:
    """Process 0: wait for a line from each other process, then release all."""
    _, port = split_address(cluster.coordinator or "")
    allow_connections(cluster.num_processes)
    try:
        dual = socket.has_dualstack_ipv6()
        server = socket.create_server(
            ("", port),
            family=socket.AF_INET6 if dual else socket.AF_INET,
            dualstack_ipv6=dual,
            backlog=max(1024, cluster.num_processes),
        )
    except OSError as error:
        advice = f"choose a port that process {os.getpid()} may listen on"
        if error.errno == errno.EADDRINUSE:
            advice = f"end the process that uses port {port} or choose another"
        raise ValueError(
            f"coordinator {cluster.coordinator}: process 0 cannot listen on its port "
            f"({error}); {advice}"
        ) from error
    _Meeting(cluster, server).wait(timeout, deadline)


def _waits(connection: socket.socket) -> bool:
    """Return whether the peer still waits and sends nothing more."""
    try:
        return bool(connection.recv(_LONGEST_LINE))
    except BlockingIOError:
        return True
    except OSError:
        return False


def _shown(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _report_to_coordinator(cluster: Cluster, timeout: float, deadline: float) -> None:
    """Other processes: report to process 0, then wait for JAX's service."""
    address = split_address(cluster.coordinator or "")
    problem = "no attempt was made"
    reported = False
    while (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection(
                address, timeout=min(left, 5.0)
            ) as connection:
                if reported:
                    return
                _send(
                    connection, f"{_HELLO} {cluster.process_id} {cluster.num_processes}"
                )
                connection.settimeout(min(left, _SILENT_SECONDS))
                answer, problem = _answer(connection, left)
        except OSError as error:
            problem = str(error)
        else:
            reported = answer == "ok"
            if "did not reach process 0" in answer or "left again" in answer:
                raise TimeoutError(answer)
            if answer and not reported:
                raise ValueError(answer)
        time.sleep(min(_RETRY_SECONDS, left))
    raise TimeoutError(
        f"process {cluster.process_id} of {cluster.num_processes} could not join the "
        f"coordinator at host {address[0]}, port {address[1]} within {timeout:g} s "
        f"(last: {problem}); check that process 0 is running and was started together "
        f"with this one, that the host name is right on {socket.gethostname()}, and "
        "that no firewall closes the port"
    )


def _answer(connection: socket.socket, left: float) -> tuple[str, str]:
    """The final answer of process 0, and the message to use if there is none.

    Its time limit ends a moment after this process's, and its answer says who is
    missing.
    """
    with connection.makefile("rb") as stream:
        first = _receive(stream)
        if first != _WAIT:
            return first, "what listens there is not waiting for this process"
        connection.settimeout(left + _LAST_WORD_SECONDS)
        return _receive(stream), "process 0 still waited for others, or has ended"


def _send(connection: socket.socket, line: str) -> None:
    try:
        connection.sendall(line.encode() + b"\n")
    except OSError as error:
        _log.warning("a process left during start-up: %s", error)


def _receive(stream: BinaryIO) -> str:
    """One line of at most 512 bytes; empty if the peer is silent or disconnects."""
    try:
        return stream.readline(_LONGEST_LINE).decode(errors="replace").strip()
    except OSError:
        return ""
