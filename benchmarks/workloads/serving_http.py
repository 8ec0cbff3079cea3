"""What HTTP costs: requests through the server against the same calls of `LLM`.

Both ways run in turns on one engine, so that programs and sizes are the same; the
server is in a process of its own, as that of ``jaxscale serve``. Both get all requests
at once: the server from one client, this process, over loopback, a connection for each.
The client reads bytes from sockets and looks for the end of each answer, no more, so
that it takes little of the machine; on few cores what it takes is still missing
elsewhere.

Answers have text: a word for each token. Lengths are uniform around their mean.

These are the cases ``http_*`` of `benchmarks.serving`. Where others use the machine, or
it has fewer than three cores, the rate says little: the time of the processor does not
depend on them.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


type Bodies = list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class Round:
    """A measurement of all requests."""

    tokens: int
    """Tokens of all answers."""
    seconds: float
    """From the first request to the last answer."""
    server_cpu: float
    """Seconds of CPU time of the processes of engine and server."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def make_bodies(requests: int, prompt: int, output: int, seed: int = 0) -> Bodies:
    """``/v1/completions`` requests of half to one and a half times `output` tokens.

    Args:
        requests: Number of requests.
        prompt: Tokens of each prompt.
        output: Mean tokens of an answer.
        seed: Of tokens and lengths.
    """
    random = np.random.default_rng(seed)
    return [
        {
            "prompt": random.integers(0, VOCAB, prompt).tolist(),
            "max_tokens": int(random.integers(output // 2, output * 3 // 2)),
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(requests)
    ]


# --- The client -----------------------------------------------------------------------


class _Stream:
    """A connection that sends one request after another."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.tail = b""
        self.events = self.tokens = 0

    def send(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        self.tail = b""
        self.socket.sendall(head.encode() + data)

    def read(self) -> bool:
        """Take in what is there; True at the end of an answer."""
        data = self.socket.recv(1 << 16)
        self.events += data.count(b"data: {")
        if not self.tail and not data.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"a call failed: {data!r}")
        self.tail = (self.tail + data)[-1024:]
        if not data:
            raise RuntimeError(f"the server closed the connection: {self.tail!r}")
        if not self.tail.endswith(b"0\r\n\r\n"):
            return False
        _, _, after = self.tail.rpartition(b'"completion_tokens":')
        if not after or b"[DONE]" not in after:
            raise RuntimeError(f"an answer did not end well: {self.tail!r}")
        self.tokens += int(after.partition(b",")[0])
        return True


def call(port: int, bodies: Bodies, streams: int) -> tuple[int, int, float]:
    """Send all bodies over as many connections; tokens, events and seconds."""
    waiting = list(reversed(bodies))
    made = [_Stream(port) for _ in range(min(streams, len(bodies)))]
    left = len(bodies)
    with contextlib.ExitStack() as stack:
        for stream in made:
            stack.enter_context(stream.socket)
        selector = stack.enter_context(selectors.DefaultSelector())
        start = time.perf_counter()
        for stream in made:
            selector.register(stream.socket, selectors.EVENT_READ, stream)
            stream.send(waiting.pop())
        while left:
            for key, _ in selector.select():
                if not key.data.read():
                    continue
                left -= 1
                if waiting:
                    key.data.send(waiting.pop())
                else:  # the server closes it after a while
                    selector.unregister(key.data.socket)
        seconds = time.perf_counter() - start
    return sum(s.tokens for s in made), sum(s.events for s in made), seconds


# --- The process with engine and server -----------------------------------------------

VOCAB = 512  # ids of prompts


def words(size: int) -> Any:
    """A tokenizer of bytes, as those of most models, of which every token is a word."""
    import tokenizers

    from jaxscale.models import Tokenizer

    space = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert "\u0120" in space  # stands for a space
    vocab = {f"\u0120w{i}": i for i in range(size)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend)


def serve(model: str, slots: int, longest: int) -> None:
    """Hold a server and an `LLM` on one engine; lines of standard input are runs."""
    from benchmarks.workloads.serving_model import random_model
    from benchmarks.workloads.serving_policies import small_model
    from jaxscale.inference import LLM, EngineConfig
    from jaxscale.inference.engine.make import freeze_gc_heap
    from jaxscale.inference.server import EngineBackend, ServerConfig, TextModel
    from jaxscale.inference.server import serve as serve_http

    small = model == "small"
    sizes = EngineConfig(
        max_len=longest,
        num_slots=slots,
        buckets=(slots,),
        prefill_tokens=(256,) if small else (2048,),
        prefix_cache=False,
    )
    decoder = small_model(128, 2) if small else random_model({"model": model}, 0)
    tokenizer = words(decoder.config.vocab_size)
    llm = LLM(decoder, tokenizer, config=sizes, quiet=True)
    del decoder
    freeze_gc_heap(llm.engine)  # as `jaxscale serve` does
    served = TextModel(
        name="model", backend=EngineBackend(llm.engine), tokenizer=tokenizer
    )

    def bound(port: int) -> None:
        print(json.dumps({"port": port}), flush=True)
        threading.Thread(target=_obey, args=(llm,), daemon=True).start()

    serve_http(lambda: served, ServerConfig(), port=0, on_bound=bound, own_process=True)


def _obey(llm: Any) -> None:
    """Run what the lines of standard input ask for, then end the server."""
    from jaxscale.inference import SamplingParams

    for line in sys.stdin:
        bodies = json.loads(line)
        if bodies:
            params = [
                SamplingParams(
                    max_tokens=b["max_tokens"], ignore_eos=True, temperature=0
                )
                for b in bodies
            ]
            start = time.perf_counter()
            found = llm.generate([b["prompt"] for b in bodies], params, progress=False)
            seconds = time.perf_counter() - start
            tokens = sum(len(each.tokens) for each in found)
            assert all(each.text.count("w") == len(each.tokens) for each in found)
            print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
        else:
            print(json.dumps({"cpu": _cpu_seconds()}), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


def _cpu_seconds() -> float:
    """Processor time of this process and of the server's, which it has started."""
    total, me = 0.0, str(os.getpid())
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            *_, fields = path.read_text().rpartition(") ")
            found = fields.split()
            if me in (path.parent.name, found[1]):
                total += int(found[11]) + int(found[12])
    return total / os.sysconf("SC_CLK_TCK")


class Process:
    """The child that `serve` runs in."""

    def __init__(self, *sizes: str | int) -> None:
        job = [
            sys.executable,
            "-m",
            "benchmarks.workloads.serving_http",
            *map(str, sizes),
        ]
        self._child = subprocess.Popen(
            job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.port: int = self._answer()["port"]
        while not self._ready():
            time.sleep(0.05)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._child.communicate(timeout=60)

    def _ready(self) -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", self.port)) as made,
        ):
            made.sendall(b"GET /ready HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return made.recv(1 << 12).startswith(b"HTTP/1.1 200")
        return False

    def ask(self, bodies: Bodies) -> dict[str, Any]:
        """Run `bodies` by `LLM`; none of them asks for the time of the processor."""
        assert self._child.stdin is not None
        print(json.dumps(bodies), file=self._child.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"the server has ended: {self._child.wait()}")
        return json.loads(line)


def measure(process: Process, bodies: Bodies, streams: int) -> Round:
    """All requests through the server, or with 0 streams by `LLM`."""
    before = process.ask([])["cpu"]
    if streams:
        tokens, _, seconds = call(process.port, bodies, streams)
    else:
        found = process.ask(bodies)
        tokens, seconds = found["tokens"], found["seconds"]
    return Round(tokens, seconds, process.ask([])["cpu"] - before)


def compare(
    *, model: str, streams: int, prompt: int, output: int, rounds: int
) -> tuple[list[Round], list[Round]]:
    """Measure the server and `LLM` in turns, after one round of each.

    Args:
        model: A preset, or ``"small"``.
        streams: Requests of a round, all at once.
        prompt: Tokens of each prompt.
        output: Mean tokens of an answer.
        rounds: How often each is measured.

    Returns:
        The rounds of the server, and those of `LLM`.
    """
    bodies = make_bodies(streams, prompt, output)
    longest = prompt + output * 3 // 2
    found: tuple[list[Round], list[Round]] = [], []
    slots = 1 << (streams - 1).bit_length()
    with Process(model, slots, longest) as process:
        for number in range(rounds + 1):
            for of_one, name, count in zip(
                found, ("server", "LLM"), (streams, 0), strict=True
            ):
                each = measure(process, bodies, count)
                print(f"{name} {number}: {each.rate:,.0f} tokens/s", file=sys.stderr)
                of_one.append(each)
    return found[0][1:], found[1][1:]


def figures(rounds: Sequence[Round]) -> dict[str, float]:
    """What a row says of the rounds of one of both."""
    return {
        "tokens_per_second": statistics.median(each.rate for each in rounds),
        "cpu_us_per_token": min(1e6 * each.server_cpu / each.tokens for each in rounds),
    }


if __name__ == "__main__":
    from jaxscale.inference.engine.device_share import reserve_for_serving

    reserve_for_serving()
    name, *numbers = sys.argv[1:]
    serve(name, *map(int, numbers))
