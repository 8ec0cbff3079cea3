"""Settings of runs that begin with weights."""

from pathlib import Path

from jaxscale.recipes import from_source


def test_a_source_is_found_from_elsewhere(monkeypatch):
    models = Path(__file__).parents[1] / "fixtures" / "models"
    monkeypatch.chdir(models)
    assert from_source("gpt2").source == str(models / "gpt2")
