"""Bytes of CPython's own library source and documentation, to train small models on.

Nine million characters of Python and reStructuredText by few authors, split by file. It
tells methods apart that are trained alike; it does not show how larger models, natural
language or downstream tasks fare.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.models import DecoderConfig
from jaxscale.nn.packing import PackedBatch
from jaxscale.training.data.corpus import python_corpus, split


@functools.cache
def corpus() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes held out, documents apart by a zero."""
    sides = split(python_corpus(), 0.05)
    found = []
    for documents in sides:
        text = b"\0".join(document.text.encode() for document in documents)
        found.append(np.frombuffer(text, np.uint8))
    return found[0], found[1]


def decoder(d_model: int, layers: int, head_dim: int, length: int) -> DecoderConfig:
    """A LLaMA of bytes."""
    return DecoderConfig(
        vocab_size=256,
        d_model=d_model,
        num_layers=layers,
        num_heads=d_model // head_dim,
        num_kv_heads=d_model // head_dim,
        head_dim=head_dim,
        d_ff=4 * d_model,
        max_seq_len=length,
    )


def batches(length: int, rows: int, seed: int, count: int) -> Iterator[np.ndarray]:
    """[count, rows, length + 1] of consecutive bytes from random places, endlessly.

    The rows and their order depend on the seed alone.
    """
    text, _ = corpus()
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - length - 1, (count, rows))
        yield text[starts[..., None] + np.arange(length + 1)]


def held_out(length: int, rows: int, batch: int) -> list[PackedBatch]:
    """The same rows each time, spread over the held-out text, in batches."""
    _, text = corpus()
    count = min(rows, (len(text) - 1) // length)
    batch = min(batch, count)
    count -= count % batch
    starts = np.linspace(0, len(text) - length - 1, count).astype(np.int64)
    found = text[starts[:, None] + np.arange(length + 1)]
    return [packed(jnp.asarray(part)) for part in np.split(found, count // batch)]


def packed(text: jax.Array) -> PackedBatch:
    """A batch that predicts each byte from those before it."""
    tokens = text.astype(jnp.int32)
    return PackedBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=jnp.ones(tokens[:, 1:].shape, jnp.bool_),
        cu_seqlens=None,
    )


def bits(sums: Callable[[Any, Any], Any], model: Any, rows: Sequence[Any]) -> float:
    """Bits per byte of a model on batches, by ``sums(model, batch)`` of its losses."""
    found = jax.device_get([sums(model, batch) for batch in rows])
    nats = sum(float(s.nll) for s in found) / sum(int(s.tokens) for s in found)
    return nats / math.log(2)


def dtype() -> Any:
    """Of the computation: bf16 where it is fast."""
    on_gpu = jax.devices()[0].platform == "gpu"
    return jnp.bfloat16 if on_gpu else jnp.float32
