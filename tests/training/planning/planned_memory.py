"""The memory that is counted beside what XLA reserves, for steps on 8 to 512 H200s.

``python -m tests.training.planning.planned_memory`` compiles every program of
`PROGRAMS`, a minute or two each, without a GPU, and prints a table; names choose some
of them. What was compiled is kept in ``planned_memory.json``, which the tests compare
with.
"""

import dataclasses
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from jaxscale.models import preset
from jaxscale.models.config import DecoderConfig
from jaxscale.recipes.runs import from_preset
from jaxscale.training import DataConfig, Layout, PlanConfig, TrainConfig
from jaxscale.training.planning.compiled import compile_step
from jaxscale.training.planning.search import Estimate, describe, estimate, xla_flags
from jaxscale.training.planning.verify import planned_run


ROOT = Path(__file__).parents[3]
RESULTS = Path(__file__).with_suffix(".json")

GPT_175B = DecoderConfig(
    vocab_size=64_000,
    d_model=12_288,
    num_layers=96,
    num_heads=128,
    num_kv_heads=128,
    head_dim=96,
    d_ff=4 * 12_288,
    max_seq_len=2048,
    norm="layernorm",
    activation="gelu",
    position="learned",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A training step."""

    model: str
    """A preset, or gpt_175b."""
    layout: Layout
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What is asked of the planner besides the layout."""
    packed: bool = True
    """Whether rows hold several documents."""

    @property
    def shape(self) -> DecoderConfig:
        """The model."""
        return GPT_175B if self.model == "gpt_175b" else preset(self.model)

    @property
    def plan(self) -> PlanConfig:
        """What the planner is asked."""
        return PlanConfig(
            gpus=self.layout.gpus,
            **{"seq_len": 4096, "tensor_parallel": "xla"} | self.config,
        )

    @property
    def estimate(self) -> Estimate:
        """What it says."""
        layout = dataclasses.replace(
            self.layout,
            moment_bytes=self.plan.moment_bytes,
            memory_kind=self.plan.memory_kind,
        )
        return estimate(self.shape, layout, self.plan)

    @property
    def run(self) -> TrainConfig:
        """The run that is compiled."""
        base = from_preset("llama_1b")
        data = DataConfig(
            vocab_size=base.data.vocab_size, max_sequences=32 if self.packed else 1
        )
        run = dataclasses.replace(base, model=self.shape, data=data)
        return planned_run(run, self.estimate, self.plan)

    def __str__(self) -> str:
        """The layout in words."""
        given = [f"{value}" for value in self.config.values()]
        return ", ".join(
            [describe(self.layout), *given, *["whole rows"] * (not self.packed)]
        )

    def compile(self) -> dict[str, Any]:
        """What XLA reserves on one GPU."""
        flags = xla_flags(self.layout)
        found = compile_step(self.run, self.layout.gpus, xla_flags=flags, timeout=3000)
        return {"bytes": found.bytes, "seconds": round(found.seconds)}


def _llama(name: str = "llama3_8b", **options: Any) -> Program:
    given = {x: options.pop(x) for x in ("config", "packed") if x in options}
    return Program(model=name, layout=Layout(**options), **given)


PROGRAMS = {
    "1b_data": _llama("llama_1b", data=8, rows=2, batch_size=16, remat="attention"),
    "1b_none": _llama("llama_1b", fsdp=8, rows=1, batch_size=8, remat="none"),
    "8b_full": _llama(fsdp=8, rows=2, batch_size=16, remat="full"),
    "8b_whole_rows": _llama(
        fsdp=8, rows=2, batch_size=16, remat="attention", packed=False
    ),
    "8b_tensor": _llama(fsdp=4, tensor=2, rows=1, batch_size=8, remat="attention"),
    "8b_fused": _llama(
        fsdp=2,
        tensor=4,
        rows=2,
        batch_size=4,
        remat="attention",
        config={"tensor_parallel": "fused"},
    ),
    "8b_zero1": _llama(fsdp=8, zero=1, batch_size=32, remat="attention"),
    "8b_zero2": _llama(fsdp=8, zero=2, batch_size=32, remat="full"),
    "8b_zero3": _llama(fsdp=16, zero=3, batch_size=64, remat="attention"),
    "8b_bf16": _llama(
        fsdp=8,
        batch_size=8,
        remat="full",
        config={"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"},
    ),
    "8b_host": _llama(
        fsdp=8, batch_size=8, remat="full", config={"memory_kind": "pinned_host"}
    ),
    "8b_context": _llama(
        fsdp=8, context=4, batch_size=8, remat="attention", config={"seq_len": 8192}
    ),
    "8b_pipe": _llama(pipe=4, fsdp=8, zero=1, batch_size=64, remat="attention"),
    "8b_pipe_none": _llama(pipe=4, data=2, batch_size=32, remat="none"),
    "8b_pipe_zero3": _llama(pipe=2, fsdp=2, tensor=2, batch_size=16, remat="attention"),
    "8b_pipe_context": _llama(
        pipe=4,
        fsdp=2,
        context=2,
        zero=1,
        batch_size=32,
        remat="full",
        config={"seq_len": 8192},
    ),
    "70b_fsdp": _llama("llama3_70b", fsdp=64, tensor=8, batch_size=64, remat="full"),
    "70b_interleaved": _llama(
        "llama3_70b",
        pipe=4,
        fsdp=4,
        tensor=8,
        zero=1,
        chunks=5,
        batch_size=32,
        remat="attention",
    ),
    "175b_1f1b": _llama(
        "gpt_175b",
        pipe=8,
        fsdp=4,
        tensor=8,
        zero=1,
        batch_size=64,
        remat="full",
        config={"seq_len": 2048},
    ),
    "175b_interleaved": _llama(
        "gpt_175b",
        pipe=8,
        fsdp=8,
        tensor=8,
        zero=1,
        chunks=6,
        batch_size=128,
        remat="attention",
        config={"seq_len": 2048},
    ),
}
"""By name, whole models in mixed layouts."""


def stored() -> dict[str, dict[str, Any]]:
    """What was compiled, by name."""
    return json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}


def share(name: str) -> float:
    """The part of what XLA reserves that the planner counts."""
    return PROGRAMS[name].estimate.bytes / stored()[name]["bytes"]


def table() -> str:
    """The programs that were compiled, as Markdown."""
    lines = [
        "| Model | GPUs | Layout | XLA, GB | Counted, GB | Share |",
        "|---|--:|---|--:|--:|--:|",
    ]
    shares = []
    for name, known in stored().items():
        program = PROGRAMS[name]
        found = program.estimate.bytes
        shares.append(share(name))
        lines.append(
            f"| {program.model} | {program.layout.gpus} | {program} "
            f"| {known['bytes'] / 1e9:.1f} | {found / 1e9:.1f} | {shares[-1]:.0%} |"
        )
    low, high = min(shares), max(shares)
    lines += ["", f"mean {statistics.mean(shares):.0%}, from {low:.0%} to {high:.0%}"]
    return "\n".join(lines)


def main(names: list[str]) -> int:
    """Compile, store and print."""
    sys.path.append(str(ROOT / ".cuda"))
    for name in names or PROGRAMS:
        result = PROGRAMS[name].compile()
        known = stored() | {name: result}
        known = {x: known[x] for x in PROGRAMS if x in known}
        RESULTS.write_text(json.dumps(known, indent=1) + "\n")
        print(name, result, f"{share(name):.0%}", flush=True)
    print(table())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
