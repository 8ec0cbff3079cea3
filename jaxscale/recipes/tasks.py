"""Tasks of runs: their text, as batches for their model."""

import dataclasses
from typing import Any

from jax.sharding import NamedSharding

from jaxscale.models import EncoderConfig, HeadConfig, encoder_head
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.hf.load import own_head
from jaxscale.sharding import make_mesh
from jaxscale.training import (
    MaskedBatches,
    TextData,
    TrainConfig,
    load_text,
    packed_batches,
)
from jaxscale.training import run as run_directory
from jaxscale.training.data.labeled_text import LabeledText, Records, load_labeled
from jaxscale.training.kept_head import kept_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """The settings, text and batches of a run; made by `prepare`."""

    config: TrainConfig
    """The settings, with the head of an encoder."""
    text: TextData | LabeledText
    """The tokenized text."""
    train_data: Any
    """Batches for `fit`."""
    eval_data: Any
    """Held-out batches for `fit`, or None."""
    head: str | None = None
    """The part of the source's head that is reused, in words."""

    @property
    def told(self) -> str:
        """How much text there is, in words."""
        if isinstance(self.text, LabeledText):
            head = "" if self.head is None else f"; {self.head}"
            return (
                f"text: {len(self.text.train):,} texts to train on, "
                f"{len(self.text.held_out):,} held out, {self._labels}{head}"
            )
        train, held_out = self.text.train, self.text.held_out
        documents = f"{len(train):,} documents of {train.num_tokens:,} tokens"
        if held_out is None:
            return f"text: {documents} to train on, none held out"
        return (
            f"text: {documents} to train on, {len(held_out):,} of "
            f"{held_out.num_tokens:,} held out"
        )

    @property
    def _labels(self) -> str:
        assert isinstance(self.text, LabeledText)
        if self.text.problem == "regression":
            return f"with {self.text.num_labels} numbers to predict for each"
        several = "any of " if self.text.problem == "multi_label" else ""
        return f"with {several}the labels {', '.join(self.text.labels)}"


def prepare(config: TrainConfig, records: Records | None = None) -> Task:
    """Read the text of a run and make its batches, as its model wants them.

    A decoder learns next-token prediction. An encoder learns masked tokens or, if
    ``data.label_field`` is set, to classify texts.

    Args:
        config: The settings of the run. An encoder without a head gets the one that its
            family has for the task.
        records: Texts with labels, instead of those in ``data.paths``.

    Raises:
        ValueError: the text cannot be used, or does not fit model, head or mesh.
        FileNotFoundError: there is no tokenizer where the settings say.
    """
    labeled = config.data.label_field is not None
    if not isinstance(config.model, EncoderConfig):
        if labeled:
            raise ValueError(
                f"data.label_field {config.data.label_field!r} is for encoders, and "
                "the model is a decoder; leave it out"
            )
        text = load_text(config.data)
        train_data, eval_data = packed_batches(config, text)
        return Task(
            config=config, text=text, train_data=train_data, eval_data=eval_data
        )
    if labeled:
        return _classification(config, records)
    return _masked(config)


def _masked(config: TrainConfig) -> Task:
    head = config.head or encoder_head(_encoder(config), "masked_lm")
    if head.kind != "masked_lm":
        raise ValueError(
            f"head {head.kind!r} needs texts with labels; name their field in "
            "data.label_field"
        )
    text = load_text(config.data)
    train_data, eval_data = packed_batches(config, text)
    return Task(
        config=dataclasses.replace(config, head=head),
        text=text,
        train_data=MaskedBatches(train_data, text.tokenizer),
        eval_data=eval_data and MaskedBatches(eval_data, text.tokenizer),
    )


def _classification(config: TrainConfig, records: Records | None) -> Task:
    text = load_labeled(config.data, records)
    head, own = config.head, _head_of_source(config)
    if head is None or head.kind != "sequence" or head.num_labels == 0:
        asked: dict[str, Any] = {"labels": text.labels, "problem": text.problem}
        asked["num_labels"] = text.num_labels
        if own is not None and own.kind == "sequence":  # with its layers
            head = dataclasses.replace(own, **asked)
        else:
            head = encoder_head(_encoder(config), "sequence", **asked)
    if head.problem != text.problem:
        raise ValueError(
            f"the labels of the texts are those of problem {text.problem!r}, the head "
            f"has {head.problem!r}; begin without a head, or set data.problem"
        )
    if head.labels and head.labels != text.labels:
        raise ValueError(
            f"the texts have the labels {text.labels}, the head has {head.labels}; "
            "begin without a head, or give texts with the same labels"
        )
    mesh = make_mesh(config.mesh)
    rows = NamedSharding(mesh, config.axis_rules.spec("batch"))
    eval_data = None
    if text.held_out:
        eval_data = text.batches(
            text.held_out, config.data, sharding=rows, epochs=1, shuffle=False
        )
    kept = None
    if own is not None and own != head:
        kept = kept_of(_encoder(config), own, head).told
    return Task(
        config=dataclasses.replace(config, head=head),
        text=text,
        train_data=text.batches(text.train, config.data, sharding=rows),
        eval_data=eval_data,
        head=kept,
    )


def _head_of_source(config: TrainConfig) -> HeadConfig | None:
    """The head in the Hugging Face files that a run starts from, if they have one."""
    if config.source is None:
        return None
    directory = local_directory(config.source)
    if run_directory.is_run(directory):
        return None
    return own_head(Checkpoint(directory))


def _encoder(config: TrainConfig) -> EncoderConfig:
    assert isinstance(config.model, EncoderConfig)
    return config.model
