"""One HTML file that tells what a run did: text, tables and plots.

The file is self-contained and small: plots are SVG elements, so it opens in a browser
without a network and can be mailed.
"""

import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.observability import svg_plots


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
       max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
.wide { overflow-x: auto; margin-bottom: 1.5rem; }
table { border-collapse: collapse; width: 100%; font-size: .95rem; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid #dde3ea;
         overflow-wrap: break-word; }
th { background: #f4f6f9; }
td.number { font-variant-numeric: tabular-nums; }
.number, .short { white-space: nowrap; } .long { overflow-wrap: anywhere; }
.facts { width: auto; } .facts th { font-weight: normal; }
.headlines { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1.5rem 0; }
.headlines div { flex: 1 1 14rem; background: #f4f6f9; padding: 1rem 1.2rem; }
.headlines b { display: block; font-size: 2rem; line-height: 1.2; }
.plot { max-width: 100%; height: auto; min-width: 560px; }
pre { background: #f4f6f9; padding: .8rem; white-space: pre-wrap; }
@media (max-width: 600px) {
  table { font-size: .8rem; } th, td { padding: .3rem .4rem; }
}
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; } body { color: #dde3ea; background: #14181d; }
  th, .headlines div, pre { background: #232a32; } th, td { border-color: #37414c; }
  .plot { fill: currentColor; } .plot line { stroke-opacity: .25; }
  svg:not(.plot) { background: #fff; }
}
"""


class Report:
    """Collect the parts of a page in order, and write them as one HTML file.

    Example:
        >>> import tempfile
        >>> report = Report("A run")
        >>> report.heading("Loss")
        >>> report.table(["step", "loss"], [[1, 2.5], [2, 2.25]])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     page = report.write(folder + "/report.html").read_text()
        >>> "2.25" in page
        True
    """

    def __init__(self, title: str) -> None:
        self._title = title
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """A heading over what follows."""
        self._parts.append(f"<h2>{html.escape(text)}</h2>")

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{html.escape(text)}</p>")

    def sample(self, text: str) -> None:
        """Preformatted text, such as generated code."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str | float]],
    ) -> None:
        """A table; numbers are shown with four significant digits.

        Args:
            columns: Heads of the columns.
            rows: Cells of each row.

        Raises:
            ValueError: a row has another number of cells than there are columns.
        """
        for row in rows:
            if len(row) != len(columns):
                raise ValueError(f"row {list(row)} must have {len(columns)} cells")
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>" + "".join(_cell(value) for value in row) + "</tr>" for row in rows
        )
        self._parts.append(
            f"<div class='wide'><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )

    def headlines(self, figures: Mapping[str, str]) -> None:
        """Large figures beside each other, each with what it is under it.

        Args:
            figures: The figures by their descriptions.
        """
        boxes = "".join(
            f"<div><b>{html.escape(figure)}</b><span>{html.escape(about)}</span></div>"
            for about, figure in figures.items()
        )
        self._parts.append(f"<div class='headlines'>{boxes}</div>")

    def facts(
        self, facts: Mapping[str, str | float], *, folded: str | None = None
    ) -> None:
        """A list of names and values, as wide as they are.

        Args:
            facts: Values by their names.
            folded: A line that shows the list when it is clicked; None shows it.
        """
        rows = "".join(
            f"<tr><th>{html.escape(name)}</th>{_cell(value)}</tr>"
            for name, value in facts.items()
        )
        table = f"<div class='wide'><table class='facts'>{rows}</table></div>"
        if folded is not None:
            line = html.escape(folded)
            table = f"<details><summary>{line}</summary>{table}</details>"
        self._parts.append(table)

    def drawing(self, svg: str) -> None:
        """An ``<svg>`` element, such as one of `svg_plots`, put into the page as it is.

        If wider than the page, it can be scrolled.
        """
        self._parts.append(f"<div class='wide'>{svg}</div>")

    def extend(self, other: "Report") -> None:
        """Append the parts of another report, whose title is dropped."""
        self._parts += other._parts

    def write(self, path: str | pathlib.Path) -> pathlib.Path:
        """Write the page to `path`, making its folder; returns the path."""
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        title = html.escape(self._title)
        path.write_text(
            "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>"
            f"<title>{title}</title><style>{_STYLE}</style></head>\n"
            f"<body><h1>{title}</h1>\n" + "\n".join(self._parts) + "\n</body></html>\n",
            encoding="utf-8",
        )
        return path


def add_steps(report: Report, records: Sequence[Mapping[str, Any]]) -> None:
    """Plots of a training: losses, learning rate, norm of the gradients, speed.

    Args:
        report: The report to add plots to.
        records: The lines of ``metrics.jsonl``.

    Example:
        >>> report = Report("A run")
        >>> add_steps(report, [{"step": 1, "loss": 2.5}, {"step": 1, "eval_loss": 2.6}])
    """
    for y_title, names in (
        ("loss (nats/token)", {"loss": "training", "eval_loss": "held out"}),
        ("learning rate", {"lr": "learning rate"}),
        ("norm of the gradients", {"grad_norm": "before they are clipped"}),
        ("tokens/s per device", {"tokens_per_second_per_device": "throughput"}),
    ):
        series = []
        for name, label in names.items():
            known = [r for r in records if r.get(name) is not None]
            if known:
                values = [r[name] for r in known]
                series.append((label, [r["step"] for r in known], values))
        if series:
            plot = svg_plots.lines(series, x_title="step", y_title=y_title)
            report.drawing(plot)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        kind = "short" if len(value) < 12 else "long" if len(value) > 30 else None
        return f"<td{f' class={kind!r}' if kind else ''}>{html.escape(value)}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"<td class='number'>{shown}</td>"
