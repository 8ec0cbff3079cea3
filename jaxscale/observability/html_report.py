"""A self-contained HTML report: text, tables and interactive plots.

Plotly's script is inlined, so the file opens in a browser without a network and can be
mailed.
"""

import dataclasses
import html
import importlib
import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

from jaxscale.checks import pip_install


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
pre { background: #f4f6f9; padding: .8rem; white-space: pre-wrap; }
@media (max-width: 600px) {
  table { font-size: .8rem; } th, td { padding: .3rem .4rem; }
}
"""
_COLORS = ("#3f83c7", "#d9822b", "#4f9d49", "#8b7bb5", "#c0504d", "#5b6876")


def plotly(module: str) -> ModuleType:
    """A module of plotly, such as ``graph_objects``.

    Raises:
        ImportError: plotly is missing; the message names the extra.
    """
    try:
        return importlib.import_module(f"plotly.{module}")
    except ImportError as error:
        raise ImportError(
            f"plots need plotly; install it with: {pip_install('train')}"
        ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a plot."""

    name: str
    """Label in the legend."""
    x: Sequence[float]
    """Horizontal positions."""
    y: Sequence[float]
    """Values, as many as `x`."""

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(
                f"series {self.name!r} has {len(self.x)} x and {len(self.y)} y values"
            )


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
        self._has_plot = False

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
        *,
        folded: str | None = None,
    ) -> None:
        """A table; numbers are shown with four significant digits.

        Args:
            columns: Heads of the columns.
            rows: Cells of each row.
            folded: Summary line that unfolds the table; None shows the table.

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
        table = (
            f"<div class='wide'><table><thead><tr>{head}</tr></thead>"
            f"<tbody>{body}</tbody></table></div>"
        )
        if folded is not None:
            line = f"<summary>{html.escape(folded)}</summary>"
            table = f"<details>{line}{table}</details>"
        self._parts.append(table)

    def facts(
        self, facts: Mapping[str, str | float], *, folded: str | None = None
    ) -> None:
        """A table of names and values, as `table` shows one."""
        rows = [[name, value] for name, value in facts.items()]
        self.table(["what", "value"], rows, folded=folded)

    def drawing(self, svg: str) -> None:
        """A picture; if wider than the page, it can be scrolled.

        Args:
            svg: The picture as an ``<svg>`` element, put into the page as it is.
        """
        self._parts.append(f"<div class='wide'>{svg}</div>")

    def plot(
        self,
        series: Sequence[Series],
        *,
        x_title: str,
        y_title: str,
        log_y: bool = False,
    ) -> None:
        """An interactive line plot.

        Args:
            series: The lines.
            x_title: Title of the horizontal axis, with the unit.
            y_title: Title of the vertical axis, with the unit.
            log_y: True makes the vertical axis logarithmic.

        Raises:
            ImportError: plotly is missing; the message names the extra.
        """
        graph_objects = plotly("graph_objects")
        figure = graph_objects.Figure(
            [
                graph_objects.Scatter(x=list(s.x), y=list(s.y), name=s.name)
                for s in series
            ]
        )
        self._figure(
            figure,
            x_title,
            y_title,
            yaxis_type="log" if log_y else "linear",
            showlegend=len(series) > 1,
            hovermode="x unified",
        )

    def bars(self, series: Sequence[Series], *, x_title: str, y_title: str) -> None:
        """An interactive bar chart, for example a histogram.

        Args:
            series: One color of bars each; `x` are their centers, `y` their heights.
            x_title: Title of the horizontal axis, with the unit.
            y_title: Title of the vertical axis, with the unit.

        Raises:
            ImportError: plotly is missing; the message names the extra.
        """
        graph_objects = plotly("graph_objects")
        figure = graph_objects.Figure(
            [graph_objects.Bar(x=list(s.x), y=list(s.y), name=s.name) for s in series]
        )
        self._figure(figure, x_title, y_title, showlegend=len(series) > 1)

    def image(
        self, values: Sequence[Sequence[float]], *, x_title: str, y_title: str
    ) -> None:
        """An interactive image in shades of one color, its first row on top.

        Args:
            values: Rows of kept fractions, from 0 (white) to 1.
            x_title: Title of the columns.
            y_title: Title of the rows.

        Raises:
            ImportError: plotly is missing; the message names the extra.
        """
        graph_objects = plotly("graph_objects")
        heatmap = graph_objects.Heatmap(
            z=[[round(float(v), 3) for v in row] for row in values],
            zmin=0,
            zmax=1,
            colorscale="Blues",
            colorbar={"thickness": 12, "title": {"text": "kept", "side": "right"}},
        )
        figure = graph_objects.Figure([heatmap])
        self._figure(figure, x_title, y_title, yaxis_autorange="reversed")

    def _figure(self, figure: Any, x_title: str, y_title: str, **layout: Any) -> None:
        """Apply the common layout to a figure, and append it."""
        figure.update_layout(
            template="plotly_white",
            height=340,
            margin={"l": 60, "r": 20, "t": 30, "b": 50},
            font={"family": "system-ui, sans-serif", "color": "#1d2733"},
            colorway=_COLORS,
            legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
            xaxis_title=x_title,
            yaxis_title=y_title,
            **layout,
        )
        # The script itself is 4.7 MB: it goes in once, before the first plot.
        self._parts.append(
            figure.to_html(
                full_html=False,
                include_plotlyjs=not self._has_plot,
                config={"displayModeBar": False, "responsive": True},
            )
        )
        self._has_plot = True

    def extend(self, other: "Report") -> None:
        """Append the parts of another report, whose title is dropped.

        Raises:
            ValueError: both have plots, and so both contain plotly's script.
        """
        if self._has_plot and other._has_plot:
            raise ValueError("only one of two joined reports may have plots")
        self._parts += other._parts
        self._has_plot |= other._has_plot

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
        ("loss (nats a token)", {"loss": "training", "eval_loss": "held out"}),
        ("learning rate", {"lr": "learning rate"}),
        ("norm of the gradients", {"grad_norm": "before they are clipped"}),
        ("tokens/s a device", {"tokens_per_second_per_device": "throughput"}),
    ):
        series = []
        for name, label in names.items():
            known = [r for r in records if r.get(name) is not None]
            x, y = [r["step"] for r in known], [r[name] for r in known]
            if known:
                series.append(Series(name=label, x=x, y=y))
        if series:
            report.plot(series, x_title="step", y_title=y_title)


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        kind = "short" if len(value) < 12 else "long" if len(value) > 30 else None
        return f"<td{f' class={kind!r}' if kind else ''}>{html.escape(value)}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"<td class='number'>{shown}</td>"
