"""What compiled programs write to memory and send, read from XLA's text of them."""

import dataclasses
import re

from jaxscale.training.planning.hlo import Instruction, called_by, parse_hlo, size_of


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
    computations = parse_hlo(hlo)
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
                for name in called_by(at):
                    walk(name, looped or at.operation == "while")
                continue
            operation, sizes = _writes(at, instructions, computations)
            for index, (shape, size) in enumerate(sizes):
                is_result = (at.name, index) in results and not _COPY.search(operation)
                if size >= max(at_least_bytes, 1) and not is_result:
                    found.append(Written(operation, shape, size, looped))

    walk("ENTRY", False)
    return found


_COPY = re.compile(r"\bcopy$")
_NOTHING_WRITTEN = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id"),
    *("replica-id", "after-all", "add-dependency", "opt-barrier", "async-update"),
}


def _source(
    instructions: dict[str, Instruction], name: str, index: int = 0
) -> tuple[Instruction, int]:
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
    at: Instruction,
    around: dict[str, Instruction],
    computations: dict[str, dict[str, Instruction]],
    *,
    fused: bool = False,
) -> tuple[str, list[tuple[str, int]]]:
    """How an instruction is called, and the shapes and bytes that it writes."""
    sizes = [(shape, size_of(shape)) for shape in at.shapes]
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
                (shape, sum(map(size_of, around[name].shapes)))
                for (shape, _), name in zip(sizes, updates, strict=True)
            ]
    return at.operation, sizes
