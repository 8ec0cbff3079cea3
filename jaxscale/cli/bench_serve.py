"""``jaxscale bench-serve --url URL``: benchmark a server under load."""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxscale.cli.errors import UsageError, usage_errors
from jaxscale.cli.options import parse
from jaxscale.inference.load.loadgen import LoadConfig, Outcome, run, summarize
from jaxscale.inference.load.server_trace import server_trace


_KEY = "OPENAI_API_KEY"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchServeConfig(LoadConfig):
    """The workload of ``jaxscale bench-serve``, and the files for its results."""

    output: str | None = None
    """JSON file for the summary metrics and the record of each request."""
    report: str | None = None
    """HTML file with the metrics and plots."""
    trace: str | None = None
    """JSON file for a timeline of the engine under this load, for
    https://ui.perfetto.dev; the server must be ours, started with --allow-trace."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Returns:
        0, or 1 if a request was not answered.

    Raises:
        UsageError: no server answers, or it cannot be benchmarked.
    """
    config = parse(
        BenchServeConfig,
        arguments,
        prog="jaxscale bench-serve",
        description="Benchmark any OpenAI-compatible server under load. The API "
        f"key is read from the environment variable {_KEY}.",
    )
    key = os.environ.get(_KEY)
    recorded = contextlib.nullcontext()
    if config.trace is not None:
        recorded = server_trace(config.url, config.trace, key)
    try:
        with usage_errors(), recorded:
            outcomes = run(config, api_key=key)
    except ConnectionError as error:
        raise UsageError(str(error)) from error
    figures = summarize(outcomes, config)
    print(_table(figures))
    problems = sorted({o.error for o in outcomes if o.error is not None})
    for problem in problems[:5]:
        print(f"failed: {problem}")
    if config.output is not None:
        _write_json(Path(config.output), config, figures, outcomes)
    if config.report is not None:
        _write_report(config.report, config, figures, outcomes)
    return int(bool(problems))


def _table(figures: Mapping[str, float | int]) -> str:
    width = max(map(len, figures))
    return "\n".join(
        f"{name:{width}}  {value:,}"
        if isinstance(value, int)
        else f"{name:{width}}  {value:,.2f}"
        for name, value in figures.items()
    )


def _write_json(
    path: Path,
    config: BenchServeConfig,
    figures: Mapping[str, float | int],
    outcomes: Sequence[Outcome],
) -> None:
    # JSON has neither infinity nor NaN.
    finite = {n: v if math.isfinite(v) else None for n, v in figures.items()}
    settings = {
        name: "inf" if value == math.inf else value
        for name, value in dataclasses.asdict(config).items()
    }
    requests = [dataclasses.asdict(outcome) for outcome in outcomes]
    record = {"settings": settings, "figures": finite, "requests": requests}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def _write_report(
    path: str,
    config: BenchServeConfig,
    figures: Mapping[str, float | int],
    outcomes: Sequence[Outcome],
) -> None:
    from jaxscale.observability import svg_plots
    from jaxscale.observability.html_report import Report

    page = Report(f"Load of {config.workload} on {config.url}")
    page.facts(dict(figures))
    done = [outcome for outcome in outcomes if outcome.error is None]
    for title, values in (
        ("Time to the first token", [1e3 * o.ttft for o in done]),
        ("Time a token after the first", [1e3 * o.tpot for o in done]),
        ("Gap between events", [1e3 * gap for o in done for gap in o.gaps]),
        ("Latency", [1e3 * o.latency for o in done]),
    ):
        if not values:
            continue
        page.heading(title)
        shares = [100 * (i + 1) / len(values) for i in range(len(values))]
        line = title, sorted(values), shares
        y_title = "% of values up to this"
        page.drawing(svg_plots.lines([line], x_title="ms", y_title=y_title))
    steps = sorted([(o.sent, 1) for o in done] + [(o.events[-1], -1) for o in done])
    times, running, now = [], [], 0
    for at, step in steps:
        now += step
        times.append(at)
        running.append(now)
    if times:
        page.heading("Requests under way")
        line = "requests", times, running
        page.drawing(svg_plots.lines([line], x_title="s", y_title="requests"))
    page.write(path)
