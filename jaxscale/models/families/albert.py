"""ALBERT: named configurations, and its Hugging Face files.

References:
    ALBERT, arXiv 1909.11942: layers share their parameters, and the tables are narrow.
"""

import dataclasses
from typing import Any

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.bert import (
    bert_attention,
    bert_head,
    bert_keys,
    bert_tables,
    label_tensors,
    masked_lm_tensors,
    write_bert_keys,
)
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf.family import ENCODER_BUFFERS, Family, Heads
from jaxscale.models.hf.keys import Keys
from jaxscale.models.hf.names import TensorMap, layer_norm, linear


def _albert(
    *,
    d_model: int,
    embed_dim: int = 128,
    vocab_size: int = 30000,
    max_seq_len: int = 512,
    **sizes: Any,
) -> EncoderConfig:
    return EncoderConfig(
        family="albert",
        vocab_size=vocab_size,
        d_model=d_model,
        d_ff=4 * d_model,
        max_seq_len=max_seq_len,
        embed_dim=embed_dim,
        activation="gelu_tanh",
        layer_groups=1,
        **sizes,
    )


def albert_tiny() -> EncoderConfig:
    """An ALBERT of 19 thousand parameters, for tests."""
    return _albert(
        d_model=32,
        num_layers=3,
        num_heads=4,
        embed_dim=16,
        vocab_size=256,
        max_seq_len=64,
    )


def albert_base() -> EncoderConfig:
    """ALBERT-base v2, 11 million parameters."""
    return _albert(d_model=768, num_layers=12, num_heads=12)


def albert_large() -> EncoderConfig:
    """ALBERT-large v2, 17 million parameters."""
    return _albert(d_model=1024, num_layers=24, num_heads=16)


# ------------------------------------------------------------------------------------
# Hugging Face files

# Of transformers, for files that lack the key; other families take "gelu".
_DEFAULTS = {"hidden_act": "gelu_new"}


def _read(values: Keys) -> EncoderConfig:
    keys = bert_keys(Keys(_DEFAULTS | values))
    # Theirs is how often a layer of a group is run, ours how many blocks are.
    inner = values.get("inner_group_num", 1)
    return EncoderConfig(
        family="albert",
        embed_dim=values["embedding_size"],
        layer_groups=values.get("num_hidden_groups", 1),
        group_blocks=inner,
        **keys | {"num_layers": keys["num_layers"] * inner},
    )


def _write(config: EncoderConfig) -> dict[str, Any]:
    own = {
        "embedding_size": config.table_dim,
        "num_hidden_layers": config.num_layers // config.group_blocks,
        "num_hidden_groups": config.layer_groups,
        "inner_group_num": config.group_blocks,
    }
    return write_bert_keys(config) | own


def _head(values: Keys, kind: HeadKind) -> HeadConfig:
    return bert_head(values, kind, default=_DEFAULTS["hidden_act"])


def _tensors(config: EncoderConfig) -> list[TensorMap]:
    root, ours = "albert.encoder", "blocks"
    block = root + ".albert_layer_groups.{layer}.albert_layers.{inner}."
    maps = [
        *bert_tables("albert.embeddings", config.token_types),
        *linear(f"{root}.embedding_hidden_mapping_in", "embed_out"),
        *layer_norm(block + "full_layer_layer_norm", f"{ours}.mlp_norm"),
        *bert_attention(block + "attention", ours),
        *linear(block + "attention.dense", f"{ours}.attention.out"),
        *layer_norm(block + "attention.LayerNorm", f"{ours}.attention_norm"),
        *linear(block + "ffn", f"{ours}.mlp.up"),
        *linear(block + "ffn_output", f"{ours}.mlp.down"),
    ]
    return [dataclasses.replace(m, inner_blocks=config.group_blocks) for m in maps]


def _head_tensors(config: EncoderConfig, head: HeadConfig) -> list[TensorMap]:
    if head.kind != "masked_lm":
        return label_tensors(head, "albert.pooler")
    return masked_lm_tensors(
        config,
        dense="predictions.dense",
        norm="predictions.LayerNorm",
        decoder="predictions.decoder",
        bias="predictions.bias",
    )


ALBERT = Family(
    model_type="albert",
    architecture="AlbertModel",
    presets=(albert_tiny, albert_base, albert_large),
    prefix="albert.",
    read=_read,
    write=_write,
    tensors=_tensors,
    tied={
        "predictions.decoder.weight": "albert.embeddings.word_embeddings.weight",
        "predictions.decoder.bias": "predictions.bias",
    },
    buffers=ENCODER_BUFFERS,
    heads=Heads(
        architectures={
            "pooler": "AlbertModel",
            "masked_lm": "AlbertForMaskedLM",
            "sequence": "AlbertForSequenceClassification",
            "token": "AlbertForTokenClassification",
            "span": "AlbertForQuestionAnswering",
        },
        other_architectures={"AlbertForPreTraining": "masked_lm"},
        read=_head,
        tensors=_head_tensors,
        names=(
            *("predictions.", "sop_classifier.", "albert.pooler.", "pooler."),
            *("classifier.", "qa_outputs."),
        ),
    ),
)
"""ALBERT's files."""
