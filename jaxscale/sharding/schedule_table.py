"""A pipeline schedule as a table of integers, verified by simulation.

A pipeline splits the layers into `chunks` parts per stage: chunk c of stage s is part
``c * stages + s`` of the model, so an activation visits all stages once per chunk. The
batch is split into microbatches. In a *tick* every stage runs at most one backward pass
and then one forward pass of a chunk; the table says which. All stages advance tick by
tick together, so the pipeline is one loop over the rows of the table, inside one
program.

A tick, in this order:

1. The activations of the last tick's forward passes are sent to the next stage, which
  uses them in this tick, while backward passes run.
2. The gradients of these backward passes are sent to the previous stage, which uses
  them in the next tick, while loss and forward passes run.
3. The output that the last stage made in the last tick is kept in a slot; the loss of
   one kept output is computed, by all stages together.
4. Forward passes run; each keeps its input in a slot until its backward pass.

Legend: p stages, v chunks, m microbatches.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Literal

import numpy as np

from jaxscale.checks import check_integers


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class PipelineSchedule:
    """What each stage does in each tick; -1 is nothing.

    `pipeline_schedule` makes the usual ones. A custom table is verified in the same way
    when it is constructed.

    Example:
        >>> from jaxscale.sharding import pipeline_schedule
        >>> schedule = pipeline_schedule(2, 3)
        >>> schedule.f_mb[:, 0].tolist()  # forward passes of the first stage
        [0, 1, 2, -1, -1, -1, -1]
        >>> schedule.b_mb[:, 0].tolist()
        [-1, -1, -1, -1, 0, 1, 2]
        >>> schedule.loss_mb.tolist()
        [-1, -1, 0, 1, 2, -1, -1]
    """

    stages: int
    """Stages, p."""
    microbatches: int
    """Microbatches per batch, m."""
    chunks: int
    """Model chunks per stage (virtual stages), v."""
    f_mb: np.ndarray
    """[ticks, stages] The microbatch whose forward pass runs."""
    f_chunk: np.ndarray
    """[ticks, stages] The chunk that it runs through."""
    f_slot: np.ndarray
    """[ticks, stages] Where its input is kept; -1 where no backward pass follows."""
    b_mb: np.ndarray
    """[ticks, stages] The microbatch whose backward pass runs."""
    b_chunk: np.ndarray
    """[ticks, stages] The chunk that it runs through."""
    b_slot: np.ndarray
    """[ticks, stages] Where the input of its forward pass was kept."""
    loss_mb: np.ndarray
    """[ticks] The microbatch whose loss all stages compute."""
    loss_slot: np.ndarray
    """[ticks] Where its output was kept."""
    out_slot: np.ndarray
    """[ticks] Where the last stage keeps the output that it made in the last tick."""
    peak_stash: tuple[int, ...] = dataclasses.field(init=False)
    """The most inputs that each stage keeps at one time."""

    def __post_init__(self) -> None:
        check_integers(self, 1, "stages", "microbatches", "chunks")
        shape = np.shape(self.f_mb)
        if len(shape) != 2 or shape[1] != self.stages:
            raise ValueError(
                f"f_mb has the shape {shape}, expected [ticks, {self.stages}]: a "
                "column for each stage"
            )
        for name, per_stage in COLUMNS.items():
            array = np.array(getattr(self, name))
            expected = shape if per_stage else shape[:1]
            if array.shape != expected or array.dtype.kind != "i":
                raise ValueError(
                    f"{name} has the shape {array.shape} and the type {array.dtype}, "
                    f"expected integers of the shape {expected}"
                )
            array = array.astype(np.int32)
            array.flags.writeable = False
            object.__setattr__(self, name, array)
        object.__setattr__(self, "peak_stash", _play(self))

    @property
    def num_ticks(self) -> int:
        """Number of rows of the table."""
        return len(self.loss_mb)

    @functools.cached_property
    def f_put(self) -> np.ndarray:
        """[ticks, stages] `f_slot`; for idle stages, a slot that is free then.

        With it a stage writes in every tick, without a condition.
        """
        put = self.f_slot.copy()
        for s in range(self.stages):
            held: set[int] = set()
            for t in range(self.num_ticks):
                held.discard(int(self.b_slot[t, s]))
                if put[t, s] < 0:
                    put[t, s] = next(i for i in itertools.count() if i not in held)
                else:
                    held.add(int(put[t, s]))
        return put

    @property
    def num_slots(self) -> int:
        """Number of slots for chunk inputs per stage, including those of `f_put`."""
        kept = (self.f_slot >= 0).any()
        ticks = (self.f_mb >= 0).any(1) & kept
        return int(self.f_put[ticks].max(initial=-1)) + 1

    @property
    def num_out_slots(self) -> int:
        """Number of slots for outputs of the last stage that wait for their loss."""
        return int(self.out_slot.max(initial=-1)) + 1

    @property
    def op_ticks(self) -> tuple[int, int]:
        """Ticks with a forward pass and ticks with a backward pass, on any stage.

        In lock step, the total time is the first times a chunk's forward pass plus the
        second times its backward pass.
        """
        forward, backward = (self.f_mb >= 0).any(1), (self.b_mb >= 0).any(1)
        return int(forward.sum()), int(backward.sum())

    @property
    def bubble(self) -> float:
        """The bubble of this table: the fraction of time in which a stage is idle."""
        ticks, work = self.op_ticks, self.microbatches * self.chunks
        # A backward pass costs two forward passes; where the two numbers are equal, as
        # in all tables made here, the weights do not matter.
        weights = (1, 2) if ticks[1] else (1, 0)
        time = sum(w * n for w, n in zip(weights, ticks, strict=True))
        return 1 - sum(weights) * work / time

    def phases(self) -> "Iterator[Phase]":
        """Ranges of ticks with the same operations, each for one loop."""
        flags = np.stack([(self.f_mb >= 0).any(1), (self.b_mb >= 0).any(1)], 1)
        changes = np.flatnonzero((flags[1:] != flags[:-1]).any(1)) + 1
        bounds = [0, *changes.tolist(), self.num_ticks]
        for start, stop in itertools.pairwise(bounds):
            on = self.loss_mb[start:stop] >= 0
            yield Phase(
                start=start,
                stop=stop,
                forward=bool(flags[start, 0]),
                backward=bool(flags[start, 1]),
                loss="all" if on.all() else "some" if on.any() else "none",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """Ticks of a schedule that run the same operations on some stage."""

    start: int
    """The first tick."""
    stop: int
    """The tick after the last."""
    forward: bool
    """Whether forward passes run."""
    backward: bool
    """Whether backward passes run."""
    loss: Literal["all", "some", "none"]
    """In which of the ticks a loss is computed; the same on all stages."""


COLUMNS: Mapping[str, bool] = {
    **dict.fromkeys(("f_mb", "f_chunk", "f_slot", "b_mb", "b_chunk", "b_slot"), True),
    **dict.fromkeys(("loss_mb", "loss_slot", "out_slot"), False),
}
"""The columns; True has an entry for each stage."""


def _play(table: PipelineSchedule) -> tuple[int, ...]:
    """Simulate the table, and raise if an input is missing when it is needed.

    Returns:
        The most inputs that each stage keeps at one time.
    """
    player = _Player(table)
    for tick in range(table.num_ticks):
        player.tick(tick)
    player.finish()
    return tuple(player.peak)


class _Player:
    """A simulation of the stages, which pass on names instead of arrays."""

    def __init__(self, table: PipelineSchedule) -> None:
        self.table = table
        # A name is (microbatch, chunk). What each stage made in the last tick:
        self.activations: dict[int, tuple[int, int]] = {}
        self.gradients: dict[int, tuple[int, int]] = {}
        self.loss_gradient = -1
        self.stash: list[dict[int, tuple[int, int]]] = [{} for _ in range(table.stages)]
        self.outputs: dict[int, int] = {}
        self.peak = [0] * table.stages
        self.forward: set[tuple[int, int, int]] = set()
        self.backward: set[tuple[int, int, int]] = set()
        self.losses: list[int] = []
        names = [name for name, per_stage in COLUMNS.items() if per_stage]
        self.rows = {name: getattr(table, name).tolist() for name in names}

    def tick(self, t: int) -> None:
        gradients = self._backward(t)
        self._loss(t)
        activations = self._forward(t)
        self.gradients, self.activations = gradients, activations

    def _backward(self, t: int) -> dict[int, tuple[int, int]]:
        made, last = {}, self.table.stages - 1
        for s in range(self.table.stages):
            name = self._name("b", t, s)
            if name is None:
                continue
            mb, chunk = name
            slot = self.rows["b_slot"][t][s]
            if self.stash[s].pop(slot, None) != name:
                self._fail(t, s, "backward", name, f"slot {slot} does not hold it")
            if (s, chunk) == (last, self.table.chunks - 1):
                if self.loss_gradient != mb:
                    self._fail(t, s, "backward", name, "its loss is not just computed")
            elif self.gradients.get((s + 1) % (last + 1)) != (mb, chunk + (s == last)):
                self._fail(t, s, "backward", name, "its gradient does not arrive")
            self._once(self.backward, t, s, "backward", name)
            made[s] = name
        return made

    def _loss(self, t: int) -> None:
        table, last = self.table, self.table.stages - 1
        out, slot, mb = (
            int(array[t]) for array in (table.out_slot, table.loss_slot, table.loss_mb)
        )
        made, chunk = self.activations.get(last, (-1, -1))
        if chunk == table.chunks - 1:
            if out < 0 or out in self.outputs:
                self._fail(t, last, "output", (made, chunk), f"slot {out} is not free")
            self.outputs[out] = made
        elif out >= 0:
            self._fail(t, last, "output", None, "the last stage made none")
        if mb >= 0 and self.outputs.pop(slot, -1) != mb:
            self._fail(t, last, "loss", (mb, chunk), f"slot {slot} does not hold it")
        if mb >= 0:
            self.losses.append(mb)
        self.loss_gradient = mb

    def _forward(self, t: int) -> dict[int, tuple[int, int]]:
        made, p = {}, self.table.stages
        for s in range(p):
            name = self._name("f", t, s)
            if name is None:
                continue
            mb, chunk = name
            entry = (s, chunk) == (0, 0)
            sent = self.activations.get((s - 1) % p)
            if not entry and sent != (mb, chunk - (s == 0)):
                self._fail(t, s, "forward", name, "its input does not arrive")
            slot = self.rows["f_slot"][t][s]
            if slot in self.stash[s]:
                self._fail(t, s, "forward", name, f"slot {slot} is taken")
            if slot >= 0:
                self.stash[s][slot] = name
                self.peak[s] = max(self.peak[s], len(self.stash[s]))
            self._once(self.forward, t, s, "forward", name)
            made[s] = name
        return made

    def finish(self) -> None:
        table = self.table
        everything = table.microbatches * table.chunks * table.stages
        for what, done in (("forward", self.forward), ("backward", self.backward)):
            optional = what == "backward" and not done
            if len(done) != everything and not optional:
                raise ValueError(
                    f"the schedule runs {len(done)} {what} passes, expected "
                    f"{everything}: one for each microbatch, chunk and stage"
                )
        if sorted(self.losses) != list(range(table.microbatches)):
            raise ValueError(
                f"the schedule computes the losses of {sorted(self.losses)}, expected "
                f"each of {table.microbatches} microbatches once"
            )
        if any(self.stash):
            raise ValueError(
                f"the schedule keeps inputs to the end: {self.stash}, expected that a "
                "backward pass uses each"
            )

    def _name(self, kind: str, t: int, s: int) -> tuple[int, int] | None:
        mb, chunk = self.rows[f"{kind}_mb"][t][s], self.rows[f"{kind}_chunk"][t][s]
        return (mb, chunk) if mb >= 0 else None

    def _once(
        self,
        done: set[tuple[int, int, int]],
        t: int,
        s: int,
        what: str,
        name: tuple[int, int],
    ) -> None:
        mb, chunk = name
        known = mb < self.table.microbatches and 0 <= chunk < self.table.chunks
        if not known or (mb, chunk, s) in done:
            problem = "it has run before" if known else "there is no such pass"
            self._fail(t, s, what, name, problem)
        done.add((mb, chunk, s))

    def _fail(
        self, t: int, s: int, what: str, name: tuple[int, int] | None, problem: str
    ) -> None:
        of = "" if name is None else f" of microbatch {name[0]}, chunk {name[1]}"
        raise ValueError(f"tick {t}, stage {s}: the {what}{of} cannot run: {problem}")
