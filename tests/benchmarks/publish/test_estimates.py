"""Estimates for GPUs that were not measured."""

import json

import pytest

from benchmarks.publish import estimates


def test_the_longer_of_operations_and_bytes_counts():
    work = estimates.Work(op="matmul", case="x", flops=312e9, nbytes=1)
    assert work.least_us("A100") == pytest.approx(1000)
    work = estimates.Work(op="matmul", case="x", flops=1, nbytes=0.864e9)
    assert work.least_us("L40S") == pytest.approx(1000)


def test_works_are_benchmarked_specs(tmp_path):
    """The bytes and operations of known problems, by hand."""
    works = {(w.op, w.case, *w.params.values()): w for w in estimates.works(tmp_path)}
    paged = works["paged_attention", "llama3_8b_b32_c4096"]
    assert paged.nbytes == 32 * 4096 * 8 * 128 * 2 * 2
    attention = works["varlen_attention", "dense_d128_l4096_causal", "fwd"]
    assert attention.flops > 0.5e9 and attention.nbytes % (4 * 2 * 128 * 4096) == 0
    sparse = works["tile_sparse_matmul", "llama3_8b_up_m4096_s75"]
    assert sparse.flops == 2 * 4096 * 1024 * 14336


def test_pruned_layers_count_what_pruning_kept():
    params = {"M": 4096, "N": 8, "K": 16, "layers": 2, "mask": "tw", "sparsity": 0.75}
    row = {"case": "llama3_8b_up", "params": params, "metrics": {"multiplied": 0.25}}
    work = estimates.tile_sparse([{"case": "x", "params": {}}, row])
    assert work.flops == 2 * 2 * 4096 * 8 * 4
    assert work.nbytes == 2 * 2 * (4096 * (8 + 16) + 8 * 4)
    assert work.case == "llama3_8b_up" and work.params["mask"] == "tw"


def test_what_an_h200_has_shown_scales_the_others(tmp_path, monkeypatch):
    works = list(estimates.works(tmp_path))[:2]
    monkeypatch.setattr(estimates, "works", lambda results: iter(works))
    row = {
        "case": works[0].case,
        "implementation": "triton",
        "params": {"pass": "fwd"},
        "time_us": 2 * works[0].least_us("H200"),
    }
    path = tmp_path / "varlen_attention.json"
    path.write_text(json.dumps({"rows": [row]}))
    monkeypatch.setattr(estimates.records, "load", lambda p: json.loads(p.read_text()))
    lines = estimates.markdown(tmp_path).splitlines()
    assert f"| {2 * works[0].least_us('A100'):.0f} |" in lines[2]
    assert lines[2].endswith("| 2.00 |")
    assert f"| ≥ {works[1].least_us('A100'):.0f} |" in lines[3]
    assert lines[3].endswith("| not measured |")
