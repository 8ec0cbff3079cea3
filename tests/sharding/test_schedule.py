"""Pipeline schedules: played here by the documented order, and by the library."""

import dataclasses
import subprocess
import sys
import xml.etree.ElementTree

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxscale import sharding
from jaxscale.sharding import (
    PipelineSchedule,
    bubble_fraction,
    pipeline_schedule,
    place_layers,
)
from jaxscale.sharding.schedule import stash_size
from jaxscale.sharding.schedule_drawing import draw, svg


CHUNKS = ("f_chunk", "b_chunk")


@st.composite
def sizes(draw_value):
    """Stages, microbatches and chunks that fit each other."""
    stages = draw_value(st.integers(1, 9))
    chunks = draw_value(st.integers(1, 5))
    if chunks == 1:
        return stages, draw_value(st.integers(1, 30)), 1
    return stages, stages * draw_value(st.integers(1, 4)), chunks


def executed(table, weights, inputs, targets):
    """Loss and gradients of a chain of tanh(w x), by the columns of the table alone.

    What no tick has written is NaN: a value that is used too early or twice shows.
    """
    p, v = table.stages, table.chunks
    nan = np.full(p, np.nan)
    y, dx = nan.copy(), nan.copy()
    stash = np.full((table.num_slots, p), np.nan)
    outputs = np.full(table.num_out_slots, np.nan)
    gradients, loss, d_loss = np.zeros((v, p)), 0.0, np.nan
    stage = np.arange(p)
    # Where the input is an embedding, and where the output goes to the loss.
    first = {name: (stage == 0) & (getattr(table, name) == 0) for name in CHUNKS}
    last = {name: (stage == p - 1) & (getattr(table, name) == v - 1) for name in CHUNKS}
    f_recv, f_send = ((table.f_mb >= 0) & ~x["f_chunk"] for x in (first, last))
    b_recv, b_send = ((table.b_mb >= 0) & ~x["b_chunk"] for x in (last, first))
    for t in range(table.num_ticks):
        sent = np.where(f_send[t - 1], y, np.nan) if t else nan
        arrived = np.roll(sent, 1)
        d_arrived = np.roll(np.where(b_send[t - 1], dx, np.nan) if t else nan, -1)
        new_dx = nan.copy()
        for s in np.flatnonzero(table.b_mb[t] >= 0):
            chunk, slot = table.b_chunk[t, s], table.b_slot[t, s]
            x, w = stash[slot, s], weights[chunk, s]
            d_y = d_arrived[s] if b_recv[t, s] else d_loss
            slope = d_y * (1 - np.tanh(w * x) ** 2)
            gradients[chunk, s] += slope * x
            new_dx[s], stash[slot, s] = slope * w, np.nan
        if table.out_slot[t] >= 0:
            outputs[table.out_slot[t]] = y[-1]
        d_loss = np.nan
        if (mb := table.loss_mb[t]) >= 0:
            error = outputs[table.loss_slot[t]] - targets[mb]
            outputs[table.loss_slot[t]] = np.nan
            loss, d_loss = loss + error**2 / 2, error
        new_y = nan.copy()
        if (table.f_mb[t] >= 0).any():  # those without work write, too
            for s in np.flatnonzero(table.f_mb[t] < 0) if table.num_slots else ():
                stash[table.f_put[t, s], s] = np.nan
        for s in np.flatnonzero(table.f_mb[t] >= 0):
            x = arrived[s] if f_recv[t, s] else inputs[table.f_mb[t, s]]
            if table.f_slot[t, s] >= 0:
                assert table.f_slot[t, s] == table.f_put[t, s]
                stash[table.f_slot[t, s], s] = x
            new_y[s] = np.tanh(weights[table.f_chunk[t, s], s] * x)
        y, dx = new_y, new_dx
    return loss, gradients


def reference(weights, inputs, targets):
    """The same layer by layer; chunk c of stage s is layer c p + s."""
    chain, xs = weights.reshape(-1), [inputs]
    for w in chain:
        xs.append(np.tanh(w * xs[-1]))
    d, gradients = xs[-1] - targets, np.zeros(len(chain))
    loss = (d**2).sum() / 2
    for i in reversed(range(len(chain))):
        slope = d * (1 - xs[i + 1] ** 2)
        gradients[i], d = (slope * xs[i]).sum(), slope * chain[i]
    return loss, gradients.reshape(weights.shape)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(sizes=sizes(), kind=st.sampled_from(["1f1b", "gpipe", "forward"]))
@example(sizes=(4, 2, 1), kind="1f1b")  # fewer microbatches than stages
@example(sizes=(1, 1, 1), kind="1f1b")
@example(sizes=(8, 16, 2), kind="1f1b")
@example(sizes=(3, 6, 4), kind="gpipe")
def test_a_table_computes_losses_and_gradients_in_the_time_of_theory(sizes, kind):
    p, m, v = sizes
    table = pipeline_schedule(p, m, v, kind)
    rng = np.random.default_rng(0)
    weights, inputs = rng.normal(1, 0.3, (v, p)), rng.normal(size=m)
    targets = rng.normal(size=m)
    loss, gradients = executed(table, weights, inputs, targets)
    right_loss, right = reference(weights, inputs, targets)
    np.testing.assert_allclose(loss, right_loss, rtol=1e-12)
    if kind != "forward":
        np.testing.assert_allclose(gradients, right, rtol=1e-9, atol=1e-12)
    ticks = m * v + p - 1
    assert table.op_ticks == (ticks, 0 if kind == "forward" else ticks)
    np.testing.assert_allclose(table.bubble, bubble_fraction(p, m, v), atol=1e-12)
    bound = {
        "1f1b": stash_size(p, m, v),
        "gpipe": m * v + (p > 1),
        "forward": 0,
    }[kind]
    assert table.num_slots == bound
    assert max(table.peak_stash) == min(bound, m * v)
    assert table.num_out_slots == (m if kind == "gpipe" else 1)


def test_memory_of_1f1b_does_not_grow_with_microbatches_but_that_of_gpipe_does():
    for chunks in (1, 2):
        slots = {pipeline_schedule(4, m, chunks).num_slots for m in (16, 32, 64)}
        assert slots == {8 if chunks == 1 else 12}
    slots = [pipeline_schedule(4, m, kind="gpipe").num_slots for m in (16, 32)]
    assert slots == [17, 33]


def test_phases_cover_all_ticks_and_tell_what_runs():
    table = pipeline_schedule(4, 8, 2)
    phases = list(table.phases())
    assert [(p.start, p.stop) for p in phases] == [(0, 9), (9, 19), (19, 28)]
    assert [(p.forward, p.backward) for p in phases] == [
        (True, False),
        (True, True),
        (False, True),
    ]
    assert [p.loss for p in phases] == ["some"] * 3
    gpipe = list(pipeline_schedule(2, 4, kind="gpipe").phases())
    assert [(p.forward, p.backward, p.loss) for p in gpipe] == [
        (True, False, "none"),
        (False, False, "all"),
        (False, True, "some"),
    ]
    lone = list(pipeline_schedule(4, 1).phases())
    assert [p.loss for p in lone] == ["none", "all", "none"]


def changed(table, name, index, value):
    array = getattr(table, name).copy()
    array[index] = value
    return {name: array}


@settings(deadline=None, max_examples=80, derandomize=True)
@given(data=st.data())
def test_any_changed_entry_is_found(data):
    """The check can fail: no other number in a used cell makes a schedule."""
    table = pipeline_schedule(*data.draw(st.sampled_from([(3, 4, 1), (2, 4, 2)])))
    used = {
        "f_mb": table.f_mb >= 0,
        "f_chunk": table.f_mb >= 0,
        "f_slot": table.f_mb >= 0,
        "b_mb": table.b_mb >= 0,
        "b_chunk": table.b_mb >= 0,
        "b_slot": table.b_mb >= 0,
        "loss_mb": table.loss_mb >= 0,
        "loss_slot": table.loss_mb >= 0,
        "out_slot": table.out_slot >= 0,
    }
    name = data.draw(st.sampled_from(sorted(used)))
    cells = list(zip(*np.nonzero(used[name]), strict=True))
    cell = data.draw(st.sampled_from(cells))
    old = int(getattr(table, name)[cell])
    value = data.draw(st.integers(-1, 9).filter(lambda x: x != old))
    change = changed(table, name, cell, value)
    if name in ("f_slot", "out_slot") and value > old:
        # Another free slot is no fault as such; the slot that is read is not written.
        with pytest.raises(ValueError, match="does not hold it"):
            dataclasses.replace(table, **change)
        return
    with pytest.raises(ValueError, match=r"^(tick \d+, stage \d+: |the schedule )"):
        dataclasses.replace(table, **change)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("f_mb", (1, 0), 0, "tick 1, stage 0: the forward of microbatch 0.* has run"),
        ("f_mb", (1, 1), 1, "tick 1, stage 1: .* its input does not arrive"),
        ("b_slot", (4, 0), 1, "tick 4, stage 0: the backward .*slot 1 does not hold"),
        ("b_mb", (3, 1), -1, "tick 3, stage 1: the forward of .* slot 0 is taken"),
        ("loss_mb", 2, -1, "tick 3, stage 1: .* its loss is not just computed"),
        ("f_slot", (2, 0), 0, "tick 2, stage 0: .* slot 0 is taken"),
        ("out_slot", 2, -1, "tick 2, stage 1: the output of microbatch 0.* not free"),
    ],
)
def test_a_fault_is_named_by_tick_and_stage(name, index, value, message):
    table = pipeline_schedule(2, 3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(table, **changed(table, name, index, value))


def test_shapes_and_types_of_a_table_of_ones_own_are_checked():
    table = pipeline_schedule(2, 3)
    with pytest.raises(ValueError, match=r"f_mb has the shape \(7, 2\), .* 3\]"):
        dataclasses.replace(table, stages=3)
    with pytest.raises(ValueError, match=r"loss_mb .*\(7,\) and the type float64"):
        dataclasses.replace(table, loss_mb=table.loss_mb * 1.0)
    with pytest.raises(ValueError, match="runs 6 forward passes, expected 8"):
        dataclasses.replace(table, microbatches=4)
    with pytest.raises(ValueError, match=r"tick 4, stage 0: .*gradient does not arr"):
        short = pipeline_schedule(2, 1)
        dataclasses.replace(short, **changed(short, "b_mb", (3, 1), -1))
    f_mb = table.f_mb.copy()
    dataclasses.replace(table, f_mb=f_mb)
    f_mb[0, 0] = 5  # the user's array stays the user's, and the table is its own
    assert table.f_mb[0, 0] == 0 and not table.f_mb.flags.writeable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 6, 2), r"microbatches 6 do not fit chunks 2: .*use microbatches=4 or 8"),
        ((4, 3, 2), r"microbatches 3 do not fit chunks 2: .*use microbatches=4, or"),
        ((0, 4), "stages 0 must be an integer of at least 1"),
        ((2, -1), "microbatches -1 must be an integer of at least 1"),
        ((2, 4, 1.5), "chunks 1.5 must be an integer of at least 1"),
        ((2, 4, 1, "zero_bubble"), r"kind 'zero_bubble' is unknown; use one of \('1f"),
        ((8, 10**9), "make a table of up to .* cells, more than .*larger microbatches"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_would(
    arguments, message, no_shape_hook
):
    with pytest.raises(ValueError, match=message):
        pipeline_schedule(*arguments)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(stages=st.integers(1, 9), chunks=st.integers(1, 5), more=st.integers(0, 40))
def test_layers_go_around_in_order_and_evenly(stages, chunks, more):
    num_layers = stages * chunks + more
    layers = place_layers(num_layers, stages, chunks)
    flat = layers.reshape(stages * chunks, -1)
    np.testing.assert_array_equal(flat[flat >= 0], np.arange(num_layers))
    counts = (flat >= 0).sum(1)
    assert counts.min() >= 1 and counts.max() - counts.min() <= 1
    assert layers.shape == (chunks, stages, counts.max())
    # Places without a layer come last, so that a loop may stop early.
    assert (np.sort(flat < 0, axis=1) == (flat < 0)).all()


def test_more_chunks_than_layers_are_refused_with_what_would_fit():
    with pytest.raises(ValueError, match=r"num_layers 12 .* = 16, .*at most chunks=1"):
        place_layers(12, 8, 2)
    with pytest.raises(ValueError, match=r"num_layers 6 .* = 8, .*at most stages=6"):
        place_layers(6, 8)


def test_drawings_show_every_pass():
    table = pipeline_schedule(2, 4, 2)
    text = draw(table)
    assert text.count("3.1") == 4  # forward and backward, on both stages
    assert "bubble 11.1%" in text
    short = draw(table, width=40)
    assert max(map(len, short.splitlines()[:-2])) <= 40
    assert "... and 7 more ticks" in short
    root = xml.etree.ElementTree.fromstring(svg(table))
    tag = "{http://www.w3.org/2000/svg}"
    fills = [r.get("fill") for r in root.iter(f"{tag}rect")]
    passes = [f for f in fills if f not in ("#fff", "#eef0f3")]
    assert len(passes) == 2 * 4 * 2 * 2  # passes x microbatches x chunks x stages
    assert len(list(root.iter(f"{tag}circle"))) == 4


def test_schedules_need_no_jax():
    code = (
        "import sys, types\n"
        "sys.modules['jax'] = sys.modules['flax'] = None\n"
        "package = types.ModuleType('jaxscale.sharding')\n"
        f"package.__path__ = {list(sharding.__path__)!r}\n"
        "sys.modules['jaxscale.sharding'] = package\n"
        "from jaxscale.sharding.schedule import pipeline_schedule\n"
        "from jaxscale.sharding.schedule_drawing import describe\n"
        "print(describe(pipeline_schedule(2, 2)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("6 ticks"), done.stderr


def test_a_schedule_is_a_public_class():
    assert isinstance(pipeline_schedule(1, 1), PipelineSchedule)
