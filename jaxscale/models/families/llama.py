"""LLaMA 1, 2, 3, 3.1 and 3.2: named configurations, and their Hugging Face files.

References:
    LLaMA, arXiv 2302.13971. Llama 2, arXiv 2307.09288. Llama 3, arXiv 2407.21783.
"""

import dataclasses
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.hf.family import Family, output_projection
from jaxscale.models.hf.keys import (
    Keys,
    divided_width,
    read_rope,
    require,
    write_rope_keys,
)
from jaxscale.models.hf.names import TensorMap, linear, scale, table
from jaxscale.nn.embeddings import RopeScaling


def _llama(
    *, d_model: int, num_heads: int, vocab_size: int = 32_000, **sizes: Any
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=num_heads,
        head_dim=d_model // num_heads,
        **{"num_kv_heads": num_heads, **sizes},
    )


def llama_tiny() -> DecoderConfig:
    """A LLaMA of 35 thousand parameters, for tests."""
    return _llama(
        vocab_size=256,
        d_model=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        d_ff=64,
        max_seq_len=128,
    )


def llama_1b() -> DecoderConfig:
    """A 1.14-billion LLaMA to train from scratch: Llama 3.2 1B with a small vocabulary.

    The head dim is 128, as in large models, with which kernels are faster than with 64.
    """
    return _llama(
        d_model=2048,
        num_layers=16,
        num_heads=16,
        num_kv_heads=8,
        d_ff=8192,
        max_seq_len=4096,
        rope_theta=500_000.0,
    )


def llama1_7b() -> DecoderConfig:
    """LLaMA 7B."""
    return dataclasses.replace(llama2_7b(), max_seq_len=2048, norm_eps=1e-6)


def llama1_13b() -> DecoderConfig:
    """LLaMA 13B."""
    return dataclasses.replace(llama2_13b(), max_seq_len=2048, norm_eps=1e-6)


def llama1_33b() -> DecoderConfig:
    """LLaMA 33B (called 30B in some releases)."""
    return _llama(
        d_model=6656,
        num_layers=60,
        num_heads=52,
        d_ff=17920,
        max_seq_len=2048,
        norm_eps=1e-6,
    )


def llama1_65b() -> DecoderConfig:
    """LLaMA 65B."""
    return _llama(
        d_model=8192, num_layers=80, num_heads=64, d_ff=22016, max_seq_len=2048
    )


def llama2_7b() -> DecoderConfig:
    """Llama 2 7B."""
    return _llama(
        d_model=4096, num_layers=32, num_heads=32, d_ff=11008, max_seq_len=4096
    )


def llama2_13b() -> DecoderConfig:
    """Llama 2 13B."""
    return _llama(
        d_model=5120, num_layers=40, num_heads=40, d_ff=13824, max_seq_len=4096
    )


def llama2_70b() -> DecoderConfig:
    """Llama 2 70B."""
    return _llama(
        d_model=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        d_ff=28672,
        max_seq_len=4096,
    )


def _llama3(**sizes: Any) -> DecoderConfig:
    return _llama(
        vocab_size=128_256,
        num_kv_heads=8,
        max_seq_len=8192,
        rope_theta=500_000.0,
        **sizes,
    )


def _long_context(
    config: DecoderConfig, factor: float, **changes: bool
) -> DecoderConfig:
    """`config` with the 131,072-token context of Llama 3.1 and later."""
    scaling = RopeScaling(
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    return dataclasses.replace(
        config, max_seq_len=131_072, rope_scaling=scaling, **changes
    )


def llama3_8b() -> DecoderConfig:
    """Llama 3 8B."""
    return _llama3(d_model=4096, num_layers=32, num_heads=32, d_ff=14336)


def llama3_70b() -> DecoderConfig:
    """Llama 3 70B."""
    return _llama3(d_model=8192, num_layers=80, num_heads=64, d_ff=28672)


def llama3_1_8b() -> DecoderConfig:
    """Llama 3.1 8B."""
    return _long_context(llama3_8b(), 8.0)


def llama3_1_70b() -> DecoderConfig:
    """Llama 3.1 70B."""
    return _long_context(llama3_70b(), 8.0)


def llama3_1_405b() -> DecoderConfig:
    """Llama 3.1 405B."""
    return _long_context(
        _llama3(d_model=16384, num_layers=126, num_heads=128, d_ff=53248), 8.0
    )


def llama3_2_1b() -> DecoderConfig:
    """Llama 3.2 1B."""
    config = _llama3(d_model=2048, num_layers=16, num_heads=32, d_ff=8192)
    return _long_context(config, 32.0, tie_embeddings=True)


def llama3_2_3b() -> DecoderConfig:
    """Llama 3.2 3B."""
    config = _llama3(d_model=3072, num_layers=28, num_heads=24, d_ff=8192)
    return _long_context(config, 32.0, tie_embeddings=True)


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read(values: Keys) -> DecoderConfig:
    require(values, "sliding_window", None)
    return DecoderConfig(
        **llama_keys(values),
        attention_bias=values.get("attention_bias", False),
        attention_out_bias=values.get("attention_bias", False),
        mlp_bias=values.get("mlp_bias", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_llama_keys(config) | {
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def llama_keys(
    values: Keys,
    *,
    hidden_act: str | None = "silu",
    rope: tuple[float, RopeScaling | None] | None = None,
) -> dict[str, Any]:
    """The settings that LLaMA and its successors have under the same keys.

    Args:
        values: The parsed file.
        hidden_act: The only supported activation; None does not read it.
        rope: What `read_rope` gives; None reads it.

    Raises:
        ValueError: a setting that changes the result is not supported, or a key is
            missing.
    """
    if hidden_act is not None:
        require(values, "hidden_act", hidden_act)
    width, heads = values["hidden_size"], values["num_attention_heads"]
    theta, scaling = read_rope(values) if rope is None else rope
    return {
        "vocab_size": values["vocab_size"],
        "d_model": width,
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads", heads),
        "head_dim": values["head_dim"]
        if "head_dim" in values
        else divided_width("hidden_size", width, "num_attention_heads", heads),
        "d_ff": values["intermediate_size"],
        "max_seq_len": values["max_position_embeddings"],
        "norm_eps": float(values["rms_norm_eps"]),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": values.get("tie_word_embeddings", False),
    }


def write_llama_keys(config: DecoderConfig) -> dict[str, Any]:
    """The keys that `llama_keys` reads."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        **write_rope_keys(config.rope_theta, config.rope_scaling),
        "tie_word_embeddings": config.tie_embeddings,
    }


def llama_tensors(config: DecoderConfig) -> list[TensorMap]:
    """Every tensor of LLaMA; its successors have the same, and more."""
    block, ours = "model.layers.{layer}.", "blocks."
    bias, mlp = config.attention_bias, config.mlp_bias
    out_bias = config.attention_out_bias
    return [
        table("model.embed_tokens", "embed"),
        scale(block + "input_layernorm", ours + "attention_norm"),
        *linear(block + "self_attn.q_proj", ours + "attention.query", bias=bias),
        *linear(block + "self_attn.k_proj", ours + "attention.key", bias=bias),
        *linear(block + "self_attn.v_proj", ours + "attention.value", bias=bias),
        *linear(block + "self_attn.o_proj", ours + "attention.out", bias=out_bias),
        scale(block + "post_attention_layernorm", ours + "mlp_norm"),
        *linear(block + "mlp.gate_proj", ours + "mlp.gate", bias=mlp),
        *linear(block + "mlp.up_proj", ours + "mlp.up", bias=mlp),
        *linear(block + "mlp.down_proj", ours + "mlp.down", bias=mlp),
        scale("model.norm", "norm"),
        *output_projection(config, "lm_head"),
    ]


LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    presets=(
        llama_tiny,
        llama_1b,
        llama1_7b,
        llama1_13b,
        llama1_33b,
        llama1_65b,
        llama2_7b,
        llama2_13b,
        llama2_70b,
        llama3_8b,
        llama3_70b,
        llama3_1_8b,
        llama3_1_70b,
        llama3_1_405b,
        llama3_2_1b,
        llama3_2_3b,
    ),
    prefix="model.",
    read=_read,
    write=_write,
    tensors=llama_tensors,
    tied={"lm_head.weight": "model.embed_tokens.weight"},
    buffers=(r"(^|\.)rotary_emb\.inv_freq$",),
)
"""LLaMA's files."""
