"""How two processes prove that they know the same secret, without sending it.

Each line is JSON:

    server  {"challenge": A}
    client  {"challenge": B, "proof": HMAC(secret, "client" + A)}
    server  {"proof": HMAC(secret, "server" + B)}

`welcome` and `introduce` are the two sides without a connection: they yield the line to
send, and receive its answer.
"""

import hmac
import json
import secrets
import socket
import time
from collections.abc import Generator
from typing import Any


SECONDS = 10.0
"""Time limit of a handshake, in seconds."""

type Steps = Generator[bytes, bytes, bytes]
"""Yields lines, receives their answers, and returns the last line, which has none."""

_LONGEST_LINE = 1024


class ProtocolError(ConnectionError):
    """The peer sent a message that is not in the protocol."""


def welcome(secret: str) -> Steps:
    """Server side: let a client prove that it knows the secret."""
    ours = secrets.token_hex()
    answer = fields_of((yield _line(challenge=ours)))
    _check(answer, secret, "client", ours)
    return _line(proof=_proof(secret, "server", _text(answer, "challenge")))


def introduce(secret: str) -> Steps:
    """Client side: prove to the server that this process knows the secret."""
    ours, theirs = secrets.token_hex(), _text(fields_of((yield b"")), "challenge")
    proof = _proof(secret, "client", theirs)
    answer = yield _line(challenge=ours, proof=proof)
    _check(fields_of(answer), secret, "server", ours)
    return b""


def shake_hands(connection: socket.socket, steps: Steps) -> None:
    """Run one side of a handshake over a blocking socket; nothing more is read.

    Raises:
        OSError: the peer does not know the secret, is silent or has disconnected.
    """
    before, until = connection.gettimeout(), time.monotonic() + SECONDS
    say = next(steps)
    try:
        while True:
            connection.sendall(say)
            say = steps.send(_received(connection, until))
    except StopIteration as end:
        connection.sendall(end.value)
    connection.settimeout(before)


def fields_of(line: bytes) -> dict[str, Any]:
    """The object of a line.

    Raises:
        ProtocolError: the line is not an object.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a line is no JSON: {line[:60]!r}") from error
    if not isinstance(fields, dict):
        raise ProtocolError(f"a line is no object: {line[:60]!r}")
    return fields


def _received(connection: socket.socket, until: float) -> bytes:
    """Read a line byte by byte, and nothing after it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 1e-3))
        byte = connection.recv(1)
        if not byte:
            raise ConnectionResetError("the other side has gone")
        line += byte
        if len(line) > _LONGEST_LINE:
            raise ProtocolError(f"a handshake has more than {_LONGEST_LINE} bytes")
    return bytes(line)


def _line(**fields: str) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ProtocolError(f"a handshake lacks its {name}")
    return value


def _proof(secret: str, role: str, challenge: str) -> str:
    return hmac.digest(secret.encode(), (role + challenge).encode(), "sha256").hex()


def _check(answer: dict[str, Any], secret: str, role: str, challenge: str) -> None:
    theirs = _text(answer, "proof").encode()
    if not hmac.compare_digest(theirs, _proof(secret, role, challenge).encode()):
        raise ProtocolError("the other side does not know the secret of this job")
