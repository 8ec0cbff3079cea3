"""Options that users of other programs type: each is answered with the one meant."""

import dataclasses

import pytest

from jaxscale.cli import option_names
from jaxscale.cli.bench_serve import BenchServeConfig
from jaxscale.cli.diagnose import DiagnoseCommand
from jaxscale.cli.errors import UsageError
from jaxscale.cli.export import ExportCommand
from jaxscale.cli.generate import GenerateConfig
from jaxscale.cli.option_names import check_names
from jaxscale.cli.plan import PlanCommand
from jaxscale.cli.prune import PruneCommand
from jaxscale.cli.schedule import ScheduleCommand
from jaxscale.cli.serve import ServeConfig
from jaxscale.cli.supervise import SuperviseCommand
from jaxscale.cli.train import TrainCommand
from jaxscale.recipes.quickstart import QuickstartConfig


@pytest.mark.parametrize(
    ("kind", "typed", "meant"),
    [
        (TrainCommand, "--lr", "did you mean --optimizer.learning-rate?"),
        (TrainCommand, "--optimizer", "did you mean --optimizer.kind?"),
        (TrainCommand, "--bf16", "did you mean --dtype?"),
        (TrainCommand, "--num_train_epochs=3", "did you mean --steps?"),
        (TrainCommand, "--gradient-checkpointing", "did you mean --remat?"),
        (TrainCommand, "--max-seq-len", "--model.max-seq-len or --data.seq-len?"),
        (TrainCommand, "--resume-from-checkpoint", "did you mean --resume?"),
        (TrainCommand, "--model", "did you mean --from? The model may also be"),
        (ServeConfig, "--model", "did you mean --from? The model may also be"),
        (ServeConfig, "--max-model-len", "did you mean --engine.max-len?"),
        (ServeConfig, "-tp", "did you mean --mesh.tensor?"),
        (ServeConfig, "--gpu-memory-utilization", "--engine.memory-fraction?"),
        (ServeConfig, "--trust-remote-code", "code that comes with a model is never"),
        (GenerateConfig, "--max_length", "did you mean --max-new-tokens?"),
        (GenerateConfig, "--do-sample", "--temperature 0 is greedy"),
        (PruneCommand, "--lr", "did you mean --learning-rate?"),
        (PruneCommand, "--amount", "did you mean --sparsity?"),
        (ExportCommand, "--dtype", "did you mean --param-dtype?"),
        (PlanCommand, "--num-gpus", "did you mean --gpus?"),
        (ScheduleCommand, "--pp", "did you mean --stages?"),
        (BenchServeConfig, "--num-prompts", "did you mean --requests?"),
        (DiagnoseCommand, "--num-gpus", "did you mean --gpus?"),
        (SuperviseCommand, "--nproc", "did you mean --processes?"),
        (QuickstartConfig, "--out", "did you mean --output-dir?"),
    ],
)
def test_an_option_of_other_programs_names_ours(kind, typed, meant):
    with pytest.raises(UsageError) as raised:
        check_names(kind, [typed, "x"])
    told = str(raised.value)
    assert told.startswith(f"{typed.partition('=')[0]} is no option here (")
    assert meant in told


def test_what_is_an_option_or_a_value_passes():
    check_names(GenerateConfig, ["runs/a", "--temperature", "-1", "--top_k=4", "--x"])
    check_names(TrainCommand, ["llama_tiny", "--mesh.tensor=2", "--", "--lr"])
    check_names(TrainCommand, ["llama_tiny", "--model.rope-scaling", "None"])


def test_each_other_name_leads_to_one_option():
    """What is listed under two names would depend on the order of the table."""
    shared = {"dataset", "dataset-name", "dtype", "torch-dtype", "max-length"}
    shared |= {"block-size", "tensorboard"}
    seen = [name for words in option_names._MEANT.values() for name in words.split()]
    assert {name for name in seen if seen.count(name) > 1} <= shared


def test_what_is_meant_exists():
    """Each option of the table is one of some command."""
    kinds = [TrainCommand, ServeConfig, GenerateConfig, PruneCommand, ExportCommand]
    kinds += [PlanCommand, ScheduleCommand, BenchServeConfig, DiagnoseCommand]
    kinds += [SuperviseCommand, QuickstartConfig]
    known = [name for kind in kinds for name in option_names._names(kind)]
    known += ["driver", "tensorboard", "supervise.processes"]
    assert all(dataclasses.is_dataclass(kind) for kind in kinds)
    for ours in option_names._MEANT:
        for each in ours.split():
            assert any(option_names._ends(x, each) for x in known), each
