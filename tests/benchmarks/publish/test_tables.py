"""Tables show every row, and the documents match the results."""

import copy
import json

import numpy as np
import pytest

from benchmarks.measure import comparison, records
from benchmarks.publish import plots, tables


def row(case, name, time_us, tflops, **more):
    return {
        "case": case,
        "params": {"M": 128, "N": 64 if case == "a" else 32},
        "implementation": name,
        "time_us": time_us,
        "metrics": {"tflops": tflops, "gain": -0.25, "spread": 0.01},
        "max_rel_error": 1e-3,
        **more,
    }


RECORD = {
    "benchmark": "matmul",
    "device": "NVIDIA H200",
    "num_devices": 1,
    "jax": "0.11.2",
    "commit": "new",
    "date": "2026-11-20",
    "command": "python -m benchmarks.matmul",
    "timing": "device time, median of 30",
    "rows": [
        row("a", "mosaic_gpu", 100.0, 800.0),
        row("a", "dense", 110.0, 727.0),
        row("b", "mosaic_gpu", 50.0, 300.0, commit="old"),
        row("b", "dense", 40.0, 375.0),
        row("b", "torch", 41.5, 361.0),
    ],
}


def test_every_row_is_shown_and_the_fastest_is_bold():
    lines = comparison.markdown(RECORD).splitlines()
    # What a telephone shows comes first; N follows from the case, M is the same.
    assert lines[0] == "| case | baseline / ours | mosaic_gpu | dense | torch | N |"
    assert lines[2] == "| a | 1.10 | **100 (800)** | 110 (727) | - | 64 |"
    # The baseline wins, and is shown to.
    assert lines[3] == "| b | 0.80 | 50 (300) | **40 (375)** | 41.5 (361) | 32 |"
    assert lines[5] == "Time in us (tflops); M 128. NVIDIA H200 x 1."
    fold = "\n".join(lines[6:])
    assert fold.strip().startswith("<details><summary>") and "commit new, old" in fold
    assert fold.rstrip().endswith("python -m benchmarks.matmul\n```\n\n</details>")


def test_stale_rows_are_marked():
    rows = [RECORD["rows"][0] | {"stale": True}, *RECORD["rows"][1:]]
    text = comparison.markdown(RECORD | {"rows": rows})
    assert "| a | 1.10 | **100 (800)** † | 110 (727) |" in text
    assert text.count(comparison.STALE) == 2 and f"{comparison.STALE_NOTE}." in text
    aside = comparison.markdown(RECORD | {"rows": rows}, columns="N")
    assert f"| a | mosaic_gpu | - | 100 {comparison.STALE} |" in aside
    assert tables._unmarked(text) == comparison.markdown(RECORD)


def test_rounded_operands_are_set_against_each_other_alone():
    rounded = [row("a", "fp8_mosaic_gpu", 60.0, 1.0), row("a", "fp8_xla", 90.0, 1.0)]
    lines = comparison.markdown(RECORD | {"rows": RECORD["rows"][:2] + rounded})
    assert "| 1.10 | **100 (800)** | 110 (727) | 60 (1) | 90 (1) |" in lines
    lines = comparison.markdown(RECORD | {"rows": rounded})
    assert "| 1.50 | **60 (1)** | 90 (1) |" in lines


def test_pytorch_counts_with_what_it_takes_for_more_work():
    """Of its forms the best, on this problem or on one with more of everything."""
    one = encoder_row("m", "jaxscale", 100.0)

    def at(max_len, name, time_us, model="m"):
        params = one["params"] | {"model": model, "max_len": max_len}
        case = f"{model}_{max_len}"
        return one | {
            "case": case,
            "params": params,
            "implementation": name,
            "time_us": time_us,
        }

    rows = [
        at(64, "jaxscale", 100.0),
        at(64, "torch_compile", 700.0),
        at(64, "torch_sdpa", 600.0),
        at(128, "jaxscale", 150.0),
        at(128, "torch_compile", 300.0),
        at(128, "torch_compile", 30.0, model="other"),
        at(32, "torch_compile", 20.0),  # less work
    ]
    text = comparison.markdown(RECORD | {"rows": rows}, metric="vs_torch", cases="m_*")
    lines = text.splitlines()
    shown = {line.split(" | ")[0]: line for line in lines}
    assert "| 3.00 | **100 (3)** | 700 (1) | 600 (0.5) |" in shown["| m_64"]
    assert "| 2.00 | **150 (2)** | 300 (1) | - |" in shown["| m_128"]
    with pytest.raises(ValueError, match="no row has a time of PyTorch"):
        comparison.markdown(RECORD, metric="vs_torch", cases="a")
    # It is shown where it is asked for.
    assert "vs_torch" not in comparison.markdown(RECORD)


def test_negative_results_are_not_clipped():
    text = comparison.markdown(
        RECORD, metric="gain", implementations="mosaic*", cases="b"
    )
    assert "| b | 50 (-0.25) |" in text and "dense" not in text


def test_long_times_are_in_milliseconds():
    rows = [row("a", "jaxscale", 123_400.0, 1.0), row("a", "torch", 98_000.0, 2.0)]
    text = comparison.markdown(RECORD | {"rows": rows})
    assert "| a | 0.79 | 123 (1) | **98 (2)** |" in text
    assert "Time in ms (tflops)" in text


BLOCKS = """<!-- table:matmul -->
stale
<!-- /table -->
<!-- plot:matmul -->
<!-- /plot -->"""


def document(tmp_path, text=BLOCKS):
    results = tmp_path / "results"
    records.dump(copy.deepcopy(RECORD), results / "nvidia_h200" / "matmul.json")
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "README.md").write_text(f"before\n{text}\nafter\n")
    return ["--root", str(tmp_path), "--results", str(results)]


def test_documents_are_filled_and_checked(tmp_path, capsys):
    arguments = document(tmp_path)
    readme = tmp_path / "README.md"
    stale = readme.read_text()
    assert tables.main([*arguments, "--check"]) == 1
    assert "out of date: README.md" in capsys.readouterr().out
    assert readme.read_text() == stale
    assert tables.main(arguments) == 0
    text = readme.read_text()
    assert comparison.markdown(RECORD) in text and "stale" not in text
    assert text.startswith("before\n") and text.endswith("after\n")
    assert tables.main([*arguments, "--check"]) == 0
    plot = tmp_path / "docs" / "_static" / "plots" / "nvidia_h200_matmul.svg"
    first = plot.read_bytes()
    assert b"mosaic_gpu" in first and b"TFLOP/s" in first
    tables.main(arguments)
    assert plot.read_bytes() == first and readme.read_text() == text

    # What no page shows is not drawn.
    path = tmp_path / "results" / "nvidia_h200" / "matmul.json"
    records.dump(copy.deepcopy(RECORD), path.with_stem("other"))
    plot.with_stem("nvidia_h200_other").write_text("drawn once")
    assert tables.main([*arguments, "--check"]) == 1
    assert tables.main(arguments) == 0 and [*plot.parent.iterdir()] == [plot]

    # A new number makes the documents stale.
    new = copy.deepcopy(RECORD)
    new["rows"][0]["time_us"] = 99.0
    records.dump(new, path)
    assert tables.main([*arguments, "--check"]) == 1


def test_options_of_a_marker(tmp_path):
    marker = "<!-- table:matmul metric=gain implementations=dense cases=a -->"
    arguments = document(tmp_path, f"{marker}\n<!-- /table -->")
    tables.main(arguments)
    text = (tmp_path / "README.md").read_text()
    assert "| a | 110 (-0.25) |" in text and marker in text


def overlap_row(case, kind, m, name, time_us, **metrics):
    return {
        "case": case,
        "params": {"kind": kind, "tp": 4, "M": m, "N": 64, "K": 32},
        "implementation": name,
        "time_us": time_us,
        "metrics": metrics,
        "max_rel_error": 1e-3,
    }


def star(e):
    return {"overlap_efficiency_star": e, "overlap_efficiency": e / 2}


OVERLAP = RECORD | {
    "benchmark": "collective_matmul",
    "num_devices": 4,
    "timing": "wall time a call in loops inside one program, median of 7",
    "rows": [
        overlap_row("qkv", "all_gather", 512, "mosaic_gpu", 30.0, **star(-2.5)),
        overlap_row("qkv", "all_gather", 512, "xla_nccl", 20.0, **star(0.0)),
        overlap_row("qkv", "all_gather", 512, "matmul_only", 10.0),
        overlap_row("qkv", "all_gather", 8192, "mosaic_gpu", 100.0, **star(0.9)),
        overlap_row("qkv", "all_gather", 8192, "xla_nccl", 150.0, **star(0.0)),
        overlap_row("up", "all_gather", 512, "mosaic_gpu", 40.0, **star(0.5)),
        overlap_row("down", "reduce_scatter", 512, "mosaic_gpu", 41.0),
    ],
}


def test_params_choose_rows_and_bounds_do_not_compete():
    text = comparison.markdown(OVERLAP, kind="all_gather", M="512", cases="qkv")
    lines = text.splitlines()
    assert (
        lines[0] == "| case | baseline / ours | mosaic_gpu | xla_nccl | matmul_only |"
    )
    assert lines[2] == "| qkv | 0.67 | 30 | **20** | 10 |"
    assert lines[4] == "Time in us; tp 4, N 64, K 32. NVIDIA H200 x 4."
    with pytest.raises(ValueError, match="option 'colour', expected one of the params"):
        comparison.markdown(OVERLAP, colour="red")


def test_only_some_params_have_a_column():
    lines = comparison.markdown(OVERLAP, cases="qkv", params="M,t*").splitlines()
    assert lines[0].startswith("| case | M | baseline / ours | mosaic_gpu |")
    assert "; tp 4. NVIDIA" in lines[5]


def test_cases_of_one_name_are_in_the_order_of_their_numbers():
    names = ["up_l512_full", "up_l64_full", "gpt3_b2", "up_l64_causal", "gpt3_b1"]
    rows = [row(name, "mosaic_gpu", 1.0, 1.0) for name in names]
    made = comparison.markdown(RECORD | {"rows": rows}).splitlines()[2:7]
    assert [line.split()[1] for line in made] == [
        *("up_l64_full", "up_l512_full", "gpt3_b1", "gpt3_b2", "up_l64_causal")
    ]


def test_tables_may_be_of_rows_with_a_faster_baseline():
    lines = comparison.markdown(RECORD, behind="yes").splitlines()
    assert lines[2].startswith("| b | 0.80 | 50 (300) |")
    assert not any(line.startswith("| a |") for line in lines)
    ahead = {**RECORD, "rows": RECORD["rows"][:2]}
    with pytest.raises(ValueError, match="no row has a faster baseline"):
        comparison.markdown(ahead, behind="yes")
    with pytest.raises(ValueError, match="behind 'si', expected yes or no"):
        comparison.markdown(RECORD, behind="si")


def test_long_tables_may_be_folded():
    text = comparison.markdown(RECORD, folded="yes")
    rows, _, rest = text.partition("\n\n</details>")
    assert rows.startswith("<details><summary>All 2 rows</summary>\n\n| case |")
    assert rest.startswith("\n\nTime in us (tflops)")
    with pytest.raises(ValueError, match="folded 'si', expected yes or no"):
        comparison.markdown(RECORD, folded="si")


def test_long_tables_show_ten_rows():
    def made(count):
        rows = [row(f"c{i}", "mosaic_gpu", 1.0, 1.0) for i in range(count)]
        return comparison.markdown(RECORD | {"rows": rows})

    assert "more rows" not in made(12)
    shown, _, rest = made(13).partition("<details><summary>3 more rows</summary>\n\n")
    assert shown.count("\n| c") == 10 and shown.endswith("| c9 | 1 (1) |\n\n")
    lines = rest.splitlines()
    assert lines[:2] == shown.splitlines()[:2] and lines[2].startswith("| c10 | ")
    assert lines[5:7] == ["", "</details>"]


def test_values_of_a_param_stand_side_by_side():
    text = comparison.markdown(
        OVERLAP,
        metric="overlap_efficiency_star",
        implementations="mosaic_gpu",
        columns="M",
        kind="all_gather",
        tp="4",
    )
    assert text.splitlines()[:5] == [
        "| case | M 512 | M 8192 |",
        "| --- | --: | --: |",
        "| qkv | -2.5 | 0.9 |",
        "| up | 0.5 | - |",
        "| mean | -1 | 0.9 |",
    ]
    assert "overlap_efficiency_star of `mosaic_gpu`. NVIDIA H200 x 4." in text
    times = comparison.markdown(OVERLAP, columns="M", kind="all_gather", cases="qkv")
    assert "| qkv | xla_nccl | 20 | 150 |" in times
    assert "mean" not in times and "time in us" in times
    both = copy.deepcopy(OVERLAP)
    both["rows"][-1]["case"] = "up"
    kinds = comparison.markdown(both, columns="M", implementations="mosaic_gpu")
    assert "| up | all_gather | 40 | - |" in kinds
    assert "| up | reduce_scatter | 41 | - |" in kinds
    with pytest.raises(ValueError, match="columns 'Z', expected one of"):
        comparison.markdown(OVERLAP, columns="Z")


def test_what_is_not_measured_yet_may_say_so(tmp_path):
    text = (
        "<!-- table:other pending=yes -->\n<!-- /table -->\n"
        "<!-- table:matmul pending=yes M=77 -->\n<!-- /table -->\n"
        "<!-- plot:other pending=yes alt=A_plot -->\n<!-- /plot -->\n"
        "<!-- plot:matmul pending=yes alt=A_plot -->\n<!-- /plot -->"
    )
    tables.main(document(tmp_path, text))
    made = (tmp_path / "README.md").read_text()
    assert made.count("Not measured yet.") == 3
    assert "![A plot](docs/_static/plots/nvidia_h200_matmul.svg)" in made
    hidden = text.replace("pending=yes", "pending=hidden")
    tables.main(document(tmp_path, hidden))
    made = (tmp_path / "README.md").read_text()
    assert "<!-- table:other pending=hidden -->\n<!-- /table -->" in made
    assert "<!-- table:matmul pending=hidden M=77 -->\n<!-- /table -->" in made
    assert tables.PENDING not in made and "![A plot]" in made
    with pytest.raises(ValueError, match="pending=maybe, expected one of"):
        tables.main(document(tmp_path, text.replace("pending=yes", "pending=maybe")))


def attention_row(case, name, time_us, what="fwd", batch=16, max_len=512, tokens=16):
    params = {"pass": what, "head_dim": 64, "causal": False}
    params |= {"batch": batch, "max_len": max_len, "tokens": tokens}
    return row(case, name, time_us, 400.0) | {"params": params}


ATTENTION = RECORD | {
    "benchmark": "varlen_attention",
    "rows": [
        attention_row("dense_d64_l512_full", "mosaic_gpu", 10.0),
        attention_row("dense_d64_l512_full", "cudnn_padded", 11.0),
        attention_row("bert_base_b16_l512", "mosaic_gpu", 5.0, tokens=4096),
        attention_row("bert_base_b16_l512", "cudnn_padded", 12.0, tokens=4096),
        attention_row("bert_base_b16_l512", "cudnn_packed", 12.0, "fwd_bwd"),
    ],
}


def encoder_row(model, name, time_us):
    params = {"model": model, "batch": 16, "max_len": 512, "tokens": 4096}
    return row(f"{model}_b16_l512", name, time_us, 1.0) | {"params": params}


ENCODER = RECORD | {
    "benchmark": "encoder",
    "rows": [
        encoder_row("bert_base", "jaxscale", 2000.0),
        encoder_row("bert_base", "torch_compile", 5000.0),
        encoder_row("albert_base", "jaxscale", 1500.0),
    ],
}


PIECES = {"plan": 50, "write": 30, "call": 500, "wait": 400, "read": 20}
REQUESTS = RECORD | {
    "benchmark": "encode_timeline",
    "rows": [
        row("bert", "jaxscale", 1000.0, 1.0)
        | {
            "params": {"batch": 4, "tokens": 1670},
            "metrics": {f"{name}_us": us for name, us in PIECES.items()}
            | {"before_gpu_us": 300.0, "kernel_us": 420.0, "gap_us": 180.0}
            | {"host call": 900.0, "host Execute": 150.0, "host short": 30.0}
            | {"beside Other": 200.0},
        }
    ],
}


def learning_row(name, seed, tokens, bits):
    params = {"seed": seed, "tokens": tokens}
    changed = {"params": params, "metrics": {"bits_per_byte": bits, "rate": 1e-3}}
    return row("bytes", name, 9.0, 1.0) | changed


LEARNING = RECORD | {
    "benchmark": "convergence",
    "rows": [
        learning_row(name, seed, tokens, 3.0 + seed - tokens / 1000)
        for name in ("serial", "parallel", "lamb_4x")
        for seed in (0, 1)
        for tokens in (100, 500, 1000)
    ]
    + [row("bytes_rates", "serial", 9.0, 1.0) | {"params": {"rate": 1e-3}}],
}


@pytest.mark.parametrize(
    "record",
    [RECORD, OVERLAP, ATTENTION, ENCODER, REQUESTS, LEARNING],
    ids=["bars", "curves", "attention", "encoder", "requests", "learning"],
)
def test_plots_know_what_they_show(tmp_path, record):
    path = tmp_path / "plot.svg"
    assert not plots.is_current(record, path)
    plots.draw(record, path)
    assert plots.is_current(record, path)
    assert plots.is_current(record | {"commit": "later"}, path)
    new = copy.deepcopy(record)
    new["rows"][0]["metrics"]["overlap_efficiency"] = 0.123
    assert not plots.is_current(new, path)


def test_curves_hold_every_layer_and_negative_values(tmp_path):
    plots.draw(OVERLAP, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    panels = ("all_gather, 4 GPUs", "reduce_scatter, 4 GPUs")
    for label in ("qkv", "up", *panels, plots.STAR):
        assert f">{label}<" in text, label
    assert "0 that of XLA" in text  # what the letter stands for


def test_titles_lie_on_no_panel_and_legends_on_no_curve():
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    plots._attention(figure, ATTENTION)
    figure.draw_without_rendering()
    (title,), (legend,) = figure.texts, figure.legends
    panels = [panel.get_tightbbox() for panel in figure.axes if panel.get_visible()]
    for box in (title.get_window_extent(), legend.get_window_extent()):
        assert not any(box.overlaps(panel) for panel in panels if panel)


def test_attention_against_length_and_padding(tmp_path):
    plots.draw(ATTENTION, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for label in ("fwd, D64, full", "fwd, BERT-base, batch 16", "share of padding"):
        assert f">{label}<" in text, label
    plots.draw(ENCODER, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text()
    for label in ("bert_base, batch 16", "albert_base, batch 16", "torch_compile"):
        assert f">{label}<" in text, label


def test_requests_are_pieces_and_kernels_where_they_lie():
    from matplotlib.figure import Figure

    figure = Figure(layout="constrained")
    plots._requests(figure, REQUESTS)
    (panel,) = figure.axes
    assert panel.get_title() == "4 texts, 1,670 tokens: 1.00 ms"
    bars = {
        bar.get_label(): [(p.get_x(), p.get_width()) for p in bar.patches]
        for bar in panel.containers
    }
    spans = {"plan": (0, 0.05), "write": (0.05, 0.03), "call": (0.08, 0.5)}
    spans |= {"wait": (0.58, 0.4), "read": (0.98, 0.02)}
    spans |= {"Execute": (0.08, 0.15), "others": (0.23, 0.03)}
    spans |= {"kernels": (0.3, 0.42), "gaps": (0.72, 0.18)}
    assert [*bars] == [*spans]
    for name, span in spans.items():
        assert bars[name][0] == pytest.approx(span), name


def test_learning_is_the_mean_and_the_range_of_the_seeds(monkeypatch):
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    drawn, bands = [], []
    monkeypatch.setattr(Axes, "plot", lambda s, x, y, **k: drawn.append((x, y)))
    monkeypatch.setattr(
        Axes, "fill_between", lambda s, x, low, high, **k: bands.append((low, high))
    )
    monkeypatch.setattr(Axes, "legend", lambda s, **k: None)
    plots._learning(Figure(), LEARNING)
    # The first point is left out; rates that were tried are no curve.
    assert drawn[0] == ([500, 1000], [3.0, 2.5]) and len(drawn) == 4
    assert bands[0] == ([2.5, 2.0], [3.5, 3.0])


def test_savings_are_paired_with_the_share_of_padding():
    from matplotlib.figure import Figure

    panel = Figure().subplots()
    plots._savings(panel, ATTENTION["rows"], "mosaic_gpu", ("cudnn_padded",))
    found = panel.collections[0].get_offsets()
    expected = [(1 - 16 / 8192, 1 - 10 / 11), (0.5, 1 - 5 / 12)]
    np.testing.assert_allclose(np.asarray(found), expected)


def test_a_stale_plot_is_found(tmp_path, capsys):
    arguments = document(tmp_path)
    tables.main(arguments)
    plot = tmp_path / "docs" / "_static" / "plots" / "nvidia_h200_matmul.svg"
    plot.write_text(plot.read_text().replace(plots.digest(RECORD), "results of old"))
    assert tables.main([*arguments, "--check"]) == 1
    assert "nvidia_h200_matmul.svg" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:other -->\n<!-- /table -->", "table:other wants .* not there"),
        ("<!-- table:matmul -->\n", "1 markers .*, 0 with an end"),
        ("<!-- table:matmul colour=red -->\n<!-- /table -->", "colour"),
        ("<!-- table:matmul cases=zzz -->\n<!-- /table -->", "no row has"),
        ("<!-- table:matmul metric=speed -->\n<!-- /table -->", "metric 'speed', exp"),
    ],
)
def test_bad_markers_are_errors(tmp_path, text, message):
    with pytest.raises(ValueError, match=message):
        tables.main(document(tmp_path, text))


def test_the_documents_of_the_project_are_up_to_date(capsys):
    assert tables.main(["--check"]) == 0, capsys.readouterr()


def test_a_line_says_on_how_many_gpus_something_was_measured(tmp_path):
    for device, counts in (("nvidia_h100", [4, 1]), ("nvidia_h200", [2]), ("cpu", [8])):
        rows = [row(f"{n}", "dense", 1.0, 1.0, num_devices=n) for n in counts]
        (tmp_path / device).mkdir()
        text = json.dumps(RECORD | {"rows": rows})
        (tmp_path / device / "matmul.json").write_text(text)
    line = (
        "it is <!-- measured:dense,matmul -->old<!-- /measured -->, and <!-- more -->"
    )
    filled = tables.fill(line, tmp_path)
    assert filled == line.replace("old", "benchmarked on one, two and four GPUs")
    assert tables.fill(filled, tmp_path) == filled
    with pytest.raises(ValueError, match="measured:dense wants rows of GPUs"):
        tables.fill(line.replace(",matmul", ""), tmp_path)


def test_a_line_has_the_range_of_quotients(tmp_path):
    (tmp_path / "nvidia_h200").mkdir()
    (tmp_path / "nvidia_h200" / "matmul.json").write_text(json.dumps(RECORD))

    def filled(options):
        return tables.fill(
            f"<!-- ratio:matmul {options} -->old<!-- /ratio -->", tmp_path
        )

    assert ">0.80 to 1.10<" in filled("times=dense/mosaic_gpu")
    assert ">1.10<" in filled("times=dense/mosaic_gpu N=64")
    assert ">0.83<" in filled("times=torch/mosaic_gpu cases=b")
    with pytest.raises(ValueError, match="no case with torch and dense"):
        filled("times=torch/dense cases=a")
