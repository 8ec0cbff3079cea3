"""Encoder layers of real models: one list for tests."""

import jax.numpy as jnp

from pallas_kernels.encode_layer.config import Problem


def _layer(tokens: int, d_model: int, last: bool = False) -> Problem:
    """A layer of a model of BERT's proportions."""
    return Problem(
        m=tokens,
        attended=d_model,
        d_model=d_model,
        d_ff=4 * d_model,
        heads=() if last else (d_model,) * 3,
        dtype=jnp.dtype(jnp.bfloat16),
    )


SPECS = {f"bert_base_m{m}": _layer(m, 768) for m in (128, 256, 512, 688, 1024)} | {
    "bert_base_m256_last": _layer(256, 768, last=True),
    "bert_large_m256": _layer(256, 1024),
    "minilm_m256": _layer(256, 384),
}
"""Every shape that is lowered in the tests."""
