"""Pipeline schedules: 1F1B, interleaved 1F1B and GPipe, made and checked without jax.

A schedule is a table of integers, `jaxscale.sharding.schedule_table.PipelineSchedule`,
which says what happens in a tick. Legend: p stages, v chunks, m microbatches.

References:
    GPipe, arXiv 1811.06965. 1F1B and interleaving, arXiv 2104.04473. MegaScale, arXiv
    2402.15627.
"""

import heapq
from types import SimpleNamespace
from typing import Literal

import numpy as np

from jaxscale.checks import check_choice, check_integers
from jaxscale.sharding.schedule_table import COLUMNS, PipelineSchedule


type Kind = Literal["1f1b", "gpipe", "forward"]

_MOST_CELLS = 2**20  # a table of a million cells is simulated in some seconds


def bubble_fraction(stages: int, microbatches: int, chunks: int = 1) -> float:
    r"""The theoretical bubble: the fraction of time in which a stage is idle.

    .. math:: \frac{p - 1}{v m + p - 1}

    It is the same for GPipe and 1F1B, which differ in memory.

    Args:
        stages: Stages of the pipeline, p.
        microbatches: Microbatches per batch, m.
        chunks: Model chunks per stage (virtual stages), v.

    Example:
        >>> bubble_fraction(4, 8), bubble_fraction(4, 8, chunks=4)
        (0.2727..., 0.0857...)
    """
    return (stages - 1) / (chunks * microbatches + stages - 1)


def stash_size(stages: int, microbatches: int, chunks: int = 1) -> int:
    """Slots for chunk inputs that a stage needs under 1F1B, interleaved or not.

    If all microbatches are kept, there is one slot more, since idle stages write too.

    Example:
        >>> stash_size(4, 100), stash_size(4, 100, chunks=2)
        (8, 12)
        >>> pipeline_schedule(4, 100, chunks=2).num_slots
        12
    """
    most = 2 * stages if chunks == 1 else (chunks + 1) * stages
    return min(microbatches * chunks + (stages > 1), most)


def pipeline_schedule(
    stages: int, microbatches: int, chunks: int = 1, kind: Kind = "1f1b"
) -> PipelineSchedule:
    """A schedule, verified by simulation.

    The kinds differ in when backward passes begin. Each takes the minimal time, ``(m v
    + p - 1) / v`` forward and backward passes of a stage.

    - ``1f1b``: at once. A stage keeps at most 2 p inputs, or (v + 1) p of the chunks'
      inputs where it has several (interleaved 1F1B), however many microbatches come.
    - ``gpipe``: after all forward passes, so all inputs are kept, and idle stages write
      to one more slot; for comparison.
    - ``forward``: never, for evaluation.

    Args:
        stages: Stages, p.
        microbatches: Microbatches per batch, m; a multiple of `stages` for several
            chunks.
        chunks: Model chunks per stage (virtual stages), v.
        kind: Which schedule.

    Raises:
        ValueError: an argument is out of range, the microbatches do not fit the
            chunks, or the table would be too large.

    Example:
        >>> one, two = pipeline_schedule(4, 16), pipeline_schedule(4, 16, chunks=2)
        >>> one.num_slots, two.num_slots
        (8, 12)
        >>> round(one.bubble, 3), round(two.bubble, 3)
        (0.158, 0.086)
        >>> pipeline_schedule(4, 16, kind="gpipe").num_slots
        17
    """
    check_choice("kind", kind, Kind)
    check_schedule(stages, microbatches, chunks)
    p, m, v = stages, microbatches, chunks
    work = m * v
    if kind == "1f1b":
        # The first loss follows the last forward pass of its microbatch, and its
        # backward pass follows that.
        first = v * p + 1
    elif kind == "gpipe":
        first = work + p
    else:
        first = 0
    ticks = first + work + p - 1 if first else work + p
    shapes = {name: (ticks, p) if wide else ticks for name, wide in COLUMNS.items()}
    table = {name: np.full(shape, -1, np.int32) for name, shape in shapes.items()}
    microbatch, chunk = _order(p, m, v)
    n = np.arange(work)
    for s in range(p):
        table["f_mb"][n + s, s], table["f_chunk"][n + s, s] = microbatch, chunk
        if first:
            at = first + n + p - 1 - s
            table["b_mb"][at, s], table["b_chunk"][at, s] = microbatch, v - 1 - chunk
    ends = chunk == v - 1
    made = n[ends] + p - 1  # ticks of the last stage's last chunk, by microbatch
    loss = first + n[chunk == 0] - 1 if first else made + 1
    table["loss_mb"][loss] = microbatch[ends]
    slots = _slots(made + 1, loss + 1)
    table["out_slot"][made + 1], table["loss_slot"][loss] = slots, slots
    if first:
        _give_slots(table, p)
    return PipelineSchedule(stages=p, microbatches=m, chunks=v, **table)


def check_schedule(stages: int, microbatches: int, chunks: int = 1) -> None:
    """Raise if no schedule has these sizes; the message says what would fit."""
    sizes = SimpleNamespace(stages=stages, microbatches=microbatches, chunks=chunks)
    check_integers(sizes, 1, "stages", "microbatches", "chunks")
    if chunks > 1 and microbatches % stages:
        below = microbatches // stages * stages
        fits = f"{below} or {below + stages}" if below else f"{stages}"
        raise ValueError(
            f"microbatches {microbatches} do not fit chunks {chunks}: with several "
            f"chunks they go around in groups of stages {stages}; use microbatches="
            f"{fits}, or chunks=1"
        )
    cells = (2 * microbatches * chunks + stages * chunks + stages) * stages
    if cells > _MOST_CELLS:
        raise ValueError(
            f"stages {stages}, microbatches {microbatches} and chunks {chunks} make a "
            f"table of up to {cells:,} cells, more than {_MOST_CELLS:,}; use fewer, "
            "larger microbatches"
        )


def place_layers(num_layers: int, stages: int, chunks: int = 1) -> np.ndarray:
    """The layers of each chunk of each stage.

    Chunks are assigned to the stages round-robin. If the layers do not divide evenly,
    the first chunks have one more than the last. All stages run one program, so every
    chunk takes the time of the largest, and empty places pass their input through.

    Args:
        num_layers: Layers of the model.
        stages: Stages of the pipeline.
        chunks: Model chunks per stage (virtual stages).

    Returns:
        [chunks, stages, places] Layer numbers; -1 is an empty place.

    Raises:
        ValueError: there are more chunks than layers.

    Example:
        >>> place_layers(6, 2, chunks=2).tolist()
        [[[0, 1], [2, 3]], [[4, -1], [5, -1]]]
    """
    sizes = SimpleNamespace(num_layers=num_layers, stages=stages, chunks=chunks)
    check_integers(sizes, 1, "num_layers", "stages", "chunks")
    parts = stages * chunks
    if parts > num_layers:
        fit = num_layers // stages
        use = f"at most chunks={fit}" if fit else f"at most stages={num_layers}"
        raise ValueError(
            f"num_layers {num_layers} are fewer than stages {stages} x chunks {chunks} "
            f"= {parts}, and each chunk needs a layer; use {use}"
        )
    counts = np.full(parts, num_layers // parts) + (
        np.arange(parts) < num_layers % parts
    )
    first = np.cumsum(counts) - counts
    place = np.arange(counts.max())
    layers = np.where(place < counts[:, None], first[:, None] + place, -1)
    return layers.reshape(chunks, stages, -1)  # [parts, places]


def _order(p: int, m: int, v: int) -> tuple[np.ndarray, np.ndarray]:
    """The microbatch and the chunk of each forward pass of a stage, in order."""
    if v == 1:
        return np.arange(m), np.zeros(m, np.int64)
    group, within = np.divmod(np.arange(m * v), p * v)
    chunk, i = np.divmod(within, p)
    return group * p + i, chunk


def _slots(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Assign slots to items that are kept from `begin` to before `end`.

    Each item takes the lowest slot that is free at its tick.
    """
    slots = np.empty(len(begin), np.int32)
    free: list[int] = []
    kept: list[tuple[int, int]] = []
    used = 0
    for i in np.argsort(begin, kind="stable"):
        while kept and kept[0][0] <= begin[i]:
            heapq.heappush(free, heapq.heappop(kept)[1])
        if not free:
            free.append(used)
            used += 1
        slots[i] = heapq.heappop(free)
        heapq.heappush(kept, (int(end[i]), int(slots[i])))
    return slots


def _give_slots(table: dict[str, np.ndarray], p: int) -> None:
    """Assign slots to the inputs, each from its forward to its backward pass.

    The backward pass of a tick runs first and leaves its slot to the forward pass.
    """
    for s in range(p):
        ticks = []
        for kind in ("f", "b"):
            at = np.flatnonzero(table[f"{kind}_mb"][:, s] >= 0)
            key = table[f"{kind}_mb"][at, s], table[f"{kind}_chunk"][at, s]
            ticks.append(at[np.lexsort(key)])
        begin, end = ticks
        slots = _slots(begin, end)
        table["f_slot"][begin, s], table["b_slot"][end, s] = slots, slots
