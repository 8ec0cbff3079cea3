"""The table of the README: one row per task, from the result files.

A row adds up the times of its cases, ours and those of each baseline that has all of
them, and shows the baseline that is fastest then. ``make tables`` writes it into the
block ``<!-- table:headlines -->``.
"""

import dataclasses
import fnmatch
import pathlib
from collections.abc import Mapping

from benchmarks.measure import comparison, records
from benchmarks.publish.stale import History


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """A row: what was timed, and where the rest stands."""

    task: str
    what: str
    page: str
    """Page and section with all rows, from the folder `docs`."""
    file: str
    """Stem of the result file."""
    cases: tuple[str, ...]
    params: Mapping[str, object] = dataclasses.field(default_factory=dict)
    device: str | None = None
    """Folder of the result file; by default that of the table."""
    ours: str = "mosaic_gpu"
    baselines: str = "*"
    """Pattern of their names."""
    metric: str | None = None
    """A metric to show beside the times."""
    most_lost: float | None = None
    """Of masks and sparsities that `params` leave open, the fastest is shown whose
    metric is at most so much above the baseline's; ``{kept}`` and ``{mask}`` in `what`
    say which."""


H100 = "nvidia_h100_80gb_hbm3"

HEADLINES = (
    Headline(
        task="Train",
        what="step of LLaMA 3 8B, tensor-parallel, 16,384 tokens",
        page="scaling-measured.md#measured-on-gpus",
        file="training",
        cases=("llama3_8b_tp4",),
        device=H100,
        ours="jaxscale",
    ),
    Headline(
        task="Train",
        what="step of LLaMA 3 8B, FSDP, 32,768 tokens",
        page="scaling-measured.md#measured-on-gpus",
        file="training",
        cases=("llama3_8b_fsdp4",),
        device=H100,
        ours="jaxscale",
    ),
    Headline(
        task="Train",
        what="step of LLaMA 1.1B, 32,768 tokens",
        page="training.md#what-was-measured",
        file="training",
        cases=("llama_1b_4k",),
        ours="jaxscale",
    ),
    Headline(
        task="Train in fp8",
        what="the same step with fp8 matmuls",
        page="fp8.md#speed-of-a-step",
        file="training",
        cases=("llama_1b_4k",),
        ours="jaxscale_fp8",
    ),
    *(
        Headline(
            task=task,
            what=what,
            page="bytetransformer-measured.md",
            file="encode",
            cases=(case,),
            ours="jaxscale",
            baselines="torch_*",
        )
        for task, what, case in (
            (
                "Encode",
                "`Encoder.encode` of 16 texts of up to 250 tokens, BERT base",
                "bert_base_b16_l256",
            ),
            ("Encode one text", "the same call with 226 tokens", "bert_base_b1_l256"),
        )
    ),
    *(
        Headline(
            task=task,
            what=what,
            page="flover.md#measured",
            file="serving",
            cases=(case,),
            ours="jaxscale",
            baselines="vllm",
        )
        for task, what, case in (
            (
                "Serve",
                "512 requests with lengths like ShareGPT's, LLaMA 3.1 8B, "
                "each side's defaults",
                "saturated_defaults",
            ),
            ("Serve 128 at once", "the same with 128 slots on both sides", "saturated"),
        )
    ),
    Headline(
        task="Decode",
        what="attention of a decoding step, LLaMA 3 8B, 128 requests of 1,024 tokens",
        page="kernels.md",
        file="paged_attention",
        cases=("llama3_8b_b128_c1024",),
    ),
    Headline(
        task="Tensor-parallel matmuls",
        what="the four of a LLaMA 70B layer with their communication, 8,192 tokens",
        page="flux-measured.md",
        file="collective_matmul",
        cases=tuple(f"llama70b_{name}" for name in ("qkv", "o", "gate_up", "down")),
        params={"tp": 4, "M": 8192},
        baselines="torch_*",
    ),
    Headline(
        task="Prune",
        what="8 blocks of LLaMA 3 8B that keep {kept} ({mask}), 4,096 tokens; bits per "
        "byte",
        page="tilewise-measured.md#speed-at-equal-accuracy",
        file="tile_sparse_layers",
        cases=("block",),
        params={"M": 4096, "pass": "fwd"},
        ours="auto",
        baselines="dense",
        metric="bits_per_byte",
        most_lost=0.05,
    ),
)

OURS = "jaxscale"
"""What our names begin with: in another precision or layout they are no baselines."""

NAMES = {
    "cudnn": "cuDNN",
    "dense": "dense, cuBLAS",
    "plain_jax": "plain JAX, cuDNN",
    "torch_async_tp": "PyTorch async TP, no multicast",
    "torch_compile": "PyTorch, compiled",
    "torch_cuda_graph": "PyTorch, CUDA graph",
    "torch_compile_graphs": "PyTorch, compiled, CUDA graphs",
    "torch_float8": "PyTorch, torchao float8",
    "torch_nccl": "PyTorch, NCCL",
    "torch_sdpa": "PyTorch SDPA",
    "vllm": "vLLM",
}
"""How the table writes the baselines."""

GPUS = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
"""How the table writes the devices."""


def rows(headline: Headline, results: pathlib.Path) -> dict[str, list[records.Record]]:
    """The rows of each implementation that has all cases."""
    found: dict[str, dict[str, records.Record]] = {}
    folder = results.parent / headline.device if headline.device else results
    path = folder / f"{headline.file}.json"
    for row in records.full_rows(records.load(path)) if path.exists() else ():
        wanted = row["case"] in headline.cases and all(
            row["params"].get(name) == value for name, value in headline.params.items()
        )
        name = row["implementation"]
        other = fnmatch.fnmatch(name, headline.baselines) and not name.startswith(OURS)
        if wanted and (name == headline.ours or other):
            if row["case"] in found.setdefault(name, {}):
                raise ValueError(f"{headline.what}: {row['case']} has two {name} rows")
            found[name][row["case"]] = row
    return {
        name: list(cases.values())
        for name, cases in found.items()
        if len(cases) == len(headline.cases)
    }


def chosen(headline: Headline, results: pathlib.Path) -> Headline:
    """The headline, with the mask and the sparsity that are shown."""
    if headline.most_lost is None:
        return headline
    folder = results.parent / headline.device if headline.device else results
    path = folder / f"{headline.file}.json"
    every = records.full_rows(records.load(path)) if path.exists() else []
    none = headline.what.format(kept="less", mask="any mask")
    fastest = dataclasses.replace(headline, what=none, params={"mask": None})
    best = 0.0
    masks = [(r["params"].get("mask"), r["params"].get("sparsity")) for r in every]
    for mask, sparsity in dict.fromkeys(masks):
        params = {**headline.params, "mask": mask, "sparsity": sparsity}
        one = dataclasses.replace(headline, params=params)
        found = rows(one, results)
        ours = found.pop(headline.ours, [])
        if not ours or not found:
            continue
        (time, bits), *others = (
            (sum(row["time_us"] for row in each), each[0]["metrics"].get(one.metric))
            for each in (ours, *found.values())
        )
        other, least = min(others, key=lambda each: each[0])
        if None in (bits, least) or bits > least + headline.most_lost:
            continue
        if other / time > best:
            what = headline.what.format(kept=f"{1 - sparsity:.0%}", mask=mask)
            fastest, best = dataclasses.replace(one, what=what), other / time
    return fastest


def markdown(results: pathlib.Path, docs: str, history: History | None = None) -> str:
    """The table.

    Args:
        results: The folder of a device.
        docs: The way to the pages, as ``docs/``.
        history: Decides which of our times are marked as stale; None marks none.
    """
    head = ["Task", "Workload", "GPUs", "Ours", "Fastest baseline", "Speed-up", "More"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|---|--:|--:|--:|---|"]
    for headline in HEADLINES:
        headline = chosen(headline, results)
        found = rows(headline, results)
        times = {
            name: sum(row["time_us"] for row in each) for name, each in found.items()
        }
        if headline.ours not in times or len(times) < 2:
            line = [headline.task, headline.what, "-", *["not yet measured"] * 3, "-"]
            lines.append("| " + " | ".join(line) + " |")
            continue
        ours = times.pop(headline.ours)
        best = min(times, key=lambda name: times[name])
        first, second = found[headline.ours][0], found[best][0]
        cells = [_text(ours), f"{_text(times[best])} ({NAMES[best]})"]
        if history is not None and any(map(history.is_stale, found[headline.ours])):
            cells[0] += f" {comparison.STALE}"
        if headline.metric is not None:
            cells[0] += f", {first['metrics'][headline.metric]:.3f}"
            cells[1] += f", {second['metrics'][headline.metric]:.3f}"
        cells.append(f"{times[best] / ours:.2f}")
        gpus = f"{first['num_devices']} x {GPUS[first['device']]}"
        link = f"[all rows]({docs}{headline.page})"
        line = [headline.task, headline.what, gpus, *cells, link]
        lines.append("| " + " | ".join(line) + " |")
    if any(comparison.STALE in line for line in lines):
        lines += ["", f"{comparison.STALE_NOTE}."]
    return "\n".join(lines) + "\n"


def _text(time_us: float) -> str:
    if time_us >= 1e6:
        return f"{time_us / 1e6:.3g} s"
    return f"{time_us / 1e3:.3g} ms" if time_us >= 1e3 else f"{time_us:.3g} us"
