"""Training a LLaMA end to end on 1, 2 and 4 GPUs: ours, plain JAX, compiled PyTorch.

Each implementation runs in a child process of this command, one after the other, so
that none shares its memory. All begin with the same weights and read the same random
tokens (`benchmarks.workloads.equal_llama`); all train fp32 parameters with AdamW in
bf16, with gradient clipping. The time is the median wall time of a step that is
awaited. Both conventions of model FLOP/s utilization count useful work only: 6 FLOPs
per parameter and token plus attention, the whole matrix (`mfu_full`) or the causal half
(`mfu_causal`), over the dense bf16 peak of the data sheet of all GPUs.

- ``jaxscale``: every layer compiled, nothing recomputed; attention by our kernel; over
  `tensor` the fused kernels.
- ``jaxscale_xla``: the same with XLA's collectives over `tensor`.
- ``jaxscale_overlap``: ``jaxscale`` with XLA's flags of the preset `overlap`.
- ``jaxscale_scan``: one layer compiled and looped over, which keeps the results of
  matmuls and attention and recomputes the rest.
- ``jaxscale_fp8``, ``jaxscale_fp8_blockwise``, ``jaxscale_fp8_tensorwise``:
  ``jaxscale`` with matmuls in fp8 in the linear layers of the blocks, with a scale for
  each row, each block (1 x 128, weights 128 x 128) or each operand. Their
  `mfu_full` and `mfu_causal` are over the peak of bf16 like all others; `mfu_fp8_full`
  and `mfu_fp8_causal` are the time that the data sheet asks for, over that of the step:
  these matmuls at twice the peak of bf16, attention and output projection at once.
- ``plain_jax``: `benchmarks.rivals.plain_training`, without jaxscale: cuDNN's
  attention, XLA's collectives; no pipelines, no parts of rows, no packed rows.
- ``plain_jax_overlap``: the same with these flags.
- ``torch_compile``: `benchmarks.rivals.torch_training`: `torch.compile`, fused AdamW,
  SDPA; FSDP2 and DTensor's tensor parallelism on several GPUs; no pipelines, no parts
  of rows, no window. ``torch_compile_graphs``: the same on one GPU with CUDA graphs of
  forward and backward pass (reduce-overhead).
- ``torch_float8``, ``torch_float8_tensorwise``: ``torch_compile`` with the linear
  layers of the blocks in torchao's float8, where it is installed; the latter gathers
  weights in 8 bits. By its tag its wheel (1.4 MB, no dependencies) is pure Python, so
  it should do on `PYTHONPATH`, as
  ``PYTHONPATH=torchao-0.18.0-py3-none-any.whl python -m benchmarks.training``.

Losses of the first `PARITY_STEPS` steps are compared: with plain JAX, or else PyTorch,
or else ours in another way, on the same workload in the same command, whatever the
layout. The largest relative difference is the error of the row, and above
`PARITY_ERROR` the row is wrong. Alone, an implementation has no error. Where one of two
is in fp8 these are the steps before a batch comes again, `WARM_UP`: how fast random
tokens are then memorized depends on roundings, and says little of text, on which
`benchmarks.convergence` compares fp8 with bf16.

Cases of several GPUs are named by their layout: ``fsdp4``, ``tp4``, ``tp2_pp2`` (a
pipeline of 2 stages over 2 GPUs each). ``ablation_*`` are the steps of MegaScale's
table 3 that 4 GPUs can show, each on top of the one before; ZeRO's gathers and sums,
which need the axis `fsdp`, are ``fsdp4`` against ``fsdp4_zero1``. LLaMA 8B computes
elementwise operations again everywhere: so it fits one H200 with moments in bf16 or on
the host, and 4 GPUs of 80 GB in all layouts but GPipe's, ZeRO-1 and with a context.

In a case with ``documents`` each row holds that many sequences of random lengths,
which do not attend to each other: ours takes its varlen kernel, PyTorch `varlen_attn`
over all rows laid end to end. Both utilizations take a row for one sequence there and
so overstate attention: compare tokens per second.
"""

import dataclasses
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from benchmarks.measure import command, timing
from benchmarks.measure.harness import (
    Benchmark,
    Case,
    Custom,
    Measurement,
    Results,
    run_case,
)
from benchmarks.rivals import plain_training, torch_processes
from benchmarks.workloads import equal_llama, jaxscale_training
from benchmarks.workloads.training_cases import CASES, DEFAULTS, QUICK_CASES, devices
from jaxscale import training
from jaxscale.sharding import use_xla_flags


PARITY_STEPS = 20
"""Whose losses are compared."""

PARITY_ERROR = 5e-3
"""Largest relative difference of their losses, in bf16."""

WARM_UP = 3
"""Steps before those that are timed; with compilation they are `compile_seconds`."""

MEMORY_FRACTION = "0.92"
"""Of a GPU, that JAX takes for its arrays; 0.75 if nothing says so."""

BATCHES = 4
"""Different ones, over and over."""

CHILD_SECONDS = 540.0
"""A child that takes longer hangs."""

FP8_SPEEDUP = 2.0
"""Of the tensor cores, by the data sheets of H100 and H200."""

WORKLOAD = (
    "model",
    "batch",
    "seq_len",
    "documents",
    "parallel",
    "window",
    "optimizer",
    "moments",
)
"""What makes losses comparable."""

REFERENCES = (
    "plain_jax",
    "plain_jax_overlap",
    "torch_compile",
    "torch_compile_graphs",
    "jaxscale_xla",
    "jaxscale_overlap",
    "jaxscale_scan",
    "jaxscale",
    "jaxscale_fp8",
    "jaxscale_fp8_blockwise",
    "jaxscale_fp8_tensorwise",
    "torch_float8",
    "torch_float8_tensorwise",
)
"""In the order in which losses are compared with them."""


def runs(case: Case, name: str, op: str) -> bool:
    """Whether an implementation of ours runs the kernels of a package in a case."""
    params = {**DEFAULTS, **case.params}
    if op == "collective_matmul":
        return params["tensor"] > 1
    if op == "scaled_matmul":
        return "fp8" in name or params["quantization"] is not None
    return True


def config_of(params: Mapping[str, Any]) -> Any:
    """The model of a case."""
    return jaxscale_training.config_of(DEFAULTS | dict(params))


# --- The children ---------------------------------------------------------------------


def train(name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Train in JAX, in this process: seconds and losses of the steps, memory.

    Args:
        name: ``plain_jax``, ``plain_jax_overlap``, or ours.
        job: From `job_of`.
    """
    if job["xla_flags"] is not None:
        use_xla_flags(job["xla_flags"])
    plain = name.startswith("plain_jax")
    prepare = (plain_training if plain else jaxscale_training).prepare
    rows = equal_llama.batches(
        job["shape"]["vocab_size"],
        job["batch"],
        job["seq_len"],
        documents=job["documents"],
        seed=job["seed"],
        count=job["batches"],
    )
    used = jax.devices()[: job["size"]]
    mesh, state, step, batches = prepare(job, used, rows)
    seconds, losses = [], []
    with jax.set_mesh(mesh):
        for i in range(-job["warmup"], job["samples"]):
            start = time.perf_counter()
            place = i if i >= 0 else i + job["warmup"]
            state, loss = step(state, batches[place % len(batches)])
            losses.append(float(loss))
            seconds.append(time.perf_counter() - start)
    memory = [(device.memory_stats() or {}) for device in used]
    return {
        "seconds": seconds[job["warmup"] :],
        "losses": losses,
        "compile_seconds": sum(seconds[: job["warmup"]]),
        "peak_bytes": max(stats.get("peak_bytes_in_use", 0) for stats in memory),
    }


def job_of(params: Mapping[str, Any], seed: int, samples: int) -> dict[str, Any]:
    """All that a child needs to know, as JSON."""
    job = DEFAULTS | dict(params)
    shape = equal_llama.Shape.of(config_of(params))
    return job | {
        "shape": dataclasses.asdict(shape),
        "size": devices(params),
        "dtype": "bfloat16" if timing.on_gpu() else "float32",
        "compiled": timing.on_gpu(),
        "seed": seed,
        "samples": samples,
        "warmup": WARM_UP,
        "batches": BATCHES,
    }


def _in_child(name: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """What `train` gives in a process of its own."""
    environment = dict(os.environ)
    # PyTorch takes what it asks for; JAX would leave a quarter of the memory.
    if "XLA_PYTHON_CLIENT_MEM_FRACTION" not in environment:  # JAX takes one of two
        environment.setdefault("XLA_CLIENT_MEM_FRACTION", MEMORY_FRACTION)
    if not timing.on_gpu():
        environment["JAX_NUM_CPU_DEVICES"] = str(job["size"])
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.training"),
            *("--child", json.dumps([name, job])),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=CHILD_SECONDS,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"{name} failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _in_torch(job: Mapping[str, Any]) -> dict[str, Any]:
    """The same of PyTorch, in a process for each GPU."""
    results = torch_processes.run(
        "torch_training",
        job,
        size=job["size"],
        backend="nccl" if timing.on_gpu() else "gloo",
        start_seconds=CHILD_SECONDS,
    )
    if not results:
        raise RuntimeError("the processes of torch ended or hung")
    return results[0]


# --- The command ----------------------------------------------------------------------


@dataclasses.dataclass
class Trained(Measurement):
    """A measurement with the losses that it is checked by."""

    losses: Sequence[float] = ()


def _implementation(name: str, **more: Any) -> Custom:
    def measure(params: Any, seed: int, samples: int) -> Measurement:
        job = job_of({**params, **more}, seed, samples)
        if reason := _unsupported(name, params, job):
            raise NotImplementedError(reason)
        in_torch = name.startswith("torch")
        found = _in_torch(job) if in_torch else _in_child(name, job)
        losses = found["losses"]
        in_fp8 = job["quantization"] is not None
        return Trained(
            found["seconds"],
            None,
            metrics={
                "compile_seconds": found["compile_seconds"],
                "first_loss": losses[0],
                "last_loss": losses[-1],
                "peak_gib": found["peak_bytes"] / 2**30,
                **(fp8_utilization(params, found["seconds"]) if in_fp8 else {}),
            },
            num_devices=job["size"],
            losses=losses,
        )

    return Custom(measure)


def _unsupported(
    name: str, params: Mapping[str, Any], job: Mapping[str, Any]
) -> str | None:
    """Why an implementation cannot do a case, if so."""
    if name.endswith("_overlap"):
        if "xla_flags" in params or job["size"] == 1:
            return "nothing to overlap, or what all do"
        if not timing.on_gpu():
            return "the flags are of GPUs"
    if name == "jaxscale_xla":
        fixed = "tensor_parallel" in params or job["tensor"] == 1
        return "the same as jaxscale here" if fixed else None
    if name == "jaxscale_scan":
        loops = "scan_layers" in params or job["pipe"] > 1
        return "jaxscale loops over layers here" if loops else None
    if name.startswith("jaxscale"):
        return None
    if job["pipe"] > 1:
        return "pipelines"
    if job["context"] > 1:
        return "context parallelism"
    if job["optimizer"] != "adamw":
        return "optimizers but AdamW"
    if job["memory_kind"] != "device":
        return "moments on the host"
    narrow = job["moments"] != "float32"
    if narrow and (name.startswith("plain_jax") or job["size"] > 1):
        return "moments but in fp32"
    if job["zero"] == 1:
        return "ZeRO-1"
    if name.startswith("plain_jax"):
        return "packed rows" if job["documents"] else None
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if job["window"]:
        return "SDPA has no window"
    if name == "torch_compile_graphs" and job["size"] > 1:
        return "CUDA graphs of a model that is split"
    if name == "torch_compile_graphs" and not timing.on_gpu():
        return "CUDA graphs need a GPU"
    if job["documents"] and not timing.on_gpu():
        return "varlen_attn needs a GPU"
    if job["torch_float8"] is not None:
        if importlib.util.find_spec("torchao") is None:
            return "torchao is not installed"
        if job["tensor"] > 1:
            return "float8 in what DTensor splits"
    return None


def measure(
    cases: Sequence[Case], names: Sequence[str], samples: int
) -> Iterable[tuple[Case, Results]]:
    """Each case, with losses compared to those of the same workload until then."""
    known: dict[str, dict[tuple[str, str], Sequence[float]]] = {}
    for case in cases:
        results = run_case(BENCHMARK, case, names, samples)
        given = DEFAULTS | dict(case.params)
        runs = known.setdefault(str([given[name] for name in WORKLOAD]), {})
        trained = {n: r for n, r in results.items() if isinstance(r, Trained)}
        runs |= {(case.name, name): result.losses for name, result in trained.items()}
        for name, result in trained.items():
            losses = " ".join(f"{loss:.4f}" for loss in result.losses)
            print(f"-- {case.name} {name}, losses: {losses}", flush=True)
            others = {k: v for k, v in runs.items() if k != (case.name, name)}
            result.max_rel_error = parity(name, result.losses, others)
        yield case, results


def parity(
    name: str,
    losses: Sequence[float],
    others: Mapping[tuple[str, str], Sequence[float]],
) -> float | None:
    """Largest relative difference to the losses of the best reference, if any.

    Args:
        name: An implementation.
        losses: Of its steps.
        others: The same, by case and implementation, of the others.
    """
    ranked = sorted(others, key=lambda key: REFERENCES.index(key[1]))
    if not ranked:
        return None
    in_8_bits = any("fp8" in n or "float8" in n for n in (name, ranked[0][1]))
    steps = WARM_UP if in_8_bits else PARITY_STEPS
    pairs = [*zip(losses, others[ranked[0]], strict=False)][:steps]
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    # A loss that is not a number is as far off as can be.
    return max(d if d == d else float("inf") for d in differences)


def metrics(params: Any, seconds: float) -> dict[str, float]:
    """Throughput, and utilization where the peak of the device is known."""
    rate = params["batch"] * params["seq_len"] / seconds
    each = rate / devices(params)
    found = {"tokens_per_second": rate, "tokens_per_second_per_device": each}
    peak = training.peak_flops(jax.devices()[0].device_kind)
    for name, causal in (("mfu_causal", True), ("mfu_full", False)):
        if peak is not None:
            flops = config_of(params).flops_per_token(params["seq_len"], causal)
            found[name] = training.mfu(each, flops, peak)
    return found


def fp8_utilization(
    params: Mapping[str, Any], seconds: Sequence[float]
) -> dict[str, float]:
    """The time of useful work at the peak of each matmul's type, over that of a step.

    Args:
        params: Of the case.
        seconds: Of each step.
    """
    peak = training.peak_flops(jax.devices()[0].device_kind)
    if peak is None:
        return {}
    config, length = config_of(params), params["seq_len"]
    head = 6 * config.d_model * config.vocab_size
    one_key = 12 * config.num_layers * config.num_heads * config.head_dim
    layers = config.flops_per_token(1, causal=False) - head - one_key
    tokens = params["batch"] * length / devices(params)
    found = {}
    for name, causal in (("mfu_fp8_causal", True), ("mfu_fp8_full", False)):
        rest = config.flops_per_token(length, causal) - layers
        ideal = tokens * (layers / FP8_SPEEDUP + rest) / peak
        found[name] = ideal / statistics.median(seconds)
    return found


BENCHMARK = Benchmark(
    name="training",
    cases=CASES,
    quick_cases=QUICK_CASES,
    kernels=("varlen_attention", "collective_matmul", "scaled_matmul"),
    runs=runs,
    devices=devices,
    inputs=lambda params, key: (),
    implementations={
        "jaxscale": _implementation("jaxscale"),
        "jaxscale_xla": _implementation("jaxscale_xla", tensor_parallel="xla"),
        "jaxscale_scan": _implementation(
            "jaxscale_scan", scan_layers=True, remat="attention"
        ),
        "jaxscale_overlap": _implementation("jaxscale_overlap", xla_flags="overlap"),
        "jaxscale_fp8": _implementation("jaxscale_fp8", quantization="fp8"),
        "jaxscale_fp8_blockwise": _implementation(
            "jaxscale_fp8_blockwise", quantization="fp8_blockwise"
        ),
        "jaxscale_fp8_tensorwise": _implementation(
            "jaxscale_fp8_tensorwise", quantization="fp8_tensorwise"
        ),
        "plain_jax": _implementation("plain_jax"),
        "plain_jax_overlap": _implementation("plain_jax_overlap", xla_flags="overlap"),
        "torch_compile": _implementation("torch_compile"),
        "torch_compile_graphs": _implementation(
            "torch_compile_graphs", torch_mode="reduce-overhead"
        ),
        "torch_float8": _implementation("torch_float8", torch_float8="rowwise"),
        "torch_float8_tensorwise": _implementation(
            "torch_float8_tensorwise", torch_float8="tensorwise"
        ),
    },
    measure=measure,
    metrics=metrics,
    max_rel_error=PARITY_ERROR,
    time="wall",
    timing="wall time of a step",
    samples=20,
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        name, job = json.loads(sys.argv[2])
        print(json.dumps(train(name, job)))
    else:
        command.run(BENCHMARK)
