"""Runs are read as they are on disk: damaged, cut off, going on, large."""

import contextlib
import json
import random
from pathlib import Path

import numpy as np
import pytest

from jaxscale.observability import read_run
from jaxscale.observability.run import RunReader
from jaxscale.supervision import EventLog, read_events
from tests.calls import own_instructions
from tests.observability.histories import history


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))


def test_what_is_written_is_read(tmp_path):
    """Through the writer of `fit`, beside the plain reader of its lines."""
    path, log = tmp_path / "events-7.jsonl", EventLog(rank=7, cycle=3)
    with log.written_to(path):
        log.emit("restore", 0)
        for step, loss in [(1, 2.5), (2, None), (3, -1e-7)]:
            at = log.emit("begin", step)
            at = log.emit("data", step, since=at)
            log.emit("dispatched", step, since=at)
            log.emit("done", step, kind="device", since=at, loss=loss)
        log.emit("profile", 3, kind="device", computing=0.1)
    run = read_run(tmp_path)
    (rank,) = run.ranks
    plain = read_events(path)
    assert rank.number == 7 and run.damaged == 0
    for name, column in [
        ("begin", "begin"),
        ("data", "fetched"),
        ("dispatched", "dispatched"),
        ("done", "done"),
    ]:
        times = [e["t1"] for e in plain if e["name"] == name]
        assert getattr(rank.steps, column).tolist() == times
    assert rank.steps.step.tolist() == [1, 2, 3]
    assert rank.steps.cycle.tolist() == [3, 3, 3]
    assert np.isnan(rank.steps.loss[1])
    assert rank.steps.loss[[0, 2]].tolist() == [2.5, -1e-7]
    assert [e.name for e in rank.events] == ["restore", "profile", "bye"]
    assert rank.events[1].args == {"computing": 0.1}
    assert rank.place == (3, "bye")
    assert (rank.first, rank.last) == (plain[0]["t0"], plain[-1]["t1"])


def test_damage_costs_its_own_lines(tmp_path):
    made = history(tmp_path / "run", 0, ["compute"] * 6 + ["save"])
    whole = read_run(made.out)
    path = made.out / "events-0.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if b'"begin"' in line]
    lines[at[2]] = lines[at[2]][:40]  # cut off, and the next one follows it at once
    lines[at[4]] = b"\xff\x00 no JSON\n"
    lines.insert(3, b'{"name": "done"}\n[1, 2]\n\n')
    lines.append(b'{"t0": 17')
    path.write_bytes(b"".join(lines))
    (made.out / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"st')
    run = read_run(made.out)
    assert run.damaged == 6
    kept = ~np.isin(whole.ranks[0].steps.step, [3, 5])
    for column in ("step", "begin", "fetched", "dispatched", "done"):
        expected = getattr(whole.ranks[0].steps, column)[kept]
        assert getattr(run.ranks[0].steps, column).tolist() == expected.tolist()
    assert run.ranks[0].events == whole.ranks[0].events
    assert run.metrics == ({"step": 1, "loss": 2},)


def test_the_place_is_that_of_the_host(tmp_path):
    """A step that is done is heard later, from another thread."""
    made = history(tmp_path / "run", 0, ["compute", "save", "compute"])
    made.write("save")
    assert read_run(made.out).ranks[0].place == (3, "save")
    made.write("begin")
    made.write("done", kind="device", loss=1.0)
    assert read_run(made.out).ranks[0].place == (3, "begin")


def test_steps_that_were_computed_again_stay_apart(tmp_path):
    """Also where no supervisor counts the starts."""
    made = history(tmp_path / "run", 0, ["compute", "save", "compute", "die"], ranks=3)
    for path in made.out.glob("events-*.jsonl"):
        rewrite(path, lambda text: text.replace(b'"cycle": 2', b'"cycle": 1'))
    run = read_run(made.out)
    assert run.ranks[0].steps.step.tolist() == [1, 2, 3, 4, 3]
    assert np.isnan(run.ranks[0].steps.done).tolist() == [False] * 3 + [True, False]
    assert run.grid.step.tolist() == [1, 2, 3, 4]
    assert run.grid.done[:, 2].tolist() == [run.ranks[0].steps.done[-1]] * 3
    assert run.driver[0].name == "exit" and run.driver[0].kind == "fault"


def test_a_directory_without_events_says_so(tmp_path):
    (tmp_path / "events-0.jsonl").touch()
    with pytest.raises(FileNotFoundError, match="holds no events of a run"):
        read_run(tmp_path)


def test_a_run_that_grows_is_read_as_if_at_once(tmp_path):
    """Cut at any byte, and made anew as another run; only what is new is parsed."""
    made = history(tmp_path / "made", 0, ["compute", "save", "compute", "die"], ranks=2)
    made.write("save")
    rng, reader, out = random.Random(0), RunReader(tmp_path / "run"), tmp_path / "run"
    (out / "supervisor").mkdir(parents=True)
    files = [p.relative_to(made.out) for p in made.out.rglob("*.jsonl")]
    texts = {path: (made.out / path).read_bytes() for path in files}
    texts[Path("metrics.jsonl")] = b'{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n'
    sizes = dict.fromkeys(texts, 0)
    while any(sizes[path] < len(text) for path, text in texts.items()):
        for path, text in texts.items():
            end = sizes[path] + rng.randrange(400)
            with (out / path).open("ab") as file:
                file.write(text[sizes[path] : end])
            sizes[path] = end
        with contextlib.suppress(FileNotFoundError):
            same(reader.read(), read_run(out))
    parsed = []
    for file in reader._ranks.values():
        file._parse = lambda text, real=file._parse: parsed.append(text) or real(text)
    whole = reader.read()
    assert parsed == [] and whole.ranks[0].place == (3, "save")
    for path, text in texts.items():  # as long as before, and another run
        text = text.replace(b'"cycle": 1', b'"cycle": 7')
        (out / path).write_bytes(text.replace(b'"loss": 1}', b'"loss": 7}'))
    same(reader.read(), read_run(out))
    (out / "metrics.jsonl").unlink()
    assert reader.read().metrics == ()


def same(run, other):
    assert repr(run) == repr(other)
    for a, b in zip(run.ranks, other.ranks, strict=True):
        for name in ("cycle", "step", "begin", "fetched", "dispatched", "done", "loss"):
            np.testing.assert_array_equal(
                getattr(a.steps, name), getattr(b.steps, name)
            )


def test_lines_of_steps_are_read_without_a_loop_over_them(tmp_path, monkeypatch):
    """So 512 ranks of 10,000 steps take 90 s, half of what their JSON takes."""
    line = {"cycle": 1, "kind": "host", "args": {}}
    lines = []
    for step in range(1, 501):
        for name in ("begin", "data", "dispatched", "done"):
            at = 1.7e9 + step + 0.123456
            args = {"loss": 2.123456} if name == "done" else {}
            event = {"t0": at, "t1": at, **line, "step": step, "name": name}
            lines.append(event | {"args": args})
    names = ("t0", "t1", "cycle", "step", "kind", "name", "args")
    text = "".join(json.dumps({n: x[n] for n in names}) + "\n" for x in lines)
    for rank in range(4):
        (tmp_path / f"events-{rank}.jsonl").write_text(text)
    parsed, loads = [], json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(text) or loads(text))
    found = []
    instructions = own_instructions(lambda: found.append(read_run(tmp_path)))
    assert found[0].grid.done.shape == (4, 500) and not parsed
    assert instructions < 40 * 4 * len(lines)  # a parser of JSON takes thousands
