"""Fine-tune an encoder on texts with labels that are in memory: a few lines."""

import dataclasses
from pathlib import Path

from jaxscale.keywords import explain_keywords
from jaxscale.recipes.runs import from_source
from jaxscale.recipes.tasks import prepare
from jaxscale.training import FitResult, fit
from jaxscale.training import run as run_directory
from jaxscale.training.data.labeled_text import Records


@explain_keywords
def train_classifier(
    source: str | Path,
    records: Records,
    *,
    output_dir: str | Path,
    text_field: str = "text",
    label_field: str = "label",
    pair_field: str | None = None,
    held_out_fraction: float = 0.05,
    steps: int = 200,
    seq_len: int = 512,
    batch_size: int = 8,
    learning_rate: float = 3e-5,
) -> FitResult:
    """Train an encoder to classify texts; its directory is that of a run.

    `Encoder.from_pretrained` and ``jaxscale serve`` read the directory, and ``jaxscale
    export`` writes it as Hugging Face's.

    Args:
        source: A Hugging Face directory, or the name of a model on its hub.
        records: The texts and their labels: a `datasets` data set, a sequence of
            mappings, or a mapping of columns.
        output_dir: A new directory.
        text_field: Field of the text.
        label_field: Field of the label: a name or an integer, a list of them, or
            numbers to predict.
        pair_field: Field of a second text, where labels are those of pairs.
        held_out_fraction: Share of the texts to evaluate on.
        steps: Training steps.
        seq_len: Tokens of a packed row; longer texts are truncated.
        batch_size: Packed rows per batch.
        learning_rate: Peak learning rate.

    Raises:
        FileNotFoundError: there is no such source.
        ValueError: it is no encoder, the texts cannot be used, or the directory holds
            something.
    """
    config = from_source(str(source))
    data = dataclasses.replace(
        config.data,
        text_field=text_field,
        label_field=label_field,
        pair_field=pair_field,
        held_out_fraction=held_out_fraction,
        seq_len=min(seq_len, config.data.seq_len),
        batch_size=batch_size,
    )
    config = dataclasses.replace(
        config,
        data=data,
        optimizer=dataclasses.replace(config.optimizer, learning_rate=learning_rate),
        steps=steps,
        output_dir=str(output_dir),
    )
    directory = Path(output_dir)
    run_directory.check_free(directory, config, resume=False)
    task = prepare(config, records)
    run_directory.write(directory, task.config, task.text)
    return fit(task.config, train_data=task.train_data, eval_data=task.eval_data)
