"""The positions of a run's processes in its mesh, as they report them.

Each process reports a ``layout`` event when it begins, with only its own positions, so
that the events of thousands of processes stay short.
"""

import dataclasses
import itertools
import math
import socket
from collections.abc import Mapping
from typing import Any

from jaxscale.observability.run import Run
from jaxscale.supervision import phases


_MOST_PLACES = 2**20  # of a drawn mesh; a damaged file may have any number


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshLayout:
    """The mesh of a run: the position of each rank, and its pipeline.

    Example:
        >>> layout = MeshLayout(axes={"pipe": 2, "tensor": 2}, ranks=(0, 0, 1, 1))
        >>> layout.coordinates(2), layout.places(1)
        ((1, 0), [2, 3])
    """

    axes: Mapping[str, int]
    """Sizes of the axes by name, in the order of the mesh."""
    ranks: tuple[int, ...]
    """The rank of each position, the last axis fastest."""
    hosts: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The host of each rank that reported it."""
    microbatches: int = 1
    """Microbatches of a pipeline."""
    chunks: int = 1
    """Model chunks per stage."""

    @property
    def stages(self) -> int:
        """Pipeline stages; 1 if there is no pipeline."""
        return self.axes.get("pipe", 1)

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return len(set(self.ranks))

    def coordinates(self, place: int) -> tuple[int, ...]:
        """The coordinates of a position, along each axis."""
        found = []
        for size in reversed(list(self.axes.values())):
            place, at = divmod(place, size)
            found.append(at)
        return tuple(reversed(found))

    def places(self, rank: int) -> list[int]:
        """The positions of a rank."""
        return [i for i, r in enumerate(self.ranks) if r == rank]

    def lines(self, place: int) -> dict[str, list[int]]:
        """The positions that differ from `place` along one axis only, by that axis."""
        found, stride = {}, math.prod(self.axes.values())
        for (axis, size), at in zip(
            self.axes.items(), self.coordinates(place), strict=True
        ):
            stride //= size
            first = place - at * stride
            found[axis] = [first + i * stride for i in range(size) if i != at]
        return found

    def name(self, rank: int) -> str:
        """A rank with its coordinates, along axes larger than one, and its host."""
        about = []
        places = [self.coordinates(place) for place in self.places(rank)]
        for n, (axis, size) in enumerate(self.axes.items()):
            at = sorted({place[n] for place in places})
            if size > 1 and at:
                last = f"-{at[-1]}" if len(at) > 1 else ""
                about.append(f"{axis} {at[0]}{last}")
        if rank in self.hosts:
            about.append(f"on {self.hosts[rank]}")
        return f"rank {rank}" + (f" ({', '.join(about)})" if about else "")


def layout_args(mesh: Any, rank: int, config: Any) -> dict[str, Any]:
    """The arguments of a process's ``layout`` event."""
    devices = enumerate(mesh.devices.flat)
    return {
        "axes": dict(mesh.shape),
        "places": [i for i, device in devices if device.process_index == rank],
        "host": socket.gethostname(),
        "microbatches": config.microbatches,
        "chunks": config.chunks,
    }


def find_layout(run: Run) -> MeshLayout:
    """The layout that the ranks have reported last.

    Unclaimed positions belong to ranks that have reported nothing, in their order.
    Without any such event the ranks form a mesh of one axis.
    """
    told = {
        rank.number: event.args
        for rank in run.ranks
        for event in rank.events
        if event.name == phases.LAYOUT and _is_sound(event.args)
    }
    if not told:
        ranks = [rank.number for rank in run.ranks]
        return MeshLayout(axes={"rank": len(ranks)}, ranks=tuple(ranks))
    newest = told[min(told)]
    axes, total = newest["axes"], math.prod(newest["axes"].values())
    owners: list[int | None] = [None] * total
    for rank, args in told.items():
        if args["axes"] == axes:
            for place in args["places"]:
                if 0 <= place < total:
                    owners[place] = rank
    each = max(len(newest["places"]), 1)
    others = (n for n in itertools.count() if n not in told)
    silent = itertools.chain.from_iterable(itertools.repeat(n, each) for n in others)
    return MeshLayout(
        axes=axes,
        ranks=tuple(next(silent) if owner is None else owner for owner in owners),
        hosts={rank: str(args.get("host", "")) for rank, args in told.items()},
        microbatches=_count(newest.get("microbatches")),
        chunks=_count(newest.get("chunks")),
    )


def _is_sound(args: Mapping[str, Any]) -> bool:
    axes, places = args.get("axes"), args.get("places")
    return (
        isinstance(axes, dict)
        and bool(axes)
        and all(type(size) is int and size > 0 for size in axes.values())
        and math.prod(axes.values()) <= _MOST_PLACES
        and isinstance(places, list)
        and all(type(place) is int for place in places)
    )


def _count(value: Any) -> int:
    return value if type(value) is int and value > 0 else 1
