"""Draws slots against steps for docs/flover.md: ``python -m docs.flover_pictures``.

The scheduler of the engine plans both: with requests let in as they arrive, and a batch
at a time. No device takes part.
"""

from collections import abc
from pathlib import Path

import numpy as np

from docs.svg import INK, PALE, document
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.engine.scheduling.scheduler_output import Drawn
from jaxscale.inference.engine.scheduling.sequence import Sequence
from jaxscale.inference.request import Request, SamplingParams


PATH = Path(__file__).parent / "_static" / "flover_slots.svg"
SLOTS = 4
_COUNT, _WIDTH, _HEIGHT, _LEFT, _TITLE = 12, 7, 18, 10, 44
_COLORS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#9467bd", "#8c564b", "#17becf")


def requests() -> list[tuple[int, int]]:
    """The step at which each request arrives, and how many tokens it wants."""
    random = np.random.default_rng(6)
    arrives = np.sort(random.integers(0, 40, _COUNT))
    wanted = np.clip(random.lognormal(2.6, 0.8, _COUNT), 3, 60).astype(int)
    return list(zip((arrives - arrives[0]).tolist(), wanted.tolist(), strict=True))


def play(*, batches: bool) -> list[list[tuple[int, int, bool]]]:
    """Lane, request and whether its prompt is computed, for each step.

    A request keeps its lane; the engine moves rows up when half of a batch is empty.
    """
    config = SchedulerConfig(
        num_pages=64,
        vocab_size=8,
        max_len=128,
        page_size=16,
        num_slots=SLOTS,
        prefill_tokens=16,
        split=16,
        steps=1,
        prefix_cache=False,
    )
    scheduler, waiting = Scheduler(config, seed=0), list(enumerate(requests()))
    steps, lanes = [], {}
    while waiting or not scheduler.idle:
        now = len(steps)
        joining = [each for each in waiting if each[1][0] <= now]
        if batches:  # nobody joins a batch that runs
            joining = joining[:SLOTS] if scheduler.idle else []
        for i, (_, wanted) in joining:
            params = SamplingParams(max_tokens=wanted, ignore_eos=True)
            request = Request(prompt=[1, 2], id=str(i), params=params)
            scheduler.add(request, now=float(now))
        waiting = [each for each in waiting if each not in joining]
        plan = scheduler.schedule(now=float(now))
        shown = []
        if plan is not None and plan.decode is not None:
            prompts = [chunk.sequence for chunk in plan.prefill]
            rows = plan.decode.rows
            live = [int(c.request.id) for c in rows if c is not None]
            new = {int(c.request.id) for c in prompts}
            lanes = {i: lane for i, lane in lanes.items() if i in live}
            for i in sorted(set(live) - set(lanes)):
                lanes[i] = min(set(range(SLOTS)) - set(lanes.values()))
            shown = [(lane, i, i in new) for i, lane in lanes.items()]
            prefill, decode = _drawn(prompts), _drawn(rows)
            scheduler.update(plan, prefill=prefill, decode=decode, now=float(now))
        steps.append(shown)
    return steps


def _drawn(rows: abc.Sequence[Sequence | None]) -> Drawn:
    """A token for each row that has an owner."""
    tokens = [[-1 if c is None else 1] for c in rows]
    return Drawn(tokens=[tokens], flags=[[[0]] * len(tokens)])


def svg() -> str:
    """The picture."""
    panels = [
        ("Static batching: slots wait for the longest answer", play(batches=True)),
        (
            "Continuous batching: requests join and leave at any step",
            play(batches=False),
        ),
    ]
    longest = max(len(steps) for _, steps in panels)
    panel = SLOTS * _HEIGHT + _TITLE
    width, height = longest * _WIDTH + 2 * _LEFT, 2 * panel + 4
    parts = []
    for i, (title, steps) in enumerate(panels):
        parts += [
            f'<g transform="translate({_LEFT},{i * panel + _TITLE - 4})">',
            f'<text y="-20" fill="{INK}">{title}: {len(steps)} steps</text>',
            f'<rect width="{longest * _WIDTH}" height="{SLOTS * _HEIGHT}" '
            f'fill="{PALE}"/>',
            *_arrivals(),
            *_bars(steps),
            "</g>",
        ]
    return document(width, height, parts)


def _arrivals() -> list[str]:
    return [
        f'<path d="M{at * _WIDTH} -12l4 9h-8z" fill="{_COLORS[i % len(_COLORS)]}"/>'
        for i, (at, _) in enumerate(requests())
    ]


def _bars(steps: list[list[tuple[int, int, bool]]]) -> list[str]:
    """Each request as one bar, its prompt darker."""
    stays: dict[tuple[int, int], list[int]] = {}
    prompts = []
    for step, shown in enumerate(steps):
        for lane, i, prompt in shown:
            stays.setdefault((lane, i), []).append(step)
            if prompt:
                prompts.append((lane, step))
    bars = [
        f'<rect x="{at[0] * _WIDTH}" y="{lane * _HEIGHT + 1}" '
        f'width="{(at[-1] + 1 - at[0]) * _WIDTH - 1}" height="{_HEIGHT - 2}" '
        f'fill="{_COLORS[i % len(_COLORS)]}"/>'
        for (lane, i), at in stays.items()
    ]
    return bars + [
        f'<rect x="{step * _WIDTH}" y="{lane * _HEIGHT + 1}" width="{_WIDTH}" '
        f'height="{_HEIGHT - 2}" fill="#000" fill-opacity="0.5"/>'
        for lane, step in prompts
    ]


if __name__ == "__main__":
    PATH.write_text(svg())
