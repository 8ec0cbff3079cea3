"""Encoder layers of real models: one list for tests."""

import jax.numpy as jnp

from pallas_kernels.encode_layer.config import Problem


def _base(tokens: int, last: bool = False) -> Problem:
    """A layer of BERT or DistilBERT base."""
    return Problem(
        m=tokens,
        attended=768,
        d_model=768,
        d_ff=3072,
        heads=() if last else (768, 768, 768),
        dtype=jnp.dtype(jnp.bfloat16),
    )


SPECS = {f"bert_base_m{m}": _base(m) for m in (128, 256, 512, 688, 1024)} | {
    "bert_base_m256_last": _base(256, last=True)
}
"""Every shape that is lowered in the tests."""
