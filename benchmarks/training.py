"""Training a LLaMA end to end: ours beside a compiled PyTorch model of the same shape.

Each implementation runs in a child process of this command, one after the other, so
that none shares its memory. All train fp32 parameters with AdamW in bf16 on random
tokens, with gradient clipping; the time is the median wall time of a step that is
awaited. Both conventions of model FLOP/s utilization count useful work only: 6 FLOPs a
parameter and token plus attention, the whole matrix (`mfu_full`) or the causal half
(`mfu_causal`), over the dense bf16 peak of the data sheet.

- ``jaxscale``: every layer compiled, nothing recomputed; whole rows by cuDNN.
- ``jaxscale_scan``: the same with one layer compiled and looped over, which keeps the
  results of matrix products and attention and computes the rest twice.
- ``torch_compile``: `torch.compile`, fused AdamW, SDPA on whole rows.

In a case with ``documents`` each row holds that many sequences of random lengths,
which do not attend to each other: ours takes its varlen kernel, PyTorch `varlen_attn`
over all rows laid end to end. Both utilizations take a row for one sequence there and
so overstate attention: compare tokens a second.
"""

import json
import subprocess
import sys
from typing import Any

from benchmarks import timing
from benchmarks.harness import Benchmark, Case, Custom, Measurement


def _boundaries(params: dict[str, Any], seed: int, batches: int) -> list[Any]:
    """Draw where the documents of each batch lie, [B, documents + 1]; None if whole."""
    import numpy as np

    documents, length = params.get("documents"), params["seq_len"]
    if not documents:
        return [None] * batches
    random = np.random.default_rng(seed)
    found = np.full((batches, params["batch"], documents + 1), length, np.int32)
    for row in found.reshape(-1, documents + 1):  # [batches * B, documents + 1]
        row[0] = 0
        row[1:-1] = np.sort(random.choice(length - 1, documents - 1, False) + 1)
    return list(found)


def _train_jaxscale(params: dict[str, Any], seed: int, samples: int) -> dict[str, Any]:
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from jaxscale import models, sharding, training
    from jaxscale.nn.packing import PackedBatch

    config = models.preset(params["model"])
    batch, length = params["batch"], params["seq_len"]
    mesh, rules = sharding.make_mesh(sharding.MeshConfig()), sharding.preset("fsdp")
    settings = training.OptimizerConfig(
        learning_rate=3e-4, schedule="constant", warmup_steps=0
    )
    optimizer = training.make_optimizer(settings, 1000)
    random = np.random.default_rng(seed)

    def rows(bounds: np.ndarray | None) -> PackedBatch:
        tokens = random.integers(0, config.vocab_size, (batch, length + 1), np.int32)
        return jax.device_put(
            PackedBatch(
                tokens=tokens[:, :-1],
                targets=tokens[:, 1:],
                loss_mask=np.ones((batch, length), np.bool_),
                cu_seqlens=bounds,
            )
        )

    def init() -> training.TrainState:
        model = models.Decoder(
            config,
            dtype=jnp.bfloat16,
            remat=params["remat"],
            scan_layers=params["scan_layers"],
            rules=rules,
            rngs=nnx.Rngs(seed),
        )
        return training.TrainState.create(model, optimizer)

    state = sharding.create(init, mesh, rules)
    step = training.make_train_step(
        training.accumulated(
            training.next_token_loss(chunk_size=params["loss_chunk"]), rules=rules
        ),
        optimizer,
        schedule=training.make_schedule(settings, 1000),
        shardings=jax.tree.map(lambda x: x.sharding, state),
    )
    batches = [rows(bounds) for bounds in _boundaries(params, seed, 4)]
    times, losses = [], []
    with jax.set_mesh(mesh):
        start = time.perf_counter()
        for i in range(3):
            state, metrics = step(state, batches[i])
            losses.append(float(metrics["loss"]))
        compile_seconds = time.perf_counter() - start
        for i in range(samples):
            start = time.perf_counter()
            state, metrics = step(state, batches[i % 4])
            losses.append(float(metrics["loss"]))
            times.append(time.perf_counter() - start)
    memory = jax.devices()[0].memory_stats() or {}
    return {
        "seconds": times,
        "metrics": {
            "compile_seconds": compile_seconds,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "peak_gib": memory.get("peak_bytes_in_use", 0) / 2**30,
        },
    }


def _train_torch(params: dict[str, Any], seed: int, samples: int) -> dict[str, Any]:
    from benchmarks import torch_llama
    from jaxscale import models

    config = models.preset(params["model"])
    shape = torch_llama.Shape(
        vocab_size=config.vocab_size,
        d_model=config.d_model,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        d_ff=config.d_ff,
        rope_theta=config.rope_theta,
        norm_eps=config.norm_eps,
        tie_embeddings=config.tie_embeddings,
    )
    rows = _boundaries(params, seed, 4)
    return torch_llama.measure(
        shape, params["batch"], params["seq_len"], rows, seed, samples
    )


_CHILDREN = {"jaxscale": _train_jaxscale, "torch": _train_torch}


def _in_child(child: str, **more: Any) -> Custom:
    """Run one of `_CHILDREN` in a process of its own."""

    def measure(params: Any, seed: int, samples: int) -> Measurement:
        if child == "torch" and not timing.torch_is_there():
            raise NotImplementedError("torch with a GPU is not installed")
        job = json.dumps([child, {**_DEFAULTS, **params, **more}, seed, samples])
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.training", "--child", job],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{child} failed:\n{done.stderr[-4000:]}")
        result = json.loads(done.stdout.splitlines()[-1])
        return Measurement(result["seconds"], None, metrics=result["metrics"])

    return Custom(measure)


_DEFAULTS = {"remat": "none", "loss_chunk": 1024}


def metrics(params: Any, seconds: float) -> dict[str, float]:
    """Throughput, and utilization where the peak of the device is known."""
    import jax

    from jaxscale import models, training

    config = models.preset(params["model"])
    rate = params["batch"] * params["seq_len"] / seconds
    found = {"tokens_per_second": rate}
    peak = training.peak_flops(jax.devices()[0].device_kind)
    for name, causal in (("mfu_causal", True), ("mfu_full", False)):
        if peak is not None:
            flops = config.flops_per_token(params["seq_len"], causal)
            found[name] = training.mfu(rate, flops, peak)
    return found


BENCHMARK = Benchmark(
    name="training",
    cases=[
        Case("llama_1b_2k", {"model": "llama_1b", "batch": 16, "seq_len": 2048}),
        Case("llama_1b_4k", {"model": "llama_1b", "batch": 8, "seq_len": 4096}),
        Case(
            "llama_1b_4k_packed",
            {"model": "llama_1b", "batch": 8, "seq_len": 4096, "documents": 8},
        ),
    ],
    quick_cases=[
        Case("tiny", {"model": "llama_tiny", "batch": 2, "seq_len": 64}),
        Case(
            "tiny_packed",
            {"model": "llama_tiny", "batch": 2, "seq_len": 64, "documents": 4},
        ),
    ],
    inputs=lambda params, key: (),
    implementations={
        "jaxscale": _in_child("jaxscale", scan_layers=False),
        "jaxscale_scan": _in_child("jaxscale", scan_layers=True, remat="attention"),
        "torch_compile": _in_child("torch"),
    },
    metrics=metrics,
    time="wall",
    samples=20,
)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        name, *arguments = json.loads(sys.argv[2])
        print(json.dumps(_CHILDREN[name](*arguments)))
    else:
        BENCHMARK.main()
