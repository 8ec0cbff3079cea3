"""The protocol of supervision: JSON lines over TCP, between processes with a shared
secret.

A line is an object ``{"is": "Moved", ...}`` with exactly the fields of one of the
dataclasses here, of their types; anything else ends the connection. Before the first
line both sides prove that they know the secret (`handshake`).
"""

import asyncio
import dataclasses
import functools
import json
import socket
import typing
from collections.abc import Iterable
from typing import Any

from jaxscale.supervision import handshake
from jaxscale.supervision.handshake import ProtocolError, fields_of


SECRET = "JAXSCALE_SECRET"
"""Environment variable that holds the secret of a job."""
LONGEST_LINE = 2**16
"""Maximum bytes of a line; a longer one ends the connection."""

_MOST_UNREAD = 2**24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Joined:
    """Rank to executor, first message: the process of a rank."""

    rank: int
    cycle: int
    pid: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moved:
    """Rank to executor to driver: ranks have reached a phase of a step.

    A rank reports itself; its executor combines the reports of several.
    """

    ranks: list[int]
    cycle: int
    step: int
    phase: str
    kind: str
    text: str = ""
    """Description of an event of kind ``fault``."""
    loss: float = 0.0
    """Loss of a step that is done; 0 if unknown or not finite."""
    suspects: list[int] = dataclasses.field(default_factory=list)
    """Ranks named by ``wrong_values``."""
    sure: bool = True
    """False if only some of these are at fault, and it is not known which."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """Rank to executor to driver: how long each rank worked by itself."""

    ranks: list[int]
    cycle: int
    step: int
    name: str
    """computing, host or paused: the compute time of a step, what the device waited for
    before it, and the slowdown of the process by pauses."""
    seconds: list[float]
    """One value per rank."""
    group: str = ""
    """The roles of the ranks, if they differ."""

    def __post_init__(self) -> None:
        if len(self.seconds) != len(self.ranks):
            raise ProtocolError(
                f"Measured has {len(self.seconds)} seconds of {len(self.ranks)} ranks"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exited:
    """Executor to driver: a process has ended, with the end of its output."""

    rank: int
    cycle: int
    code: int
    tail: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Host:
    """Executor to driver, first message: who it is, and what runs there."""

    name: str
    address: str
    """Address by which other hosts reach this one."""
    cycle: int
    ranks: list[int]
    """Ranks that run here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idle:
    """Executor to driver: nothing runs here, and this port is free."""

    port: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alive:
    """Executor to driver, every second."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """Executor to driver: the thread stacks of a rank."""

    rank: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Executor to driver: the exit code and the last lines of a self-check."""

    code: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Driver to executor: start these ranks."""

    cycle: int
    ranks: list[int]
    processes: int
    """Number of ranks of the whole job."""
    coordinator: str
    command: list[str]
    directory: str
    resume_before: int
    """Checkpoints of this step and later ones are not used; 0 for the newest."""
    is_first: bool
    """Whether no start of this command has reached a state to resume from."""
    skips: list[list[int]]
    """Pairs: before this step, this many batches are skipped."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stacks:
    """Driver to executor: get the stacks of every rank."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kill:
    """Driver to executor: kill every process group at once, then send `Idle`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Terminate:
    """Driver to executor: ask every rank to save and exit (SIGTERM)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Driver to executor: check this host by a command."""

    command: list[str]
    directory: str
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quit:
    """Driver to executor: the job is over."""


type Message = (
    Joined
    | Moved
    | Measured
    | Exited
    | Host
    | Idle
    | Alive
    | Stack
    | Diagnosed
    | Start
    | Stacks
    | Kill
    | Terminate
    | Diagnose
    | Quit
)

_KINDS: dict[str, Any] = {k.__name__: k for k in typing.get_args(Message.__value__)}


@functools.cache
def _fields(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Types of the fields of a message, and the names of required ones."""
    hints = typing.get_type_hints(kind)
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is f.default_factory is dataclasses.MISSING
    }
    return hints, frozenset(required)


def merged(messages: Iterable[Moved | Measured]) -> list[Moved | Measured]:
    """The same in fewer messages: equal ones of several ranks are combined.

    Messages of a rank stay in their order, as faults do.

    Example:
        >>> place = {"cycle": 1, "step": 7, "phase": "data", "kind": "host"}
        >>> [m.ranks for m in merged(Moved(ranks=[n], **place) for n in range(3))]
        [[0, 1, 2]]
    """
    groups = list[list[Moved | Measured]]()
    index, last = dict[Any, int](), dict[int, int]()
    for message in messages:
        alike = _alike(message)
        at = index.get(alike, -1)
        if alike is None or at <= max(last.get(n, -1) for n in message.ranks):
            at = index[alike] = len(groups)
            groups.append([])
        groups[at].append(message)
        last |= dict.fromkeys(message.ranks, at)
    return [_merge(group) for group in groups]


def _alike(message: Moved | Measured) -> Any:
    """The common part of messages that may be combined; None if one may not."""
    if isinstance(message, Measured):
        return message.cycle, message.step, message.name, message.group
    if message.kind == "fault":
        return None
    return message.cycle, message.step, message.phase, message.kind, message.loss


def _merge(group: list[Moved | Measured]) -> Moved | Measured:
    changes: dict[str, Any] = {"ranks": [n for x in group for n in x.ranks]}
    if isinstance(group[0], Measured):
        changes["seconds"] = [
            s for x in group if isinstance(x, Measured) for s in x.seconds
        ]
    return group[0] if len(group) == 1 else dataclasses.replace(group[0], **changes)


def encode(message: Message) -> bytes:
    r"""A message as a line.

    Example:
        >>> encode(Idle(port=8476))
        b'{"is": "Idle", "port": 8476}\n'
    """
    fields = {"is": type(message).__name__, **vars(message)}
    return json.dumps(fields).encode() + b"\n"


def decode(line: bytes) -> Any:
    """The message of a line.

    Raises:
        ProtocolError: it is not a message.

    Example:
        >>> decode(b'{"is": "Idle", "port": "8476"}')
        Traceback (most recent call last):
        ...
        jaxscale.supervision.handshake.ProtocolError: Idle.port is '8476', expected int
    """
    fields = fields_of(line)
    name = fields.pop("is", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ProtocolError(f"a message is {name!r}, expected one of {list(_KINDS)}")
    hints, required = _fields(kind)
    if unknown := sorted(fields.keys() - hints.keys()):
        raise ProtocolError(f"{name} has the unknown field {unknown[0]!r}")
    if missing := sorted(required - fields.keys()):
        raise ProtocolError(f"{name} lacks {missing[0]}")
    for field, value in fields.items():
        if not _is(value, hints[field]):
            expected = getattr(hints[field], "__name__", hints[field])
            raise ProtocolError(f"{name}.{field} is {value!r:.60}, expected {expected}")
    return kind(**fields)


def _is(value: Any, hint: Any) -> bool:
    if hint in _PLAIN:  # JSON values are never of a subclass
        return type(value) in _PLAIN[hint]
    (element,) = typing.get_args(hint)
    if type(value) is not list:
        return False
    if element in _PLAIN:
        return {*map(type, value)} <= _PLAIN[element]
    return all(_is(x, element) for x in value)


_PLAIN: dict[Any, frozenset[type]] = {
    bool: frozenset([bool]),
    float: frozenset([int, float]),
    int: frozenset([int]),
    str: frozenset([str]),
}


class Channel:
    """Messages to and from one other process."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Wrap an open connection."""
        self._reader, self._writer = reader, writer

    def send(self, *messages: Message) -> None:
        """Send without waiting; a peer that does not read for long is disconnected."""
        if self._writer.transport.get_write_buffer_size() > _MOST_UNREAD:
            self._writer.transport.abort()
        self._writer.write(b"".join(map(encode, messages)))

    async def receive(self) -> Any:
        """The next message.

        Raises:
            ConnectionError: the peer has disconnected, or sent an invalid message.
        """
        return decode(await self._line())

    async def _line(self) -> bytes:
        try:
            line = await self._reader.readline()
        except ValueError as error:
            raise ProtocolError(f"a line is longer than {LONGEST_LINE}") from error
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the other side has gone")
        return line

    def close(self) -> None:
        """Close the connection after everything is sent."""
        self._writer.close()

    async def shake_hands(self, steps: handshake.Steps) -> None:
        """Run one side of a handshake.

        Raises:
            ConnectionError: the peer does not know the secret.
        """
        async with asyncio.timeout(handshake.SECONDS):
            say = next(steps)
            try:
                while True:
                    self._writer.write(say)
                    say = steps.send(await self._line())
            except StopIteration as end:
                self._writer.write(end.value)


async def connect(address: str, secret: str) -> Channel:
    """Connect to a server and run the handshake.

    Raises:
        OSError: nobody listens there, or not a process of this job.
    """
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
    channel = Channel(reader, writer)
    try:
        await channel.shake_hands(handshake.introduce(secret))
    except ConnectionResetError as error:
        channel.close()
        raise ConnectionResetError(
            "it ends the connection: the secrets may differ"
        ) from error
    except BaseException:
        channel.close()
        raise
    return channel


def connect_blocking(address: str, secret: str) -> socket.socket:
    """The same for a process without an event loop: a socket to send lines into.

    Raises:
        OSError: nobody listens there, or not a process of this job.
    """
    connection = socket.create_connection(split_address(address), handshake.SECONDS)
    try:
        handshake.shake_hands(connection, handshake.introduce(secret))
    except BaseException:
        connection.close()
        raise
    return connection


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``.

    Raises:
        ValueError: it has another form.

    Example:
        >>> split_address("[::1]:7000")
        ('::1', 7000)
    """
    host, _, port = address.rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if not bare or not port.isdecimal() or int(port) > 65535:
        raise ValueError(
            f"address {address!r}, expected host:port such as 127.0.0.1:7000, with a "
            "port from 0 to 65535, where 0 is a free one"
        )
    return bare, int(port)
