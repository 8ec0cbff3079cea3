"""Lines of the protocol: what is understood, what is refused, who is let in."""

import asyncio
import contextlib
import dataclasses
import json
import random
import socket
import threading

import pytest

from jaxscale.supervision import handshake, protocol
from jaxscale.supervision.protocol import ProtocolError


START = protocol.Start(
    cycle=3,
    ranks=[2, 3],
    processes=4,
    coordinator="10.0.0.1:8476",
    command=["python", "train.py", 'a "word" \n'],
    directory="/runs/a",
    resume_before=0,
    is_first=True,
    skips=[[7, 100]],
)


def test_messages_come_back_as_they_were():
    messages = [
        START,
        protocol.Moved(ranks=[0], cycle=1, step=7, phase="done", kind="device"),
        protocol.Moved(
            ranks=[0],
            cycle=1,
            step=7,
            phase="x",
            kind="fault",
            suspects=[1],
            sure=False,
        ),
        protocol.Exited(rank=0, cycle=1, code=-9, tail="ü\n"),
        protocol.Diagnose(command=[], directory="/", seconds=2),
        protocol.Quit(),
    ]
    for message in messages:
        line = protocol.encode(message)
        assert line.count(b"\n") == 1
        assert protocol.decode(line) == message


def test_what_is_alike_is_told_once_and_in_order():
    """Against each rank's own words, for random ones."""
    rng = random.Random(3)
    for _ in range(200):
        said = [
            protocol.Moved(
                ranks=[rng.randrange(4)],
                cycle=1,
                step=rng.randrange(2),
                phase=rng.choice(["compile", "begin", "done"]),
                kind=rng.choice(["host", "host", "host", "fault"]),
                loss=rng.choice([0.0, 2.5]),
            )
            for _ in range(rng.randrange(12))
        ]
        told = protocol.merged(said)
        assert len(told) <= len(said)
        for rank in range(4):
            words = [dataclasses.replace(m, ranks=[]) for m in said if rank in m.ranks]
            heard = [dataclasses.replace(m, ranks=[]) for m in told if rank in m.ranks]
            assert heard == words
        faults = [m for m in told if m.kind == "fault"]
        assert all(len(m.ranks) == 1 for m in faults)


def test_what_ranks_in_step_say_does_not_grow_with_them():
    def told(ranks):
        place = {"cycle": 1, "step": 4, "kind": "host"}
        moved = [
            protocol.Moved(ranks=[rank], phase=phase, **place)
            for rank in range(ranks)
            for phase in ("dispatched", "done")
        ]
        measured = [
            protocol.Measured(ranks=[n], seconds=[n], cycle=1, step=4, name="host")
            for n in range(ranks)
        ]
        return protocol.merged([*moved, *measured])

    assert len(told(2)) == len(told(64)) == 3
    assert told(64)[2].ranks == told(64)[2].seconds == list(range(64))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            b'{"is": "Measured", "ranks": [1], "cycle": 1, "step": 1, "name": "host", '
            b'"seconds": []}\n',
            "Measured has 0 seconds of 1 ranks",
        ),
        (b"\xff\n", "a line is no JSON"),
        (b"[" * 9999 + b"\n", "a line is no JSON"),
        (b"[1]\n", "a line is no object"),
        (b"{}\n", "a message is None, expected one of"),
        (b'{"is": ["Quit"]}\n', r"a message is \['Quit'\], expected one of"),
        (b'{"is": "Exec"}\n', "a message is 'Exec', expected one of"),
        (b'{"is": "Idle"}\n', "Idle lacks port"),
        (b'{"is": "Idle", "port": true}\n', "Idle.port is True, expected int"),
        (b'{"is": "Idle", "port": 1, "x": 2}\n', "Idle has the unknown field 'x'"),
        (
            protocol.encode(START).replace(b"[2, 3]", b'[2, "3"]'),
            r"Start.ranks is \[2, '3'\], expected",
        ),
    ],
)
def test_what_is_no_message(line, message):
    with pytest.raises(ProtocolError, match=message):
        protocol.decode(line)


@contextlib.contextmanager
def server(secret, heard):
    """A server that welcomes clients and keeps what they say, on a thread."""
    loop, address = asyncio.new_event_loop(), []

    async def hear(reader, writer):
        channel = protocol.Channel(reader, writer)
        try:
            await channel.shake_hands(handshake.welcome(secret))
            heard.append("welcome")
            while True:
                heard.append(await channel.receive())
        except OSError as error:
            heard.append(str(error))
        finally:
            channel.close()

    async def listen():
        found = await asyncio.start_server(
            hear, "127.0.0.1", 0, limit=protocol.LONGEST_LINE
        )
        address.append(f"127.0.0.1:{found.sockets[0].getsockname()[1]}")
        return found

    listening = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(listening.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        for task in asyncio.all_tasks(loop):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(task)
        loop.close()


def until(heard, count):
    for _ in range(12_000):
        if len(heard) >= count:
            return
        threading.Event().wait(0.01)
    raise TimeoutError(heard)


def test_who_knows_the_secret_is_heard():
    heard = []
    with server("secret", heard) as address:
        with protocol.connect_blocking(address, "secret") as client:
            client.sendall(protocol.encode(START))
            until(heard, 2)
            client.sendall(b"x" * (2 * protocol.LONGEST_LINE))
            until(heard, 3)
        assert heard[:2] == ["welcome", START]
        assert "longer than" in heard[2]


def test_who_does_not_know_it_is_not():
    heard = []
    with server("secret", heard) as address:
        with pytest.raises(OSError):
            protocol.connect_blocking(address, "guess")
        with pytest.raises(OSError, match="the secrets may differ"):
            asyncio.run(protocol.connect(address, "guess"))
        for said in (b"GET / HTTP/1.1\r\n\r\n", b"{}\n", b"x" * 10**6):
            with socket.create_connection(protocol.split_address(address)) as client:
                challenge = json.loads(client.makefile("rb").readline())
                assert len(challenge["challenge"]) == 64
                with contextlib.suppress(OSError):  # it may have been sent away before
                    client.sendall(said)
                    client.shutdown(socket.SHUT_WR)
        until(heard, 5)
    assert "welcome" not in heard


def test_a_server_that_does_not_know_the_secret_is_left():
    def impostor(listener):
        connection, _ = listener.accept()
        with connection, connection.makefile("rb") as lines:
            connection.sendall(b'{"challenge": "00"}\n')
            lines.readline()
            connection.sendall(b'{"proof": "00"}\n')

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=impostor, args=(listener,))
        thread.start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ProtocolError, match="does not know the secret"):
            protocol.connect_blocking(address, "secret")
        thread.join()
