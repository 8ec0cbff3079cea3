"""The PyTorch baseline of `benchmarks.training`: LLaMA, compiled, tuned honestly.

The same architecture, shapes, types and optimizer as ours: fp32 parameters and Adam
moments, bf16 computation by autocast, `torch.compile` over the whole model and the
fused AdamW. Whole rows attend by SDPA (PyTorch picks cuDNN or FlashAttention); rows of
several documents lie end to end in one, and attend by `varlen_attn` (FlashAttention).
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a LLaMA model, independent of jaxscale."""

    vocab_size: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float
    norm_eps: float
    tie_embeddings: bool


def build(shape: Shape):
    """The model as a `torch.nn.Module` that returns the mean cross-entropy."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_dim
            self.qkv = nn.Linear(shape.d_model, (n + 2 * k) * h, bias=False)
            self.out = nn.Linear(n * h, shape.d_model, bias=False)

        def forward(self, x, cos, sin, documents):
            b, t, _ = x.shape
            n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_dim
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
            self.mlp_norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
            self.mlp = MLP()

        def forward(self, x, cos, sin, documents):
            x = x + self.attention(self.attention_norm(x), cos, sin, documents)
            return x + self.mlp(self.mlp_norm(x))

    class Llama(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocab_size, shape.d_model)
            self.blocks = nn.ModuleList(Block() for _ in range(shape.num_layers))
            self.norm = nn.RMSNorm(shape.d_model, eps=shape.norm_eps)
            self.lm_head = nn.Linear(shape.d_model, shape.vocab_size, bias=False)
            for name, p in self.named_parameters():
                if p.ndim > 1:
                    residual = name.endswith(("out.weight", "down.weight"))
                    depth = (2 * shape.num_layers) ** 0.5 if residual else 1.0
                    nn.init.normal_(p, std=0.02 / depth)
            if shape.tie_embeddings:
                self.lm_head.weight = self.embed.weight

        def forward(self, tokens, targets, cos, sin, documents=None):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, cos, sin, documents)
            logits = self.lm_head(self.norm(x))
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


def measure(
    shape: Shape,
    batch: int,
    seq_len: int,
    rows: Sequence[Any],
    seed: int,
    samples: int,
) -> dict[str, Any]:
    """Train on random tokens: the seconds of each step, and metrics of the run.

    `rows` holds for each batch where its documents lie, [B, D + 1] in tokens of their
    row, or None for whole rows.
    """
    import numpy as np
    import torch

    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    model = build(shape).cuda()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        lr=3e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=True,
    )
    exponents = torch.arange(0, shape.head_dim, 2, device="cuda") / shape.head_dim
    frequencies = shape.rope_theta**-exponents

    def rotation(bounds):
        places = np.arange(seq_len)
        if bounds is not None:
            starts = [row[:-1].repeat(np.diff(row)) for row in bounds]
            places = (places - np.stack(starts)).reshape(-1)  # [B * T]
        angles = torch.outer(
            torch.tensor(places, device="cuda", dtype=torch.float32), frequencies
        )
        return angles.cos(), angles.sin()

    # One length for all batches, so that nothing is compiled again.
    longest = max((int(np.diff(r).max()) for r in rows if r is not None), default=0)

    def end_to_end(bounds):
        if bounds is None:
            return None
        ends = bounds[:, 1:] + seq_len * np.arange(batch)[:, None]
        ends = torch.tensor(ends.reshape(-1), dtype=torch.int32, device="cuda")  # [B*D]
        return torch.nn.functional.pad(ends, (1, 0)), longest

    compiled = torch.compile(model)

    def step(batch):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(*batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    batches = []
    for bounds in rows:
        tokens = torch.randint(shape.vocab_size, (batch, seq_len + 1), device="cuda")
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if bounds is not None:  # all rows in one, [1, B * T]
            inputs, targets = inputs.reshape(1, -1), targets.reshape(1, -1)
        batches.append((inputs, targets, *rotation(bounds), end_to_end(bounds)))
    start = time.perf_counter()
    losses = [step(batches[i]) for i in range(3)]
    compile_seconds = time.perf_counter() - start
    seconds = []
    for i in range(samples):
        start = time.perf_counter()
        losses.append(step(batches[i % 4]))
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": seconds,
        "metrics": {
            "compile_seconds": compile_seconds,
            "first_loss": losses[0],
            "last_loss": losses[-1],
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        },
    }
