"""Plans are what `train` takes; what the planner refuses, `train` refuses too."""

import dataclasses
import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxscale.cli import main
from jaxscale.cli.options import parse
from jaxscale.cli.runs import find_run
from jaxscale.cli.train import TrainCommand
from jaxscale.models.families.llama import llama_tiny
from jaxscale.training import DataConfig, Layout, PlanConfig, plan_layouts
from jaxscale.training.planning import compiled as compiled_module
from jaxscale.training.planning.compiled import CompiledStep, compile_step
from jaxscale.training.planning.hlo import Transfer
from jaxscale.training.planning.search import estimate, train_command
from jaxscale.training.planning.verify import collectives, compiled_text, planned_run


RUN = find_run("llama_tiny")
SIZES = st.sampled_from([1, 2, 3, 4])


@st.composite
def runs(draw):
    """What `run_of` changes, of which much divides nothing."""
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    layers = draw(st.sampled_from([3, 4, 6, 8]))
    windows = draw(
        st.sampled_from(
            [
                {},
                {"window": 8},
                {"window": 8, "global_layers": (1, 2)},
                {"window_pattern": (8, None)},
                {"window_pattern": (8, None, 16)},
                {"window_pattern": (4, None, 8, 8)},
            ]
        )
    )
    assume(layers % len(windows.get("window_pattern", (1,))) == 0)
    model = {
        "vocab_size": draw(st.sampled_from([512, 514, 515])),
        "d_model": draw(st.sampled_from([48, 64])),
        "num_layers": layers,
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw(st.sampled_from([1, 2])),
        "d_ff": draw(st.sampled_from([96, 128, 130])),
        "tie_embeddings": draw(st.booleans()),
        **windows,
    }
    changed = draw(
        st.sampled_from(
            [
                {},
                {"remat": "full", "scan_layers": True, "tensor_parallel": "xla"},
                {"zero": 1, "replicated": True, "microbatches": 2},
            ]
        )
    )
    return model, changed


def run_of(drawn):
    """A run of a small model."""
    model, changed = drawn
    shape = dataclasses.replace(llama_tiny(), head_dim=16, max_seq_len=64, **model)
    data = DataConfig(vocab_size=512, seq_len=64, batch_size=8)
    return dataclasses.replace(RUN, model=shape, data=data, **changed)


@st.composite
def layouts(draw):
    """Fields of layouts, of which many fit nothing."""
    axes = {axis: draw(SIZES) for axis in ("data", "fsdp", "pipe", "context", "tensor")}
    rows, count = draw(SIZES), draw(st.sampled_from([1, 2, 4, 6, 8]))
    return {
        **axes,
        "rows": rows,
        "batch_size": rows * count * axes["data"] * axes["fsdp"],
        "chunks": draw(SIZES),
        "zero": draw(st.sampled_from([1, 2, 3])),
        "remat": draw(st.sampled_from(["none", "attention", "full"])),
    }


def refusal(check):
    try:
        check()
    except ValueError as error:
        return str(error)
    return None


@settings(deadline=None, max_examples=150, derandomize=True)
@given(run=runs(), layout=layouts(), seq_len=st.sampled_from([24, 40, 64]))
def test_train_and_planner_refuse_the_same(run, layout, seq_len):
    run, layout = run_of(run), Layout(**layout)
    config = PlanConfig(gpus=layout.gpus, seq_len=seq_len)
    ours = refusal(lambda: layout.check(run.model, seq_len))
    fits = dataclasses.replace(layout, pipe=1, chunks=1, context=1, tensor=1, fsdp=1)
    fits = dataclasses.replace(fits, data=1, batch_size=layout.rows)
    found = dataclasses.replace(
        estimate(run.model, fits, config),
        layout=layout,
        tokens=layout.batch_size * seq_len,
    )
    theirs = refusal(lambda: planned_run(run, found, config))
    assert (ours is None) == (theirs is None), (ours, theirs)


@settings(deadline=None, max_examples=5, derandomize=True)
@given(run=runs(), gpus=st.sampled_from([2, 4, 6, 8]), data=st.data())
def test_the_command_of_any_plan_is_what_train_takes(run, gpus, data):
    run = run_of(run)
    moments = data.draw(
        st.sampled_from([{}, {"mu_dtype": "bfloat16"}, {"memory_kind": "pinned_host"}])
    )
    config = PlanConfig(gpus=gpus, batch_size=24, seq_len=64, **moments)
    try:
        plan = plan_layouts(run.model, config)
    except ValueError:
        assume(False)
        raise
    for _ in range(3):
        found = plan.ranked[data.draw(st.integers(0, len(plan.ranked) - 1))]
        planned = planned_run(run, found, plan.config)
        words = train_command("mine", run, found, plan.config).split()
        assert words[1:4] == ["jaxscale", "train", "mine"]
        command = parse(
            TrainCommand,
            words[4:],
            prog="",
            description="",
            default=TrainCommand(config=run),
        )
        assert command.config == planned
        assert command.xla_flags == ("overlap",)
        assert planned.mesh.sizes(gpus)["pipe"] == found.layout.pipe
        assert planned.optimizer.memory_kind == config.memory_kind


def test_a_chunk_with_other_windows_is_not_offered():
    model = dataclasses.replace(
        llama_tiny(), num_layers=4, window_pattern=(8, None), max_seq_len=64
    )
    config = PlanConfig(gpus=4, batch_size=16, seq_len=64, tensor=1, context=1)
    plan = plan_layouts(model, config)
    offered = {(x.layout.pipe, x.layout.chunks) for x in plan.ranked}
    assert (2, 1) in offered and not {(4, 1), (2, 2)} & offered
    assert any("windows" in reason for reason in plan.refused)


# --- What is compiled -----------------------------------------------------------------


STEP = CompiledStep(
    gpus=8,
    seconds=12.0,
    arguments=2**30,
    outputs=2**29,
    aliased=2**29,
    temporaries=2**30,
    collectives=(
        *(
            Transfer(
                operation="all-gather",
                axes=frozenset({"fsdp"}),
                size=8 * 2**20,
                group=4,
                trips=(6, 14),
                loop="a",
                behind=("product",),
                ahead=True,
            ),
        )
        * 2,
        Transfer(
            operation="all-reduce",
            axes=frozenset({"tensor", "pipe"}),
            size=4 * 2**20,
            group=4,
            trips=(None,),
            loop="b",
            behind=None,
            ahead=False,
        ),
    ),
)


def test_collectives_are_counted_with_the_rounds_of_their_loops():
    gather, reduce = collectives(STEP)
    assert (gather.count, gather.loops, gather.gpus) == (2 * 6 * 14, (6, 14), 4)
    assert gather.sent == 2 * 6 * 14 * 8 * 2**20 * 3 / 4
    assert gather.hidden and gather.asynchronous and not reduce.asynchronous
    assert reduce.axes == ("pipe", "tensor") and reduce.sent == 2 * 3 * 2**20
    found = plan_layouts(llama_tiny(), PlanConfig(gpus=8, batch_size=64)).best
    lines = compiled_text(found, STEP).splitlines()
    assert lines[0].startswith("Compiled for 8 H200s in 12 s")
    assert "2.1 GB" in lines[1]
    cells = lines[3].split()
    assert cells[:3] == ["all-gather", "fsdp", "4"] and cells[-1] == "hidden"
    assert cells[4] == "168" and lines[4].split()[6] == "1+"


def test_the_command_compiles_the_best_layout(monkeypatch, capsys):
    asked = []

    def compile_instead(config, gpus, *, xla_flags, timeout):
        asked.append((config, gpus, xla_flags, timeout))
        return STEP

    monkeypatch.setattr("jaxscale.cli.plan.compile_step", compile_instead)
    monkeypatch.setattr("jaxscale.cli.plan.check_compiler", lambda: None)
    words = "plan --model llama_tiny --gpus 8 --batch-size 64 --pipe 2 --compile"
    assert main([*words.split(), "--compile-seconds", "60", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["compiled"]["bytes"] == STEP.bytes
    assert answer["compiled"]["collectives"][0]["count"] == 168
    best = answer["layouts"][0]
    ((config, gpus, flags, timeout),) = asked
    assert (gpus, flags, timeout) == (8, ("overlap",), 60)
    assert config.mesh.pipe == best["layout"]["pipe"] == 2
    assert answer["compiled"]["planned_bytes"] == best["bytes"]


def test_without_a_compiler_it_is_said_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(compiled_module, "_PLUGINS", ("jax_plugins.nothing",))
    assert main(["plan", "--model", "llama_tiny", "--gpus", "8", "--compile"]) == 2
    message = capsys.readouterr().err
    assert (
        "pip install --no-deps --target" in message and "jax-cuda13-pjrt==" in message
    )


def test_only_h200s_are_compiled_for(capsys):
    words = "plan --model llama_tiny --gpus 8 --gpu a100 --compile"
    assert main(words.split()) == 2
    assert "compiled for h200 alone" in capsys.readouterr().err


def test_a_compilation_that_takes_too_long_is_given_up(monkeypatch):
    monkeypatch.setattr(compiled_module, "check_compiler", lambda: None)
    found = plan_layouts(llama_tiny(), PlanConfig(gpus=2, batch_size=8, seq_len=64))
    run = planned_run(find_run("llama_tiny"), found.best, found.config)
    with pytest.raises(TimeoutError, match=r"2 GPUs did not compile within 0\.1 s"):
        compile_step(run, 2, timeout=0.1)
