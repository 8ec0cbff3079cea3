"""Draws a mesh and a schedule for docs/scaling.md: ``python -m docs.scaling_pictures``.

Both come from what a run uses: the order of the axes of a mesh, and a schedule that was
played. No device takes part.
"""

import math
from pathlib import Path

import numpy as np

from docs.svg import GRAY, INK, PALE, document
from jaxscale.sharding import MeshConfig, pipeline_schedule
from jaxscale.sharding.mesh import MESH_AXES
from jaxscale.sharding.schedule_drawing import svg as drawn


PATH = Path(__file__).parent / "_static" / "scaling_mesh.svg"
SCHEDULE = Path(__file__).parent / "_static" / "scaling_schedule.svg"

MESH = MeshConfig(pipe=2, data=2, fsdp=2, context=2, tensor=2)
GPUS = 8
"""Of a host."""

_SIZE, _GAP, _LEFT, _TOP, _LINE = 34, 6, 74, 44, 22
_AXES = {
    "tensor": ("#1f77b4", "activations, in every layer"),
    "context": ("#d62728", "keys and values, in every layer"),
    "fsdp": ("#ff7f0e", "weights and gradients, as often as zero says"),
    "data": ("#2ca02c", "gradients, once per step"),
    "pipe": ("#9467bd", "activations between stages, per microbatch and chunk"),
}
"""Color of an axis, and what travels along it; fastest links first."""


def partners() -> dict[str, list[int]]:
    """The devices that device 0 exchanges data with, along each axis."""
    sizes = [getattr(MESH, axis) for axis in MESH_AXES]
    places = np.arange(math.prod(sizes)).reshape(sizes)
    found = {}
    for axis in _AXES:
        index = [slice(None) if name == axis else 0 for name in MESH_AXES]
        found[axis] = places[tuple(index)].tolist()[1:]
    return found


def svg() -> str:
    """The picture of the mesh: a row per host, and the partners of GPU 0."""
    colors = {i: _AXES[axis][0] for axis, which in partners().items() for i in which}
    colors[0] = INK
    count = math.prod(getattr(MESH, axis) for axis in MESH_AXES)
    hosts, step = count // GPUS, _SIZE + _GAP
    right = _LEFT + GPUS * step + 2 * _GAP
    height = _TOP + hosts * step + _GAP
    width = right + 470
    shape = " x ".join(
        f"{axis} {getattr(MESH, axis)}" for axis in MESH_AXES if getattr(MESH, axis) > 1
    )
    parts = [
        f'<text x="8" y="20" fill="{INK}">{count} GPUs as {shape}: '
        "the GPUs that GPU 0 communicates with</text>",
    ]
    for i in range(count):
        host, place = divmod(i, GPUS)
        x, y = _LEFT + place * step, _TOP + host * step
        if place == 0:
            parts.append(f'<text x="8" y="{y + 22}" fill="{INK}">host {host}</text>')
        ink = "#fff" if i in colors else GRAY
        parts += [
            f'<rect x="{x}" y="{y}" width="{_SIZE}" height="{_SIZE}" rx="4" '
            f'fill="{colors.get(i, PALE)}"/>',
            f'<text x="{x + _SIZE / 2}" y="{y + 22}" text-anchor="middle" '
            f'fill="{ink}">{i}</text>',
        ]
    for i, (axis, (color, what)) in enumerate(_AXES.items()):
        y = _TOP + i * _LINE
        parts += [
            f'<rect x="{right}" y="{y + 6}" width="14" height="14" fill="{color}"/>',
            f'<text x="{right + 22}" y="{y + 18}" fill="{INK}">{axis}: {what}</text>',
        ]
    return document(width, height, parts)


def schedule() -> str:
    """The picture that ``jaxscale schedule --svg`` draws."""
    return drawn(pipeline_schedule(stages=4, microbatches=8, chunks=2))


if __name__ == "__main__":
    PATH.write_text(svg())
    SCHEDULE.write_text(schedule())
