"""The planner's cost model beside the steps that were measured here.

    python -m benchmarks.publish.plan

No GPU is needed: the rows are those of ``benchmarks/results``, on H200s and H100s.
``set`` marks the rows by which a constant was set: `_ELEMENTWISE` of
`jaxscale.training.planning.cost_model`, by LLaMA 1B on one H200 and by a 70B layer on
four. All other constants are rates of single operations and counts of bytes, so the
other rows are held out. Memory has no constants.

The planner describes this library's program on these GPUs. Published rows of other
programs are no test of it: Megatron-LM, MaxText and PyTorch's FSDP recompute, overlap
and fill their pipelines in other ways.
"""

import dataclasses
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.measure import records
from benchmarks.training import config_of
from benchmarks.workloads.training_cases import CASES, DEFAULTS
from jaxscale.models import preset
from jaxscale.training.hardware import H100, H200, Hardware
from jaxscale.training.planning.cost_model import Layout, step_time
from jaxscale.training.planning.memory_model import least_memory


OURS: dict[str, dict[str, Any]] = {
    "jaxscale": {},
    "jaxscale_overlap": {},
    "jaxscale_xla": {"tensor_parallel": "xla"},
    "jaxscale_scan": {"remat": "attention"},
    "jaxscale_fp8": {"quantization": "fp8"},
    "jaxscale_fp8_blockwise": {"quantization": "fp8_blockwise"},
    "jaxscale_fp8_tensorwise": {"quantization": "fp8_tensorwise"},
}
"""Implementations of `benchmarks.training`, and what they change."""

FOLDERS = {"nvidia_h200": H200, "nvidia_h100_80gb_hbm3": H100}
"""Of results, and their GPU."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A measured step, and the model's."""

    device: str
    """Name of the GPU."""
    name: str
    """Case and implementation."""
    known: float
    """Milliseconds, measured."""
    predicted: float
    """Milliseconds by the model."""
    was_set: bool = False
    """Whether a constant was set by it."""
    peak: float | None = None
    """Bytes that a GPU had in use at most."""
    least: float | None = None
    """Bytes that are counted."""

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.predicted / self.known - 1


def measured() -> Iterator[Row]:
    """All stored steps of this library whose case there is, in the order of results.

    Left out are GPipe, which no plan has, and packed rows, which attend to less than
    the model counts.
    """
    cases = {records.key(case.name, case.params) for case in CASES}
    for folder, hardware in FOLDERS.items():
        for row in _rows(folder, "training"):
            given = DEFAULTS | row["params"]
            known = records.key(row["case"], row["params"]) in cases
            planned = given["schedule"] == "1f1b" and given["documents"] is None
            if known and planned and row["implementation"] in OURS:
                yield _trained(row, hardware)
        for row in _rows(folder, "training_loop"):
            if row["implementation"] == "by_hand":
                yield _trained(row | {"implementation": "jaxscale"}, hardware)
        for row in _rows(folder, "tensor_parallel_block"):
            form = {"xla_nccl": "xla", "mosaic_gpu": "fused"}.get(row["implementation"])
            if form and row["params"]["pass"] == "fwd_bwd":
                yield _block(row, hardware, form)


def _trained(row: dict[str, Any], hardware: Hardware) -> Row:
    name = row["implementation"]
    given = DEFAULTS | row["params"] | OURS[name]
    axes = {axis: given[axis] for axis in ("fsdp", "context", "tensor", "pipe")}
    layout = Layout(
        **axes,
        zero=given["zero"],
        chunks=given["chunks"],
        batch_size=given["batch"],
        rows=given["batch"] // given["microbatches"] // axes["fsdp"],
        remat=given["remat"],
        moment_bytes=4 if given["moments"] == "bfloat16" else 8,
        memory_kind=given["memory_kind"],
        quantization=given["quantization"],
    )
    model, length = config_of(row["params"]), given["seq_len"]
    time = step_time(model, length, layout, hardware, given["tensor_parallel"])
    peak = row["metrics"].get("peak_gib")
    return Row(
        device=hardware.name,
        name=f"{row['case']}, {name}",
        known=row["time_us"] / 1e3,
        predicted=1e3 * sum(time.values()),
        was_set=hardware is H200 and (row["case"], name) == ("llama_1b_4k", "jaxscale"),
        peak=None if peak is None else peak * 2**30,
        least=sum(least_memory(model, length, layout).values()),
    )


def _block(row: dict[str, Any], hardware: Hardware, form: Any) -> Row:
    """A layer without its vocabulary, and without an optimizer."""
    model = dataclasses.replace(preset("llama3_70b"), num_layers=1, vocab_size=4)
    layout = Layout(tensor=row["params"]["tp"], batch_size=1)
    parts = step_time(model, row["params"]["seq_len"], layout, hardware, form)
    return Row(
        device=hardware.name,
        name=f"70B layer, tensor {layout.tensor}, {form}",
        known=row["time_us"] / 1e3,
        predicted=1e3 * (sum(parts.values()) - parts["optimizer"]),
        was_set=hardware is H200 and layout.tensor == 4,
    )


def _rows(folder: str, name: str) -> list[dict[str, Any]]:
    path = records.RESULTS / folder / f"{name}.json"
    return list(records.full_rows(records.load(path))) if path.exists() else []


def errors(rows: Iterable[Row]) -> str:
    """Number of rows, mean and largest error."""
    found = [abs(row.error) for row in rows]
    return (
        f"{len(found)} rows, mean error {statistics.mean(found):.1%}, "
        f"worst {max(found):.1%}"
    )


def main() -> int:
    """Print every row with its error."""
    rows = list(measured())
    for row in rows:
        memory = ""
        if row.peak is not None and row.least is not None:
            memory = f"{row.least / 1e9:5.0f} of {row.peak / 1e9:4.0f} GB"
        print(
            f"{row.device:5} {row.name:42} {row.known:9.2f} {row.predicted:9.2f} ms "
            f"{row.error:+6.1%}  {memory}{'  set' * row.was_set}"
        )
    print(f"held out: {errors(row for row in rows if not row.was_set)}")
    print(f"set: {errors(row for row in rows if row.was_set)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
