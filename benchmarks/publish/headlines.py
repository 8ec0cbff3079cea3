"""The table of the README: a row a system, from the result files.

A row adds up the times of its cases, ours and those of each rival that has all of them,
and shows the rival that is fastest then. ``make tables`` writes it into the block
``<!-- table:headlines -->``.
"""

import dataclasses
import fnmatch
import pathlib
from collections.abc import Mapping

from benchmarks.measure import records


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """A row: what was timed, and where the rest stands."""

    system: str
    what: str
    page: str
    """Page and section with all rows, from the folder `docs`."""
    file: str
    """Stem of the result file."""
    cases: tuple[str, ...]
    params: Mapping[str, object] = dataclasses.field(default_factory=dict)
    ours: str = "mosaic_gpu"
    rivals: str = "*"
    """Pattern of their names."""
    metric: str | None = None
    """A metric to show beside the times."""


HEADLINES = (
    Headline(
        system="Flux",
        what="the four products of a LLaMA 70B layer with their communication, 8,192 "
        "tokens, 4 GPUs",
        page="flux-measured.md",
        file="collective_matmul",
        cases=tuple(f"llama70b_{name}" for name in ("qkv", "o", "gate_up", "down")),
        params={"tp": 4, "M": 8192},
        rivals="torch_*",
    ),
    Headline(
        system="ByteTransformer",
        what="BERT base, 16 texts of 205 to 1,024 tokens",
        page="bytetransformer-measured.md",
        file="encoder",
        cases=("bert_base_b16_l1024",),
        ours="jaxscale",
        rivals="torch_*",
    ),
    Headline(
        system="Flover",
        what="attention of a decoding step, LLaMA 3 8B, 128 requests of 1,024 tokens",
        page="kernels.md",
        file="paged_attention",
        cases=("llama3_8b_b128_c1024",),
    ),
    Headline(
        system="MegaScale",
        what="a training step of LLaMA 1.1B, 32,768 tokens, 1 GPU",
        page="training.md#what-was-measured",
        file="training",
        cases=("llama_1b_4k",),
        ours="jaxscale",
    ),
    Headline(
        system="MegaScale, fp8",
        what="the same step with matmuls in fp8",
        page="fp8.md#speed-of-a-step",
        file="training",
        cases=("llama_1b_4k",),
        ours="jaxscale_fp8",
    ),
    Headline(
        system="Tile-wise sparsity",
        what="8 blocks of LLaMA 3 8B that keep 50%, 4,096 tokens; bits a byte",
        page="tilewise-measured.md#speed-at-equal-accuracy",
        file="tile_sparse_layers",
        cases=("block",),
        params={"M": 4096, "mask": "tw", "sparsity": 0.5, "pass": "fwd"},
        ours="auto",
        rivals="dense",
        metric="bits_per_byte",
    ),
)

OURS = "jaxscale"
"""What names of ours begin with: in another precision or layout they are no rivals."""

NAMES = {
    "cudnn": "cuDNN",
    "dense": "dense, cuBLAS",
    "plain_jax": "plain JAX, cuDNN",
    "torch_async_tp": "PyTorch async TP",
    "torch_compile": "PyTorch, compiled",
    "torch_compile_graphs": "PyTorch, compiled, CUDA graphs",
    "torch_float8": "PyTorch, torchao float8",
    "torch_nccl": "PyTorch, NCCL",
    "torch_sdpa": "PyTorch SDPA",
}
"""How the table writes the rivals."""


def rows(headline: Headline, results: pathlib.Path) -> dict[str, list[records.Record]]:
    """The rows of each implementation that has all cases."""
    found: dict[str, dict[str, records.Record]] = {}
    path = results / f"{headline.file}.json"
    for row in records.full_rows(records.load(path)) if path.exists() else ():
        wanted = row["case"] in headline.cases and all(
            row["params"].get(name) == value for name, value in headline.params.items()
        )
        name = row["implementation"]
        rival = fnmatch.fnmatch(name, headline.rivals) and not name.startswith(OURS)
        if wanted and (name == headline.ours or rival):
            if row["case"] in found.setdefault(name, {}):
                raise ValueError(
                    f"{headline.system}: {row['case']} has two {name} rows"
                )
            found[name][row["case"]] = row
    return {
        name: list(cases.values())
        for name, cases in found.items()
        if len(cases) == len(headline.cases)
    }


def markdown(results: pathlib.Path, docs: str) -> str:
    """The table; `docs` is the way to the pages, as ``docs/``."""
    lines = ["| System | Measured | Ours | Best rival | Times faster | More |"]
    lines.append("|---|---|--:|--:|--:|---|")
    for headline in HEADLINES:
        found = rows(headline, results)
        times = {
            name: sum(row["time_us"] for row in each) for name, each in found.items()
        }
        if headline.ours not in times or len(times) < 2:
            line = [headline.system, headline.what, *["not yet measured"] * 3, "-"]
            lines.append("| " + " | ".join(line) + " |")
            continue
        ours = times.pop(headline.ours)
        rival = min(times, key=lambda name: times[name])
        cells = [_text(ours), f"{_text(times[rival])} ({NAMES[rival]})"]
        if headline.metric is not None:
            (first,), (second,) = found[headline.ours], found[rival]
            cells[0] += f", {first['metrics'][headline.metric]:.2f}"
            cells[1] += f", {second['metrics'][headline.metric]:.2f}"
        cells.append(f"{times[rival] / ours:.2f}")
        link = f"[all rows]({docs}{headline.page})"
        line = [headline.system, headline.what, *cells, link]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines) + "\n"


def _text(time_us: float) -> str:
    return f"{time_us / 1e3:.3g} ms" if time_us >= 1e3 else f"{time_us:.3g} us"
