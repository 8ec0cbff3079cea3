"""DistilBERT: named configurations, and its Hugging Face files.

References:
    DistilBERT, arXiv 1910.01108: BERT of half the depth, without token types.
"""

from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf_config import Keys, divided_width
from jaxscale.models.hf_encoder import (
    ACTIVATION_NAMES,
    EncoderFamily,
    bert_tables,
    read_activation,
    unlabeled,
    vocabulary_projection,
)
from jaxscale.models.hf_names import TensorMap, layer_norm, linear


def _distilbert(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int = 30522,
    max_seq_len: int = 512,
) -> EncoderConfig:
    return EncoderConfig(
        family="distilbert",
        vocab_size=vocab_size,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        token_types=0,
    )


def distilbert_tiny() -> EncoderConfig:
    """A DistilBERT of 36 thousand parameters, for tests."""
    return _distilbert(
        d_model=32, num_layers=2, num_heads=4, vocab_size=256, max_seq_len=64
    )


def distilbert_base() -> EncoderConfig:
    """DistilBERT, 66 million parameters."""
    return _distilbert(d_model=768, num_layers=6, num_heads=12)


# ------------------------------------------------------------------------------------
# Hugging Face files


def _read(values: Keys) -> EncoderConfig:
    divided_width("dim", values["dim"], "n_heads", values["n_heads"])
    return EncoderConfig(
        family="distilbert",
        vocab_size=values["vocab_size"],
        d_model=values["dim"],
        num_layers=values["n_layers"],
        num_heads=values["n_heads"],
        d_ff=values["hidden_dim"],
        # Sinusoidal tables are stored in the file like learned ones.
        max_seq_len=values["max_position_embeddings"],
        token_types=0,
        activation=read_activation(values, "activation"),
        tie_embeddings=values.get("tie_word_embeddings", True),
    )


def _write(config: EncoderConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab_size,
        "dim": config.d_model,
        "n_layers": config.num_layers,
        "n_heads": config.num_heads,
        "hidden_dim": config.d_ff,
        "max_position_embeddings": config.max_seq_len,
        "activation": ACTIVATION_NAMES.get(config.activation, config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": 0,
    }


def _head(values: Keys, kind: HeadKind) -> HeadConfig:
    if kind == "masked_lm":
        activation = read_activation(values, "activation")
        return unlabeled(kind, transform=activation, transform_norm=True)
    return unlabeled(kind, transform="relu" if kind == "sequence" else None)


def _tensors(config: EncoderConfig) -> list[TensorMap]:
    block, ours = "distilbert.transformer.layer.{layer}.", "blocks"
    return [
        *bert_tables("distilbert.embeddings", config.token_types),
        *linear(block + "attention.q_lin", f"{ours}.attention.query"),
        *linear(block + "attention.k_lin", f"{ours}.attention.key"),
        *linear(block + "attention.v_lin", f"{ours}.attention.value"),
        *linear(block + "attention.out_lin", f"{ours}.attention.out"),
        *layer_norm(block + "sa_layer_norm", f"{ours}.attention_norm"),
        *linear(block + "ffn.lin1", f"{ours}.mlp.up"),
        *linear(block + "ffn.lin2", f"{ours}.mlp.down"),
        *layer_norm(block + "output_layer_norm", f"{ours}.mlp_norm"),
    ]


def _head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    if head.kind == "masked_lm":
        return [
            *linear("vocab_transform", "head.transform"),
            *layer_norm("vocab_layer_norm", "head.norm"),
            *vocabulary_projection(config, "vocab_projector"),
        ]
    before = linear("pre_classifier", "head.transform") if head.pools else []
    name = "qa_outputs" if head.kind == "span" else "classifier"
    return [*before, *linear(name, "head.output")]


DISTILBERT = EncoderFamily(
    model_type="distilbert",
    architectures={
        None: "DistilBertModel",
        "masked_lm": "DistilBertForMaskedLM",
        "sequence": "DistilBertForSequenceClassification",
        "token": "DistilBertForTokenClassification",
        "span": "DistilBertForQuestionAnswering",
    },
    prefix="distilbert.",
    read=_read,
    write=_write,
    head=_head,
    tensors=_tensors,
    head_tensors=_head_tensors,
    tied={
        "vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight",
    },
    head_names=(
        *("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
        *("pre_classifier.", "classifier.", "qa_outputs."),
    ),
)
"""DistilBERT's files."""
