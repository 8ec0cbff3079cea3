"""The parts of a file's head that a new head keeps: the pooler, and rows by label."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.registry import family_of
from jaxscale.models.heads import Head, HeadConfig, make_head
from jaxscale.sharding.parameters import place
from jaxscale.sharding.rules import AxisRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptHead:
    """Parts of a file's head that initialize a new head; see `kept_of`."""

    layers: bool
    """The projection before the last one, and its norm: BERT's pooler."""
    rows: tuple[int | None, ...]
    """The number in the file of each label; None for a new one."""
    told: str
    """The same in words."""

    @property
    def anything(self) -> bool:
        """Whether the new head takes over anything."""
        return self.layers or bool(set(self.rows) - {None})


def kept_of(
    config: EncoderConfig, own: HeadConfig | None, head: HeadConfig
) -> KeptHead:
    """What `head` takes over from `own`, the head of the files.

    Rows of the last projection are matched by label name. If no name matches, numeric
    names such as 1 or LABEL_1 stand for their index in the file; if the file has no
    names, equally many labels are taken in order.

    Example:
        >>> from jaxscale.models.families.bert import bert_tiny
        >>> own = HeadConfig(kind="sequence", num_labels=2, labels=("no", "yes"))
        >>> names = ("maybe", "yes", "no")
        >>> new = HeadConfig(kind="sequence", num_labels=3, labels=names)
        >>> kept_of(bert_tiny(), own, new).rows
        (None, 1, 0)
    """
    if own is None:
        return KeptHead(layers=False, rows=(), told="the head is new")
    before = ("transform", "transform_bias", "transform_norm")
    # RoBERTa's pooler and the first layer of its classifier differ, BERT's are the
    # same.
    tensors = _layers(config, head)
    layers = (
        head.transform is not None
        and tensors == _layers(config, own)
        and all(getattr(own, name) == getattr(head, name) for name in before)
    )
    rows: tuple[int | None, ...] = (None,) * head.num_labels
    # A file of one number may leave out what it means.
    same = own.problem == head.problem or own.num_labels == head.num_labels == 1
    if same and own.kind == head.kind and own.bias == head.bias and head.num_labels:
        rows = _rows(own, head)
    told = _told(own, head, rows)
    if layers and not set(rows) - {None}:
        told += ", behind the pooler of the files"
    return KeptHead(layers=layers, rows=rows, told=told)


def with_head(
    model: EncoderModel,
    head: HeadConfig,
    kept: KeptHead,
    *,
    seed: int,
    mesh: Mesh,
    rules: AxisRules,
) -> EncoderModel:
    """`model` with a new head that keeps parts of the old one."""

    def make(old: Head) -> Head:
        new = make_head(
            model.config,
            head,
            dtype=model.dtype,
            param_dtype=model.param_dtype,
            rules=model.rules,
            rngs=nnx.Rngs(seed),
        )
        if kept.layers:
            new.transform, new.norm = old.transform, old.norm
        if new.output is not None and set(kept.rows) - {None}:
            assert old.output is not None  # else no row would be kept
            for mine, its in (
                (new.output.kernel, old.output.kernel),
                (new.output.bias, old.output.bias),
            ):
                if mine is not None and its is not None:
                    mine[...] = _columns(its[...], mine[...], kept.rows)
        return new

    model.head = place(jax.jit(make)(model.head), mesh, rules)
    return model


def _columns(old: Any, new: Any, rows: Sequence[int | None]) -> Any:
    """The columns of `new`, those that are kept from `old`."""
    numbers = jnp.array([0 if row is None else row for row in rows])
    kept = jnp.array([row is not None for row in rows])
    return jnp.where(kept, jnp.take(old, numbers, axis=-1).astype(new.dtype), new)


def _layers(config: EncoderConfig, head: HeadConfig) -> set[str]:
    """The tensors of a file before the last projection."""
    heads = family_of(config).heads
    return {
        entry.name
        for entry in (heads.tensors(config, head) if heads else ())
        if entry.parameters[0].startswith(("head.transform", "head.norm"))
    }


def _rows(own: HeadConfig, head: HeadConfig) -> tuple[int | None, ...]:
    number = {name: i for i, name in enumerate(own.labels)}
    if number.keys() & set(head.labels):
        return tuple(number.get(name) for name in head.labels)
    numbers = [name.removeprefix("LABEL_") for name in head.labels]
    if numbers and all(n.isdecimal() for n in numbers):
        places = [int(n) for n in numbers]
        return tuple(place if place < own.num_labels else None for place in places)
    unnamed = not (own.labels and head.labels)
    if unnamed and own.num_labels == head.num_labels:
        return tuple(range(head.num_labels))
    return (None,) * head.num_labels


def _told(own: HeadConfig, head: HeadConfig, rows: Sequence[int | None]) -> str:
    kept = [i for i, row in enumerate(rows) if row is not None]
    if not kept:
        return "the head is new"

    def name(labels: Sequence[str], i: int) -> str:
        return labels[i] if labels else f"LABEL_{i}"

    def mapped(i: int) -> str:
        mine, its = name(head.labels, i), name(own.labels, rows[i] or 0)
        return mine if mine == its else f"{mine} (from {its})"

    told = f"the head keeps {', '.join(map(mapped, kept))} of the files"
    if new := [name(head.labels, i) for i in range(len(rows)) if i not in kept]:
        told += f"; new: {', '.join(new)}"
    gone = set(range(own.num_labels)) - set(rows)
    if gone:
        told += f"; left out: {', '.join(name(own.labels, i) for i in sorted(gone))}"
    return told
