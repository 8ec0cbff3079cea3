"""The HTML page, and the plots on it."""

import base64
import re
import zlib
from typing import Any

import numpy as np
import pytest

from jaxscale.observability import svg_plots
from jaxscale.observability.html_report import Report


def test_parts_stand_in_order_and_need_no_script(tmp_path):
    details = Report("details")
    details.heading("Plots")
    loss, titles = ("loss", [1, 2], [3.0, 2.5]), {"x_title": "step", "y_title": "loss"}
    details.drawing(svg_plots.lines([loss], **titles))
    details.drawing(svg_plots.lines([loss], log_y=True, **titles))
    page = Report("A & B")
    page.headlines({"of <all>": "75%"})
    page.table(["step", "time"], [["train <fast>", 1234.5678]])
    page.facts({"a name": 3, "another": "value"})
    page.extend(details)
    text = page.write(tmp_path / "new" / "page.html").read_text()
    assert text.index("train &lt;fast&gt;") < text.index("<h2>Plots</h2>")
    assert "<title>A &amp; B</title>" in text and "1,235" in text
    assert "<b>75%</b><span>of &lt;all&gt;</span>" in text
    assert "<th>a name</th>" in text and "what" not in text.split("<body>")[1]
    assert text.count("<svg") == 2 and "<script" not in text
    assert "prefers-color-scheme: dark" in text
    assert "details" not in text.split("<h1>")[1].split("</h1>")[0]


def places(drawing):
    """The points of each line, in pixels."""
    found = re.findall(r"<polyline points='([^']+)'", drawing)
    return [np.array([p.split(",") for p in x.split()], float) for x in found]


@pytest.mark.parametrize("log", [False, True])
def test_lines_are_to_scale_and_marks_say_what_they_are(log):
    rng = np.random.default_rng(0)
    x, y = np.cumsum(rng.uniform(1, 5, 40)), 10 ** rng.uniform(-3, 2, 40)
    drawing = svg_plots.lines(
        [("a", x.tolist(), y.tolist())], x_title="s", y_title="n", log_y=log
    )
    (points,) = places(drawing)
    np.testing.assert_allclose(np.corrcoef(points[:, 0], x)[0, 1], 1, atol=1e-6)
    values = np.log10(y) if log else y
    np.testing.assert_allclose(np.corrcoef(points[:, 1], values)[0, 1], -1, atol=1e-4)
    slope, start = np.polyfit(points[:, 1], values, 1)
    marks = re.findall(
        r"y='([\d.]+)' text-anchor='end'>([^<]+)</text>", drawing.replace(",", "")
    )
    assert len(marks) >= 3
    for place, text in marks:
        value = float(text)
        expected = np.log10(value) if log else value
        assert slope * (float(place) - 4) + start == pytest.approx(
            expected, abs=0.01 * np.ptp(values)
        )


def test_gaps_long_runs_and_equal_values():
    y = [1.0, float("nan"), 2.0, 3.0, float("inf"), 4.0]
    options: dict[str, Any] = {"x_title": "x", "y_title": "y"}
    assert list(map(len, places(svg_plots.lines([("a", range(6), y)], **options)))) == [
        *(1, 2, 1)
    ]
    (few,) = places(svg_plots.lines([("a", range(10**5), [2.0] * 10**5)], **options))
    assert len(few) <= 1001 and len(set(few[:, 1])) == 1
    assert "<svg" in svg_plots.lines([("a", [], [])], **options)
    log = svg_plots.lines([("a", [1, 2, 3], [0.0, 1.0, 2.0])], log_y=True, **options)
    assert len(places(log)[0]) == 2


def test_bars_and_images_show_their_numbers(tmp_path):
    report = Report("r")
    bars = "tiles", [0.125, 0.375], [4321, 1234]
    report.drawing(svg_plots.bars([bars], x_title="rows kept", y_title="how many"))
    values = [[0.0, 0.5, 1.0], [1.0, 0.25, 0.0]]
    titles = {"x_title": "outputs", "y_title": "inputs"}
    report.drawing(svg_plots.image(values, shape=(128, 384), **titles))
    text = report.write(tmp_path / "page.html").read_text()
    heights = re.findall(
        r"<rect x='[\d.]+' y='[\d.]+' width='[\d.]+' height='([\d.]+)'", text
    )
    assert float(heights[0]) / float(heights[1]) == pytest.approx(4321 / 1234, rel=0.01)
    assert "tiles: 4,321 at 0.125" in text and "how many" in text
    image = base64.b64decode(re.findall(r"base64,([^']+)'", text)[0])
    data = image[image.index(b"IDAT") + 4 : image.index(b"IEND") - 8]
    rows = np.frombuffer(zlib.decompress(data), np.uint8).reshape(2, 10)[:, 1:]
    colors = rows.reshape(2, 3, 3)
    assert (colors[0, 0] == 255).all() and (colors[0, 2] == (8, 72, 140)).all()
    assert (np.diff(colors[0].astype(int), axis=0) < 0).all()
    # The axes count weights, not points.
    marks = re.findall(
        r"text-anchor='(\w+)'>(\d+)</text>", text.split("<image")[0][-4000:]
    )
    assert ("middle", "300") in marks and ("end", "100") in marks


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="must have 2 cells"):
        Report("r").table(["a", "b"], [["only one"]])
