"""Programs of many calls do every call, on the right operands, and are compared."""

import contextlib
import queue
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from benchmarks.measure import loop_programs, loops, timing
from benchmarks.measure.harness import Measurement, NoMeasurement
from benchmarks.measure.loop_programs import Check, Form, Operand, Problem


P = jax.sharding.PartitionSpec


def mesh(size=4):
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((size,), ("t",), auto, devices=jax.devices()[:size])


def form(name, function, **changes):
    options = {
        "name": name,
        "function": function,
        "operands": ("x", "w"),
        "out_spec": P(None, "t"),
        "check": "product",
    }
    return Form(**(options | changes))


def gathered(x, w):
    return lax.all_gather(x, "t", tiled=True) @ w


def problem(*forms, num_sets=2, **changes):
    options = {
        "label": "a problem",
        "mesh": mesh(),
        "operands": {
            "x": Operand(shape=(16, 32), spec=P("t")),
            "w": Operand(shape=(32, 64), spec=P(None, "t")),
        },
        "derived": {
            "all_x": (lambda d: lax.all_gather(d["x"], "t", tiled=True), P()),
        },
        "forms": forms,
        "checks": {
            "product": Check(
                expected=lambda d: gathered(
                    d["x"].astype(jnp.float32), d["w"].astype(jnp.float32)
                )[::3],
                found=lambda y: y[::3],
                spec=P(None, "t"),
            )
        },
        "num_sets": num_sets,
        "seconds": 1e-3,
    }
    return Problem(**(options | changes))


def measure(*problems, samples=3):
    return [results for _, results in loops.measure(problems, samples, batch=2)]


def test_forms_are_timed_and_compared():
    (results,) = measure(
        problem(
            form("xla", gathered),
            form("alone", lambda x, w: x @ w, operands=("all_x", "w")),
            form("off", lambda x, w: 1.5 * gathered(x, w)),
        )
    )
    assert {name: len(r.seconds) for name, r in results.items()} == {
        "xla": 3,
        "alone": 3,
        "off": 3,
    }
    assert 0 < results["xla"].max_rel_error < 1e-2
    assert 0 < results["alone"].max_rel_error < 1e-2
    assert results["off"].max_rel_error == pytest.approx(0.5, abs=0.02)
    assert results["xla"].num_devices == 4


@pytest.mark.parametrize("num_sets", [1, 3])
def test_every_call_of_the_loop_is_there(num_sets):
    """Compiled, a turn still holds a collective and a product for each call."""
    one = form("xla", gathered)
    program, arguments, calls = loop_programs.program(
        problem(one, num_sets=num_sets), one
    )
    per_turn = max(2, num_sets)
    assert calls == 2 * per_turn  # two turns on a CPU
    text = program.lower(*arguments).compile().as_text()
    bodies = [part for part in re.split(r"\n(?=[%E])", text) if "all-gather(" in part]
    assert [body.count(" all-gather(") for body in bodies] == [per_turn]
    assert not bodies[0].startswith("ENTRY")
    products = bodies[0].count(" dot(") + bodies[0].count("kind=kCustom")
    assert products == per_turn and " copy(" not in bodies[0]


def test_calls_take_turns_with_the_sets_and_use_what_they_are_given():
    def run(x, sets):
        return loop_programs.repeated(lambda x, w: x + w, trips=3)(x, sets)

    sets = ((jnp.float32(1),), (jnp.float32(2),), (jnp.float32(3),))
    assert [float(y) for y in jax.jit(run)(jnp.float32(10), sets)] == [11, 12, 13]


def test_the_fastest_of_several_forms_counts_and_says_so(monkeypatch):
    times = {0.0: 5.0, 1.0: 2.0, 2.0: 2.05}
    taken = []

    def take(self):
        taken.append(self.alike[0].form.metrics["which"])
        return times[taken[-1]]

    def scaled(factor):  # or all would be one program
        return lambda x, w: (1 + factor) * gathered(x, w)

    monkeypatch.setattr(loops._Timed, "take", take)
    (results,) = measure(
        problem(*(form("best", scaled(i), metrics={"which": i}) for i in times))
    )
    assert results["best"].metrics["which"] == 1.0
    assert results["best"].seconds == [2.0] * 3
    # What is far behind after the first turn has no second.
    assert sorted(taken[:3]) == [0.0, 1.0, 2.0]
    assert sorted(taken[3:]) == [1.0, 1.0, 2.0, 2.0]


def test_turns_differ_in_their_order(monkeypatch):
    """With the same neighbor in every turn a form would look slow."""
    taken = []

    def take(self):
        taken.append(self.alike[0].form.metrics["which"])
        return 1.0

    def scaled(factor):  # or all would be one program
        return lambda x, w: (1 + factor) * gathered(x, w)

    monkeypatch.setattr(loops._Timed, "take", take)
    forms = (form("best", scaled(i), metrics={"which": i}) for i in range(4))
    (_,) = measure(problem(*forms), samples=6)
    turns = [tuple(taken[i : i + 4]) for i in range(0, 24, 4)]
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in turns)
    followed = {turn[i : i + 2] for turn in turns for i in range(3)}
    assert len(set(turns)) > 3 and len(followed) > 6


def test_auto_says_whether_it_is_a_kernel(monkeypatch):
    for kernel, expected in (("stablehlo.all_gather", 1.0), (loops.KERNEL, 0.0)):
        monkeypatch.setattr(loops, "KERNEL", kernel)
        (results,) = measure(problem(form("auto", gathered)), samples=1)
        assert results["auto"].metrics["is_mosaic_gpu"] == expected


def test_equal_programs_are_compiled_once():
    with ThreadPoolExecutor(1) as pool:
        prepared = loops.prepare(
            problem(
                form("a", gathered),
                form("b", gathered),
                form("c", gathered, compiler_options={"xla_cpu_enable_fast_math": 0}),
            ),
            pool,
        )
    a, b, c = (ready.program for ready in prepared.forms)
    assert a is b and a is not c


def test_products_of_xla_are_also_compiled_as_cublas_chooses(monkeypatch):
    """On a GPU, for every name alike: XLA's own choice is at times a slow one."""
    monkeypatch.setattr(timing, "on_gpu", lambda: True)
    taken = []

    def take(self):
        taken.append(
            [
                (ready.form.name, tuple(ready.program.options.items()))
                for ready in self.alike
            ]
        )
        return 1.0 + len(taken) / 1e3

    monkeypatch.setattr(loops._Timed, "take", take)
    hiding = {"xla_gpu_enable_latency_hiding_scheduler": True}
    (results,) = measure(
        problem(
            form("auto", gathered),
            form("xla", gathered),
            form("lhs", gathered, compiler_options=hiding),
            form("no product", lambda x, w: 1.0 * w[:16]),
        ),
        samples=1,
    )
    own = ("xla_gpu_autotune_level", 0)
    on = ("xla_gpu_enable_latency_hiding_scheduler", True)
    assert sorted(taken) == [
        [("auto", ()), ("xla", ())],
        [("auto", (own,)), ("xla", (own,))],
        [("lhs", (on,))],
        [("lhs", (on, own))],
        [("no product", ())],
    ]
    assert results["auto"].seconds == results["xla"].seconds


def test_equal_programs_are_timed_once(monkeypatch):
    """Also between names; but not where the operands differ."""
    taken = []
    real = loops._Timed.take

    def take(self):
        taken.append([ready.form.name for ready in self.alike])
        return real(self)

    monkeypatch.setattr(loops._Timed, "take", take)
    (results,) = measure(
        problem(
            form("auto", gathered),
            form("xla", gathered, metrics={"which": 1.0}),
            form("other", gathered, operands=("x", "v")),
            operands={
                "x": Operand(shape=(16, 32), spec=P("t")),
                "w": Operand(shape=(32, 64), spec=P(None, "t")),
                "v": Operand(shape=(32, 64), spec=P(None, "t")),
            },
        )
    )
    assert sorted(taken) == [["auto", "xla"]] * 3 + [["other"]] * 3
    auto, xla, other = (results[name] for name in ("auto", "xla", "other"))
    assert auto.seconds == xla.seconds and len(xla.seconds) == 3
    assert auto.seconds != other.seconds
    assert auto.max_rel_error == xla.max_rel_error < 1e-2 < other.max_rel_error
    assert auto.metrics["is_mosaic_gpu"] == 0.0 and "which" not in auto.metrics
    assert xla.metrics["which"] == 1.0 and "is_mosaic_gpu" not in xla.metrics
    # One result of [16, 64] in bf16 on each device, and what a call gathers at most.
    result = 16 * 64 * 2 / 1e6
    assert result <= xla.metrics["memory_mb"] <= 4 * result
    assert xla.metrics["compile_seconds"] > 0


def test_a_program_that_breaks_is_missed_by_all_of_its_names(monkeypatch):
    def take(self):
        if self.name == "auto":
            raise MemoryError
        return 1.0

    monkeypatch.setattr(loops._Timed, "take", take)
    (results,) = measure(
        problem(
            form("auto", gathered),
            form("xla", gathered),
            form("off", lambda x, w: 1.5 * gathered(x, w)),
        )
    )
    broken = NoMeasurement("failed: MemoryError", failed=True)
    assert results["auto"] == results["xla"] == broken
    assert results["off"].seconds == [1.0] * 3


@pytest.mark.parametrize("on_gpu", [False, True])
def test_programs_are_made_beside_others_and_timed_in_turn(on_gpu, monkeypatch):
    """Those for which XLA times algorithms are made in turn as well, one by one."""
    seen, held = [], []

    def lock(name):
        @contextlib.contextmanager
        def taken():
            assert not held  # a process must not wait for itself
            held.append(name)
            yield
            held.pop()

        return taken

    def noted(what, real):
        def call(*args, **kwargs):
            seen.append((what, *held))
            return real(*args, **kwargs)

        return call

    def lowered(x, w):
        seen.append(("lower", *held))
        return gathered(x, w)

    def compiled(self, pool):
        done = compile_(self, pool)
        if on_gpu and self.times_algorithms:
            assert all(other.done() for other in begun)
            seen.append(("choose", *held))
        begun.append(done)
        return done

    begun = []
    compile_ = loop_programs.Program.compile
    monkeypatch.setattr(loop_programs.Program, "compile", compiled)
    monkeypatch.setattr(timing, "on_gpu", lambda: on_gpu)
    monkeypatch.setattr(timing, "preparing", lock("preparing"))
    monkeypatch.setattr(timing, "turn", lock("turn"))
    monkeypatch.setattr(loops, "_wait", noted("compile", loops._wait))
    monkeypatch.setattr(loops, "_operands", noted("draw", loops._operands))
    monkeypatch.setattr(loops._Timed, "take", noted("time", loops._Timed.take))
    one = problem(form("xla", lowered))
    for _ in loops.measure([one] * 3, samples=1, batch=2):
        assert not held  # whoever takes a result may be slow
    in_turn = {("choose", "turn"), ("compile", "turn")} if on_gpu else set()
    assert set(seen) == in_turn | {
        ("lower", "preparing"),
        ("compile", "preparing"),
        ("draw", "turn"),
        ("time", "turn"),
    }


def test_forms_that_break_leave_the_others_alone(capsys):
    def unsupported(x, w):
        raise NotImplementedError("needs a Hopper GPU")

    def broken(x, w):
        raise MemoryError("too big")

    first, second = measure(
        problem(form("no", unsupported), form("broken", broken), form("xla", gathered)),
        problem(form("xla", gathered)),
    )
    assert first["no"] == NoMeasurement("not supported: needs a Hopper GPU")
    assert first["broken"] == NoMeasurement("failed: MemoryError", failed=True)
    assert "too big" in capsys.readouterr().err
    assert isinstance(first["xla"], Measurement)
    assert isinstance(second["xla"], Measurement)


def test_operands_differ_between_devices_and_sets():
    one = problem(form("xla", gathered), num_sets=3)
    with ThreadPoolExecutor(1) as pool:
        arrays = loops._operands(loops.prepare(one, pool))
    assert [len(arrays[name]) for name in ("x", "w", "all_x")] == [1, 3, 1]
    x = np.asarray(arrays["x"][0], np.float32)
    assert abs(x.mean()) < 0.2 and 0.8 < x.std() < 1.2
    parts = [x[i * 4 : i * 4 + 4] for i in range(4)]
    parts += [np.asarray(w, np.float32)[:4] for w in arrays["w"]]
    flat = {part.tobytes() for part in parts}
    assert len(flat) == 7
    np.testing.assert_array_equal(np.asarray(arrays["all_x"][0], np.float32), x)


def test_what_hangs_ends_the_process(monkeypatch, capsys):
    ended = queue.SimpleQueue()
    monkeypatch.setattr(timing.os, "_exit", ended.put)
    with timing.bounded("case mosaic_gpu", seconds=0.01):
        assert ended.get(timeout=120) == 3
    assert "HANGS case mosaic_gpu" in capsys.readouterr().out
    with timing.bounded("quick", seconds=60):
        *_, timer = (t for t in threading.enumerate() if isinstance(t, threading.Timer))
    timer.join(120)
    assert ended.empty()
