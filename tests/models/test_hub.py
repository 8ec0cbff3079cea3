"""Names of models: what is on this machine, what the hub's cache has, and others."""

import shutil
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from jaxscale.models import load
from jaxscale.models.hf.hub import local_directory


MODELS = Path(__file__).parents[1] / "fixtures" / "models"


def test_a_name_is_found_in_the_cache_of_the_hub(tmp_path, monkeypatch):
    cached = tmp_path / "models--someone--tiny"
    commit = "0" * 40
    shutil.copytree(MODELS / "gpt2", cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert local_directory("someone/tiny") == cached / "snapshots" / commit
    found, expected = load("someone/tiny"), load(MODELS / "gpt2")
    assert (found.embed.table[...] == expected.embed.table[...]).all()
    with pytest.raises(FileNotFoundError, match="'someone/other' is no directory"):
        local_directory("someone/other")


def test_what_exists_here_is_never_looked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", pytest.fail)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "tiny").mkdir(parents=True)
    assert local_directory("runs/tiny") == Path("runs/tiny")
    for source in (
        "nowhere",
        "gpt3",
        "./runs/none",
        "a/b/c",
        "/a/b",
        "",
        Path("some/path"),
    ):
        with pytest.raises(FileNotFoundError, match="is no directory, and no name of"):
            local_directory(source)


def test_revisions_reach_the_hub(monkeypatch):
    seen = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: seen.append((name, options["revision"])) or "/x",
    )
    assert local_directory("a/b@v1.0") == local_directory("a/b") == Path("/x")
    assert seen == [("a/b", "v1.0"), ("a/b", None)]


def test_models_without_an_owner_are_those_of_the_hub(monkeypatch):
    seen = []
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **options: seen.append((name, options["revision"])) or "/x",
    )
    for name in ("gpt2", "bert-base-uncased@main"):
        assert local_directory(name) == Path("/x")
    assert seen == [
        ("openai-community/gpt2", None),
        ("google-bert/bert-base-uncased", "main"),
    ]
    with pytest.raises(FileNotFoundError, match=r"\(did you mean gpt2\?\), which has"):
        local_directory("gpt-2")


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[infer\]' in a clone"):
        local_directory("someone/tiny")
