"""Plots of the result files, as SVG under ``docs/_static/plots``.

Each carries a digest of the results that it shows, by which `benchmarks.publish.tables`
sees whether it is current: the drawing itself differs between versions of matplotlib.
"""

import hashlib
import io
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.measure import records
from benchmarks.publish import pruned_speed


def place(path: pathlib.Path) -> pathlib.Path:
    """Where the plot of a result file lies, under ``docs``."""
    return pathlib.Path("_static", "plots", f"{path.parent.name}_{path.stem}.svg")


def link(path: pathlib.Path, *, depth: int, alt: str = "Measured") -> str:
    """Markdown that shows the plot of a result file.

    Args:
        path: The result file.
        depth: How many folders down the document is, of which the first is ``docs``.
        alt: What the plot shows, with underscores for spaces.
    """
    start = "docs/" if depth == 0 else "../" * (depth - 1)
    return f"![{alt.replace('_', ' ')}]({start}{place(path)})\n"


def digest(record: records.Record) -> str:
    """Tells the measurements of one result file from those of another."""
    shown = [
        [row[key] for key in ("case", "params", "implementation", "time_us", "metrics")]
        for row in record["rows"]
    ]
    text = json.dumps([record["benchmark"], record["device"], shown], sort_keys=True)
    return f"results {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def is_current(record: records.Record, path: pathlib.Path) -> bool:
    """Whether the plot shows these results."""
    return path.exists() and digest(record) in path.read_text(encoding="utf-8")


DARK = (
    "@media (prefers-color-scheme:dark){"
    'path[style*="fill: #ffffff"]{fill:#14181e!important}'
    '[style*="stroke: #000000"]{stroke:#e6e9ee!important}'
    "text{fill:#e6e9ee}}"
)
"""Ground, axes and words of a plot where pages are dark."""


def draw(record: records.Record, path: pathlib.Path) -> None:
    """Draw a result file: as bars, unless `SHAPES` has a form for the benchmark."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    # Without these the file would differ at every run.
    with mpl.rc_context({"svg.hashsalt": "jaxscale", "svg.fonttype": "none"}):
        figure = Figure(layout="constrained")  # keeps titles off the panels
        SHAPES.get(record["benchmark"], _bars)(figure, record)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": digest(record)}
        made = io.StringIO()
        figure.savefig(made, format="svg", metadata=metadata)
    text = made.getvalue().replace("</style>", f"{DARK}</style>", 1)
    path.write_text(text, encoding="utf-8")


UNITS = {
    "kernels": "kernels of a layer",
    "speedup": "times as fast as XLA's collective and matmul",
    "tflops": "TFLOP/s",
    "tokens_per_second": "tokens per second",
}
"""What a bar is as long as, in words."""

BAR_METRICS = {"tensor_parallel_block": "speedup"}
"""Metrics of benchmarks whose first one is a rate that differs much between cases."""


def _bars(figure: Any, record: records.Record) -> None:
    """A group of bars for each case, downwards, as pages are narrow and long.

    Their length is the metric of the table, or else the time.
    """
    rows = records.full_rows(record)
    metric = BAR_METRICS.get(record["benchmark"]) or records.default_metric(rows)
    names = records.ordered(row["implementation"] for row in rows)
    lines = list(records.lines(rows))
    labels = _labels([first for first, _ in lines])
    width = 0.8 / len(names)
    figure.set_size_inches(7.0, 1.2 + len(lines) * (0.14 + 0.1 * len(names)))
    axes = figure.subplots()
    for i, name in enumerate(names):
        points = [
            (y + (i - (len(names) - 1) / 2) * width, by_name[name])
            for y, (_, by_name) in enumerate(lines)
            if name in by_name
        ]
        lengths = [
            row["metrics"][metric] if metric else row["time_us"] for _, row in points
        ]
        axes.barh([y for y, _ in points], lengths, width, label=name)
    axes.set_yticks(range(len(lines)), labels, fontsize=8)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlabel(UNITS.get(metric, metric) if metric else "time in us")
    axes.grid(axis="x", alpha=0.3)
    figure.suptitle(_title(record))
    _legend(figure)


def _title(record: records.Record) -> str:
    return f"{record['benchmark'].replace('_', ' ')}, {record['device']}"


def _legend(figure: Any) -> None:
    """One for all panels, below them, where it covers no curve."""
    found: dict[str, Any] = {}
    for panel in figure.axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    columns = max(1, int(figure.get_figwidth() / 1.9))
    figure.legend(
        found.values(),
        found.keys(),
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
    )


STAR = "E*, share of the possible gain"
"""The axis of `_overlap`."""


def _overlap(figure: Any, record: records.Record) -> None:
    """What our kernel gains of what it could, against the rows, a line for each layer.

    One row of panels for each number of devices, one column for each way of
    communicating. From -1 to 1 the scale is linear, beyond it logarithmic.
    """
    rows = [row for row in record["rows"] if row["implementation"] == "mosaic_gpu"]
    sizes = sorted({row["params"]["tp"] for row in rows}, reverse=True)
    kinds = records.ordered(row["params"]["kind"] for row in rows)
    colors = {
        case: f"C{i}" for i, case in enumerate(records.ordered(r["case"] for r in rows))
    }
    figure.set_size_inches(1 + 4.2 * len(kinds), 1.6 + 3.2 * len(sizes))
    axes = figure.subplots(len(sizes), len(kinds), squeeze=False)
    for line, tp in enumerate(sizes):
        for column, kind in enumerate(kinds):
            here = [r for r in rows if r["params"]["tp"] == tp]
            here = [r for r in here if r["params"]["kind"] == kind]
            _curves(axes[line][column], here, colors)
            axes[line][column].set_title(f"{kind}, {tp} GPUs", fontsize=10)
    figure.suptitle(
        f"{_title(record)}. E*: 1 is the time of the longer of matmul and transfer,\n"
        "0 that of XLA, which does one after the other",
        fontsize=11,
    )
    _legend(figure)


def _curves(panel: Any, rows: Sequence[records.Record], colors: dict[str, str]) -> None:
    every = sorted({row["params"]["M"] for row in rows})
    metric, lowest = "overlap_efficiency_star", 0.0
    for case in records.ordered(row["case"] for row in rows):
        points = sorted(
            (row["params"]["M"], row["metrics"][metric])
            for row in rows
            if row["case"] == case and metric in row["metrics"]
        )
        x, y = [m for m, _ in points], [value for _, value in points]
        lowest = min([lowest, *y])
        panel.plot(x, y, marker="o", markersize=3, label=case, color=colors[case])
    panel.set_xscale("log", base=2)
    panel.set_xticks(every, [str(m) for m in every], fontsize=8)
    panel.set_yscale("symlog", linthresh=1)
    panel.set_ylim(lowest - 0.05, 1.05)
    ticks = [y for y in (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1) if y >= lowest]
    panel.set_yticks(ticks, [str(y) for y in ticks], fontsize=8)
    panel.axhline(0, color="black", linewidth=0.8)
    panel.axhline(1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlabel("M, rows of all devices", fontsize=8)
    panel.set_ylabel(STAR, fontsize=8)
    panel.grid(alpha=0.3)


def _attention(figure: Any, record: records.Record) -> None:
    """Rate against length, or time where lengths differ, and what packing saves.

    The savings are over cuDNN on a padded batch, against the share of its padding.
    """
    rows = record["rows"]
    dense = [r for r in rows if r["case"].startswith("dense_")]
    bert = [r for r in rows if r["case"].startswith("bert_base_b16_")]
    kinds = records.ordered(
        (r["params"]["pass"], r["params"]["head_dim"], r["params"]["causal"])
        for r in dense
    )
    passes = records.ordered(r["params"]["pass"] for r in rows)
    panels = len(kinds) + 2 * len(passes)
    width = min(2, panels)
    figure.set_size_inches(4.4 * width, 1 + 2.8 * -(-panels // width))
    flat = iter(figure.subplots(-(-panels // width), width, squeeze=False).flat)
    colors = _colors(rows)
    for kind in sorted(kinds):
        what, head_dim, causal = kind
        here = [
            r
            for r in dense
            if tuple(r["params"][x] for x in ("pass", "head_dim", "causal")) == kind
        ]
        panel = next(flat)
        _against_length(panel, here, colors, lambda r: r["metrics"]["tflops"])
        panel.set_title(f"{what}, D{head_dim}, {'causal' if causal else 'full'}")
        panel.set_ylabel("TFLOP/s")
    for what in passes:
        panel = next(flat)
        here = [r for r in bert if r["params"]["pass"] == what]
        _against_length(panel, here, colors, lambda r: r["time_us"])
        panel.set_yscale("log")
        panel.set_title(f"{what}, BERT-base, batch 16")
        panel.set_ylabel("us")
    for what in passes:
        panel = next(flat)
        here = [r for r in rows if r["params"]["pass"] == what]
        _savings(panel, here, "mosaic_gpu", ("cudnn_padded",))
        panel.set_title(f"{what}, share of time saved")
    for panel in flat:
        panel.set_visible(False)
    figure.suptitle(_title(record))
    _legend(figure)


BATCH = 16
"""Sequences of a batch in ByteTransformer's figures, and in `_encoders`."""


def _encoders(figure: Any, record: records.Record) -> None:
    """Time against length for each model, and what packing saves at all batches."""
    rows = record["rows"]
    kinds = records.ordered((r["params"]["model"], r["params"]["batch"]) for r in rows)
    kinds = [kind for kind in kinds if kind[1] == BATCH]
    width = min(2, len(kinds) + 1)
    lines = -(-(len(kinds) + 1) // width)
    figure.set_size_inches(4.4 * width, 1 + 2.8 * lines)
    flat = iter(figure.subplots(lines, width, squeeze=False).flat)
    colors = _colors(rows)
    for model, batch in sorted(kinds):
        here = [r for r in rows if r["params"]["model"] == model]
        here = [r for r in here if r["params"]["batch"] == batch]
        panel = next(flat)
        _against_length(panel, here, colors, lambda r: r["time_us"] / 1e3)
        panel.set_yscale("log")
        panel.set_title(f"{model}, batch {batch}")
        panel.set_ylabel("ms")
    panel = next(flat)
    _savings(panel, rows, "jaxscale", ("jax_padded", "torch_compile"))
    panel.set_title("share of time saved")
    for panel in flat:
        panel.set_visible(False)
    figure.suptitle(_title(record))
    _legend(figure)


def _colors(rows: Sequence[records.Record]) -> dict[str, str]:
    names = records.ordered(row["implementation"] for row in rows)
    return {name: f"C{i}" for i, name in enumerate(names)}


def _against_length(
    panel: Any, rows: Sequence[records.Record], colors: dict[str, str], value: Any
) -> None:
    """A line for each implementation."""
    for name in records.ordered(row["implementation"] for row in rows):
        points = sorted(
            (row["params"]["max_len"], value(row))
            for row in rows
            if row["implementation"] == name
        )
        x, y = zip(*points, strict=True)
        panel.plot(x, y, marker="o", markersize=3, label=name, color=colors[name])
    every = sorted({row["params"]["max_len"] for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(every, [str(n) for n in every], fontsize=7)
    panel.minorticks_off()
    panel.set_xlabel("longest sequence", fontsize=8)
    panel.grid(alpha=0.3)


def _savings(
    panel: Any, rows: Sequence[records.Record], ours: str, rivals: Sequence[str]
) -> None:
    """The share of a baseline's time that ours saves, against the share of padding."""
    for rival in rivals:
        points = []
        for first, by_name in records.lines(rows):
            p = first["params"]
            if ours in by_name and rival in by_name and p["tokens"]:
                padding = 1 - p["tokens"] / (p["batch"] * p["max_len"])
                ratio = by_name[ours]["time_us"] / by_name[rival]["time_us"]
                points.append((padding, 1 - ratio))
        label = f"beside {rival}"
        panel.scatter(*(list(zip(*points, strict=True)) or ((), ())), s=8, label=label)
    panel.axline((0, 0), slope=1, color="black", linewidth=0.8, linestyle=":")
    panel.set_xlim(0, 1)
    panel.set_ylim(-1, 1)
    panel.set_xlabel("share of padding", fontsize=8)
    panel.grid(alpha=0.3)


def _pruned(figure: Any, record: records.Record) -> None:
    """Speed-up against bits per byte."""
    pruned_speed.draw(figure, record["rows"])
    figure.suptitle(f"Pruned layers, {record['device']}")
    _legend(figure)


OTHER_SCORES = ("_magnitude", "_wanda", "_sparsegpt", "_distilled")
"""Ends of the names that stand in tables alone, for patterns that are drawn already."""


def _accuracy(figure: Any, record: records.Record) -> None:
    """Bits per byte lost against sparsity by pattern: mean and range of seeds.

    Each against the dense model of its own run.
    """
    found: dict[str, dict[float, list[float]]] = {}
    for row in record["rows"]:
        name = row["implementation"]
        if name == "dense" or name.endswith(OTHER_SCORES):
            continue
        by_sparsity = found.setdefault(name, {})
        values = by_sparsity.setdefault(100 * row["params"]["sparsity"], [])
        values.append(row["metrics"]["bits_lost"])
    figure.set_size_inches(7.0, 5.5)
    axes = figure.subplots()
    for name, by_sparsity in found.items():
        x = sorted(by_sparsity)
        means = [sum(by_sparsity[s]) / len(by_sparsity[s]) for s in x]
        below = [mean - min(by_sparsity[s]) for s, mean in zip(x, means, strict=True)]
        above = [max(by_sparsity[s]) - mean for s, mean in zip(x, means, strict=True)]
        axes.errorbar(x, means, (below, above), fmt="o-", capsize=3, label=name)
    axes.set_yscale("symlog", linthresh=0.01)
    axes.set_xlabel("pruned, %")
    axes.set_ylabel("held-out bits per byte lost")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)


LEARNERS = {
    "blocks and windows": ("serial", "parallel", "window", "parallel_window"),
    "4 times the batch": ("serial", "lamb_4x", "adamw_4x"),
}
"""Curves of `benchmarks.convergence` that are compared."""


def _learning(figure: Any, record: records.Record) -> None:
    """Held-out bits per byte against bytes read: mean and range of the seeds.

    The last three quarters of the bytes: before them all curves fall alike.
    """
    drawn = {name for names in LEARNERS.values() for name in names}
    rows = [
        row
        for row in record["rows"]
        if "tokens" in row["params"] and row["implementation"] in drawn
    ]
    cases = records.ordered(row["case"] for row in rows)
    figure.set_size_inches(5.2 * len(LEARNERS), 3.8 * len(cases))
    axes = figure.subplots(len(cases), len(LEARNERS), squeeze=False)
    colors = _colors(rows)
    for line, case in enumerate(cases):
        here = [row for row in rows if row["case"] == case]
        end = max(row["params"]["tokens"] for row in here)
        for panel, (title, names) in zip(axes[line], LEARNERS.items(), strict=True):
            for name in (n for n in names if n in colors):
                found: dict[int, list[float]] = {}
                for row in here:
                    read = row["params"]["tokens"]
                    if row["implementation"] == name and 4 * read >= end:
                        bits = row["metrics"]["bits_per_byte"]
                        found.setdefault(read, []).append(bits)
                x = sorted(found)
                means = [sum(found[read]) / len(found[read]) for read in x]
                low, high = ([f(found[r]) for r in x] for f in (min, max))
                panel.plot(x, means, label=name, color=colors[name])
                panel.fill_between(x, low, high, color=colors[name], alpha=0.2, lw=0)
            panel.set_title(f"{case}: {title}", fontsize=10)
            panel.set_xlabel("bytes read")
            panel.set_ylabel("held-out bits per byte")
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)


SHORT_MS = 0.05
"""Spans of `_requests` that are not drawn one by one, together ``others``."""


def _requests(figure: Any, record: records.Record) -> None:
    """Three bars for each request: pieces of the call, what XLA names of it, the GPU.

    The pieces follow each other as they are drawn. What XLA names lies anywhere within
    the pieces ``call`` and ``wait``, and gaps lie between kernels: such spans are drawn
    by their sums, the longest first.
    """
    import matplotlib as mpl

    rows, palette = record["rows"], mpl.color_sequences["tab20"]
    figure.set_size_inches(7.5, 1.6 + 1.35 * len(rows))
    colors: dict[str, Any] = {"kernels": "0.5", "gaps": "0.85"}
    for panel, row in zip(
        figure.subplots(len(rows), squeeze=False).flat, rows, strict=True
    ):
        params, ms = row["params"], {k: x / 1e3 for k, x in row["metrics"].items()}
        pieces = [
            (key[: -len("_us")], ms[key])
            for key in ("plan_us", "write_us", "call_us", "wait_us", "read_us")
        ]
        named = sorted(
            (
                (key.removeprefix("host "), time)
                for key, time in ms.items()
                if key.startswith("host ") and key != "host call"
            ),
            key=lambda one: -one[1],
        )
        long = [one for one in named if one[1] >= SHORT_MS]
        long += [("others", sum(time for _, time in named[len(long) :]))]
        gpu = [("kernels", ms.get("kernel_us", 0)), ("gaps", ms.get("gap_us", 0))]
        begin = ms["plan_us"] + ms["write_us"]
        bars = (0.0, pieces), (begin, long), (ms.get("before_gpu_us", 0.0), gpu)
        for y, (left, spans) in enumerate(bars):
            for name, time in spans:
                color = colors.setdefault(name, palette[len(colors) % 20])
                panel.barh(y, time, 0.8, left, color=color, label=name)
                if time > 0.07 * sum(length for _, length in pieces):
                    middle = left + time / 2
                    panel.text(
                        middle, y, f"{time:.2f}", fontsize=7, ha="center", va="center"
                    )
                left += time
        panel.set_yticks(range(3), ["host", "of it, by XLA", "GPU"], fontsize=8)
        panel.invert_yaxis()
        panel.set_title(
            f"{params['batch']} text{'s' * (params['batch'] > 1)}, "
            f"{params['tokens']:,} tokens: {row['time_us'] / 1e3:.2f} ms",
            fontsize=9,
        )
        panel.grid(axis="x", alpha=0.3)
    figure.axes[-1].set_xlabel("ms", fontsize=8)
    figure.suptitle(_title(record))
    _legend(figure)


SHAPES = {
    "collective_matmul": _overlap,
    "convergence": _learning,
    "encode_timeline": _requests,
    "encoder": _encoders,
    "varlen_attention": _attention,
    "pruning_accuracy": _accuracy,
    **dict.fromkeys((pruned_speed.NAME, *pruned_speed.SOURCES), _pruned),
}
"""Drawings of particular benchmarks."""


def _labels(rows: Sequence[records.Record]) -> list[str]:
    """Case names, with the params that tell equal names apart."""
    labels = []
    for row in rows:
        same = [r["params"] for r in rows if r["case"] == row["case"]]
        differing = [
            f"{key}={value}"
            for key, value in row["params"].items()
            if any(params.get(key) != value for params in same)
        ]
        labels.append(" ".join([row["case"], *differing]))
    return labels
