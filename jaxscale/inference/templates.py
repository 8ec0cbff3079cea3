"""Jinja templates rendered by worker processes with limited time and memory.

A template comes with a model, which is untrusted. Jinja's sandbox keeps it from
Python's internals, but not from a filter that takes gigabytes or minutes, so templates
never run in this process: not even for compilation, which evaluates constants.
"""

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxscale.checks import pip_install


SECONDS = 2.0
"""Time limit of a rendering, in seconds of CPU: a busy host takes longer."""
MAX_CHARACTERS = 2**23
"""Maximum length of a rendered text."""
MEMORY = 2**30
"""Bytes of address space of a worker process."""
_MOST = 4
_WORKER = Path(__file__).with_name("template_worker.py")


class Workers:
    """A pool of warm worker processes, as many as render concurrently."""

    def __init__(
        self,
        *,
        seconds: float = SECONDS,
        memory: int = MEMORY,
        characters: int = MAX_CHARACTERS,
    ) -> None:
        """Start without workers.

        Args:
            seconds: Time limit of a rendering, in seconds of CPU.
            memory: Bytes of address space of each worker.
            characters: Maximum length of a text.
        """
        self._seconds, self._memory, self._characters = seconds, memory, characters
        self._room = threading.BoundedSemaphore(_MOST)
        self._idle: list[subprocess.Popen[bytes]] = []
        atexit.register(self.close)

    def render(self, source: str, context: Mapping[str, Any] | None) -> str:
        """Render a template.

        Raises:
            ValueError: it is not a template, refuses the variables, or takes too much
                time or memory.
            ImportError: jinja2 is not installed.
        """
        try:
            request = json.dumps({"source": source, "context": context}).encode()
        except TypeError as error:
            raise ValueError(
                f"messages, tools and variables are JSON: {error}"
            ) from error
        with self._worker() as worker:
            answer = self._ask(worker, request)
        if "memory" in answer:
            raise ValueError(
                f"the chat template took more than {self._memory >> 20} MiB of memory"
            )
        if "text" not in answer:
            raise ValueError(answer.get("malformed") or answer["error"])
        return answer["text"]

    def close(self) -> None:
        """End idle workers."""
        while self._idle:
            _end(self._idle.pop())

    @contextlib.contextmanager
    def _worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """A worker for exclusive use; it is kept if it is still alive."""
        with self._room:
            worker = None
            while worker is None and self._idle:
                with contextlib.suppress(IndexError):  # another thread was faster
                    worker = self._idle.pop()
                if worker is not None and worker.poll() is not None:
                    _end(worker)
                    worker = None
            worker = worker or self._start()
            try:
                yield worker
            except BaseException:  # an interrupt too leaves it with half a question
                _end(worker)
                raise
            if worker.poll() is None:
                self._idle.append(worker)
            else:
                _end(worker)

    def _start(self) -> subprocess.Popen[bytes]:
        folders = []
        for name in ("jinja2", "markupsafe"):
            found = importlib.util.find_spec(name)
            if found is None or found.origin is None:
                raise ImportError(f"chat templates need jinja2: {pip_install('infer')}")
            folders.append(str(Path(found.origin).parents[1]))
        limits = (self._seconds, self._memory, self._characters)
        # The server's keys are in its environment, which the template must not see.
        kept = ("PATH", "TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH")
        return subprocess.Popen(
            [sys.executable, "-I", str(_WORKER), *map(str, limits), *folders],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in kept if name in os.environ},
            start_new_session=True,  # terminal signals are for the server
        )

    def _ask(self, worker: subprocess.Popen[bytes], request: bytes) -> dict[str, str]:
        """The answer of a worker; one that dies was ended by its limits."""
        assert worker.stdin is not None and worker.stdout is not None  # as started
        try:
            worker.stdin.write(request + b"\n")
            worker.stdin.flush()
            line = worker.stdout.readline()
        except BrokenPipeError:
            line = b""
        if line:
            return json.loads(line)
        code = worker.wait()
        if code == -signal.SIGPROF:
            return {
                "error": f"the chat template ran for more than {self._seconds} seconds"
            }
        return {"error": f"the process that renders chat templates ended with {code}"}


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    worker.wait()


WORKERS = Workers()
"""The workers that all chat templates share."""
