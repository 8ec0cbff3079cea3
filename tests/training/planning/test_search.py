"""The planner: its cost model beside known numbers, and the search over layouts."""

import dataclasses
import functools
import itertools
import math
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.publish import plan as known
from jaxscale import sharding, training
from jaxscale.cli.options import parse
from jaxscale.cli.runs import find_run
from jaxscale.cli.train import TrainCommand
from jaxscale.models import preset
from jaxscale.models.families.llama import llama3_8b, llama3_70b, llama_1b
from jaxscale.sharding import MESH_AXES, pipeline_schedule
from jaxscale.training import Layout, PlanConfig, plan_layouts
from jaxscale.training.hardware import H200, HARDWARE
from jaxscale.training.planning.config import CHOICES
from jaxscale.training.planning.cost_model import step_time
from jaxscale.training.planning.memory_model import least_memory
from jaxscale.training.planning.plan_report import text, write_report
from jaxscale.training.planning.search import estimate, train_command
from tests.compiled import compile_for_h200
from tests.training.planning import planned_memory, planned_step


ROOT = Path(__file__).parents[3]


# --- What is known --------------------------------------------------------------------


@functools.cache
def measured():
    return list(known.measured())


def held_out():
    return [row for row in measured() if not row.was_set]


def test_steps_that_set_no_constant_are_predicted():
    errors = {f"{row.device} {row.name}": row.error for row in held_out()}
    assert len(errors) >= 21
    assert max(map(abs, errors.values())) < 0.15, errors
    assert statistics.mean(map(abs, errors.values())) < 0.08, errors
    assert {row.device for row in held_out()} == {"H200", "H100"}
    assert any("fp8" in name for name in errors)


def test_a_constant_was_set_by_three_rows():
    rows = [row for row in measured() if row.was_set]
    assert len(rows) == 3 and max(abs(row.error) for row in rows) < 0.08, rows


def test_no_layout_that_ran_counts_as_too_large():
    shares = {
        f"{row.device} {row.name}": row.least / row.peak
        for row in measured()
        if row.least is not None and row.peak is not None
    }
    assert len(shares) >= 19
    assert max(shares.values()) < 1 and min(shares.values()) > 0.6, shares


def ablation():
    rows = [row for row in measured() if row.name.startswith("ablation_")]
    return sorted(rows, key=lambda row: row.name)


def gains(rows, number):
    """Tokens a second over the step before."""
    for before, after in itertools.pairwise(rows):
        batch = 3 if "3x_batch" in after.name else 1
        yield after.name, batch * number(before) / number(after) - 1


def test_the_signs_of_the_ablation():
    """Of each step that changes what is planned by more than noise."""
    found = dict(gains(ablation(), lambda row: row.known))
    said = dict(gains(ablation(), lambda row: row.predicted))
    signs = {n: (found[n] > 0, said[n] > 0) for n in found if said[n] != 0}
    assert len(signs) == 5
    assert all(here == there for here, there in signs.values()), (found, said)
    # Chunks cost more than they save on two stages, and less on four.
    assert said["ablation_4_interleaved, jaxscale"] < 0
    model = llama3_8b()
    times = [
        sum(step_time(model, 4096, layout, H200).values())
        for layout in (
            Layout(pipe=4, batch_size=8, remat="attention", chunks=chunks)
            for chunks in (1, 4)
        )
    ]
    assert times[1] < times[0]


def test_the_docs_say_what_each_step_of_the_ablation_gains():
    """Tokens a second over the step before: measured, and by the model."""
    found, said = (
        [round(100 * gain, 1) for _, gain in gains(ablation(), number)]
        for number in (lambda row: row.known, lambda row: row.predicted)
    )
    expected = [x for pair in zip(found, said, strict=True) for x in pair]
    text = ROOT.joinpath("docs", "scaling-measured.md").read_text()
    written = re.findall(r"^  \| .*? \| ([+-].*)% \| (.*)% \|$", text, re.M)
    written = [float(x) for x in itertools.chain(*written)]
    assert written == expected and len(expected) == 12


def test_no_step_takes_less_memory_than_is_counted():
    """Whole models on 8 to 512 H200s, as `planned_memory` compiled them."""
    shares = {name: planned_memory.share(name) for name in planned_memory.stored()}
    assert shares.keys() == planned_memory.PROGRAMS.keys()
    assert min(shares.values()) > 0.4 and max(shares.values()) < 1, shares


@pytest.mark.parametrize(
    ("options", "gigabytes"),
    [
        # Parameters, moments and gradients of 8.03 billion parameters: 16 bytes each.
        ({}, {"parameters": 32.12, "optimizer state": 64.24, "gradients": 32.12}),
        ({"memory_kind": "pinned_host"}, {"optimizer state": 0}),
        (
            {"fsdp": 8, "zero": 1},
            {"parameters": 32.12 / 8 + 16.06, "optimizer state": 8.03},
        ),
        ({"fsdp": 8, "batch_size": 16, "zero": 2}, {"gradients": 32.12 / 8}),
        ({"fsdp": 8, "batch_size": 16, "zero": 1}, {"gradients": 32.12}),
        # Inputs of 32 layers, 4,096 tokens of 4,096 features in bf16; gradients of one
        # microbatch take their place.
        ({"batch_size": 2}, {"activations": 32 * 4096 * 4096 * 2 / 1e9}),
        ({}, {"activations": 0}),
    ],
)
def test_memory_is_counted(options, gigabytes):
    options = {
        "rows": 1,
        "batch_size": options.get("fsdp", 1),
        "remat": "full",
    } | options
    sizes = least_memory(llama3_8b(), 4096, Layout(**options))
    found = {name: sizes[name] / 1e9 for name in gigabytes}
    assert found == pytest.approx(gigabytes, rel=1e-3)


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="the compiler's plugin is for it")
def test_what_was_compiled_is_what_is_compiled_now():
    """A stored row, which takes a third more with its table or gradients turned."""
    arguments = ({"fsdp": 4}, 3, 8, "none")
    found = compile_for_h200(planned_step.step, *arguments, count=4)
    peak = found.arguments + found.outputs - found.aliased + found.temporaries
    assert peak / 1e9 == pytest.approx(14.99, rel=0.02)
    # What the embedding gives changes places, forward and backward.
    assert found.count("all-to-all") == 2


def test_the_table_of_known_rows_is_printed(capsys):
    assert known.main() == 0
    out = capsys.readouterr().out
    assert f"held out: {known.errors(held_out())}" in out
    assert "H100  llama3_8b_fsdp4, jaxscale" in out
    # The pages have the same figures.
    errors = [abs(row.error) for row in held_out()]
    mean, worst = statistics.mean(errors), max(errors)
    model, layout = (
        " ".join(ROOT.joinpath("docs", f"{name}.md").read_text().split())
        for name in ("layout-model", "layout")
    )
    assert f"({len(errors)} rows) | {mean:.1%} | {worst:.1%} |" in model
    assert f"the mean error is {mean:.1%}, the worst {worst:.1%}" in layout


# --- The model ------------------------------------------------------------------------


def layouts(**fixed):
    """Layouts of LLaMA-3 8B that divide."""
    values = {
        "data": st.sampled_from([1, 2]),
        "fsdp": st.sampled_from([1, 2, 8]),
        "pipe": st.sampled_from([1, 2, 4]),
        "tensor": st.sampled_from([1, 2, 8]),
        "context": st.sampled_from([1, 2]),
        "zero": st.sampled_from([1, 2, 3]),
        "chunks": st.sampled_from([1, 2, 4]),
        "rows": st.sampled_from([1, 2]),
        "remat": st.sampled_from(["none", "attention", "full"]),
    }
    built = st.builds(
        Layout, batch_size=st.sampled_from([256, 512]), **(values | fixed)
    )
    return built.filter(lambda x: x.chunks == 1 or x.pipe > 1)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(layout=layouts())
def test_parts_are_finite_and_the_bubble_is_that_of_the_table(layout):
    model = llama3_8b()
    layout.check(model, 8192)
    parts = step_time(model, 8192, layout, H200)
    assert all(math.isfinite(x) and x >= 0 for x in parts.values()), parts
    stage = ("matmuls", "attention", "elementwise", "tensor", "context", "pipe")
    busy = sum(parts[name] for name in stage)
    share = parts["bubble"] / (busy + parts["bubble"])
    if layout.pipe * layout.microbatches * layout.chunks <= 512:
        table = pipeline_schedule(layout.pipe, layout.microbatches, layout.chunks)
        assert share == pytest.approx(table.bubble)
    sizes = least_memory(model, 8192, layout)
    assert all(math.isfinite(x) and x >= 0 for x in sizes.values()), sizes
    # Moments of all copies are 8 bytes a parameter: nothing is lost or held twice.
    copies = layout.data * layout.context
    moments = sizes["optimizer state"] * layout.gpus / copies
    assert moments == pytest.approx(8 * model.num_parameters(), rel=1e-9)


def test_products_count_the_flops_of_the_model():
    model, layout = llama_1b(), Layout(batch_size=8, rows=8)
    parts = step_time(model, 4096, layout, H200)
    tokens = 8 * 4096
    products = 6 * (model.num_parameters() - 32_000 * 2048) * tokens / H200.matmul
    assert parts["matmuls"] == pytest.approx(products, rel=1e-3)  # but for norms
    attention = model.flops_per_token(4096, True) * tokens - products * H200.matmul
    # The backward pass computes five products for two forward: 7 / 6 of what counts.
    assert parts["attention"] == pytest.approx(
        7 / 6 * attention / H200.attention, rel=1e-2
    )


def test_uneven_layers_cost_as_much_as_the_largest_chunk():
    time = {}
    for layers in (29, 32):
        model = dataclasses.replace(llama3_8b(), num_layers=layers)
        layout = Layout(pipe=8, batch_size=64)
        time[layers] = step_time(model, 4096, layout, H200)["attention"]
    assert time[29] == pytest.approx(time[32])


@pytest.mark.parametrize("remat", ["none", "attention", "full"])
def test_a_pipelines_stash_stops_growing_but_accumulation_is_kept(remat):
    def size(m):
        layout = Layout(pipe=4, batch_size=m, remat=remat)
        return least_memory(llama3_8b(), 8192, layout)

    assert size(4)["activations"] < size(8)["activations"]
    assert size(8) == size(64)
    table = pipeline_schedule(4, 64)
    if remat == "full":  # inputs of 8 layers of 8,192 tokens x 4,096 features in bf16
        slots = table.num_slots - pipeline_schedule(4, 4).num_slots
        per_slot = (size(8)["activations"] - size(4)["activations"]) / slots
        assert per_slot == 8 * 2 * 8192 * 4096
        assert (table.num_slots, slots) == (8, 3)


def test_more_of_anything_is_never_faster_or_smaller():
    model = llama3_70b()
    layout = Layout(fsdp=16, pipe=2, tensor=4, batch_size=64)
    base = sum(step_time(model, 8192, layout, H200).values())
    for name in ("matmul", "attention", "hbm", "link", "nic"):
        slow = dataclasses.replace(H200, **{name: getattr(H200, name) / 2})
        assert sum(step_time(model, 8192, layout, slow).values()) > base
    fused = sum(step_time(model, 8192, layout, H200, "fused").values())
    assert fused < base
    sizes = [
        sum(
            least_memory(
                model, 8192, dataclasses.replace(layout, zero=zero, pipe=1)
            ).values()
        )
        for zero in (1, 2, 3)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2]


def test_rates_follow_where_the_neighbors_are():
    gpu = dataclasses.replace(H200, nic=10e9)
    assert gpu.rate(stride=2, size=4) == gpu.link
    assert gpu.rate(stride=8, size=2) == 10e9
    assert gpu.rate(stride=2, size=8) == 40e9  # four GPUs of a host share the ring
    assert gpu.rate(stride=1, size=512) == 80e9
    assert gpu.neighbor_rate(stride=1, size=16) == 10e9  # some are on another host


# --- The search -----------------------------------------------------------------------


@settings(deadline=None, max_examples=40, derandomize=True)
@given(data=st.data())
def test_nothing_in_reach_beats_the_best(data):
    """A layout that a user could have given is slower, too large, or the best."""
    plan = plan_of_16()
    layout = data.draw(
        layouts(
            fsdp=st.sampled_from([1, 8]), data=st.just(1), context=st.just(1)
        ).filter(lambda x: x.gpus <= 16 and 16 % x.gpus == 0)
    )
    layout = dataclasses.replace(layout, data=16 // layout.gpus, batch_size=64)
    found = estimate(llama3_8b(), layout, plan.config)
    assert found.bytes > plan.limit or found.seconds >= plan.best.seconds


@functools.cache
def plan_of_16():
    return plan_layouts(llama3_8b(), PlanConfig(gpus=16, batch_size=64, context=1))


def test_the_ranking_is_by_time_and_all_fit():
    plan = plan_of_16()
    seconds = [found.seconds for found in plan.ranked]
    assert seconds == sorted(seconds)
    assert all(found.bytes <= plan.limit for found in plan.ranked)
    assert all(found.layout.gpus == 16 for found in plan.ranked)
    assert len({found.layout for found in plan.ranked}) == len(plan.ranked)
    verdicts = {(c, v): plan.verdict(e) for c, v, e in plan.alternatives()}
    assert verdicts["data", 16].startswith("needs at least 128 of 127 GB")
    assert verdicts["remat", "full"].startswith("+")
    assert all(v != getattr(plan.best.layout, c) for c, v in verdicts)


@pytest.mark.parametrize(
    "given",
    [
        {"pipe": 4},
        {"tensor": 4, "zero": 3},
        {"fsdp": 4, "data": 2},
        {"context": 2, "rows": 2},
        {"chunks": 3, "remat": "full"},
    ],
)
def test_what_is_given_is_kept(given):
    plan = plan_layouts(llama3_8b(), PlanConfig(gpus=8, batch_size=48, **given))
    for found in plan.ranked:
        assert {name: getattr(found.layout, name) for name in given} == given


@pytest.mark.parametrize(
    "given", [{"context": 2}, {"pipe": 2, "chunks": 4, "fsdp": 2, "zero": 1}]
)
def test_the_command_is_one_that_train_takes(given):
    name = "llama3_8b"
    config = PlanConfig(gpus=8, batch_size=64, tensor=2, **given)
    plan = plan_layouts(preset(name), config)
    run = find_run(name)
    share, jaxscale, train, run, *options = train_command(
        name, run, plan.best, plan.config
    ).split()
    assert share == "XLA_CLIENT_MEM_FRACTION=0.9"
    assert (jaxscale, train, run) == ("jaxscale", "train", name)
    command = parse(
        TrainCommand,
        options,
        prog="",
        description="",
        default=TrainCommand(config=find_run(name)),
    )
    layout, config = plan.best.layout, command.config
    sizes = {axis: getattr(layout, axis) for axis in MESH_AXES}
    assert config.mesh.sizes(8) == sizes
    assert all(getattr(layout, name) == value for name, value in given.items())
    assert config.chunks == layout.chunks
    assert config.zero == layout.zero or layout.fsdp == 1
    config.check_mesh(sizes)
    assert config.microbatches == layout.microbatches
    assert config.data.batch_size == 64 and config.data.seq_len == 8192
    assert config.remat == layout.remat and config.tensor_parallel == "fused"


@pytest.mark.parametrize(
    "moments",
    [
        {"mu_dtype": "bfloat16", "nu_dtype": "bfloat16"},
        {"memory_kind": "pinned_host"},
    ],
)
def test_an_8b_model_fits_one_gpu_with_smaller_moments_or_none_there(moments):
    """XLA reserves 90 and 83 GiB for one row: see `test_moments`."""
    asked = PlanConfig(gpus=1, batch_size=8, seq_len=4096, remat="full")
    with pytest.raises(ValueError, match=r"state alone are 96 GB, .* or on the host"):
        plan_layouts(llama3_8b(), asked)
    config = dataclasses.replace(asked, **moments)
    best = plan_layouts(llama3_8b(), config).best
    options = train_command("llama3_8b", find_run("llama3_8b"), best, config).split()[
        4:
    ]
    default = TrainCommand(config=find_run("llama3_8b"))
    command = parse(TrainCommand, options, prog="", description="", default=default)
    assert {n: getattr(command.config.optimizer, n) for n in moments} == moments
    usual = dataclasses.replace(best.layout, moment_bytes=8, memory_kind="device")
    usual = estimate(llama3_8b(), usual, asked)
    assert best.memory["optimizer state"] < 0.51 * usual.memory["optimizer state"]
    # 1.5 times 64 GB over PCIe.
    slower = best.time["optimizer"] - usual.time["optimizer"]
    assert 1 < slower < 3 if "memory_kind" in moments else slower == 0


def test_fp8_is_planned():
    asked = PlanConfig(gpus=4, batch_size=32, seq_len=4096, remat="none", pipe=1)
    in_fp8 = dataclasses.replace(asked, quantization="fp8")
    bf16, fp8 = (plan_layouts(llama3_8b(), x).best for x in (asked, in_fp8))
    same = dataclasses.replace(fp8.layout, quantization=None)
    same = estimate(llama3_8b(), same, asked)
    assert 1.1 < bf16.seconds / fp8.seconds < 1.6
    assert fp8.time["matmuls"] < 0.7 * same.time["matmuls"]
    assert fp8.time["elementwise"] > same.time["elementwise"]
    assert fp8.memory["activations"] < same.memory["activations"]
    command = train_command("llama3_8b", find_run("llama3_8b"), fp8, in_fp8)
    assert " --quantization fp8 " in f"{command} "
    with pytest.raises(ValueError, match="the A100 has no matmuls in fp8"):
        plan_layouts(llama3_8b(), dataclasses.replace(in_fp8, gpu="a100"))


def test_fused_kernels_are_for_the_gpus_of_one_process():
    assert PlanConfig(gpus=8).communication == "fused"
    assert PlanConfig(gpus=16).communication == "xla"
    assert PlanConfig(gpus=16, tensor_parallel="fused").communication == "fused"
    blocks = PlanConfig(gpus=8, quantization="fp8_blockwise", tensor_parallel="fused")
    assert blocks.communication == "xla"


@pytest.mark.parametrize(
    ("model", "config", "message"),
    [
        (
            "llama3_1_405b",
            {"gpus": 8, "rows": 1, "chunks": 1, "remat": "full"},
            r"no layout of 8 H200 fits: the smallest, .* needs at least [\d.,]+ GB of "
            r"a GPU, which may take 126.9 GB, so [\d.,]+ GB are short; the largest "
            r"part is optimizer state, .* are 4,8\d\d GB, the memory of 39 such GPUs",
        ),
        (
            "llama3_8b",
            {"gpus": 8, "pipe": 8, "chunks": 8},
            "num_layers 32 are fewer than pipe 8 x chunks 8",
        ),
        ("llama3_8b", {"gpus": 16, "tensor": 16}, "num_kv_heads 8 .* by tensor 16"),
        ("llama3_8b", {"gpus": 8, "data": 8, "batch_size": 6}, "batch_size 6 is not"),
        ("llama3_8b", {"gpus": 2, "seq_len": 9000}, "seq_len 9000 is longer than"),
        (
            "llama3_8b",
            {"gpus": 4, "context": 4, "seq_len": 1004},
            "seq_len 1004 is not divisible by 8 for context 4 x tensor 1",
        ),
    ],
)
def test_what_is_short_is_said(model, config, message):
    with pytest.raises(ValueError, match=message):
        plan_layouts(preset(model), PlanConfig(**config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gpus": 0}, "gpus 0 must be an integer of at least 1"),
        ({"gpus": 2**21}, "gpus 2097152 must be at most"),
        ({"gpus": 8, "gpu": "v100"}, r"gpu 'v100' is unknown; use one of \('h200'"),
        ({"gpus": 8, "pipe": 3}, "gpus 8 are not divisible by the product 3 of pipe 3"),
        ({"gpus": 8, "rows": 0}, "rows 0 must be an integer of at least 1"),
        ({"gpus": 8, "zero": 4}, r"zero 4 is unknown; use one of \(1, 2, 3\)"),
        ({"gpus": 8, "remat": "some"}, "remat 'some' is unknown"),
        ({"gpus": 8, "quantization": "int8"}, "quantization 'int8' is unknown"),
        ({"gpus": 8, "memory_share": 1.1}, "memory_share 1.1, expected 0.01 to 1"),
        ({"gpus": 8, "memory_share": math.nan}, "memory_share nan, expected"),
        ({"gpus": 8, "nic": -1.0}, "nic -1.0 must be positive and finite"),
    ],
)
def test_bad_settings_are_refused(config, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        PlanConfig(**config)


def test_hardware_says_where_its_numbers_come_from():
    for gpu in HARDWARE.values():
        assert gpu.origin and gpu.memory > 1e10
    with pytest.raises(ValueError, match="nic 0 must be positive"):
        dataclasses.replace(H200, nic=0)


# --- In words -------------------------------------------------------------------------


def test_a_plan_in_words_and_as_a_page(tmp_path):
    plan = plan_layouts(
        llama3_8b(), PlanConfig(gpus=16, batch_size=64, pipe=4, tensor=1)
    )
    words = text(plan, "llama3_8b", top=3)
    lines = words.splitlines()
    assert [line[:3].strip() for line in lines[3:6]] == ["1", "2", "3"]
    assert "The first: pipe 4" in words and "GB may be taken" in words
    bars = [line[5:] for line in lines[7:10]]
    assert all(len(bar) <= 60 and set(bar) <= set("maetcsdbo") for bar in bars)
    page = write_report(
        plan, "llama3_8b", "train me", tmp_path / "plan.html", top=4
    ).read_text()
    assert page.count("<svg") == 2  # bars, and the schedule of the first
    shown = {choice for choice, *_ in plan.alternatives()}
    assert shown == set(CHOICES) - {"pipe", "tensor"}
    assert all(re.search(f"<td[^>]*>{choice}</td>", page) for choice in shown)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({}, "one GPU"),
        ({"fsdp": 8}, "in a host fsdp 8"),
        ({"fsdp": 16}, "in a host fsdp 8, between 2 hosts fsdp 2"),
        (
            {"pipe": 4, "data": 2, "fsdp": 4, "tensor": 4},
            "in a host tensor 4 x fsdp 2, between 16 hosts fsdp 2 x data 2 x pipe 4",
        ),
        ({"tensor": 8, "pipe": 2}, "in a host tensor 8, between 2 hosts pipe 2"),
    ],
)
def test_the_mesh_in_words(layout, words):
    model = llama_1b()
    layout = Layout(batch_size=64, **layout)
    given = {axis: getattr(layout, axis) for axis in MESH_AXES}
    plan = plan_layouts(
        model, PlanConfig(gpus=layout.gpus, batch_size=64, memory_share=1, **given)
    )
    assert f"  mesh:   {words}" in text(plan, "model").splitlines()


def test_it_is_said_why_the_second_is_slower():
    plan = plan_of_16()
    best, second = plan.ranked[:2]
    line = next(x for x in text(plan, "model").splitlines() if "  second:" in x)
    found = re.search(r"takes ([\d.]+)% longer: (\w+).* costs ([\d.]+)%", line)
    assert found is not None, line
    share = 100 * (second.seconds / best.seconds - 1)
    assert float(found[1]) == pytest.approx(share, abs=0.06)
    growth = second.time[found[2]] - best.time[found[2]]
    assert float(found[3]) == pytest.approx(100 * growth / best.seconds, abs=0.06)


def test_plans_need_no_jax():
    code = (
        "import sys, types\n"
        "sys.modules['jax'] = sys.modules['flax'] = None\n"
        f"paths = {{'sharding': {list(sharding.__path__)!r},\n"
        f"         'training': {list(training.__path__)!r}}}\n"
        "for name, path in paths.items():\n"
        "    package = types.ModuleType(f'jaxscale.{name}')\n"
        "    package.__path__ = path\n"
        "    sys.modules[package.__name__] = package\n"
        "from jaxscale.training.planning.search import PlanConfig, plan_layouts\n"
        "from jaxscale.training.planning.plan_report import text\n"
        "class Model:\n"
        "    vocab_size, d_model, num_layers, num_heads = 1024, 512, 4, 8\n"
        "    num_kv_heads, head_dim, d_ff, max_seq_len = 8, 64, 2048, 1024\n"
        "    position, num_mlp_kernels, tie_embeddings = 'rope', 3, False\n"
        "    parallel_block = parallel_mlp_norm = False\n"
        "    windows = (None,) * 4\n"
        "    def num_parameters(self): return 18_000_000\n"
        "    def flops_per_token(self, seq_len, causal): return 1.2e8\n"
        "config = PlanConfig(gpus=2, batch_size=8)\n"
        "print(text(plan_layouts(Model(), config), 'model'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("model on 2 H200"), done.stderr
