"""The pieces of a request add up to it; profiles are read as they are meant."""

import os
import sys
from types import SimpleNamespace as Named

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from benchmarks import encode_timeline as timeline
from benchmarks.measure import profiles
from benchmarks.measure.harness import Measurement
from tests.compiled import compile_for_h200


def test_the_pieces_are_the_whole_call(capsys):
    case = timeline.BENCHMARK.quick_cases[1]
    ((same, results),) = timeline.measure([case], ["jaxscale"], samples=1)
    assert same is case
    found = results["jaxscale"]
    assert isinstance(found, Measurement)
    us = [found.metrics[f"{piece}_us"] for piece in timeline.PIECES]
    assert min(us) > 0 and sum(us) == pytest.approx(1e6 * found.median)
    assert found.metrics["read_p10_us"] == found.metrics["read_us"]
    assert found.metrics["traced_us"] > found.metrics["host call"] > 0
    assert "kernels" not in found.metrics  # there is no GPU
    assert f"{case.name} compiled" in capsys.readouterr().out


def line(name, *events):
    """Of a profile; an event is its name, begin and length in us."""
    made = [
        Named(name=name, start_ns=1e3 * begin, duration_ns=1e3 * length)
        for name, begin, length in events
    ]
    return Named(name=name, events=made)


def profile(*offsets):
    """Calls of 100 us; two streams overlap, and a graph is updated."""
    host, other, streams = [], [], ([], [])
    for i, at in enumerate(offsets):
        host += [
            (profiles.CALL, at, 100),
            (f"Execute{i}", at + 10, 50),
            ("command_buffer::update", at + 20, 25),
        ]
        other += [("Transfer", at + 5, 30), ("short", at + 40, 1)]
        streams[0].extend((("gemm", at + 30, 10), ("norm", at + 60, 20)))
        streams[1].append(("gemm", at + 35, 15))
    return Named(
        planes=[
            Named(
                name="/host:CPU", lines=[line("python", *host), line("pool", *other)]
            ),
            Named(
                name="/device:GPU:0",
                lines=[
                    line("Stream #1(Compute)", *streams[0]),
                    line("Stream #2(Compute)", *streams[1]),
                    line("XLA Ops", ("fusion", offsets[0], 1e6)),
                ],
            ),
        ]
    )


def test_a_profile_is_split_into_kernels_gaps_and_the_host():
    found = profiles.summary(profile(0, 200, 1000, 1200, 1400))
    assert found == {
        "traced_us": 100,
        "before_gpu_us": 30,
        "gpu_us": 50,
        "after_gpu_us": 20,
        "kernel_us": 40,  # two overlap for 5
        "gap_us": 10,
        "kernels": 3,
        "graph_updates": 1,
        f"host {profiles.CALL}": 50,
        "host Execute#": 25,
        "host command_buffer::update": 25,
        "beside Transfer": 30,
    }


def test_a_profile_that_misses_the_gpu_is_an_error(monkeypatch):
    monkeypatch.setattr(profiles.timing, "on_gpu", lambda: True)
    with pytest.raises(RuntimeError, match="no kernel"):
        profiles.profiled(lambda: None, calls=1)


def test_own_times_leave_out_what_is_within():
    spans = [(0, 10, "a"), (1, 4, "b"), (2, 3, "a"), (4, 9, "b1"), (12, 13, "b2")]
    assert profiles.own_times(spans) == {"a": 3, "b": 2, "b#": 6}


def test_graphs_stay_in_profiles_beside_other_flags(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_other=1")
    profiles.keep_graphs()
    assert os.environ["XLA_FLAGS"].split() == ["--xla_other=1", profiles.GRAPHS_STAY]


def test_programs_differ_in_arguments_and_launches(capsys):
    calls = timeline.programs((1, 3), (2,))
    assert [*calls] == [
        "1 arguments",
        "3 arguments",
        "2 fusions",
        "2 cublas",
        "2 mosaic",
    ]
    for call in calls.values():
        result = call()
        assert result.sharding.memory_kind == "pinned_host"
        assert np.isfinite(np.asarray(result, np.float32)).all()
    timeline.what_if({"3 arguments": calls["3 arguments"]}, samples=5)
    out = capsys.readouterr().out
    assert out.count("\n3 arguments") == 2 and "graph_updates" in out


def program(devices, kind, count):
    """A chain and its arguments, for `compile_for_h200`."""
    where, m, d = SingleDeviceSharding(devices[0]), timeline.M, timeline.D
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=where)
        for shape in ((m, d), (d, d), (d,))
    ]
    return timeline.chain(devices[0], kind, count), shapes


@pytest.mark.skipif(sys.platform != "linux", reason="the plugin is for Linux")
def test_chains_are_launches_of_their_kind_in_one_graph():
    names = {"fusions": "kCustomKernel", "cublas": "kCublasLtMatmul"}
    for kind in timeline.KINDS:
        graph, *inside = compile_for_h200(program, kind, 6).thunks
        assert graph.strip() == "kCommandBuffer", kind
        assert [line[:4] for line in inside] == ["    "] * 7  # the last reads a row
        name = names.get(kind, "kCustomCall")
        assert [line.split()[0] for line in inside[:-1]] == [name] * 6
