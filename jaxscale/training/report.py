"""One HTML file that tells what a run did: text, tables and interactive plots.

The file is self-contained (plotly's script is inlined), so it opens in a browser
without a network and can be mailed.
"""

import dataclasses
import html
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.observability.plots import plotly


_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1d2733; background: #fff;
       max-width: 960px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; margin-bottom: 1.5rem;
        font-size: .95rem; }
th, td { text-align: left; padding: .35rem .7rem; border-bottom: 1px solid #dde3ea; }
th { background: #f4f6f9; }
td.number { font-variant-numeric: tabular-nums; }
pre { background: #f4f6f9; padding: .8rem; white-space: pre-wrap; }
"""


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
    """Collects the parts of a page in order and writes them as one HTML file.

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
        """Text whose line breaks and spaces count, such as generated code."""
        self._parts.append(f"<pre>{html.escape(text)}</pre>")

    def table(
        self, columns: Sequence[str], rows: Sequence[Sequence[str | float]]
    ) -> None:
        """A table; numbers are shown with four significant digits.

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
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )

    def facts(self, facts: Mapping[str, str | float]) -> None:
        """A table of names and values."""
        self.table(["what", "value"], [[name, value] for name, value in facts.items()])

    def drawing(self, svg: str) -> None:
        """A picture; one that is wider than the page can be scrolled.

        Args:
            svg: The picture as an ``<svg>`` element, put into the page as it is.
        """
        self._parts.append(f"<div style='overflow-x: auto'>{svg}</div>")

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
            series: One color of bars each; `x` are their middles, `y` their heights.
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
            values: Rows of numbers from 0 (white) to 1.
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
        )
        figure = graph_objects.Figure([heatmap])
        self._figure(figure, x_title, y_title, yaxis_autorange="reversed")

    def _figure(self, figure: Any, x_title: str, y_title: str, **layout: Any) -> None:
        """Lay a figure out as all are, and append it."""
        figure.update_layout(
            template="plotly_white",
            height=380,
            margin={"l": 60, "r": 20, "t": 20, "b": 50},
            xaxis_title=x_title,
            yaxis_title=y_title,
            **layout,
        )
        # The script itself is 4.7 MB: it goes in once, before the first plot.
        self._parts.append(
            figure.to_html(full_html=False, include_plotlyjs=not self._has_plot)
        )
        self._has_plot = True

    def extend(self, other: "Report") -> None:
        """Append the parts of another report, whose title is dropped.

        Raises:
            ValueError: both have plots, and so both the script that draws them.
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


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return f"<td>{html.escape(value)}</td>"
    shown = f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"
    return f"<td class='number'>{shown}</td>"
