"""The live page and the metrics: what they say is what has happened."""

import asyncio
import json
import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxscale.inference.engine.scheduling.scheduler_output import Counts, SchedulerEvent
from jaxscale.inference.engine.scheduling.sequence import Sequence, SequenceStatus
from jaxscale.inference.request import Overloaded, Request
from jaxscale.inference.server import Load
from jaxscale.inference.server.live import Recorder, _percentiles
from tests.inference.server.fake_engine import FakeEngine
from tests.inference.server.test_app import BODY, PATH, Client, release, settle


def continuation(name, order):
    return Sequence(
        request=Request(prompt=[1], id=name),
        index=0,
        order=(0, order, 0),
        seed=0,
        limit=9,
        stops=frozenset(),
        tokens=[1],
        state=SequenceStatus.PREFILL,
    )


class Scene:
    """A recorder whose clock the test turns."""

    def __init__(self, num_slots=4):
        self.now, self.load = 100.0, Load()
        self.recorder = Recorder(
            lambda: self.load, num_slots=num_slots, clock=lambda: self.now
        )

    def say(self, kind, c, *, after=1.0):
        self.now += after
        self.recorder.observe(SchedulerEvent(kind=kind, sequence=c, time=0.0))

    def tick(self, *, after=1.0):
        self.now += after
        self.recorder.tick()


def test_segments():
    """A prompt, then tokens; who comes takes the lowest free place."""
    scene = Scene()
    a, b, c = (continuation(name, i) for i, name in enumerate("abc"))
    scene.say("queued", a)
    scene.say("admitted", a)  # at 2
    scene.say("admitted", b)  # 3
    a.state = SequenceStatus.DECODE
    scene.tick()  # 4
    b.state = SequenceStatus.DECODE
    scene.tick()  # 5
    scene.say("ended", a)  # 6
    scene.say("admitted", c)  # 7, in the place of a
    scene.say("preempted", b)  # 8
    frame = scene.recorder.frame()
    places = [
        (lane, kind, start, end) for lane, _, kind, start, end in frame["segments"]
    ]
    assert places == [(0, 0, 2, 4), (1, 0, 3, 5), (0, 1, 4, 6), (1, 1, 5, 8)]
    colors = {lane: color for lane, color, *_ in frame["segments"]}
    assert len(set(colors.values())) == 2
    assert frame["marks"] == [[1, 8]]
    ((lane, color, kind, since),) = frame["open"]
    assert (lane, kind, since) == (0, 0, 7) and color not in colors.values()
    later = scene.recorder.frame()
    assert later["segments"] == later["marks"] == [] and len(later["open"]) == 1


def test_a_request_has_one_color():
    scene = Scene()
    first, second = continuation("a", 0), continuation("a", 1)
    scene.say("admitted", first)
    scene.say("admitted", second)
    assert len({color for _, color, *_ in scene.recorder.frame()["open"]}) == 1


def test_more_continuations_than_places():
    scene = Scene(num_slots=2)
    for i in range(5):
        scene.say("admitted", continuation(str(i), i))
    frame = scene.recorder.frame()
    assert frame["slots"] == 5
    assert sorted(lane for lane, *_ in frame["open"]) == [0, 1, 2, 3, 4]


def test_steps_do_not_count_rests():
    scene, steps = Scene(), []
    scene.recorder.on_step = steps.append
    a = continuation("a", 0)
    scene.say("admitted", a)
    scene.tick()
    scene.tick(after=0.25)
    scene.say("ended", a, after=0)
    scene.tick(after=0.5)
    scene.tick(after=60.0)
    scene.say("admitted", continuation("b", 1))
    scene.tick(after=0.125)
    assert steps == [0.25, 0.5]


def test_numbers():
    scene = Scene()
    for i in range(20):
        scene.recorder.measure("ttft", (i + 1) / 1000)
    scene.load = Load(waiting=3, running=2, pages=10, pages_held=4)
    frame = scene.recorder.frame()
    assert frame["ttft"] == [11.0, 19.0] and frame["gap"] is None
    assert (frame["waiting"], frame["running"], frame["kv"]) == (3, 2, 0.4)
    scene.now += 5
    scene.load = Load(counts=Counts(drawn_tokens=100))
    assert scene.recorder.frame()["rate"] == 20.0
    scene.now += 60
    frame = scene.recorder.frame()
    assert frame["ttft"] is None and frame["rate"] == 0.0
    assert _percentiles([0.002]) == [2.0, 2.0]


def test_memory_is_bounded():
    scene = Scene()
    for i in range(10_000):
        c = continuation(str(i), i)
        scene.say("admitted", c)
        scene.say("ended", c)
        scene.recorder.measure("gap", 0.1)
    frame = scene.recorder.frame()
    assert len(frame["segments"]) == 4096 and frame["open"] == []
    assert len(scene.recorder._times["gap"]) <= 4096


def test_events(harness):
    """A page that is opened late sees the past, and one that hangs holds nobody."""
    engine = FakeEngine(" to be or not" * 5)

    async def test(client):
        recorder = harness.service.recorder
        await client.post(PATH, json=BODY)
        await settle(lambda: len(recorder._ring) >= 2)
        page = Client(harness.app, None, path="/live/events")
        hung = Client(harness.app, None, path="/live/events")
        hung.reads.clear()
        await settle(lambda: len(page.sent) > 3)
        frames = [json.loads(m["body"][6:]) for m in page.sent[1:] if m["body"]]
        colors = {segment[1] for frame in frames for segment in frame["segments"]}
        assert len(colors) == 1 and frames[-1]["finished"] == 1
        for _ in range(60):  # more than may wait
            for watcher in list(recorder._watchers):
                if watcher.qsize() == watcher.maxsize:
                    watcher.get_nowait()
        page.left.set()
        hung.left.set()
        await page.task
        await settle(lambda: not recorder._watchers or hung.task.done())
        hung.reads.set()
        await hung.task
        assert not recorder._watchers

    harness.run(test, engine=engine)


def test_watchers_are_bounded():
    async def main():
        recorder = Scene().recorder
        task = asyncio.create_task(recorder.run())
        streams = [recorder.watch() for _ in range(32)]
        reads = [asyncio.create_task(anext(stream)) for stream in streams]
        await settle(lambda: len(recorder._watchers) == 32)
        with pytest.raises(Overloaded, match="32 pages are open"):
            recorder.watch()
        await asyncio.gather(*reads)
        # Nobody reads any more: each is dropped once too much waits for it.
        (watcher, *_) = recorder._watchers
        for _ in range(watcher.maxsize - watcher.qsize()):
            watcher.put_nowait(b"")
        await settle(lambda: len(recorder._watchers) == 31)
        recorder.close()
        for stream in streams:
            async for _ in stream:
                pass
        task.cancel()

    asyncio.run(main())


def test_metrics(harness):
    engine = FakeEngine("abc")

    async def test(client):
        before = await read(client)
        engine.counts.drafted_tokens, engine.counts.accepted_tokens = 7, 5
        engine.hold = asyncio.Semaphore(0)
        call = asyncio.create_task(client.post(PATH, json=BODY))
        await settle(lambda: engine.live)
        busy = await read(client)
        assert busy["jaxscale_requests_running"] == 1
        assert busy["jaxscale_kv_cache_usage"] == 0.25
        assert busy["jaxscale_requests_waiting"] == 0
        release(engine)
        await call
        engine.most = 0
        await client.post(PATH, json=BODY)
        await client.get("/nowhere/at/all")
        return before, await read(client)

    before, after = harness.run(test, engine=engine)

    def more(name):
        return after[name] - before.get(name, 0)

    assert more("jaxscale_requests_received_total") == 2
    ended = 'jaxscale_requests_ended_total{outcome="%s"}'
    counts = [
        after[ended % name] for name in ("finished", "rejected", "aborted", "failed")
    ]
    assert counts == [1, 1, 0, 0]
    assert more("jaxscale_generated_tokens_total") == 3
    assert more("jaxscale_drafted_tokens_total") == 7
    assert more("jaxscale_accepted_tokens_total") == 5
    assert more("jaxscale_time_to_first_token_seconds_count") == 1
    assert more("jaxscale_time_between_tokens_seconds_count") == 2
    assert more("jaxscale_request_seconds_count") == 1
    calls = 'jaxscale_http_requests_total{path="%s",status="%s"}'
    assert more(calls % (PATH, 200)) == 1 and more(calls % (PATH, 429)) == 1
    assert more(calls % ("other", 404)) == 1


async def read(client):
    """Values by name, labels with it."""
    answer = await client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    found = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            found[name] = sample.value
    return found


def test_the_page_needs_nothing_else(harness):
    """No request but to the server itself: no script, style or font from elsewhere."""

    async def test(client):
        return await client.get("/live")

    answer = harness.run(test)
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "http:" not in answer.text and "https:" not in answer.text
    assert "src=" not in answer.text and "@import" not in answer.text


CHROMIUM = shutil.which("chromium")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_page_in_a_browser(server, tmp_path):
    """The numbers are in its elements, and the canvas is not empty."""
    server.engine.answer = "to be or not " * 10
    for _ in range(3):
        assert server.post(PATH, {**BODY, "max_tokens": 60}).status_code == 200
    result = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
            *("--virtual-time-budget=4000", "--run-all-compositor-stages-before-draw"),
            *(f"--user-data-dir={tmp_path}", f"{server.url}/live"),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert 'id="finished">3, 0<' in result.stdout, result.stdout[-3000:]
