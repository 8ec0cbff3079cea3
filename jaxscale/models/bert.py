"""BERT and RoBERTa: named configurations, and their Hugging Face files.

References:
    BERT, arXiv 1810.04805. RoBERTa, arXiv 1907.11692.
"""

from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf_config import Keys, divided_width, require
from jaxscale.models.hf_encoder import (
    ACTIVATION_NAMES,
    EncoderFamily,
    bert_attention,
    bert_tables,
    read_activation,
    unlabeled,
    vocabulary_projection,
)
from jaxscale.models.hf_names import TensorMap, layer_norm, linear


def _bert(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 30522,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
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


def _roberta(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 50265,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        family="roberta",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        token_types=1,
        # The padding token has id 1, and positions are counted from the next number.
        position_offset=2,
        norm_eps=1e-5,
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


# ------------------------------------------------------------------------------------
# Hugging Face files


def bert_keys(values: Keys) -> dict[str, Any]:
    """The settings that BERT, RoBERTa and ALBERT have under the same keys.

    Raises:
        ValueError: a setting that matters is not supported, or a key is missing.
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
        "hidden_act": ACTIVATION_NAMES.get(config.activation, config.activation),
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
    return EncoderConfig(family="roberta", position_offset=offset, **keys)


def _bert_head(values: Keys, kind: HeadKind) -> HeadConfig:
    if kind == "masked_lm":
        activation = read_activation(values, "hidden_act")
        return unlabeled(kind, transform=activation, transform_norm=True)
    pools = kind in ("sequence", "pooler")
    return unlabeled(kind, transform="tanh" if pools else None)


def _roberta_head(values: Keys, kind: HeadKind) -> HeadConfig:
    if kind == "masked_lm":
        return unlabeled(kind, transform="gelu", transform_norm=True)
    return _bert_head(values, kind)


def _bert_tensors(config: EncoderConfig) -> list[TensorMap]:
    root = config.family
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


def _bert_head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    if head.kind == "masked_lm":
        root = "cls.predictions"
        return [
            *vocabulary_projection(config, f"{root}.decoder", f"{root}.bias"),
            *linear(f"{root}.transform.dense", "head.transform"),
            *layer_norm(f"{root}.transform.LayerNorm", "head.norm"),
        ]
    pooler = linear("bert.pooler.dense", "head.transform")
    if head.kind == "pooler":
        return pooler
    name = "qa_outputs" if head.kind == "span" else "classifier"
    return [*(pooler if head.pools else []), *linear(name, "head.output")]


def _roberta_head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    if head.kind == "masked_lm":
        return [
            *vocabulary_projection(config, "lm_head.decoder", "lm_head.bias"),
            *linear("lm_head.dense", "head.transform"),
            *layer_norm("lm_head.layer_norm", "head.norm"),
        ]
    if head.kind == "sequence":
        return [
            *linear("classifier.dense", "head.transform"),
            *linear("classifier.out_proj", "head.output"),
        ]
    if head.kind == "pooler":
        return linear("roberta.pooler.dense", "head.transform")
    return _bert_head_tensors(config, head)


BERT = EncoderFamily(
    model_type="bert",
    architectures={
        None: "BertModel",
        "pooler": "BertModel",
        "masked_lm": "BertForMaskedLM",
        "sequence": "BertForSequenceClassification",
        "token": "BertForTokenClassification",
        "span": "BertForQuestionAnswering",
    },
    prefix="bert.",
    read=_read_bert,
    write=write_bert_keys,
    head=_bert_head,
    tensors=_bert_tensors,
    head_tensors=_bert_head_tensors,
    tied={
        "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
        "cls.predictions.decoder.bias": "cls.predictions.bias",
    },
    head_names=("cls.", "bert.pooler.", "pooler.", "classifier.", "qa_outputs."),
    other_architectures={"BertForPreTraining": "masked_lm"},
)
"""BERT's files."""

ROBERTA = EncoderFamily(
    model_type="roberta",
    architectures={
        None: "RobertaModel",
        "pooler": "RobertaModel",
        "masked_lm": "RobertaForMaskedLM",
        "sequence": "RobertaForSequenceClassification",
        "token": "RobertaForTokenClassification",
        "span": "RobertaForQuestionAnswering",
    },
    prefix="roberta.",
    read=_read_roberta,
    write=write_bert_keys,
    head=_roberta_head,
    tensors=_bert_tensors,
    head_tensors=_roberta_head_tensors,
    tied={
        "lm_head.decoder.weight": "roberta.embeddings.word_embeddings.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    },
    head_names=(
        *("lm_head.", "roberta.pooler.", "pooler.", "classifier.", "qa_outputs."),
    ),
)
"""RoBERTa's files."""
