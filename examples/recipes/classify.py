"""Fine-tune an encoder of the BERT family to classify texts.

    python classify.py --paths reviews.jsonl --label-field stars --output-dir runs/stars

Each line of reviews.jsonl is a record as {"text": "...", "stars": "good"}. The weights
are a Hugging Face directory, or a name on its hub. The same by command:

    jaxscale train --from SOURCE --data.paths reviews.jsonl --data.label-field stars
    jaxscale export runs/stars runs/stars/model
"""

import dataclasses
from pathlib import Path

import tyro

from jaxscale.inference import Encoder
from jaxscale.recipes import check_machine, export, from_source, prepare
from jaxscale.training import fit
from jaxscale.training import run as run_directory
from jaxscale.training.lock import locked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    paths: tuple[str, ...]
    source: str = "sentence-transformers/all-MiniLM-L6-v2"
    text_field: str = "text"
    label_field: str = "label"
    held_out_fraction: float = 0.1
    seq_len: int = 512
    batch_size: int = 8
    steps: int = 500
    eval_batches: int | None = None  # drawn at each evaluation; None is all held out
    learning_rate: float = 5e-5
    dtype: str = "bfloat16"
    output_dir: str = "runs/classify"


def main(options: Options) -> Encoder:
    # 1. Settings: those of the weights, with our text.
    config = from_source(options.source)
    data = dataclasses.replace(
        config.data,
        paths=options.paths,
        text_field=options.text_field,
        label_field=options.label_field,
        held_out_fraction=options.held_out_fraction,
        seq_len=options.seq_len,
        batch_size=options.batch_size,
    )
    optimizer = dataclasses.replace(
        config.optimizer, learning_rate=options.learning_rate
    )
    config = dataclasses.replace(
        config,
        data=data,
        optimizer=optimizer,
        steps=options.steps,
        eval_every=max(1, options.steps // 4),
        eval_batches=options.eval_batches,
        dtype=options.dtype,
        output_dir=options.output_dir,
    )
    check_machine(config)

    # 2. The text, its labels, and a new head for them.
    task = prepare(config)
    print(task.told)
    directory = Path(options.output_dir)
    with locked(directory):
        run_directory.check_free(directory, task.config, resume=False)
        run_directory.write(directory, task.config, task.text)

        # 3. Train, and write what transformers and we read.
        result = fit(task.config, train_data=task.train_data, eval_data=task.eval_data)
    assert result.evaluation is not None
    found, held_out = result.evaluation, len(task.text.held_out or ())
    quality = f"loss {found.loss:.3f}"
    if found.accuracy is not None:  # which numbers have none of
        quality = f"accuracy {found.accuracy:.1%}"
    print(f"{quality} on {found.tokens} of {held_out} held-out texts")
    export(directory, directory / "model")
    return Encoder.from_pretrained(directory / "model")


if __name__ == "__main__":
    main(tyro.cli(Options))
