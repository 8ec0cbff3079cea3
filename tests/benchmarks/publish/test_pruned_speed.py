"""Speed and accuracy in one table and one plot, from results of both benchmarks."""

import copy

import numpy as np
import pytest
from matplotlib.figure import Figure

from benchmarks import tile_sparse_layers as layers
from benchmarks import tile_sparse_matmul as products
from benchmarks.measure import records
from benchmarks.publish import due, plots, pruned_speed, tables


BITS = {
    "tw": {0.5: 1.7, 0.75: 1.9, 0.9: 2.4},
    "tew": {0.5: 1.6, 0.75: 1.8, 0.9: 2.2},
    "tw24": {0.5: 1.56, 0.6: 1.58, 0.65: 1.65, 0.75: 1.75, 0.8: 1.85, 0.85: 1.95},
}
BASE = {"dense": 1.5, "torch_dense": 1.5, "int8": 1.51, "cusparselt_2_4": 1.55}


def rows_of(benchmark, names, speed):
    """Some cases of a benchmark, their times chosen by `speed(params, name)`."""
    found = []
    for case in benchmark.cases:
        if case.name not in ("swiglu", "block", "llama3_8b_up"):
            continue
        if case.params["M"] not in (32, 4096):
            continue
        mask, sparsity = case.params["mask"], case.params["sparsity"]
        for name in names:
            if name == "cusparselt_2_4" and sparsity != 0.5:
                continue
            metrics = {"bits_per_byte": BASE.get(name, BITS[mask][sparsity])}
            metrics["speed_up"] = speed(case.params, name)
            if name in pruned_speed.OURS:
                metrics["ideal_speed_up"] = 1 / (1 - sparsity)
                metrics["kept"] = 1.2 * (1 - sparsity)
            if name == "matmul_only":
                del metrics["bits_per_byte"]
            found.append(
                {
                    "case": case.name,
                    "params": dict(case.params),
                    "implementation": name,
                    "time_us": 100 / metrics["speed_up"],
                    "metrics": metrics,
                    "max_rel_error": 1e-3,
                }
            )
    return found


def speed(params, name):
    known = {"dense": 1.0, "torch_dense": 0.99, "int8": 1.2, "cusparselt_2_4": 1.4}
    ours = 0.8 / (1 - params["sparsity"])
    return known.get(name, ours if name == "auto" else 0.5)


@pytest.fixture
def folder(tmp_path):
    head = {
        "device": "NVIDIA H200",
        "num_devices": 1,
        "jax": "0.11.2",
        "commit": "abc",
        "date": "2026-11-24",
        "timing": "device time, median of 15",
    }
    for benchmark, names in (
        (products.BENCHMARK, ["auto", *BASE]),
        (layers.BENCHMARK, ["auto", "mosaic_gpu", *BASE, "matmul_only"]),
    ):
        rows = rows_of(benchmark, names, speed)
        command = f"python -m benchmarks.{benchmark.name}"
        record = head | {"benchmark": benchmark.name, "command": command, "rows": rows}
        path = tmp_path / "nvidia_h200" / f"{benchmark.name}.json"
        records.dump(record, path)
    return tmp_path / "nvidia_h200"


def cells(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[c.strip() for c in line.strip("|").split("|")] for line in lines]


def test_one_line_a_form_by_accuracy(folder):
    record = pruned_speed.joined(folder)
    assert record is not None
    text = tables.accuracy_table(record, cases="swiglu,llama3_8b_up", M="4096")
    head, _, *lines = cells(text)
    assert head == [
        "weights",
        "pruned",
        "bits per byte",
        "swiglu M=4096",
        "swiglu M=4096 training",
        "llama3_8b_up M=4096",
    ]
    pruned = ["tew", "tw24", "tw", "tw24", "tew", "tw24", "tw", "tw24", "tew", "tw"]
    forms = ["dense", "int8", "2:4", "tw24", "tw24", *pruned]
    assert [line[0] for line in lines] == forms
    assert lines[0] == ["dense", "-", "1.500", "1.00", "1.00", "1.00"]
    assert lines[1][:4] == ["int8", "-", "1.510", "1.20"]
    assert lines[2][:4] == ["2:4", "50%", "1.550", "1.40"]
    # Ours as dispatch takes it, and what the kept matmuls would allow.
    assert lines[11][:4] == ["tw", "75%", "1.900", "3.20 of 4.00<br>keeps 0.3"]
    assert "of what the kept matmuls would be" in text.replace("*", "")
    assert "python -m benchmarks.tile_sparse_layers" in text
    assert "python -m benchmarks.tile_sparse_matmul" in text


def test_the_fastest_dense_product_is_one_and_kernels_stand_in_for_dispatch(folder):
    record = pruned_speed.joined(folder)
    assert record is not None
    rows = [r for r in record["rows"] if r["implementation"] != "auto"]
    found = {(p.layer, p.form, p.sparsity): p for p in pruned_speed.points(rows)}
    assert found["block M=32", "tw", 0.9].speed_up == 0.5  # mosaic_gpu
    assert ("llama3_8b_up M=32", "tw", 0.9) not in found  # there is none
    assert found["llama3_8b_up M=32", "dense", 0.0].speed_up == 1
    assert not any(p.form == "matmul_only" for p in found.values())


def test_rows_without_bits_are_no_points(folder):
    record = copy.deepcopy(pruned_speed.joined(folder))
    assert record is not None
    for row in record["rows"]:
        row["metrics"].pop("bits_per_byte", None)
    assert pruned_speed.points(record["rows"]) == []
    with pytest.raises(ValueError, match="no row has both"):
        pruned_speed.markdown(record["rows"])


def test_documents_have_table_and_plot_or_say_that_it_is_pending(folder, tmp_path):
    table = "<!-- table:pruned_speed cases=block pending=yes -->\n<!-- /table -->"
    plot = "<!-- plot:pruned_speed alt=Speed pending=yes -->\n<!-- /plot -->"
    (tmp_path / "README.md").write_text(f"{table}\n\n{plot}\n")
    root = tmp_path / "none"
    root.mkdir()
    before = tables.fill(f"{table}\n{plot}", root)
    assert before.count(tables.PENDING) == 2
    arguments = ["--root", str(tmp_path), "--results", str(tmp_path)]
    assert tables.main(arguments) == 0
    text = (tmp_path / "README.md").read_text()
    assert "| 2:4 | 50% | 1.550 |" in text and "swiglu" not in text.split("Times")[0]
    assert "![Speed](docs/_static/plots/nvidia_h200_pruned_speed.svg)" in text
    made = tmp_path / "docs" / "_static" / "plots"
    assert (made / "nvidia_h200_pruned_speed.svg").exists()
    assert tables.main([*arguments, "--check"]) == 0
    # A new number in either file makes both out of date.
    path = folder / "tile_sparse_layers.json"
    record = records.load(path)
    for row in record["rows"]:
        row["metrics"]["speed_up"] *= 1.5
    records.dump(record, path)
    assert tables.main([*arguments, "--check"]) == 1


def test_a_panel_has_every_form_and_the_ideal(folder):
    record = pruned_speed.joined(folder)
    assert record is not None
    rows = [r for r in record["rows"] if r["case"] == "swiglu"]
    figure = Figure()
    pruned_speed.draw(figure, [r for r in rows if r["params"]["M"] == 4096])
    shown = [panel for panel in figure.axes if panel.get_visible()]
    assert [panel.get_title() for panel in shown] == [
        "swiglu M=4096",
        "swiglu M=4096 training",
    ]
    lines = {line.get_label(): line for line in shown[0].get_lines()}
    assert {"dense", "int8", "2:4", "tw", "tew", "tw24"} <= set(lines)
    at = np.asarray(lines["tw"].get_xydata())
    np.testing.assert_allclose(at, [[1.7, 1.6], [1.9, 3.2], [2.4, 8.0]])
    dotted = [line for line in shown[0].get_lines() if line.get_linestyle() == ":"]
    assert [len(np.asarray(line.get_xydata())) for line in dotted] == [6, 3, 3]


def test_both_plots_of_the_files_are_drawn(folder, tmp_path):
    for name in pruned_speed.SOURCES:
        picture = tmp_path / f"{name}.svg"
        plots.draw(records.load(folder / f"{name}.json"), picture)
        assert "2:4" in picture.read_text() or "cusparselt" in picture.read_text()


def test_the_joined_table_cites_the_cases_of_both_benchmarks():
    options = {"cases": "swiglu,llama3_8b_up", "M": "32"}
    for one in (layers.BENCHMARK, products.BENCHMARK):
        for case in one.cases:
            chosen = case.name in ("swiglu", "llama3_8b_up") and case.params["M"] == 32
            assert due._shows(pruned_speed.NAME, options, one, case) == chosen
    (first, *_) = layers.BENCHMARK.cases
    assert not due._shows("matmul", {}, layers.BENCHMARK, first)


def test_rows_that_are_no_cases_are_dropped(folder, capsys):
    path = folder / "tile_sparse_matmul.json"
    record = records.load(path)
    count = len(record["rows"])
    for row in record["rows"][:5]:
        row["params"] |= {"mask": "equal", "tile": 128}
    record["rows"][7]["implementation"] = "bcoo"
    records.dump(record, path)
    records.main(["--drop", str(path)])
    assert "6 rows dropped" in capsys.readouterr().out
    assert len(records.load(path)["rows"]) == count - 6
    for row in record["rows"]:
        row["case"] = "square_4096"
    records.dump(record, path)
    assert records.drop(path) == count and not path.exists()
