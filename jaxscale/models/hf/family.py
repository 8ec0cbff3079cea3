"""The Hugging Face files of a family of models: keys, names, heads.

Each family is a `Family` beside its presets, in a file of `jaxscale.models`;
`jaxscale.models.families.registry` lists them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, HeadKind, Problem
from jaxscale.models.hf.keys import Keys
from jaxscale.models.hf.names import TensorMap, linear


_PROBLEMS: Mapping[str, Problem] = {
    "single_label_classification": "single_label",
    "multi_label_classification": "multi_label",
    "regression": "regression",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heads:
    """The heads of a family of encoders."""

    architectures: Mapping[HeadKind, str]
    """Class of transformers by head."""
    other_architectures: Mapping[str, HeadKind] = dataclasses.field(
        default_factory=dict
    )
    """Further classes whose files hold a head that we have, beside ones we lack."""
    read: Callable[[Keys, HeadKind], HeadConfig]
    """The layers of a head, without labels, for a ``config.json``."""
    write: Callable[[HeadConfig], dict[str, Any]] = lambda head: {}
    """The keys of a ``config.json`` that `read` reads."""
    tensors: Callable[[EncoderConfig, HeadConfig], list[TensorMap]]
    """Every tensor of a head."""
    names: Sequence[str]
    """Prefixes of the names of the tensors of heads: a model loads without its head, or
    with another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family[Config: (DecoderConfig, EncoderConfig)]:
    """A model type of transformers: its presets, and how its files are written."""

    model_type: str
    """The name of the family in ``config.json``."""
    architecture: str
    """Class of transformers: a decoder's with its output projection, or an encoder's
    without a head."""
    presets: Sequence[Callable[[], Config]]
    """Functions that make a named configuration."""
    prefix: str
    """Prefix of the names of all tensors but those of the output projection or head.
    Files that hold the model alone leave it out."""
    read: Callable[[Keys], Config]
    """The configuration of a ``config.json``."""
    write: Callable[[Config], dict[str, Any]]
    """The keys of a ``config.json`` that `read` reads."""
    tensors: Callable[[Config], list[TensorMap]]
    """Every tensor of the model without a head, the table of tokens first."""
    tied: Mapping[str, str]
    """Tensors of the output projection that equal others where the two are tied."""
    buffers: Sequence[str] = ()
    """Patterns of the names of buffers in old files, recomputed from the
    configuration."""
    heads: Heads | None = None
    """None for decoders."""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Beginnings of names, and those that some files have in their place."""
    unread: Sequence[str] = ()
    """Beginnings of the names of tensors that files may hold though they are unused."""


ENCODER_BUFFERS = (
    r"(^|\.)embeddings\.(position_ids|token_type_ids)$",
    r"(^|\.)inv_freq$",
)
"""Buffers of old files of encoders."""


def output_projection(config: DecoderConfig, theirs: str) -> list[TensorMap]:
    """The output projection of a decoder, where it has one of its own."""
    if config.tie_embeddings:
        return []
    return linear(theirs, "lm_head", bias=config.lm_head_bias)


def read_labels(values: Keys, head: HeadConfig) -> HeadConfig:
    """`head` with the labels of ``config.json``.

    Raises:
        ValueError: they are not numbered 0, 1, 2, ..., or ``problem_type`` is none
            that we have.
    """
    if head.kind in ("masked_lm", "pooler"):
        return head
    if head.kind == "sequence":
        head = dataclasses.replace(head, problem=_problem(values))
    names = {str(key): name for key, name in values.get("id2label", {}).items()}
    if not names:
        return dataclasses.replace(head, num_labels=values.get("num_labels", 2))
    numbers = [str(i) for i in range(len(names))]
    if set(names) != set(numbers):
        raise ValueError(
            f"id2label {names!r:.200} of config.json must number its labels from 0 to "
            f"{len(names) - 1}"
        )
    labels = tuple(str(names[number]) for number in numbers)
    unnamed = labels == tuple(f"LABEL_{number}" for number in numbers)
    return dataclasses.replace(
        head, num_labels=len(names), labels=() if unnamed else labels
    )


def _problem(values: Keys) -> Problem:
    """What ``problem_type`` says; None is what transformers makes of whole numbers."""
    found = values.get("problem_type", None)
    if found is None:
        return "single_label"
    if found not in _PROBLEMS:
        raise ValueError(
            f"problem_type {found!r} of config.json is not supported, only "
            f"{sorted(_PROBLEMS)}; load the encoder alone with head=None, or give "
            "another head"
        )
    return _PROBLEMS[found]


def write_labels(head: HeadConfig) -> dict[str, Any]:
    """The keys that name the labels of a head."""
    if not head.num_labels:
        return {}
    problem = next(name for name, p in _PROBLEMS.items() if p == head.problem)
    names = head.labels or tuple(f"LABEL_{i}" for i in range(head.num_labels))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
        **({"problem_type": problem} if head.problem != "single_label" else {}),
    }


def unlabeled(kind: HeadKind, **layers: Any) -> HeadConfig:
    """A head of as few labels as its kind allows; `read_labels` sets their number."""
    count = {"masked_lm": 0, "pooler": 0, "span": 2}.get(kind, 1)
    return HeadConfig(kind=kind, num_labels=count, **layers)


def vocabulary_projection(
    config: EncoderConfig, theirs: str, bias: str | None = None
) -> list[TensorMap]:
    """The last projection of a masked-language-model head.

    Args:
        config: The encoder, whose table of tokens is the kernel if it is tied.
        theirs: The name of the projection.
        bias: The name of the bias where it is tied too; None is that of `theirs`.
    """
    if not config.tie_embeddings:
        return linear(theirs, "head.output")
    return [TensorMap(name=bias or f"{theirs}.bias", parameters=("head.bias",))]
