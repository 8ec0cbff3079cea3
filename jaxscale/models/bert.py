"""BERT and RoBERTa: named configurations.

References:
    BERT, arXiv 1810.04805. RoBERTa, arXiv 1907.11692.
"""

from jaxscale.models.encoder_config import EncoderConfig


def _bert(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 30522,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
    )


def bert_tiny() -> EncoderConfig:
    """A BERT of 36 thousand parameters, for tests."""
    return _bert(d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64)


def bert_base() -> EncoderConfig:
    """BERT-base, 109 million parameters."""
    return _bert(d_model=768, num_layers=12, num_heads=12)


def bert_large() -> EncoderConfig:
    """BERT-large, 334 million parameters."""
    return _bert(d_model=1024, num_layers=24, num_heads=16)


def minilm_l6() -> EncoderConfig:
    """MiniLM with 6 layers, 23 million parameters (all-MiniLM-L6-v2)."""
    return _bert(d_model=384, num_layers=6, num_heads=12)


def _roberta(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 50265,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        family="roberta",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        token_types=1,
        # The padding token has id 1, and positions are counted from the next number.
        position_offset=2,
        norm_eps=1e-5,
    )


def roberta_tiny() -> EncoderConfig:
    """A RoBERTa of 36 thousand parameters, for tests."""
    return _roberta(
        d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64
    )


def roberta_base() -> EncoderConfig:
    """RoBERTa-base, 124 million parameters."""
    return _roberta(d_model=768, num_layers=12, num_heads=12)


def roberta_large() -> EncoderConfig:
    """RoBERTa-large, 354 million parameters."""
    return _roberta(d_model=1024, num_layers=24, num_heads=16)
