"""Mistral: named configurations, and its Hugging Face files.

References:
    Mistral 7B, arXiv 2310.06825: LLaMA with a sliding window.
"""

import dataclasses
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.families.llama import (
    LLAMA,
    llama_keys,
    llama_tiny,
    write_llama_keys,
)
from jaxscale.models.hf.keys import Keys


def mistral_tiny() -> DecoderConfig:
    """A Mistral for tests."""
    return dataclasses.replace(llama_tiny(), window=16)


def mistral_7b() -> DecoderConfig:
    """Mistral 7B v0.1, 7.24 billion parameters."""
    return DecoderConfig(
        vocab_size=32_000,
        d_model=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=14336,
        max_seq_len=32_768,
        window=4096,
    )


def mistral_7b_v0_3() -> DecoderConfig:
    """Mistral 7B v0.3, without a window; its file is LLaMA's."""
    return dataclasses.replace(
        mistral_7b(), vocab_size=32_768, rope_theta=1e6, window=None
    )


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read(values: Keys) -> DecoderConfig:
    # Without the key there is a window, with null there is none.
    window = values.get("sliding_window", 4096)
    return DecoderConfig(
        **llama_keys(values) | {"num_kv_heads": values["num_key_value_heads"]},
        window=None if "sliding_window" in values.nulls else window,
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    return write_llama_keys(config) | {"sliding_window": config.window}


MISTRAL = dataclasses.replace(
    LLAMA,
    model_type="mistral",
    architecture="MistralForCausalLM",
    presets=(mistral_tiny, mistral_7b, mistral_7b_v0_3),
    read=_read,
    write=_write,
)
"""Mistral's files."""
