"""``jaxscale plan``."""

from tests.cli.conftest import loading


def test_layouts_are_ranked_and_the_best_is_a_command(command, tmp_path):
    page = tmp_path / "plan.html"
    code, out, err = command(
        *("plan", "--model", "llama3_8b", "--gpus", 16, "--batch-size", 64),
        *("--pipe", 2, "--rows", 1, "--top", 2, "--report", page),
    )
    assert code == 0
    said = "jaxscale: estimating the layouts of 16 GPUs for llama3_8b "
    assert err == loading("plan") + said
    assert "llama3_8b on 16 H200" in out and "The first: pipe 2" in out
    assert "jaxscale train llama3_8b --mesh.pipe 2 --mesh.fsdp" in out
    assert "--mesh.pipe 2" in out and "--rules megascale_3d" in out
    assert "does not have yet" not in out
    assert "jaxscale schedule --stages 2" in out
    assert "<svg" in page.read_text()


def test_a_run_of_ones_own_is_planned(command, tmp_path, monkeypatch):
    (tmp_path / "planned_runs.py").write_text(
        "import dataclasses\n"
        "from jaxscale.recipes import from_preset\n"
        "from jaxscale.models import encoder_preset\n"
        "def run():\n"
        "    config = from_preset('llama_1b')\n"
        "    model = dataclasses.replace(config.model, num_layers=3)\n"
        "    return dataclasses.replace(config, model=model)\n"
        "def encoder():\n"
        "    config = from_preset('llama_tiny')\n"
        "    return dataclasses.replace(config, model=encoder_preset('bert_base'),\n"
        "        data=dataclasses.replace(config.data, seq_len=128))\n"
    )
    monkeypatch.chdir(tmp_path)
    arguments = ("--gpus", 4, "--batch-size", 8, "--pipe", 4)
    code, _, err = command("plan", "--model", "planned_runs:run", *arguments)
    assert code == 2 and "num_layers 3" in err
    code, out, _ = command("plan", "--model", "planned_runs:run", *arguments[:4])
    assert code == 0 and "jaxscale train planned_runs:run --mesh" in out
    code, _, err = command("plan", "--model", "planned_runs:encoder", *arguments)
    assert code == 2 and "plans are for decoders" in err


def test_a_model_with_weights_is_planned_by_its_settings(command):
    directory = "tests/fixtures/models/gpt2"
    for given in ([directory], ["--from", directory], ["--model", directory]):
        code, out, _ = command("plan", *given, "--gpus", 1, "--batch-size", 4)
        assert code == 0 and f"jaxscale train {directory} --mesh.fsdp 1" in out


def test_mistakes_are_a_line(command):
    code, out, err = command("plan", "lama3_8b", "--gpus", 8)
    assert (code, out) == (2, "") and "did you mean llama3_8b?" in err
    code, _, err = command("plan", "--model", "llama3_8b", "--gpus", 1)
    assert code == 2 and "GB are short" in err
    code, _, err = command("plan", "--model", "llama3_8b", "--gpus", 8, "--pipe", 3)
    assert code == 2 and "not divisible" in err
