"""The collectives of a compiled program, parsed from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective, and the computation that overlaps with it."""

    operation: str
    """``"all-gather"``, ``"collective-permute"``."""
    axes: frozenset[str]
    """Mesh axes that it runs over, if the program has a mesh."""
    size: int
    """Bytes of the result."""
    group: int
    """Devices per group."""
    trips: tuple[int | None, ...]
    """Trip counts of its enclosing loops, outermost first; None is unknown."""
    loop: str
    """Its computation: the body of the innermost loop."""
    behind: tuple[str, ...] | None
    """Matmuls and kernels between its start and its end, counted once within a loop;
    None if it is synchronous."""
    ahead: bool
    """Whether only the next iteration of the loop uses the result."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Transfer":
        """Parse the result of `to_json`."""
        behind = values["behind"]
        given = {
            "axes": frozenset(values["axes"]),
            "behind": None if behind is None else tuple(behind),
            "trips": tuple(values["trips"]),
        }
        return cls(**values | given)

    def to_json(self) -> dict[str, Any]:
        """The fields, as JSON."""
        return dataclasses.asdict(self) | {"axes": sorted(self.axes)}

    @property
    def loops(self) -> int:
        """Number of enclosing loops."""
        return len(self.trips)

    @property
    def times(self) -> int:
        """How often it runs in the program; loops of unknown length count once."""
        return math.prod(n or 1 for n in self.trips)

    @property
    def sent(self) -> float:
        """Bytes that a device sends each time, along a ring."""
        others = self.group - 1
        return self.size * {
            "all-gather": others / self.group,
            "all-reduce": 2 * others / self.group,
            "all-to-all": others / self.group,
            "reduce-scatter": others,
            "collective-permute": 1,
        }.get(self.operation, 1)

    @property
    def hidden(self) -> bool:
        """Whether a matmul or a kernel overlaps with it."""
        return bool(self.behind)


def transfers(hlo: str, mesh: Mapping[str, int] | None = None) -> list[Transfer]:
    """The collectives of a scheduled program, in program order.

    Overlap shows in the order of instructions: a collective is started, others run,
    then the program waits for it. Durations do not show.

    Args:
        hlo: The text of the program.
        mesh: Sizes of its mesh axes; None takes the first that the program names.
    """
    computations = parse_hlo(hlo)
    if mesh is None:
        written = re.search(r"replica_groups=mesh\[(.*?)\]", hlo)
        mesh = _axes(written[1]) if written else {}
    found: list[Transfer] = []

    def products(at: Instruction) -> list[str]:
        """The matmuls and kernels that an instruction runs."""
        if at.operation == "custom-call":
            target = re.search(r'custom_call_target="([^"]*)"', at.line)
            assert target is not None, at.line
            kernel = re.search(r'op_name="[^"]*?(\w+)/\w+"', at.line)
            if target[1] == "mosaic_gpu_v2" and kernel:
                return [kernel[1]]
            return ["product"] if "cublas" in target[1] else []
        if at.operation == "dot":
            return ["product"]
        if at.operation in _COLLECTIVES:  # which call what they reduce with
            return []
        return [
            name
            for called in called_by(at)
            for inner in computations[called].values()
            for name in products(inner)
        ]

    def walk(computation: str, trips: tuple[int | None, ...]) -> None:
        order = list(computations[computation].values())
        for i, at in enumerate(order):
            operation = at.operation.removesuffix("-start")
            if operation in _COLLECTIVES:
                end = next(
                    (
                        j
                        for j, other in enumerate(order)
                        if other.operation == f"{operation}-done"
                        and at.name in other.operands
                    ),
                    i,
                )
                meanwhile = [p for x in order[i + 1 : end] for p in products(x)]
                axes, group = _group(at.line, mesh)
                found.append(
                    Transfer(
                        operation=operation,
                        axes=axes,
                        size=sum(map(size_of, at.shapes)),
                        group=group,
                        trips=trips,
                        loop=computation,
                        behind=None if end == i else tuple(meanwhile),
                        ahead=bool(trips) and _only_carried(order, order[end].name),
                    )
                )
            elif at.operation in ("while", "call", "conditional"):
                inside = trips
                if at.operation == "while":
                    count = re.search(r'known_trip_count":\{"n":"(\d+)"', at.line)
                    inside = (*trips, int(count[1]) if count else None)
                for called in called_by(at):
                    walk(called, inside)

    walk("ENTRY", ())
    return found


_COLLECTIVES = {
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    "collective-permute",
}


def _group(line: str, mesh: Mapping[str, int]) -> tuple[frozenset[str], int]:
    """The mesh axes of a collective, and the number of devices per group."""
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
        groups = _lists(pairs[1])
        axes = _varying(groups, mesh)
        return axes, math.prod(mesh[x] for x in axes)
    if named := re.search(r"replica_groups=mesh\[(.*?)\] ?\{(.*?)\}", line):
        groups = _of_mesh(named[1], named[2])
    elif iota := re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    ):
        shape, dims = ([*map(int, iota[i].split(","))] for i in (1, 2))
        order = [*map(int, iota[3].split(","))] if iota[3] else None
        ids = np.arange(math.prod(shape)).reshape(dims)
        groups = ids.transpose(order).reshape(shape)
    elif listed := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        groups = _lists(listed[1])
    else:  # all devices
        groups = np.arange(math.prod(mesh.values()))[None]
    return _varying(groups, mesh), groups.shape[1]


def _of_mesh(written: str, over: str) -> np.ndarray:
    """The groups over axes of ``'x'=4,'y'=2``: ``'x'``, or its part ``'x':(2)2``."""
    sizes, chosen = [], []
    parts = {n: (a, b) for n, a, b in re.findall(r"'(\w+)'(?::\((\d+)\)(\d+))?", over)}
    for name, size in _axes(written).items():
        before, part = (int(x) if x else 0 for x in parts.get(name, ("", "")))
        if part:  # [before, part, after]
            chosen.append(len(sizes) + 1)
            sizes += [before, part, size // (before * part)]
        else:
            chosen += [len(sizes)] * (name in parts)
            sizes.append(size)
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    last = tuple(range(-len(chosen), 0))
    count = math.prod(sizes[i] for i in chosen)
    return np.moveaxis(ids, chosen, last).reshape(-1, count)


def _axes(written: str) -> dict[str, int]:
    return {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", written)}


def _lists(text: str) -> np.ndarray:
    """``{0,1},{2,3}`` as numbers."""
    return np.array([[*map(int, x.split(","))] for x in re.findall(r"[\d,]*\d", text)])


def _varying(groups: np.ndarray, mesh: Mapping[str, int]) -> frozenset[str]:
    """The axes along which the devices of a group differ."""
    if not mesh:
        return frozenset()
    places = np.unravel_index(groups, tuple(mesh.values()))
    differ = (bool((at != at[:, :1]).any()) for at in places)
    return frozenset(name for name, yes in zip(mesh, differ, strict=True) if yes)


def _only_carried(order: list["Instruction"], name: str) -> bool:
    """Whether a result is used only by the root of its computation."""
    moves = {"bitcast", "copy", "get-tuple-element", "tuple"}
    users = [x for x in order if name in x.operands]
    return bool(users) and all(
        x.operation in moves and (x is order[-1] or _only_carried(order, x.name))
        for x in users
    )


def called_by(at: "Instruction") -> list[str]:
    """The computations that an instruction runs, except the condition of a loop."""
    if at.operation == "conditional":
        branches = re.search(r"(?:branch|true)_computations?=(.*)", at.line)
        assert branches is not None, at.line
        return re.findall(r"%([\w.-]+)", branches[1].split("metadata")[0])
    return re.findall(r"(?:body|calls|to_apply)=%([\w.-]+)", at.line)


@dataclasses.dataclass(frozen=True)
class Instruction:
    """A line of a computation."""

    name: str
    shapes: tuple[str, ...]
    """Bytes of each array of the result."""
    operation: str
    operands: tuple[str, ...]
    line: str


def parse_hlo(hlo: str) -> dict[str, dict[str, Instruction]]:
    """The instructions of each computation by name; the last one is the root."""
    found: dict[str, dict[str, Instruction]] = {}
    current: dict[str, Instruction] = {}
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            name = line.split()[0].removeprefix("%")
            current = found.setdefault(name, {})
        elif match := re.match(r"  (?:ROOT )?%(\S+) = (.*)", line):
            name, rest = match.groups()
            end = _end_of_shape(rest)
            operation, _, rest_of_line = rest[end + 1 :].partition("(")
            shapes = re.findall(r"\w+\[[\d,]*\]", rest[:end])
            if operation.endswith("-start") and operation != "async-start":
                # Operands come first, but of a copy.
                count = len(shapes) // 2
                shapes = shapes[:1] if operation == "copy-start" else shapes[count:]
            operands = re.findall(r"%([\w.-]+)", rest_of_line.split(")")[0])
            current[name] = Instruction(
                name, tuple(shapes), operation, tuple(operands), line
            )
    return found


def _end_of_shape(text: str) -> int:
    """The end of a result's type, at a space outside of parentheses."""
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == " " and not depth:
            return i
    raise ValueError(text)


def size_of(shape: str) -> int:
    """The bytes of an array: of ``"bf16[8,128]"``."""
    kind, dims = shape.rstrip("]").split("[")
    bits = 8 if kind == "pred" else int((re.findall(r"\d+", kind) or ["0"])[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8
