"""How a family of encoders is written in Hugging Face files: keys, names, heads.

Each family is an `EncoderFamily` beside its presets; `jaxscale.models.families` lists
them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig, HeadKind
from jaxscale.models.hf_config import Keys
from jaxscale.models.hf_names import TensorMap, layer_norm, linear


type PlainActivation = Literal["gelu", "gelu_tanh", "relu"]

ACTIVATIONS: dict[str, PlainActivation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Names of transformers for our activations."""
ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderFamily:
    """A model type of transformers."""

    model_type: str
    """As ``config.json`` calls it."""
    architectures: Mapping[HeadKind | None, str]
    """Class of transformers by head; None is the encoder alone."""
    prefix: str
    """What precedes the names of the encoder's tensors where there is a head."""
    read: Callable[[Keys], EncoderConfig]
    """The configuration of a ``config.json``."""
    write: Callable[[EncoderConfig], dict[str, Any]]
    """The keys of a ``config.json`` that `read` reads."""
    head: Callable[[Keys, HeadKind], HeadConfig]
    """The layers of a head, without labels, for a ``config.json``."""
    write_head: Callable[[HeadConfig], dict[str, Any]] = lambda head: {}
    """The keys of a ``config.json`` that `head` reads."""
    tensors: Callable[[EncoderConfig], list[TensorMap]]
    """Every tensor of the encoder, the table of tokens first."""
    head_tensors: Callable[[EncoderConfig, HeadConfig], list[TensorMap]]
    """Every tensor of a head."""
    tied: Mapping[str, str]
    """Tensors of a masked-language-model head that equal others."""
    head_names: Sequence[str]
    """What the names of the tensors of heads begin with: one loads without its head,
    or with another."""
    other_architectures: Mapping[str, HeadKind] = dataclasses.field(
        default_factory=dict
    )
    """Further classes whose files hold a head that we have, beside ones we lack."""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Beginnings of names, and those that some files have in their place."""
    unread: Sequence[str] = ()
    """Beginnings of the names of tensors that files may hold though they are unused."""


def read_activation(values: Keys, key: str) -> PlainActivation:
    """Our name of the activation that a key of ``config.json`` names.

    Raises:
        ValueError: we do not have it.
    """
    name = values.get(key, "gelu")
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{key} {name!r} of config.json is not supported; use one of "
            f"{sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def read_labels(values: Keys, head: HeadConfig) -> HeadConfig:
    """`head` with the labels of ``config.json``.

    Raises:
        ValueError: they are not numbered 0, 1, 2, ...
    """
    if head.kind in ("masked_lm", "pooler"):
        return head
    names = values.get("id2label") or {}
    count = len(names) or values.get("num_labels", 2)
    if names and {int(key) for key in names} != set(range(count)):
        raise ValueError(
            f"id2label {names} of config.json must number its labels from 0 to "
            f"{count - 1}"
        )
    ordered = tuple(str(names.get(str(i), names.get(i))) for i in range(count))
    unnamed = not names or ordered == tuple(f"LABEL_{i}" for i in range(count))
    return dataclasses.replace(
        head, num_labels=count, labels=() if unnamed else ordered
    )


def write_labels(head: HeadConfig) -> dict[str, Any]:
    """The keys that name the labels of a head."""
    if not head.num_labels:
        return {}
    names = head.labels or tuple(f"LABEL_{i}" for i in range(head.num_labels))
    return {
        "id2label": {str(i): name for i, name in enumerate(names)},
        "label2id": {name: i for i, name in enumerate(names)},
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


def bert_attention(theirs: str, ours: str) -> list[TensorMap]:
    """Query, key and value under BERT's names."""
    names = ("query", "key", "value")
    return [
        entry
        for n in names
        for entry in linear(f"{theirs}.{n}", f"{ours}.attention.{n}")
    ]


def bert_tables(theirs: str, token_types: int) -> list[TensorMap]:
    """The tables of the embedding and its norm under BERT's names."""
    tables = [("word", "embed"), ("position", "positions")]
    if token_types:
        tables.append(("token_type", "token_types"))
    return [
        *(
            TensorMap(
                name=f"{theirs}.{n}_embeddings.weight", parameters=(f"{o}.table",)
            )
            for n, o in tables
        ),
        *layer_norm(f"{theirs}.LayerNorm", "embed_norm"),
    ]
