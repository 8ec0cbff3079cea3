"""The PyTorch baseline of `benchmarks.training`: LLaMA, compiled, tuned honestly.

The same architecture, shapes, types and optimizer as ours: fp32 parameters and Adam
moments, bf16 computation by autocast, SDPA attention (PyTorch picks cuDNN or
FlashAttention), `torch.compile` over the whole model and the fused AdamW.
"""

import dataclasses
import time
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

        def forward(self, x, cos, sin):
            b, t, _ = x.shape
            n, k, h = shape.num_heads, shape.num_kv_heads, shape.head_dim
            q, key, v = self.qkv(x).split((n * h, k * h, k * h), dim=-1)
            q = rotate(q.view(b, t, n, h).transpose(1, 2), cos, sin)
            key = rotate(key.view(b, t, k, h).transpose(1, 2), cos, sin)
            v = v.view(b, t, k, h).transpose(1, 2)
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

        def forward(self, x, cos, sin):
            x = x + self.attention(self.attention_norm(x), cos, sin)
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

        def forward(self, tokens, targets, cos, sin):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x, cos, sin)
            logits = self.lm_head(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def rotate(x, cos, sin):
        a, b = x.float().chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)

    return Llama()


def measure(
    shape: Shape, batch: int, seq_len: int, seed: int, samples: int
) -> dict[str, Any]:
    """Train on random tokens: the seconds of each step, and metrics of the run."""
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
    positions = torch.arange(seq_len, device="cuda", dtype=torch.float32)
    exponents = torch.arange(0, shape.head_dim, 2, device="cuda") / shape.head_dim
    angles = torch.outer(positions, shape.rope_theta**-exponents)
    cos, sin = angles.cos(), angles.sin()
    compiled = torch.compile(model)

    def step(tokens):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = compiled(tokens[:, :-1], tokens[:, 1:], cos, sin)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    batches = [
        torch.randint(shape.vocab_size, (batch, seq_len + 1), device="cuda")
        for _ in range(4)
    ]
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
