"""One, two and four processes on four devices of this machine: the same losses.

    python -m tests.training.several_processes [PART ...] [--cpu]

Each process finds the others by the variables of a launcher, with its share of four
GPUs, or of simulated devices. Parts:

- ``llama``: ``examples/multihost/pretrain_llama.py`` with `fsdp` across the processes
  and `tensor` inside, by fused kernels where they run. Each number of processes also
  continues a checkpoint that another one wrote.
- ``pipeline``: ``jaxscale train`` with the stages of a pipeline across.
- ``bert``: ``examples/multihost/pretrain_bert.py``, data-parallel.
- ``serve``: ``examples/multihost/serve_llama.py``, whose answer is the same.

The losses of one process are the reference. A part prints a line for each number of
processes, and the exit code is 1 if one differs.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from conftest import COMPILE_FAST
from tests.ports import free_port


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "multihost"
DEVICES = 4
SECONDS = 500.0
"""A run that takes longer hangs."""

WITHIN = 2e-3
"""Of each other are losses whose sums are taken in another order, in bf16."""

STEPS = 6
TINY = [
    *("--preset=llama_tiny", "--data.vocab-size=512", "--data.seq-len=64"),
    "--data.batch-size=8",
]
LARGE = [
    *("--preset=llama_1b", "--data.vocab-size=512", "--data.seq-len=2048"),
    "--data.batch-size=8",
]
STEADY = [
    *("--optimizer.warmup-steps=2", f"--optimizer.schedule-steps={STEPS}"),
    "--data.held-out-fraction=0",
]


def environments(count: int, out: Path, cpu: bool) -> list[dict[str, str]]:
    """What a launcher would set for each of `count` processes."""
    port = free_port()
    each = DEVICES // count
    shared = os.environ | {
        "PYTHONPATH": str(ROOT),
        "NCCL_NVLS_ENABLE": "0",
        "JAX_COMPILATION_CACHE_DIR": str(out.parent / "programs"),
    }
    if cpu:
        shared["XLA_FLAGS"] = " ".join(COMPILE_FAST)
    if count > 1:
        shared |= {
            "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
            "JAX_NUM_PROCESSES": str(count),
        }
    found = []
    for rank in range(count):
        own = {"JAX_PROCESS_ID": str(rank)} if count > 1 else {}
        if cpu:
            own |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(each)}
        else:
            gpus = range(rank * each, (rank + 1) * each)
            own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        found.append(shared | own)
    return found


def start(
    count: int, command: Sequence[str], out: Path, cpu: bool
) -> list[subprocess.Popen]:
    """Start `count` processes of a command, whose output goes into files of `out`."""
    out.mkdir(parents=True, exist_ok=True)
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env=environment,
            stdout=(out / f"rank{rank}.log").open("ab"),
            stderr=subprocess.STDOUT,
        )
        for rank, environment in enumerate(environments(count, out, cpu))
    ]


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill what is left."""
    for process in processes:
        process.kill()
        process.wait()


def losses(count: int, command: Sequence[str], out: Path, cpu: bool) -> list[float]:
    """The losses of a training command with `count` processes.

    Raises:
        RuntimeError: a process failed, or hangs; with the end of its output.
    """
    processes = start(count, [*command, f"--output-dir={out / 'run'}"], out, cpu)
    deadline = time.monotonic() + SECONDS
    try:
        codes = [p.wait(max(1, deadline - time.monotonic())) for p in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        end(processes)
    if any(codes):
        logs = [path.read_text(errors="replace")[-2000:] for path in out.glob("*.log")]
        raise RuntimeError(f"{count} processes ended with {codes}:\n" + "\n".join(logs))
    lines = (out / "run" / "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    return [record["loss"] for record in records if "loss" in record]


def compare(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite if steps are missing."""
    if len(found) != len(expected):
        return float("inf")
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def command_of(part: str, cpu: bool) -> list[str]:
    """What trains, without its steps and output directory."""
    sizes = TINY if cpu else LARGE
    if part == "llama":
        fused = ["--tensor-parallel=fused", "--mesh.fsdp=2", "--mesh.tensor=2"]
        return [str(RECIPES / "pretrain_llama.py"), *sizes, *STEADY, *fused]
    if part == "bert":
        bert = ["--preset=bert_tiny" if cpu else "--preset=bert_large"]
        bert += [size for size in sizes if "preset" not in size]
        if not cpu:
            bert += ["--data.seq-len=512"]
        bert += ["--data.max-sequences=8", f"--mesh.data={DEVICES}"]
        return [str(RECIPES / "pretrain_bert.py"), *bert, *STEADY]
    run, *data = sizes
    stages = ["--mesh.pipe=2", "--mesh.tensor=2", "--mesh.fsdp=1", "--microbatches=4"]
    rules = ["--rules=megascale_3d", "--tensor-parallel=xla", "--remat=attention"]
    stages += [*rules, "--scan-layers", "--checkpoint-every=100"]
    name = run.removeprefix("--preset=")
    data = [*data, f"--model.vocab-size={data[0].partition('=')[2]}"]
    return ["-m", "jaxscale", "train", name, *data, *STEADY, *stages]


def train(part: str, out: Path, cpu: bool) -> bool:
    """Whether all numbers of processes have the losses of one."""
    command = command_of(part, cpu)
    if part == "bert":
        command.append(f"--data.tokenizer={make_model(out / 'model')}")
    whole = [*command, f"--steps={STEPS}"]
    half = [*command, f"--steps={STEPS // 2}"]
    expected = losses(1, whole, out / "1", cpu)
    print(f"{part}: 1 process, losses {expected}", flush=True)
    good = True
    writes = {1: 2, 2: 4, 4: 1} if part == "llama" else {}
    for count in (2, 4):
        away = compare(losses(count, whole, out / str(count), cpu), expected)
        good &= away <= WITHIN
        print(f"{part}: {count} processes, within {away:.1e}", flush=True)
    for before, after in writes.items():
        place = out / f"{before}_then_{after}"
        losses(before, half, place, cpu)
        away = compare(losses(after, whole, place, cpu), expected)
        good &= away <= WITHIN
        words = f"{before} processes, continued by {after}"
        print(f"{part}: {words}, within {away:.1e}", flush=True)
    return good


def answer(count: int, model: Path, out: Path, cpu: bool) -> str:
    """What a server of `count` processes completes."""
    port = free_port()
    sizes = [f"--port={port}", "--max-len=64", "--slots=2"]
    sizes += [f"--devices={DEVICES // count}"] * cpu
    command = [str(RECIPES / "serve_llama.py"), str(model), *sizes]
    processes = start(count, command, out, cpu)
    body = {"prompt": "to be or", "max_tokens": 16, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    deadline = time.monotonic() + SECONDS
    try:
        while True:
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    text = json.load(response)["choices"][0]["text"]
                break
            except OSError:  # it does not listen yet, or is not ready
                if time.monotonic() > deadline or any(p.poll() for p in processes):
                    logs = [p.read_text(errors="replace") for p in out.glob("*.log")]
                    raise RuntimeError("\n".join(x[:2000] for x in logs)) from None
                time.sleep(0.5)
        for process in processes:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(120) for process in processes] == [0] * count
        return text
    finally:
        end(processes)


MODEL = """
import dataclasses, sys
from flax import nnx
from jaxscale.models import Decoder, Tokenizer, preset, save
shape = dataclasses.replace(
    preset("llama_tiny"), vocab_size=270, num_heads=8, num_kv_heads=4
)
control = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
tokenizer = Tokenizer.train(["to be or not to be"] * 3, 270, special_tokens=control)
save(Decoder(shape, rngs=nnx.Rngs(0)), sys.argv[1], tokenizer=tokenizer)
"""


def make_model(path: Path) -> Path:
    """A Hugging Face directory of a tiny LLaMA and a tokenizer."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    subprocess.run(
        [sys.executable, "-c", MODEL, str(path)], env=environment, check=True
    )
    return path


def serve(out: Path, cpu: bool) -> bool:
    """Whether all numbers of processes give the answer of one."""
    model = make_model(out / "model")
    texts = {n: answer(n, model, out / str(n), cpu) for n in (1, 2, 4)}
    for count, text in texts.items():
        print(f"serve: {count} processes say {text!r}", flush=True)
    return len({*texts.values()}) == 1


PARTS = ("llama", "pipeline", "bert", "serve")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 0 if all agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.several_processes")
    parser.add_argument("parts", nargs="*", help=f"some of {PARTS}; all by default")
    parser.add_argument("--cpu", action="store_true", help="four simulated devices")
    args = parser.parse_args(argv)
    if unknown := {*args.parts} - {*PARTS}:
        parser.error(f"unknown parts {sorted(unknown)}; there are {PARTS}")
    out = Path(tempfile.mkdtemp(prefix="several-"))
    good = True
    for part in args.parts or PARTS:
        place = out / part
        good &= (
            serve(place, args.cpu) if part == "serve" else train(part, place, args.cpu)
        )
    if good:
        shutil.rmtree(out)
    else:
        print(f"they differ; logs in {out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
