"""Continue the pretraining of a model on your own text, whole or by adapters.

    python continue_pretraining.py --source meta-llama/Llama-3.2-1B --paths notes.jsonl
    python continue_pretraining.py --source bert/ --paths 'papers/**/*.txt' --rank 8

A decoder learns the next token, an encoder hidden tokens. With --rank the weights stay
and low-rank adapters are trained. The same by command:

    jaxscale train --from SOURCE --data.paths notes.jsonl --lora.rank 8
    jaxscale export runs/notes runs/notes/model
"""

import dataclasses
from pathlib import Path

import tyro

from jaxscale.nn import LoraConfig
from jaxscale.recipes import check_machine, export, from_source, prepare
from jaxscale.training import Evaluation, fit
from jaxscale.training import run as run_directory
from jaxscale.training.lock import locked


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    source: str
    paths: tuple[str, ...]
    held_out_fraction: float = 0.05
    seq_len: int = 1024
    batch_size: int = 8
    steps: int = 1000
    eval_batches: int | None = None  # drawn at each evaluation; None is 32
    learning_rate: float = 3e-5
    rank: int = 0
    dtype: str = "bfloat16"
    output_dir: str = "runs/continued"


def main(options: Options) -> tuple[Evaluation, Evaluation]:
    config = from_source(options.source)
    data = dataclasses.replace(
        config.data,
        paths=options.paths,
        held_out_fraction=options.held_out_fraction,
        seq_len=min(options.seq_len, config.model.max_seq_len),
        batch_size=options.batch_size,
    )
    optimizer = dataclasses.replace(
        config.optimizer, learning_rate=options.learning_rate, schedule="constant"
    )
    config = dataclasses.replace(
        config,
        data=data,
        optimizer=optimizer,
        lora=LoraConfig(rank=options.rank),
        steps=1,
        eval_batches=options.eval_batches,
        dtype=options.dtype,
        output_dir=options.output_dir,
    )
    check_machine(config)
    task = prepare(config)
    print(task.told)
    directory = Path(options.output_dir)
    with locked(directory):
        run_directory.check_free(directory, task.config, resume=False)

        # The first step tells where we begin; the same call continues it to the last.
        results = []
        for steps in (1, options.steps):
            config = dataclasses.replace(task.config, steps=steps)
            run_directory.write(directory, config, task.text)
            result = fit(config, train_data=task.train_data, eval_data=task.eval_data)
            assert result.evaluation is not None
            results.append(result.evaluation)
    first, last = results
    print(f"held-out loss after a step {first.loss:.3f}, at the end {last.loss:.3f}")
    export(directory, directory / "model")
    return first, last


if __name__ == "__main__":
    main(tyro.cli(Options))
