"""ModernBERT: named configurations, and its Hugging Face files.

References:
    ModernBERT, arXiv 2412.13663: rotary embeddings, GeGLU, no biases, and windows in
    two of three layers.
"""

import dataclasses
from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf.family import (
    ENCODER_BUFFERS,
    Family,
    Heads,
    unlabeled,
    vocabulary_projection,
)
from jaxscale.models.hf.keys import (
    Keys,
    activation_name,
    beside,
    divided_width,
    read_activation,
    read_rope,
    require,
)
from jaxscale.models.hf.names import (
    TensorMap,
    layer_norm,
    linear,
    scale,
    table,
)


def _modernbert(
    *,
    window: int = 64,
    vocab_size: int = 50368,
    max_seq_len: int = 8192,
    **sizes: Any,
) -> EncoderConfig:
    return EncoderConfig(
        family="modernbert",
        vocab_size=vocab_size,
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
        **sizes,
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


# ------------------------------------------------------------------------------------
# Hugging Face files

_KINDS = {"full": "full_attention", "local": "sliding_attention"}
_EVERY = "global_attn_every_n_layers"


def _read(values: Keys) -> EncoderConfig:
    require(values, "hidden_activation", "gelu")
    width, heads = values["hidden_size"], values["num_attention_heads"]
    divided_width("hidden_size", width, "num_attention_heads", heads)
    theta, theta_local = _thetas(values)
    return EncoderConfig(
        family="modernbert",
        vocab_size=values["vocab_size"],
        d_model=width,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        d_ff=values["intermediate_size"],
        max_seq_len=values["max_position_embeddings"],
        token_types=0,
        position="rope",
        rope_theta=theta,
        rope_theta_local=theta_local,
        # Of an odd width the rest is dropped, as transformers does.
        window=values.get("local_attention", 128) // 2,
        global_every=_global_every(values),
        norm_eps=float(values.get("norm_eps", 1e-5)),
        norm_bias=values.get("norm_bias", False),
        pre_norm=True,
        activation="geglu",
        attention_bias=values.get("attention_bias", False),
        mlp_bias=values.get("mlp_bias", False),
        tie_embeddings=values.get("tie_word_embeddings", True),
    )


def _thetas(values: Keys) -> tuple[float, float]:
    """Bases of the frequencies of global and local layers, of any version."""
    require(values, "rope_scaling", None)
    old = {"full": "global_rope_theta", "local": "local_rope_theta"}
    default = {"full": 160_000.0, "local": 10_000.0}
    thetas = []
    for kind, key in old.items():
        rope = Keys(values.get("rope_parameters", {})).get(_KINDS[kind], {})
        # Null is the base of the global layers.
        base = thetas[0] if thetas and key in values.nulls else default[kind]
        rope = {"rope_theta": values.get(key, base)} | rope
        theta, scaling = read_rope(beside(values, rope))
        if scaling is not None:
            raise ValueError(
                f"rope_type {scaling.kind!r} of config.json is not supported for "
                "model_type 'modernbert'; expected 'default'"
            )
        thetas.append(theta)
    return thetas[0], thetas[1]


def _global_every(values: Keys) -> int:
    """The distance of the layers that see everything, of any version."""
    types, every = values.get("layer_types"), values.get(_EVERY, 3)
    num_layers = values["num_hidden_layers"]
    # Few layers do not tell; versions with `layer_types` read this key in their place.
    if types is None or list(types) == _layer_types(num_layers, every):
        return every
    full = [i for i, kind in enumerate(types) if kind == _KINDS["full"]]
    every = full[1] - full[0] if len(full) > 1 else num_layers
    if list(types) != _layer_types(num_layers, every):
        raise ValueError(
            f"layer_types {types} of config.json is not supported; expected "
            f"{_KINDS['full']!r} at the layers 0, n, 2n, ... of {num_layers} and "
            f"{_KINDS['local']!r} elsewhere"
        )
    return every


def _layer_types(num_layers: int, every: int) -> list[str]:
    return [_KINDS["local" if i % every else "full"] for i in range(num_layers)]


def _write(config: EncoderConfig) -> dict[str, Any]:
    local = config.rope_theta_local or config.rope_theta
    thetas = {_KINDS["full"]: config.rope_theta, _KINDS["local"]: local}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_seq_len,
        "local_attention": 2 * (config.window or 0),
        "layer_types": _layer_types(config.num_layers, config.global_every),
        _EVERY: config.global_every,
        "rope_parameters": {
            kind: {"rope_theta": theta, "rope_type": "default"}
            for kind, theta in thetas.items()
        },
        "global_rope_theta": config.rope_theta,
        "local_rope_theta": local,
        "norm_eps": config.norm_eps,
        "norm_bias": config.norm_bias,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "hidden_activation": "gelu",
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": 0,
        "cls_token_id": None,
        "sep_token_id": None,
    }


def _head(values: Keys, kind: HeadKind) -> HeadConfig:
    pooling = values.get("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise ValueError(
            f"classifier_pooling {pooling!r} of config.json is not supported; expected "
            "'cls' or 'mean'"
        )
    return unlabeled(
        kind,
        pooling="mean" if pooling == "mean" and kind == "sequence" else "first",
        transform=read_activation(values, "classifier_activation"),
        transform_bias=values.get("classifier_bias", False),
        transform_norm=True,
        bias=kind != "masked_lm" or values.get("decoder_bias", True),
    )


def _write_head(head: HeadConfig) -> dict[str, Any]:
    activation = head.transform or "gelu"
    values = {
        "classifier_pooling": "mean" if head.pooling == "mean" else "cls",
        "classifier_activation": activation_name(activation),
        "classifier_bias": head.transform_bias,
    }
    if head.kind == "masked_lm":
        values["decoder_bias"] = head.bias
    return values


def _tensors(config: EncoderConfig) -> list[TensorMap]:
    maps = [
        table("model.embeddings.tok_embeddings", "embed"),
        *_norm(config, "model.embeddings.norm", "embed_norm"),
        # The first layer has a norm less, so it is not in the stack.
        *_block(config, "model.layers.0.", "first", first=True),
        *_block(config, "model.layers.{layer}.", "blocks", first=False),
        *_norm(config, "model.final_norm", "norm"),
    ]
    return [m for m in maps if config.num_layers > 1 or not m.stacked]


def _block(
    config: EncoderConfig, theirs: str, ours: str, *, first: bool
) -> list[TensorMap]:
    attention = [f"{ours}.attention.{n}" for n in ("query", "key", "value")]
    mlp = [f"{ours}.mlp.gate", f"{ours}.mlp.up"]
    attention_bias, mlp_bias = config.attention_bias, config.mlp_bias
    norm = _norm(config, theirs + "attn_norm", f"{ours}.attention_norm")
    maps = [
        *([] if first else norm),
        *linear(theirs + "attn.Wqkv", *attention, bias=attention_bias),
        *linear(theirs + "attn.Wo", f"{ours}.attention.out", bias=attention_bias),
        *_norm(config, theirs + "mlp_norm", f"{ours}.mlp_norm"),
        *linear(theirs + "mlp.Wi", *mlp, bias=mlp_bias),
        *linear(theirs + "mlp.Wo", f"{ours}.mlp.down", bias=mlp_bias),
    ]
    return [dataclasses.replace(m, first_layer=0 if first else 1) for m in maps]


def _norm(config: EncoderConfig, theirs: str, ours: str) -> list[TensorMap]:
    return layer_norm(theirs, ours) if config.norm_bias else [scale(theirs, ours)]


def _head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    maps = [
        *linear("head.dense", "head.transform", bias=head.transform_bias),
        *_norm(config, "head.norm", "head.norm"),
    ]
    if head.kind != "masked_lm":
        return [*maps, *linear("classifier", "head.output", bias=head.bias)]
    projection = vocabulary_projection(config, "decoder")
    return [*maps, *(m for m in projection if head.bias or "bias" not in m.name)]


MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertModel",
    presets=(modernbert_tiny, modernbert_base, modernbert_large),
    prefix="model.",
    read=_read,
    write=_write,
    tensors=_tensors,
    tied={"decoder.weight": "model.embeddings.tok_embeddings.weight"},
    buffers=ENCODER_BUFFERS,
    heads=Heads(
        architectures={
            "masked_lm": "ModernBertForMaskedLM",
            "sequence": "ModernBertForSequenceClassification",
            "token": "ModernBertForTokenClassification",
            "span": "ModernBertForQuestionAnswering",
        },
        read=_head,
        write=_write_head,
        tensors=_head_tensors,
        names=("head.", "decoder.", "classifier."),
    ),
)
"""ModernBERT's files."""
