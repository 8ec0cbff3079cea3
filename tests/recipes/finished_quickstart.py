"""What `make quickstart` left in runs/quickstart; `.ci/run` calls this after it.

    pytest --noconftest tests/recipes/finished_quickstart.py

The command itself fails if training teaches nothing, if the restored or sparse model
has another held-out loss, or if an answer depends on who shares the batch.
"""

import json
import re
from pathlib import Path

import pytest

from jaxscale.pruning import Masks
from jaxscale.recipes import serve_trained
from jaxscale.training import run as run_directory
from jaxscale.training.checkpoint.steps import complete_steps


DIRECTORY = Path("runs/quickstart")


@pytest.fixture(scope="module")
def page():
    return (DIRECTORY / "report.html").read_text()


def test_held_out_loss_falls_and_the_report_shows_it(page):
    lines = (DIRECTORY / "metrics.jsonl").read_text().splitlines()
    losses = [r["eval_loss"] for r in map(json.loads, lines) if "eval_loss" in r]
    assert losses[-1] < losses[0] - 0.2
    assert f"{losses[-1]:.6f}" in page
    assert "fsdp 2 x tensor 2" in page and "restored on fsdp 4" in page


def test_the_model_is_pruned(page):
    assert Masks.load(DIRECTORY / "pruned/masks.safetensors").sparsity == 0.75
    assert "trained under the masks" in page and "same held-out loss" in page
    assert "dense, trained as long" in page


def test_both_models_are_served(page):
    """Sixteen requests each share eight slots; the drawings show every one of them."""
    drawings = re.findall(r"<svg.*?slots of the (\w+) model.*?</svg>", page)
    assert drawings == ["dense", "pruned"]
    for name in drawings:
        (drawing,) = re.findall(rf"<svg[^>]*><title>slots of the {name}.*?</svg>", page)
        colors = set(re.findall(r"fill='(hsl[^']*)'", drawing))
        slots = set(re.findall(r"slot (\d)", drawing))
        assert len(colors) == serve_trained.REQUESTS and len(slots) == 8
    assert "first request, unloaded (ms)" in page


def test_the_report_needs_no_network(page):
    assert "<svg" in page and "<script" not in page and len(page) < 1_500_000
    assert page.index("class='headlines'") < page.index("<h2>")
    assert page.count("<div><b>") == 3
    outside = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=[\"']http", page)
    assert outside == []


def test_both_runs_can_be_gone_on_from():
    """As `jaxscale generate`, `train --resume` and `export` do."""
    for directory in (DIRECTORY, DIRECTORY / "pruned"):
        last = run_directory.read_config(directory).steps
        assert complete_steps(directory / "checkpoints")[-1] == last
