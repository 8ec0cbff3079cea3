"""The families of models, and the ``config.json`` of each of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.albert import ALBERT
from jaxscale.models.families.bert import BERT, CAMEMBERT, ROBERTA, XLM_ROBERTA
from jaxscale.models.families.deberta import DEBERTA, DEBERTA_V2
from jaxscale.models.families.distilbert import DISTILBERT
from jaxscale.models.families.gemma import GEMMA, GEMMA2, GEMMA3
from jaxscale.models.families.gpt import GPT2, GPTJ
from jaxscale.models.families.gpt_neox import GPT_NEOX
from jaxscale.models.families.llama import LLAMA
from jaxscale.models.families.mistral import MISTRAL
from jaxscale.models.families.modernbert import MODERNBERT
from jaxscale.models.families.qwen import QWEN2, QWEN3
from jaxscale.models.heads import HeadConfig, HeadKind, Problem
from jaxscale.models.hf.family import Family, Heads, read_labels, write_labels
from jaxscale.models.hf.keys import Keys, check_finite, require
from jaxscale.nn import RopeScaling


DECODERS: tuple[Family[DecoderConfig], ...] = (
    *(GPT2, GPTJ, LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, GEMMA, GEMMA2, GEMMA3),
)
"""Every family of decoders."""

ENCODERS: tuple[Family[EncoderConfig], ...] = (
    *(BERT, ROBERTA, XLM_ROBERTA, CAMEMBERT, ALBERT, DISTILBERT, MODERNBERT),
    *(DEBERTA, DEBERTA_V2),
)
"""Every family of encoders."""

FAMILIES: dict[str, Family] = {f.model_type: f for f in (*DECODERS, *ENCODERS)}
"""Every family, by the ``model_type`` of transformers."""


def family_of(config: DecoderConfig | EncoderConfig) -> Family:
    """The transformers family that computes the model of `config`.

    Raises:
        ValueError: no family does; for a decoder the message says what the closest one
            lacks.

    Example:
        >>> from jaxscale.models.families.llama import llama3_8b
        >>> family_of(llama3_8b()).model_type
        'llama'
    """
    if isinstance(config, EncoderConfig):
        if config.family not in FAMILIES:
            raise ValueError(
                f"family {config.family!r} is not read from files nor written to them; "
                f"those that are: {sorted(f.model_type for f in ENCODERS)}"
            )
        return FAMILIES[config.family]
    lacking = [(family, _lacking(config, family)) for family in DECODERS]
    closest, differences = min(lacking, key=lambda pair: len(pair[1]))
    if differences:
        raise ValueError(
            "config has no counterpart in transformers; the closest, "
            f"{closest.architecture}, needs " + ", ".join(dict.fromkeys(differences))
        )
    return closest


def encoder_head(
    config: EncoderConfig,
    kind: HeadKind,
    *,
    num_labels: int | None = None,
    labels: tuple[str, ...] = (),
    problem: Problem = "single_label",
) -> HeadConfig:
    """The head that the family of `config` has for a task.

    Args:
        config: The encoder.
        kind: The task.
        num_labels: Number of labels, for ``sequence`` and ``token``.
        labels: Names of the labels; they also say their number.
        problem: Meaning of the answers of ``sequence``, as `HeadConfig.problem`.

    Raises:
        ValueError: the family has no such head, or the number of labels does not fit.

    Example:
        >>> from jaxscale.models.families.bert import bert_base
        >>> encoder_head(bert_base(), "sequence", num_labels=3).transform
        'tanh'
    """
    heads = _heads(family_of(config), kind)
    head = heads.read(Keys(config_to_hf(config)), kind)
    if num_labels is None:
        num_labels = len(labels) or {"span": 2}.get(kind, 0)
    return dataclasses.replace(
        head, num_labels=num_labels, labels=labels, problem=problem
    )


def config_from_hf(values: Mapping[str, Any]) -> Any:
    """The configuration that a ``config.json`` describes.

    Args:
        values: The parsed file.

    Returns:
        A `DecoderConfig` or an `EncoderConfig`, as ``model_type`` says.

    Raises:
        ValueError: the model type, or a setting that changes the result, is not
            supported, or a key is missing.

    Example:
        >>> config = config_from_hf({
        ...     "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        ...     "intermediate_size": 96, "num_hidden_layers": 2,
        ...     "num_attention_heads": 4, "max_position_embeddings": 256,
        ...     "rms_norm_eps": 1e-6, "rope_theta": 5e5,
        ... })
        >>> config.num_kv_heads, config.head_dim, config.rope_theta
        (4, 16, 500000.0)
    """
    name = values.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ValueError(
            f"model_type {name!r} is not supported; use one of {sorted(FAMILIES)}"
        )
    require(values, "quantization_config", None)
    check_finite(dict(values))
    return FAMILIES[name].read(Keys(values))


def config_to_hf(
    config: DecoderConfig | EncoderConfig, head: HeadConfig | None = None
) -> dict[str, Any]:
    """The ``config.json`` of a model, in the keys of transformers 4 and 5.

    The ids of control tokens are null: they belong to a tokenizer. A decoder that
    several families can express is written as the first of them: a Mistral without a
    window, for example, as LLaMA.

    Args:
        config: The decoder or encoder.
        head: The head of the encoder; None is the encoder alone.

    Raises:
        ValueError: transformers has no model or head like this.

    Example:
        >>> from jaxscale.models.families.gpt import gpt2_small
        >>> values = config_to_hf(gpt2_small())
        >>> values["architectures"], values["n_embd"]
        (['GPT2LMHeadModel'], 768)
        >>> config_from_hf(values) == gpt2_small()
        True
    """
    if isinstance(config, DecoderConfig):
        config = config.without_pattern()
    family = family_of(config)
    values = _written(config, family)
    differences = _differences(config, family.read(Keys(values)))
    if head is not None:
        heads = _heads(family, head.kind)
        values["architectures"] = [heads.architectures[head.kind]]
        values |= heads.write(head) | write_labels(head)
        theirs = read_labels(Keys(values), heads.read(Keys(values), head.kind))
        differences += _differences(head, theirs)
    if differences:
        raise ValueError(
            f"{family.model_type!r} of transformers needs " + ", ".join(differences)
        )
    return values


def head_from_hf(
    values: Mapping[str, Any], *, has_pooler: bool = False
) -> HeadConfig | None:
    """The head of the ``config.json`` of an encoder, by its ``architectures``.

    Args:
        values: The parsed file.
        has_pooler: True if the file holds the weights of a pooler, which the class of
            an encoder alone does not tell.

    Raises:
        ValueError: the class is of another family, or a head that we do not have.
    """
    family = FAMILIES[values["model_type"]]
    heads = family.heads
    if heads is None:
        return None
    names = Keys(values).get("architectures") or [family.architecture]
    kinds: dict[str, HeadKind | None] = dict(heads.other_architectures)
    kinds |= {name: kind for kind, name in heads.architectures.items()}
    kinds[family.architecture] = "pooler" if has_pooler else None
    if names[0] not in kinds:
        raise ValueError(
            f"architectures {names} of config.json is not supported for model_type "
            f"{family.model_type!r}; it has {sorted(kinds)}. Load the encoder alone "
            "with head=None, or give another head"
        )
    kind = kinds[names[0]]
    if kind is None:
        return None
    return read_labels(Keys(values), heads.read(Keys(values), kind))


def _heads(family: Family, kind: HeadKind) -> Heads:
    """The heads of a family that has one of this kind."""
    kinds = [] if family.heads is None else sorted(family.heads.architectures)
    if family.heads is None or kind not in kinds:
        raise ValueError(
            f"kind {kind!r}: transformers has no such head for "
            f"{family.model_type!r}; use one of {kinds}"
        )
    return family.heads


def _written(config: Any, family: Family) -> dict[str, Any]:
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "bos_token_id": None,
        "eos_token_id": None,
        **family.write(config),
    }


def _lacking(config: DecoderConfig, family: Family[DecoderConfig]) -> list[str]:
    """The settings of `config` that `family` cannot express, in words."""
    try:
        theirs = family.read(Keys(_written(config, family)))
    except ValueError as error:
        # As far away as can be: these sizes cannot even be written.
        return [str(error)] * len(dataclasses.fields(config))
    return _differences(config, theirs)


def _differences(ours: Any, theirs: Any) -> list[str]:
    """List the settings that a file would not express as `ours` does."""

    def value(config: Any, name: str) -> Any:
        """A setting in its canonical form."""
        found = getattr(config, name)
        if name in ("rotary_dim", "query_pre_attn_scalar"):
            return None if found == config.head_dim else found
        # With a scaling None says that all layers have that, too; encoders have none.
        scaled = getattr(config, "rope_scaling", None) is not None
        if name == "rope_theta_local" and found is None and not scaled:
            return config.rope_theta
        if name == "rope_scaling" and found is not None and found.kind == "linear":
            return RopeScaling(kind="linear", factor=found.factor)
        return found

    return [
        f"{field.name}={value(theirs, field.name)!r} instead of "
        f"{value(ours, field.name)!r}"
        for field in dataclasses.fields(ours)
        if value(ours, field.name) != value(theirs, field.name)
    ]
