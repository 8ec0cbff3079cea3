"""ALBERT: named configurations.

References:
    ALBERT, arXiv 1909.11942: one block is every layer, and the tables are narrow.
"""

from jaxscale.models.encoder_config import EncoderConfig


def _albert(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    embed_dim: int = 128,
    vocab_size: int = 30000,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        family="albert",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        embed_dim=embed_dim,
        activation="gelu_tanh",
        share_layers=True,
    )


def albert_tiny() -> EncoderConfig:
    """An ALBERT of 19 thousand parameters, for tests."""
    return _albert(
        d_model=32,
        num_layers=3,
        num_heads=4,
        embed_dim=16,
        vocab_size=256,
        max_seq_len=64,
    )


def albert_base() -> EncoderConfig:
    """ALBERT-base v2, 11 million parameters."""
    return _albert(d_model=768, num_layers=12, num_heads=12)


def albert_large() -> EncoderConfig:
    """ALBERT-large v2, 17 million parameters."""
    return _albert(d_model=1024, num_layers=24, num_heads=16)
