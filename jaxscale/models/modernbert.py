"""ModernBERT: named configurations.

References:
    ModernBERT, arXiv 2412.13663: rotary embeddings, GeGLU, no biases, and windows in
    two of three layers.
"""

from jaxscale.models.encoder_config import EncoderConfig


def _modernbert(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    d_ff: int,
    window: int = 64,
    vocab_size: int = 50368,
    max_seq_len: int = 8192,
) -> EncoderConfig:
    return EncoderConfig(
        family="modernbert",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=d_ff,
        max_seq_len=max_seq_len,
        token_types=0,
        position="rope",
        rope_theta=160_000.0,
        rope_theta_local=10_000.0,
        window=window,
        global_every=3,
        norm_eps=1e-5,
        norm_bias=False,
        pre_norm=True,
        activation="geglu",
        attention_bias=False,
        mlp_bias=False,
    )


def modernbert_tiny() -> EncoderConfig:
    """A ModernBERT of 64 thousand parameters, for tests."""
    return _modernbert(
        d_model=32,
        num_layers=5,
        num_heads=4,
        d_ff=64,
        window=3,
        vocab_size=256,
        max_seq_len=64,
    )


def modernbert_base() -> EncoderConfig:
    """ModernBERT-base, 149 million parameters."""
    return _modernbert(d_model=768, num_layers=22, num_heads=12, d_ff=1152)


def modernbert_large() -> EncoderConfig:
    """ModernBERT-large, 395 million parameters."""
    return _modernbert(d_model=1024, num_layers=28, num_heads=16, d_ff=2624)
