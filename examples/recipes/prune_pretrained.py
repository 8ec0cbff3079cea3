"""Prune a pretrained decoder, and compare it with a dense one trained as long.

    python prune_pretrained.py --source meta-llama/Llama-3.2-1B --paths text/

The masks are made of the pretrained weights at once; training goes on under them. What
training on this text gains by itself is seen in the dense control, which takes as many
steps on the same batches.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import tyro

from jaxscale.pruning import PruneConfig
from jaxscale.recipes import Pruned, TuneConfig, export, from_source, prune_and_tune
from jaxscale.recipes.prune import open_source
from jaxscale.recipes.prune_report import finish


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    source: str
    paths: tuple[str, ...]
    prune: PruneConfig = PruneConfig(sparsity=0.75, pattern="tw")
    score: Literal["magnitude", "taylor", "wanda"] = "taylor"
    held_out_fraction: float = 0.05
    seq_len: int = 1024
    batch_size: int = 8
    steps: int = 1000
    eval_batches: int | None = None  # drawn at each evaluation; None is 32
    learning_rate: float = 3e-5
    dtype: str = "bfloat16"
    output_dir: str = "runs/pruned"


def main(options: Options) -> Pruned:
    config = from_source(options.source)
    data = dataclasses.replace(
        config.data,
        paths=options.paths,
        held_out_fraction=options.held_out_fraction,
        seq_len=min(options.seq_len, config.model.max_seq_len),
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
        eval_batches=options.eval_batches,
        dtype=options.dtype,
        output_dir=options.output_dir,
    )
    model, text = open_source(config, options.prune)
    tune = TuneConfig(score=options.score, control=True)
    pruned = prune_and_tune(config, model, text, options.prune, tune)
    directory = Path(options.output_dir)
    report = finish(directory, pruned, text)
    assert pruned.control is not None
    print(
        f"held-out loss: pretrained {pruned.before.loss:.3f}, pruned "
        f"{pruned.tuned.loss:.3f}, dense control {pruned.control.loss:.3f}; {report}"
    )
    export(directory, directory / "model")
    return pruned


if __name__ == "__main__":
    main(tyro.cli(Options))
