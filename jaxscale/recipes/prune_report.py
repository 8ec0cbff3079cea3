"""The HTML report of ``jaxscale prune``: sparsities and losses."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from jaxscale.observability import svg_plots
from jaxscale.observability.html_report import Report, add_steps
from jaxscale.pruning import (
    DENSE_ABOVE,
    LayerReport,
    Masks,
    layer_reports,
    lost_layers,
    picture,
    work,
)
from jaxscale.pruning.layers import layer_names, matrices
from jaxscale.recipes.prune import Pruned, bytes_per_token
from jaxscale.sharding import make_mesh
from jaxscale.training import TextData, TrainConfig
from jaxscale.training import run as run_directory
from jaxscale.training.lock import locked
from jaxscale.training.monitoring import console


def finish(directory: Path, pruned: Pruned, text: TextData) -> Path:
    """Write the masks and the report of a pruned run; returns the report.

    Raises:
        ValueError: another process writes to the directory.
    """
    with locked(directory):
        return _finish(directory, pruned, text)


def _finish(directory: Path, pruned: Pruned, text: TextData) -> Path:
    pruned.masks.save(directory / run_directory.MASKS_FILE)
    report = Report("jaxscale prune")
    add_to_report(report, pruned, bytes_per_token(text))
    config = run_directory.read_config(directory)
    report.heading("Training under the masks")
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    add_steps(report, [json.loads(line) for line in lines])
    add_settings(report, config, pruning=pruned.masks.config)
    return report.write(directory / "report.html")


def add_settings(report: Report, config: TrainConfig, **more: Any) -> None:
    """A section on the settings of a run.

    Args:
        report: Gets the section.
        config: The settings of the run.
        more: Other dataclasses of settings, by what they are for.
    """
    mesh = make_mesh(config.mesh)
    peak = console.peak_memory(mesh)
    report.heading("Settings")
    report.facts(
        console.facts(config, mesh)
        | {"seed": config.seed, "learning rate": config.optimizer.learning_rate}
        | {"peak memory": peak or "not reported"}
    )
    groups = {name: dataclasses.asdict(value) for name, value in more.items()}
    report.facts(
        {
            f"{group}.{name}".removeprefix("the run."): str(value)
            for group, values in (groups | console.settings(config)).items()
            for name, value in values.items()
        },
        folded="All settings",
    )


def add_to_report(report: Report, pruned: Pruned, bytes_per_token: float) -> None:
    """A section on sparsities and held-out losses."""
    report.heading("Pruning")
    _add_losses(report, pruned, bytes_per_token)
    _add_cost(report, pruned.masks)
    layers = layer_reports(pruned.masks, pruned.scores)
    _add_layers(report, layers, pruned)
    _add_tiles(report, layers)
    for layer, mask in _pictured(pruned.masks):
        report.text(
            f"What {layer} keeps, {mask.mean():.0%} of its weights: rows are input "
            "features, columns output features."
        )
        image = picture(mask, size=128)
        drawing = svg_plots.image(
            image.tolist(),
            shape=(mask.shape[0], mask.shape[1]),
            x_title="columns of the weight (outputs)",
            y_title="rows of the weight (inputs)",
        )
        report.drawing(drawing)


def _add_losses(report: Report, pruned: Pruned, bytes_per_token: float) -> None:
    masks = pruned.masks
    report.text(
        f"Pattern {masks.config.pattern}, {masks.sparsity:.1%} of the weights of the "
        "chosen layers; the losses are held-out, in nats/token and in bits/byte."
    )
    steps = int(pruned.result.state.step)
    report.table(
        ["model", "extra steps", "held-out loss", "bits/byte"],
        [
            [name, more, f"{e.loss:.4f}", f"{e.loss / np.log(2) / bytes_per_token:.3f}"]
            for name, more, e in (
                ("dense", 0, pruned.before),
                ("pruned at once", 0, pruned.after),
                ("trained under the masks", steps, pruned.tuned),
                ("dense, trained as long", steps, pruned.control),
            )
            if e is not None
        ],
    )
    report.text(
        "The dense model was not trained further: what it would have gained in as many "
        "steps is not among these losses."
        if pruned.control is None
        else "More training lowers any loss, so compare the last two: pruning costs "
        f"{pruned.tuned.loss - pruned.control.loss:.4f} nats/token."
    )


def _add_cost(report: Report, masks: Masks) -> None:
    cost = work(masks)
    report.facts(
        {
            "weights of the chosen layers": cost.dense,
            "kept in tiles" if masks.config.tiled else "kept": cost.tiled,
            "kept as single weights": cost.single,
            "fullest tile over the mean": cost.imbalance,
            "bytes dense (bf16)": 2 * cost.dense,
            "bytes kept (bf16, indices of single weights)": cost.sparse_bytes,
        }
    )


def _add_layers(report: Report, layers: list[LayerReport], pruned: Pruned) -> None:
    gone, whole = lost_layers(layers), [x.name for x in layers if x.sparsity == 0]
    left_out = pruned.masks.config.dense
    report.text(f"Layers that lost everything: {', '.join(gone) or 'none'}.")
    report.text(
        f"Layers that lost nothing: {', '.join(whole) or 'none of the chosen'}; left "
        f"out by choice: {', '.join(left_out) or 'none'}; never pruned: embeddings "
        "and heads."
    )
    if (dense := pruned.dense_layers()) is not None:
        report.text(
            f"Layers that keep more than {DENSE_ABOVE:.0%} run dense, with zeros: "
            f"{', '.join(dense) or 'none'}."
        )
    report.table(
        ["layer", "shape", "sparsity", "kept score", "rows of the tiles"],
        [
            [
                layer.name,
                f"{layer.shape[0]} x {layer.shape[1]}",
                f"{layer.sparsity:.1%}",
                f"{layer.kept_score:.1%}",
                _range(layer.tile_rows),
            ]
            for layer in layers
        ],
    )


def _add_tiles(report: Report, layers: list[LayerReport]) -> None:
    """How full the tiles are, if there are any."""
    shares = [
        layer.tile_rows / layer.shape[0]
        for layer in layers
        if layer.tile_rows is not None
    ]
    if not shares:
        return
    counts, edges = np.histogram(np.concatenate(shares), bins=20, range=(0, 1))
    middles = (edges[1:] + edges[:-1]) / 2
    bars = "tiles", middles.tolist(), counts.tolist()
    titles = {"x_title": "share of the rows that are kept", "y_title": "tiles"}
    report.text("How full the tiles are, over all layers:")
    report.drawing(svg_plots.bars([bars], **titles))


def _range(rows: np.ndarray | None) -> str:
    if rows is None or not rows.size:
        return "-"
    return f"{rows.min()} to {rows.max()}"


def _pictured(masks: Masks) -> Iterator[tuple[str, np.ndarray]]:
    """Of the largest and the smallest kind of layer, the one of median sparsity."""
    names = sorted(masks.chosen, key=lambda name: masks.kept[name].size)
    for name in dict.fromkeys([names[-1], names[0]]):
        kept, labels = (
            matrices(masks.kept[name]),
            layer_names(name, masks.kept[name].shape),
        )
        places = sorted(masks.chosen[name], key=lambda place: kept[place].mean())
        place = places[len(places) // 2]
        yield labels[place], kept[place]
