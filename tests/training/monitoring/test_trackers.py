"""Services that get the metrics, with stand-ins that write down what they are told."""

import sys
import types

import pytest

from jaxscale.cli import main
from jaxscale.models import preset
from jaxscale.training import DataConfig, MlflowWriter, TrainConfig, WandbWriter
from jaxscale.training.monitoring import trackers


class Service(types.ModuleType):
    """A module each of whose functions notes its call."""

    def __init__(self, name):
        super().__init__(name)
        self.calls = []
        self.id = self.run_id = "r1"
        self.info = self

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.fixture
def service(monkeypatch):
    def install(name):
        module = Service(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return install


RECORD = {"step": 3, "loss": 2.5, "mfu_full": None}


def test_wandb_gets_settings_and_finite_numbers_and_goes_on(service, tmp_path):
    wandb = service("wandb")
    for first in (0, 2):
        writer = WandbWriter(tmp_path, settings={"seed": 1}, project="tiny")
        writer.start(first, 4)
        writer.write(RECORD)
        writer.close()
    common = {"dir": str(tmp_path), "config": {"seed": 1}, "project": "tiny"}
    rest = [("log", ({"loss": 2.5},), {"step": 3}), ("finish", (), {})]
    assert wandb.calls == [
        *[("init", (), common), *rest],
        *[("init", (), common | {"id": "r1", "resume": "allow"}), *rest],
    ]


def test_mlflow_gets_settings_once_and_names_its_run(service, tmp_path):
    mlflow = service("mlflow")
    for first in (0, 2):
        writer = MlflowWriter(tmp_path, settings={"data": {"seq_len": 8}}, run_name="a")
        writer.start(first, 4)
        writer.write(RECORD)  # from another thread in a run: it must name the run
        writer.close()
    numbers = ("log_metrics", ({"loss": 2.5},), {"step": 3, "run_id": "r1"})
    assert mlflow.calls == [
        ("start_run", (), {"run_id": None, "run_name": "a"}),
        ("log_params", ({"data.seq_len": 8},), {}),
        *[numbers, ("end_run", (), {})],
        ("start_run", (), {"run_id": "r1", "run_name": "a"}),
        *[numbers, ("end_run", (), {})],
    ]


def test_the_settings_of_a_run_name_them(service, tmp_path):
    service("wandb")
    service("mlflow")
    config = TrainConfig(
        model=preset("llama_tiny"),
        data=DataConfig(vocab_size=preset("llama_tiny").vocab_size, seq_len=64),
        trackers=("mlflow", "wandb"),
        output_dir=str(tmp_path),
    )
    made = trackers.trackers(config)
    assert [type(writer) for writer in made] == [MlflowWriter, WandbWriter]


def test_what_is_not_installed_is_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="WandbWriter needs wandb: pip install wandb"):
        WandbWriter(tmp_path)
    directory = tmp_path / "run"
    options = ["--trackers", "wandb", "--output-dir", str(directory)]
    assert main(["train", "llama_tiny", *options]) == 2
    assert "trackers names wandb, which is not installed" in capsys.readouterr().err
    assert not directory.exists()
