"""One of two processes whose settings differ; see test_agreement."""

import dataclasses
import json
import sys

from tests.training import processes


def main(coordinator: str, rank: str, directory: str) -> None:
    processes.join(coordinator, rank)
    from jaxscale.training import fit
    from jaxscale.training.agreement import check_same_settings
    from tests.training import test_preemption

    config = test_preemption.config(directory)
    check_same_settings(config)
    told = []
    for name, value in {
        "steps": 41,
        "microbatches": 2,
        "data": dataclasses.replace(config.data, batch_size=16, seq_len=16),
        "model": dataclasses.replace(config.model, num_layers=3),
        "optimizer": dataclasses.replace(config.optimizer, learning_rate=0.5),
        "output_dir": f"{directory}/other",
    }.items():
        other = dataclasses.replace(config, **{name: value})
        try:
            fit(config if rank == "0" else other, train_data=[])
        except ValueError as error:
            told.append(str(error))
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
