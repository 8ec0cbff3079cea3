"""The recipes' own text starts two processes that train together."""

import importlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from conftest import COMPILE_FAST
from jaxscale.models import Tokenizer
from tests.examples import launchers
from tests.ports import free_port


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/multihost"
CONTROL = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
HOSTS = "127.0.0.1,127.0.0.2"  # both are this machine
TINY = [
    *("--data.vocab-size=270", "--data.seq-len=32", "--data.batch-size=8"),
    *("--data.held-out-fraction=0", "--optimizer.warmup-steps=1", "--steps=3"),
    "--mesh.tensor=2",
]
OPTIONS = [
    *("--data.paths", "text/web", "text/code", "--data.weights", "7", "3"),
    *("--data.tokenizer=text/tokenizer", *TINY),
]


@pytest.fixture
def job(tmp_path, monkeypatch):
    """A shared directory with text, on machines of two devices with launchers."""
    for kind in ("web", "code"):
        (tmp_path / "text" / kind).mkdir(parents=True)
        for i in range(6):
            words = f"{kind} {i} to be or not to be " * (i + 1)
            (tmp_path / "text" / kind / f"{i}.txt").write_text(words)
    tokenizer = Tokenizer.train(["to be or not to be"] * 3, 270, special_tokens=CONTROL)
    tokenizer.save(tmp_path / "text/tokenizer")
    for name in RECIPES.iterdir():
        if name.is_file():
            shutil.copy(name, tmp_path)
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "srun", "mpirun", "ssh", "python"):
        program = [sys.executable]
        if name != "python":
            program += [launchers.__file__, name]
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/sh\nexec {" ".join(program)} "$@"\n')
        shim.chmod(0o755)
    for name, value in {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "XLA_FLAGS": " ".join(COMPILE_FAST),
        "NPROC": "2",
        "JAX_COORDINATOR_PORT": str(free_port()),
        # The second launcher of a test starts the same programs.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "TEST_JOB_ID": "4711",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_for_a_laptop_fits_its_model(monkeypatch):
    """As the first lines of the script show it, up to where text is read."""
    monkeypatch.syspath_prepend(RECIPES)
    script = importlib.import_module("pretrain_llama")
    assert script.__doc__ is not None
    command = script.__doc__.rpartition("python pretrain_llama.py ")[2]
    config = settings_of(shlex.split(command.partition("\n\n")[0]), monkeypatch)
    config.check_mesh(config.mesh.sizes(8))
    assert (config.steps, config.data.seq_len, config.model.vocab_size) == (
        100,
        128,
        512,
    )


def settings_of(words, monkeypatch):
    """What pretrain_llama.py makes of its arguments."""
    monkeypatch.syspath_prepend(RECIPES)
    script = importlib.import_module("pretrain_llama")
    found = []

    def read(config):
        found.append(config)
        raise Read

    monkeypatch.setattr(sys, "argv", ["pretrain_llama.py", *words])
    monkeypatch.setattr(script, "load_text", lambda data: data)
    monkeypatch.setattr(script, "packed_batches", lambda config, text: read(config))
    with pytest.raises(Read):
        script.main()
    (config,) = found
    return config


class Read(Exception):
    """The script has its settings and asks for text."""


def start(*command):
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            log = "".join(process.communicate(timeout=600))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)  # launchers end what they started
            raise
    log += "".join(path.read_text() for path in Path().glob("*.log"))
    assert process.returncode == 0, log[-3000:]
    return log


def losses(directory):
    lines = Path(directory, "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.slow
def test_llama_by_slurm(job, monkeypatch):
    script = ["pretrain_llama.py", "--preset=llama_tiny", *OPTIONS]
    log = start("sbatch", "slurm.sbatch", *script, "--output-dir=slurm")
    assert "step 3 of 3, 2 processes (slurm), 4 devices" in log
    expected = losses("slurm")
    assert len(expected) == 3
    # One process of all devices has the same losses, and goes on where two ended.
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "4")
    longer = ["--steps=4", "--optimizer.schedule-steps=3"]
    start("python", *script, *longer, "--output-dir=alone")
    assert losses("alone")[:3] == pytest.approx(expected, rel=1e-5)
    log = start("python", *script, *longer, "--output-dir=slurm")
    assert "step 4 of 4, 1 processes" in log
    assert losses("slurm") == pytest.approx(losses("alone"), rel=1e-5)
    assert len(losses("slurm")) == 4


@pytest.mark.slow
def test_bert_by_open_mpi(job):
    script = ["pretrain_bert.py", "--preset=bert_tiny", *OPTIONS]
    script += ["--data.max-sequences=8", "--mesh.data=2"]
    log = start("bash", "open_mpi.sh", HOSTS, *script, "--output-dir=mpi")
    assert "step 3 of 3, 2 processes (open_mpi), 4 devices" in log
    assert len(losses("mpi")) == 3


MEET = """
import sys
import jax
from jaxscale.sharding import initialize
me = initialize()
who = f"{me.process_id} of {me.num_processes} ({me.launcher})"
sys.stdout.write(f"{who}, {jax.device_count()} devices, {sys.argv[1:]}\\n")
"""


def assert_met(log, launcher, words):
    """Each process knows the devices of both, and has its arguments as they were."""
    for rank in range(2):
        assert f"{rank} of 2 ({launcher}), 4 devices, {words}" in log, log


def test_processes_by_ssh_meet(job):
    (job / "meet.py").write_text(MEET)
    log = start("bash", "ssh.sh", HOSTS, "meet.py", "--output-dir=by ssh")
    assert_met(log, "environment", ["--output-dir=by ssh"])


def test_pods_of_a_job_set_meet(job, monkeypatch):
    (job / "meet.py").write_text(MEET)
    pods, directories = pods_of(job, "--preset=llama_tiny", *TINY)
    (python, _, *words), _ = pods[0]
    processes = [
        subprocess.Popen(
            [python, job / "meet.py", *words],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _, environ in pods
    ]
    try:
        outputs = [p.communicate(timeout=600)[0] for p in processes]
    finally:
        for process in processes:
            process.kill()
    assert_met("".join(outputs), "kubernetes", words)
    config = settings_of(words, monkeypatch)
    text, runs = directories["/text"], directories["/runs"]
    assert config.data.paths == (f"{text / 'web'}", f"{text / 'code'}")
    assert config.data.tokenizer == f"{text / 'tokenizer'}"
    assert config.output_dir == f"{runs / 'llama'}"


def pods_of(job, *options):
    """Command and environment of each pod of the JobSet, as its controllers set them.

    Volumes are directories, the name of a pod is an address of this machine, and
    `options` stand in for the model and the GPUs that this machine lacks.
    """
    jobset = yaml.safe_load((job / "jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == (
        "jobset.x-k8s.io/v1alpha2",
        "JobSet",
    )
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1
    spec = replicated["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"]
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    directories = {path: job / path.strip("/") for path in mounts.values()}

    def mounted(word):
        name, equals, value = word.rpartition("=")
        for path, directory in directories.items():
            if value.startswith(f"{path}/"):
                return f"{name}{equals}{directory}{value.removeprefix(path)}"
        return word

    command = [mounted(word) for word in container["command"]]
    assert (ROOT / command[1]).is_file()
    command[1] = str(ROOT / command[1])
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    name = jobset["metadata"]["name"]
    host, _, port = environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")
    assert host == f"{name}-{replicated['name']}-0-0.{name}" and port.isdecimal()
    address = f"127.0.0.1:{os.environ['JAX_COORDINATOR_PORT']}"
    environ |= launchers.machine() | {"JAX_COORDINATOR_ADDRESS": address}
    pods = [
        ([*command, *options], environ | {"JOB_COMPLETION_INDEX": str(index)})
        for index in range(spec["completions"])
    ]
    return pods, directories


def test_ssh_ends_all_processes_when_one_fails(job):
    (job / "one fails.py").write_text(
        "import os, pathlib, sys, time\n"
        "rank = os.environ['JAX_PROCESS_ID']\n"
        "pathlib.Path(rank).write_text(str(os.getpid()))\n"
        "while not all(pathlib.Path(r).exists() for r in '01'): time.sleep(0.01)\n"
        "if rank == '1': sys.exit(3)\n"
        "time.sleep(600)\n"
    )
    command = ["bash", "ssh.sh", HOSTS, "one fails.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3, done.stderr
    survivor = Path(f"/proc/{(job / '0').read_text()}")
    deadline = time.monotonic() + 120
    while survivor.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not survivor.exists()
