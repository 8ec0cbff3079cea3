"""``generation_config.json``, read and written."""

import json
from pathlib import Path

import pytest

from jaxscale.models import GenerationConfig, load, save


FIXTURE = Path(__file__).parents[1] / "fixtures" / "models" / "llama3_gqa"
# As Llama 3.1 Instruct has it.
VALUES = {
    "bos_token_id": 128000,
    "do_sample": True,
    "eos_token_id": [128001, 128008, 128009],
    "temperature": 0.6,
    "top_p": 0.9,
    "transformers_version": "4.42.3",
}


def write(directory, values):
    (directory / "generation_config.json").write_text(json.dumps(values))
    return directory


def test_values_of_a_published_file(tmp_path):
    config = GenerationConfig.from_file(write(tmp_path, VALUES))
    assert config.eos_ids == (128001, 128008, 128009)
    assert (config.do_sample, config.temperature, config.top_p) == (True, 0.6, 0.9)
    assert config.top_k is None
    (tmp_path / "again").mkdir()
    config.save(tmp_path / "again")
    written = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert written == VALUES


@pytest.mark.parametrize(
    ("eos", "ids"), [(7, (7,)), (None, ()), ([3, 3, 1], (3, 1)), ([5], (5,))]
)
def test_one_token_several_or_none(tmp_path, eos, ids):
    write(tmp_path, {"eos_token_id": eos})
    assert GenerationConfig.from_file(tmp_path).eos_ids == ids
    # Without that file it is the configuration of the model that says it.
    (tmp_path / "generation_config.json").rename(tmp_path / "config.json")
    assert GenerationConfig.from_file(tmp_path).eos_ids == ids


def test_saved_beside_the_model(tmp_path):
    generation = GenerationConfig(eos_ids=(2, 5), do_sample=True, top_k=20)
    save(load(FIXTURE), tmp_path, generation=generation)
    assert GenerationConfig.from_file(tmp_path) == generation
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["eos_token_id"] == [2, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": "2"}, 'eos_token_id "2" of .*generation_config.json must be'),
        ({"eos_token_id": [2, -1]}, r"eos_token_id \[2, -1\] of"),
        ({"eos_token_id": True}, "eos_token_id true of"),
        ({"do_sample": "false"}, "generation_config.json: do_sample 'false' must be"),
        ({"temperature": float("nan")}, "temperature nan must be finite"),
        ({"top_k": 2.5}, "top_k 2.5 must be an integer"),
        ({"top_p": "0.9"}, "top_p '0.9' must be finite"),
    ],
)
def test_settings_without_a_meaning(tmp_path, changes, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        GenerationConfig.from_file(write(tmp_path, VALUES | changes))


def test_damaged_and_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist"):
        GenerationConfig.from_file(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected a JSON object"):
        GenerationConfig.from_file(tmp_path)
