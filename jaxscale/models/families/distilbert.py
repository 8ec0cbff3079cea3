"""DistilBERT: named configurations, and its Hugging Face files.

References:
    DistilBERT, arXiv 1910.01108: BERT of half the depth, without token types.
"""

from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.bert import (
    bert_head,
    bert_tables,
    label_tensors,
    masked_lm_tensors,
)
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf.family import ENCODER_BUFFERS, Family, Heads
from jaxscale.models.hf.keys import (
    Keys,
    activation_name,
    divided_width,
    read_activation,
)
from jaxscale.models.hf.names import TensorMap, layer_norm, linear


def _distilbert(
    *, d_model: int, vocab_size: int = 30522, max_seq_len: int = 512, **sizes: Any
) -> EncoderConfig:
    return EncoderConfig(
        family="distilbert",
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        token_types=0,
        **sizes,
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
        "activation": activation_name(config.activation),
        "tie_word_embeddings": config.tie_embeddings,
        "pad_token_id": 0,
    }


def _head(values: Keys, kind: HeadKind) -> HeadConfig:
    return bert_head(values, kind, activation="activation", pooled="relu")


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
    if head.kind != "masked_lm":
        return label_tensors(head, "pre_classifier")
    return masked_lm_tensors(
        config,
        dense="vocab_transform",
        norm="vocab_layer_norm",
        decoder="vocab_projector",
        bias=None,
    )


DISTILBERT = Family(
    model_type="distilbert",
    architecture="DistilBertModel",
    presets=(distilbert_tiny, distilbert_base),
    prefix="distilbert.",
    read=_read,
    write=_write,
    tensors=_tensors,
    tied={
        "vocab_projector.weight": "distilbert.embeddings.word_embeddings.weight",
    },
    buffers=ENCODER_BUFFERS,
    heads=Heads(
        architectures={
            "masked_lm": "DistilBertForMaskedLM",
            "sequence": "DistilBertForSequenceClassification",
            "token": "DistilBertForTokenClassification",
            "span": "DistilBertForQuestionAnswering",
        },
        read=_head,
        tensors=_head_tensors,
        names=(
            *("vocab_transform.", "vocab_layer_norm.", "vocab_projector."),
            *("pre_classifier.", "classifier.", "qa_outputs."),
        ),
    ),
)
"""DistilBERT's files."""
