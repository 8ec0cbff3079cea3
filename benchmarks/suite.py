"""Many benchmarks in a given time: the commands behind the tables of the docs.

    python -m benchmarks.suite --minutes 9                  # begins with the targets
    python -m benchmarks.suite attention encoder --out DIR --commit HASH

Each GPU has a lane. First come the commands that need a GPU for themselves, one after
another, then those whose processes compile side by side and measure in turns
(`timing.turn`), at last, alone, those that need several GPUs. What has not finished in
time is ended: each command writes its rows case by case, so what was measured counts.
Commands write to folders of their own, which are merged at the end
(`benchmarks.records`), and their output lies there too.
"""

import argparse
import dataclasses
import os
import pathlib
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from benchmarks import records


PROCESSES = 3
"""That share a GPU: about what keeps it busy while the others compile."""

SHARING = (
    ("encoder", "encoder_steps"),
    ("varlen_attention", "tile_sparse_matmul", "tile_sparse_layers"),
)
"""Benchmarks that measure in turns. The first take wall times, which suffer from busy
neighbors, and compile only while nobody measures."""

RESERVED = 5.0
"""Seconds of the time given that are left for merging."""


@dataclasses.dataclass(frozen=True)
class Command:
    """One command line of a benchmark."""

    topic: str
    """What to select it by."""
    line: str
    """Module of `benchmarks` and arguments."""
    gpus: int = 1
    """That it needs; with more than one it runs alone."""

    @property
    def company(self) -> tuple[str, ...]:
        """Benchmarks that may run on its GPU meanwhile, if any."""
        name = self.line.split()[0]
        if self.gpus > 1:
            return ()
        return next((names for names in SHARING if name in names), ())


_ATTENTION = "--impl mosaic_gpu cudnn_packed cudnn_padded torch_varlen"
_SPARSE = "--impl mosaic_gpu triton dense torch_dense ideal"
_TRAINING = "--skip jaxscale_scan --samples 10"

COMMANDS = (
    Command(
        "attention",
        "varlen_attention --case dense_* --impl mosaic_gpu cudnn_packed cudnn_padded "
        "jax_sample torch_varlen torch_sdpa",
    ),
    Command("attention", f"varlen_attention --case bert_base_* {_ATTENTION}"),
    Command(
        "attention",
        f"varlen_attention --case llama_* prefill_* falcon_* {_ATTENTION}",
    ),
    *(
        Command(
            "encoder",
            f"encoder --model {model} --batch 16 --skip torch_eager "
            "torch_compile_graphs --samples 10",
        )
        for model in ("bert_base", "deberta_v3_base", "albert_base", "distilbert_base")
    ),
    Command("encoder", "encoder_steps --samples 10"),
    Command("encoder", "encoder_fusions --samples 10"),
    Command("sparse", "tile_sparse_layers --impl mosaic_gpu triton dense ideal"),
    Command(
        "sparse",
        "tile_sparse_matmul --case square_* llama3_8b_* --rows 4096 8192 "
        f"--sparsity 0.5 0.75 {_SPARSE} cusparselt_2_4 torch_bsr",
    ),
    Command(
        "sparse",
        "tile_sparse_matmul --case llama3_8b_up --rows 1 8 16 32 64 --sparsity 0.75 "
        f"{_SPARSE} tew int8_dense",
    ),
    Command("sparse", f"tile_sparse_matmul --case square_4096 --rows 2048 {_SPARSE}"),
    Command("matmul", "matmul"),
    Command("matmul", "quantized_matmul"),
    Command("attention", "paged_attention"),
    Command("serving", "move_pages"),
    Command(
        "serving",
        "serving --case token_* --impl jaxscale torch_static_graphs torch_continuous",
    ),
    Command(
        "serving",
        "serving --case constant poisson saturated --impl jaxscale contiguous "
        "concurrent static torch_static_graphs torch_continuous --samples 1",
    ),
    Command(
        "attention",
        f"varlen_attention --case wide_* long_tail_* bimodal_* {_ATTENTION}",
    ),
    Command(
        "attention",
        "varlen_attention --case uniform_* skewed_* zero_length_* constant_* "
        f"{_ATTENTION}",
    ),
    *(
        Command("collective", f"{line} --tp {gpus}", gpus)
        for gpus in (4, 2)
        for line in (
            "collective_matmul --rows 8192 2048 --skip auto",
            "collective_matmul --rows 16 64 512 --impl auto xla_nccl xla_lhs xla_ring",
            "tensor_parallel_block",
        )
    ),
    Command("training", f"training --case llama_1b_2k llama_1b_4k* {_TRAINING}"),
    Command("training", f"training --case llama3_8b_*4* {_TRAINING}", 4),
    Command("training", "training --case ablation_* --impl jaxscale --samples 10", 4),
    Command("training", f"training --case llama_1b_*p4* {_TRAINING}", 4),
    Command("training", f"training --case *p2 *p2_interleaved {_TRAINING}", 2),
    Command("training", "convergence --case bytes_34m"),
)
"""In the order of their importance."""


class Suite:
    """Runs commands until a time."""

    def __init__(self, folder: pathlib.Path, commit: str | None, seconds: float):
        self.folder, self.commit = folder, commit
        self.start = time.monotonic()
        self.end = self.start + seconds

    def run(self, number: int, command: Command, gpus: Sequence[int]) -> None:
        """Run a command on these GPUs, unless time is over."""
        left = self.end - time.monotonic()
        if left <= 0:
            print(f"no time for: {command.line}", flush=True)
            return
        name, *arguments = shlex.split(command.line)
        out = self.folder / f"{number:02d}_{name}"
        out.mkdir(parents=True, exist_ok=True)
        line = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
        line += ["--out", str(out)]
        line += ["--commit", self.commit] if self.commit else []
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
        if command.company:
            environment["BENCHMARK_LOCK"] = str(self.folder / f"gpu_{gpus[0]}.lock")
        with open(out / "log.txt", "w") as log:
            try:
                code = subprocess.run(
                    line,
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    timeout=left,
                    check=False,
                ).returncode
                ended = "done" if code == 0 else f"exit status {code}"
            except subprocess.TimeoutExpired:
                ended = "out of time"
        rows = len(re.findall(r" us  ", (out / "log.txt").read_text()))
        taken = time.monotonic() - self.start
        print(f"{taken:5.0f} s  {ended}, {rows} rows: {command.line}", flush=True)

    def run_all(self, commands: Sequence[Command], gpus: int) -> None:
        """Single GPUs first, then what needs several."""
        numbered = list(enumerate(commands))
        single = [(n, c) for n, c in numbered if c.gpus == 1]
        for company in ((), *SHARING):
            lane = [(n, c) for n, c in single if c.company == company]
            self._lanes(lane, gpus, PROCESSES if company else 1)
        for number, command in numbered:
            if 1 < command.gpus <= gpus:
                self.run(number, command, range(command.gpus))

    def _lanes(
        self, numbered: Sequence[tuple[int, Command]], gpus: int, processes: int
    ) -> None:
        waiting: queue.SimpleQueue[tuple[int, Command]] = queue.SimpleQueue()
        for one in numbered:
            waiting.put(one)

        def work(gpu: int) -> None:
            while True:
                try:
                    number, command = waiting.get_nowait()
                except queue.Empty:
                    return
                self.run(number, command, [gpu])

        workers = [
            threading.Thread(target=work, args=[gpu])
            for _ in range(processes)
            for gpu in range(gpus)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()


def number_of_gpus() -> int:
    """GPUs of this machine, 0 without a driver; none is touched."""
    if shutil.which("nvidia-smi") is None:
        return 0
    found = subprocess.run(
        ["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False
    )
    return len(found.stdout.splitlines())


def main(argv: Sequence[str] | None = None) -> int:
    """Run the commands of some topics, or all; the exit status is 1 without a GPU."""
    topics = list(dict.fromkeys(command.topic for command in COMMANDS))
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite")
    add = parser.add_argument
    add("topics", nargs="*", help=f"some of {topics}; all by default")
    add("--minutes", type=float, default=60.0, help="time for all (60)")
    add("--commit", help="the commit measured, where there is no git")
    add("--out", type=pathlib.Path, default=records.RESULTS, help="folder of results")
    args = parser.parse_args(argv)
    if unknown := sorted({*args.topics} - {*topics}):
        parser.error(f"unknown topics {unknown}; there are: {topics}")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes}, expected above 0")
    if not (gpus := number_of_gpus()):
        print("there is no GPU", file=sys.stderr)
        return 1
    chosen = [c for c in COMMANDS if not args.topics or c.topic in args.topics]
    folder = pathlib.Path(tempfile.mkdtemp(prefix="benchmarks_"))
    print(f"{len(chosen)} commands on {gpus} GPUs; logs in {folder}", flush=True)
    Suite(folder, args.commit, 60 * args.minutes - RESERVED).run_all(chosen, gpus)
    found = sorted(str(path) for path in folder.glob("*/*/*.json"))
    records.main(found, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
