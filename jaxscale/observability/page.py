"""The HTML page of a run: its data as JSON, and a script that draws them.

The page needs no network: its script draws SVG without a library. The same script draws
a live page, whose data `jaxscale.observability.live` serves while files grow.
"""

import html
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.observability.fault_view import fault_rows, moments, suspected
from jaxscale.observability.goodput import goodput
from jaxscale.observability.layout import MeshLayout, find_layout
from jaxscale.observability.mesh_view import directions, duration
from jaxscale.observability.run import Run, read_run
from jaxscale.observability.settings_view import (
    rates_view,
    settings_facts,
    settings_of,
    settings_rows,
)
from jaxscale.observability.step_view import (
    compile_rows,
    heat_view,
    loss_view,
    memory_view,
    slow_text,
)
from jaxscale.observability.timeline import timeline


_RECENT_SECONDS = 15.0
_TEMPLATE, _PLOT, _SCRIPT = (
    Path(__file__).with_name(name) for name in ("page.html", "plot.js", "page.js")
)


def page_data(run: Run, *, now: float | None = None) -> dict[str, Any]:
    """The data of the page, as JSON values; NaN is None."""
    now = time.time() if now is None else now
    layout = find_layout(run)
    views = moments(run, layout, now)
    # A running run is idle now; one that broke off long ago is over.
    until = now if now - run.end < _RECENT_SECONDS else None
    parts = goodput(run, until=until)
    faults = fault_rows(run)
    content = settings_of(run)
    named = [n for e in run.driver if e.kind == "fault" for n in suspected(e)]
    return _sound(
        {
            "title": str(run.directory.absolute().name or run.directory),
            "time": now,
            "facts": _facts(run, layout, parts.shares["productive"])
            | settings_facts(content),
            "goodput": {"seconds": dict(parts.seconds), "wall": parts.wall},
            "loss": loss_view(run),
            "rates": rates_view(run),
            "settings": settings_rows(content),
            "command": str(content.get("command") or ""),
            "moments": views,
            "directions": directions(layout),
            "faults": faults,
            "heat": heat_view(run),
            "slow": slow_text(run, layout),
            "timeline": timeline(run, layout, [*views[0]["silent"], *named]),
            "memory": memory_view(run),
            "compile": compile_rows(run),
        }
    )


def write_page(run: Run | str | Path, path: str | Path) -> Path:
    """Write the page of a run; returns its path.

    Args:
        run: The result of `read_run`, or the output directory of a run.
        path: The HTML file; its directory is created.

    Raises:
        FileNotFoundError: the directory has no events.
    """
    run = run if isinstance(run, Run) else read_run(run)
    path = Path(path)
    text = page(page_data(run))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    return path


def page(data: Mapping[str, Any], *, live: bool = False) -> str:
    """The page as HTML.

    Args:
        data: From `page_data`.
        live: Whether the page asks its server for newer data.
    """
    parts = {
        "TITLE": html.escape(f"{data.get('title', '')} - jaxscale report"),
        "CONNECT": "'self'" if live else "'none'",
        "DATA": embedded(data),
        "LIVE": "true" if live else "false",
        "PLOT": _PLOT.read_text(encoding="utf-8"),
        "SCRIPT": _SCRIPT.read_text(encoding="utf-8"),
    }
    pieces = []
    for piece in _TEMPLATE.read_text(encoding="utf-8").split("@@"):
        pieces.append(parts.get(piece, piece))
    return "".join(pieces)


def embedded(data: Any) -> str:
    """JSON that is safe in a script element: it has no ``<``."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028")


def _facts(run: Run, layout: MeshLayout, productive: float) -> dict[str, str]:
    steps = run.ranks[0].steps
    done = steps.step[np.isfinite(steps.done)]
    cycles = {e.cycle for r in run.ranks[:1] for e in r.events} - {0}
    axes = " x ".join(f"{a} {n}" for a, n in layout.axes.items() if n > 1)
    facts = {
        "ranks": f"{layout.num_ranks}",
        "hosts": f"{len({*layout.hosts.values()}) or 'not reported'}",
        "mesh": axes or "one device",
        "steps done": f"{int(done.max()):,}" if len(done) else "none",
        "wall time": duration(run.end - run.begin),
        "goodput": f"{productive:.1%}",
        "starts": f"{len(cycles) or 1}",
    }
    for name, key, text in (
        ("held-out loss", "eval_loss", "{:.4f}"),
        ("tokens/s per device", "tokens_per_second_per_device", "{:,.0f}"),
    ):
        known = [r[key] for r in run.metrics if isinstance(r.get(key), float | int)]
        if known:
            value = known[-1] if key == "eval_loss" else float(np.median(known))
            facts[name] = text.format(value)
    if run.damaged:
        facts["damaged lines"] = f"{run.damaged:,}, left out"
    if not run.metrics:
        facts["metrics.jsonl"] = "missing: losses are those of the events"
    return facts


def _sound(data: Any) -> Any:
    """`data` without numbers that JSON cannot express."""
    if isinstance(data, dict):
        return {str(key): _sound(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_sound(value) for value in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
