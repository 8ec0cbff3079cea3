"""What to expect of the Triton kernels on GPUs that were not measured: a table.

The least time of a kernel is that of its operations at the peak of the tensor cores or
of its bytes at the rate of the memory, whichever is longer, both of the data sheets.
Where an H200 has run the kernel in Triton, its time over the least time there is taken
for other GPUs too. ``make tables`` writes the table into ``<!-- table:estimates -->``.
"""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.measure import records
from jaxscale.training.hardware import peak_flops
from pallas_kernels.layer_norm.specs import SPECS as LAYER_NORM
from pallas_kernels.paged_attention.specs import SPECS as PAGED
from pallas_kernels.quantized_matmul.specs import SPECS as QUANTIZED
from pallas_kernels.tile_sparse_matmul.specs import SPECS as TILE_SPARSE
from pallas_kernels.varlen_attention.specs import SPECS as ATTENTION


MEMORY: Mapping[str, float] = {"A100": 2.039e12, "L40S": 0.864e12, "H200": 4.8e12}
"""Bytes a second of the data sheets, of the A100 with 80 GB."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """What a kernel does at least."""

    op: str
    """Also the stem of the result file."""
    case: str
    """In the result file."""
    flops: float
    nbytes: float
    """Bytes that it reads and writes once."""
    params: Mapping[str, object] = dataclasses.field(default_factory=dict)
    """Of its rows."""

    def least_us(self, gpu: str) -> float:
        """The least time on a GPU of `MEMORY`, in microseconds."""
        peak = peak_flops(f"NVIDIA {gpu}")
        assert peak is not None
        return 1e6 * max(self.flops / peak, self.nbytes / MEMORY[gpu])


def works(results: pathlib.Path) -> Iterator[Work]:
    """A kernel or two of each op, in bfloat16.

    Args:
        results: folder of the result files of the H200, of which one says what pruning
            kept.
    """
    attention = {spec.name: spec for spec in ATTENTION}
    for name in ("dense_d128_l4096_causal", "bert_base_b16_l512"):
        spec = attention[name]
        row = 2 * spec.num_heads * spec.head_dim  # bytes of q, of k, ...
        tokens = sum(spec.lengths_q)
        for what, arrays, flops in (("fwd", 4, 1.0), ("fwd_bwd", 12, 3.5)):
            yield Work(
                op="varlen_attention",
                case=name,
                flops=flops * spec.flops(),
                nbytes=arrays * row * tokens,
                params={"pass": what},
            )
    paged = {spec.name: spec for spec in PAGED}
    for name in ("llama3_8b_b32_c4096", "llama3_8b_b128_c1024"):
        spec = paged[name]
        pairs = spec.batch * spec.visible * spec.num_heads
        flops, nbytes = 4 * spec.head_dim * pairs, spec.kv_bytes()
        yield Work(op="paged_attention", case=name, flops=flops, nbytes=nbytes)
    yield tile_sparse(_rows(results, "tile_sparse_matmul"))
    quantized = {spec.name: spec for spec in QUANTIZED}
    for name in ("llama3_8b_gate_up_int8_m32", "llama3_8b_gate_up_int8_m2048"):
        spec = quantized[name]
        yield Work(
            op="quantized_matmul",
            case=name,
            flops=2 * spec.m * spec.n * spec.k,
            nbytes=spec.n * spec.k + 2 * spec.m * (spec.n + spec.k),
        )
    spec = next(s for s in LAYER_NORM if s.name == "bert_base_19902")
    yield Work(op="layer_norm", case=spec.name, flops=0, nbytes=4 * spec.t * spec.d)


def tile_sparse(rows: Iterable[Mapping[str, Any]]) -> Work:
    """The layers of a pruned model, or a layer of a spec where they have no row."""
    params = {"M": 4096, "mask": "tw", "sparsity": 0.75}
    for row in rows:
        if row["case"] == "llama3_8b_up" and params.items() <= row["params"].items():
            m, n, k, layers = (row["params"][x] for x in ("M", "N", "K", "layers"))
            share = row["metrics"].get("multiplied")
            if share:
                return Work(
                    op="tile_sparse_matmul",
                    case="llama3_8b_up",
                    flops=2 * m * n * k * layers * share,
                    nbytes=2 * layers * (m * (n + k) + n * k * share),
                    params=params,
                )
    spec = next(s for s in TILE_SPARSE if s.name == "llama3_8b_up_m4096_s75")
    return Work(
        op="tile_sparse_matmul",
        case=spec.name,
        flops=2 * spec.m * spec.room * spec.n,
        nbytes=2 * (spec.m * (spec.k + spec.n) + spec.room * spec.n),
    )


def over_least(work: Work, results: pathlib.Path) -> float | None:
    """Time of the kernel in Triton on the H200 over the least time, if measured.

    Args:
        work: the kernel.
        results: folder of the result files of the H200.
    """
    for row in _rows(results, work.op):
        same = work.params.items() <= row["params"].items()
        chosen = row["case"] == work.case and row["implementation"] == "triton"
        if chosen and same and row["time_us"]:
            return row["time_us"] / work.least_us("H200")
    return None


def _rows(results: pathlib.Path, op: str) -> list[Mapping[str, Any]]:
    path = results / f"{op}.json"
    return records.load(path)["rows"] if path.exists() else []


def markdown(results: pathlib.Path) -> str:
    """The table.

    Args:
        results: folder of the result files of the H200.
    """
    head = ["op", "case", "MB", "GFLOP", *MEMORY, "Triton on the H200 / least"]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(head) - 2)]
    for work in works(results):
        factor = over_least(work, results)
        times = [f"{(factor or 1.0) * work.least_us(gpu):.0f}" for gpu in MEMORY]
        if factor is None:
            times = [f"≥ {time}" for time in times]
        cells = [
            f"`{work.op}`",
            " ".join([work.case, *map(str, work.params.values())]),
            f"{work.nbytes / 1e6:.0f}",
            f"{work.flops / 1e9:.0f}",
            *times,
            "not measured" if factor is None else f"{factor:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
