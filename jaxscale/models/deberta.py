"""DeBERTa-v2 and DeBERTa-v3: named configurations.

References:
    DeBERTa, arXiv 2006.03654. DeBERTa-v3, arXiv 2111.09543.
"""

import dataclasses

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.nn.disentangled import RelativePositions


def _deberta(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 128_100,
    max_seq_len: int = 512,
    span: int = 256,
    max_distance: int = 512,
    convolution: int = 0,
) -> EncoderConfig:
    return EncoderConfig(
        family="deberta",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        token_types=0,
        position="none",
        relative=RelativePositions(span=span, max_distance=max_distance),
        relative_norm=True,
        convolution=convolution,
        norm_eps=1e-7,
    )


def deberta_v3_tiny() -> EncoderConfig:
    """A DeBERTa-v3 of 34 thousand parameters, for tests."""
    return _deberta(
        d_model=32,
        num_layers=2,
        num_heads=4,
        vocab_size=256,
        max_seq_len=64,
        span=4,
        max_distance=12,
    )


def deberta_v3_xsmall() -> EncoderConfig:
    """DeBERTa-v3-xsmall, 71 million parameters."""
    return _deberta(d_model=384, num_layers=12, num_heads=6)


def deberta_v3_small() -> EncoderConfig:
    """DeBERTa-v3-small, 141 million parameters."""
    return _deberta(d_model=768, num_layers=6, num_heads=12)


def deberta_v3_base() -> EncoderConfig:
    """DeBERTa-v3-base, 184 million parameters."""
    return _deberta(d_model=768, num_layers=12, num_heads=12)


def deberta_v3_large() -> EncoderConfig:
    """DeBERTa-v3-large, 434 million parameters."""
    return _deberta(d_model=1024, num_layers=24, num_heads=16)


def mdeberta_v3_base() -> EncoderConfig:
    """mDeBERTa-v3-base, the multilingual one, 279 million parameters."""
    return dataclasses.replace(deberta_v3_base(), vocab_size=251_000)


def deberta_v2_tiny() -> EncoderConfig:
    """A DeBERTa-v2 of 56 thousand parameters with all that it may have, for tests."""
    config = deberta_v3_tiny()
    return dataclasses.replace(
        config,
        num_layers=3,
        token_types=2,
        position="learned",
        relative=RelativePositions(span=5, share_projections=False),
        convolution=3,
    )


def deberta_v2_xlarge() -> EncoderConfig:
    """DeBERTa-v2-xlarge, 885 million parameters."""
    return _deberta(d_model=1536, num_layers=24, num_heads=24, convolution=3)


def deberta_v2_xxlarge() -> EncoderConfig:
    """DeBERTa-v2-xxlarge, 1.6 billion parameters."""
    return dataclasses.replace(deberta_v2_xlarge(), num_layers=48)
