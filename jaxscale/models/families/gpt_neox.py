"""GPT-NeoX and Pythia: named configurations, and their Hugging Face files.

References:
    GPT-NeoX-20B, arXiv 2204.06745: attention and feed-forward network side by side,
    each behind a norm of its own. Pythia, arXiv 2304.01373.
"""

import math
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.hf.family import Family, output_projection
from jaxscale.models.hf.keys import (
    Keys,
    activation_name,
    divided_width,
    read_activation,
    read_rope,
    write_rope_keys,
)
from jaxscale.models.hf.names import TensorMap, layer_norm, linear, table


def _neox(
    *,
    d_model: int,
    num_heads: int,
    vocab_size: int = 50432,
    max_seq_len: int = 2048,
    **changes: Any,
) -> DecoderConfig:
    head_dim = d_model // num_heads
    return DecoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        norm="layernorm",
        rotary_dim=head_dim // 4,
        parallel_block=True,
        parallel_mlp_norm=True,
        attention_bias=True,
        attention_out_bias=True,
        mlp_bias=True,
        **{"activation": "gelu", **changes},
    )


def neox_tiny() -> DecoderConfig:
    """A GPT-NeoX for tests."""
    return _neox(d_model=32, num_layers=2, num_heads=2, vocab_size=256, max_seq_len=128)


def pythia_160m() -> DecoderConfig:
    """Pythia 160M."""
    return _neox(d_model=768, num_layers=12, num_heads=12, vocab_size=50304)


def pythia_1_4b() -> DecoderConfig:
    """Pythia 1.4B, 1.41 billion parameters."""
    return _neox(d_model=2048, num_layers=24, num_heads=16, vocab_size=50304)


def pythia_6_9b() -> DecoderConfig:
    """Pythia 6.9B, 6.86 billion parameters."""
    return _neox(d_model=4096, num_layers=32, num_heads=32)


def neox_20b() -> DecoderConfig:
    """GPT-NeoX-20B, 20.6 billion parameters."""
    return _neox(d_model=6144, num_layers=44, num_heads=64, activation="gelu_tanh")


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read(values: Keys) -> DecoderConfig:
    width, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = divided_width("hidden_size", width, "num_attention_heads", heads)
    rope = Keys(values.get("rope_scaling") or values.get("rope_parameters") or {})
    factor = rope.get("partial_rotary_factor", values.get("rotary_pct", 0.25))
    # In the keys of the other families, which rotate every feature.
    renamed = {
        "rope_theta": values.get("rotary_emb_base", 10_000.0),
        "partial_rotary_factor": 1.0,
        "rope_scaling": {**rope, "partial_rotary_factor": 1.0},
    }
    theta, scaling = read_rope(Keys(values | renamed))
    bias = values.get("attention_bias", True)
    parallel = values.get("use_parallel_residual", True)
    return DecoderConfig(
        vocab_size=values["vocab_size"],
        d_model=width,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        d_ff=values["intermediate_size"],
        max_seq_len=values["max_position_embeddings"],
        norm="layernorm",
        norm_eps=float(values["layer_norm_eps"]),
        activation=read_activation(values, "hidden_act", None),
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=int(head_dim * factor),
        parallel_block=parallel,
        parallel_mlp_norm=parallel,
        attention_bias=bias,
        attention_out_bias=bias,
        mlp_bias=True,
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


def _write(config: DecoderConfig) -> dict[str, Any]:
    rotary_dim = config.rotary_dim or config.head_dim
    share = rotary_dim / config.head_dim
    if int(config.head_dim * share) < rotary_dim:  # readers cut off, as _read does
        share = math.nextafter(share, 1)
    rope = write_rope_keys(config.rope_theta, config.rope_scaling)
    rope["rope_parameters"]["partial_rotary_factor"] = share
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "hidden_act": activation_name(config.activation),
        "max_position_embeddings": config.max_seq_len,
        "layer_norm_eps": config.norm_eps,
        **rope,
        "rotary_emb_base": config.rope_theta,
        "rotary_pct": share,
        "use_parallel_residual": config.parallel_block,
        "attention_bias": config.attention_bias,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _tensors(config: DecoderConfig) -> list[TensorMap]:
    block, ours = "gpt_neox.layers.{layer}.", "blocks."
    joined = [f"{ours}attention.{name}" for name in ("query", "key", "value")]
    fused, bias = block + "attention.query_key_value", config.attention_bias
    return [
        table("gpt_neox.embed_in", "embed"),
        *layer_norm(block + "input_layernorm", ours + "attention_norm"),
        *layer_norm(block + "post_attention_layernorm", ours + "mlp_norm"),
        # Query, key and value of the first head, then of the second.
        *linear(fused, *joined, bias=bias, groups=config.num_heads),
        *linear(block + "attention.dense", ours + "attention.out", bias=bias),
        *linear(block + "mlp.dense_h_to_4h", ours + "mlp.up"),
        *linear(block + "mlp.dense_4h_to_h", ours + "mlp.down"),
        *layer_norm("gpt_neox.final_layer_norm", "norm"),
        *output_projection(config, "embed_out"),
    ]


GPT_NEOX = Family(
    model_type="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    presets=(neox_tiny, pythia_160m, pythia_1_4b, pythia_6_9b, neox_20b),
    prefix="gpt_neox.",
    read=_read,
    write=_write,
    tensors=_tensors,
    tied={"embed_out.weight": "gpt_neox.embed_in.weight"},
    buffers=(
        r"(^|\.)attention\.(bias|masked_bias)$",
        r"(^|\.)rotary_emb\.inv_freq$",
    ),
)
"""The files of GPT-NeoX and Pythia."""
