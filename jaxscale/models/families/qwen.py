"""Qwen2, Qwen2.5 and Qwen3: named configurations, and their Hugging Face files.

References:
    Qwen2, arXiv 2407.10671: LLaMA with biases of queries, keys and values, and windows
    in some layers. Qwen3, arXiv 2505.09388: norms of queries and keys instead.
"""

import dataclasses
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.families.llama import (
    LLAMA,
    llama_keys,
    llama_tensors,
    llama_tiny,
    write_llama_keys,
)
from jaxscale.models.hf.keys import Keys, full_layers, layer_types
from jaxscale.models.hf.names import TensorMap, scale


def _qwen(
    *,
    d_model: int,
    num_heads: int,
    head_dim: int | None = None,
    vocab_size: int = 151_936,
    max_seq_len: int = 32_768,
    rope_theta: float = 1e6,
    **sizes: Any,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=num_heads,
        head_dim=head_dim or d_model // num_heads,
        max_seq_len=max_seq_len,
        rope_theta=rope_theta,
        norm_eps=1e-6,
        **sizes,
    )


def qwen2_tiny() -> DecoderConfig:
    """A Qwen2 for tests, with windows behind its first layer."""
    return dataclasses.replace(
        llama_tiny(),
        num_layers=3,
        rope_theta=1e6,
        norm_eps=1e-6,
        attention_bias=True,
        tie_embeddings=True,
        window=16,
        global_layers=(0,),
    )


def qwen2_5_0_5b() -> DecoderConfig:
    """Qwen2.5 0.5B, 494 million parameters."""
    return _qwen(
        d_model=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        d_ff=4864,
        attention_bias=True,
        tie_embeddings=True,
    )


def qwen2_5_7b() -> DecoderConfig:
    """Qwen2.5 7B, 7.6 billion parameters."""
    return _qwen(
        vocab_size=152_064,
        d_model=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        d_ff=18_944,
        max_seq_len=131_072,
        attention_bias=True,
    )


def qwen3_tiny() -> DecoderConfig:
    """A Qwen3 for tests."""
    return dataclasses.replace(
        llama_tiny(), head_dim=16, rope_theta=1e6, norm_eps=1e-6, qk_norm=True
    )


def qwen3_0_6b() -> DecoderConfig:
    """Qwen3 0.6B, 596 million parameters."""
    return _qwen(
        d_model=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        d_ff=3072,
        max_seq_len=40_960,
        qk_norm=True,
        tie_embeddings=True,
    )


def qwen3_8b() -> DecoderConfig:
    """Qwen3 8B, 8.2 billion parameters."""
    return _qwen(
        d_model=4096,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=12_288,
        max_seq_len=40_960,
        qk_norm=True,
    )


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read_qwen2(values: Keys) -> DecoderConfig:
    return DecoderConfig(**_keys(values), attention_bias=True)


def _read_qwen3(values: Keys) -> DecoderConfig:
    bias = values.get("attention_bias", False)
    return DecoderConfig(
        **_keys(Keys({"head_dim": 128} | values)),
        attention_bias=bias,
        attention_out_bias=bias,
        qk_norm=True,
    )


def _keys(values: Keys) -> dict[str, Any]:
    """The keys that Qwen2 and Qwen3 have in common."""
    window = values.get("sliding_window", 4096)
    if not values.get("use_sliding_window", False) or "sliding_window" in values.nulls:
        window = None
    full = _full_layers(values, window)
    if len(full) == values["num_hidden_layers"]:
        window, full = None, ()
    return llama_keys(values) | {
        "num_kv_heads": values["num_key_value_heads"],
        "window": window,
        "global_layers": full if window is not None else (),
    }


def _full_layers(values: Keys, window: int | None) -> tuple[int, ...]:
    """The layers with global attention."""
    if "layer_types" in values:
        return full_layers(values, window)
    first = values.get("max_window_layers", 28)
    return (
        () if window is None else tuple(range(min(values["num_hidden_layers"], first)))
    )


def _write_qwen2(config: DecoderConfig) -> dict[str, Any]:
    windows = [config.attention(i).window for i in range(config.num_layers)]
    return write_llama_keys(config) | {
        "use_sliding_window": config.window is not None,
        "sliding_window": config.window,
        # Of readers that do not know layer_types: the windows begin behind these.
        "max_window_layers": next(
            (i for i, w in enumerate(windows) if w is not None), config.num_layers
        ),
        "layer_types": layer_types(config),
    }


def _write_qwen3(config: DecoderConfig) -> dict[str, Any]:
    return _write_qwen2(config) | {"attention_bias": config.attention_bias}


def _qwen3_tensors(config: DecoderConfig) -> list[TensorMap]:
    return [*llama_tensors(config), *qk_norm_tensors()]


def qk_norm_tensors() -> list[TensorMap]:
    """The tensors of the norms of queries and keys."""
    theirs, ours = "model.layers.{layer}.self_attn.", "blocks.attention."
    return [
        scale(theirs + "q_norm", ours + "query_norm"),
        scale(theirs + "k_norm", ours + "key_norm"),
    ]


QWEN2 = dataclasses.replace(
    LLAMA,
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    presets=(qwen2_tiny, qwen2_5_0_5b, qwen2_5_7b),
    read=_read_qwen2,
    write=_write_qwen2,
)
"""The files of Qwen2 and Qwen2.5."""

QWEN3 = dataclasses.replace(
    LLAMA,
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    presets=(qwen3_tiny, qwen3_0_6b, qwen3_8b),
    read=_read_qwen3,
    write=_write_qwen3,
    tensors=_qwen3_tensors,
)
"""Qwen3's files."""
