"""The rows that are missing or stale, measured in a given time.

    python -m benchmarks.publish.suite --plan                # lists them, in order
    python -m benchmarks.publish.suite --minutes 25          # measures what fits
    python -m benchmarks.publish.suite attention encoder --out DIR --commit HASH

`benchmarks.publish.due` says what is due. What the README shows comes first, then what
the docs show, then the rest; among these the order is that of `COMMANDS`, and ours
stand before their rivals. Each case's rows are written when it ends, so a run that is
cut off loses the case in progress alone, and the same command goes on behind it. What
gave no row is noted in ``attempts.jsonl`` of the folder of results, and is not tried
again there at the same commit.

Where there is no git, a plan that was written elsewhere is read:

    python -m benchmarks.publish.suite --plan --save plan.json
    python -m benchmarks.publish.suite --load plan.json --commit HASH --out DIR

Each GPU has a lane. Neighbors in the order whose processes may compile side by side do
so, and measure in turns (`timing.turn`); what needs several GPUs runs alone.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from benchmarks.measure import command, records
from benchmarks.measure.harness import OPTIONAL
from benchmarks.publish import due, tables
from benchmarks.publish.due import Due


PROCESSES = 3
"""That share a GPU: about what keeps it busy while the others compile."""

SHARING = (
    ("encoder", "encoder_steps"),
    ("varlen_attention", "tile_sparse_matmul", "tile_sparse_layers"),
)
"""Benchmarks that measure in turns. The first take wall times, which suffer from busy
neighbors, and compile only while nobody measures."""

PATIENCE, HANGS = 120.0, 3.0
"""Seconds that a process is given, and how many times its estimate in addition."""


def company(name: str, gpus: int) -> tuple[str, ...]:
    """Benchmarks that may run on the GPU of one meanwhile, if any."""
    if gpus > 1:
        return ()
    return next((names for names in SHARING if name in names), ())


_ATTENTION = (
    "--impl mosaic_gpu mosaic_gpu_any_order cudnn_packed cudnn_padded torch_varlen "
    "tokamax flash_attn_3 flash_attn_4 flash_attn_4_deterministic"
)
_TRAINING = "--skip jaxscale_scan jaxscale_fp8* --samples 10"

COMMANDS: tuple[tuple[str, str], ...] = (
    (
        "attention",
        "varlen_attention --case dense_* --impl mosaic_gpu mosaic_gpu_any_order "
        "mosaic_gpu_static cudnn_packed cudnn_padded jax_sample torch_varlen "
        "torch_sdpa flash_attn_3 flash_attn_4 flash_attn_4_deterministic tokamax",
    ),
    ("attention", f"varlen_attention --case bert_base_* {_ATTENTION}"),
    (
        "attention",
        f"varlen_attention --case llama_* prefill_* falcon_* deepseek_* {_ATTENTION}",
    ),
    (
        "attention",
        f"varlen_attention --case modernbert_* gpt_oss_* gemma2_* mpt_* {_ATTENTION} "
        "xla_mask torch_sdpa torch_flex",
    ),
    (
        "attention",
        f"varlen_attention --case whole_* {_ATTENTION} mosaic_gpu_static xla_mask",
    ),
    *(
        (
            "encoder",
            f"encoder --model {model} --batch 16 --skip torch_eager --samples 10",
        )
        for model in ("bert_base", "deberta_v3_base", "albert_base", "distilbert_base")
    ),
    ("encoder", "encode"),
    ("encoder", "encode_timeline"),
    ("encoder", "encoder_service"),
    ("training", "fine_tuning"),
    ("training", "training_loop"),
    ("attention", "disentangled_attention"),
    ("encoder", "layer_norm"),
    ("encoder", "encoder_steps --samples 10"),
    ("encoder", "encoder_fusions --samples 10"),
    *(
        ("sparse", line)
        for mask in ("tw --sparsity 0.5", "tw", "tew")
        for baselines in (" cusparselt_2_4 int8" if "0.5" in mask else "",)
        for line in (
            f"tile_sparse_layers --case swiglu block --pass fwd --mask {mask} "
            f"--samples 15 --impl auto dense matmul_only{baselines}",
            "tile_sparse_matmul --case llama3_8b_up llama3_8b_down --rows 4096 32 1 "
            f"--mask {mask} --samples 15 --impl auto dense torch_dense{baselines}",
        )
    ),
    (
        "sparse",
        "tile_sparse_matmul --case llama3_8b_query llama3_8b_out --rows 4096 "
        "--samples 15 --impl auto dense torch_dense",
    ),
    (
        "sparse",
        "tile_sparse_layers --case swiglu --pass fwd_bwd --mask tw "
        "--impl auto dense --samples 15",
    ),
    ("matmul", "matmul"),
    ("matmul", "scaled_matmul"),
    ("matmul", "quantized_matmul"),
    ("attention", "paged_attention"),
    ("serving", "decode_layer"),
    (
        "serving",
        "serving --case token_* --impl jaxscale torch_continuous vllm",
    ),
    ("serving", "serving --case token_*_tp2 --impl jaxscale low_latency xla_nccl"),
    (
        "serving",
        "serving --case constant_* poisson_* saturated --impl jaxscale "
        "concurrent static torch_continuous --samples 1",
    ),
    (
        "serving",
        "serving --case poisson_20ms saturated* half_load all_at_once_* --impl "
        "jaxscale vllm",
    ),
    (
        "attention",
        f"varlen_attention --case wide_* long_tail_* bimodal_* {_ATTENTION}",
    ),
    (
        "attention",
        "varlen_attention --case uniform_* skewed_* zero_length_* constant_* "
        f"{_ATTENTION}",
    ),
    *(
        ("collective", f"{line} --tp {gpus}")
        for gpus in (4, 2)
        for line in (
            "collective_matmul --rows 8192 2048 --skip auto",
            "collective_matmul --rows 16 64 512 --impl mosaic_gpu auto xla_nccl "
            "xla_lhs xla_ring xla_windowed xla_one_shot low_latency torch_nccl",
            "tensor_parallel_block",
        )
    ),
    ("training", f"training --case llama_1b_2k llama_1b_4k* {_TRAINING}"),
    (
        "training",
        "training --case llama_1b_2k llama_1b_4k llama3_8b_bf16_moments "
        "--impl jaxscale jaxscale_fp8 jaxscale_fp8_tensorwise --samples 10",
    ),
    ("training", f"training --case llama3_8b_*4* {_TRAINING}"),
    ("training", "training --case ablation_* --impl jaxscale --samples 10"),
    ("training", f"training --case llama_1b_*p4* {_TRAINING}"),
    ("training", f"training --case *p2 *p2_interleaved {_TRAINING}"),
    ("training", "convergence --case bytes_34m"),
    ("training", "convergence --case fp8_10m"),
)
"""Topic, and module of `benchmarks` with its arguments, the most important first."""


class Process:
    """One process of a benchmark, and the cases that it measures."""

    def __init__(self, number: int, arguments: list[str], cases: list[Due]):
        self.number, self.arguments, self.cases = number, arguments, cases
        self.name, self.gpus = cases[0].benchmark.name, cases[0].gpus

    @property
    def seconds(self) -> float:
        """Estimate."""
        return due.START + sum(case.seconds for case in self.cases)

    @property
    def line(self) -> str:
        """Module and arguments."""
        return " ".join([self.name, *self.arguments])


class Suite:
    """Runs processes until a time."""

    def __init__(
        self, out: pathlib.Path, commit: str, seconds: float, logs: pathlib.Path
    ):
        self.out, self.commit, self.logs = out, commit, logs
        self.start = time.monotonic()
        self.end = self.start + seconds
        self.children: set[subprocess.Popen] = set()

    def run(self, process: Process, gpus: Sequence[int]) -> None:
        """Run a process on these GPUs, unless not even its first case fits."""
        left = self.end - time.monotonic()
        if due.START + process.cases[0].seconds > left:
            print(f"no time for: {process.line}", flush=True)
            return
        line = [sys.executable, "-m", f"benchmarks.{process.name}", *process.arguments]
        line += ["--out", str(self.out), "--commit", self.commit]
        line += ["--attempts", str(self.out / ATTEMPTS)]
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if company(process.name, process.gpus):
            environment["BENCHMARK_LOCK"] = str(self.logs / f"gpu_{gpus[0]}.lock")
        log = self.logs / f"{process.number:03d}_{process.name}.txt"
        limit = PATIENCE + HANGS * process.seconds
        with open(log, "w") as file:
            child = subprocess.Popen(
                line,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.children.add(child)
            guard = _guard(child)
            try:
                code = child.wait(min(left, limit))
                ended = "done" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                code = -1 if limit < left else 0
                ended = "it hangs" if limit < left else "out of time"
            finally:  # with the processes that it started, which hold the GPU
                _kill(child)
                self.children.discard(child)
                with guard:
                    guard.kill()
        text = log.read_text(errors="replace")
        if code < 0 and self.end > self.start:
            self._note_the_broken(process)
        taken, rows = time.monotonic() - self.start, len(re.findall(r" us  ", text))
        print(f"{taken:5.0f} s  {ended}, {rows} rows: {process.line}", flush=True)

    def _note_the_broken(self, process: Process) -> None:
        """The first case without a row took the process with it: not again."""
        device = self.out / device_folder()
        tried = records.attempts(self.out / ATTEMPTS, self.commit)
        for one in due.since(process.cases, [device], self.commit, tried):
            if one.rows:
                case, name = one.case, one.benchmark.name
                path = self.out / ATTEMPTS
                records.note_attempt(path, self.commit, name, case, one.rows)
                return

    def run_all(self, processes: Sequence[Process], gpus: int) -> None:
        """Run them in order; neighbors that may share a GPU do."""

        def lanes(process: Process) -> tuple:
            return process.gpus, company(process.name, process.gpus)

        for (size, shared), group in itertools.groupby(processes, lanes):
            if size == 1:
                self._lanes(list(group), gpus, PROCESSES if shared else 1)
                continue
            for process in group:
                self.run(process, range(size))

    def _lanes(self, processes: Sequence[Process], gpus: int, each: int) -> None:
        waiting: queue.SimpleQueue[Process] = queue.SimpleQueue()
        for one in processes:
            waiting.put(one)

        def work(gpu: int) -> None:
            while True:
                try:
                    process = waiting.get_nowait()
                except queue.Empty:
                    return
                self.run(process, [gpu])

        workers = [
            threading.Thread(target=work, args=[gpu])
            for _ in range(each)
            for gpu in range(gpus)
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException:  # Ctrl-C, or a signal
            self.end = self.start
            for child in list(self.children):
                _kill(child)
            raise


def _guard(child: subprocess.Popen) -> subprocess.Popen:
    """A process that ends a child's group once this one is gone, killed or not."""
    return subprocess.Popen(
        ["sh", "-c", f"read _; kill -s KILL -- -{child.pid}"],
        stdin=subprocess.PIPE,  # it ends with the process that holds the other side
        start_new_session=True,
    )


def _kill(child: subprocess.Popen) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def gpu_names() -> list[str]:
    """GPUs of this machine, none without a driver; they are not touched."""
    if shutil.which("nvidia-smi") is None:
        return []
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [] if found.returncode else found.stdout.split("\n")[:-1]


ATTEMPTS = "attempts.jsonl"
"""In the folder of results: what gave no row."""


def device_folder() -> str:
    """Where the results of this machine lie, or else those of the docs."""
    names = gpu_names()
    return records.slug(names[0]) if names else tables.DEFAULT_DEVICE


def show(found: Sequence[Due], gpus: int | None) -> None:
    """Print the cases that are due, and what they need together."""
    left = [one for one in found if one.rows]
    for one in left:
        cited = ("README", "docs", "-")[one.cited]
        many = f"{one.gpus} GPUs" if one.gpus > 1 else "1 GPU"
        print(f"{one.seconds / 60:5.1f} min  {many:6}  {cited:6}  {one}")
    states = [one.states[name] for one in left for name in one.rows]
    missing = states.count(due.MISSING)
    started = [Process(0, *each) for each in due.processes(left)]
    for size in sorted({process.gpus for process in started}):
        minutes = sum(p.seconds for p in started if p.gpus == size) / 60
        skipped = gpus is not None and size > gpus
        note = f"; skipped, there are {gpus}" if skipped else ""
        print(f"{minutes:.0f} minutes on {size} GPU{'s' * (size > 1)}{note}")
    print(
        f"{len(left)} of {len(found)} cases: {missing} rows are missing, "
        f"{len(states) - missing} stale. Minutes are those of earlier rows, or else "
        f"{due.OTHER_SECONDS:g} s a row ({', '.join(_guesses())})"
    )


def _guesses() -> list[str]:
    return [f"{name} {seconds:g} s" for name, seconds in due.SECONDS.items()]


def _parser() -> argparse.ArgumentParser:
    topics = records.ordered(topic for topic, _ in COMMANDS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish.suite")
    add = parser.add_argument
    add("topics", nargs="*", help=f"some of {topics}; all by default")
    add("--plan", action="store_true", help="list what is due and measure nothing")
    add("--all", action="store_true", help="fresh rows are due too")
    add("--minutes", type=float, default=60.0, help="time for all (60)")
    add("--save", type=pathlib.Path, help="with --plan: write the list to this file")
    add("--load", type=pathlib.Path, help="read the list, where there is no git")
    add(
        "--with",
        nargs="+",
        dest="awaited",
        default=[],
        choices=OPTIONAL,
        help="with --plan: packages of rivals that the other machine has",
    )
    add("--commit", help="the commit measured, where there is no git")
    add("--out", type=pathlib.Path, default=records.RESULTS, help="folder of results")
    return parser


def _lines(args: argparse.Namespace) -> list[tuple[str, str]]:
    return [one for one in COMMANDS if not args.topics or one[0] in args.topics]


def stale_elsewhere(lines: Sequence[tuple[str, str]]) -> dict[str, list[Due]]:
    """Cases of the other GPUs whose rows are stored, by the folder of each."""
    folders = sorted(records.RESULTS.glob("nvidia_*"))
    return {
        folder.name: due.plan(
            lines, [folder], due.History(), frozenset(), stored_only=True
        )
        for folder in folders
        if folder.name != device_folder()
    }


def _found(args: argparse.Namespace, commit: str) -> list[Due]:
    """The plan of the topics chosen."""
    lines = _lines(args)
    device = device_folder()
    folders = [folder / device for folder in dict.fromkeys([records.RESULTS, args.out])]
    tried = records.attempts(args.out / ATTEMPTS, commit)
    if args.load:
        found = due.load(args.load, folders, commit, tried)
        found = [one for one in found if not args.topics or one.topic in args.topics]
        return due.possible(found, args.awaited)
    found = due.plan(lines, folders, due.History(), tried, commit)
    if args.all:
        found = due.since(due.again(found), folders, commit, tried)
    return due.possible(found, args.awaited)


def main(argv: Sequence[str] | None = None) -> int:
    """List or measure what is due; the exit status is 1 if that cannot be."""
    topics = records.ordered(topic for topic, _ in COMMANDS)
    parser = _parser()
    args = parser.parse_args(argv)
    if unknown := sorted({*args.topics} - {*topics}):
        parser.error(f"unknown topics {unknown}; there are: {topics}")
    if not args.minutes > 0:
        parser.error(f"--minutes {args.minutes}, expected above 0")
    if args.awaited and not args.plan:
        parser.error("--with says what another machine has: give --plan too")
    if args.save and not args.plan:
        parser.error("--save writes a list: give --plan too")
    names = gpu_names()
    if not names and not args.plan:
        print("there is no GPU; --plan lists what one would measure", file=sys.stderr)
        return 1
    commit = command.commit(args.commit)
    try:
        found = _found(args, commit)
    except (ValueError, FileNotFoundError) as error:
        print(f"{error}; nothing was measured", file=sys.stderr)
        return 1
    if args.plan:
        show(found, len(names) or None)
        if not args.load:
            for device, others in stale_elsewhere(_lines(args)).items():
                print(f"\nStored rows of {device}, which such a GPU measures:")
                show(others, None)
        if args.save:
            due.save(found, args.save)
        return 0
    left = [one for one in found if one.rows]
    if skipped := [one for one in left if one.gpus > len(names)]:
        print(f"{len(skipped)} cases need more than {len(names)} GPUs")
    fit = [one for one in left if one.gpus <= len(names)]
    made = [Process(i, *each) for i, each in enumerate(due.processes(fit))]
    logs = pathlib.Path(tempfile.mkdtemp(prefix="benchmarks_"))
    print(f"{len(fit)} cases on {len(names)} GPUs; logs in {logs}", flush=True)
    Suite(args.out, commit, 60 * args.minutes, logs).run_all(made, len(names))
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children are ended too
    raise SystemExit(main())
