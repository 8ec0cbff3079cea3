"""GPT-2 and GPT-J: named configurations, and their Hugging Face files.

References:
    Language Models are Unsupervised Multitask Learners (GPT-2), 2019.
    GPT-J-6B, https://github.com/kingoflolz/mesh-transformer-jax, 2021.
"""

from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.hf.family import Family, output_projection
from jaxscale.models.hf.keys import (
    Keys,
    activation_name,
    divided_width,
    read_activation,
    require,
)
from jaxscale.models.hf.names import TensorMap, layer_norm, linear, table


def _gpt2(
    *, vocab_size: int = 50257, max_seq_len: int = 1024, **sizes: int
) -> DecoderConfig:
    return _gpt(
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        position="learned",
        attention_bias=True,
        attention_out_bias=True,
        tie_embeddings=True,
        **sizes,
    )


def _gpt(*, d_model: int, num_heads: int, **settings: Any) -> DecoderConfig:
    return DecoderConfig(
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=d_model // num_heads,
        d_ff=4 * d_model,
        norm="layernorm",
        activation="gelu_tanh",
        mlp_bias=True,
        **settings,
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


def _gptj(**sizes: int) -> DecoderConfig:
    return _gpt(rope_interleaved=True, parallel_block=True, lm_head_bias=True, **sizes)


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


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read_gpt2(values: Keys) -> DecoderConfig:
    require(values, "add_cross_attention", False)
    require(values, "scale_attn_weights", True)
    require(values, "scale_attn_by_inverse_layer_idx", False)
    return DecoderConfig(
        **_sizes(values),
        position="learned",
        attention_bias=True,
        attention_out_bias=True,
        tie_embeddings=values.get("tie_word_embeddings", True),
    )


def _read_gptj(values: Keys) -> DecoderConfig:
    # Keys of the published file that transformers itself no longer reads.
    require(values, "rotary", True)
    require(values, "scale_attn_weights", True)
    require(values, "tie_word_embeddings", False)
    return DecoderConfig(
        **_sizes(values),
        rotary_dim=values["rotary_dim"],
        rope_interleaved=True,
        parallel_block=True,
        lm_head_bias=True,
    )


def _sizes(values: Keys) -> dict[str, Any]:
    """The settings that GPT-2 and GPT-J have in common."""
    width, heads = values["n_embd"], values["n_head"]
    return {
        "vocab_size": values["vocab_size"],
        "d_model": width,
        "num_layers": values["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": divided_width("n_embd", width, "n_head", heads),
        "d_ff": values.get("n_inner", 4 * width),
        "max_seq_len": values["n_positions"],
        "norm": "layernorm",
        "norm_eps": float(values["layer_norm_epsilon"]),
        "activation": read_activation(values, "activation_function", None),
        "mlp_bias": True,
    }


def _write_gpt2(config: DecoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "n_positions": config.max_seq_len,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.d_ff,
        "activation_function": activation_name(config.activation),
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _write_gptj(config: DecoderConfig) -> dict[str, Any]:
    return _write_gpt2(config) | {"rotary_dim": config.rotary_dim or config.head_dim}


def _gpt2_tensors(config: DecoderConfig) -> list[TensorMap]:
    block, ours = "transformer.h.{layer}.", "blocks."
    query, key, value = (f"{ours}attention.{n}" for n in ("query", "key", "value"))
    return [
        table("transformer.wte", "embed"),
        table("transformer.wpe", "positions"),
        *layer_norm(block + "ln_1", ours + "attention_norm"),
        *linear(block + "attn.c_attn", query, key, value, transpose=False),
        *linear(block + "attn.c_proj", ours + "attention.out", transpose=False),
        *layer_norm(block + "ln_2", ours + "mlp_norm"),
        *linear(block + "mlp.c_fc", ours + "mlp.up", transpose=False),
        *linear(block + "mlp.c_proj", ours + "mlp.down", transpose=False),
        *layer_norm("transformer.ln_f", "norm"),
        *output_projection(config, "lm_head"),
    ]


def _gptj_tensors(config: DecoderConfig) -> list[TensorMap]:
    block, ours = "transformer.h.{layer}.", "blocks."
    return [
        table("transformer.wte", "embed"),
        *layer_norm(block + "ln_1", ours + "attention_norm"),
        *linear(block + "attn.q_proj", ours + "attention.query", bias=False),
        *linear(block + "attn.k_proj", ours + "attention.key", bias=False),
        *linear(block + "attn.v_proj", ours + "attention.value", bias=False),
        *linear(block + "attn.out_proj", ours + "attention.out", bias=False),
        *linear(block + "mlp.fc_in", ours + "mlp.up"),
        *linear(block + "mlp.fc_out", ours + "mlp.down"),
        *layer_norm("transformer.ln_f", "norm"),
        *output_projection(config, "lm_head"),
    ]


_CAUSAL_MASK = (r"(^|\.)attn\.(bias|masked_bias)$",)

GPT2 = Family(
    model_type="gpt2",
    architecture="GPT2LMHeadModel",
    presets=(gpt2_tiny, gpt2_small, gpt2_medium, gpt2_large, gpt2_xl),
    prefix="transformer.",
    read=_read_gpt2,
    write=_write_gpt2,
    tensors=_gpt2_tensors,
    tied={"lm_head.weight": "transformer.wte.weight"},
    buffers=_CAUSAL_MASK,
)
"""GPT-2's files."""

GPTJ = Family(
    model_type="gptj",
    architecture="GPTJForCausalLM",
    presets=(gptj_tiny, gptj_6b),
    prefix="transformer.",
    read=_read_gptj,
    write=_write_gptj,
    tensors=_gptj_tensors,
    tied={},
    buffers=_CAUSAL_MASK,
)
"""GPT-J's files."""
