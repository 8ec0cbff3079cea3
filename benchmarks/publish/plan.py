"""The planner's cost model beside what was published and what was measured here.

    python -m benchmarks.publish.plan

No GPU is needed: the rows are those of MegaScale's tables 2 and 3 and figure 9 (arXiv
2402.15627), and of ``benchmarks/results``, on H200s and H100s. ``set`` marks rows by
which constants were set; the others are predictions.

What was set by what: the rates of `jaxscale.training.hardware.A100` by the first and
the fourth row of Megatron-LM in table 2; `MEGATRON` by the same rows and by the first
of table 3, `MEGASCALE` by the steps of table 3, one constant a step; `elementwise` of
`JAXSCALE_XLA` by the first row of training and the rows of the block. Memory has no
constants, but its form (gradients take the place of activations) was chosen with these
rows in view.
"""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxscale.models import preset
from jaxscale.models.config import DecoderConfig
from jaxscale.training.hardware import A100, H100, H200, Hardware, mfu
from jaxscale.training.planning.cost_model import (
    JAXSCALE_FUSED,
    JAXSCALE_XLA,
    Layout,
    Program,
    Remat,
    step_time,
)


RESULTS = Path(__file__).parents[1] / "results"

# Megatron-LM as the paper ran it. Its last stage alone has the output projection.
MEGATRON = Program(
    name="Megatron-LM",
    split_vocabulary=False,
    elementwise=2.2,
    fixed=0.8,
    jitter=0.01,
)
# In table 2 and figure 9 the network is tuned for MegaScale alone, in table 3 for both.
UNTUNED = dataclasses.replace(MEGATRON, network=0.5)
MEGASCALE = dataclasses.replace(
    MEGATRON,
    name="MegaScale",
    tensor_exposed=0.25,
    pipe_exposed=0.1,
    step_exposed=1 / 6,
    elementwise=1.0,
    fixed=0.6,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A number that somebody measured, and the model's."""

    source: str
    """Where it stands."""
    name: str
    """Which row it is."""
    unit: str
    """Of both numbers."""
    known: float
    """What was measured."""
    predicted: float
    """What the model says."""
    was_set: bool
    """Whether constants were set by it."""

    @property
    def error(self) -> float:
        """Relative error of the model."""
        return self.predicted / self.known - 1


def gpt(layers: int, width: int, heads: int) -> DecoderConfig:
    """GPT as in the paper's table 1."""
    return DecoderConfig(
        vocab_size=64_000,
        d_model=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=width // heads,
        d_ff=4 * width,
        max_seq_len=2048,
        norm="layernorm",
        activation="gelu",
        position="learned",
    )


GPT_175B = gpt(96, 12_288, 128)
GPT_530B = gpt(105, 20_480, 160)


def modern(model: DecoderConfig) -> DecoderConfig:
    """With the parallel block and the window, whose size the paper does not give."""
    return dataclasses.replace(model, parallel_block=True, window=512)


def seconds(
    model: DecoderConfig,
    seq_len: int,
    layout: Layout,
    hardware: Hardware,
    program: Program,
) -> float:
    """Seconds of a step."""
    return sum(step_time(model, seq_len, layout, hardware, program).values())


def _mfu(model: DecoderConfig, layout: Layout, program: Program) -> float:
    """The paper's MFU in per cent: it counts the causal half, and no window."""
    taken = seconds(model, 2048, layout, A100, program)
    flops = dataclasses.replace(model, window=None).flops_per_token(2048, causal=True)
    rate = layout.batch_size * 2048 / taken / layout.gpus
    return 100 * mfu(rate, flops, A100.peak)


def _layout(gpus: int, batch_size: int, pipe: int, chunks: int) -> Layout:
    return Layout(
        fsdp=gpus // (8 * pipe),
        pipe=pipe,
        tensor=8,
        chunks=chunks,
        zero=1,
        batch_size=batch_size,
    )


TABLE_2 = (
    (768, 256, 40.0, 32.0),
    (768, 512, 21.2, 16.5),
    (768, 768, 15.2, 11.5),
    (768, 1024, 11.9, 8.9),
    (6144, 3072, 29.02, 23.66),
    (6144, 6144, 14.78, 12.21),
    (6144, 8192, 12.24, 9.56),
    (6144, 12288, 8.57, 6.34),
)
"""Rows of a batch, GPUs, seconds of Megatron-LM and of MegaScale; 175B."""

TABLE_3: tuple[tuple[str, float, dict[str, Any], dict[str, Any], int], ...] = (
    ("baseline", 47.7, {}, {}, 256),
    ("parallel block", 52.3, {"parallel_block": True}, {}, 256),
    ("sliding window", 53.3, {"window": 512}, {}, 256),
    ("tensor overlap", 55.5, {}, {"tensor_exposed": 0.25}, 256),
    ("pipeline overlap", 58.0, {}, {"pipe_exposed": 0.1}, 256),
    ("data overlap", 59.5, {}, {"step_exposed": 1 / 6}, 256),
    ("efficient operators", 61.2, {}, {"elementwise": 1.0}, 256),
    ("misc", 62.3, {}, {"fixed": 0.6}, 256),
    ("LAMB, 3x batch", 65.3, {}, {}, 768),
)
"""Step, MFU, what it changes of model and program, rows of a batch; 256 GPUs."""

FIGURE_9 = ((2240, 49.2, 54.3), (4480, 48.8, 54.1), (11200, 48.2, 54.3))
"""GPUs, MFU of Megatron-LM and of MegaScale; 530B, as many rows as GPUs."""


def published() -> Iterator[Row]:
    """MegaScale's 31 rows."""
    for batch_size, gpus, base, ours in TABLE_2:
        layout = _layout(gpus, batch_size, pipe=8, chunks=6)
        for program, model, known in (
            (UNTUNED, GPT_175B, base),
            (MEGASCALE, modern(GPT_175B), ours),
        ):
            yield Row(
                source="table 2",
                name=f"{program.name}, {gpus} GPUs",
                unit="s",
                known=known,
                predicted=seconds(model, 2048, layout, A100, program),
                was_set=program is UNTUNED and gpus in (256, 1024),
            )
    model, program = GPT_175B, MEGATRON
    for name, known, of_model, of_program, batch_size in TABLE_3:
        model = dataclasses.replace(model, **of_model)
        program = dataclasses.replace(program, **of_program)
        layout = _layout(256, batch_size, pipe=8, chunks=6)
        yield Row(
            source="table 3",
            name=name,
            unit="% MFU",
            known=known,
            predicted=_mfu(model, layout, program),
            was_set=True,
        )
    for gpus, base, ours in FIGURE_9:
        layout = _layout(gpus, gpus, pipe=35, chunks=3)
        for program, model, known in (
            (UNTUNED, GPT_530B, base),
            (MEGASCALE, modern(GPT_530B), ours),
        ):
            yield Row(
                source="figure 9",
                name=f"{program.name}, {gpus} GPUs",
                unit="% MFU",
                known=known,
                predicted=_mfu(model, layout, program),
                was_set=False,
            )


def measured() -> Iterator[Row]:
    """Times of training and of a block on H200s, from the stored results."""
    for row, layout, model in _trained():
        yield Row(
            source="training",
            name=f"{row['case']}, {row['implementation']}",
            unit="ms",
            known=row["time_us"] / 1e3,
            predicted=1e3
            * seconds(model, row["params"]["seq_len"], layout, H200, JAXSCALE_XLA),
            was_set=row["case"] == "llama_1b_4k" and layout.remat == "none",
        )
    # A layer without its vocabulary, and without an optimizer.
    block = dataclasses.replace(preset("llama3_70b"), num_layers=1, vocab_size=4)
    layout = Layout(tensor=4, batch_size=1)
    programs = {"xla_nccl": JAXSCALE_XLA, "mosaic_gpu": JAXSCALE_FUSED}
    for row in _rows("tensor_parallel_block"):
        if row["params"]["pass"] == "fwd_bwd" and row["implementation"] in programs:
            program = programs[row["implementation"]]
            parts = step_time(block, 8192, layout, H200, program)
            yield Row(
                source="70B block, TP 4",
                name=row["implementation"],
                unit="ms",
                known=row["time_us"] / 1e3,
                predicted=1e3 * (sum(parts.values()) - parts["optimizer"]),
                was_set=True,
            )


def on_h100s() -> Iterator[Row]:
    """Times of training on one and on four H100s, from the stored results.

    GPipe is no plan.
    """
    for row in _rows("training", H100):
        params = row["params"]
        if row["implementation"] != "jaxscale" or "schedule" in params:
            continue
        model = preset(params["model"])
        model = dataclasses.replace(
            model,
            parallel_block=params.get("parallel", model.parallel_block),
            window=params.get("window", model.window),
        )
        sizes = {axis: params.get(axis, 1) for axis in ("fsdp", "pipe", "tensor")}
        batch, parts = params["batch"], params.get("microbatches", 1)
        layout = Layout(
            **sizes,
            chunks=params.get("chunks", 1),
            batch_size=batch,
            rows=batch // parts // sizes["fsdp"],
            remat=params.get("remat", "none"),
        )
        fused = params.get("tensor_parallel", "fused") == "fused"
        program = JAXSCALE_FUSED if fused and layout.tensor > 1 else JAXSCALE_XLA
        yield _on_h100s(row, model, layout, program)
    for row in _rows("training_loop", H100):
        params = row["params"]
        if row["implementation"] == "by_hand":
            fsdp, batch = params["fsdp"], params["batch"]
            layout = Layout(fsdp=fsdp, batch_size=batch, rows=batch // fsdp)
            yield _on_h100s(row, preset(params["model"]), layout, JAXSCALE_XLA)


def _on_h100s(
    row: dict[str, Any], model: DecoderConfig, layout: Layout, program: Program
) -> Row:
    seq_len = row["params"]["seq_len"]
    return Row(
        source="training",
        name=row["case"],
        unit="ms",
        known=row["time_us"] / 1e3,
        predicted=1e3 * seconds(model, seq_len, layout, H100, program),
        was_set=False,
    )


def others() -> Iterator[Row]:
    """Training by other programs, FSDP and TP; what they hide is taken to be as ours.

    MaxText keeps what ``attention`` keeps on 8 GPUs (`minimal_flash`) and is taken to
    recompute everything on 256, where nothing else fits; KempnerForge (PyTorch)
    recomputes everything.
    """
    llama_8b = preset("llama3_8b")
    for name, model, seq_len, hardware, layout, known in (
        (
            "MaxText, 70B, 256 H200",
            preset("llama3_1_70b"),
            8192,
            H200,
            Layout(data=2, fsdp=128, rows=2, batch_size=512, remat="full"),
            1056,
        ),
        (
            "MaxText, 7B, 8 H100",
            preset("llama2_7b"),
            4096,
            H100,
            Layout(fsdp=8, rows=2, batch_size=16, remat="attention"),
            11_362,
        ),
        (
            "KempnerForge, 8B, 1 H200",
            llama_8b,
            4096,
            H200,
            Layout(rows=4, batch_size=8, remat="full"),
            10_471,
        ),
        (
            "KempnerForge, 8B, fsdp 4",
            llama_8b,
            4096,
            H200,
            Layout(fsdp=4, rows=4, batch_size=32, remat="full"),
            9746,
        ),
        (
            "KempnerForge, 8B, tensor 4",
            llama_8b,
            4096,
            H200,
            Layout(tensor=4, rows=4, batch_size=8, remat="full"),
            6284,
        ),
    ):
        taken = seconds(model, seq_len, layout, hardware, JAXSCALE_XLA)
        yield Row(
            source="other programs",
            name=name,
            unit="tok/s/GPU",
            known=known,
            predicted=layout.batch_size * seq_len / taken / layout.gpus,
            was_set=False,
        )


def _trained() -> Iterator[tuple[dict[str, Any], Layout, DecoderConfig]]:
    remat: dict[str, Remat] = {"jaxscale": "none", "jaxscale_scan": "attention"}
    for row in _rows("training"):
        params, name = row["params"], row["implementation"]
        # Packed rows attend to less than the model counts.
        if name not in remat or "documents" in params:
            continue
        policy = params.get("remat", remat[name])
        scanned = params.get("scan_layers", name == "jaxscale_scan")
        if scanned == (policy != "none"):  # as plans have it
            moment = 2 if params.get("moments") == "bfloat16" else 4
            layout = Layout(
                batch_size=params["batch"],
                rows=params["batch"],
                remat=policy,
                moment_bytes=2 * moment,
            )
            yield row, layout, preset(row["params"]["model"])


def _rows(name: str, hardware: Hardware = H200) -> list[dict[str, Any]]:
    folder = {H200: "nvidia_h200", H100: "nvidia_h100_80gb_hbm3"}[hardware]
    return json.loads((RESULTS / folder / f"{name}.json").read_text())["rows"]


def main() -> int:
    """Print every row with its error."""
    for title, rows in (
        ("Published (A100)", [*published()]),
        ("Time, measured here (H200)", [*measured()]),
        ("Time, measured here (H100)", [*on_h100s()]),
        ("Published by others", [*others()]),
    ):
        print(f"{title}\n{'':53} known     model           error")
        for row in rows:
            note = "  set" if row.was_set else ""
            print(
                f"{row.source:16} {row.name:32} {row.known:9.2f} {row.predicted:9.2f} "
                f"{row.unit:9} {row.error:+6.1%}{note}"
            )
        for group, chosen in (
            ("all", rows),
            ("predicted alone", [row for row in rows if not row.was_set]),
        ):
            errors = [abs(row.error) for row in chosen]
            print(
                f"{group}: {len(errors)} rows, mean error "
                f"{statistics.mean(errors):.1%}, worst {max(errors):.1%}"
            )
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
