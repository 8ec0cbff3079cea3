"""What a step of the engine costs the host.

``python -m benchmarks.workloads.serving_host`` prints it.

The engine runs with a device that takes no time: rows go on to their limits. All slots
are taken, thousands of requests wait, those that end are replaced, and every token goes
to its client with its log-probability. A step is everything between two dispatches:
commands, plan, changes of rows, results, outputs. Times are CPU times, so that
those that others take from it do not count.
"""

import collections
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.inference import Engine, Request, SamplingParams
from jaxscale.inference.engine.program_table import ProgramTable
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.batch_rows import Column, OutFlag, RowFlag
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import Chunk


class IdleDevice(Runner):
    """A runner without programs; counts the seconds that it takes itself."""

    def __init__(self, config: SchedulerConfig) -> None:
        """No row is live.

        Args:
            config: The sizes.
        """
        self.config, self.seconds, self.timeline = config, 0.0, None
        self.table = ProgramTable([config.num_slots], [(1, 1)], adapted=False)
        self.rows = np.zeros((config.num_slots, Column.TABLE), np.int32)

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Nothing lies in pages."""

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """Nobody drafts."""

    def update(
        self,
        source: Sequence[int] | None,
        changes: Sequence[tuple[int, int, int]],
    ) -> None:
        """Move rows, then change cells of them."""
        start = time.thread_time()
        if source is not None:
            self.rows = self.rows[np.asarray(source)]
        for row, column, value in changes:
            if column < Column.TABLE:
                self.rows[row, column] = value
        self.seconds += time.thread_time() - start

    def prefill(self, chunks: Sequence[Chunk], targets: Any) -> tuple[jax.Array, None]:
        """Set the rows live whose prompts end."""
        start = time.thread_time()
        out = np.zeros((1, len(chunks), 1, 3), np.int32)
        for chunk in chunks:
            if chunk.slot is not None:
                self.rows[chunk.slot, Column.FLAGS] = RowFlag.LIVE
        drawn = jnp.asarray(out)
        self.seconds += time.thread_time() - start
        return drawn, None

    def decode(
        self, *, bucket: int, steps: int, drafts: int, adapted: bool
    ) -> jax.Array:
        """Every live row gets a token."""
        del drafts, adapted
        start = time.thread_time()
        out = np.full((steps, bucket, 1, 3), -1, np.int32)
        rows = self.rows[:bucket]
        for step in range(steps):
            live = rows[:, Column.FLAGS] > 0
            rows[live, Column.LENGTH] += 1
            ended = live & (rows[:, Column.LENGTH] + 1 >= rows[:, Column.LIMIT])
            out[step, live, 0, 0] = 0
            out[step, :, 0, 1] = ended * OutFlag.ENDED
            rows[ended, Column.FLAGS] = 0
        drawn = jnp.asarray(out)
        self.seconds += time.thread_time() - start
        return drawn


def host_seconds(*, slots: int, waiting: int, steps: int, seed: int = 0) -> list[float]:
    """Seconds of the host, of each of some steps.

    Args:
        slots: S, all of them taken.
        waiting: Requests that wait in each step.
        steps: Number of steps.
        seed: Of the lengths.
    """
    config = SchedulerConfig(
        num_pages=slots * 64,
        vocab_size=32_000,
        max_len=4096,
        num_slots=slots,
        max_waiting=waiting + slots,
        max_waiting_tokens=2**31,
    )
    device = IdleDevice(config)
    engine = Engine(device, Scheduler(config, seed=seed))
    # What clients have heard is not kept: a growing heap is no cost of the engine.
    rng, heard = random.Random(seed), collections.deque(maxlen=slots)

    def fill() -> None:
        for _ in range(waiting - engine.scheduler.num_waiting):
            params = SamplingParams(
                temperature=0.0, max_tokens=rng.randint(20, 400), logprobs=0
            )
            prompt = [rng.randrange(config.vocab_size)] * rng.randint(50, 800)
            request = Request(prompt=prompt, params=params, client=rng.choice("abcd"))
            engine.admit(request, heard.append)  # at the next step

    fill()
    while engine.scheduler.num_running < slots or len(heard) < slots:
        engine.step()
        fill()
    found = []
    for _ in range(steps):
        fill()
        before, start = device.seconds, time.thread_time()
        engine.step()
        found.append(time.thread_time() - start - (device.seconds - before))
    assert engine.scheduler.num_running > 0.9 * slots
    return found


def main() -> bool:
    """Print what a step costs; True where it is less than it may be."""
    medians = []
    for slots in (128, 256):
        found = host_seconds(slots=slots, waiting=2000, steps=1000)
        medians.append(statistics.median(found))
        least, most = (sorted(found)[i * len(found) // 100] for i in (10, 90))
        print(
            f"{slots} slots, 2,000 waiting: {1e3 * medians[-1]:.2f} ms of the host a "
            f"step, {1e3 * least:.2f} to {1e3 * most:.2f} ms in the middle 80% (less "
            "than 1)"
        )
    return max(medians) < 1e-3


if __name__ == "__main__":
    sys.exit(not main())
