"""One of two processes of a run of which one gets a SIGTERM; see test_preemption."""

import json
import os
import signal
import sys
import time

import jax

from tests.training import processes


def main(coordinator: str, rank: str, directory: str) -> None:
    processes.join(coordinator, rank)
    from tests.training import test_preemption

    def preempt(step, state, metrics):
        # All stop one step after the last that a process has asked about, which is 2.
        if step == 3 and rank == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        # The preemption service looks for the signal once a second, or a busy host may.
        time.sleep(0.1 if step < 25 else 10)

    config = test_preemption.config(directory)
    result, losses = test_preemption.run(config, jax.devices(), hooks=[preempt])
    print(json.dumps({"stopped": result.interrupted, "losses": losses}))


if __name__ == "__main__":
    main(*sys.argv[1:])
