"""Pipelines: loss and gradients of one device, memory, what is communicated."""

import dataclasses
import math
import re
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, preset
from jaxscale.models.stack_layout import StackLayout, place_variants
from jaxscale.sharding import (
    MeshConfig,
    fsdp_tp,
    make_mesh,
    megascale_3d,
    pipeline,
    shardings,
)
from jaxscale.training.pipelined import pipelined, pipelined_sums
from jaxscale.training.planning.hlo import transfers
from tests.tiers import exhaustive
from tests.training.layouts import (
    LOSS,
    ROWS,
    TOKENS,
    Layout,
    errors,
    one_device,
    rows_of,
    shape,
)


# Each of model, axes, ZeRO 1 and 3, chunks, rows, communication, remat and schedule.
QUICK = [
    Layout(pipe=2, fsdp=2, tensor=2, chunks=2, tensor_parallel="xla"),
    Layout(
        pipe=2, data=2, fsdp=2, zero=1, model="gpt2_tiny", packed=False, layers=3,
        remat="full", replicated=True, moments_over_data=True, kind="gpipe",
    ),
    Layout(
        pipe=2, data=2, tensor=2, zero=1, chunks=4, model="gptj_tiny", layers=9,
        packed=False, vocab=65,
    ),
    Layout(
        pipe=2, context=2, tensor=2, chunks=2, layers=8, windows=(5, None),
        tensor_parallel="fused", remat="attention",
    ),
]  # fmt: skip
# With these any two of them meet; `every_layout` runs the whole product.
COVERING = [
    Layout(
        pipe=4, tensor=2, zero=2, model="gptj_tiny", layers=6, microbatches=4,
        tensor_parallel="fused", remat="attention",
    ),
    Layout(
        pipe=4, fsdp=2, chunks=2, model="gpt2_tiny", layers=9, microbatches=4,
        remat="full",
    ),
    Layout(pipe=2, fsdp=4, zero=2, chunks=2, model="gptj_tiny", remat="dots"),
    Layout(pipe=8, layers=8, microbatches=1, packed=False, scan_layers=False),
    Layout(
        pipe=2, data=2, fsdp=2, chunks=2, model="gpt2_tiny", moments_over_data=True,
    ),
    Layout(
        pipe=2, fsdp=2, context=2, model="gptj_tiny", packed=False, layers=3,
        windows=(5,),
    ),
    Layout(pipe=2, context=4, model="gpt2_tiny", remat="full"),
]  # fmt: skip


@pytest.mark.parametrize("layout", [*QUICK, *exhaustive(*COVERING)], ids=str)
def test_loss_and_gradients_are_those_of_one_device(layout):
    found = errors(layout)
    assert max(found.values()) < 1e-5, found


@pytest.mark.parametrize(
    ("chunks", "axis", "model"),
    [
        *exhaustive((1, "context", {"layers": 4})),
        # Of a layout above, whose reference it shares.
        (
            *(2, "tensor"),
            {"model": "gptj_tiny", "layers": 9, "packed": False, "vocab": 65},
        ),
    ],
)
def test_evaluation_runs_forward_passes_alone(chunks, axis, model):
    split: dict[str, Any] = {axis: 2}
    layout = Layout(pipe=2, fsdp=2, chunks=chunks, **split, **model)
    sums = pipelined_sums(
        LOSS,
        microbatches=2,
        rules=layout.rules,
        chunks=chunks,
        state_rules=layout.tables,
    )
    with jax.set_mesh(layout.mesh):
        got = jax.jit(sums)(*layout.arguments())
    want, _ = one_device(
        layout.model, layout.layers, layout.packed, layout.windows, layout.vocab
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)


@pytest.mark.exhaustive  # what a stage carries is checked without XLA, too
def test_memory_does_not_grow_with_microbatches():
    """Rows of a microbatch stay the same: only their number grows."""
    wide = dataclasses.replace(shape("llama_tiny", 4), d_model=256, d_ff=256)

    def bytes_of(microbatches, **options):
        layout = Layout(pipe=2, microbatches=microbatches, **options)
        model = jax.eval_shape(
            lambda: layout.stack.arrange(
                Decoder(wide, rules=layout.rules, remat=layout.remat, rngs=nnx.Rngs(0))
            )
        )
        places = shardings(model, layout.mesh, layout.rules)
        model = jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            model,
            places,
        )
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((microbatches, *x.shape[1:]), x.dtype),
            rows_of(True),
        )
        with jax.set_mesh(layout.mesh):
            program = jax.jit(layout.gradients).lower(model, batch).compile()
        memory = program.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    sizes = [bytes_of(m, remat="full") for m in (8, 32)]
    assert max(sizes) < 1.01 * min(sizes), sizes


def test_full_remat_runs_a_layer_forward_twice():
    def flops(**options):
        layout = Layout(pipe=2, **options)
        with jax.set_mesh(layout.mesh):
            return products(jax.make_jaxpr(layout.gradients)(*layout.shapes()))

    def evaluation(layers):
        layout = Layout(pipe=2, layers=layers)
        sums = pipelined_sums(LOSS, microbatches=2, rules=layout.rules)
        with jax.set_mesh(layout.mesh):
            return products(jax.make_jaxpr(sums)(*layout.shapes()))

    four_layers = evaluation(8) - evaluation(4)
    again = flops(remat="full") - flops()
    # The last product of a layer is not needed again.
    assert 0.7 * four_layers < again < four_layers, again / four_layers


def products(jaxpr):
    """Multiplications of matrix products, those in a loop as often as it goes round."""
    jaxpr, total = getattr(jaxpr, "jaxpr", jaxpr), 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            shape = eqn.invars[0].aval.shape
            total += eqn.outvars[0].aval.size * math.prod(shape[i] for i in contracted)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        inner = jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        )
        found = [products(x) for x in inner if hasattr(x, "eqns")]
        total += times * (max(found) if eqn.primitive.name == "cond" else sum(found))
    return total


RUNNER = pipeline._Runner


def kept_by_a_stage(monkeypatch, rows=ROWS, **options):
    """What waits for the backward pass, and the weights, without the axes of slots and
    chunks; and all that a stage carries from tick to tick. Shapes of them."""
    stash, weights, carried = [], set(), []

    class Spy(RUNNER):
        def run(self, *, gradients):
            carry = super().run(gradients=gradients)
            stash.extend(x.shape[2:] for x in jax.tree.leaves(carry.stash))
            weights.update(x.shape[2:] for x in jax.tree.leaves(self.chunks))
            carried.extend(x.shape for x in jax.tree.leaves(carry))
            return carry

    monkeypatch.setattr(pipeline, "_Runner", Spy)
    layout = Layout(pipe=2, fsdp=2, tensor=2, **options)
    with jax.set_mesh(layout.mesh):
        jax.eval_shape(layout.gradients, *layout.shapes(rows))
    return stash, weights, carried


def test_a_stage_keeps_no_more_for_more_microbatches(monkeypatch):
    """Rows of a microbatch stay the same: only their number grows."""
    *_, few = kept_by_a_stage(monkeypatch, microbatches=4, rows=ROWS // 2)
    *_, many = kept_by_a_stage(monkeypatch, microbatches=8)
    assert few == many and len(many) > 20
    *_, all_of_them = kept_by_a_stage(monkeypatch, microbatches=8, kind="gpipe")
    assert all_of_them != many  # the check sees what grows


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1, "scan_layers": False},
        {"zero": 3},
        {"zero": 1, "tensor_parallel": "xla", "remat": "attention"},
    ],
    ids=str,
)
def test_no_copy_of_the_weights_waits_for_the_backward_pass(options, monkeypatch):
    kept, weights, _ = kept_by_a_stage(monkeypatch, **options)
    matrices = {shape for shape in weights if len(shape) == 3}  # [group, in, out]
    single = {shape[1:] for shape in matrices}
    assert len(kept) > 10 and len(single) > 3
    assert not (matrices | single) & set(kept)


@pytest.mark.parametrize(
    ("layout", "looped"),
    [
        (Layout(pipe=2, data=2, fsdp=2, zero=1), ["pipe"]),
        *exhaustive(
            (Layout(pipe=2, data=2, fsdp=2, zero=2), ["pipe", "fsdp"]),
            (Layout(data=4, fsdp=2, zero=1), []),
        ),
        (Layout(data=4, fsdp=2, zero=3), ["fsdp"]),
    ],
    ids=str,
)
def test_devices_with_other_rows_are_summed_over_once_a_step(layout, looped):
    with jax.set_mesh(layout.mesh):
        lowered = jax.jit(layout.gradients).lower(*layout.shapes())
    inside, outside = communicated(lowered.compile().as_text())
    assert inside == set(looped)
    assert "data" in outside


@pytest.mark.parametrize(
    ("model", "times"), [("gptj_tiny", 1), *exhaustive(("llama_tiny", 2))]
)
def test_what_a_layer_gathers_and_scatters(model, times):
    """A parallel block gathers and scatters the tokens once, forward and backward."""
    layout = Layout(
        pipe=2, fsdp=2, tensor=2, model=model, tensor_parallel="xla", packed=False
    )
    with jax.set_mesh(layout.mesh):
        lowered = jax.jit(layout.gradients).lower(*layout.shapes())
    text = lowered.compile().as_text()
    assert text is not None
    found = transfers(text)
    # Those of a layer stand in a loop over layers, which is in one over ticks.
    count = Counter((x.operation, *x.axes) for x in found if x.loops == 2)
    matrices = {"gptj_tiny": 6, "llama_tiny": 7}[model]
    assert count["all-gather", "tensor"] == count["reduce-scatter", "tensor"]
    assert count["all-gather", "tensor"] == 2 * times
    # Parameters stay split over `tensor`.
    assert count["all-gather", "fsdp"] >= 2 * matrices
    assert count["reduce-scatter", "fsdp"] >= matrices
    weights = layout.shape.d_model**2 * 4 / 2
    known = {"fsdp"}, {"tensor"}
    sizes = [x.size for x in found if x.loops == 2 and x.axes not in known]
    assert max(sizes, default=0) < weights


@pytest.mark.exhaustive  # one layout computes with `context` on every push
def test_devices_that_share_rows_move_keys_and_values_alone():
    """Key heads, not query heads; and gradients of the parameters once a step."""
    layout = Layout(pipe=2, data=2, context=2, packed=False)
    with jax.set_mesh(layout.mesh):
        program = jax.jit(layout.gradients).lower(*layout.shapes()).compile()
    text = program.as_text()
    assert text is not None
    inside, outside = communicated(text, "all-reduce")
    assert inside == {"pipe"} and outside == {"data", "fsdp", "context"}
    config = layout.shape
    rows = ROWS // (layout.data * layout.microbatches)
    size = rows * TOKENS * config.num_kv_heads * config.head_dim
    moved = {"all-gather": [], "reduce-scatter": []}
    for line in text.splitlines():
        pattern = r"= \w+\[([\d,]*)\]\S* (all-gather|reduce-scatter)(?:-start)?\("
        if "{'context'}" in line and (found := re.search(pattern, line)):
            numbers = [int(n) for n in found[1].split(",")]
            moved[found[2]].append(math.prod(numbers))
    # Forward and backward pass gather; one layer is compiled for all. What is small
    # says which sequences have tokens outside of the vocabulary.
    assert [n for n in moved["all-gather"] if n > rows * TOKENS] == 4 * [size]
    assert moved["reduce-scatter"] == 2 * [size // 2]


def communicated(program, kinds="all-reduce|all-gather|reduce-scatter"):
    """The mesh axes of the collectives in loops, and of the others."""
    lines, uses, current = {}, {}, ""
    for line in program.splitlines():
        if line.endswith("{") and not line.startswith((" ", "HloModule")):
            current = line.removeprefix("ENTRY ").split()[0].removeprefix("%")
            lines[current], uses[current] = [], set()
        elif current:
            lines[current].append(line)
    for name, body in lines.items():
        uses[name] = set(re.findall(r"%([\w.-]+)", "\n".join(body))) & lines.keys()
    looped = set(re.findall(r"body=%([\w.-]+)", program))
    while more := {used for name in looped for used in uses[name]} - looped:
        looped |= more
    inside, outside = set(), set()
    for name, body in lines.items():
        for line in body:
            if re.search(rf" ({kinds})(-start)?\(", line):
                # Neighbors, as the compiler writes them, are those of fsdp.
                line = line.replace("=[4,2]<=[8]", "=mesh[] {'fsdp'}")
                axes = re.search(r"replica_groups=mesh\[.*?\] ?\{(.*?)\}", line)
                assert axes, line
                names = set(re.findall(r"'(\w+)'", axes[1])) - {"tensor"}  # of one
                (inside if name in looped else outside).update(names)
    return inside, outside


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"chunks": 2, "microbatches": 3},
            r"microbatches 3 do not fit chunks 2.*2 or 4",
        ),
        ({"chunks": 3}, r"num_layers 4 are fewer than stages 2 x chunks 3.*chunks=2"),
        (
            {"microbatches": 3},
            r"16 rows is not divisible by microbatches 3 x the 2 dev",
        ),
        ({"pipe": 1}, r"has no stages.*at least 2, or use accumulated"),
        ({"rules": fsdp_tp()}, r"the rule layers is None, expected 'pipe'"),
        ({"stored": 2}, r"not stored for stages 2 and chunks 1"),
        ({"microbatches": 0}, r"microbatches 0 must be at least 1"),
        ({"loss": len}, r"cannot be computed apart from the layers.*of_hidden"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(options, message):
    options = {"chunks": 1, "microbatches": 2, "pipe": 2, "fsdp": 2} | options
    sizes = {"pipe": options.pop("pipe"), "fsdp": options.pop("fsdp")}
    stored, loss = options.pop("stored", 1), options.pop("loss", LOSS)
    layout = Layout(chunks=stored, **sizes)
    model, batch = Layout(**sizes, chunks=stored).shapes()
    options = {"rules": megascale_3d()} | options
    with jax.set_mesh(layout.mesh), pytest.raises(ValueError, match=message):
        jax.eval_shape(pipelined(loss, **options), model, batch)


def test_explicit_axes_are_refused():
    layout = Layout(pipe=2)
    model, batch = layout.shapes()
    config = MeshConfig(pipe=2, axis_type="explicit")
    run = pipelined(LOSS, microbatches=2, rules=megascale_3d())
    with (
        jax.set_mesh(make_mesh(config, jax.devices()[:2])),
        pytest.raises(ValueError, match=r"Explicit axes.*axis_type='auto'"),
    ):
        jax.eval_shape(run, model, batch)


def test_windows_must_repeat_with_the_chunks():
    gemma = dataclasses.replace(preset("gemma2_tiny"), num_layers=8)
    gemma = dataclasses.replace(gemma, global_layers=(1, 3, 5, 7))
    layout = StackLayout(num_layers=8, stages=2, chunks=2)
    windows = [variant.window for variant in place_variants(gemma, layout)]
    assert windows == [gemma.window, None]
    message = r"global_layers \(1, 3, 5, 7\): .* place 0 .* use chunks 1$"
    with pytest.raises(ValueError, match=message):
        place_variants(gemma, StackLayout(num_layers=8, stages=4, chunks=2))
    pattern = dataclasses.replace(shape("llama_tiny", 6), window_pattern=(4, 2, None))
    with pytest.raises(ValueError, match=r"window_pattern .* use stages 2$"):
        place_variants(pattern, StackLayout(num_layers=6, stages=3))
