"""The settings of a run, from its ``run.json``, and its rates over time."""

import json
from typing import Any

from jaxscale.observability.run import Run
from jaxscale.observability.step_view import thinned


def settings_of(run: Run) -> dict[str, Any]:
    """The contents of ``run.json``; empty if it is missing or unreadable."""
    try:
        content = json.loads((run.directory / "run.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def settings_facts(content: dict[str, Any]) -> dict[str, str]:
    """The most important settings, by name.

    Example:
        >>> settings_facts({"jaxscale": "0.1", "config": {"seed": 3}})
        {'seed': '3'}
    """
    facts = {}
    if content.get("devices"):
        facts["devices"] = str(content["devices"])
    flat = dict(settings_rows(content))
    for name, key in (
        ("seed", "seed"),
        ("learning rate", "optimizer.learning_rate"),
        ("schedule", "optimizer.schedule"),
        ("rules", "rules"),
        ("begins with", "source"),
    ):
        if key in flat and flat[key] != "None":
            facts[name] = flat[key]
    return facts


def settings_rows(content: dict[str, Any]) -> list[tuple[str, str]]:
    """The versions, and every setting by its dotted name, which is that of its option.

    Example:
        >>> settings_rows({"jax": "0.11", "config": {"mesh": {"tensor": 2}}})
        [('version of jax', '0.11'), ('mesh.tensor', '2')]
    """
    rows = [
        (f"version of {name}", str(content[name]))
        for name in ("jaxscale", "jax", "python")
        if name in content
    ]
    pending = [("", content.get("config"))]
    while pending:
        name, value = pending.pop(0)
        if isinstance(value, dict) and value:
            inner = [(f"{name}.{key}".lstrip("."), v) for key, v in value.items()]
            pending = [*inner, *pending]
        elif name:
            rows.append((name, str(value)))
    return rows


def rates_view(run: Run) -> dict[str, Any]:
    """The learning rate and the gradient norm, step by step."""
    view = {}
    for name in ("lr", "grad_norm"):
        known = {
            r["step"]: r[name]
            for r in run.metrics
            if 0 <= r["step"] < 2**32 and isinstance(r.get(name), float | int)
        }
        view[name] = thinned([*known], [float(value) for value in known.values()])
    return view
