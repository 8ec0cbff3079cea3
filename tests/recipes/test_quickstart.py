"""The quickstart's steps; `make quickstart` runs the whole of it."""

import contextlib
import dataclasses
import itertools
import json
import re
import sys

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.cli import main
from jaxscale.inference import server
from jaxscale.inference.server import load
from jaxscale.models import Decoder, preset
from jaxscale.observability.html_report import Report
from jaxscale.pruning import Masks
from jaxscale.recipes import quickstart, serve_trained
from tests.inference.server.fake_engine import FakeEngine, text_model


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A quickstart of a few short steps on the eight simulated devices."""
    directory = tmp_path_factory.mktemp("quickstart") / "run"
    config = quickstart.QuickstartConfig(steps=12, output_dir=directory)
    full = quickstart._train_config

    def short(*args, **kwargs):
        found = full(*args, **kwargs)
        data = dataclasses.replace(found.data, seq_len=64)
        return dataclasses.replace(found, data=data, eval_batches=2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "_train_config", short)
        report = quickstart.run(config)
    return directory, report.read_text()


@pytest.mark.slow
def test_held_out_loss_falls_and_the_report_shows_it(finished):
    directory, page = finished
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    losses = [r["eval_loss"] for r in map(json.loads, lines) if "eval_loss" in r]
    assert losses[-1] < losses[0] < np.log(2048) + 0.2
    assert f"{losses[-1]:.6f}" in page
    assert "fsdp 4 x tensor 2" in page and "restored on fsdp 8" in page


@pytest.mark.slow
def test_the_model_is_pruned_and_generates(finished, capsys):
    directory, page = finished
    masks = Masks.load(directory / "pruned/masks.safetensors")
    assert masks.sparsity == 0.75
    assert "trained under the masks" in page and "same held-out loss" in page
    assert "dense, trained as long" in page
    arguments = ["generate", "--from", str(directory / "pruned"), "--prompt", "import "]
    assert main([*arguments, "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("import ")


@pytest.mark.slow
def test_both_models_are_served(finished):
    """Sixteen requests each share eight slots; the drawings show every one of them."""
    _, page = finished
    drawings = re.findall(r"<svg.*?slots of the (\w+) model.*?</svg>", page)
    assert drawings == ["dense", "pruned"]
    for name in drawings:
        (drawing,) = re.findall(rf"<svg[^>]*><title>slots of the {name}.*?</svg>", page)
        colors = set(re.findall(r"fill='(hsl[^']*)'", drawing))
        slots = set(re.findall(r"slot (\d)", drawing))
        assert len(colors) == serve_trained.REQUESTS and len(slots) == 8
    assert "first request, unloaded (ms)" in page


def test_slots_are_drawn_to_scale():
    segments = [[0, 7, 0, 10.0, 10.5], [0, 7, 1, 10.5, 12.0], [1, 9, 1, 11.0, 12.0]]
    drawing = serve_trained.draw_slots(segments, title="a < b")
    assert "<title>a &lt; b</title>" in drawing
    boxes = re.findall(r"<rect x='([\d.]+)' y='(\d+)' width='([\d.]+)'", drawing)
    first, second, other = (tuple(map(float, box)) for box in boxes)
    assert second[2] == pytest.approx(3 * first[2], abs=0.2)
    assert other[0] == pytest.approx(second[0] + first[2], abs=0.2)
    assert first[1] == second[1] < other[1]
    assert drawing.count("fill-opacity='0.35'") == 1
    assert "2.00 s" in drawing
    assert "<rect" not in serve_trained.draw_slots([], title="empty")


def test_an_answer_that_depends_on_others_is_an_error(monkeypatch):
    @contextlib.contextmanager
    def background(load):
        yield "http://127.0.0.1:1"

    count = itertools.count()

    def ask(*_):
        return serve_trained.Answer(
            text=str(next(count)), tokens=1, first=0.1, latency=0.1
        )

    made = text_model(FakeEngine())
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
    monkeypatch.setattr(serve_trained, "_ask", ask)
    monkeypatch.setattr(server, "background", background)
    monkeypatch.setattr(load, "text_model", lambda *_, **__: made)
    with pytest.raises(RuntimeError, match="depends on who shares the batch"):
        serve_trained.serve_trained({"tiny": model}, made.tokenizer, ["a"], Report("a"))


def test_a_missing_client_is_named_with_its_extra(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "openai", None)
    assert main(["quickstart", "--output-dir", str(tmp_path)]) == 2
    assert (
        "pip install '.[quickstart]' in a clone of jaxscale" in capsys.readouterr().err
    )


@pytest.mark.slow
def test_report_needs_no_network(finished):
    _, page = finished
    assert "<svg" in page and "<script" not in page and len(page) < 1_500_000
    assert page.index("class='headlines'") < page.index("<h2>")
    assert page.count("<div><b>") == 3
    outside = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']http", page)
    assert outside == []


@pytest.mark.slow
def test_the_run_can_be_generated_from_and_replaced(finished, capsys):
    directory, _ = finished
    arguments = ["generate", "--from", str(directory), "--prompt", "import "]
    assert main([*arguments, "--max-new-tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.startswith("import ")
    quickstart.make_room(directory)
    assert {path.name for path in directory.iterdir()} <= {quickstart.LOCK_FILE}


def test_a_restored_model_that_differs_is_an_error(monkeypatch, tmp_path):
    session = quickstart.Session(quickstart.QuickstartConfig(output_dir=tmp_path))
    session.held_out_loss = 5.0
    monkeypatch.setattr(session, "text", None, raising=False)
    monkeypatch.setattr(quickstart, "packed_batches", lambda config, text: ((), ()))

    class Result:
        class evaluation:
            loss = 5.1

    monkeypatch.setattr(quickstart, "fit", lambda *args, **kwargs: Result)
    with pytest.raises(RuntimeError, match=r"5\.100000, 5\.000000 was saved"):
        quickstart.restore(session)


def test_other_files_are_not_removed(tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["quickstart", "--output-dir", str(tmp_path)]) == 2
    assert "holds what is no run of jaxscale" in capsys.readouterr().err
    file = tmp_path / "thesis.txt"
    assert main(["quickstart", "--output-dir", str(file)]) == 2
    assert "thesis.txt is a file; choose a directory" in capsys.readouterr().err
    assert file.read_text() == "years of work"


@pytest.mark.parametrize("count, mesh", [(1, (1, 1)), (2, (2, 1)), (4, (2, 2))])
def test_the_mesh_suits_the_devices(count, mesh):
    config = quickstart.QuickstartConfig()
    chosen = quickstart._train_config(config, count, on_gpu=False).mesh
    assert (chosen.fsdp, chosen.tensor) == mesh


def test_bad_settings_are_explained(capsys):
    assert main(["quickstart", "--steps", "0"]) == 2
    assert "steps 0, expected 1 to 2147483647" in capsys.readouterr().err
    assert main(["quickstart", "--seed", str(2**32)]) == 2
    assert "seed 4294967296, expected 0 to 4294967295" in capsys.readouterr().err
    assert jax.device_count() == 8
