"""Gemma 1, 2 and 3 (text): named configurations, and their Hugging Face files.

References:
    Gemma, arXiv 2403.08295. Gemma 2, arXiv 2408.00118. Gemma 3, arXiv 2503.19786.
"""

import dataclasses
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.families.llama import (
    LLAMA,
    llama_keys,
    llama_tensors,
    write_llama_keys,
)
from jaxscale.models.families.qwen import qk_norm_tensors
from jaxscale.models.hf.keys import (
    FULL,
    SLIDING,
    Keys,
    activation_name,
    beside,
    full_layers,
    layer_types,
    read_activation,
    read_rope,
    require,
    write_rope,
)
from jaxscale.models.hf.names import TensorMap, scale
from jaxscale.nn.blocks import GATED
from jaxscale.nn.embeddings import RopeScaling


_COMMON: dict[str, Any] = {
    "norm": "rmsnorm_1p",
    "scale_embeddings": True,
}
"""Settings of all of them."""


_TINY: dict[str, Any] = {
    "vocab_size": 256,
    "d_model": 32,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "d_ff": 64,
    "max_seq_len": 128,
}


def _gemma(
    *,
    head_dim: int = 256,
    vocab_size: int = 256_000,
    max_seq_len: int = 8192,
    **sizes: Any,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        head_dim=head_dim,
        max_seq_len=max_seq_len,
        norm_eps=1e-6,
        activation="geglu_tanh",
        tie_embeddings=True,
        **_COMMON,
        **sizes,
    )


def gemma_tiny() -> DecoderConfig:
    """A Gemma for tests."""
    return _gemma(**_TINY | {"num_layers": 2, "num_kv_heads": 1})


def gemma_2b() -> DecoderConfig:
    """Gemma 2B, 2.5 billion parameters."""
    return _gemma(d_model=2048, num_layers=18, num_heads=8, num_kv_heads=1, d_ff=16_384)


def gemma_7b() -> DecoderConfig:
    """Gemma 7B, 8.5 billion parameters."""
    return _gemma(
        d_model=3072, num_layers=28, num_heads=16, num_kv_heads=16, d_ff=24_576
    )


def _gemma2(
    *,
    num_layers: int,
    window: int = 4096,
    query_pre_attn_scalar: int = 256,
    attention_softcap: float = 50.0,
    logit_softcap: float = 30.0,
    **sizes: Any,
) -> DecoderConfig:
    return _gemma(
        num_layers=num_layers,
        window=window,
        global_layers=tuple(range(1, num_layers, 2)),
        query_pre_attn_scalar=query_pre_attn_scalar,
        attention_softcap=attention_softcap,
        logit_softcap=logit_softcap,
        output_norms=True,
        **sizes,
    )


def gemma2_tiny() -> DecoderConfig:
    """A Gemma 2 for tests."""
    return _gemma2(
        **_TINY,
        window=6,
        query_pre_attn_scalar=24,
        attention_softcap=4.0,
        logit_softcap=3.0,
    )


def gemma2_2b() -> DecoderConfig:
    """Gemma 2 2B, 2.6 billion parameters."""
    return _gemma2(d_model=2304, num_layers=26, num_heads=8, num_kv_heads=4, d_ff=9216)


def gemma2_9b() -> DecoderConfig:
    """Gemma 2 9B, 9.2 billion parameters."""
    return _gemma2(
        d_model=3584, num_layers=42, num_heads=16, num_kv_heads=8, d_ff=14_336
    )


def gemma2_27b() -> DecoderConfig:
    """Gemma 2 27B, 27.2 billion parameters."""
    return _gemma2(
        d_model=4608,
        num_layers=46,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        d_ff=36_864,
        query_pre_attn_scalar=144,
    )


def _gemma3(
    *,
    num_layers: int,
    period: int = 6,
    window: int = 512,
    query_pre_attn_scalar: int = 256,
    **sizes: Any,
) -> DecoderConfig:
    return _gemma(
        num_layers=num_layers,
        window=window,
        global_layers=tuple(range(period - 1, num_layers, period)),
        rope_theta=1e6,
        rope_theta_local=10_000.0,
        query_pre_attn_scalar=query_pre_attn_scalar,
        qk_norm=True,
        output_norms=True,
        **{"vocab_size": 262_144, "max_seq_len": 32_768} | sizes,
    )


def gemma3_tiny() -> DecoderConfig:
    """A Gemma 3 for tests, with one global layer in two."""
    return _gemma3(**_TINY, period=2, window=6, query_pre_attn_scalar=16)


def gemma3_270m() -> DecoderConfig:
    """Gemma 3 270M, 268 million parameters."""
    return _gemma3(d_model=640, num_layers=18, num_heads=4, num_kv_heads=1, d_ff=2048)


def gemma3_1b() -> DecoderConfig:
    """Gemma 3 1B, 1.0 billion parameters."""
    return _gemma3(d_model=1152, num_layers=26, num_heads=4, num_kv_heads=1, d_ff=6912)


# ------------------------------------------------------------------------------------
# Hugging Face files


type _Rope = tuple[float, RopeScaling | None]


def _keys(
    values: Keys, activation_key: str, rope: _Rope | None = None
) -> dict[str, Any]:
    """The settings that all have under the same keys, except the activation."""
    require(values, "use_bidirectional_attention", False)
    plain = read_activation(values, activation_key, "gelu_pytorch_tanh")
    gated = {gate: name for name, gate in GATED.items()}
    if plain not in gated:
        raise ValueError(
            f"{activation_key} {values[activation_key]!r} of config.json is not "
            f"supported for model_type {values['model_type']!r}; use a GELU"
        )
    bias = values.get("attention_bias", False)
    # transformers leaves out what has its default, which differs from LLaMA's.
    defaults = {"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    return _COMMON | {
        **llama_keys(Keys(defaults | values), hidden_act=None, rope=rope),
        "num_kv_heads": values["num_key_value_heads"],
        "activation": gated[plain],
        "attention_bias": bias,
        "attention_out_bias": bias,
    }


def _read(values: Keys) -> DecoderConfig:
    # The first files name the exact GELU where they mean its approximation, which some
    # name beside it; no version of transformers after them computes the exact one.
    meant = Keys(values)
    if values.get("hidden_act", "gelu") == "gelu":
        meant["hidden_act"] = "gelu_pytorch_tanh"
    keys = _keys(meant, "hidden_act")
    if "hidden_activation" in values and (
        read_activation(values, "hidden_activation")
        != read_activation(meant, "hidden_act")
    ):
        raise ValueError(
            f"hidden_activation {values['hidden_activation']!r} of config.json is not "
            f"supported for model_type 'gemma' beside hidden_act "
            f"{values.get('hidden_act')!r}, which counts; set both to the same"
        )
    return DecoderConfig(**keys)


def _read_gemma2(values: Keys) -> DecoderConfig:
    cap = _softcap(values, "attn_logit_softcapping", 50.0)
    return DecoderConfig(
        **_keys_after_gemma2(values, period=2),
        attention_softcap=cap,
        logit_softcap=_softcap(values, "final_logit_softcapping", 30.0),
    )


def _read_gemma3(values: Keys) -> DecoderConfig:
    require(values, "attn_logit_softcapping", None)
    rope = _read_rope_of(values, FULL, values.get("rope_theta", 1e6))
    keys = _keys_after_gemma2(values, values.get("sliding_window_pattern", 6), rope)
    local, unscaled = _read_rope_of(
        values, SLIDING, values.get("rope_local_base_freq", 10_000.0)
    )
    if unscaled is not None:
        raise ValueError(
            f"rope_parameters of {SLIDING} in config.json is not supported with a "
            "scaling; expected rope_type 'default'"
        )
    keys |= {
        "rope_theta_local": None if keys["window"] is None else local,
        "qk_norm": True,
    }
    return DecoderConfig(
        **keys, logit_softcap=_softcap(values, "final_logit_softcapping", None)
    )


def _keys_after_gemma2(
    values: Keys, period: int, rope: _Rope | None = None
) -> dict[str, Any]:
    count = values["num_hidden_layers"]
    usual = [SLIDING if (i + 1) % period else FULL for i in range(count)]
    window = values.get("sliding_window", 4096)
    if "sliding_window" in values.nulls:
        window = None
    full = full_layers(Keys({"layer_types": usual} | values), window)
    if len(full) == count:
        window, full = None, ()
    return _keys(values, "hidden_activation", rope) | {
        "window": window,
        "global_layers": full,
        "query_pre_attn_scalar": values.get("query_pre_attn_scalar", 256),
        "output_norms": True,
    }


def _softcap(values: Keys, key: str, default: float | None) -> float | None:
    """A softcap, which null switches off."""
    cap = None if key in values.nulls else values.get(key, default)
    return None if cap is None else float(cap)


def _read_rope_of(values: Keys, kind: str, theta: float) -> _Rope:
    """Base and scaling of the layers of a kind; `theta` is that of old files."""
    rope = values.get("rope_parameters", {}).get(kind) or {}
    if kind == FULL:
        rope = rope | values.get("rope_scaling", {})
    return read_rope(beside(values, {"rope_theta": theta} | rope))


def _write(config: DecoderConfig) -> dict[str, Any]:
    activation = activation_name(GATED.get(config.activation, config.activation))
    if config.activation == "geglu_tanh":
        activation = "gelu_pytorch_tanh"
    return write_llama_keys(config) | {
        "hidden_act": activation,
        "attention_bias": config.attention_bias,
    }


def _write_gemma2(config: DecoderConfig) -> dict[str, Any]:
    values = _write(config)
    return values | {
        "hidden_activation": values["hidden_act"],
        "sliding_window": config.window,
        "layer_types": layer_types(config),
        "query_pre_attn_scalar": config.query_pre_attn_scalar or config.head_dim,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
    }


def _write_gemma3(config: DecoderConfig) -> dict[str, Any]:
    local = config.rope_theta_local or config.rope_theta
    return _write_gemma2(config) | {
        "rope_local_base_freq": local,
        "rope_parameters": {
            FULL: write_rope(config.rope_theta, config.rope_scaling),
            SLIDING: write_rope(local, None),
        },
    }


def _gemma2_tensors(config: DecoderConfig) -> list[TensorMap]:
    block = "model.layers.{layer}."
    # LLaMA's norm behind attention is what its name says here.
    renamed = {
        "blocks.mlp_norm.scale": block + "pre_feedforward_layernorm.weight",
    }
    maps = [
        dataclasses.replace(m, name=renamed.get(m.parameters[0], m.name))
        for m in llama_tensors(config)
    ]
    return [
        *maps,
        scale(block + "post_attention_layernorm", "blocks.attention_out_norm"),
        scale(block + "post_feedforward_layernorm", "blocks.mlp_out_norm"),
    ]


def _gemma3_tensors(config: DecoderConfig) -> list[TensorMap]:
    return [*_gemma2_tensors(config), *qk_norm_tensors()]


GEMMA = dataclasses.replace(
    LLAMA,
    model_type="gemma",
    architecture="GemmaForCausalLM",
    presets=(gemma_tiny, gemma_2b, gemma_7b),
    read=_read,
    write=_write,
)
"""The files of the first Gemma."""

GEMMA2 = dataclasses.replace(
    GEMMA,
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    presets=(gemma2_tiny, gemma2_2b, gemma2_9b, gemma2_27b),
    read=_read_gemma2,
    write=_write_gemma2,
    tensors=_gemma2_tensors,
)
"""Gemma 2's files."""

GEMMA3 = dataclasses.replace(
    GEMMA,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    presets=(gemma3_tiny, gemma3_270m, gemma3_1b),
    read=_read_gemma3,
    write=_write_gemma3,
    tensors=_gemma3_tensors,
)
"""The files of Gemma 3 for text alone."""
