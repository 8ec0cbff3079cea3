"""One, two and four processes on the devices of this machine: the same losses.

    python -m tests.training.several_processes [PART ...] [--devices 2] [--cpu]

Each process finds the others by the variables of a launcher, with its share of four
GPUs, or of two, or of simulated devices. Parts:

- ``llama``: ``examples/multihost/pretrain_llama.py`` with `fsdp` across the processes
  and, of four devices, `tensor` inside, by fused kernels where they run.
- ``checkpoints``: ``jaxscale train`` with `fsdp` across. Each number of processes
  continues a checkpoint that another one wrote.
- ``across``: ``jaxscale train`` with `tensor` over all devices: one process runs the
  fused kernels, and several XLA's collectives, and say how to start one a host.
- ``pipeline``: ``jaxscale train`` with the stages of a pipeline across.
- ``bert``: ``examples/multihost/pretrain_bert.py``, data-parallel.
- ``serve``: ``examples/multihost/serve_llama.py``, whose answer is the same.
- ``faults``: ``jaxscale train --supervise`` with one process a device, of which one is
  killed or stopped; its losses are those of an unbroken run, bit for bit.

The losses of one process are the reference. A part prints a line for each number of
processes, and the exit code is 1 if one differs. Runs of a part share the devices, side
by side: most of their time goes into start and compilation.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from conftest import COMPILE_FAST
from jaxscale.supervision import read_events
from tests.ports import free_port


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples" / "multihost"
PACKAGES = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
SECONDS = 500.0
"""A run that takes longer hangs."""

WITHIN = 2e-3
"""Of each other are losses whose sums are taken in another order, in bf16."""

STEPS, EVERY = 6, 2
"""Of a run, and between the checkpoints of one that is broken."""

DATA = [
    *("--data.vocab-size=512", "--data.batch-size=8"),
    f"--data.paths={ROOT / 'docs'}",  # which is read and tokenized in a second or two
]
SHORT = ["--model.num-layers=4", "--scan-layers"]
"""What ``jaxscale train`` leaves of it, which compiles in seconds."""
NARROW = [
    *("--model.d-model=512", "--model.num-heads=4", "--model.num-kv-heads=4"),
    "--model.d-ff=2048",
]
"""And where it writes checkpoints, of 200 MB."""
STEADY = [
    *("--optimizer.warmup-steps=2", f"--optimizer.schedule-steps={STEPS}"),
    "--data.held-out-fraction=0",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices that the processes share."""

    devices: int
    cpu: bool
    """Whether they are simulated."""
    model: str
    """Preset of a decoder."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of processes beside one."""
        return tuple(n for n in (2, 4) if n <= self.devices)

    def shared(self, out: Path) -> dict[str, str]:
        """Variables of all processes."""
        found = os.environ | {
            "PYTHONPATH": PACKAGES,
            "NCCL_NVLS_ENABLE": "0",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "JAX_COMPILATION_CACHE_DIR": str(out.parent / "programs"),
        }
        if self.cpu:
            found["XLA_FLAGS"] = " ".join(COMPILE_FAST)
            found["JAX_PLATFORMS"] = "cpu"
        return found

    def environments(self, count: int, out: Path) -> list[dict[str, str]]:
        """What a launcher would set for each of `count` processes."""
        each, shared = self.devices // count, self.shared(out)
        if count > 1:
            shared |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}",
                "JAX_NUM_PROCESSES": str(count),
            }
        found = []
        for rank in range(count):
            own = {"JAX_PROCESS_ID": str(rank)} if count > 1 else {}
            if self.cpu:
                own["JAX_NUM_CPU_DEVICES"] = str(each)
            else:
                gpus = range(rank * each, (rank + 1) * each)
                own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            found.append(shared | own)
        return found


def start(
    count: int, command: Sequence[str], out: Path, machine: Machine
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
        for rank, environment in enumerate(machine.environments(count, out))
    ]


def end(processes: Sequence[subprocess.Popen]) -> None:
    """Kill what is left."""
    for process in processes:
        process.kill()
        process.wait()


def losses(
    count: int, command: Sequence[str], out: Path, machine: Machine
) -> list[float]:
    """The losses of a training command with `count` processes.

    Raises:
        RuntimeError: a process failed, or hangs; with the end of its output.
    """
    words = [*command, f"--output-dir={out / 'run'}"]
    processes = start(count, words, out, machine)
    deadline = time.monotonic() + SECONDS
    try:
        codes = [p.wait(max(1, deadline - time.monotonic())) for p in processes]
    except subprocess.TimeoutExpired:
        codes = [-1]
    finally:
        end(processes)
    if any(codes):
        raise RuntimeError(f"{count} processes ended with {codes}:\n{said(out)}")
    return written(out / "run")


def written(run: Path) -> list[float]:
    """The losses of a run, from its files."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def said(out: Path) -> str:
    """The end of what processes printed."""
    return "\n".join(log[-2000:] for log in logs(out))


def logs(out: Path) -> list[str]:
    """What each process printed."""
    return [path.read_text(errors="replace") for path in sorted(out.glob("*.log"))]


def compare(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference; infinite if steps are missing."""
    if len(found) != len(expected):
        return float("inf")
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs)


def command_of(part: str, machine: Machine) -> list[str]:
    """What trains, without its steps and output directory."""
    data = [*DATA, f"--data.seq-len={64 if machine.cpu else 2048}"]
    half = machine.devices // 2
    fused = ["--tensor-parallel=fused"]
    if part == "llama":
        mesh = ["--mesh.fsdp=2", f"--mesh.tensor={half}", *(fused if half > 1 else [])]
        model = f"--preset={machine.model}"
        return [str(RECIPES / "pretrain_llama.py"), model, *data, *STEADY, *mesh]
    if part == "bert":
        bert = ["--preset=bert_tiny" if machine.cpu else "--preset=bert_large"]
        bert += [*DATA, f"--data.seq-len={64 if machine.cpu else 512}"]
        bert += ["--data.max-sequences=8", f"--mesh.data={machine.devices}"]
        return [str(RECIPES / "pretrain_bert.py"), *bert, *STEADY]
    train = ["-m", "jaxscale", "train", machine.model, *data, *STEADY]
    train += ["--model.vocab-size=512"]
    train += [] if machine.cpu else SHORT
    if part == "across":
        fused += ["--rules=fsdp_tp", "--xla-flags=host_kernels"]
        return [*train, f"--mesh.tensor={machine.devices}", "--mesh.fsdp=1", *fused]
    if part in ("faults", "checkpoints"):
        narrow = [] if machine.cpu else NARROW
        return [*train, *narrow, f"--mesh.fsdp={machine.devices}"]
    stages = ["--mesh.pipe=2", f"--mesh.tensor={half}", "--mesh.fsdp=1"]
    stages += ["--rules=megascale_3d", "--tensor-parallel=xla", "--remat=attention"]
    stages += ["--microbatches=4", "--checkpoint-every=100"]
    return [*train, *stages, *(["--scan-layers"] if machine.cpu else [])]


def train(part: str, out: Path, machine: Machine) -> bool:
    """Whether all numbers of processes have the losses of one."""
    command = command_of(part, machine)
    if part == "bert":
        command.append(f"--data.tokenizer={make_model(out / 'model')}")
    whole = [*command, f"--steps={STEPS}"]
    numbers = (1, *machine.counts)
    found = at_once({n: (n, whole, out / str(n)) for n in numbers}, machine)
    expected, good = found.pop(1), True
    print(f"{part}: 1 process, losses {expected}", flush=True)
    for count, each in found.items():
        away = compare(each, expected)
        good &= away <= WITHIN
        print(f"{part}: {count} processes, within {away:.1e}", flush=True)
        if part == "across" and not machine.cpu:
            words = "start one process on each host"
            told = all(words in log for log in logs(out / str(count)))
            good &= told
            print(f"{part}: {count} processes, told how to start: {told}", flush=True)
    return good


def checkpoints(out: Path, machine: Machine) -> bool:
    """Whether each number of processes continues a checkpoint of another one."""
    command = command_of("checkpoints", machine)
    whole = [*command, f"--steps={STEPS}"]
    half = [*command, f"--steps={STEPS // 2}"]
    numbers = (1, *machine.counts)
    first = {n: (n, half, out / str(n)) for n in numbers}
    (expected, *_) = at_once({0: (1, whole, out / "whole"), **first}, machine).values()
    pairs = [*zip(numbers, (*numbers[1:], 1), strict=True)]
    rest = [*whole, "--resume"]
    then = {pair: (pair[1], rest, out / str(pair[0])) for pair in pairs}
    good = True
    for (before, after), found in at_once(then, machine).items():
        away = compare(found, expected)
        good &= away <= WITHIN
        words = f"{before} processes, continued by {after}"
        print(f"checkpoints: {words}, within {away:.1e}", flush=True)
    return good


def at_once[Key](
    runs: Mapping[Key, tuple[int, Sequence[str], Path]], machine: Machine
) -> dict[Key, list[float]]:
    """The `losses` of runs that share the devices, side by side.

    Args:
        runs: Number of processes, command and folder of each, by anything.
        machine: The devices.
    """
    with concurrent.futures.ThreadPoolExecutor() as pool:
        started = {key: pool.submit(losses, *run, machine) for key, run in runs.items()}
        return {key: run.result() for key, run in started.items()}


def faults(out: Path, machine: Machine) -> bool:
    """Whether runs of which a process is lost have the losses of one that was whole."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = {n: pool.submit(supervised, out / n, machine, LOST[n]) for n in LOST}
    expected, good = written(out / "whole"), True
    for name, run in runs.items():
        code, times = run.result()
        found = written(out / name)
        equal = code == 0 and found == expected and len(found) == 3 * STEPS
        good &= equal
        print(f"faults: {name}, losses equal: {equal}{times}", flush=True)
        if not equal:
            log = (out / f"{name}.log").read_text()[-3000:]
            print(f"{expected}\n{found}\n{log}", flush=True)
    return good


def supervised(run: Path, machine: Machine, number: int) -> tuple[int, str]:
    """A supervised run of one process a device, and `strike` unless `number` is 0.

    Returns:
        Its exit code, and the `times_of` the fault.
    """
    command = [*command_of("faults", machine), f"--steps={3 * STEPS}"]
    command += [f"--checkpoint-every={EVERY}", "--supervise"]
    command += [f"--supervise.processes={machine.devices}"]
    command += ["--supervise.deadlines.step=10"]
    command += ["--supervise.diagnose=true"]  # GPUs are measured for half a minute
    environment = machine.shared(run.parent)
    environment |= {"JAX_NUM_CPU_DEVICES": "1"} if machine.cpu else {}
    run.parent.mkdir(parents=True, exist_ok=True)
    with run.with_suffix(".log").open("wb") as file:
        driver = subprocess.Popen(
            [sys.executable, *command, f"--output-dir={run}"],
            env=environment,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        struck = number and strike(run, driver, number)
        code = driver.wait(SECONDS)
    finally:
        end_supervised(driver)
    return code, times_of(run, struck)


LOST = {"whole": 0, "SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}


def strike(run: Path, driver: subprocess.Popen, number: int) -> float:
    """Send a signal to the last process between two checkpoints; when that was."""
    deadline = time.monotonic() + SECONDS
    while driver.poll() is None and time.monotonic() < deadline:
        file = run / "events-0.jsonl"
        events = read_events(file) if file.exists() else []
        done = [event["step"] for event in events if event["name"] == "done"]
        if max(done, default=0) > STEPS:
            events = read_events(run / "events-1.jsonl")
            started = [event for event in events if event["name"] == "start"]
            os.kill(started[-1]["args"]["pid"], number)
            return time.time()
        time.sleep(0.005)
    raise RuntimeError(f"step {STEPS} was not reached")


def times_of(run: Path, struck: float) -> str:
    """Seconds until a fault was noticed and until a step was done again."""
    file = run / "supervisor" / "events-driver.jsonl"
    driver = read_events(file) if file.exists() else []
    noticed = [e["t0"] for e in driver if e["kind"] == "fault"]
    again = [e["t1"] for e in driver if e["name"] == "running"]
    if not (struck and noticed and again):
        return ""
    running = max(again) - noticed[0]
    return f"; noticed after {noticed[0] - struck:.2f} s, running after {running:.1f} s"


def end_supervised(driver: subprocess.Popen) -> None:
    """Stop a supervisor with its processes; the second time it does not wait."""
    for _ in range(2):
        if driver.poll() is None:
            driver.terminate()
            time.sleep(0.5)
    driver.wait(120)


def answer(count: int, model: Path, out: Path, machine: Machine) -> str:
    """What a server of `count` processes completes."""
    port = free_port()
    sizes = [f"--port={port}", "--max-len=64", "--slots=2"]
    sizes += [f"--devices={machine.devices // count}"] * machine.cpu
    command = [str(RECIPES / "serve_llama.py"), str(model), *sizes]
    processes = start(count, command, out, machine)
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
                    first = (log[:2000] for log in logs(out))
                    raise RuntimeError("\n".join(first)) from None
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
    subprocess.run(
        [sys.executable, "-c", MODEL, str(path)],
        env=os.environ | {"PYTHONPATH": PACKAGES, "JAX_PLATFORMS": "cpu"},
        check=True,
    )
    return path


def serve(out: Path, machine: Machine) -> bool:
    """Whether all numbers of processes give the answer of one."""
    model = make_model(out / "model")
    numbers = (1, *machine.counts)
    texts = {n: answer(n, model, out / str(n), machine) for n in numbers}
    for count, text in texts.items():
        print(f"serve: {count} processes say {text!r}", flush=True)
    return len({*texts.values()}) == 1


OTHERS = {"checkpoints": checkpoints, "serve": serve, "faults": faults}
PARTS = ("llama", "across", "pipeline", "bert", *OTHERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; 0 if all agree."""
    parser = argparse.ArgumentParser(prog="python -m tests.training.several_processes")
    parser.add_argument("parts", nargs="*", help=f"some of {PARTS}; all by default")
    parser.add_argument("--devices", type=int, choices=(2, 4), default=4)
    parser.add_argument("--model", help="a preset; llama_1b, or llama_tiny on a CPU")
    parser.add_argument("--cpu", action="store_true", help="simulated devices")
    args = parser.parse_args(argv)
    if unknown := {*args.parts} - {*PARTS}:
        parser.error(f"unknown parts {sorted(unknown)}; there are {PARTS}")
    out = Path(tempfile.mkdtemp(prefix="several-"))
    model, good = args.model or ("llama_tiny" if args.cpu else "llama_1b"), True
    machine = Machine(devices=args.devices, cpu=args.cpu, model=model)
    for part in args.parts or PARTS:
        run = OTHERS.get(part, functools.partial(train, part))
        good &= run(out / part, machine)
    if good:
        shutil.rmtree(out)
    else:
        print(f"they differ; logs in {out}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
