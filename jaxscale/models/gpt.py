"""GPT-2 and GPT-J: named configurations.

References:
    Language Models are Unsupervised Multitask Learners (GPT-2), 2019.
    GPT-J-6B, https://github.com/kingoflolz/mesh-transformer-jax, 2021.
"""

from jaxscale.models.config import DecoderConfig


def _gpt2(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 50257,
    max_seq_len: int = 1024,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=d_model // num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        norm="layernorm",
        activation="gelu_tanh",
        position="learned",
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        tie_embeddings=True,
    )


def gpt2_tiny() -> DecoderConfig:
    """A GPT-2 of 36 thousand parameters, for tests."""
    return _gpt2(d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64)


def gpt2_small() -> DecoderConfig:
    """GPT-2, 124 million parameters."""
    return _gpt2(d_model=768, num_layers=12, num_heads=12)


def gpt2_medium() -> DecoderConfig:
    """GPT-2 medium, 355 million parameters."""
    return _gpt2(d_model=1024, num_layers=24, num_heads=16)


def gpt2_large() -> DecoderConfig:
    """GPT-2 large, 774 million parameters."""
    return _gpt2(d_model=1280, num_layers=36, num_heads=20)


def gpt2_xl() -> DecoderConfig:
    """GPT-2 XL, 1.56 billion parameters."""
    return _gpt2(d_model=1600, num_layers=48, num_heads=25)


def _gptj(
    *,
    vocab_size: int,
    d_model: int,
    num_layers: int,
    num_heads: int,
    rotary_dim: int,
    max_seq_len: int,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=d_model // num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        norm="layernorm",
        activation="gelu_tanh",
        rotary_dim=rotary_dim,
        rope_interleaved=True,
        parallel_block=True,
        mlp_bias=True,
        lm_head_bias=True,
    )


def gptj_tiny() -> DecoderConfig:
    """A GPT-J of 42 thousand parameters, for tests."""
    return _gptj(
        vocab_size=256,
        d_model=32,
        num_layers=2,
        num_heads=2,
        rotary_dim=8,
        max_seq_len=64,
    )


def gptj_6b() -> DecoderConfig:
    """GPT-J, 6.05 billion parameters."""
    return _gptj(
        vocab_size=50400,
        d_model=4096,
        num_layers=28,
        num_heads=16,
        rotary_dim=64,
        max_seq_len=2048,
    )
