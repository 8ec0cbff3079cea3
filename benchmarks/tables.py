"""Writes the tables of README.md and docs/*.md, and the plots, from the result files.

``make tables`` (``python -m benchmarks.tables``) fills each block ::

    <!-- table:matmul -->
    <!-- /table -->

with the table of ``benchmarks/results/nvidia_h200/matmul.json``: the marker's name is
the stem of the file. Options follow the name::

    <!-- table:matmul metric=tflops implementations=mosaic_gpu,dense cases=4096* -->

``metric`` is what a cell shows beside the time (by default the first that all rows
have), ``device`` a folder of results. ``--check`` changes nothing and fails if a block
differs from what would be written.

Every row of a file is shown, ours and baselines alike, the fastest of a line in bold.
The last column is the time of the fastest baseline over that of our fastest: below 1
the baseline wins.
"""

import argparse
import fnmatch
import pathlib
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import records


ROOT = pathlib.Path(__file__).parent.parent
DEFAULT_DEVICE = "nvidia_h200"

OURS = (
    "mosaic_gpu",
    "triton",
    "xla",
    "auto",
    "jaxscale",
    "jaxscale_packed",
    "jaxscale_scan",
    "tile_wise",
    "tew",
)
"""Names of our implementations; every other is a baseline."""

MARKER = re.compile(
    r"(?P<open><!-- table:(?P<name>\S+)(?P<options>(?: \w+=\S+)*) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<close><!-- /table -->)",
    re.DOTALL,
)
_UNSHOWN = ("spread",)


def _ordered(values: Any) -> list:
    return list(dict.fromkeys(values))


def _default_metric(rows: Sequence[records.Record]) -> str | None:
    names = [n for n in rows[0]["metrics"] if n not in _UNSHOWN]
    return next((n for n in names if all(n in r["metrics"] for r in rows)), None)


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _cell(
    row: records.Record | None, metric: str | None, scale: float, best: bool
) -> str:
    if row is None:
        return "-"
    text = _number(row["time_us"] / scale)
    if metric is not None and metric in row["metrics"]:
        text += f" ({_number(row['metrics'][metric])})"
    return f"**{text}**" if best else text


def _lines(
    rows: Sequence[records.Record],
) -> Iterator[tuple[records.Record, dict[str, records.Record]]]:
    """For each case and params, its first row and its rows by implementation."""
    for identity in _ordered(records.identity(row) for row in rows):
        same = [row for row in rows if records.identity(row) == identity]
        yield same[0], {row["implementation"]: row for row in same}


def ratio(by_name: dict[str, records.Record]) -> float | None:
    """Time of the fastest baseline over that of our fastest, if there are both."""
    ours = [row["time_us"] for name, row in by_name.items() if name in OURS]
    others = [row["time_us"] for name, row in by_name.items() if name not in OURS]
    return min(others) / min(ours) if ours and others else None


def markdown(
    record: records.Record,
    *,
    metric: str | None = None,
    implementations: str = "*",
    cases: str = "*",
) -> str:
    """One Markdown table of a result file.

    Args:
        record: A result file.
        metric: The metric beside the time; by default the first that all rows have.
        implementations: Comma-separated names or patterns.
        cases: Comma-separated names or patterns.

    Returns:
        The table and a line that says where the numbers come from.
    """
    rows = [
        row
        for row in records.full_rows(record)
        if _matches(row["implementation"], implementations)
        and _matches(row["case"], cases)
    ]
    if not rows:
        raise ValueError(
            f"no row has implementation {implementations!r}, case {cases!r}"
        )
    if metric is not None and not any(metric in row["metrics"] for row in rows):
        known = _ordered(name for row in rows for name in row["metrics"])
        raise ValueError(f"metric {metric!r}, expected one of {known}")
    metric = metric or _default_metric(rows)
    unit, scale = ("ms", 1e3) if all(r["time_us"] >= 1e4 for r in rows) else ("us", 1)
    params = _ordered(name for row in rows for name in row["params"])
    names = _ordered(row["implementation"] for row in rows)
    head = ["case", *params, *names]
    with_ratio = any(ratio(by_name) is not None for _, by_name in _lines(rows))
    if with_ratio:
        head.append("baseline / ours")
    table = [
        head,
        ["---"] * (1 + len(params)) + ["--:"] * (len(head) - 1 - len(params)),
    ]
    for first, by_name in _lines(rows):
        best = min(row["time_us"] for row in by_name.values())
        cells = [first["case"]]
        cells += [str(first["params"].get(name, "")) for name in params]
        for name in names:
            row = by_name.get(name)
            fastest = row is not None and row["time_us"] == best and len(by_name) > 1
            cells.append(_cell(row, metric, scale, fastest))
        if with_ratio:
            value = ratio(by_name)
            cells.append("-" if value is None else f"{value:.2f}")
        table.append(cells)
    text = "\n".join("| " + " | ".join(line) + " |" for line in table)
    shown = f"Time in {unit}" + (f" ({metric})" if metric else "")
    return f"{text}\n\n{shown}. {_source(rows)}\n"


def _source(rows: Sequence[records.Record]) -> str:
    def join(key: str) -> str:
        return ", ".join(_ordered(str(row[key]) for row in rows))

    commands = ", ".join(f"`{c}`" for c in _ordered(row["command"] for row in rows))
    errors = [r["max_rel_error"] for r in rows if r["max_rel_error"] is not None]
    worst = f"; largest relative error {max(errors):.1e}" if errors else ""
    return (
        f"{join('device')} x {join('num_devices')}, {join('timing')}, "
        f"jax {join('jax')}, commit {join('commit')}, {join('date')}: "
        f"{commands}{worst}."
    )


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def fill(text: str, results: pathlib.Path, where: str = "text") -> str:
    """Replace the contents of every marked block of a document."""

    def block(match: re.Match) -> str:
        options = dict(item.split("=", 1) for item in match["options"].split())
        device = options.pop("device", DEFAULT_DEVICE)
        path = results / device / f"{match['name']}.json"
        if not path.exists():
            raise ValueError(f"{where}: table:{match['name']} wants {path}, not there")
        try:
            table = markdown(records.load(path), **options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{where}: table:{match['name']}: {error}") from error
        return f"{match['open']}\n{table}\n{match['close']}"

    opened, closed = text.count("<!-- table:"), len(MARKER.findall(text))
    if opened != closed:
        raise ValueError(
            f"{where}: {opened} markers '<!-- table:NAME -->', {closed} with an end "
            "'<!-- /table -->' and a newline between"
        )
    return MARKER.sub(block, text)


def documents(root: pathlib.Path) -> list[pathlib.Path]:
    """The files that may hold tables."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        path
        for path in found
        if path.exists() and "_build" not in path.relative_to(root).parts
    ]


def plot(record: records.Record, path: pathlib.Path) -> None:
    """Draw a result file as bars, one group a case.

    The height is the metric of the table if there is one, else the time.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    rows = records.full_rows(record)
    metric = _default_metric(rows)
    names = _ordered(row["implementation"] for row in rows)
    lines = list(_lines(rows))
    labels = _labels([first for first, _ in lines])
    width = 0.8 / len(names)
    # Without these the file would differ at every run.
    with mpl.rc_context({"svg.hashsalt": "jaxscale", "svg.fonttype": "none"}):
        figure = Figure(figsize=(max(6.0, 1.1 * len(lines) + 2), 4.0), layout="tight")
        axes = figure.subplots()
        for i, name in enumerate(names):
            points = [
                (x + (i - (len(names) - 1) / 2) * width, by_name[name])
                for x, (_, by_name) in enumerate(lines)
                if name in by_name
            ]
            heights = [
                row["metrics"][metric] if metric else row["time_us"]
                for _, row in points
            ]
            axes.bar([x for x, _ in points], heights, width, label=name)
        axes.set_xticks(range(len(lines)), labels, rotation=30, ha="right")
        axes.set_ylabel(metric or "time in us")
        axes.set_title(f"{record['benchmark']}, {record['device']}")
        axes.grid(axis="y", alpha=0.3)
        axes.legend()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None})


def _labels(rows: Sequence[records.Record]) -> list[str]:
    """Case names, with the params that tell equal names apart."""
    cases = [row["case"] for row in rows]
    labels = []
    for row in rows:
        same = [r["params"] for r in rows if r["case"] == row["case"]]
        differing = [
            f"{key}={value}"
            for key, value in row["params"].items()
            if any(params.get(key) != value for params in same)
        ]
        labels.append(" ".join([row["case"], *differing]))
    assert len(labels) == len(cases)
    return labels


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tables")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--results", type=pathlib.Path, default=records.RESULTS)
    args = parser.parse_args(argv)
    stale = []
    for path in documents(args.root):
        old = path.read_text(encoding="utf-8")
        new = fill(old, args.results, str(path.relative_to(args.root)))
        if new == old:
            continue
        stale.append(str(path.relative_to(args.root)))
        if not args.check:
            path.write_text(new, encoding="utf-8")
    plots = args.root / "docs" / "_static" / "plots"
    for path in sorted(args.results.glob("*/*.json")):
        target = plots / f"{path.parent.name}_{path.stem}.svg"
        if not args.check:
            plot(records.load(path), target)
        elif not target.exists():
            stale.append(str(target.relative_to(args.root)))
    for name in stale:
        print(f"{'out of date' if args.check else 'wrote'}: {name}")
    if args.check and stale:
        print("run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
