"""What a driver tells Prometheus: the format, the figures, and who may ask."""

import asyncio
import json
import socket

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxscale.supervision import telemetry
from jaxscale.supervision.protocol import Exited, Measured, Moved
from jaxscale.supervision.telemetry import Telemetry, family
from tests.ports import free_port


@pytest.fixture
def job(tmp_path, monkeypatch):
    """The telemetry of four ranks, and a clock that is set by hand."""
    clock = Clock()
    monkeypatch.setattr(telemetry.time, "monotonic", lambda: clock.now)
    made = Telemetry(tmp_path, 4)
    made.clock = clock
    return made


class Clock:
    now = 1000.0


def say(job, phase, step=0, seconds=0.0, rank=0, loss=0.0):
    job.clock.now += seconds
    kind = "device" if phase == "done" else "host"
    where = {"ranks": [rank], "cycle": 1, "step": step, "kind": kind}
    job.heard(Moved(phase=phase, loss=loss, **where))


def figures(job):
    """By name and labels, as a reader of the format finds them."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for found in text_string_to_metric_families(job.exposition())
        for sample in found.samples
    }


def test_time_goes_to_what_the_job_does(job):
    job.started(1)
    say(job, "start", seconds=1)
    say(job, "compile", seconds=2)
    say(job, "done", 1, seconds=4)
    say(job, "begin", 2)
    say(job, "done", 2, seconds=8)
    say(job, "save", 2)
    say(job, "saved", 2, seconds=16)
    say(job, "begin", 3)
    say(job, "done", 3, seconds=32, loss=2.5)
    job.clock.now += 64  # it hangs
    job.failed("stall")
    job.clock.now += 128
    job.started(2)
    say(job, "restore", seconds=256)
    say(job, "done", 3, seconds=512)
    say(job, "eval", 3)
    job.clock.now += 1024
    found = figures(job)
    times = {k[1]: v for k, v in found.items() if k[0] == "jaxscale_time_seconds"}
    assert times == {
        "start": 7,
        "productive": 8,
        "checkpoint": 16,
        "lost": 32 + 64,
        "restart": 128 + 256 + 512,
        "evaluation": 1024,
    }
    assert found["jaxscale_step",] == 3 and found["jaxscale_loss",] == 2.5
    assert found["jaxscale_restarts_total",] == 1
    assert found["jaxscale_faults_total", "stall"] == 1
    assert (found["jaxscale_ranks",], found["jaxscale_ranks_alive",]) == (4, 1)


def test_ranks_that_leave_are_not_alive(job):
    job.started(1)
    for rank in range(3):
        say(job, "begin", 1, rank=rank)
    job.heard(Exited(rank=1, cycle=1, code=0, tail=""))
    assert figures(job)["jaxscale_ranks_alive",] == 2


def test_slow_ranks_have_their_host_and_go_again(job):
    job.started(1)
    hosts = {"host a": [0, 1], 'b"\\\n': [2, 3]}

    def measure(steps, factor):
        for step in steps:
            for rank in range(4):
                seconds = factor if rank == 3 else 1.0
                where = {"ranks": [rank], "cycle": 1, "step": step}
                job.heard(Measured(name="computing", seconds=[seconds], **where))
        job.clock.now += 2
        return job.slow_news(hosts.items())

    assert measure(range(11), 1.5) is None
    news = measure(range(11, 13), 1.5)
    assert (news.ranks, news.factors, news.hosts) == ([3], [1.5], ['b"\\\n'])
    assert measure(range(13, 16), 1.5) is None  # it is known
    found = figures(job)
    assert found["jaxscale_slow_ranks",] == 1
    assert found["jaxscale_slow_rank_factor", "3", 'b"\\\n', "computing"] == 1.5
    assert measure(range(16, 70), 1.0).line == "no rank is slow now"
    assert figures(job)["jaxscale_slow_ranks",] == 0


def test_newest_metrics_are_read_behind_damage(job, tmp_path):
    record = {"step": 7, "tokens_per_second_per_device": 1234.5, "step_seconds": 0.25}
    lines = [json.dumps(record), json.dumps({"step": 7, "eval_loss": 2.0}), '{"st']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = figures(job)
    assert found["jaxscale_tokens_per_second_per_device",] == 1234.5
    assert found["jaxscale_step_seconds",] == 0.25


def test_the_format_is_strict(job):
    text = job.exposition()
    assert text.endswith("\n") and "\n\n" not in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# T")]
    assert len(names) == len(set(names))
    for line in text.splitlines():
        if line.startswith("# TYPE") and line.endswith("counter"):
            assert line.split()[2].endswith("_total")
    samples = [({}, float("nan")), ({}, float("inf"))]
    nan, inf = family("x", "gauge", "A thing.", samples).splitlines()[2:]
    assert (nan, inf) == ("x NaN", "x +Inf")
    assert family("x", "gauge", "a\\b\nc", []).startswith("# HELP x a\\\\b\\nc\n")


@pytest.mark.parametrize(
    ("request_line", "status", "has"),
    [
        ("GET /metrics HTTP/1.1", "200 OK", "# TYPE jaxscale_step gauge"),
        ("GET /metrics?x=1 HTTP/1.0", "200 OK", "jaxscale_ranks 4"),
        ("HEAD /metrics HTTP/1.1", "200 OK", ""),
        ("POST /metrics HTTP/1.1", "405 Method Not Allowed", "only GET"),
        ("GET / HTTP/1.1", "404 Not Found", "metrics are at /metrics"),
        ("nonsense", "404 Not Found", ""),
    ],
)
def test_figures_are_served(tmp_path, request_line, status, has):
    port = free_port()

    async def ask():
        async with Telemetry(tmp_path, 4).served(f"127.0.0.1:{port}"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{request_line}\r\nHost: x\r\n\r\n".encode())
            answer = await reader.read()
            writer.close()
            return answer.decode()

    head, _, body = asyncio.run(ask()).partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status}\r\n")
    assert "version=0.0.4" in head and has in body
    if request_line.startswith("HEAD"):
        assert body == "" and "Content-Length: 0" not in head


def test_a_port_in_use_is_said(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"

        async def serve():
            async with Telemetry(tmp_path, 1).served(address):
                pass

        with pytest.raises(ValueError, match=f"metrics_address {address} cannot be"):
            asyncio.run(serve())
