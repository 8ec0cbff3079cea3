"""DistilBERT: named configurations.

References:
    DistilBERT, arXiv 1910.01108: BERT of half the depth, without token types.
"""

from jaxscale.models.encoder_config import EncoderConfig


def _distilbert(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 30522,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        family="distilbert",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        token_types=0,
    )


def distilbert_tiny() -> EncoderConfig:
    """A DistilBERT of 36 thousand parameters, for tests."""
    return _distilbert(
        d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64
    )


def distilbert_base() -> EncoderConfig:
    """DistilBERT, 66 million parameters."""
    return _distilbert(d_model=768, num_layers=6, num_heads=12)
