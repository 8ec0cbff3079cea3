"""The families of encoders, and the ``config.json`` of each of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale.models.albert import ALBERT
from jaxscale.models.bert import BERT, ROBERTA
from jaxscale.models.deberta import DEBERTA
from jaxscale.models.distilbert import DISTILBERT
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf_config import Keys, require
from jaxscale.models.hf_encoder import EncoderFamily, read_labels, write_labels
from jaxscale.models.modernbert import MODERNBERT


FAMILIES: dict[str, EncoderFamily] = {
    family.model_type: family
    for family in (BERT, ROBERTA, ALBERT, DISTILBERT, MODERNBERT, DEBERTA)
}
"""Every family of encoders, by the ``model_type`` of transformers."""


def family_of(config: EncoderConfig) -> EncoderFamily:
    """How the encoder that `config` describes is written in files.

    Raises:
        ValueError: its family has no files.
    """
    if config.family not in FAMILIES:
        raise ValueError(
            f"family {config.family!r} is not read from files nor written to them; "
            f"those that are: {sorted(FAMILIES)}"
        )
    return FAMILIES[config.family]


def encoder_head(
    config: EncoderConfig,
    kind: HeadKind,
    *,
    num_labels: int | None = None,
    labels: tuple[str, ...] = (),
) -> HeadConfig:
    """The head that the family of `config` has for a task.

    Args:
        config: The encoder.
        kind: The task.
        num_labels: Number of labels, for ``sequence`` and ``token``.
        labels: Their names; they also say their number.

    Raises:
        ValueError: the family has no such head, or the number of labels does not fit.

    Example:
        >>> from jaxscale.models.bert import bert_base
        >>> encoder_head(bert_base(), "sequence", num_labels=3).transform
        'tanh'
    """
    family = family_of(config)
    _require_kind(family, kind)
    head = family.head(Keys(encoder_config_to_hf(config)), kind)
    if num_labels is None:
        num_labels = len(labels) or {"span": 2}.get(kind, 0)
    return dataclasses.replace(head, num_labels=num_labels, labels=labels)


def encoder_config_from_hf(values: Mapping[str, Any]) -> EncoderConfig:
    """The configuration that the ``config.json`` of an encoder describes.

    Raises:
        ValueError: the model type, or a setting that matters, is not supported, or a
            key is missing.

    Example:
        >>> encoder_config_from_hf({
        ...     "model_type": "bert", "vocab_size": 128, "hidden_size": 64,
        ...     "intermediate_size": 96, "num_hidden_layers": 2,
        ...     "num_attention_heads": 4, "max_position_embeddings": 256,
        ... }).head_dim
        16
    """
    family = _family(values)
    require(values, "quantization_config", None)
    return family.read(Keys(values))


def encoder_config_to_hf(
    config: EncoderConfig, head: HeadConfig | None = None
) -> dict[str, Any]:
    """The ``config.json`` of an encoder, in the keys of transformers 5.

    Raises:
        ValueError: the family of transformers has no model or head like this.

    Example:
        >>> from jaxscale.models.bert import bert_base
        >>> values = encoder_config_to_hf(bert_base())
        >>> values["architectures"], values["hidden_size"]
        (['BertModel'], 768)
        >>> encoder_config_from_hf(values) == bert_base()
        True
    """
    family = family_of(config)
    kind = None if head is None else head.kind
    _require_kind(family, kind)
    values = {
        "architectures": [family.architectures[kind]],
        "model_type": family.model_type,
        "bos_token_id": None,
        "eos_token_id": None,
        **family.write(config),
    }
    _require_equal(config, family.read(Keys(values)), family)
    if head is not None:
        values |= family.write_head(head) | write_labels(head)
        _require_equal(
            head,
            read_labels(Keys(values), family.head(Keys(values), head.kind)),
            family,
        )
    return values


def head_from_hf(
    values: Mapping[str, Any], *, has_pooler: bool = False
) -> HeadConfig | None:
    """The head of a ``config.json``, by its ``architectures``.

    Args:
        values: The parsed file.
        has_pooler: Whether the file holds the weights of a pooler, which the class of
            an encoder alone does not tell.

    Raises:
        ValueError: the class is of another family, or a head that we do not have.
    """
    family = _family(values)
    names = values.get("architectures") or [family.architectures[None]]
    kinds: dict[str, HeadKind | None] = dict(family.other_architectures)
    kinds |= {name: kind for kind, name in family.architectures.items()}
    kinds[family.architectures[None]] = "pooler" if has_pooler else None
    if names[0] not in kinds:
        raise ValueError(
            f"architectures {names} of config.json is not supported for model_type "
            f"{family.model_type!r}; it has {sorted(kinds)}. Load the encoder alone "
            "with head=None, or give another head"
        )
    kind = kinds[names[0]]
    if kind is None:
        return None
    return read_labels(Keys(values), family.head(Keys(values), kind))


def _family(values: Mapping[str, Any]) -> EncoderFamily:
    name = values.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"model_type {name!r} is not an encoder that is supported; use one of "
            f"{sorted(FAMILIES)}"
        )
    return FAMILIES[name]


def _require_kind(family: EncoderFamily, kind: HeadKind | None) -> None:
    if kind not in family.architectures:
        kinds = [k for k in family.architectures if k is not None]
        raise ValueError(
            f"kind {kind!r}: transformers has no such head for "
            f"{family.model_type!r}; use one of {kinds}"
        )


def _require_equal(ours: Any, theirs: Any, family: EncoderFamily) -> None:
    """Raise where the file would not say what `ours` says."""
    differences = [
        f"{field.name}={getattr(theirs, field.name)!r} instead of "
        f"{getattr(ours, field.name)!r}"
        for field in dataclasses.fields(ours)
        if getattr(ours, field.name) != getattr(theirs, field.name)
    ]
    if differences:
        raise ValueError(
            f"{family.model_type!r} of transformers needs " + ", ".join(differences)
        )
