"""DeBERTa, v1 to v3: named configurations, and their Hugging Face files.

References:
    DeBERTa, arXiv 2006.03654. DeBERTa-v3, arXiv 2111.09543.
"""

import dataclasses
from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.bert import bert_head, bert_head_tensors
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf.family import ENCODER_BUFFERS, Family, Heads
from jaxscale.models.hf.keys import (
    Keys,
    activation_name,
    divided_width,
    read_activation,
    require,
)
from jaxscale.models.hf.names import TensorMap, layer_norm, linear, table
from jaxscale.nn.disentangled import RelativePositions


def _deberta(*, d_model: int, **settings: Any) -> EncoderConfig:
    return EncoderConfig(
        d_model=d_model,
        d_ff=4 * d_model,
        token_types=0,
        position="none",
        norm_eps=1e-7,
        **settings,
    )


def _deberta_v1(
    *, vocab_size: int = 50_265, max_seq_len: int = 512, **sizes: int
) -> EncoderConfig:
    return _deberta(
        family="deberta",
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        relative=RelativePositions(span=max_seq_len, share_projections=False),
        key_bias=False,
        **sizes,
    )


def deberta_tiny() -> EncoderConfig:
    """A DeBERTa of 42 thousand parameters, for tests."""
    return _deberta_v1(
        d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64
    )


def deberta_base() -> EncoderConfig:
    """DeBERTa-base, 139 million parameters."""
    return _deberta_v1(d_model=768, num_layers=12, num_heads=12)


def deberta_large() -> EncoderConfig:
    """DeBERTa-large, 405 million parameters."""
    return _deberta_v1(d_model=1024, num_layers=24, num_heads=16)


def deberta_xlarge() -> EncoderConfig:
    """DeBERTa-xlarge, 757 million parameters."""
    return _deberta_v1(d_model=1024, num_layers=48, num_heads=16)


def _deberta_v2(
    *,
    vocab_size: int = 128_100,
    max_seq_len: int = 512,
    span: int = 256,
    max_distance: int = 512,
    **sizes: int,
) -> EncoderConfig:
    return _deberta(
        family="deberta-v2",
        vocab_size=vocab_size,
        max_seq_len=max_seq_len,
        relative=RelativePositions(span=span, max_distance=max_distance),
        relative_norm=True,
        **sizes,
    )


def deberta_v3_tiny() -> EncoderConfig:
    """A DeBERTa-v3 of 34 thousand parameters, for tests."""
    return _deberta_v2(
        d_model=32,
        num_layers=2,
        num_heads=4,
        vocab_size=256,
        max_seq_len=64,
        span=4,
        max_distance=12,
    )


def deberta_v3_xsmall() -> EncoderConfig:
    """DeBERTa-v3-xsmall, 71 million parameters."""
    return _deberta_v2(d_model=384, num_layers=12, num_heads=6)


def deberta_v3_small() -> EncoderConfig:
    """DeBERTa-v3-small, 141 million parameters."""
    return _deberta_v2(d_model=768, num_layers=6, num_heads=12)


def deberta_v3_base() -> EncoderConfig:
    """DeBERTa-v3-base, 184 million parameters."""
    return _deberta_v2(d_model=768, num_layers=12, num_heads=12)


def deberta_v3_large() -> EncoderConfig:
    """DeBERTa-v3-large, 434 million parameters."""
    return _deberta_v2(d_model=1024, num_layers=24, num_heads=16)


def mdeberta_v3_base() -> EncoderConfig:
    """mDeBERTa-v3-base, the multilingual one, 279 million parameters."""
    return dataclasses.replace(deberta_v3_base(), vocab_size=251_000)


def deberta_v2_tiny() -> EncoderConfig:
    """A DeBERTa-v2 of 56 thousand parameters with all that it may have, for tests."""
    config = deberta_v3_tiny()
    return dataclasses.replace(
        config,
        num_layers=3,
        token_types=2,
        position="learned",
        relative=RelativePositions(span=5, share_projections=False),
        convolution=3,
    )


def deberta_v2_xlarge() -> EncoderConfig:
    """DeBERTa-v2-xlarge, 885 million parameters."""
    return _deberta_v2(d_model=1536, num_layers=24, num_heads=24, convolution=3)


def deberta_v2_xxlarge() -> EncoderConfig:
    """DeBERTa-v2-xxlarge, 1.6 billion parameters."""
    return dataclasses.replace(deberta_v2_xlarge(), num_layers=48)


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read(values: Keys) -> EncoderConfig:
    require(values, "talking_head", False)
    relative = RelativePositions(
        span=_farthest(values), share_projections=False, **_read_terms(values)
    )
    return EncoderConfig(relative=relative, key_bias=False, **_keys(values))


def _read_v2(values: Keys) -> EncoderConfig:
    require(values, "conv_groups", 1)
    taps = values.get("conv_kernel_size", 0)
    norms = values.get("norm_rel_ebd", "none").lower().split("|")
    buckets = values.get("position_buckets", -1)
    farthest = _farthest(values)
    return EncoderConfig(
        relative=RelativePositions(
            span=buckets if buckets > 0 else farthest,
            max_distance=farthest if buckets > 0 else None,
            share_projections=values.get("share_att_key", False),
            **_read_terms(values),
        ),
        relative_norm="layer_norm" in [norm.strip() for norm in norms],
        convolution=taps,
        convolution_activation=values.get("conv_act", "tanh") if taps else "gelu",
        **_keys(values),
    )


def _keys(values: Keys) -> dict[str, Any]:
    """The keys that all versions share."""
    width, heads = values["hidden_size"], values["num_attention_heads"]
    head_dim = divided_width("hidden_size", width, "num_attention_heads", heads)
    require(values, "attention_head_size", head_dim)
    require(values, "embedding_size", width)
    biased = values.get("position_biased_input", True)
    return {
        "family": values["model_type"],
        "vocab_size": values["vocab_size"],
        "d_model": width,
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "d_ff": values["intermediate_size"],
        "max_seq_len": values["max_position_embeddings"],
        "token_types": values.get("type_vocab_size", 0),
        "position": "learned" if biased else "none",
        "norm_eps": float(values.get("layer_norm_eps", 1e-7)),
        "activation": read_activation(values, "hidden_act"),
        # The head of the published files has no projection but the table.
        "tie_embeddings": values.get("tie_word_embeddings", True)
        or not values.get("legacy", True),
    }


def _read_terms(values: Keys) -> dict[str, bool]:
    """Read the terms that relative positions add to the scores."""
    types = values.get("pos_att_type", [])
    if isinstance(types, str):
        types = [kind.strip() for kind in types.lower().split("|")]
    known = {"c2p", "p2c"}
    if not values.get("relative_attention", False) or not known.issuperset(types):
        raise ValueError(
            f"relative_attention {values.get('relative_attention', False)} and "
            f"pos_att_type {types} of config.json are not supported for model_type "
            f"{values['model_type']!r}; expected True and one or both of 'c2p' and "
            "'p2c'"
        )
    return {
        "content_to_position": "c2p" in types,
        "position_to_content": "p2c" in types,
    }


def _farthest(values: Keys) -> int:
    """The largest distance with a bucket of its own."""
    farthest = values.get("max_relative_positions", -1)
    return values["max_position_embeddings"] if farthest < 1 else farthest


def _write(config: EncoderConfig) -> dict[str, Any]:
    relative = config.relative
    values: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_seq_len,
        "type_vocab_size": config.token_types,
        "position_biased_input": config.position == "learned",
        "relative_attention": relative is not None,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_name(config.activation),
        "pooler_hidden_size": config.d_model,
        "pooler_hidden_act": "gelu",
        "pooler_dropout": 0,
        "legacy": True,  # the names of the head that we write
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": 0,
    }
    if relative is not None:
        types = {
            "p2c": relative.position_to_content,
            "c2p": relative.content_to_position,
        }
        values |= {
            "pos_att_type": [name for name, present in types.items() if present],
            "max_relative_positions": relative.max_distance or relative.span,
        }
    return values


def _write_v2(config: EncoderConfig) -> dict[str, Any]:
    relative = config.relative
    values = _write(config) | {
        "norm_rel_ebd": "layer_norm" if config.relative_norm else "none",
    }
    if relative is not None:
        bucketed = relative.max_distance is not None
        values |= {
            "position_buckets": relative.span if bucketed else -1,
            "share_att_key": relative.share_projections,
        }
    if config.convolution:
        values["conv_kernel_size"] = config.convolution
        values["conv_act"] = config.convolution_activation
    return values


def _head(values: Keys, kind: HeadKind) -> HeadConfig:
    if kind not in ("sequence", "pooler"):
        return bert_head(values, kind)
    require(values, "pooler_hidden_size", values["hidden_size"])
    if values.get("pooler_hidden_act") == "tanh":
        return bert_head(values, kind)
    pooled = read_activation(values, "pooler_hidden_act")
    return bert_head(values, kind, pooled=pooled)


def _write_head(head: HeadConfig) -> dict[str, Any]:
    if head.kind != "sequence" or head.transform is None:
        return {}
    return {"pooler_hidden_act": activation_name(head.transform)}


def _tensors(config: EncoderConfig) -> list[TensorMap]:
    embeddings, encoder = "deberta.embeddings.", "deberta.encoder."
    tables = {embeddings + "word_embeddings": "embed"}
    if config.position == "learned":
        tables[embeddings + "position_embeddings"] = "positions"
    if config.token_types:
        tables[embeddings + "token_type_embeddings"] = "token_types"
    tables[encoder + "rel_embeddings"] = "relative"
    maps = [table(theirs, ours) for theirs, ours in tables.items()]
    maps += layer_norm(embeddings + "LayerNorm", "embed_norm")
    if config.relative_norm:
        maps += layer_norm(encoder + "LayerNorm", "relative_norm")
    if config.convolution:
        # [out, in, taps] in the file, the reverse in ours.
        maps += linear(encoder + "conv.conv", "convolution")
        maps += layer_norm(encoder + "conv.LayerNorm", "convolution_norm")
    apart = config.separate_first
    if apart:
        maps += _block(config, encoder + "layer.0.", "first")
    if config.num_layers > apart:
        block = _block(config, encoder + "layer.{layer}.", "blocks")
        maps += [dataclasses.replace(m, first_layer=int(apart)) for m in block]
    return maps


def _block(config: EncoderConfig, theirs: str, ours: str) -> list[TensorMap]:
    v1 = config.family == "deberta"
    projections = _projections_v1 if v1 else _projections_v2
    return [
        *projections(config, theirs + "attention.self.", f"{ours}.attention."),
        *linear(theirs + "attention.output.dense", f"{ours}.attention.out"),
        *layer_norm(theirs + "attention.output.LayerNorm", f"{ours}.attention_norm"),
        *linear(theirs + "intermediate.dense", f"{ours}.mlp.up"),
        *linear(theirs + "output.dense", f"{ours}.mlp.down"),
        *layer_norm(theirs + "output.LayerNorm", f"{ours}.mlp_norm"),
    ]


def _projections_v1(config: EncoderConfig, theirs: str, ours: str) -> list[TensorMap]:
    heads = [ours + name for name in ("query", "key", "value")]
    # Each head has its own query, key and value side by side.
    maps = linear(theirs + "in_proj", *heads, bias=False, groups=config.num_heads)
    maps += [
        TensorMap(name=f"{theirs}{name[0]}_bias", parameters=(f"{ours}{name}.bias",))
        for name in ("query", "value")
    ]
    if config.relative is not None and config.relative.content_to_position:
        maps += linear(theirs + "pos_proj", ours + "position_key", bias=False)
    if config.relative is not None and config.relative.position_to_content:
        maps += linear(theirs + "pos_q_proj", ours + "position_query")
    return maps


def _projections_v2(config: EncoderConfig, theirs: str, ours: str) -> list[TensorMap]:
    relative = config.relative
    names = ["query", "key", "value"]
    if relative is not None and not relative.share_projections:
        names += ["position_key"] * relative.content_to_position
        names += ["position_query"] * relative.position_to_content
    return [
        entry
        for name in names
        for entry in linear(
            f"{theirs}{name.replace('position', 'pos')}_proj", ours + name
        )
    ]


def _head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    return bert_head_tensors(config, head, "pooler.dense")


_HEADS = Heads(
    architectures={
        "masked_lm": "DebertaV2ForMaskedLM",
        "sequence": "DebertaV2ForSequenceClassification",
        "token": "DebertaV2ForTokenClassification",
        "span": "DebertaV2ForQuestionAnswering",
    },
    read=_head,
    write=_write_head,
    tensors=_head_tensors,
    names=(
        *("cls.", "lm_predictions.", "mask_predictions.", "pooler.", "classifier."),
        "qa_outputs.",
    ),
)

DEBERTA_V2 = Family(
    model_type="deberta-v2",
    architecture="DebertaV2Model",
    presets=(
        deberta_v3_tiny,
        deberta_v3_xsmall,
        deberta_v3_small,
        deberta_v3_base,
        deberta_v3_large,
        mdeberta_v3_base,
        deberta_v2_tiny,
        deberta_v2_xlarge,
        deberta_v2_xxlarge,
    ),
    prefix="deberta.",
    read=_read_v2,
    write=_write_v2,
    tensors=_tensors,
    tied={
        "cls.predictions.decoder.weight": "deberta.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=ENCODER_BUFFERS,
    heads=_HEADS,
    # The published files, whose heads transformers reads with legacy=false.
    other_names={
        "cls.predictions.transform.": "lm_predictions.lm_head.",
        "cls.predictions.bias": "lm_predictions.lm_head.bias",
    },
    unread=("deberta.embeddings.position_embeddings.",),
)
"""The files of DeBERTa-v2 and v3."""

DEBERTA = dataclasses.replace(
    DEBERTA_V2,
    model_type="deberta",
    architecture="DebertaModel",
    presets=(deberta_tiny, deberta_base, deberta_large, deberta_xlarge),
    read=_read,
    write=_write,
    heads=dataclasses.replace(
        _HEADS,
        architectures={
            kind: name.replace("V2", "") for kind, name in _HEADS.architectures.items()
        },
    ),
)
"""The files of the first DeBERTa."""
