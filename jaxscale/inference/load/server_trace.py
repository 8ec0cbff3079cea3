"""A timeline of a server's engine while it is under load."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from jaxscale.inference.load.loadgen import require_client


@contextlib.contextmanager
def server_trace(url: str, path: str, api_key: str | None = None) -> Iterator[None]:
    """Have a server record its engine in this block; write the trace, print the shares.

    Args:
        url: Address of a server of ours, started with ``--allow-trace``.
        path: JSON file, for https://ui.perfetto.dev.
        api_key: Of the server.

    Raises:
        ConnectionError: the server does not answer.
        ValueError: it records nothing.
    """
    http = require_client()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with http.Client(base_url=url, headers=headers, timeout=60) as client:

        def call(method: str) -> bytes:
            try:
                answer = client.request(method, "/live/trace")
            except http.TransportError as error:
                raise ConnectionError(f"{url} does not answer: {error}") from error
            if answer.status_code != 200:
                raise ValueError(
                    f"trace {path!r} needs a server of ours that was started with "
                    f"--allow-trace; {url} says {answer.text:.200}"
                )
            return answer.content

        call("POST")
        try:
            yield
        finally:
            content = call("GET")
    place = Path(path)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(content)
    print(json.loads(content)["otherData"]["shares"])
