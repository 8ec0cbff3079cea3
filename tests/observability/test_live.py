"""The page over HTTP: it follows the files, and gives nothing else away."""

import http.client
import json
import re
import threading
import time

import pytest

from jaxscale.observability import live
from jaxscale.observability.live import LiveRun, ReportServer
from tests.observability.runs import event, hanging_cube, steps, write


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "_LEAST_SECONDS", 0.0)
    with ReportServer(("127.0.0.1", 0), tmp_path / "run") as server:
        thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.01}
        )
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def get(server, path, *, host=None, method="GET"):
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=120)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read().decode()
    connection.close()
    return answer, body


def newest(server, wanted):
    """The data once `wanted` is true of them."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        data = json.loads(get(server, "/data.json")[1])
        if wanted(data):
            return data
        time.sleep(0.02)
    raise AssertionError(data)


def test_data_follow_the_files(server, tmp_path):
    data = json.loads(get(server, "/data.json")[1])
    assert data["empty"].startswith("Nothing yet: ")
    known = [event("restore", 0, 99.0), *steps(1, 3, 100.0)]
    file = write(tmp_path / "run", {0: known}) / "events-0.jsonl"
    data = newest(server, lambda data: "loss" in data)
    assert data["loss"]["loss"][0] == [1, 2, 3]
    with file.open("a") as stream:
        for more in steps(4, 5, 103.0):
            stream.write(json.dumps(more) + "\n")
        stream.write('{"t0": 1')  # in the middle of a line
    data = newest(server, lambda data: data["facts"]["steps done"] == "5")
    assert data["loss"]["loss"][0] == [1, 2, 3, 4, 5]
    # Who has the newest data is told so without them.
    answer, body = get(server, f"/data.json?since={json.dumps(data['time'])}")
    assert (answer.status, body) == (204, "")


def test_the_page_is_live(server, tmp_path):
    write(tmp_path / "run", hanging_cube())
    answer, body = get(server, "/")
    assert answer.status == 200 and "const LIVE = true" in body
    assert "connect-src 'self'" in body and "Held up by rank 5" in body
    assert answer.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize(
    "path",
    ["/events-0.jsonl", "/../../etc/passwd", "/%2e%2e/run", "//etc/passwd", "/x?/"],
)
def test_nothing_else_is_served(server, tmp_path, path):
    write(tmp_path / "run", hanging_cube())
    answer, body = get(server, path)
    assert answer.status == 404 and "root:" not in body and "t0" not in body


def test_other_names_and_methods_are_refused(server, tmp_path):
    write(tmp_path / "run", hanging_cube())
    assert get(server, "/data.json", host="evil.example:80")[0].status == 403
    assert get(server, "/data.json", host="localhost.evil:80")[0].status == 403
    assert get(server, "/data.json", host="localhost")[0].status == 200
    assert get(server, "/data.json", host="[::1]:80")[0].status == 200
    assert get(server, "/", method="POST")[0].status == 501
    assert get(server, "/", method="DELETE")[0].status == 501


def test_files_are_not_read_more_often_than_they_may(tmp_path, monkeypatch):
    reads = []
    real = live.RunReader.read
    monkeypatch.setattr(live.RunReader, "read", lambda x: reads.append(x) or real(x))
    monkeypatch.setattr(live, "_REST", 0)
    now = [1000.0]
    run = LiveRun(write(tmp_path, {0: steps(1, 2, 900.0)}), clock=lambda: now[0])
    for _ in range(5):
        run.data()
    assert len(reads) == 1
    now[0] += 10
    assert run.data()["time"] == 1010.0  # told anew, since nothing was heard meanwhile
    assert len(reads) == 1
    write(tmp_path, {0: steps(1, 4, 900.0)})
    now[0] += 10
    assert run.data()["facts"]["steps done"] == "4" and len(reads) == 2


def test_requests_are_bounded(server, monkeypatch):
    for _ in range(live._MOST_REQUESTS):
        assert server._room.acquire(blocking=False)
    with pytest.raises((http.client.HTTPException, ConnectionError)):
        get(server, "/data.json")
    server._room.release()
    assert get(server, "/data.json")[0].status == 200


def test_an_address_in_use_is_an_error(server, tmp_path):
    with pytest.raises(OSError, match=re.escape("in use")):
        ReportServer(server.server_address[:2], tmp_path)
