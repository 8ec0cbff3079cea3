"""Writes the tables of README.md and docs/*.md, and the plots, from the result files.

``make tables`` (``python -m benchmarks.publish.tables``) fills each block ::

    <!-- table:matmul -->
    <!-- /table -->

with the table of ``benchmarks/results/nvidia_h200/matmul.json``: the marker's name is
the stem of the file. Options follow the name::

    <!-- table:matmul metric=tflops implementations=mosaic_gpu,dense cases=4096* -->

``metric`` is what a cell shows beside the time (by default the first that all rows
have), ``device`` a folder of results, ``params`` the params that have a column (by
default all), and the name of a param chooses rows by its value: ``M=2048,8192``. With
``columns=M`` the values of a param stand side by side and a cell is the metric alone,
or else the time; a last line has the means. A long table shows ten rows and folds the
rest; with ``folded=yes`` all rows are behind the fold, for tables below a plot or a
short one. With ``behind=yes`` it has those rows alone in which a baseline is faster
than all of ours. With ``pending=yes`` a table without results says so instead of
failing, with ``pending=hidden`` it is not there. A plot is a block ``<!-- plot:matmul
-->``, and ``<!-- table:headlines -->`` is the table of `benchmarks.publish.headlines`,
``<!-- table:estimates -->`` that of `benchmarks.publish.estimates`. What a table was
made by (commands, commits, versions) is folded away under it. ``table:pruned_speed``
and its plot join two files: `benchmarks.publish.pruned_speed`. Plots that no page shows
are removed. Within a line,
``<!-- measured:matmul,dense -->`` to ``<!-- /measured -->`` says on how many GPUs there
are rows of these files, and ``<!-- ratio:matmul times=dense/mosaic_gpu M=8192 -->`` the
range of the quotients of times; it takes options of tables. ``--check`` changes nothing
and fails if a block or a plot differs from what would be written.

The table of a file is that of `benchmarks.measure.comparison`. Every table marks the
rows that are stale, by git's history of their kernels: `benchmarks.publish.stale`.
"""

import argparse
import pathlib
import re
import sys
from collections.abc import Sequence

from benchmarks.measure import comparison, records
from benchmarks.publish import estimates, headlines, plots, pruned_speed
from benchmarks.publish import stale as staleness


ROOT = pathlib.Path(__file__).parents[2]
DEFAULT_DEVICE = "nvidia_h200"

PENDING = "Not measured yet."
WITHOUT_ROWS = {"no": None, "yes": f"\n{PENDING}\n\n", "hidden": ""}
"""What stands in the place of a table without rows; None is an error."""

MARKER = re.compile(
    r"(?P<open><!-- (?P<what>table|plot):(?P<name>\S+)(?P<options>(?: \w+=\S+)*) -->\n)"
    r"(?P<body>.*?)"
    r"(?P<close><!-- /(?P=what) -->)",
    re.DOTALL,
)

INLINE = re.compile(
    r"(?P<open><!-- (?P<what>measured|ratio):(?P<name>\S+)"
    r"(?P<options>(?: \w+=\S+)*) -->)"
    r".*?"
    r"(?P<close><!-- /(?P=what) -->)"
)
NUMBERS = {1: "one", 2: "two", 4: "four", 8: "eight"}


def measured(names: str, results: pathlib.Path) -> str:
    """On how many GPUs there are rows of result files, in words."""
    paths = [
        p for name in names.split(",") for p in results.glob(f"nvidia*/{name}.json")
    ]
    rows = [row for path in paths for row in records.full_rows(records.load(path))]
    if not rows:
        raise ValueError(f"measured:{names} wants rows of GPUs, there are none")
    *first, last = (NUMBERS[n] for n in sorted({row["num_devices"] for row in rows}))
    counts = f"{', '.join(first)} and {last}" if first else last
    return f"benchmarked on {counts} GPU{'s' * (counts != 'one')}"


def ratio(
    name: str,
    results: pathlib.Path,
    *,
    times: str,
    device: str = DEFAULT_DEVICE,
    cases: str = "*",
    **where: str,
) -> str:
    """The quotients of two implementations' times, from the least to the largest."""
    over, under = times.split("/")
    record = records.load(results / device / f"{name}.json")
    rows = comparison.chosen(record, f"{over},{under}", cases, where)
    found = [
        by_name[over]["time_us"] / by_name[under]["time_us"]
        for _, by_name in records.lines(rows)
        if over in by_name and under in by_name
    ]
    if not found:
        raise ValueError(f"ratio:{name} finds no case with {over} and {under}")
    least, largest = f"{min(found):.2f}", f"{max(found):.2f}"
    return least if least == largest else f"{least} to {largest}"


def accuracy_table(record: records.Record, *, cases: str = "*", **where: str) -> str:
    """The table of `pruned_speed` and where its numbers come from."""
    rows = comparison.chosen(record, "*", cases, where)
    table = pruned_speed.markdown(rows)
    return f"{table}\n\n{pruned_speed.CAPTION}. {comparison.source(rows)}\n"


def _record(path: pathlib.Path) -> records.Record | None:
    """A result file, or those that are joined under its name; None if not there."""
    if path.stem == pruned_speed.NAME:
        return pruned_speed.joined(path.parent)
    return records.load(path) if path.exists() else None


def fill(
    text: str,
    results: pathlib.Path,
    where: str = "text",
    history: staleness.History | None = None,
) -> str:
    """Replace the contents of every marked block of a document.

    Args:
        text: The document.
        results: The folder of results.
        where: The document's path.
        history: Decides which rows are marked as stale; None marks none.
    """

    def block(match: re.Match) -> str:
        options = dict(item.split("=", 1) for item in match["options"].split())
        device = options.pop("device", DEFAULT_DEVICE)
        pending = options.pop("pending", "no")
        name = f"{match['what']}:{match['name']}"
        if pending not in WITHOUT_ROWS:
            raise ValueError(
                f"{where}: {name}: pending={pending}, expected one of {[*WITHOUT_ROWS]}"
            )
        without = WITHOUT_ROWS[pending]
        if match["name"] == "headlines":
            docs = "" if where.startswith("docs/") else "docs/"
            made = headlines.markdown(results / device, docs, history)
            return f"{match['open']}\n{made}\n{match['close']}"
        if match["name"] == "estimates":
            made = estimates.markdown(results / device)
            return f"{match['open']}\n{made}\n{match['close']}"
        path = results / device / f"{match['name']}.json"
        record = _record(path)
        if record is None and without is not None:
            return f"{match['open']}{without}{match['close']}"
        if record is None:
            raise ValueError(f"{where}: {name} wants {path}, not there")
        if history is not None and match["what"] == "table":
            record = history.mark(record)
        try:
            if match["what"] == "plot":
                made = plots.link(path, depth=where.count("/"), **options)
            elif match["name"] == pruned_speed.NAME:
                made = accuracy_table(record, **options)
            else:
                made = comparison.markdown(record, **options)
        except (TypeError, ValueError) as error:
            if without is None or "no row has" not in str(error):
                raise ValueError(f"{where}: {name}: {error}") from error
            return f"{match['open']}{without}{match['close']}"
        return f"{match['open']}\n{made}\n{match['close']}"

    opened = len(re.findall("<!-- (?:table|plot):", text))
    closed = len(MARKER.findall(text))
    if opened != closed:
        raise ValueError(
            f"{where}: {opened} markers '<!-- table:NAME -->', {closed} with an end "
            "'<!-- /table -->' and a newline between"
        )

    def inline(match: re.Match) -> str:
        options = dict(item.split("=", 1) for item in match["options"].split())
        make = {"measured": measured, "ratio": ratio}[match["what"]]
        made = make(match["name"], results, **options)
        return f"{match['open']}{made}{match['close']}"

    return MARKER.sub(block, INLINE.sub(inline, text))


def documents(root: pathlib.Path) -> list[pathlib.Path]:
    """The files that may hold tables."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [
        path
        for path in found
        if path.exists() and "_build" not in path.relative_to(root).parts
    ]


def _unmarked(text: str) -> str:
    """A document without the marks of stale rows."""
    text = re.sub(rf"\n+{comparison.STALE_NOTE}\.", "", text)
    return text.replace(f" {comparison.STALE}", "")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish.tables")
    parser.add_argument("--check", action="store_true", help="change nothing")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT)
    parser.add_argument("--results", type=pathlib.Path, default=records.RESULTS)
    args = parser.parse_args(argv)
    stale, pages = [], ""
    history = staleness.history(args.root)
    for path in documents(args.root):
        old = path.read_text(encoding="utf-8")
        new = fill(old, args.results, str(path.relative_to(args.root)), history)
        pages += new
        if new == old or (args.check and history is None and new == _unmarked(old)):
            continue
        stale.append(str(path.relative_to(args.root)))
        if not args.check:
            path.write_text(new, encoding="utf-8")
    paths = set(args.results.glob("*/*.json"))
    paths |= {path.with_stem(pruned_speed.NAME) for path in paths}
    for path in sorted(paths):
        record = _record(path)
        if record is None:
            continue
        target = args.root / "docs" / plots.place(path)
        is_shown = plots.place(path).as_posix() in pages
        if plots.is_current(record, target) if is_shown else not target.exists():
            continue
        stale.append(str(target.relative_to(args.root)))
        if args.check:
            continue
        if is_shown:
            plots.draw(record, target)
        else:
            target.unlink()
    for name in stale:
        print(f"{'out of date' if args.check else 'wrote'}: {name}")
    if args.check and stale:
        print("run `make tables`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
