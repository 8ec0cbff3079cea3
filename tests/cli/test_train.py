"""Training from the command line: help, what is refused, a run and its resumption."""

import functools
import json
import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from jaxscale import cli
from jaxscale.cli import runs, train
from jaxscale.cli.errors import UsageError
from jaxscale.cli.serve import ServeConfig
from jaxscale.models import PRESETS, Tokenizer
from jaxscale.training import Diverged, TrainConfig, lock
from tests.cli.test_serve import SIZES, answer
from tests.ports import free_port


TINY = [
    *("llama_tiny", "--data.seq-len", "32", "--data.held-out-fraction", "0.3"),
    *("--optimizer.warmup-steps", "0", "--eval-batches", "1"),
]
PIPELINE = [*TINY, "--rules", "megascale_3d", "--mesh.fsdp", "2"]


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"The number {i} follows {i - 1}. " * 20)
    return folder


@pytest.fixture
def call(command):
    return functools.partial(command, "train")


def test_help_lists_every_run_and_examples(call):
    for arguments in ((), ("--help",)):
        code, out, _ = call(*arguments)
        assert code == 0
        assert all(f" {name} " in out for name in PRESETS)
        assert "jaxscale train llama_tiny --steps 100 --output-dir" in out


def test_help_of_a_run_describes_each_setting(call):
    code, out, _ = call("llama_tiny", "--help")
    assert code == 0
    for option in ("--steps", "--model.num-heads", "--data.paths", "--mesh.tensor"):
        assert option in out
    assert "(default: runs/llama_tiny)" in out
    assert "Query heads" in out and "rope-scaling" not in out


def test_every_preset_is_a_run():
    for name in PRESETS:
        config = runs.find_run(name)
        assert config.model.vocab_size >= config.data.vocab_size > 256
        assert config.output_dir == f"runs/{name}"


def test_a_run_of_ones_own(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "my_runs", raising=False)
    (tmp_path / "my_runs.py").write_text(
        "from jaxscale.recipes import from_preset\n"
        "def small(): return from_preset('gpt2_tiny')\n"
        "def wrong(): return 3\n"
        "def fails(): return {}['absent']\n"
        "constant = 5\n"
    )
    monkeypatch.chdir(tmp_path)
    assert isinstance(runs.find_run("my_runs:small"), TrainConfig)
    with pytest.raises(UsageError, match="my_runs:wrong returned int, expected a"):
        runs.find_run("my_runs:wrong")
    with pytest.raises(UsageError, match="has no attribute 'absent'"):
        runs.find_run("my_runs:absent")
    with pytest.raises(UsageError, match=r"KeyError: 'absent' \(.*my_runs\.py:4\)"):
        runs.find_run("my_runs:fails")
    with pytest.raises(UsageError, match="TypeError: 'int' object is not callable"):
        runs.find_run("my_runs:constant")
    (tmp_path / "broken.py").write_text("def f(:")
    with pytest.raises(UsageError, match=r"broken:f failed: SyntaxError: .*broken\.py"):
        runs.find_run("broken:f")
    with pytest.raises(UsageError, match="there is no module 'nowhere'"):
        runs.find_run("nowhere:run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama_tiny"], r"'lama_tiny' is no run \(did you mean llama_tiny\?\); use"),
        (["--steps", "3"], "the run comes first: jaxscale train RUN --steps"),
        ([*TINY, "--stepz", "3"], "Unrecognized options: --stepz, 3 .* --steps INT"),
        ([*TINY, "--steps", "few"], "--steps: invalid literal for int"),
        (
            [*TINY, "--lr", "1e-3"],
            r"--lr is no option here \(did you mean --optimizer\.learning-rate\?\)",
        ),
        (
            [*TINY, "--optimizer.lr=1e-3"],
            r"--optimizer\.lr is no option .*mean --optimizer\.learning-rate\?",
        ),
        ([*TINY, "--batch_size", "4"], r"\(did you mean --data\.batch-size\?\)"),
        (
            [*TINY, "--step", "5", "--output-dir", "nowhere"],
            "step 5 goes back to a checkpoint, and .* has none; leave it out,",
        ),
        ([*TINY, "--steps", "0"], "steps 0 must be at least 1"),
        ([*TINY, "--steps", str(10**12)], "steps 1000000000000 must be at most"),
        ([*TINY, "--seed", str(2**70)], "seed 1180591620717411303424 must be from 0"),
        ([*TINY, "--devices", "100000"], "--devices 100000, expected 1 to 4096"),
        ([*TINY, "--dtype", "float8"], "invalid choice 'float8'"),
        ([*TINY, "--rules", "best"], "rules 'best' is no preset; use one of"),
        (
            [*TINY, "--rules", "fsdp_tp", "--mesh.fsdp", "1", "--mesh.tensor", "8"],
            r"num_heads 4 is not divisible by 8, .* \('tensor',\)",
        ),
        (
            [*TINY, "--data.batch-size", "6"],
            r"batch_size 6 is not divisible by 8, .*'fsdp'",
        ),
        (
            [*TINY, "--mesh.data", "4", "--mesh.fsdp", "4", "--data.batch-size", "16"],
            "needs 16 devices, but there are 8; make an axis smaller",
        ),
        (
            ["llama_tiny", "--data.seq-len", "256"],
            "seq_len 256 is longer than model.max_seq_len 128",
        ),
        (
            [*TINY, "--data.vocab-size", "1024"],
            "data.vocab_size 1024 is larger than model.vocab_size 512",
        ),
        ([*TINY, "--chunks", "2"], "chunks 2 are parts of the stages of a pipeline"),
        (
            [*PIPELINE, "--mesh.pipe", "4"],
            "num_layers 2 are fewer than stages 4 x chunks 1 = 4.*at most stages=2",
        ),
        (
            [*PIPELINE, "--mesh.pipe", "2", "--chunks", "2", "--model.num-layers", "4"],
            "microbatches 1 do not fit chunks 2.*use microbatches=2, or chunks=1",
        ),
        (
            [*TINY, "--mesh.fsdp", "2", "--mesh.context", "4", "--data.seq-len", "60"],
            "data.seq_len 60 is not divisible by 8: .* mesh.context 4 .* to 56 or 64",
        ),
        (
            [*TINY, "--rules", "replicated", "--mesh.fsdp", "1", "--mesh.context", "8"],
            r"rules 'replicated' split nothing over the mesh axes \['context=8'\]",
        ),
        (
            [*TINY, "--model.window-pattern", "8", "None", "8"],
            r"window_pattern \(8, None, 8\) of 3 layers .* num_layers 2; .* 1 or 2",
        ),
        ([*TINY, "--data.paths", "nowhere/"], "'nowhere/' matches no text: no such"),
        (
            [*TINY, "--data.tokenizer", "nowhere.json"],
            "nowhere.json' has no tokenizer: .* does not exist",
        ),
    ],
)
def test_mistakes_are_explained_before_any_work(
    call, tmp_path, monkeypatch, arguments, message
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "fit", pytest.fail)
    code, out, err = call(*arguments)
    assert code == 2
    assert re.search(message, err), err
    assert out == "" and "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_larger_than_the_vocabulary(call, tmp_path, text, monkeypatch):
    monkeypatch.setattr(train, "fit", pytest.fail)
    words = "".join(chr(ord("a") + i % 26) + " " * (i % 3 == 0) for i in range(9999))
    Tokenizer.train([words * 2], 600).save(tmp_path / "tokenizer")
    tokenizer = Tokenizer.from_file(tmp_path / "tokenizer")
    assert tokenizer.vocab_size > 270
    code, _, err = call(
        *TINY,
        *("--model.vocab-size", "264", "--data.vocab-size", "264"),
        *("--data.paths", text, "--data.tokenizer", tmp_path / "tokenizer"),
    )
    assert code == 2
    assert "vocab_size 264 is too small for the tokenizer" in err


def test_devices_are_simulated_before_jax_starts(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "jaxscale", "train", *TINY, "--devices", "3"),
            *("--mesh.fsdp", "4", "--output-dir", str(tmp_path / "run")),
        ],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"},
    )
    assert result.returncode == 2
    assert (
        "fsdp=4, context=1, tensor=1 needs 4 devices, but there are 3" in result.stderr
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_processes_that_find_different_text_are_told(tmp_path, text):
    other = tmp_path / "other"
    shutil.copytree(text, other)
    (other / "extra.txt").write_text("Only here. ")
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for rank, folder in enumerate([text, other]):
        cluster = {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(rank),
        }
        processes.append(
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "jaxscale", "train", *TINY),
                    *("--devices", "1", "--data.paths", str(folder)),
                    *("--output-dir", str(tmp_path / "run")),
                ],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | cluster,
            )
        )
    for process in processes:
        _, err = process.communicate(timeout=600)
        assert process.returncode == 2, err
        assert "the processes [1] found other text than process 0" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("compile_once")
def test_train_resume_and_generate(call, tmp_path, text, capfd):
    run = tmp_path / "run"
    options = [*TINY, "--data.paths", text, "--output-dir", run]
    options += ["--model.num-layers", "1", "--dtype", "float32"]
    options += ["--optimizer.schedule", "constant"]
    code, out, err = call(*options, "--steps", "3")
    assert code == 0, err
    extent = r"\(\d+ of \d+ held-out batches\)"
    said = rf"3 steps, held-out loss \d\.\d+ {extent}; try: .* --from {run} "
    assert re.search(said, out)
    assert json.loads((run / "run.json").read_text())["config"]["steps"] == 3
    page = (run / "report.html").read_text()
    assert "learning rate" in page and '["optimizer.schedule","constant"]' in page
    assert Tokenizer.from_file(run).vocab_size <= 512

    code, _, err = call(*options, "--steps", "5")
    assert code == 2 and "already holds a run; add --resume to continue" in err
    code, _, err = call(*options, "--steps", "5", "--seed", "1", "--resume")
    assert code == 2 and "belongs to another run: its seed is 0, this one's 1" in err
    extra = text / "extra.txt"
    extra.write_text("Another document. ")
    code, _, err = call(*options, "--steps", "5", "--resume")
    assert code == 2 and "belongs to a run on other text" in err
    extra.unlink()

    split = ["--rules", "fsdp_tp", "--mesh.fsdp", "4", "--mesh.tensor", "2"]
    code, out, err = call(*options, "--steps", "5", "--resume", *split, "--zero", "2")
    assert code == 0, err
    assert "5 steps, held-out loss" in out
    # Another spelling of the path, and a newest checkpoint whose arrays are cut off.
    options[options.index(text)] = text / ".." / "text"
    for file in (run / "checkpoints" / "5" / "state").rglob("d/*"):
        os.truncate(file, file.stat().st_size // 2)
    code, out, err = call(*options, "--steps", "5", "--resume")
    assert code == 0, err
    assert "Traceback" not in err
    assert (run / "checkpoints" / "5.aside").is_dir()
    code, out, err = call(*options, "--steps", "5", "--resume", "--step", "3")
    assert code == 0, err
    assert json.loads((run / "run.json").read_text())["config"]["steps"] == 5
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5]

    prompt = "The number "
    arguments = ["generate", "--from", str(run), "--prompt", prompt]
    assert cli.main([*arguments, "--max-new-tokens", "8", "--temperature", "0"]) == 0
    out = capfd.readouterr().out
    assert out.startswith(prompt) and len(out) > len(prompt) + 1
    served = ServeConfig(source=str(run), engine=SIZES)
    assert f"{prompt}{answer(served, prompt, 8)[1]}\n" == out
    assert cli.main([*arguments, "--step", "4"]) == 2
    assert "no checkpoint of step 4" in capfd.readouterr().err


def test_a_run_that_diverged_has_an_exit_code_of_its_own(
    call, tmp_path, text, monkeypatch
):
    def fit(*_, **__):
        raise Diverged("updates 2 to 11 of 60 were skipped")

    monkeypatch.setattr(train, "fit", fit)
    options = [*TINY, "--data.paths", text, "--output-dir", tmp_path / "run"]
    code, out, err = call(*options)
    assert code == 3 and "documents of" in out
    assert err.strip().endswith("jaxscale: updates 2 to 11 of 60 were skipped")
    # Nothing was saved: the corrected command finds the directory free.
    monkeypatch.setattr(train, "fit", lambda *_, **__: pytest.exit("reached"))
    with pytest.raises(pytest.exit.Exception, match="reached"):
        call(*options, "--model.num-layers", "1")


@pytest.mark.parametrize(("choice", "queues"), [("fused", "1"), ("xla", None)])
def test_fused_kernels_and_collectives_start_in_the_order_of_the_program(
    choice, queues, monkeypatch
):
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setenv(name, "8")
    monkeypatch.delenv(name)
    seen = []
    monkeypatch.setattr(
        train.sharding, "initialize", lambda: seen.append(os.environ.get(name))
    )
    monkeypatch.setattr(train, "train", lambda *_, **__: pytest.fail("not here"))
    with pytest.raises(pytest.fail.Exception):
        train.main([*TINY, "--tensor-parallel", choice, "--rules", "fsdp_tp"])
    assert seen == [queues]


def test_flags_of_xla_are_set_before_devices_are_used(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    seen = []
    monkeypatch.setattr(
        train.sharding, "initialize", lambda: seen.append(os.environ["XLA_FLAGS"])
    )
    monkeypatch.setattr(train, "train", lambda *_, **__: pytest.fail("not here"))
    with pytest.raises(pytest.fail.Exception):
        train.main([*TINY, "--xla-flags", "overlap"])
    assert "--xla_gpu_enable_pipelined_all_gather=true" in seen[0]
    monkeypatch.setenv("XLA_FLAGS", "--xla_gone=1")
    with pytest.raises(UsageError, match=r"--xla_gone=1"):
        train.main([*TINY, "--xla-flags", "overlap"])


def test_the_number_of_queues_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    train.sharding.launch_in_order()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def test_a_directory_that_another_command_writes_to_is_left_alone(command, tmp_path):
    owner = {
        "host": socket.gethostname(),
        "pid": os.getppid(),
        "started": lock._started(os.getppid()),
        "since": "noon",
        "supervised": False,
    }
    (tmp_path / "run.lock").write_text(json.dumps(owner))
    (tmp_path / "run.json").write_text("{}")
    arguments = ("train", *TINY, "--output-dir", tmp_path, "--resume")
    code, _, err = command(*arguments)
    assert code == 2 and f"is in use by process {os.getppid()} on " in err
    assert (tmp_path / "run.json").read_text() == "{}"
    assert {path.name for path in tmp_path.iterdir()} == {"run.lock", "run.json"}
