"""Result files: their form, how a run is merged into one, where they lie.

``benchmarks/results/<device>/<benchmark>[_<part>].json`` holds one table. A run
replaces the rows of its own case and params; rows of earlier runs stay and then carry
what sets them apart from the head of the file (``commit``, ``date``, ``command``, ...).

Files that were written elsewhere (``--out``) are merged by

    python -m benchmarks.measure.records FOLDER/nvidia_h200/matmul.json ...

Rows of what a benchmark no longer has (a case, or params that were given another
meaning) are taken out of its files, and files that have no others, by

    python -m benchmarks.measure.records --drop FOLDER/nvidia_h200/matmul.json ...
"""

import datetime
import fcntl
import importlib
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


RESULTS = pathlib.Path(__file__).parents[1] / "results"

HEAD = {
    "benchmark": str,
    "device": str,
    "num_devices": int,
    "jax": str,
    "commit": str,
    "date": str,
    "command": str,
    "timing": str,
}
"""Keys of a file, but for ``rows``; each may also stand on a row and then wins."""

ROW = {
    "case": str,
    "params": dict,
    "implementation": str,
    "time_us": (int, float),
    "metrics": dict,
    "max_rel_error": (int, float, type(None)),
}
"""Keys of a row. ``max_rel_error`` is null only for end-to-end (wall time) rows."""

OPTIONAL = {"versions": dict}
"""Keys that some rows have: versions of the packages that a rival is made of."""

INHERITED = tuple(key for key in HEAD if key not in ("benchmark", "device"))

Record = dict[str, Any]


def slug(device: str) -> str:
    """The folder of a device: ``NVIDIA H200`` lies in ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", device.lower()).strip("_")


def path_for(out: pathlib.Path, device: str, benchmark: str, part: str) -> pathlib.Path:
    """Where a benchmark's results lie."""
    stem = f"{benchmark}_{part}" if part else benchmark
    return out / slug(device) / f"{stem}.json"


def validate(record: Any) -> None:
    """Raise ``ValueError`` unless ``record`` has the form of a result file."""
    _check_keys(record, {**HEAD, "rows": list}, "file")
    _check_date(record["date"], "file")
    seen = set()
    for i, row in enumerate(record["rows"]):
        where = f"rows[{i}]"
        optional = {key: HEAD[key] for key in INHERITED if key in row}
        optional |= {key: kind for key, kind in OPTIONAL.items() if key in row}
        _check_keys(row, {**ROW, **optional}, where)
        if "date" in row:
            _check_date(row["date"], where)
        if not (math.isfinite(row["time_us"]) and row["time_us"] > 0):
            raise ValueError(f"{where}: time_us {row['time_us']}, expected above 0")
        error = row["max_rel_error"]
        timing = row.get("timing", record["timing"])
        if error is None and not timing.startswith("wall"):
            raise ValueError(f"{where}: max_rel_error is null, expected a number")
        if error is not None and not (math.isfinite(error) and error >= 0):
            raise ValueError(f"{where}: max_rel_error {error}, expected at least 0")
        for name, value in row["metrics"].items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise ValueError(f"{where}: metric {name} {value!r}, expected a number")
        for name, value in row["params"].items():
            if not isinstance(value, bool | int | float | str):
                raise ValueError(f"{where}: param {name} {value!r}, expected a scalar")
        key = (*identity(row), row["implementation"])
        if key in seen:
            raise ValueError(f"{where}: a second row for {key}")
        seen.add(key)
        for name, version in row.get("versions", {}).items():
            if not isinstance(version, str):
                raise ValueError(f"{where}: version {version!r} of {name}, not a text")


def _check_keys(record: Any, kinds: Mapping[str, Any], where: str) -> None:
    if not isinstance(record, dict):
        raise ValueError(f"{where}: {type(record).__name__}, expected an object")
    if set(record) != set(kinds):
        missing, extra = set(kinds) - set(record), set(record) - set(kinds)
        raise ValueError(
            f"{where}: missing keys {sorted(missing)}, unknown keys {sorted(extra)}"
        )
    for key, kind in kinds.items():
        value = record[key]
        if not isinstance(value, kind) or (
            isinstance(value, bool) and kind is not bool
        ):
            raise ValueError(f"{where}: {key} {value!r} has the wrong type")


def _check_date(date: str, where: str) -> None:
    try:
        datetime.date.fromisoformat(date)
    except ValueError:
        raise ValueError(f"{where}: date {date!r}, expected YYYY-MM-DD") from None


def identity(row: Record) -> tuple[str, str]:
    """What makes two rows comparable: their case and params."""
    return key(row["case"], row["params"])


def key(case: str, params: Mapping[str, Any]) -> tuple[str, str]:
    """The same of a case that has no row yet."""
    return case, json.dumps(dict(params), sort_keys=True)


def merge(old: Record | None, new: Record, replaced: Sequence[str] | None) -> Record:
    """Put a run's rows in the place of those it measured again.

    Args:
        old: The file as it was, if there was one.
        new: The file as this run alone would write it.
        replaced: Names of the implementations that the run selected; ``None`` for all,
            which also removes rows of implementations that no longer exist.
    """
    if old is None:
        return new
    validate(old)
    ran = {identity(row) for row in new["rows"]}
    kept = []
    for row in old["rows"]:
        if identity(row) in ran and (
            replaced is None or row["implementation"] in replaced
        ):
            continue
        inherited = {key: row.get(key, old[key]) for key in INHERITED}
        kept.append(
            {key: row[key] for key in (*ROW, *OPTIONAL) if key in row}
            | {key: value for key, value in inherited.items() if value != new[key]}
        )
    # Rows of one case stay together, and all in the order of the file.
    rows, end = [*kept, *new["rows"]], len(old["rows"])
    first = {identity(row): i for i, row in reversed([*enumerate(old["rows"])])}
    each = {
        (*identity(row), row["implementation"]): i for i, row in enumerate(old["rows"])
    }
    rows.sort(
        key=lambda row: (
            first.get(identity(row), end),
            each.get((*identity(row), row["implementation"]), end),
        )
    )
    return {**new, "rows": rows}


def full_rows(record: Record) -> list[Record]:
    """The rows, each with all that it inherits from the head of the file."""
    head = {key: record[key] for key in HEAD}
    return [head | row for row in record["rows"]]


_UNSHOWN = ("spread", "run_seconds", "compile_seconds", "memory_mb", "vs_torch")


def ordered(values: Iterable[Any]) -> list:
    """Each value once, in the order of appearance."""
    return list(dict.fromkeys(values))


def default_metric(rows: Sequence[Record]) -> str | None:
    """The metric to show: the first that all rows have."""
    names = [n for n in rows[0]["metrics"] if n not in _UNSHOWN]
    return next((n for n in names if all(n in r["metrics"] for r in rows)), None)


def lines(rows: Sequence[Record]) -> Iterator[tuple[Record, dict[str, Record]]]:
    """For each case and params, its first row and its rows by implementation."""
    by_identity: dict[tuple, dict[str, Record]] = {}
    for row in rows:
        by_identity.setdefault(identity(row), {})[row["implementation"]] = row
    for by_name in by_identity.values():
        yield next(iter(by_name.values())), by_name


SIZES = ("M", "N", "K", "batch", "max_len", "seq_len", "tokens", "context")
"""Params of which more is more work."""


def within_larger(rows: Sequence[Record]) -> dict[tuple[str, str, str], float]:
    """For each row, its time or that of a larger problem, whichever is less, in us.

    A larger problem of the same implementation has no less of any of `SIZES`, more of
    one, and is otherwise the same, whatever its name. It could be run instead, so a row
    that takes longer shows what disturbed it.
    """
    alike: dict[str, list[tuple[dict, Record]]] = {}
    for row in rows:
        sizes = {p: v for p, v in row["params"].items() if p in SIZES}
        rest = {p: v for p, v in row["params"].items() if p not in SIZES}
        group = json.dumps([row["implementation"], rest, [*sizes]], sort_keys=True)
        alike.setdefault(group, []).append((sizes, row))
    return {
        (*identity(row), row["implementation"]): min(
            other["time_us"]
            for more, other in group
            if all(more[p] >= sizes[p] for p in sizes)
        )
        for group in alike.values()
        for sizes, row in group
    }


def load(path: pathlib.Path) -> Record:
    """Read and validate a result file."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        validate(record)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return record


def dump(record: Record, path: pathlib.Path) -> None:
    """Validate and write a result file, one row per line."""
    validate(record)
    head = [f" {json.dumps(key)}: {json.dumps(record[key])}" for key in HEAD]
    rows = ",\n  ".join(json.dumps(row, allow_nan=False) for row in record["rows"])
    text = "{\n" + ",\n".join(head) + f',\n "rows": [\n  {rows}\n ]\n' + "}\n"
    replace(path, text)


def replace(path: pathlib.Path, text: str) -> None:
    """Write a whole file or nothing: a cut leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)


def add(new: Record, path: pathlib.Path, replaced: Sequence[str] | None) -> None:
    """Merge a run into a file, one process at a time.

    A file that is damaged is set aside, as ``NAME.damaged``: what was measured stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # until it is closed
        try:
            old = load(path) if path.exists() else None
        except ValueError as error:
            aside = path.with_name(f"{path.name}.damaged")
            os.replace(path, aside)
            print(f"set aside as {aside.name}: {error}", file=sys.stderr)
            old = None
        dump(merge(old, new, replaced), path)
    finally:
        os.close(folder)


def drop(path: pathlib.Path) -> int:
    """Take out rows of cases and implementations that there are no longer.

    Returns:
        How many; the file is gone if no others are left.
    """
    record = load(path)
    benchmark = importlib.import_module(f"benchmarks.{record['benchmark']}").BENCHMARK
    cases = {key(case.name, case.params) for case in benchmark.cases}
    kept = [
        row
        for row in record["rows"]
        if identity(row) in cases and row["implementation"] in benchmark.implementations
    ]
    if not kept:
        path.unlink()
    elif len(kept) < len(record["rows"]):
        dump(record | {"rows": kept}, path)
    return len(record["rows"]) - len(kept)


def main(argv: Sequence[str] | None = None, out: pathlib.Path = RESULTS) -> None:
    """Merge files into those of this repository, or drop rows of files."""
    names = sys.argv[1:] if argv is None else [*argv]
    if names[:1] == ["--drop"]:
        for name in names[1:]:
            print(f"{name}: {drop(pathlib.Path(name))} rows dropped")
        return
    for name in names:
        new = load(pathlib.Path(name))
        path = out / slug(new["device"]) / pathlib.Path(name).name
        names = ordered(row["implementation"] for row in new["rows"])
        add(new, path, names)
        print(f"wrote {path}: {len(new['rows'])} rows")


if __name__ == "__main__":
    main()
