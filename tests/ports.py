"""Ports for what listens only later, in a process that a test starts."""

import os
import random
import socket


_FIRST, _EACH = 20_000, 600
"""Below those that Linux hands out to whoever asks for any, which are from 32,768."""
_given: list[int] = []


def free_port() -> int:
    """A port that nobody else gets meanwhile: each worker of pytest has its own."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = _FIRST + number % 20 * _EACH
    for port in random.sample(range(first, first + _EACH), _EACH):
        if port in _given[-_EACH // 2 :]:
            continue
        try:
            with socket.create_server(("", port)):
                _given.append(port)
                return port
        except OSError:
            continue
    raise OSError(f"no port from {first} to {first + _EACH} is free")
