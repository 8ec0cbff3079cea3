"""What the quickstart refuses and draws; `finished_quickstart` checks a whole one."""

import contextlib
import itertools
import re
import sys

import jax
import pytest
from flax import nnx

from jaxscale.cli import main
from jaxscale.inference import server
from jaxscale.inference.server import load
from jaxscale.models import Decoder, preset
from jaxscale.observability.html_report import Report
from jaxscale.recipes import quickstart, serve_trained
from jaxscale.training import run as run_directory
from tests.inference.server.fake_engine import FakeEngine, text_model


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


def test_an_earlier_run_is_replaced_but_for_its_lock(tmp_path):
    for name in (run_directory.RUN_FILE, quickstart.LOCK_FILE, "pruned/masks"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    quickstart.make_room(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [quickstart.LOCK_FILE]


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
