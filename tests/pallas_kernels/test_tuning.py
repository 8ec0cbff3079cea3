"""Where configs come from, and what a broken table says."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.mosaic.gpu import profiler

from pallas_kernels import tuned_configs, tuning
from pallas_kernels.collective_matmul import CollectiveConfig
from pallas_kernels.collective_matmul import tunable as collective_tunable
from pallas_kernels.matmul import MatmulConfig, tunable
from pallas_kernels.matmul.config import Problem, candidates, heuristic
from pallas_kernels.mosaic import H200
from pallas_kernels.tile_sparse_matmul import TileSparseConfig
from pallas_kernels.tile_sparse_matmul import tunable as tile_sparse_tunable


KEY = "m=4096 n=8192 k=4096 bf16"
BF16 = jnp.dtype(jnp.bfloat16)
ENTRY = {
    "config": {"tile_n": 192, "store_slots": 3},
    "time_us": 10.5,
    "xla_us": 11.0,
    "jax": "0.11.2",
    "date": "2026-11-20",
}


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setenv("PALLAS_KERNELS_TUNED_DIR", str(tmp_path))

    def write(content):
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / "nvidia_h200.json").write_text(text)

    return write


def look_up(**kwargs):
    return tuned_configs.lookup(
        "matmul",
        KEY,
        H200,
        MatmulConfig,
        heuristic=lambda: MatmulConfig(tile_n=64, store_slots=1),
        **kwargs,
    )


def test_explicit_then_override_then_table_then_heuristic(table):
    assert look_up().tile_n == 64
    table({"matmul": {KEY: ENTRY}})
    assert look_up() == MatmulConfig(tile_n=192, store_slots=3)
    with tuned_configs.override("matmul", MatmulConfig(tile_n=128)):
        assert look_up().tile_n == 128
        assert look_up(config=MatmulConfig(tile_n=256)).tile_n == 256
        with tuned_configs.override("other", object()):
            assert look_up().tile_n == 128
    assert look_up().tile_n == 192


def test_without_a_device_no_table_is_read(table):
    table("no json")
    assert (
        tuned_configs.lookup("matmul", KEY, None, MatmulConfig, heuristic=MatmulConfig)
        == MatmulConfig()
    )


def test_an_override_ends_with_its_block_also_on_errors():
    with pytest.raises(RuntimeError), tuned_configs.override("matmul", MatmulConfig()):
        raise RuntimeError
    assert look_up().tile_n == 64


@pytest.mark.parametrize("source", ["config", "override"])
def test_a_config_of_another_op_is_refused(source):
    with pytest.raises(ValueError, match=f"{source} .* expected a MatmulConfig"):
        if source == "config":
            look_up(config=H200)
        with tuned_configs.override("matmul", H200):
            look_up()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "nvidia_h200.json is no JSON: .*repair or delete it"),
        ([], "expected an object of ops"),
        ({"matmul": []}, "matmul: expected an object of problems"),
        ({"matmul": {KEY: {"config": {}}}}, r"(?s)m=4096.*missing.*time_us"),
        ({"matmul": {KEY: ENTRY | {"time_us": -1}}}, "time_us -1, expected a positive"),
        ({"matmul": {KEY: ENTRY | {"time_us": "a"}}}, r"(?s)m=4096.*time_us"),
        ({"matmul": {KEY: ENTRY | {"config": 3}}}, r"(?s)m=4096.*config"),
        (
            {"matmul": {KEY: ENTRY | {"config": {"tile_x": 3}}}},
            r"unknown fields \['tile_x'\].*run `python -m pallas_kernels.tuning matmul",
        ),
        (
            {"matmul": {KEY: ENTRY | {"config": {"tile_n": 384}}}},
            "tile_n 384, expected at most 320",
        ),
        (
            {"matmul": {KEY: ENTRY | {"config": {"stages": 4.0}}}},
            r"(?s)m=4096.*stages.*4\.0",
        ),
        (
            {"matmul": {KEY: ENTRY | {"config": {"stages": "4"}}}},
            r"(?s)m=4096.*stages.*'4'",
        ),
    ],
)
def test_malformed_tables_are_clear_errors(table, content, message):
    table(content)
    with pytest.raises(ValueError, match=message):
        look_up()


def test_saved_entries_are_read_back_and_replaced(tmp_path):
    path = tmp_path / "deep" / "nvidia_h200.json"
    first = tuned_configs.TunedEntry(**ENTRY)
    tuned_configs.save_table(path, "matmul", {KEY: first, "other": first})
    second = dataclasses.replace(first, time_us=9.0)
    tuned_configs.save_table(path, "matmul", {KEY: second})
    assert tuned_configs.load_table(path) == {"matmul": {KEY: second, "other": first}}


TABLES = sorted(tuned_configs.table_path(H200).parent.glob("*.json"))


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_shipped_tables_parse(path):
    ops = {
        "matmul": (tunable, MatmulConfig),
        "collective_matmul": (collective_tunable, CollectiveConfig),
        "tile_sparse_matmul": (tile_sparse_tunable, TileSparseConfig),
    }
    device = dataclasses.replace(H200, name=path.stem)
    for op, rows in tuned_configs.load_table(path).items():
        module, config_type = ops[op]
        known = {problem.key for problem in module.problems().values()}
        for key, entry in rows.items():
            assert key in known, f"{key} belongs to no spec"
            config = tuned_configs.lookup(
                op, key, device, config_type, heuristic=lambda: pytest.fail("no entry")
            )
            assert entry.config.items() <= dataclasses.asdict(config).items()


def test_tables_are_shipped():
    assert {path.stem for path in TABLES} == {"nvidia_h200", "nvidia_h100_80gb_hbm3"}


def test_the_measured_winner_is_preferred(table):
    problem = Problem(m=4096, n=8192, k=4096, dtype=BF16, out_dtype=BF16)
    assert problem.key == KEY
    choose = functools.partial(tuned_configs.declines, "matmul", problem, H200)
    assert choose() is None
    table({"matmul": {KEY: ENTRY}})
    assert choose() is None
    table({"matmul": {KEY: ENTRY | {"xla_us": 9.0, "date": "2026-11-21"}}})
    reason = choose()
    assert reason is not None and "XLA took 9.0 us and the kernel 10.5 us" in reason
    # Within the noise the kernel may lose.
    table({"matmul": {KEY: ENTRY | {"xla_us": 10.3, "date": "2026-11-22"}}})
    assert choose() is None
    table({"matmul": {KEY: ENTRY | {"xla_us": 10.28, "date": "2026-11-23"}}})
    assert choose() is not None
    assert tuned_configs.declines("matmul", problem, None) is None  # the kernel says so
    assert choose(MatmulConfig()) is None
    with tuned_configs.override("matmul", MatmulConfig()):
        assert choose() is None
    with tuned_configs.override("other", MatmulConfig()):
        assert choose() is not None


def test_functions_are_traced_again_under_another_override():
    found = []

    @jax.jit
    def f(x):
        found.append(look_up().tile_n)
        return x

    for tile_n in (128, 192, 128):
        with tuned_configs.override("matmul", MatmulConfig(tile_n=tile_n)):
            f(1.0)
    f(1.0)
    assert found == [128, 192, 64]


def test_unknown_problems_without_enough_tiles_go_to_xla():
    def order(m, n):
        problem = Problem(m=m, n=n, k=4096, dtype=BF16, out_dtype=BF16)
        reason = tuned_configs.declines("matmul", problem, H200)
        return "mosaic_gpu" if reason is None else "xla"

    assert order(16, 1024) == "xla"
    assert order(1024, 2560) == "xla"  # 112 tiles on 132 multiprocessors
    assert order(2048, 2560) == "mosaic_gpu"  # 128 wide ones
    assert order(4001, 4096) == "xla"
    assert order(4000, 4096) == "mosaic_gpu"


def test_keys_name_what_differs():
    problem = Problem(
        m=1, n=2, k=3, dtype=BF16, out_dtype=jnp.dtype("float32"), rhs_transposed=True
    )
    assert problem.key == "m=1 n=2 k=3 bf16 out=f32 rhs_transposed"


def test_the_tuner_has_little_to_time():
    for problem in tunable.problems().values():
        found = candidates(problem, H200)
        assert heuristic(problem, H200) in found
        assert len(found) == len(set(found)) <= 12


def test_calls_take_turns_on_copies_that_exceed_the_l2(monkeypatch):
    """A profiler in place of CUPTI sees the operands of each call."""
    seen = []

    class Recorder:
        def __init__(self, finalize):
            pass

        def measure(self, fn, *, iterations):
            assert isinstance(fn, jax.stages.Wrapped)  # or CUPTI's would be jitted anew

            def run():
                fn()
                results = [fn() for _ in range(iterations)]
                return results[0], [0.25] * iterations

            return run

    monkeypatch.setattr(profiler, "Cupti", Recorder)

    def record(x, w):
        np.testing.assert_array_equal(w["values"], weight["values"])
        seen.append((x.unsafe_buffer_pointer(), w["values"].unsafe_buffer_pointer()))

    def timed(floats, iterations):
        seen.clear()
        monkeypatch.setattr(tuning, "_L2_BYTES", 2 * 4096 * floats)
        return tuning.device_time_us(record, x, weight, iterations=iterations)

    x = jnp.ones((1, 1024))
    weight = {"values": jnp.arange(3 * 1024.0)}
    assert timed(4, iterations=10) == [250.0] * 10  # 64 KiB of 16 KiB: five sets
    assert len(seen) == 11 and len(set(seen)) == 5 and seen[:5] == seen[5:10]
    assert all(len({x, w}) == 2 for x, w in seen)
    assert len(timed(9, iterations=2)) == 10  # each set at least once
    assert len(set(seen)) == 10
    timed(1, iterations=3)  # as large as the L2 twice: no copies
    assert len(set(seen)) == 1 and len(seen) == 4


def test_the_tuner_needs_a_gpu(capsys):
    with pytest.raises(SystemExit):
        tuning.main(["matmul"])
    assert "no NVIDIA GPU: the backend is 'cpu'" in capsys.readouterr().err
