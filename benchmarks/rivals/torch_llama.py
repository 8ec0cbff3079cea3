"""The PyTorch model of `benchmarks.training`: LLaMA, its weights, its split over GPUs.

The same architecture, shapes and weights as ours. Unpacked rows attend by SDPA (PyTorch
picks cuDNN or FlashAttention); rows of several documents lie end to end in one, and
attend by `varlen_attn` (FlashAttention). Query, key and value are one matmul, gate and
up another. Over `tensor` PyTorch's own parallel styles (DTensor) split the model as
ours is: heads, hidden features and vocabulary inside, tokens between the blocks; a
parallel block gathers and scatters once. Over `fsdp` it is FSDP2.

Legend: B batch, T tokens, N query heads, K key/value heads, H head dim.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.workloads.equal_llama import Shape, weight


def build(shape: Shape, tensor: int = 1):
    """The model as a `torch.nn.Module` that returns the mean cross-entropy.

    Args:
        shape: Its sizes.
        tensor: Parts that heads will be split into; a device computes one of them.
    """
    import torch
    import torch.nn.functional as F
    from torch import nn

    n, k = shape.num_heads // tensor, shape.num_kv_heads // tensor  # of this device
    h = shape.head_dim

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            heads = shape.num_heads + 2 * shape.num_kv_heads
            self.qkv = nn.Linear(shape.d_model, heads * h, bias=False)
            self.out = nn.Linear(shape.num_heads * h, shape.d_model, bias=False)

        def forward(self, x, cos, sin, documents):
            b, t, _ = x.shape
            q, key, v = self.qkv(x).split((n * h, k * h, k * h), dim=-1)
            if documents is not None:  # b is 1
                q = rotate(q.view(t, n, h), cos[:, None], sin[:, None])
                key = rotate(key.view(t, k, h), cos[:, None], sin[:, None])
                y = varlen(q, key, v.reshape(t, k, h), *documents)  # [T, N, H]
                return self.out(y.reshape(b, t, n * h))
            q = rotate(q.view(b, t, n, h).transpose(1, 2), cos, sin)
            key = rotate(key.view(b, t, k, h).transpose(1, 2), cos, sin)
            v = v.view(b, t, k, h).transpose(1, 2)  # [B, K, T, H]
            y = F.scaled_dot_product_attention(
                q, key, v, is_causal=True, enable_gqa=n != k
            )
            return self.out(y.transpose(1, 2).reshape(b, t, n * h))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up = nn.Linear(shape.d_model, 2 * shape.d_ff, bias=False)
            self.down = nn.Linear(shape.d_ff, shape.d_model, bias=False)

        def forward(self, x):
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return self.down(F.silu(gate) * up)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
            self.attention = Attention()
            self.mlp = MLP()
            if not shape.parallel_block:
                self.mlp_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
            # Where tokens are gathered and sums scattered, if they are split.
            self.gather, self.scatter = nn.Identity(), nn.Identity()

        def forward(self, x, cos, sin, documents):
            y = self.gather(self.attention_norm(x))
            attended = self.attention(y, cos, sin, documents)
            if shape.parallel_block:
                return x + self.scatter(attended + self.mlp(y))
            x = x + self.scatter(attended)
            return x + self.scatter(self.mlp(self.gather(self.mlp_norm(x))))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.num_layers))
            self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
            self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
            self.loss = cross_entropy

        def forward(self, tokens, targets, cos, sin, documents=None):
            x = self.embed(tokens)
            if torch.is_autocast_enabled(x.device.type):
                # A table in fp32 would keep the residual stream in fp32.
                x = x.to(torch.get_autocast_dtype(x.device.type))
            for block in self.blocks:
                x = block(x, cos, sin, documents)
            return self.loss(self.lm_head(self.norm(x)), targets)

    def cross_entropy(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    def varlen(q, k, v, bounds, longest):
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(
            q, k, v, bounds, bounds, longest, longest, window_size=(-1, 0)
        )

    return Llama()


def make(shape: Shape, seed: int, tensor: int = 1) -> Any:
    """The model on the CPU in fp32, with the weights of a seed."""
    import torch

    with torch.device("meta"):
        model = build(shape, tensor)
    model = model.to_empty(device="cpu")
    if shape.tie_embeddings:
        model.lm_head.weight = model.embed.weight

    def fill(name: str, parameter: Any) -> None:
        values = np.ascontiguousarray(_value(shape, name, seed, tensor))
        with torch.no_grad():  # of this thread
            parameter.copy_(torch.from_numpy(values))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(fill, *zip(*model.named_parameters(), strict=True)))
    return model


def _value(shape: Shape, name: str, seed: int, tensor: int) -> np.ndarray:
    """The value of a parameter of `build`; a linear layer's is [out, in]."""
    if name == "embed.weight":
        return weight(shape, "embed.table", seed)
    if name == "lm_head.weight":
        return weight(shape, "lm_head.kernel", seed).T
    if name == "norm.weight":
        return weight(shape, "norm.scale", seed)
    _, layer, inner = name.split(".", 2)
    inner = inner.removesuffix(".weight")

    def of(part: str) -> np.ndarray:
        return weight(shape, f"blocks.{part}", seed, int(layer))

    if inner.endswith("norm"):
        return of(f"{inner}.scale")
    joined = {
        "attention.qkv": ("attention.query", "attention.key", "attention.value"),
        "mlp.gate_up": ("mlp.gate", "mlp.up"),
    }.get(inner, (inner,))
    if len(joined) == 1:
        return of(f"{inner}.kernel").T
    # Each device gets consecutive rows: its part of all that are joined.
    kernels = [np.split(of(f"{part}.kernel"), tensor, axis=1) for part in joined]
    parts = [x for device in zip(*kernels, strict=True) for x in device]
    return np.concatenate(parts, axis=1).T


def split(model: Any, mesh: Any, *, zero: int, dtype: Any, compiled: bool) -> None:
    """Split a model over a mesh of `fsdp` and `tensor`, in place.

    Args:
        model: From `make`.
        mesh: A `DeviceMesh`; the parameters move to its devices.
        zero: 3 gathers parameters again in the backward pass, 2 keeps them.
        dtype: Of the computation; reductions are in fp32.
        compiled: Whether blocks, and the loss where it is not split, are compiled.
    """
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    tensor = mesh["tensor"].size()
    if tensor > 1:
        _split_tensor(model, mesh["tensor"])
    if compiled:
        for block in model.blocks:
            block.compile()
        if tensor == 1:
            model.loss = torch.compile(model.loss)
    # The angles of the rotation stay in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    options = {"mesh": mesh["fsdp"], "mp_policy": policy}
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=zero == 3, **options)
    fully_shard(model, **options)


def _split_tensor(model: Any, mesh: Any) -> None:
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    tokens = Shard(1)
    summed = {"output_layouts": Partial(), "use_local_output": False}
    block = {
        "attention_norm": SequenceParallel(),
        "mlp_norm": SequenceParallel(),
        "gather": PrepareModuleInput(
            input_layouts=tokens, desired_input_layouts=Replicate()
        ),
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(**summed),
        "mlp.gate_up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(**summed),
        "scatter": PrepareModuleInput(
            input_layouts=Partial(),
            desired_input_layouts=tokens,
            use_local_output=True,
        ),
    }
    for layer in model.blocks:
        plan = {
            n: style for n, style in block.items() if hasattr(layer, n.split(".")[0])
        }
        parallelize_module(layer, mesh, plan)
    ends = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=tokens),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False
        ),
    }
    parallelize_module(model, mesh, ends)
    # What compiled blocks read must have arrived: through a pending tensor gradients
    # come back wrong (torch 2.13).
    model.embed.register_forward_hook(lambda module, inputs, output: output.clone())
