"""The benchmark of attention: its layouts, definition, errors and quick run."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention_baselines as baselines
from benchmarks import command
from benchmarks import varlen_attention as benchmark
from benchmarks.attention_baselines import Layout
from pallas_kernels.varlen_attention import varlen_attention
from pallas_kernels.varlen_attention.specs import VarlenSpec


LENGTHS = (3, 0, 5, 1)
RESULTS = Path(benchmark.__file__).parent / "results/nvidia_h200/varlen_attention.json"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(batched=True),
        Layout(batched=True, heads_first=True),
        Layout(padded=True),
        Layout(padded=True, heads_first=True),
    ],
)
def test_rows_come_back_from_every_layout(layout):
    x = jax.random.normal(jax.random.key(0), (12, 2, 4))
    laid = np.asarray(layout.lay(x, LENGTHS))
    for b, start in enumerate((0, 3, 3, 8)):
        found = layout.rows(laid, LENGTHS, b)
        np.testing.assert_array_equal(found, x[start : start + LENGTHS[b]])
    if layout.padded:
        assert laid.shape == ((4, 2, 8, 4) if layout.heads_first else (4, 8, 2, 4))
        assert np.count_nonzero(laid) == 9 * 2 * 4


@pytest.mark.parametrize("spec", benchmark.QUICK, ids=lambda spec: spec.name)
def test_the_definition_is_that_of_the_op(spec):
    """A sequence and key head of the op in fp32, at awkward lengths."""
    rng = np.random.default_rng(0)
    queries, keys = sum(spec.lengths_q), sum(spec.lengths_k)
    q, dout = rng.normal(size=(2, queries, spec.num_heads, 16)).astype(np.float32)
    k, v = rng.normal(size=(2, keys, spec.num_kv_heads, 16)).astype(np.float32)
    cu_q, cu_k = spec.cu_seqlens()

    def op(q, k, v):
        cu = (cu_q,) if baselines.self_attention(spec) else (cu_q, cu_k)
        return varlen_attention(q, k, v, *cu, causal=spec.causal, implementation="xla")

    out, back = jax.vjp(op, jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    want = [np.asarray(x) for x in (out, *back(jnp.asarray(dout)))]
    packed = [jnp.asarray(x) for x in (q, k, v, dout)]
    with benchmark.ThreadPoolExecutor(1) as pool:
        programs = benchmark.programs_of_definition(spec, pool)
        right = benchmark.expected(spec, packed, programs)
    benchmark._definition_program.cache_clear()  # its pool is gone
    form = baselines.ours("xla", spec, True)
    worst, by_norm = benchmark.errors(spec, form, want, right)
    assert 0 < worst < 1e-5 and 0 < by_norm < 1e-5
    want[2] = want[2] + 0.1  # an error in the gradient of the keys is seen
    assert benchmark.errors(spec, form, want, right)[1] > 0.01


def test_errors_are_worst_for_nan():
    spec = benchmark.QUICK[0]
    form = baselines.ours("xla", spec, False)
    shape = (sum(spec.lengths_q), spec.num_heads, spec.head_dim)
    right = [
        [np.ones((spec.lengths_q[b], 1, 16), np.float32)]
        for b in benchmark.sample(spec).sequences
    ]
    found = np.full(shape, np.nan, np.float32)
    assert benchmark.errors(spec, form, [found], right) == (np.inf, np.inf)


def test_masks_of_padded_batches():
    spec = dataclasses.replace(
        benchmark.QUICK[2], lengths_q=(2, 1), lengths_k=(3, 2), causal=True
    )
    mask = baselines.padding_mask(spec)[:, 0].astype(int)
    assert mask.shape == (2, 8, 8) and not mask[:, 2:].any() and not mask[..., 3:].any()
    np.testing.assert_array_equal(mask[0, :2, :3], [[1, 1, 0], [1, 1, 1]])
    np.testing.assert_array_equal(mask[1, :2, :3], [[1, 1, 0], [0, 0, 0]])


def test_what_does_not_fit_is_said():
    long = VarlenSpec(
        name="long",
        pattern="constant",
        lengths_q=(65536,),
        lengths_k=(65536,),
        num_heads=16,
        num_kv_heads=16,
        head_dim=64,
    )
    with pytest.raises(NotImplementedError, match="275 GB"):
        baselines.FORMS["xla_mask"](long, False)
    with pytest.raises(NotImplementedError, match="need a GPU"):
        baselines.FORMS["cudnn_packed"](long, False)


def test_cases_hold_the_grids_and_begin_with_the_targets():
    found = benchmark.BENCHMARK.cases
    assert {c.name for c in found[:6]} == {
        "dense_d64_l4096_full",
        "dense_d128_l4096_full",
        "dense_d128_l4096_causal",
    }
    params = [case.params for case in found]
    assert {p["pattern"] for p in params} == {
        "constant",
        "uniform",
        "wide",
        "bytetransformer",
        "long_tail",
        "bimodal",
        "skewed",
        "skewed_shuffled",
        "zero_length",
        "documents",
    }
    bert = {(p["batch"], p["max_len"]) for p in params if p["heads"] == "12"}
    assert {b for b, _ in bert} == {1, 8, 16, 64} and len(bert) == 28
    assert {p["heads"] for p in params if p["pattern"] == "documents"} == {
        "32/8",
        "71/1",
    }
    keys = [(c.name, c.params["pass"]) for c in found]
    assert len(keys) == len(set(keys)) == 2 * len(benchmark.BY_NAME) - 6


def test_ratios_to_cudnn():
    found = benchmark.compare(
        {}, {"cudnn_packed": 4.0, "cudnn_padded": 3.0, "mosaic_gpu": 2.0}
    )
    assert found["mosaic_gpu"] == {"vs_cudnn_packed": 2.0, "vs_cudnn": 1.5}
    assert benchmark.compare({}, {"mosaic_gpu": 1.0}) == {"mosaic_gpu": {}}


def test_the_command_runs_anywhere_and_writes_nothing(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path), "--case", "tiny_causal"]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    assert "mosaic_gpu: not supported" in out and "torch with a GPU" in out
    assert "norm_error" in out and "| tiny_causal | fwd_bwd |" in out
    assert not [*tmp_path.rglob("*")]
    benchmark._definition_program.cache_clear()


def test_packed_rows_need_no_cudnn():
    """What `varlen_attention` relies on, which never takes it."""
    rows = json.loads(RESULTS.read_text())["rows"]
    times = {}
    for row in rows:
        key = row["case"], row["params"]["pass"]
        times.setdefault(key, (row["params"], {}))[1][row["implementation"]] = row
    compared = 0
    for (case, _), (params, found) in times.items():
        for name in {"cudnn_packed", "cudnn_padded"} & set(found):
            if "mosaic_gpu" not in found:
                continue
            ratio = found[name]["time_us"] / found["mosaic_gpu"]["time_us"]
            one_length = params["batch"] * params["max_len"] == params["tokens"]
            if not one_length:
                assert ratio > 1.04, (case, params, name)
            elif name == "cudnn_packed":
                assert ratio > (0.96 if params["head_dim"] == 256 else 1.04), params
            compared += not one_length
    assert compared > 100
