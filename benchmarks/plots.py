"""Plots of the result files, as SVG under ``docs/_static/plots``.

Each carries a digest of the results that it shows, by which `benchmarks.tables` sees
whether it is current: the drawing itself differs between versions of matplotlib.
"""

import hashlib
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks import records


def place(path: pathlib.Path) -> pathlib.Path:
    """Where the plot of a result file lies, under ``docs``."""
    return pathlib.Path("_static", "plots", f"{path.parent.name}_{path.stem}.svg")


def link(path: pathlib.Path, *, depth: int, alt: str = "Measured") -> str:
    """Markdown that shows the plot of a result file.

    Args:
        path: The result file.
        depth: How many folders down the document is, of which the first is ``docs``.
        alt: What the plot shows, with underscores for spaces.
    """
    start = "docs/" if depth == 0 else "../" * (depth - 1)
    return f"![{alt.replace('_', ' ')}]({start}{place(path)})\n"


def digest(record: records.Record) -> str:
    """Tells the measurements of one result file from those of another."""
    shown = [
        [row[key] for key in ("case", "params", "implementation", "time_us", "metrics")]
        for row in record["rows"]
    ]
    text = json.dumps([record["benchmark"], record["device"], shown], sort_keys=True)
    return f"results {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_current(record: records.Record, path: pathlib.Path) -> bool:
    """Whether the plot shows these results."""
    return path.exists() and digest(record) in path.read_text(encoding="utf-8")


def draw(record: records.Record, path: pathlib.Path) -> None:
    """Draw a result file: as bars, unless `SHAPES` has a form for the benchmark."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without these the file would differ at every run.
    with mpl.rc_context({"svg.hashsalt": "jaxscale", "svg.fonttype": "none"}):
        figure = Figure(layout="tight")
        SHAPES.get(record["benchmark"], _bars)(figure, record)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": digest(record)}
        figure.savefig(path, format="svg", metadata=metadata)


def _bars(figure: Any, record: records.Record) -> None:
    """One group a case; the height is the metric of the table, or else the time."""
    rows = records.full_rows(record)
    metric = records.default_metric(rows)
    names = records.ordered(row["implementation"] for row in rows)
    lines = list(records.lines(rows))
    labels = _labels([first for first, _ in lines])
    width = 0.8 / len(names)
    figure.set_size_inches(max(6.0, 1.1 * len(lines) + 2), 4.0)
    axes = figure.subplots()
    for i, name in enumerate(names):
        points = [
            (x + (i - (len(names) - 1) / 2) * width, by_name[name])
            for x, (_, by_name) in enumerate(lines)
            if name in by_name
        ]
        heights = [
            row["metrics"][metric] if metric else row["time_us"] for _, row in points
        ]
        axes.bar([x for x, _ in points], heights, width, label=name)
    axes.set_xticks(range(len(lines)), labels, rotation=30, ha="right")
    axes.set_ylabel(metric or "time in us")
    axes.set_title(f"{record['benchmark']}, {record['device']}")
    axes.grid(axis="y", alpha=0.3)
    axes.legend()


def _overlap(figure: Any, record: records.Record) -> None:
    """Overlap efficiencies of our kernel against the rows, a line for each layer.

    One row of panels for each number of devices and efficiency, one column for each
    way of communicating. From -1 to 1 the scale is linear, beyond it logarithmic.
    """
    rows = [row for row in record["rows"] if row["implementation"] == "mosaic_gpu"]
    sizes = sorted({row["params"]["tp"] for row in rows}, reverse=True)
    kinds = records.ordered(row["params"]["kind"] for row in rows)
    metrics = {"overlap_efficiency_star": "E*", "overlap_efficiency": "E"}
    colors = {
        case: f"C{i}" for i, case in enumerate(records.ordered(r["case"] for r in rows))
    }
    panels = [(tp, metric) for tp in sizes for metric in metrics]
    figure.set_size_inches(1 + 4.2 * len(kinds), 0.6 + 3.2 * len(panels))
    axes = figure.subplots(len(panels), len(kinds), squeeze=False)
    for line, (tp, metric) in enumerate(panels):
        for column, kind in enumerate(kinds):
            panel = axes[line][column]
            here = [r for r in rows if r["params"]["tp"] == tp]
            here = [r for r in here if r["params"]["kind"] == kind]
            _curves(panel, here, metric, colors)
            panel.set_title(f"{kind}, {tp} GPUs", fontsize=10)
            panel.set_ylabel(metrics[metric])
    figure.suptitle(f"{record['benchmark']}, {record['device']}: share of the gain")


def _curves(
    panel: Any, rows: Sequence[records.Record], metric: str, colors: dict[str, str]
) -> None:
    every = sorted({row["params"]["M"] for row in rows})
    for case in records.ordered(row["case"] for row in rows):
        points = sorted(
            (row["params"]["M"], row["metrics"][metric])
            for row in rows
            if row["case"] == case and metric in row["metrics"]
        )
        x, y = [m for m, _ in points], [value for _, value in points]
        panel.plot(x, y, marker="o", markersize=3, label=case, color=colors[case])
    panel.set_xscale("log", base=2)
    panel.set_xticks(every, [str(m) for m in every], fontsize=8)
    panel.set_yscale("symlog", linthresh=1)
    low, high = panel.get_ylim()
    ticks = [y for y in (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1) if low <= y <= high]
    panel.set_yticks(ticks, [str(y) for y in ticks], fontsize=8)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlabel("M, rows of all devices", fontsize=8)
    panel.grid(alpha=0.3)
    if rows:
        panel.legend(fontsize=7)


SHAPES = {"collective_matmul": _overlap}
"""Drawings of particular benchmarks."""


def _labels(rows: Sequence[records.Record]) -> list[str]:
    """Case names, with the params that tell equal names apart."""
    labels = []
    for row in rows:
        same = [r["params"] for r in rows if r["case"] == row["case"]]
        differing = [
            f"{key}={value}"
            for key, value in row["params"].items()
            if any(params.get(key) != value for params in same)
        ]
        labels.append(" ".join([row["case"], *differing]))
    return labels
