"""A table of the rows of a result file: ours, and what they are compared with.

Every row of a file is shown, ours and baselines alike, the fastest of a line in bold.
The column before the times is that of the fastest baseline over our fastest: below 1
the baseline wins. Then come our times, those of baselines, lower bounds, such as a
matmul without its communication, which compete with neither, and params that follow
from the case; params that all rows share stand under the table. A long table shows its
first ten rows, and the rest behind a fold. Cases of one name are in the order of their
numbers. Where PyTorch took less for a larger problem of its own, that is the time of
the baseline here. The metric ``vs_torch`` is made from such times as well: how much
less a row takes than the best form of PyTorch. Rows with the key ``stale`` are marked:
see `benchmarks.publish.stale`.
"""

import fnmatch
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.measure import records


OURS = (
    "mosaic_gpu",
    "mosaic_gpu_any_order",
    "mosaic_gpu_static",
    "order_of_k",
    "low_latency",
    "fp8_mosaic_gpu",
    "triton",
    "xla",
    "auto",
    "untuned",
    "jaxscale",
    "jaxscale_scan",
    "jaxscale_xla",
    "jaxscale_overlap",
    "jaxscale_fp8",
    "jaxscale_fp8_blockwise",
    "jaxscale_fp8_tensorwise",
    "tile_wise",
    "tew",
)
"""Names of our implementations; every other is a baseline or a bound."""

BOUNDS = ("matmul_only", "comm_only", "ideal")
"""What no implementation of the whole can be faster than."""

LESS_EXACT = ("fp8_mosaic_gpu", "fp8_xla", "fp8_flash_attn_3")
"""Of rounded operands: rivals of each other, but of nothing that takes the operands
themselves."""


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
    return (f"**{text}**" if best else text) + stale([row])


STALE = "†"
"""Stands behind the time of kernels that have changed since."""

STALE_NOTE = f"{STALE}: its kernels have changed since, or may have"


def stale(rows: Iterable[records.Record]) -> str:
    """The mark, if one of the rows needs it."""
    return f" {STALE}" if any(row.get("stale") for row in rows) else ""


def ratio(by_name: dict[str, records.Record]) -> float | None:
    """Time of the fastest baseline over that of our fastest, if there are both."""
    rows = compared(by_name)
    ours = [row["time_us"] for name, row in rows.items() if name in OURS]
    others = [
        row.get("bound_us", row["time_us"])
        for name, row in rows.items()
        if name not in OURS
    ]
    return min(others) / min(ours) if ours and others else None


def compared(by_name: dict[str, records.Record]) -> dict[str, records.Record]:
    """What is set against each other of a line: what is as exact as its operands."""
    names = by_name.keys() - BOUNDS
    names = names - {*LESS_EXACT} or names
    return {name: row for name, row in by_name.items() if name in names}


def slower(rows: Sequence[records.Record]) -> list[records.Record]:
    """The rows of the lines in which a baseline is faster than all of ours."""
    lines = ((by_name, ratio(by_name)) for _, by_name in records.lines(rows))
    found = [
        row
        for by_name, quotient in lines
        if quotient is not None and quotient < 1
        for row in by_name.values()
    ]
    if not found:
        raise ValueError("no row has a faster baseline beside it")
    return found


def _said(option: str, value: str) -> bool:
    if value not in ("yes", "no"):
        raise ValueError(f"{option} {value!r}, expected yes or no")
    return value == "yes"


def markdown(
    record: records.Record,
    *,
    metric: str | None = None,
    implementations: str = "*",
    cases: str = "*",
    params: str = "*",
    columns: str | None = None,
    folded: str = "no",
    behind: str = "no",
    **where: str,
) -> str:
    """One Markdown table of a result file.

    Args:
        record: A result file.
        metric: The metric beside the time; by default the first that all rows have.
        implementations: Comma-separated names or patterns.
        cases: Comma-separated names or patterns.
        params: The same, of the params that have a column.
        columns: A param whose values become columns.
        folded: Whether the rows are behind a fold: ``yes`` or ``no``.
        behind: ``yes`` for those rows alone in which a baseline is the fastest.
        **where: Comma-separated values of params. One that leaves a single value has
            no column.

    Returns:
        The table and a line that says where the numbers come from.
    """
    rows = chosen(record, implementations, cases, where)
    if _said("behind", behind):
        rows = slower(rows)
    if metric is not None and not any(metric in row["metrics"] for row in rows):
        if metric == "vs_torch":
            raise ValueError("no row has a time of PyTorch beside it")
        known = records.ordered(name for row in rows for name in row["metrics"])
        raise ValueError(f"metric {metric!r}, expected one of {known}")
    if columns is not None and columns not in rows[0]["params"]:
        raise ValueError(f"columns {columns!r}, expected one of {[*rows[0]['params']]}")
    fixed = {p for p in where if len({row["params"][p] for row in rows}) == 1}
    if columns is not None:
        return _side_by_side(rows, metric, columns, folded)
    metric = metric or records.default_metric(rows)
    unit, scale = ("ms", 1e3) if all(r["time_us"] >= 1e4 for r in rows) else ("us", 1)
    kinds = _kinds_of_params(rows)
    shown = {
        kind: [
            name for name in kinds[kind] if name not in fixed and matches(name, params)
        ]
        for kind in kinds
    }
    aside = (*BOUNDS, *LESS_EXACT)
    names = records.ordered(row["implementation"] for row in rows)
    names.sort(key=lambda name: 2 if name in aside else 0 if name in OURS else 1)
    lines = sorted(records.lines(rows), key=_place_of(rows))
    with_ratio = any(ratio(by_name) is not None for _, by_name in lines)
    ratios = ["baseline / ours"] if with_ratio else []
    head = ["case", *shown["free"], *ratios, *names, *shown["of the case"]]
    left, right = (
        ["---"] * (1 + len(shown["free"])),
        ["--:"] * (len(ratios) + len(names)),
    )
    table = [head, [*left, *right, *["---"] * len(shown["of the case"])]]
    for first, by_name in lines:
        rivals = compared(by_name)
        times = [row["time_us"] for row in rivals.values()]
        best = min(times) if len(times) > 1 else None
        cells = [first["case"]]
        cells += [str(first["params"].get(name, "")) for name in shown["free"]]
        if with_ratio:
            value = ratio(by_name)
            cells.append("-" if value is None else f"{value:.2f}")
        for name in names:
            row = by_name.get(name)
            fastest = name in rivals and rivals[name]["time_us"] == best
            cells.append(_cell(row, metric, scale, fastest))
        cells += [str(first["params"].get(name, "")) for name in shown["of the case"]]
        table.append(cells)
    what = f"Time in {unit}" + (f" ({metric})" if metric else "")
    same = [f"{name} {rows[0]['params'][name]}" for name in shown["the same"]]
    what = "; ".join([what, *([", ".join(same)] if same else [])])
    return f"{_joined(table, folded)}\n\n{what}. {source(rows)}\n"


def _kinds_of_params(rows: Sequence[records.Record]) -> dict[str, list[str]]:
    """Params that differ within a case, those that follow from it, and the constant."""
    found: dict[str, dict[str, set[str]]] = {}
    for row in rows:
        for name in row["params"]:
            by_case = found.setdefault(name, {})
            by_case.setdefault(row["case"], set()).add(str(row["params"][name]))
    kinds: dict[str, list[str]] = {"free": [], "of the case": [], "the same": []}
    for name, by_case in found.items():
        everywhere = all(name in row["params"] for row in rows)
        if any(len(values) > 1 for values in by_case.values()):
            kinds["free"].append(name)
        elif everywhere and len(set.union(*by_case.values())) == 1:
            kinds["the same"].append(name)
        else:
            kinds["of the case"].append(name)
    return kinds


def _place_of(rows: Sequence[records.Record]) -> Callable[[Any], tuple]:
    """The key that sorts lines: names as they appear, then numbers by their size."""
    numbers = re.compile(r"(?<=_)([a-z])(\d+)(?=_|$)")
    stems = records.ordered(numbers.sub(r"\1", row["case"]) for row in rows)
    cases = records.ordered(row["case"] for row in rows)

    def place(line: tuple[records.Record, Any]) -> tuple:
        case, params = line[0]["case"], line[0]["params"]
        sizes = [int(digits) for _, digits in numbers.findall(case)]
        values = [v for v in params.values() if isinstance(v, int | float)]
        return stems.index(numbers.sub(r"\1", case)), sizes, cases.index(case), values

    return place


def chosen(
    record: records.Record, implementations: str, cases: str, where: dict[str, str]
) -> list[records.Record]:
    """The rows that options of a table choose, beside what PyTorch needed at most."""
    rows = _beside_torch(records.full_rows(record))
    known = records.ordered(name for row in rows for name in row["params"])
    for name in where:
        if name not in known:
            raise ValueError(f"option {name!r}, expected one of the params {known}")
    rows = [
        row
        for row in rows
        if matches(row["implementation"], implementations)
        and matches(row["case"], cases)
        and all(matches(str(row["params"].get(p)), v) for p, v in where.items())
    ]
    if not rows:
        wanted = {"implementation": implementations, "case": cases, **where}
        raise ValueError(f"no row has {wanted}")
    return rows


def _beside_torch(rows: Sequence[records.Record]) -> list[records.Record]:
    """The same, with what PyTorch needed at most, and what that makes of each row."""
    bounds = records.within_larger(rows)
    best: dict[tuple[str, str], float] = {}
    for case, params, name in bounds:
        if name.startswith("torch"):
            known = best.get((case, params), float("inf"))
            best[case, params] = min(known, bounds[case, params, name])
    made = []
    for row in rows:
        identity, name, time_us = (
            records.identity(row),
            row["implementation"],
            row["time_us"],
        )
        if name.startswith("torch"):
            time_us = bounds[*identity, name]
        if identity in best:
            metrics = {**row["metrics"], "vs_torch": best[identity] / time_us}
            row = {**row, "metrics": metrics, "bound_us": time_us}
        made.append(row)
    return made


def _side_by_side(
    rows: Sequence[records.Record], metric: str | None, columns: str, folded: str
) -> str:
    """A table whose columns are the values of a param, and the mean of each column.

    Params that follow from the case are left out.
    """
    values = sorted({row["params"][columns] for row in rows})
    found: dict[tuple[str, str], set] = {}
    for row in rows:
        for name, value in row["params"].items():
            found.setdefault((name, row["case"]), set()).add(value)
    free = records.ordered(name for (name, _), each in found.items() if len(each) > 1)
    params = [name for name in free if name != columns]
    names = records.ordered(row["implementation"] for row in rows)
    heads = ["case", *params, *(["implementation"] if len(names) > 1 else [])]
    lines: dict[tuple, dict[Any, float]] = {}
    old: dict[tuple, dict[Any, str]] = {}
    for row in rows:
        key = [row["case"], *(str(row["params"].get(p, "")) for p in params)]
        key += [row["implementation"]] if len(names) > 1 else []
        value = row["metrics"].get(metric) if metric else row["time_us"]
        if value is not None:
            lines.setdefault(tuple(key), {})[row["params"][columns]] = value
            old.setdefault(tuple(key), {})[row["params"][columns]] = stale([row])
    table = [
        [*heads, *(f"{columns} {value}" for value in values)],
        ["---"] * len(heads) + ["--:"] * len(values),
    ]
    for key, cells in lines.items():
        texts = {v: _number(cells[v]) + old[key][v] for v in cells}
        table.append([*key, *(texts.get(v, "-") for v in values)])
    if metric and len(lines) > 1 and len(names) == 1:
        each = [[c[v] for c in lines.values() if v in c] for v in values]
        means = [_number(sum(e) / len(e)) if e else "-" for e in each]
        table.append(["mean", *[""] * (len(heads) - 1), *means])
    shown = metric or "time in us"
    who = f" of `{names[0]}`" if len(names) == 1 else ""
    return f"{_joined(table, folded)}\n\n{shown}{who}. {source(rows)}\n"


SHOWN = 10
"""Rows of a long table that are not behind a fold."""


def _joined(table: Sequence[Sequence[str]], folded: str) -> str:
    head, rows = table[:2], table[2:]
    if _said("folded", folded):
        return _fold(f"All {len(rows)} rows", table)
    if len(rows) <= SHOWN + 2:
        return _text(table)
    rest = _fold(f"{len(rows) - SHOWN} more rows", [*head, *rows[SHOWN:]])
    return f"{_text([*head, *rows[:SHOWN]])}\n\n{rest}"


def _text(table: Sequence[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def _fold(summary: str, table: Sequence[Sequence[str]]) -> str:
    return f"<details><summary>{summary}</summary>\n\n{_text(table)}\n\n</details>"


def source(rows: Sequence[records.Record]) -> str:
    """Device, errors, versions and commands of rows."""

    def join(key: str) -> str:
        return ", ".join(records.ordered(str(row[key]) for row in rows))

    commands = "\n".join(
        wrapped
        for command in records.ordered(row["command"] for row in rows)
        for wrapped in _wrapped(command)
    )
    packages = [" ".join(p) for row in rows for p in row.get("versions", {}).items()]
    versions = ", ".join(["", *records.ordered(packages)])
    errors = [r["max_rel_error"] for r in rows if r["max_rel_error"] is not None]
    worst = f"; largest relative error {max(errors):.1e}" if errors else ""
    details = textwrap.fill(
        f"{join('timing')}, jax {join('jax')}{versions}, commit {join('commit')}, "
        f"{join('date')}{worst}.",
        88,
    )
    note = f"\n{STALE_NOTE}." if stale(rows) else ""
    return (
        f"{join('device')} x {join('num_devices')}.{note}\n\n"
        "<details><summary>Commands, commits and versions</summary>\n\n"
        f"{details}\n\n```text\n{commands}\n```\n\n</details>"
    )


def _wrapped(command: str) -> list[str]:
    """A command in lines that a page can show, continued as a shell takes them."""
    lines = textwrap.wrap(
        command,
        84,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [f"{line} \\" for line in lines[:-1]] + lines[-1:]


def matches(name: str, patterns: str) -> bool:
    """Whether one of the comma-separated patterns fits."""
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))
