"""The PyTorch baseline of `benchmarks.training`, one process per GPU, tuned honestly.

fp32 parameters and Adam moments, bf16 computation, the fused AdamW. One GPU compiles
the whole model under autocast; several compile each block, FSDP2 casts and gathers
what it needs ahead of time, DTensor splits what `tensor` splits. Async tensor
parallelism is left out: it needs symmetric memory, whose multicast stays off here.

In float8, torchao's layers stand in for the linear layers of the blocks: ``rowwise``
scales each row, ``tensorwise`` the whole operand, which FSDP gathers in 8 bits.

The fused AdamW has no moments in bf16: those are updated by a compiled function, which
is as fused. Where not all activations fit, the compiler chooses what is computed again.
"""

import contextlib
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from benchmarks.rivals import torch_llama, torch_processes
from benchmarks.workloads import equal_llama


def child(job: Mapping[str, Any], rank: int) -> None:
    """Train on one device; the first process prints the result."""
    import torch
    import torch.distributed as dist
    from torch._functorch import config as functorch_config

    device = torch_processes.meet(job, rank)
    torch.set_float32_matmul_precision("high")
    shape = equal_llama.Shape(**job["shape"])
    fsdp, tensor = job["fsdp"], job["tensor"]
    dtype = getattr(torch, job["dtype"])
    model = torch_llama.make(shape, job["seed"], tensor)
    gathers_float8 = job["torch_float8"] == "tensorwise" and fsdp > 1
    if job["torch_float8"] is not None:
        _use_float8(model, job["torch_float8"], gathers_float8)
    if gathers_float8:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp
    mesh = dist.device_mesh.init_device_mesh(
        "cpu" if device == "cpu" else "cuda",
        (fsdp, tensor),
        mesh_dim_names=("fsdp", "tensor"),
    )
    if job["size"] > 1:
        cast: Any = contextlib.nullcontext()
        torch_llama.split(
            model, mesh, zero=job["zero"], dtype=dtype, compiled=job["compiled"]
        )
        run = model
    else:
        model = model.to(device)
        enabled = dtype != torch.float32
        cast = torch.autocast(torch.device(device).type, dtype=dtype, enabled=enabled)
        run = model
        if job["compiled"]:
            run = torch.compile(model, mode=job["torch_mode"])
    functorch_config.activation_memory_budget = job["torch_memory_budget"]
    optimizer = _optimizer(model, getattr(torch, job["moments"]), job["compiled"])

    def step(batch: tuple) -> float:
        if job["torch_mode"] == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        with _split_loss(tensor):
            with cast:
                loss = run(*batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if gathers_float8:
            precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad(set_to_none=True)
        return (loss.full_tensor() if tensor > 1 else loss).item()

    batches = _batches(job, shape, device, mesh["fsdp"].get_local_rank())
    start = time.perf_counter()
    losses = [step(batches[i]) for i in range(job["warmup"])]
    compile_seconds = time.perf_counter() - start
    seconds = []
    for i in range(job["samples"]):
        start = time.perf_counter()
        losses.append(step(batches[i % len(batches)]))
        seconds.append(time.perf_counter() - start)
    memory = torch.cuda.max_memory_allocated() if device != "cpu" else 0
    means = _over_devices(losses, dist.ReduceOp.SUM, device)
    result = {
        "seconds": _over_devices(seconds, dist.ReduceOp.MAX, device),
        "losses": [loss / job["size"] for loss in means],
        "compile_seconds": compile_seconds,
        "peak_bytes": _over_devices([float(memory)], dist.ReduceOp.MAX, device)[0],
    }
    torch_processes.say(rank, result)
    torch_processes.part(rank)


def _use_float8(model: Any, recipe: str, gathers_float8: bool) -> None:
    """Torchao's float8 in the blocks of a model, in place."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = (
        Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        if gathers_float8
        else Float8LinearConfig.from_recipe_name(recipe)
    )
    convert_to_float8_training(
        model,
        config=config,
        module_filter_fn=lambda module, name: name.startswith("blocks."),
    )


SETTINGS: Any = {"lr": equal_llama.LEARNING_RATE, "betas": (0.9, 0.95), "eps": 1e-8}
DECAY = 0.1
"""Of the optimizer; vectors do not decay."""


def _optimizer(model: Any, moments: Any, compiled: bool) -> Any:
    import torch

    if moments != torch.float32:
        return NarrowAdamW(model.parameters(), moments, compiled)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        weight_decay=DECAY,
        fused=True,
        **SETTINGS,
    )


class NarrowAdamW:
    """AdamW whose moments have a narrow type; it computes in fp32."""

    def __init__(self, parameters: Iterable[Any], dtype: Any, compiled: bool) -> None:
        """Begin with zeros.

        Args:
            parameters: In fp32, on one device.
            dtype: Of the moments.
            compiled: Compile the update: one kernel for all that decay, one for others.
        """
        import torch

        self.parameters = list(parameters)
        self.moments = [
            [torch.zeros_like(p, dtype=dtype).view(-1) for _ in range(2)]
            for p in self.parameters
        ]
        self.steps = torch.zeros((), device=self.parameters[0].device)
        self.update = torch.compile(_update, dynamic=True) if compiled else _update

    def step(self) -> None:
        """Change the parameters by their gradients."""
        import torch

        self.steps += 1
        with torch.no_grad():
            for p, moments in zip(self.parameters, self.moments, strict=True):
                decay = DECAY if p.ndim > 1 else 0.0
                self.update(p.view(-1), p.grad.view(-1), *moments, self.steps, decay)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        for p in self.parameters:
            p.grad = None


def _update(p: Any, grad: Any, mu: Any, nu: Any, steps: Any, decay: float) -> None:
    """One parameter's AdamW step, in place: arXiv 1711.05101."""
    lr, (b1, b2), eps = SETTINGS["lr"], SETTINGS["betas"], SETTINGS["eps"]
    first = b1 * mu.float() + (1 - b1) * grad
    second = b2 * nu.float() + (1 - b2) * grad * grad
    mu.copy_(first)
    nu.copy_(second)
    unit = (first / (1 - b1**steps)) / ((second / (1 - b2**steps)).sqrt() + eps)
    p.sub_(lr * (unit + decay * p))


def _split_loss(tensor: int) -> Any:
    """What computes the loss, and its gradient, of logits that are split."""
    if tensor == 1:
        return contextlib.nullcontext()
    from torch.distributed.tensor.parallel import loss_parallel

    return loss_parallel()


def _over_devices(values: list[float], operation: Any, device: Any) -> list[float]:
    import torch
    import torch.distributed as dist

    found = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(found, operation)
    return found.tolist()


def _batches(
    job: Mapping[str, Any], shape: equal_llama.Shape, device: Any, part: int
) -> list[tuple]:
    """The rows of this device, with the angles of their positions."""
    import torch

    length = job["seq_len"]
    drawn = equal_llama.batches(
        shape.vocab_size,
        job["batch"],
        length,
        documents=job["documents"],
        seed=job["seed"],
        count=job["batches"],
    )
    bounds = [rows.bounds for rows in drawn if rows.bounds is not None]
    # One length for all batches, so that nothing is compiled again.
    longest = max((int(np.diff(b).max()) for b in bounds), default=0)
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float32) / shape.head_dim
    frequencies = np.float32(shape.rope_theta) ** -exponents

    def moved(x: np.ndarray) -> Any:
        return torch.from_numpy(np.ascontiguousarray(x)).to(device)

    found = []
    for rows in drawn:
        tokens = np.array_split(rows.tokens, job["fsdp"])[part].astype(np.int64)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        positions, documents = np.arange(length), None
        if rows.bounds is not None:  # all rows in one, [1, B * T]
            own = np.array_split(rows.bounds, job["fsdp"])[part]
            inputs, targets = inputs.reshape(1, -1), targets.reshape(1, -1)
            starts = np.stack([row[:-1].repeat(np.diff(row)) for row in own])
            positions = (positions - starts).reshape(-1)  # [B * T]
            ends = own[:, 1:] + length * np.arange(len(own))[:, None]
            ends = np.concatenate([[0], ends.reshape(-1)])  # [B * D + 1]
            documents = moved(ends.astype(np.int32)), longest
        angles = np.outer(positions.astype(np.float32), frequencies)
        tables = moved(np.cos(angles)), moved(np.sin(angles))
        found.append((moved(inputs), moved(targets), *tables, documents))
    return found


if __name__ == "__main__":
    child(json.loads(pathlib.Path(sys.argv[1]).read_text()), int(sys.argv[2]))
