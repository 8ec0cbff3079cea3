import dataclasses
import json

import pytest

from jaxscale.cli import run_directory
from jaxscale.models import preset
from jaxscale.sharding import MeshConfig
from jaxscale.training import DataConfig, TrainConfig


RUN = TrainConfig(
    model=preset("llama3_1_8b"), data=DataConfig(paths=("a", "b"), tokenizer="t")
)


def test_settings_come_back_as_they_were(tmp_path):
    run_directory.write_config(tmp_path / "runs" / "one", RUN)
    assert run_directory.is_run(tmp_path / "runs" / "one")
    assert not run_directory.is_run(tmp_path / "runs")
    assert RUN.model.rope_scaling is not None
    assert run_directory.read_config(tmp_path / "runs" / "one", TrainConfig) == RUN


def test_damaged_or_foreign_files_are_refused(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run\.json is damaged"):
        run_directory.read_config(tmp_path, TrainConfig)
    config = run_directory.to_dict(RUN) | {"speed": 1}
    (tmp_path / "run.json").write_text(json.dumps({"config": config}))
    with pytest.raises(
        ValueError, match=r"TrainConfig has no field 'speed'; .* another version"
    ):
        run_directory.read_config(tmp_path, TrainConfig)


def test_a_directory_is_free_or_resumed_or_refused(tmp_path):
    def check(directory, config=RUN, resume=False):
        run_directory.check_free(directory, config, resume=resume)

    check(tmp_path / "new")
    check(tmp_path / "new", resume=True)
    (tmp_path / "empty").mkdir()
    check(tmp_path / "empty")

    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    for resume in (False, True):
        with pytest.raises(ValueError, match="other holds files that are no run"):
            check(tmp_path / "other", resume=resume)

    run = tmp_path / "run"
    run_directory.write_config(run, RUN)
    with pytest.raises(ValueError, match="already holds a run; add --resume"):
        check(run)
    check(run, resume=True)
    longer = dataclasses.replace(RUN, steps=2000, mesh=MeshConfig(tensor=2))
    check(run, longer, resume=True)
    other = dataclasses.replace(RUN, data=dataclasses.replace(RUN.data, seed=5))
    with pytest.raises(ValueError, match=r"its data\.seed is 0, this one's 5; use"):
        check(run, other, resume=True)
    plain = dataclasses.replace(RUN, model=preset("llama3_8b"))
    with pytest.raises(ValueError, match=r"its model\.max_seq_len is 131072"):
        check(run, plain, resume=True)
