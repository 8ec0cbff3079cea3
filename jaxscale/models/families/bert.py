"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT: named configurations, and their files.

References:
    BERT, arXiv 1810.04805. RoBERTa, arXiv 1907.11692. XLM-RoBERTa, arXiv 1911.02116.
    CamemBERT, arXiv 1911.03894.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadActivation, HeadConfig, HeadKind
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
    divided_width,
    read_activation,
    require,
)
from jaxscale.models.hf.names import TensorMap, layer_norm, linear, table


def _bert(
    *, d_model: int, vocab_size: int = 30522, max_seq_len: int = 512, **settings: Any
) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        **settings,
    )


def bert_tiny() -> EncoderConfig:
    """A BERT of 36 thousand parameters, for tests."""
    return _bert(d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64)


def bert_base() -> EncoderConfig:
    """BERT-base, 109 million parameters."""
    return _bert(d_model=768, num_layers=12, num_heads=12)


def bert_large() -> EncoderConfig:
    """BERT-large, 334 million parameters."""
    return _bert(d_model=1024, num_layers=24, num_heads=16)


def minilm_l6() -> EncoderConfig:
    """MiniLM with 6 layers, 23 million parameters (all-MiniLM-L6-v2)."""
    return _bert(d_model=384, num_layers=6, num_heads=12)


def _roberta(*, vocab_size: int = 50265, **sizes: int) -> EncoderConfig:
    return _bert(
        family="roberta",
        vocab_size=vocab_size,
        token_types=1,
        # The padding token has id 1, and positions are counted from the next number.
        position_offset=2,
        norm_eps=1e-5,
        **sizes,
    )


def roberta_tiny() -> EncoderConfig:
    """A RoBERTa of 36 thousand parameters, for tests."""
    return _roberta(
        d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64
    )


def roberta_base() -> EncoderConfig:
    """RoBERTa-base, 124 million parameters."""
    return _roberta(d_model=768, num_layers=12, num_heads=12)


def roberta_large() -> EncoderConfig:
    """RoBERTa-large, 354 million parameters."""
    return _roberta(d_model=1024, num_layers=24, num_heads=16)


def xlm_roberta_base() -> EncoderConfig:
    """XLM-RoBERTa-base, 277 million parameters."""
    config = _roberta(d_model=768, num_layers=12, num_heads=12, vocab_size=250_002)
    return dataclasses.replace(config, family="xlm-roberta")


def xlm_roberta_large() -> EncoderConfig:
    """XLM-RoBERTa-large, 559 million parameters."""
    config = _roberta(d_model=1024, num_layers=24, num_heads=16, vocab_size=250_002)
    return dataclasses.replace(config, family="xlm-roberta")


def camembert_base() -> EncoderConfig:
    """CamemBERT-base, 110 million parameters."""
    config = _roberta(d_model=768, num_layers=12, num_heads=12, vocab_size=32_005)
    return dataclasses.replace(config, family="camembert")


# ------------------------------------------------------------------------------------
# Hugging Face files


def bert_keys(values: Keys) -> dict[str, Any]:
    """The settings that BERT, RoBERTa and ALBERT have under the same keys.

    Raises:
        ValueError: a setting that changes the result is not supported, or a key is
            missing.
    """
    require(values, "position_embedding_type", "absolute")
    require(values, "is_decoder", False)
    require(values, "add_cross_attention", False)
    width, heads = values["hidden_size"], values["num_attention_heads"]
    divided_width("hidden_size", width, "num_attention_heads", heads)
    return {
        "vocab_size": values["vocab_size"],
        "d_model": width,
        "num_layers": values["num_hidden_layers"],
        "num_heads": heads,
        "d_ff": values["intermediate_size"],
        "max_seq_len": values["max_position_embeddings"],
        "token_types": values.get("type_vocab_size", 2),
        "norm_eps": float(values.get("layer_norm_eps", 1e-12)),
        "activation": read_activation(values, "hidden_act"),
        "tie_embeddings": values.get("tie_word_embeddings", True),
    }


def write_bert_keys(config: EncoderConfig) -> dict[str, Any]:
    """The keys that `bert_keys` reads."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "intermediate_size": config.d_ff,
        "max_position_embeddings": config.max_seq_len + config.position_offset,
        "type_vocab_size": config.token_types,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_name(config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": max(config.position_offset - 1, 0),
    }


def _read_bert(values: Keys) -> EncoderConfig:
    return EncoderConfig(**bert_keys(values))


def _read_roberta(values: Keys) -> EncoderConfig:
    keys = bert_keys(values)
    # The padding token takes a row of the table of positions, and so do those before.
    offset = values.get("pad_token_id", 1) + 1
    keys["max_seq_len"] -= offset
    return EncoderConfig(family=values["model_type"], position_offset=offset, **keys)


def bert_head(
    values: Keys,
    kind: HeadKind,
    *,
    activation: str = "hidden_act",
    default: str = "gelu",
    pooled: HeadActivation = "tanh",
) -> HeadConfig:
    """The layers of a head of BERT and its relatives.

    Args:
        values: The parsed ``config.json``.
        kind: The task.
        activation: Key of the activation of the masked-language-model head.
        default: Meaning of a missing key.
        pooled: Activation of the projection of the vector of a sequence.
    """
    if kind == "masked_lm":
        transform = read_activation(values, activation, default)
        return unlabeled(kind, transform=transform, transform_norm=True)
    pools = kind in ("sequence", "pooler")
    return unlabeled(kind, transform=pooled if pools else None)


def _roberta_head(values: Keys, kind: HeadKind) -> HeadConfig:
    if kind == "masked_lm":
        return unlabeled(kind, transform="gelu", transform_norm=True)
    return bert_head(values, kind)


def bert_tables(theirs: str, token_types: int) -> list[TensorMap]:
    """The tables of the embedding and its norm under BERT's names."""
    tables = [("word", "embed"), ("position", "positions")]
    if token_types:
        tables.append(("token_type", "token_types"))
    return [
        *(table(f"{theirs}.{name}_embeddings", ours) for name, ours in tables),
        *layer_norm(f"{theirs}.LayerNorm", "embed_norm"),
    ]


def bert_attention(theirs: str, ours: str) -> list[TensorMap]:
    """Query, key and value under BERT's names."""
    names = ("query", "key", "value")
    return [
        entry
        for n in names
        for entry in linear(f"{theirs}.{n}", f"{ours}.attention.{n}")
    ]


def _bert_tensors(config: EncoderConfig) -> list[TensorMap]:
    # XLM-RoBERTa and CamemBERT have RoBERTa's names.
    root = "bert" if config.family == "bert" else "roberta"
    block, ours = root + ".encoder.layer.{layer}.", "blocks"
    return [
        *bert_tables(f"{root}.embeddings", config.token_types),
        *bert_attention(block + "attention.self", ours),
        *linear(block + "attention.output.dense", f"{ours}.attention.out"),
        *layer_norm(block + "attention.output.LayerNorm", f"{ours}.attention_norm"),
        *linear(block + "intermediate.dense", f"{ours}.mlp.up"),
        *linear(block + "output.dense", f"{ours}.mlp.down"),
        *layer_norm(block + "output.LayerNorm", f"{ours}.mlp_norm"),
    ]


def masked_lm_tensors(
    config: EncoderConfig, *, dense: str, norm: str, decoder: str, bias: str | None
) -> list[TensorMap]:
    """The tensors of a masked-language-model head.

    Args:
        config: The encoder.
        dense: Name of the projection before the last one.
        norm: Name of the norm after it.
        decoder: Name of the projection on the vocabulary.
        bias: Name of its bias where it is tied; None is ``<decoder>.bias``.
    """
    return [
        *linear(dense, "head.transform"),
        *layer_norm(norm, "head.norm"),
        *vocabulary_projection(config, decoder, bias),
    ]


def label_tensors(head: HeadConfig, pooler: str) -> list[TensorMap]:
    """The tensors of the other heads."""
    before = linear(pooler, "head.transform") if head.pools else []
    if head.kind == "pooler":
        return before
    name = "qa_outputs" if head.kind == "span" else "classifier"
    return [*before, *linear(name, "head.output")]


def bert_head_tensors(
    config: EncoderConfig, head: HeadConfig, pooler: str = "bert.pooler.dense"
) -> list[TensorMap]:
    """The tensors of a head under BERT's names, those of the pooler aside."""
    if head.kind != "masked_lm":
        return label_tensors(head, pooler)
    root = "cls.predictions"
    return masked_lm_tensors(
        config,
        dense=f"{root}.transform.dense",
        norm=f"{root}.transform.LayerNorm",
        decoder=f"{root}.decoder",
        bias=f"{root}.bias",
    )


def _roberta_head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    if head.kind == "masked_lm":
        return masked_lm_tensors(
            config,
            dense="lm_head.dense",
            norm="lm_head.layer_norm",
            decoder="lm_head.decoder",
            bias="lm_head.bias",
        )
    if head.kind == "sequence":
        return [
            *linear("classifier.dense", "head.transform"),
            *linear("classifier.out_proj", "head.output"),
        ]
    return label_tensors(head, "roberta.pooler.dense")


BERT = Family(
    model_type="bert",
    architecture="BertModel",
    presets=(bert_tiny, bert_base, bert_large, minilm_l6),
    prefix="bert.",
    read=_read_bert,
    write=write_bert_keys,
    tensors=_bert_tensors,
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    buffers=ENCODER_BUFFERS,
    heads=Heads(
        architectures={
            "pooler": "BertModel",
            "masked_lm": "BertForMaskedLM",
            "sequence": "BertForSequenceClassification",
            "token": "BertForTokenClassification",
            "span": "BertForQuestionAnswering",
        },
        other_architectures={"BertForPreTraining": "masked_lm"},
        read=bert_head,
        tensors=bert_head_tensors,
        names=("cls.", "bert.pooler.", "pooler.", "classifier.", "qa_outputs."),
    ),
)
"""BERT's files."""

_ROBERTA_HEADS = Heads(
    architectures={
        "pooler": "RobertaModel",
        "masked_lm": "RobertaForMaskedLM",
        "sequence": "RobertaForSequenceClassification",
        "token": "RobertaForTokenClassification",
        "span": "RobertaForQuestionAnswering",
    },
    read=_roberta_head,
    tensors=_roberta_head_tensors,
    names=(*("lm_head.", "roberta.pooler.", "pooler.", "classifier.", "qa_outputs."),),
)

ROBERTA = Family(
    model_type="roberta",
    architecture="RobertaModel",
    presets=(roberta_tiny, roberta_base, roberta_large),
    prefix="roberta.",
    read=_read_roberta,
    write=write_bert_keys,
    tensors=_bert_tensors,
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    buffers=ENCODER_BUFFERS,
    heads=_ROBERTA_HEADS,
)
"""RoBERTa's files."""


def _like_roberta(
    model_type: str, name: str, *presets: Callable[[], EncoderConfig]
) -> Family[EncoderConfig]:
    """A family of RoBERTa's tensors under classes of another name."""
    classes = _ROBERTA_HEADS.architectures.items()
    renamed = {kind: cls.replace("Roberta", name) for kind, cls in classes}
    return dataclasses.replace(
        ROBERTA,
        model_type=model_type,
        architecture=f"{name}Model",
        presets=presets,
        heads=dataclasses.replace(_ROBERTA_HEADS, architectures=renamed),
    )


XLM_ROBERTA = _like_roberta(
    "xlm-roberta", "XLMRoberta", xlm_roberta_base, xlm_roberta_large
)
"""The files of XLM-RoBERTa."""

CAMEMBERT = _like_roberta("camembert", "Camembert", camembert_base)
"""CamemBERT's files."""
