"""The mesh as a 3-D picture: how far each rank is, and who waits for whom.

A job hangs when one rank does not reach a collective: the others reach it and wait, at
the same point of their programs. The one that has not reported it is the culprit, as in
MegaScale (arXiv 2402.15627, section 5.3). A rank waits directly for those that differ
along one mesh axis, and for others through these.
"""

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxscale.observability.layout import MeshLayout
from jaxscale.observability.run import Rank, Run
from jaxscale.supervision import phases


_LEAST_SILENCE = 10.0
_STEPS_SILENCE = 10
_MOST_EDGES = 4000
_NAMED = 8


@dataclasses.dataclass(frozen=True)
class Standing:
    """The last known position of a rank in its program."""

    step: int
    """The step."""
    phase: str
    """Its phase; empty for a rank that reported nothing."""
    time: float
    """When it reported so, in seconds since 1970."""
    error: str = ""
    """The error that ended it."""

    @property
    def place(self) -> tuple[int, int]:
        """Order of progress: a lower value is behind."""
        return self.step, phases.ORDER.get(self.phase, -1)

    @property
    def text(self) -> str:
        """Description in words."""
        if self.error:
            return f"step {self.step}, failed in {self.phase}"
        phase = "finished" if self.phase == phases.BYE else self.phase
        return f"step {self.step}, {phase}" if phase else "nothing heard"


_NOTHING = Standing(-1, "", 0.0)


def standings(
    run: Run, ranks: Collection[int], *, cycle: int, until: float = math.inf
) -> dict[int, Standing]:
    """Where each rank was in a cycle, at a time.

    Args:
        run: From `read_run`.
        ranks: The ranks of the mesh.
        cycle: The start of the job; 0 without a supervisor, when the last one counts.
        until: Seconds since 1970.
    """
    known = {rank.number: rank for rank in run.ranks}
    found, began = dict.fromkeys(ranks, _NOTHING), dict.fromkeys(ranks, 0.0)
    for n in ranks:
        if n in known:
            found[n], began[n] = _standing(known[n], cycle, until)
    newest = max(began.values(), default=0.0)
    for n, stand in found.items():
        # A rank that had ended when the others restarted has not come back.
        if not cycle and stand.time < newest and stand.phase not in phases.STARTING:
            found[n] = _NOTHING
    return found


def _standing(rank: Rank, cycle: int, until: float) -> tuple[Standing, float]:
    """Where a rank was, and when it had begun."""
    stand, begun = _NOTHING, 0.0
    for event in rank.events:
        if event.cycle != cycle or event.t1 > until:
            continue
        order = phases.ORDER.get(event.name, -1)
        if event.name in phases.STARTING and (
            stand.phase not in phases.STARTING or order <= stand.place[1]
        ):
            stand, begun = _NOTHING, event.t1
        if event.name == phases.ERROR:
            text = str(event.args.get("error", "")) or "an error without text"
            stand = dataclasses.replace(stand, error=text, time=event.t1)
        elif order >= 0:
            stand = Standing(event.step, event.name, event.t1, stand.error)
    steps = rank.steps
    times = np.stack([steps.begin, steps.fetched, steps.dispatched], 1)  # [N, 3]
    past = (steps.cycle == cycle)[:, None] & (times <= until) & (times >= begun)
    if past.any():
        row, column = np.argwhere(past)[-1].tolist()
        last = Standing(
            int(steps.step[row]), phases.STEP[column], float(times[row, column])
        )
        if last.time >= stand.time:
            stand = last
        elif stand.error:  # it failed there
            stand = dataclasses.replace(stand, step=last.step, phase=last.phase)
    return stand, begun


def step_seconds(run: Run) -> float:
    """The median of the times between steps that are done; 0 if there are none."""
    took = [np.diff(rank.steps.done[-100:]) for rank in run.ranks]
    known = np.concatenate([*took, np.zeros(0)])
    known = known[np.isfinite(known)]
    return float(np.median(known)) if len(known) else 0.0


def mesh_view(
    stand: Mapping[int, Standing],
    layout: MeshLayout,
    *,
    now: float,
    usual: float = 0.0,
    hangs: bool = False,
    suspects: Collection[int] = (),
) -> dict[str, Any]:
    """The picture as data for the page.

    Args:
        stand: From `standings`.
        layout: The mesh.
        now: The time of the picture, in seconds since 1970.
        usual: Seconds per step: silence of all ranks for ten steps plus ten seconds
            counts as a hang.
        hangs: True if it is known that the job hung or failed.
        suspects: Ranks that the supervisor suspects.

    Returns:
        ``points`` with coordinates, rank and index of its state in ``states``, the most
        behind first; ``silent`` ranks; ``edges`` from a waiting position to the one
        that it waits for, with the axis that joins them; ``text``, a description in
        words.
    """
    quiet = now - max((s.time for s in stand.values()), default=now)
    hangs = hangs or quiet > max(_LEAST_SILENCE, _STEPS_SILENCE * usual)
    silent = _silent(stand, suspects) if hangs else []
    groups: dict[tuple[Any, ...], list[int]] = collections.defaultdict(list)
    for rank, s in stand.items():
        groups[(bool(s.phase), *s.place, bool(s.error), s.text)].append(rank)
    states = sorted(groups)
    of_rank = {rank: i for i, key in enumerate(states) for rank in groups[key]}
    ended = [n for n, s in stand.items() if s.phase in phases.ENDING and not s.error]
    waiting = {*stand} - {*silent} - {*ended} if silent else set()
    return {
        "axes": dict(layout.axes),
        "time": now,
        "states": [key[-1] for key in states],
        "counts": [len(groups[key]) for key in states],
        "points": [
            [*_position(layout, place), rank, of_rank.get(rank, 0)]
            for place, rank in enumerate(layout.ranks)
        ],
        "names": {
            str(rank): f"{layout.name(rank)}: {_said(stand[rank], now)}"
            for rank in stand
        },
        "silent": silent,
        "edges": _edges(layout, silent, waiting),
        "text": _text(stand, layout, silent, waiting, now, quiet if hangs else None),
    }


def duration(seconds: float) -> str:
    """A duration in words.

    Example:
        >>> duration(44.83), duration(200), duration(7260)
        ('44.8 s', '3 min 20 s', '2 h 01 min')
    """
    if seconds < 120:
        return f"{max(seconds, 0):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours > 48:
        return f"{hours // 24:,} days"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def directions(layout: MeshLayout) -> list[list[str]]:
    """The axes along each direction of the picture: replicas, stages, the rest."""
    known = [["data", "fsdp"], ["pipe"], ["context", "tensor"]]
    named = {axis for axes in known for axis in axes}
    known[0] = [a for a in layout.axes if a not in named] + known[0]
    return [[a for a in axes if layout.axes.get(a, 1) > 1] for axes in known]


def _position(layout: MeshLayout, place: int) -> list[int]:
    at = dict(zip(layout.axes, layout.coordinates(place), strict=True))
    found = []
    for axes in directions(layout):
        x = 0
        for axis in axes:
            x = x * layout.axes[axis] + at[axis]
        found.append(x)
    return found


def _silent(stand: Mapping[int, Standing], suspects: Collection[int]) -> list[int]:
    """The ranks that hold up the others: failed, silent, or behind all others."""
    if failed := [n for n, s in stand.items() if s.error]:
        first = min(stand[n].time for n in failed)
        # Within milliseconds of a death the others fail as well.
        behind = [n for n in failed if stand[n].time <= first + 0.05]
    else:
        least = min((s.place for s in stand.values()), default=(0, 0))
        behind = [n for n, s in stand.items() if s.place == least]
        if len(behind) == len(stand):
            behind = []
    return sorted({*suspects} & {*stand} or behind)


def _edges(
    layout: MeshLayout, silent: Collection[int], waiting: Collection[int]
) -> list[list[Any]]:
    """Who waits for whom by the shortest paths, direct waits first.

    An edge has two positions, the axis, and whether its end is a silent rank.
    """
    reached, edges = {*silent}, []
    front = [place for place, rank in enumerate(layout.ranks) if rank in reached]
    while front and len(edges) < _MOST_EDGES:
        following = []
        for place in front:
            for axis, line in layout.lines(place).items():
                for other in line:
                    rank = layout.ranks[other]
                    if rank in waiting and rank not in reached:
                        direct = layout.ranks[place] in silent
                        edges.append([other, place, axis, direct])
                        reached.add(rank)
                        following += layout.places(rank)
        front = following
    return edges[:_MOST_EDGES]


def _said(stand: Standing, now: float) -> str:
    if not stand.phase and not stand.error:
        return "nothing heard"
    error = f": {stand.error}" if stand.error else ""
    return f"{stand.text}, {duration(now - stand.time)} before{error}"


def _text(
    stand: Mapping[int, Standing],
    layout: MeshLayout,
    silent: Sequence[int],
    waiting: Collection[int],
    now: float,
    quiet: float | None,
) -> str:
    if stand and all(s.phase in phases.ENDING and not s.error for s in stand.values()):
        return "All ranks have finished."
    if quiet is None:
        return "The ranks are at work."
    heard = f"Nothing was heard of any rank for {duration(quiet)}. "
    if not silent:
        return heard + "All ranks stand in the same place: nobody stands out."
    named = "; ".join(
        f"{layout.name(n)}: {_said(stand[n], now)}" for n in silent[:_NAMED]
    )
    more = f"; and {len(silent) - _NAMED} more" if len(silent) > _NAMED else ""
    wait = ""
    if waiting:
        far = max(waiting, key=lambda n: (stand[n].place, -n))
        count = len(waiting)
        wait = (
            f" {count} {'rank waits' if count == 1 else 'ranks wait'} for it, the "
            f"farthest in {stand[far].text}."
        )
    return f"{heard}Held up by {named}{more}.{wait}"
