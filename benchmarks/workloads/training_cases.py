"""The cases of `benchmarks.training`: models, batches and layouts."""

import math
from collections.abc import Mapping
from typing import Any

from benchmarks.measure.harness import Case


DEFAULTS = {
    "documents": None,
    "fsdp": 1,
    "context": 1,
    "tensor": 1,
    "pipe": 1,
    "microbatches": 1,
    "chunks": 1,
    "schedule": "1f1b",
    "zero": 3,
    "parallel": False,
    "window": None,
    "optimizer": "adamw",
    "moments": "float32",
    "memory_kind": "device",
    "tensor_parallel": "fused",
    "xla_flags": None,
    "quantization": None,
    "remat": "none",
    "scan_layers": False,
    "loss_chunk": 1024,
    "torch_mode": None,
    "torch_memory_budget": 1.0,
    "torch_float8": None,
}
"""What a case does not say."""


def devices(params: Mapping[str, Any]) -> int:
    """GPUs of a case."""
    given = DEFAULTS | dict(params)
    return math.prod(given[axis] for axis in ("pipe", "fsdp", "context", "tensor"))


LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp4": {"fsdp": 4},
    "fsdp4_zero1": {"fsdp": 4, "zero": 1},
    "tp4": {"tensor": 4},
    "tp4_parallel": {"tensor": 4, "parallel": True},
    "tp2_fsdp2": {"tensor": 2, "fsdp": 2},
    "fsdp2_context2": {"fsdp": 2, "context": 2},
    "tp2_pp2": {"tensor": 2, "pipe": 2, "microbatches": 8},
    "pp4_interleaved": {"pipe": 4, "microbatches": 8, "chunks": 4},
    "pp4_gpipe": {"pipe": 4, "microbatches": 8, "schedule": "gpipe"},
    "pp4_interleaved_b4": {"pipe": 4, "microbatches": 4, "chunks": 4, "batch": 4},
    "pp4_gpipe_b4": {"pipe": 4, "microbatches": 4, "schedule": "gpipe", "batch": 4},
    "fsdp2": {"fsdp": 2},
    "tp2": {"tensor": 2},
    "pp2_interleaved": {"pipe": 2, "microbatches": 8, "chunks": 4, "batch": 8},
}
"""Of the cases of several GPUs, by the end of their names."""


_1B = {"model": "llama_1b", "seq_len": 4096}
_8B = {
    "model": "llama3_8b",
    "seq_len": 4096,
    "remat": "attention",
    "torch_memory_budget": 0.7,
}
"""Elementwise operations are recomputed, and in PyTorch what its compiler
chooses."""


def _ablation() -> list[Case]:
    """The steps of MegaScale's table 3, each on top of the one before."""
    params: dict[str, Any] = {
        **_8B,
        "batch": 16,
        "tensor": 2,
        "pipe": 2,
        "microbatches": 16,
        "tensor_parallel": "xla",
    }
    steps = {
        "baseline": {},
        "parallel_block": {"parallel": True},
        "window": {"window": 1024},
        "tensor_overlap": {"tensor_parallel": "fused"},
        "interleaved": {"chunks": 4},
        "overlap": {"xla_flags": "overlap"},
        "lamb_3x_batch": {"optimizer": "lamb", "batch": 48, "microbatches": 48},
    }
    cases = []
    for number, (name, change) in enumerate(steps.items()):
        params = params | change
        cases.append(Case(f"ablation_{number}_{name}", params))
    return cases


def _of(model: Mapping[str, Any], batches: Mapping[int | str, int]) -> list[Case]:
    """The layouts of a model at a batch for each number of GPUs, or each layout."""
    cases = []
    for name, layout in LAYOUTS.items():
        batch = batches.get(name, batches[devices(layout)])
        params = {**model, "batch": batch, **layout}
        cases.append(Case(f"{model['model']}_{name}", params))
    return cases


_TINY = {"model": "llama_tiny", "batch": 4, "seq_len": 64}

CASES = [
    Case("llama_1b_2k", {"model": "llama_1b", "batch": 16, "seq_len": 2048}),
    Case("llama_1b_4k", {"model": "llama_1b", "batch": 8, "seq_len": 4096}),
    Case(
        "llama_1b_4k_packed",
        {"model": "llama_1b", "batch": 8, "seq_len": 4096, "documents": 8},
    ),
    Case("llama3_8b_bf16_moments", {**_8B, "batch": 3, "moments": "bfloat16"}),
    Case("llama3_8b_host_moments", {**_8B, "batch": 3, "memory_kind": "pinned_host"}),
    *_of(_1B, {2: 16, 4: 32}),
    *_of(_8B, {2: 2, 4: 8, "tp4": 4, "tp4_parallel": 4}),
    *_ablation(),
]

QUICK_CASES = [
    Case("tiny", _TINY),
    Case("tiny_packed", {**_TINY, "documents": 4}),
    Case("tiny_fsdp2", {**_TINY, "fsdp": 2}),
    Case("tiny_fsdp2_context2", {**_TINY, "fsdp": 2, "context": 2}),
    Case("tiny_tp2", {**_TINY, "tensor": 2}),
    Case("tiny_tp2_parallel", {**_TINY, "tensor": 2, "parallel": True}),
    Case("tiny_pp2", {**_TINY, "pipe": 2, "microbatches": 2}),
    Case(
        "tiny_tp2_pp2",
        {**_TINY, "pipe": 2, "tensor": 2, "microbatches": 2, "schedule": "gpipe"},
    ),
]
