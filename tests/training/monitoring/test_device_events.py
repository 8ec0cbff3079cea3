"""Computing is told from waiting, in made-up profiles and in what XLA writes."""

import dataclasses
import json
import sys
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxscale.supervision import EventLog, read_events
from jaxscale.training.monitoring.device_events import DeviceEvents, Share, share
from tests.calls import own_calls
from tests.training.processes import join, run_two


def profile(planes):
    """As a `ProfileData`: names of planes, of lines, and spans in ms with names."""

    def event(begin, end, name):
        spans = {"start_ns": 1e6 * begin, "duration_ns": 1e6 * (end - begin)}
        return SimpleNamespace(name=name, **spans)

    return SimpleNamespace(
        planes=[
            SimpleNamespace(
                name=plane,
                lines=[
                    SimpleNamespace(name=line, events=[event(*e) for e in events])
                    for line, events in lines.items()
                ],
            )
            for plane, lines in planes.items()
        ]
    )


def ms(found):
    return {k: round(1e3 * v, 6) for k, v in dataclasses.asdict(found).items()}


def test_collectives_behind_kernels_are_no_waiting():
    """Two streams of a GPU: what NCCL does while kernels run costs nothing."""
    taken = profile(
        {
            "/device:GPU:0": {
                "Stream #7(Compute)": [
                    (0, 10, "gemm_fusion_dot_3"),
                    (12, 20, "mosaic_gpu_all_gather_matmul"),
                ],
                "Stream #9(Compute)": [
                    (
                        5,
                        12,
                        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)",
                    ),
                    (20, 26, "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long)"),
                    (24, 27, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"),
                ],
                "XLA Ops": [(0, 30, "fusion")],
            },
            "/host:CPU": {"python": [(0, 30, "PjitFunction(step)")]},
        }
    )
    assert ms(share(taken, 0, 0.030, 1)) == {"computing": 18, "waiting": 9}
    assert ms(share(taken, 0.008, 0.022, 1)) == {"computing": 10, "waiting": 4}
    assert ms(share(taken, 0, 0.030, 2)) == {"computing": 9, "waiting": 4.5}
    assert share(taken, 1, 2, 1) == Share(computing=0.0, waiting=0.0)
    assert share(profile({}), 0, 1, 1) == Share(computing=0.0, waiting=0.0)


@pytest.mark.parametrize(
    ("name", "waits"),
    [
        ("all-reduce.5", True),
        ("all-gather-start.1", True),
        ("collective-permute-done", True),
        ("recv-done.2", True),
        ("send", True),
        ("psum_invariant.7", True),
        ("ppermute.2", True),
        ("all_gather.1", True),
        ("all_gather_add_fusion", False),
        ("axis_index.12", False),
        ("copy_subtract_fusion", False),
        ("sender_fusion.2", False),
        ("dot.4", False),
    ],
)
def test_names_of_operations(name, waits):
    taken = profile({"/host:CPU": {"tf_XLAPjRtCpuClient/1": [(0, 10, name)]}})
    found = ms(share(taken, 0, 1, 1))
    assert found == {"computing": 10 * (not waits), "waiting": 10 * waits}


def test_loops_are_what_is_in_them():
    inner = [(0, 10, "while.3"), (1, 3, "dot.4"), (3, 8, "all-reduce.1")]
    taken = profile({"/host:CPU": {"tf_XLAPjRtCpuClient/1": inner}})
    assert ms(share(taken, 0, 1, 1)) == {"computing": 2, "waiting": 5}


def test_paces_compilations_and_memory_are_events(tmp_path, monkeypatch):
    stats = {"bytes_in_use": 5, "peak_bytes_in_use": 7, "bytes_limit": 9}
    device = SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device, device])
    log = EventLog()
    with log.written_to(tmp_path / "events.jsonl"), DeviceEvents(log) as devices:
        jax.monitoring.record_event_duration_secs(
            "/jax/core/compile/backend_compile_duration", 2.5, fun_name="jit(step)"
        )
        for step in range(1, 9):
            devices.begin(step)
            devices.dispatched(step, 10.0 + step + 0.25)
            devices.done(step, 10.0 + step if step > 1 else None, 11.0 + step)
    events = {e["name"]: e for e in read_events(tmp_path / "events.jsonl")}
    assert events["pace"]["args"] == {"seconds": 1.0, "starved": 0.25}
    assert events["memory"]["args"] == stats
    compiled = events["compiled"]
    assert compiled["args"] == {"program": "jit(step)"}
    assert compiled["t1"] - compiled["t0"] == pytest.approx(2.5, abs=0.1)
    assert "profile" not in events


def test_a_profile_lasts_from_the_end_of_the_step_it_was_started_before(
    tmp_path, monkeypatch
):
    """Ends noticed after a slow start of the profiler, as of CUPTI's, do not count."""
    start = jax.profiler.start_trace

    def slow(*args, **kwargs):
        start(*args, **kwargs)
        time.sleep(0.2)

    monkeypatch.setattr(jax.profiler, "start_trace", slow)
    work = jax.jit(lambda x: jnp.linalg.matrix_power(x, 9))
    x = jnp.eye(1200)
    work(x).block_until_ready()
    log = EventLog()
    path, ends = tmp_path / "events.jsonl", {}
    with log.written_to(path), DeviceEvents(log, profile_every=3) as devices:
        for step in range(1, 6):
            devices.begin(step)
            if step == 3:  # what was under way has ended while the profiler started
                devices.done(1, None, time.time())
                devices.done(2, None, time.time())
            begun = time.time()
            work(x).block_until_ready()
            ends[step] = time.time()
            if step > 2:
                devices.done(step, begun, ends[step])
    (found,) = [e for e in read_events(path) if e["name"] == "profile"]
    assert found["step"] == 4
    seconds = found["args"]["seconds"]
    assert seconds == pytest.approx(ends[4] - ends[3])
    computing = found["args"]["computing"] * jax.local_device_count()  # one has worked
    assert 0.2 * seconds < computing < 1.05 * seconds


def test_another_profile_is_left_alone(tmp_path, caplog):
    watched = DeviceEvents(EventLog(), profile_every=1)
    with jax.profiler.trace(str(tmp_path)), watched as devices:
        devices.begin(1)
        devices.done(1, None, time.time())
    assert "no profile of this step is taken" in caplog.text
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_a_step_costs_its_caller_few_calls(tmp_path):
    """Those of the loop, and what is told beside them."""
    log = EventLog()
    with log.written_to(tmp_path / "events.jsonl"), DeviceEvents(log) as devices:

        def step():
            devices.begin(1)
            at = log.emit("begin", 1)
            at = log.emit("data", 1, since=at)
            at = log.emit("dispatched", 1, since=at)
            devices.dispatched(1, at)
            done = log.emit("done", 1, kind="device", since=at, loss=2.5)
            devices.done(1, at, done)

        step()  # the first looks at the devices
        assert own_calls(step) == 4 + 3


@pytest.mark.slow
def test_of_two_processes_the_slow_one_computes_and_the_other_waits():
    (fast, _), (slow, _) = run_two("tests.training.monitoring.test_device_events")
    assert slow["computing"] > 2 * fast["computing"]
    assert fast["waiting"] > 2 * slow["waiting"]
    assert fast["waiting"] > 0.3 * fast["seconds"]
    for found in (fast, slow):
        assert found["computing"] + found["waiting"] <= 1.05 * found["seconds"]


def main(coordinator, rank):
    """A process of two: many times as much to compute on one, a sum over both."""
    join(coordinator, rank)
    mesh = jax.make_mesh((4,), ("x",))
    rows = jax.NamedSharding(mesh, jax.P("x"))

    @jax.jit
    def step(x):
        def mine(x):
            count = jnp.where(jax.lax.axis_index("x") >= 2, 64, 4)
            x = jax.lax.fori_loop(0, count, lambda _, x: jnp.tanh(x @ x[0]), x)
            return jax.lax.psum(x, "x")

        return jax.shard_map(mine, mesh=mesh, in_specs=jax.P("x"), out_specs=jax.P())(x)

    make = jax.jit(lambda: jnp.ones((4, 320, 320)), out_shardings=rows)
    log, found = EventLog(), []
    log.emit = lambda name, *a, **args: found.append((name, args))
    x = make()
    with DeviceEvents(log, profile_every=3) as devices:
        for number in range(1, 8):
            devices.begin(number)
            jax.block_until_ready(step(x))
            devices.done(number, None, time.time())
            time.sleep(0.02)
    print(json.dumps(next(args for name, args in found if name == "profile")))


if __name__ == "__main__":
    main(*sys.argv[1:])
