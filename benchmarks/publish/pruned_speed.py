"""Speed and accuracy of pruned layers in one table and one plot.

Both come from the results of `benchmarks.tile_sparse_matmul` and
`benchmarks.tile_sparse_layers`, whose rows carry the bits per byte of the model that
they are of. The marker of the table is ``table:pruned_speed``, that of the plot
``plot:pruned_speed``; options choose layers by name and params by value, as those of
other tables do: ``cases=swiglu,block M=4096``.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.measure import comparison, records


NAME = "pruned_speed"
SOURCES = ("tile_sparse_layers", "tile_sparse_matmul")
"""Whose results are joined, whole layers first."""

OURS = ("auto", "mosaic_gpu")
"""Of these the first that was measured is shown: what a user gets."""

RIVALS = {
    "dense": "dense",
    "torch_dense": "dense",
    "int8": "int8",
    "cusparselt_2_4": "2:4",
}
"""What a baseline is called here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """What one way to compute a layer takes, and what it costs in accuracy."""

    layer: str
    """Name and tokens; ``training`` for a step."""
    form: str
    """``dense``, ``int8``, ``2:4``, ``tw``, ``tew`` or ``tw24``."""
    sparsity: float
    """Of the whole model."""
    bits: float
    """Per held-out byte."""
    speed_up: float
    """Over the best dense matmul, or the dense layer."""
    ideal: float | None
    """The speed-up if what is kept ran at the rate of the dense matmuls."""
    kept: float | None
    """Share of the weights of this layer that a mask keeps: less or more than of the
    whole model."""
    mark: str = ""
    """That the row is stale."""


def points(rows: Sequence[records.Record]) -> list[Point]:
    """The points of all rows, each once.

    Baselines are measured again beside every mask; the fastest counts, in its own run.
    """
    found: dict[tuple[str, str, float], Point] = {}
    for _, by_name in records.lines(rows):
        ours = next((name for name in OURS if name in by_name), None)
        for name, row in by_name.items():
            metrics, params = row["metrics"], row["params"]
            if not {"bits_per_byte", "speed_up"} <= metrics.keys():
                continue
            if name != ours and name not in RIVALS:
                continue
            form, sparsity = params["mask"], params["sparsity"]
            if name in RIVALS:
                form, sparsity = RIVALS[name], 0.5 if RIVALS[name] == "2:4" else 0.0
            point = Point(
                layer=_layer(row),
                form=form,
                sparsity=sparsity,
                bits=metrics["bits_per_byte"],
                speed_up=metrics["speed_up"],
                ideal=metrics.get("ideal_speed_up"),
                kept=metrics.get("kept"),
                mark=comparison.stale([row]),
            )
            key = point.layer, form, sparsity
            if key not in found or found[key].speed_up < point.speed_up:
                found[key] = point
    return [*found.values()]


def _layer(row: records.Record) -> str:
    params = row["params"]
    training = " training" if params.get("pass") == "fwd_bwd" else ""
    return f"{row['case']} M={params['M']}{training}"


def markdown(rows: Sequence[records.Record]) -> str:
    """A line for each form, a column for each layer, the most accurate first."""
    found = points(rows)
    if not found:
        raise ValueError("no row has both bits_per_byte and speed_up")
    layers = records.ordered(point.layer for point in found)
    table = [
        ["weights", "pruned", "bits per byte", *layers],
        ["---", "--:", "--:", *["--:"] * len(layers)],
    ]
    for form, sparsity, bits in _forms(found):
        cells = {p.layer: p for p in found if (p.form, p.sparsity) == (form, sparsity)}
        line = [form, f"{sparsity:.0%}" if sparsity else "-", f"{bits:.3f}"]
        line += [_cell(cells.get(layer)) for layer in layers]
        table.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def _forms(found: Sequence[Point]) -> list[tuple[str, float, float]]:
    """Form, sparsity and bits, by falling accuracy."""
    bits = {(p.form, p.sparsity): p.bits for p in found}
    return sorted(((*key, value) for key, value in bits.items()), key=lambda x: x[2])


def _cell(point: Point | None) -> str:
    if point is None:
        return "-"
    ideal = "" if point.ideal is None else f" of {point.ideal:.2f}"
    kept = "" if point.kept is None else f"<br>keeps {point.kept:.2g}"
    return f"{point.speed_up:.2f}{ideal}{point.mark}{kept}"


CAPTION = (
    "Times as fast as dense, *of* what the kept matmuls would be at the dense rate; "
    "*keeps*: of the layer, *pruned*: of the model"
)


CURVE = 2
"""Pruned points below which a layer has no panel: the table has them."""

LABELS = {"tw": (-6, 6), "tew": (-4, -11), "tw24": (-6, 6)}
"""Where the sparsity of a point is written; 2:4 has only one."""


def draw(figure: Any, rows: Sequence[records.Record]) -> None:
    """Speed-up against bits per byte, a panel for each layer with a curve."""
    found = points(rows)
    pruned = collections.Counter(point.layer for point in found if point.sparsity)
    layers = [layer for layer, count in pruned.items() if count >= CURVE]
    width = min(2, max(len(layers), 1))
    lines = max(-(-len(layers) // width), 1)
    figure.set_size_inches(4.6 * width, 1 + 2.8 * lines)
    flat = iter(figure.subplots(lines, width, squeeze=False).flat)
    forms = ("dense", "int8", "2:4", "tw", "tew", "tw24")
    colors = {form: f"C{i}" for i, form in enumerate(forms)}
    for layer in layers:
        panel = next(flat)
        for form, points_ in _by_form([p for p in found if p.layer == layer]):
            x, y = [p.bits for p in points_], [p.speed_up for p in points_]
            panel.plot(x, y, "o-", label=form, color=colors[form])
            for p in points_:
                if p.sparsity and form in LABELS:
                    at = (p.bits, p.speed_up)
                    panel.annotate(
                        f"{p.sparsity:.0%}",
                        at,
                        xytext=LABELS[form],
                        textcoords="offset points",
                        fontsize=7,
                    )
            bounds = [(p.bits, p.ideal) for p in points_ if p.ideal is not None]
            if bounds:
                panel.plot(*zip(*bounds, strict=True), ":", color=colors[form])
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_yscale("log", base=2)
        ticks = (0.5, 1, 2, 4, 8, 16, 32, 64, 128)
        panel.set_yticks(ticks, [str(tick) for tick in ticks])
        panel.set_title(layer, fontsize=10)
        panel.set_xlabel("held-out bits per byte (dotted: the ideal)", fontsize=8)
        panel.set_ylabel("times as fast as dense", fontsize=8)
        panel.grid(alpha=0.3)
    for panel in flat:
        panel.set_visible(False)


def _by_form(found: Sequence[Point]) -> Iterator[tuple[str, list[Point]]]:
    for form in records.ordered(point.form for point in found):
        mine = [point for point in found if point.form == form]
        yield form, sorted(mine, key=lambda point: point.sparsity)


def joined(folder: pathlib.Path) -> records.Record | None:
    """The results of a device in one record, or None where there are none."""
    paths = [folder / f"{name}.json" for name in SOURCES]
    found = [records.load(path) for path in paths if path.exists()]
    if not found:
        return None
    rows = [row for record in found for row in records.full_rows(record)]
    return found[0] | {"benchmark": NAME, "rows": rows}
