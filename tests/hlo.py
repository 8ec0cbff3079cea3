"""What compiled programs write to memory and send, read from XLA's text of them."""

import dataclasses
import math
import re


@dataclasses.dataclass(frozen=True)
class Written:
    """An array that a program writes to memory."""

    operation: str
    """``"copy"``, ``"custom-call __cublas$gemm"``; of a fusion its last one:
    ``"fusion convert"``."""
    shape: str
    """Type and dimensions: ``"bf16[8,128]"``."""
    size: int
    """In bytes: of an update in place, those of the update."""
    looped: bool
    """Whether this is in the body of a loop."""


def written(hlo: str, at_least_bytes: int) -> list[Written]:
    """The arrays that a scheduled program writes besides its results.

    That is what it costs beyond its arguments and results: weights that are converted,
    gathered, sliced out of a stack or concatenated, a cache that is copied. A result
    counts where a copy makes it. Slices and scatters into an array that is there are
    updates in place: where the array has to survive, XLA copies it first. Room for
    cuBLAS to work in does not count, nor what a kernel gives back in the place of an
    operand.

    Args:
        hlo: `Compiled.hlo`.
        at_least_bytes: What is smaller is left out.

    Returns:
        In the order of the program, which holds the body of a loop once.
    """
    computations = _computations(hlo)
    found: list[Written] = []

    def walk(computation: str, looped: bool) -> None:
        instructions = computations[computation]
        results = set()
        if computation == "ENTRY":
            root = list(instructions)[-1]
            count = len(instructions[root].shapes)
            sources = (_source(instructions, root, i) for i in range(count))
            results = {(at.name, index) for at, index in sources}
        for at in instructions.values():
            if at.operation in ("while", "call", "conditional", "async-start"):
                for name in _called(at):
                    walk(name, looped or at.operation == "while")
                continue
            operation, sizes = _writes(at, instructions, computations)
            for index, (shape, size) in enumerate(sizes):
                is_result = (at.name, index) in results and not _COPY.search(operation)
                if size >= max(at_least_bytes, 1) and not is_result:
                    found.append(Written(operation, shape, size, looped))

    walk("ENTRY", False)
    return found


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective, and what is computed while it is under way."""

    operation: str
    """``"all-gather"``, ``"collective-permute"``."""
    axes: frozenset[str]
    """Mesh axes that it runs over, where the program names them."""
    size: int
    """Bytes of the result."""
    loops: int
    """How many loops it stands in."""
    loop: str
    """The computation that it stands in: the body of the innermost loop."""
    behind: tuple[str, ...] | None
    """Products and kernels between its start and its end, those of a loop as often as
    they stand there; None where the program waits for it."""
    ahead: bool
    """Whether nothing but the next round of the loop uses the result."""

    @property
    def hidden(self) -> bool:
        """Whether a product or a kernel runs meanwhile."""
        return bool(self.behind)


def transfers(hlo: str) -> list[Transfer]:
    """The collectives of a scheduled program, in its order.

    What XLA hides shows in the order of instructions: a collective is started, others
    run, then it is waited for. How long they take does not show.

    Args:
        hlo: `Compiled.hlo`.
    """
    computations = _computations(hlo)
    found: list[Transfer] = []

    def products(at: _Instruction) -> list[str]:
        """The products and kernels that an instruction runs."""
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
            for called in _called(at)
            for inner in computations[called].values()
            for name in products(inner)
        ]

    def walk(computation: str, loops: int) -> None:
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
                group = re.search(r"replica_groups=mesh\[.*?\] ?\{(.*?)\}", at.line)
                names = re.findall(r"'(\w+)'", group[1]) if group else []
                found.append(
                    Transfer(
                        operation=operation,
                        axes=frozenset(names),
                        size=sum(map(_bytes, at.shapes)),
                        loops=loops,
                        loop=computation,
                        behind=None if end == i else tuple(meanwhile),
                        ahead=loops > 0 and _only_carried(order, order[end].name),
                    )
                )
            elif at.operation in ("while", "call", "conditional"):
                for called in _called(at):
                    walk(called, loops + (at.operation == "while"))

    walk("ENTRY", 0)
    return found


_COLLECTIVES = {
    *("all-gather", "all-reduce", "reduce-scatter", "all-to-all"),
    "collective-permute",
}


def _only_carried(order: list["_Instruction"], name: str) -> bool:
    """Whether a result goes on to the root of its computation and nowhere else."""
    moves = {"bitcast", "copy", "get-tuple-element", "tuple"}
    users = [x for x in order if name in x.operands]
    return bool(users) and all(
        x.operation in moves and (x is order[-1] or _only_carried(order, x.name))
        for x in users
    )


def _called(at: "_Instruction") -> list[str]:
    """The computations that an instruction runs, but the condition of a loop."""
    if at.operation == "conditional":
        branches = re.search(r"(?:branch|true)_computations?=(.*)", at.line)
        assert branches is not None, at.line
        return re.findall(r"%([\w.-]+)", branches[1].split("metadata")[0])
    return re.findall(r"(?:body|calls|to_apply)=%([\w.-]+)", at.line)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    shapes: tuple[str, ...]
    """Of each array of the result."""
    operation: str
    operands: tuple[str, ...]
    line: str


_COPY = re.compile(r"\bcopy$")
_NOTHING_WRITTEN = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id"),
    *("replica-id", "after-all", "add-dependency", "opt-barrier", "async-update"),
}


def _computations(hlo: str) -> dict[str, dict[str, _Instruction]]:
    """The instructions of each computation by name; the last one is the root."""
    found: dict[str, dict[str, _Instruction]] = {}
    current: dict[str, _Instruction] = {}
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
            current[name] = _Instruction(
                name, tuple(shapes), operation, tuple(operands), line
            )
    return found


def _end_of_shape(text: str) -> int:
    """Where the type of a result ends, at a space outside of parentheses."""
    depth = 0
    for i, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == " " and not depth:
            return i
    raise ValueError(text)


def _bytes(shape: str) -> int:
    kind, dims = shape.rstrip("]").split("[")
    bits = 8 if kind == "pred" else int((re.findall(r"\d+", kind) or ["0"])[0])
    return math.prod(map(int, filter(None, dims.split(",")))) * bits // 8


def _source(
    instructions: dict[str, _Instruction], name: str, index: int = 0
) -> tuple[_Instruction, int]:
    """What makes an array of a result: an instruction, and which of its arrays."""
    at = instructions[name]
    if at.operation == "bitcast":
        return _source(instructions, at.operands[0], index)
    if at.operation == "tuple":
        for operand in at.operands:  # which may be tuples too
            count = len(instructions[operand].shapes)
            if index < count:
                return _source(instructions, operand, index)
            index -= count
    if at.operation == "get-tuple-element":
        found = re.search(r"index=(\d+)", at.line)
        assert found is not None, at.line
        return _source(instructions, at.operands[0], int(found[1]))
    return at, index


def _writes(
    at: _Instruction,
    around: dict[str, _Instruction],
    computations: dict[str, dict[str, _Instruction]],
    *,
    fused: bool = False,
) -> tuple[str, list[tuple[str, int]]]:
    """How an instruction is called, and the shapes and bytes that it writes."""
    sizes = [(shape, _bytes(shape)) for shape in at.shapes]
    if at.operation in _NOTHING_WRITTEN or at.operation.endswith("-done"):
        return at.operation, []
    if at.operation == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', at.line)
        assert target is not None, at.line
        if target[1].startswith("__cublas"):
            sizes = [*sizes[:-1], (sizes[-1][0], 0)]
        aliasing = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", at.line)
        taken = re.findall(r"\{(\d*)\}: \(", aliasing[1] if aliasing else "")
        gone = {int(index or 0) for index in taken}
        sizes = [(x, 0 if i in gone else n) for i, (x, n) in enumerate(sizes)]
        return f"custom-call {target[1]}", sizes
    if at.operation == "fusion":
        called = re.search(r"calls=%([\w.-]+)", at.line)
        assert called is not None, at.line
        inside = computations[called[1]]
        roots = [_source(inside, list(inside)[-1], i) for i in range(len(sizes))]
        parts = [
            (_writes(root, inside, computations, fused=True), index)
            for root, index in roots
        ]
        names = " ".join(dict.fromkeys(name for (name, _), _ in parts))
        sizes = [
            (shape, written[index][1] if written else size)
            for (shape, size), ((_, written), index) in zip(sizes, parts, strict=True)
        ]
        return f"fusion {names}", sizes
    if at.operation in ("dynamic-update-slice", "scatter"):
        into, _ = _source(around, at.operands[0])
        if into.operation == "parameter" or not fused:
            count = 1 if at.operation == "dynamic-update-slice" else len(sizes) + 1
            updates = at.operands[count : count + len(sizes)]
            sizes = [
                (shape, sum(map(_bytes, around[name].shapes)))
                for (shape, _), name in zip(sizes, updates, strict=True)
            ]
    return at.operation, sizes
