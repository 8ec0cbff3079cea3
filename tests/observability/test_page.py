"""The page of a run: its data against what was made up, and itself in a browser."""

import base64
import json
import random
import re
import shutil
import subprocess
import threading

import numpy as np
import pytest

from jaxscale.observability import live
from jaxscale.observability.page import page_data, write_page
from jaxscale.observability.run import read_run
from jaxscale.observability.step_view import thinned
from tests.observability.runs import (
    EVIL,
    event,
    hanging_cube,
    layout,
    steps,
    survived_hang,
    write,
)


def embedded(path):
    text = path.read_text()
    match = re.search(r'<script type="application/json" id="data">(.*)</script>', text)
    assert match is not None
    return json.loads(match[1])


@pytest.fixture(scope="module")
def survived(tmp_path_factory):
    return survived_hang(tmp_path_factory.mktemp("runs") / "survived")


def test_the_data_in_the_page_are_those_of_the_run(survived, tmp_path):
    data = embedded(write_page(survived, tmp_path / "new" / "page.html"))
    assert data["title"] == "survived"
    assert data["facts"]["ranks"] == "8" and data["facts"]["steps done"] == "14"
    assert data["facts"]["mesh"] == "pipe 2 x data 2 x tensor 2"
    # Steps 11 and 12 were computed twice.
    parts = data["goodput"]["seconds"]
    assert sum(parts.values()) == pytest.approx(data["goodput"]["wall"])
    assert parts["checkpoint"] > 0 and parts["restart"] > 25 and parts["lost"] > 1
    loss = data["loss"]
    assert loss["loss"] == [
        [*range(1, 15)],
        [float(f"{4 / n:.6g}") for n in loss["loss"][0]],
    ]
    assert loss["again"][0] == [11, 12] and loss["again"][1][0] == pytest.approx(4 / 11)
    marks = [(mark["step"], mark["kind"]) for mark in loss["marks"]]
    assert marks == [(10, "restart"), (2, "not finite"), (12, "stall")]
    assert "3 steps computed again" in loss["marks"][0]["text"]  # 13 had begun


def test_settings_and_rates_are_shown(tmp_path):
    run = survived_hang(tmp_path / "run")
    content = {
        "jaxscale": "0.1.0",
        "jax": "0.11.2",
        "devices": "8 x NVIDIA H200",
        "command": "jaxscale train gpt2",
        "config": {
            "seed": 3,
            "source": None,
            "optimizer": {"learning_rate": 0.01, "schedule": "wsd"},
        },
    }
    (run / "run.json").write_text(json.dumps(content))
    lines = [{"step": s, "loss": 1.0, "lr": s / 10, "grad_norm": None} for s in (1, 2)]
    lines += [{"step": s, "eval_loss": 3.0 - s} for s in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    data = page_data(read_run(run))
    assert "versions" not in data["facts"]
    assert data["facts"]["seed"] == "3" and data["facts"]["learning rate"] == "0.01"
    assert "begins with" not in data["facts"]
    assert data["facts"]["devices"] == "8 x NVIDIA H200"
    assert data["facts"]["held-out loss"] == "1.0000"
    assert data["command"] == "jaxscale train gpt2"
    assert data["settings"] == [
        ["version of jaxscale", "0.1.0"],
        ["version of jax", "0.11.2"],
        ["seed", "3"],
        ["source", "None"],
        ["optimizer.learning_rate", "0.01"],
        ["optimizer.schedule", "wsd"],
    ]
    assert data["rates"] == {"lr": [[1, 2], [0.1, 0.2]], "grad_norm": [[], []]}
    for damaged in ("{", "[1]", '{"config": 3}'):
        (run / "run.json").write_text(damaged)
        assert page_data(read_run(run))["settings"] == []


def test_faults_say_who_how_long_and_where(survived):
    data = page_data(read_run(survived), now=200.0)
    (fault,) = data["faults"]
    assert (fault["cycle"], fault["step"], fault["kind"]) == (1, 12, "stall")
    assert fault["suspects"] == ["rank 5: it is behind, in begin of step 13"]
    assert fault["time"] == 50.0  # since 90
    assert fault["silent"] == 25.0  # 140 - 115, the begin of step 13
    assert (fault["restart"], fault["lost"]) == (15.0, 2)
    alone, others = fault["stacks"]
    assert alone == ["data.py:9 get < loop.py:3 fit", [5]]
    assert others == ["wait.py:9 get < loop.py:3 fit", [0, 1, 2, 3, 4, 6, 7]]
    now, then = data["moments"]
    assert (now["label"], then["label"]) == (
        "now",
        "fault of cycle 1: stall at step 12",
    )
    assert then["silent"] == [5] and len(then["edges"]) == 7
    assert then["states"] == ["step 13, begin", "step 13, dispatched"]
    assert "7 ranks wait for it" in then["text"]


def test_without_a_supervisor_errors_are_the_faults(tmp_path):
    error = {"kind": "fault", "args": {"error": "ValueError: no"}}
    known = [layout(0, 0), event("restore", 0, 1.0, cycle=0), *steps(1, 3, 2.0, 0)]
    known.append(event("error", 4, 6.0, cycle=0, **error))
    known += [event("restore", 0, 9.0, cycle=0), *steps(3, 5, 10.0, 0)]
    data = page_data(read_run(write(tmp_path, {0: known})), now=20.0)
    (fault,) = data["faults"]
    assert (fault["reason"], fault["step"]) == ("ValueError: no", 4)
    assert fault["restart"] == 5.0  # step 3 is done at 11
    # Without metrics.jsonl the losses are those of the events, the last of each step.
    assert data["loss"]["loss"][0] == [1, 2, 3, 4, 5]
    assert data["loss"]["again"][0] == [3]
    assert "missing" in data["facts"]["metrics.jsonl"]


def test_the_heat_map_shows_the_slow_rank_and_its_step(tmp_path):
    ranks = {n: [layout(n), *steps(1, 50, 100.0)] for n in range(8)}
    for e in ranks[3]:
        if e["step"] == 20 and e["name"] == "dispatched":
            e["t1"] += 0.7
    heat = page_data(read_run(write(tmp_path, ranks)), now=200.0)["heat"]
    layer = heat["layers"]["host: batch and dispatch, s"]
    cells = np.array(layer["cells"])
    assert cells.shape == (8, 50) and layer["columns"] == [*range(1, 51)]
    at = np.unravel_index(cells.argmax(), cells.shape)
    assert at == (3, 19) and cells[at] == pytest.approx(0.9)
    assert np.median(cells) == pytest.approx(0.2)


def test_measurements_name_the_slow_rank_and_show_memory_and_programs(tmp_path):
    """Rank 2 computes for longer, so it waits least and comes to collectives last."""
    ranks = {}
    for n in range(4):
        known = [layout(n), *steps(1, 32, 100.0)]
        for step in range(2, 33, 2):
            slow = 0.2 if n == 2 else 0.001 * n
            args = {"computing": 0.5 + slow, "waiting": 0.4 - slow, "seconds": 1.0}
            known.append(event("profile", step, 100.0 + step, kind="device", args=args))
        args = {"bytes_in_use": 5e9 + 1e6 * n, "peak_bytes_in_use": 6e9}
        known.append(event("memory", 30, 131.0, kind="memory", args=args))
        args = {"program": "jit(step)"}
        found = event("compiled", 1, 101.0, t0=98.5, kind="compile", args=args)
        ranks[n] = [*known, found]
    data = page_data(read_run(write(tmp_path, ranks)), now=140.0)
    assert data["slow"].startswith("Slow now: rank 2 (pipe 0, data 1, tensor 0")
    assert "computing 1.4" in data["slow"] and ";" not in data["slow"]
    layers = data["heat"]["layers"]
    computing = layers["device: computing, s"]
    assert computing["columns"] == [*range(2, 33, 2)]
    assert np.array(computing["cells"])[2] == pytest.approx(0.7)
    order = np.array(layers["arrival at collectives, from the last (1)"]["cells"])
    assert (order.T == [4, 3, 1, 2]).all()
    lines = data["memory"]["lines"]
    assert lines == {
        "in use, most: rank 3 at the end": [[30], [5.003e9]],
        "in use, least": [[30], [5e9]],
        "peak in use": [[30], [6e9]],
    }
    (program,) = data["compile"]
    assert (program["name"], program["seconds"]) == ("jit(step)", 2.5)


def test_many_ranks_and_steps_are_thinned(tmp_path):
    """And what stands out is still there."""
    ranks = {}
    for n in range(300):
        args = {"axes": {"pipe": 3, "fsdp": 100}, "places": [n], "host": f"h{n // 8}"}
        first = event("layout", 0, 99.0, args=args | {"microbatches": 4, "chunks": 1})
        ranks[n] = [first, *steps(1, 4, 100.0)]
    ranks[0] = [ranks[0][0], *steps(1, 6000, 100.0)]
    slow = next(e for e in ranks[0] if e["name"] == "data" and e["step"] == 4321)
    slow["t1"] += 5
    next(e for e in ranks[0] if e["name"] == "done" and e["step"] == 777)["args"][
        "loss"
    ] = 99.0
    data = page_data(read_run(write(tmp_path, ranks)), now=1e4)
    assert len(json.dumps(data)) < 1_500_000
    assert len(data["loss"]["loss"][0]) <= 2000 and 99.0 in data["loss"]["loss"][1]
    heat = data["heat"]
    rows = heat["layers"]["host: wait for data, s"]["cells"]
    assert len(rows) * len(rows[0]) <= 40_000
    assert max(rows[0]) == pytest.approx(5.1) and heat["rows"][0] == "0-1"
    assert len(data["timeline"]["rows"]) == 24
    assert data["timeline"]["total"] == 300
    assert sum(map(len, data["timeline"]["segments"].values())) < 8000


def test_lines_keep_their_ends_and_extremes():
    x = np.arange(100_000)
    y = np.sin(x / 1e4)
    y[54_321] = 7.0
    kept_x, kept_y = thinned(x, y)
    assert len(kept_x) <= 2000 and kept_x[0] == 0 and kept_x[-1] == 99_999
    assert kept_y[kept_x.index(54_321)] == 7.0 and kept_x == sorted(kept_x)
    assert thinned([], []) == ([], [])


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_give_a_page(survived, tmp_path, seed):
    """Bytes are flipped, lines cut, files emptied or gone: never a traceback."""
    rng = random.Random(seed)
    run = tmp_path / "run"
    shutil.copytree(survived, run)
    for file in [p for p in sorted(run.rglob("*")) if p.is_file()]:
        damage, content = rng.randrange(6), bytearray(file.read_bytes())
        for _ in range(20 if damage == 0 else 0):
            content[rng.randrange(len(content))] = rng.randrange(256)
        if damage == 1:
            content = content[: rng.randrange(len(content))]
        words = bytes(content).split(b" ")
        if damage == 2:
            words[rng.randrange(len(words))] = b"[1e999],"
        file.write_bytes(
            b"" if damage == 3 else b" ".join(words) if damage == 2 else content
        )
        if damage == 4 and file.name != "events-1.jsonl":
            file.unlink()
    (run / "events-1.jsonl").write_bytes(
        (survived / "events-1.jsonl").read_bytes()[:-9]
    )
    data = page_data(read_run(run), now=200.0)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["facts"]["damaged lines"]


def test_a_run_that_has_only_begun(tmp_path):
    known = [event("start", 0, 90.0)]
    data = page_data(read_run(write(tmp_path, {0: known})), now=91.0)
    assert data["facts"]["steps done"] == "none" and data["heat"]["rows"] == ["0"]
    assert data["moments"][0]["states"] == ["step 0, start"]


def test_what_others_wrote_is_no_markup(survived, tmp_path):
    text = write_page(survived, tmp_path / "page.html").read_text()
    assert len(text) < 100_000 and " src=" not in text.replace("img src=x", "")
    assert "<img src=x" not in text and "\\u003cimg src=x" in text
    named = tmp_path / f"run {EVIL.replace('/', '')}"
    shutil.copytree(survived, named)
    text = write_page(named, tmp_path / "named.html").read_text()
    assert "<title>run &lt;img src=x" in text and "<img src=x" not in text


CHROMIUM = shutil.which("chromium")
PROBE = """<script>
const sizeOf = part => part.getBoundingClientRect();
const all = (id, which) => [...at(id).querySelectorAll(which)];
function probe() {
  const shown = {wide: document.documentElement.scrollWidth - innerWidth};
  at("moment").selectedIndex = at("moment").options.length - 1;
  drawMesh();
  shown.states = all("states", "tbody tr").map(
    row => [row.cells[0].innerText, row.cells[1].innerText]);
  shown.points = all("mesh", "circle:not(.ring)").length;
  shown.rings = all("mesh", ".ring").length;
  shown.text = at("mesh-text").textContent;
  shown.parts = all("goodput", ".bar span").map(part => sizeOf(part).width);
  for (const id of ["loss", "mesh", "heat", "timeline"])
    shown[id] = sizeOf(at(id)).width <= innerWidth &&
      all(id, "path, line, image").some(part => sizeOf(part).width > 20);
  // The pointer rests on step 7, then drags from 4 to 8.
  Element.prototype.setPointerCapture = () => {};
  const drawing = () => at("loss").querySelector(".plot > svg");
  const inside = sizeOf(drawing().querySelector("svg"));
  const X = scale(...spread(data.loss.loss[0], 0.02), inside.left, inside.right);
  const tell = (kind, x, buttons = 0) => drawing().dispatchEvent(new PointerEvent(
    kind, {clientX: X(x), clientY: inside.bottom - 30, buttons}));
  tell("pointermove", 7);
  shown.tip = at("tip").hidden ? "" : at("tip").textContent;
  tell("pointerdown", 4, 1); tell("pointermove", 8, 1); tell("pointerup", 8);
  shown.zoom = zooms.loss;
  drawing().dispatchEvent(new MouseEvent("dblclick"));
  shown.back = zooms.loss === undefined;
  shown.images = document.images.length;
  shown.evil = document.body.dataset.evil || "no";
  shown.faults = at("faults").innerText;
  const out = document.createElement("pre");
  out.id = "shown";
  out.textContent = btoa(unescape(encodeURIComponent(JSON.stringify(shown))));
  document.body.append(out);
}
addEventListener("load", () => setTimeout(probe, 100));
</script></body>"""


def browse(url, folder, width):
    """The elements of a page as a browser has them, and what it complained about."""
    options = ["--headless", "--no-sandbox", "--disable-quic", "--no-first-run"]
    options += ["--disable-background-networking", "--disable-component-update"]
    options += ["--disable-sync", "--disable-gpu", "--enable-logging=stderr"]
    options += [f"--window-size={width},900", "--virtual-time-budget=6000"]
    result = subprocess.run(
        [str(CHROMIUM), *options, f"--user-data-dir={folder}", "--dump-dom", url],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return result.stdout, [x for x in result.stderr.splitlines() if "CONSOLE" in x]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [1280, 700])
def test_the_page_in_a_browser(survived, tmp_path, width):
    """Offline: all plots are there, the hang and its culprit too, nothing is markup."""
    path = write_page(survived, tmp_path / "page.html")
    path.write_text(path.read_text().replace("</body>\n</html>", PROBE + "\n</html>"))
    dom, console = browse(path.as_uri(), tmp_path / "browser", width)
    assert console == []
    match = re.search(r'<pre id="shown">([^<]*)</pre>', dom)
    assert match is not None, dom[-2000:]
    shown = json.loads(base64.b64decode(match[1]))
    assert shown["wide"] <= 0
    for name in ("loss", "mesh", "heat", "timeline"):
        assert shown[name] is True, name
    seconds = [x for x in embedded(path)["goodput"]["seconds"].values() if x > 0]
    np.testing.assert_allclose(
        np.divide(shown["parts"], sum(shown["parts"])),
        np.divide(seconds, sum(seconds)),
        atol=0.01,
    )
    assert (shown["points"], shown["rings"]) == (8, 1)
    assert shown["states"] == [["step 13, begin", "1"], ["step 13, dispatched", "7"]]
    assert shown["tip"] == "loss, 7: 0.57143"
    assert shown["zoom"] == pytest.approx([4, 8], abs=0.3) and shown["back"]
    assert "Held up by rank 5" in shown["text"] and EVIL in shown["text"]
    assert EVIL in shown["faults"] and "data.py:9 get" in shown["faults"]
    assert (shown["images"], shown["evil"]) == (0, "no")


def test_a_hanging_job_is_told_at_the_top(tmp_path):
    data = page_data(read_run(write(tmp_path, hanging_cube(3))), now=150.0)
    assert "Held up by rank 3" in data["moments"][0]["text"]
    assert data["timeline"]["rows"][3].startswith("rank 3 (pipe 0, data 1, tensor 1")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_live_page_follows_the_run(tmp_path, monkeypatch):
    """What is written after the browser has the page comes into it."""
    monkeypatch.setattr(live, "_LEAST_SECONDS", 0.0)
    file = write(tmp_path / "run", {0: steps(1, 3, 100.0)}) / "events-0.jsonl"
    whole = live.page

    def then_grow(data, **options):
        text = whole(data, **options)
        with file.open("a") as stream:
            stream.writelines(json.dumps(e) + "\n" for e in steps(4, 5, 103.0))
        return text

    monkeypatch.setattr(live, "page", then_grow)
    with live.ReportServer(("127.0.0.1", 0), tmp_path / "run") as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        dom, console = browse(server.url, tmp_path / "browser", 1000)
        server.shutdown()
        thread.join()
    assert "<dt>steps done</dt><dd>5</dd>" in dom
    assert console == []
