"""The HTML page."""

import re

import pytest

from jaxscale.observability.html_report import Report, Series


def line(name="loss"):
    return Series(name=name, x=[1, 2, 3], y=[3.0, 2.5, 2.25])


def test_parts_stand_in_order_and_the_script_once(tmp_path):
    details = Report("details")
    details.heading("Plots")
    details.plot([line()], x_title="step", y_title="loss")
    details.plot([line("other")], x_title="step", y_title="loss", log_y=True)
    page = Report("A & B")
    page.table(["step", "time"], [["train <fast>", 1234.5678]])
    page.extend(details)
    text = page.write(tmp_path / "new" / "page.html").read_text()
    assert text.index("train &lt;fast&gt;") < text.index("<h2>Plots</h2>")
    assert "<title>A &amp; B</title>" in text and "1,235" in text
    assert text.count("plotly.js v") == 1
    assert len(re.findall(r"Plotly\.newPlot\(\s*\"", text)) == 2
    assert "details" not in text.split("<h1>")[1].split("</h1>")[0]


def test_bars_and_images_show_their_numbers(tmp_path):
    report = Report("r")
    bars = Series(name="tiles", x=[0.125, 0.375], y=[4321, 1234])
    report.bars([bars], x_title="rows kept", y_title="how many")
    report.image([[0.0, 0.123456], [1.0, 0.5]], x_title="outputs", y_title="inputs")
    text = report.write(tmp_path / "page.html").read_text()
    assert '"type":"bar"' in text and '"type":"heatmap"' in text
    assert "[0.125,0.375]" in text and "[4321,1234]" in text and "how many" in text
    assert "[[0.0,0.123],[1.0,0.5]]" in text and '"autorange":"reversed"' in text


def test_two_reports_with_plots_are_not_joined():
    first, second = Report("1"), Report("2")
    for report in (first, second):
        report.plot([line()], x_title="step", y_title="loss")
    with pytest.raises(ValueError, match="only one of two"):
        first.extend(second)


def test_what_does_not_fit_is_an_error():
    with pytest.raises(ValueError, match="must have 2 cells"):
        Report("r").table(["a", "b"], [["only one"]])
    with pytest.raises(ValueError, match="3 x and 1 y"):
        Series(name="loss", x=[1, 2, 3], y=[1.0])
