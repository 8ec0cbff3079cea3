"""The LLaMA that every implementation of `benchmarks.training` trains.

Its sizes, its weights and its batches are functions of a seed, made with numpy alone:
each process makes what it needs, so that no file of weights is copied. Weights have
the names, the shapes and the layout of jaxscale's: kernels are [in, out], layers are
stacked.
"""

import collections
import dataclasses
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np


LEARNING_RATE = 3e-6
"""Of AdamW, constant. At 3e-4, without a warm-up, the losses of LLaMA 8B jump up and
down: after eight steps those of PyTorch differ from its own by 3% if it keeps other
activations."""


ROWS = 2048
"""Of a table, that one thread draws at a time."""


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
    parallel_block: bool = False
    """Attention and feed-forward network read one norm and are summed."""
    window: int | None = None
    """Tokens that a token attends to, itself included."""

    @classmethod
    def of(cls, config: Any) -> "Shape":
        """The sizes of a `DecoderConfig`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(config, name) for name in names})


def shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """The shape of each weight, by name; those of layers begin with their number."""
    d, f = shape.d_model, shape.d_ff
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer = {
        "attention.query.kernel": (d, q),
        "attention.key.kernel": (d, kv),
        "attention.value.kernel": (d, kv),
        "attention.out.kernel": (q, d),
        "attention_norm.scale": (d,),
        "mlp.gate.kernel": (d, f),
        "mlp.up.kernel": (d, f),
        "mlp.down.kernel": (f, d),
        "mlp_norm.scale": (d,),
    }
    if shape.parallel_block:
        del layer["mlp_norm.scale"]
    found: dict[str, tuple[int, ...]] = {"embed.table": (shape.vocab_size, d)}
    for name, size in layer.items():
        found[f"blocks.{name}"] = (shape.num_layers, *size)
    found["norm.scale"] = (d,)
    if not shape.tie_embeddings:
        found["lm_head.kernel"] = (d, shape.vocab_size)
    return found


def weight(shape: Shape, name: str, seed: int, layer: int | None = None) -> np.ndarray:
    """One weight in fp32, or that of one layer; matrices by fan-in, scales near one."""
    size = shapes(shape)[name]
    stacked = name.startswith("blocks.")

    def draw(part: np.ndarray, start: int) -> None:
        random = np.random.default_rng([seed, zlib.crc32(name.encode()), start])
        random.standard_normal(out=part, dtype=np.float32)
        # A row of the table is read as it is: its scale is that of other matrices.
        part *= shape.d_model**-0.5 if part.ndim > 1 else 0.1
        part += 0 if part.ndim > 1 else 1

    if stacked and layer is not None:
        drawn = np.empty(size[1:], np.float32)
        draw(drawn, layer)
        return drawn
    drawn = np.empty(size, np.float32)
    # In place and by all cores: LLaMA 8B has 32 GB.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        starts = range(0, size[0], 1 if stacked else ROWS)
        parts = [drawn[i] if stacked else drawn[i : i + ROWS] for i in starts]
        collections.deque(pool.map(draw, parts, starts), maxlen=0)
    return drawn


@dataclasses.dataclass(frozen=True)
class Rows:
    """One batch."""

    tokens: np.ndarray
    """[B, T + 1] Random tokens; each is predicted from those before it."""
    bounds: np.ndarray | None
    """[B, D + 1] Where the documents of each row lie; None if rows are whole."""


def batches(
    vocab_size: int,
    batch: int,
    seq_len: int,
    *,
    documents: int | None = None,
    seed: int,
    count: int,
) -> list[Rows]:
    """Draw batches of random tokens.

    Args:
        vocab_size: Tokens to draw from.
        batch: Rows, B.
        seq_len: Tokens of a row, T.
        documents: Sequences of random lengths in each row, D.
        seed: Of the draw.
        count: Batches.
    """
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        tokens = random.integers(0, vocab_size, (batch, seq_len + 1), np.int32)
        bounds = None
        if documents:
            bounds = np.full((batch, documents + 1), seq_len, np.int32)
            for row in bounds:
                row[0] = 0
                inner = random.choice(seq_len - 1, documents - 1, replace=False)
                row[1:-1] = np.sort(inner + 1)
        found.append(Rows(tokens, bounds))
    return found
