"""Axis rules: the same function on every kind of mesh, and the errors of the table.

The function under test is a small network that uses all four operations: a look-up in
a table whose rows are split, a column-parallel and a row-parallel product, splitting
and merging of heads. Its definition is the same network in numpy, in float64.
"""

import dataclasses
import itertools
import math
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.sharding import (
    MESH_AXES,
    REPLICATED,
    AxisRules,
    MeshConfig,
    constrain,
    contract,
    dp,
    fsdp,
    fsdp_tp,
    gather,
    make_mesh,
    megascale_3d,
    per_shard,
    preset,
    reshape,
)
from tests.tiers import exhaustive, first
from tests.tolerances import RELATIVE, relative_error


B, T, D, F, V, HEADS = 8, 16, 32, 64, 48, 8
TOLERANCE = RELATIVE[jnp.dtype("float32")]
PARAM_AXES = {
    "table": ("vocab", "embed"),
    "up": ("embed", "mlp"),
    "scale": ("act_heads", None),
    "down": ("mlp", "embed"),
}


def network(params, tokens, rules):
    x = gather(
        params["table"],
        tokens,
        PARAM_AXES["table"],
        ("batch", "tokens", "act_embed"),
        rules,
    )
    inner = ("batch", None, "act_mlp")
    hidden = contract("btd,df->btf", x, params["up"], PARAM_AXES["up"], inner, rules)
    heads = ("batch", None, "act_heads", None)
    split = reshape(hidden, (*hidden.shape[:2], HEADS, F // HEADS), heads, rules)
    split = jnp.tanh(split * params["scale"])
    hidden = reshape(split, hidden.shape, inner, rules)
    outer = ("batch", "tokens", "act_embed")
    return contract(
        "btf,fd->btd", hidden, params["down"], PARAM_AXES["down"], outer, rules
    )


def loss(params, tokens, target, rules):
    out = network(params, tokens, rules)
    return jnp.sum(out * constrain(target, ("batch", "tokens", "act_embed"), rules))


def definition(params, tokens, target):
    """Output and gradients of the network by hand."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    x = p["table"][tokens]
    split = (x @ p["up"]).reshape(B, T, HEADS, F // HEADS)
    active = np.tanh(split * p["scale"])
    hidden = active.reshape(B, T, F)
    g_hidden = target @ p["down"].T
    g_active = g_hidden.reshape(active.shape) * (1 - active**2)
    g_up_out = (g_active * p["scale"]).reshape(B, T, F)
    g_table = np.zeros_like(p["table"])
    np.add.at(g_table, tokens, g_up_out @ p["up"].T)
    grads = {
        "table": g_table,
        "up": np.einsum("btd,btf->df", x, g_up_out),
        "scale": np.sum(g_active * split, axis=(0, 1)),
        "down": np.einsum("btf,btd->fd", hidden, target),
    }
    return hidden @ p["down"], grads


@pytest.fixture(scope="module")
def problem():
    rng = np.random.default_rng(0)
    shapes = {"table": (V, D), "up": (D, F), "scale": (HEADS, F // HEADS)}
    shapes["down"] = (F, D)
    params = {n: rng.normal(size=s).astype("float32") for n, s in shapes.items()}
    tokens = rng.integers(0, V, size=(B, T)).astype("int32")
    target = rng.normal(size=(B, T, D)).astype("float32")
    return params, tokens, target, *definition(params, tokens, target)


def mesh_of(kind, sizes=(1, 1, 4, 1, 2)):
    """A mesh of one kind, or mixed: 'explicit' in the axes named by `kind`."""
    types = tuple(
        AxisType.Explicit if kind in ("explicit", axis) else AxisType.Auto
        for axis in MESH_AXES
    )
    return jax.make_mesh(sizes, MESH_AXES, axis_types=types)


def put(value, mesh, axes, rules):
    return jax.device_put(value, NamedSharding(mesh, rules.spec(*axes)))


def on_mesh(problem, mesh, rules):
    params, tokens, target, *_ = problem
    params = {n: put(v, mesh, PARAM_AXES[n], rules) for n, v in params.items()}
    tokens = put(tokens, mesh, ("batch", None), rules)
    return params, tokens, put(target, mesh, ("batch", None, None), rules)


def check(problem, out, grads):
    *_, expected, expected_grads = problem
    assert relative_error(out, expected) < TOLERANCE
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < TOLERANCE, name


@pytest.mark.parametrize(
    ("rules", "kind"),
    first(
        itertools.product(
            [dp(), fsdp(), fsdp_tp(), megascale_3d()],
            ["auto", "explicit", "tensor", "fsdp"],
        ),
        (dp(), "auto"),
        (fsdp(), "explicit"),
        *((fsdp_tp(), kind) for kind in ("auto", "explicit", "tensor", "fsdp")),
        (megascale_3d(), "auto"),
    ),
)
def test_network_equals_its_definition(problem, rules, kind):
    mesh = mesh_of(kind)
    args = on_mesh(problem, mesh, rules)
    with jax.set_mesh(mesh):
        out = jax.jit(partial(network, rules=rules))(*args[:2])
        grads = jax.jit(jax.grad(partial(loss, rules=rules)))(*args)
    check(problem, out, grads)
    # What is produced is split, not copied: by the rules, exactly.
    spec = NamedSharding(mesh, rules.spec("batch", "tokens", "act_embed"))
    assert out.sharding.is_equivalent_to(spec, out.ndim)
    for name in ("table", "up", "down"):
        spec = NamedSharding(mesh, rules.spec(*PARAM_AXES[name]))
        assert grads[name].sharding.is_equivalent_to(spec, 2), name


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_mesh_is_found_on_the_arrays_without_set_mesh(problem, kind):
    mesh, rules = mesh_of(kind), fsdp_tp()
    params, tokens, target = on_mesh(problem, mesh, rules)
    out = jax.jit(partial(network, rules=rules))(params, tokens)
    grads = jax.jit(jax.grad(partial(loss, rules=rules)))(params, tokens, target)
    check(problem, out, grads)
    spec = NamedSharding(mesh, P("fsdp", "tensor"))
    assert out.sharding.is_equivalent_to(spec, out.ndim)


def test_without_a_mesh_rules_change_nothing(problem):
    params, tokens, target, *_ = problem
    params, tokens, target = jax.tree.map(jnp.asarray, (params, tokens, target))
    out = network(params, tokens, fsdp_tp())
    check(problem, out, jax.grad(loss)(params, tokens, target, fsdp_tp()))
    np.testing.assert_array_equal(out, network(params, tokens, REPLICATED))


@pytest.mark.parametrize("manual", [MESH_AXES, ("data", "fsdp"), ("data",)])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_manual_axes_see_local_rows_and_whole_parameters(problem, manual, kind):
    mesh, rules = mesh_of(kind, (1, 2, 2, 1, 2)), fsdp_tp()
    params, tokens, target, *_ = problem
    rows = P(tuple(axis for axis in ("data", "fsdp") if axis in manual))

    @partial(
        jax.shard_map,
        mesh=mesh,
        axis_names=set(manual),
        in_specs=(P(), rows, rows),
        out_specs=(rows, P()),
    )
    def step(params, tokens, target):
        out = network(params, tokens, rules)
        # The transpose of the whole parameters' broadcast sums over the devices.
        return out, jax.grad(loss)(params, tokens, target, rules)

    params = jax.device_put(params, NamedSharding(mesh, P()))
    placed = (jax.device_put(a, NamedSharding(mesh, rows)) for a in (tokens, target))
    with jax.set_mesh(mesh):
        check(problem, *jax.jit(step)(params, *placed))


# ------------------------------------------------------------------------------------
# What is communicated


def collectives(fn, *args):
    """How often the compiled `fn` runs each collective on each shape."""
    return collectives_of(jax.jit(fn).lower(*args).compile().as_text())


def collectives_of(text):
    found = Counter()
    for line in text.splitlines():
        for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all"):
            if f" {name}(" in line or f" {name}-start(" in line:
                shape = line.split(" = ")[1].split("{")[0].split("[")[1].split("]")[0]
                found[name, tuple(int(n) for n in shape.split(",") if n)] += 1
    return found


@pytest.mark.parametrize("longer", [1, 4])
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_fsdp_gathers_weights_and_leaves_activations_alone(problem, kind, longer):
    mesh, rules = make_mesh(MeshConfig(fsdp=8, axis_type=kind)), fsdp()
    params, tokens, *_ = problem
    problem = params, np.tile(tokens, (1, longer)), np.zeros((B, longer * T, D))
    params, tokens, _ = on_mesh(problem, mesh, rules)
    with jax.set_mesh(mesh):
        found = collectives(partial(network, rules=rules), params, tokens)
    # A table that is larger than what a device looks up stays where it is.
    stays = tokens.size // 8 < V
    names = ["up", "down"] if stays else ["up", "down", "table"]
    weights = [params[name].shape for name in names]
    gathered = [shape for name, shape in found if name == "all-gather"]
    if stays:
        gathered.remove(tokens.shape)
    # The compiler may choose either layout of a gathered weight.
    assert sorted(map(sorted, gathered)) == sorted(map(sorted, weights))
    moved = {name: math.prod(shape) for name, shape in found if name != "all-gather"}
    between_two = tokens.size * D // 8**2
    assert moved == ({"all-to-all": between_two} if stays else {})
    assert set(found.values()) == {1}


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_fsdp_reduces_gradients_of_weights_only(problem, kind):
    mesh, rules = make_mesh(MeshConfig(fsdp=8, axis_type=kind)), fsdp()
    args = on_mesh(problem, mesh, rules)
    with jax.set_mesh(mesh):
        grad = jax.grad(partial(loss, rules=rules))
        found = collectives(grad, *args)
        grads = jax.jit(grad)(*args)
    # What the table gave changes places, forward and backward.
    sizes = [math.prod(shape) for name, shape in found if name == "all-to-all"]
    assert sizes == [B * T * D // 8**2] * 2
    summed = {
        shape for name, shape in found if name not in ("all-gather", "all-to-all")
    }
    assert summed <= {params.shape for params in args[0].values()}
    for name in ("table", "up", "down"):
        local = grads[name].addressable_shards[0].data.size
        assert local == grads[name].size // 8, name


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_row_parallel_product_sums_activations_once(problem, kind):
    mesh, rules = make_mesh(MeshConfig(tensor=8, axis_type=kind)), fsdp_tp()
    params, _, hidden, *_ = problem
    hidden = np.tile(hidden, (1, 1, F // D))
    x = put(hidden, mesh, ("batch", None, "act_mlp"), rules)
    w = put(params["down"], mesh, ("mlp", "embed"), rules)

    def product(x, w):
        out_axes = ("batch", "tokens", "act_embed")
        return contract("btf,fd->btd", x, w, ("mlp", "embed"), out_axes, rules)

    with jax.set_mesh(mesh):
        found = collectives(product, x, w)
        out = jax.jit(product)(x, w)
    # The CPU compiler sums and slices where the GPU's scatters the sum.
    assert sum(found.values()) == 1
    assert {name for name, _ in found} <= {"all-reduce", "reduce-scatter"}
    spec = NamedSharding(mesh, P(None, "tensor"))
    assert out.sharding.is_equivalent_to(spec, out.ndim)
    expected = hidden.astype("float64") @ params["down"]
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.multigpu
def test_gpu_scatters_sums(problem):
    """On GPUs gradients of FSDP and row-parallel products are reduce-scattered."""
    count = jax.device_count()
    for sizes, fn in (({"fsdp": count}, jax.grad(loss)), ({"tensor": count}, network)):
        mesh, rules = make_mesh(sizes), fsdp_tp()
        args = on_mesh(problem, mesh, rules)[: 2 if fn is network else 3]
        with jax.set_mesh(mesh):
            found = collectives(partial(fn, rules=rules), *args)
        names = {name for name, _ in found}
        assert "reduce-scatter" in names, found


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_rows_of_a_table_split_over_tensor_stay_in_place(problem, kind):
    mesh, rules = make_mesh(MeshConfig(tensor=8, axis_type=kind)), fsdp_tp()
    params, tokens, _ = on_mesh(problem, mesh, rules)

    def look_up(table, tokens):
        out_axes = ("batch", "tokens", "act_embed")
        return gather(table, tokens, ("vocab", "embed"), out_axes, rules)

    with jax.set_mesh(mesh):
        found = collectives(look_up, params["table"], tokens)
        out = jax.jit(look_up)(params["table"], tokens)
        bad = jnp.full((B, T), V, jnp.int32)
        past_the_end = jax.jit(look_up)(params["table"], bad)
    assert "all-gather" not in {name for name, _ in found}
    np.testing.assert_array_equal(out, problem[0]["table"][problem[1]])
    assert np.isnan(past_the_end).all()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_columns_of_a_table_may_be_split_over_the_axes_of_tokens_too(problem, kind):
    mesh = mesh_of(kind)
    rules = AxisRules(batch="fsdp", tokens="tensor", embed=("fsdp", "tensor"))
    params, tokens, *_ = problem
    table = put(params["table"], mesh, ("vocab", "embed"), rules)
    tokens = put(tokens, mesh, ("batch", "tokens"), rules)

    def look_up(table, tokens):
        out_axes = ("batch", "tokens", "act_embed")
        return gather(table, tokens, ("vocab", "embed"), out_axes, rules)

    with jax.set_mesh(mesh):
        out = jax.jit(look_up)(table, tokens)
    np.testing.assert_array_equal(out, params["table"][problem[1]])
    spec = NamedSharding(mesh, P("fsdp", "tensor"))
    assert out.sharding.is_equivalent_to(spec, out.ndim)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_parameters_are_gathered_layer_by_layer_in_a_scan(kind):
    """One layer is whole at a time, also for the backward pass; gradients are split."""
    layers, rules = 3, fsdp()
    mesh = make_mesh(MeshConfig(fsdp=8, axis_type=kind))
    rng = np.random.default_rng(1)
    stack = rng.normal(size=(layers, D, D)).astype("float32") / np.sqrt(D)
    x = rng.normal(size=(B, D)).astype("float32")

    def run(stack, x):
        def layer(x, w):
            axes = ("embed", "mlp"), ("batch", "act_embed")
            return jnp.tanh(contract("bd,de->be", x, w, *axes, rules)), None

        return jnp.sum(jax.lax.scan(layer, x, stack)[0] ** 2)

    expected = jax.grad(run)(stack, x)  # without a mesh
    stack = put(stack, mesh, ("layers", "embed", "mlp"), rules)
    x = put(x, mesh, ("batch", None), rules)
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(run)).lower(stack, x).compile().as_text()
        grad = jax.jit(jax.grad(run))(stack, x)
    assert text is not None
    found = collectives_of(text)
    assert found["all-gather", (D, D)] == 2, found  # forward, and again backward
    assert f"[{layers},{D // 8},{D}]" in text
    assert f"[{layers},{D},{D}]" not in text  # neither gathered nor kept
    assert relative_error(grad, expected) < TOLERANCE
    assert grad.addressable_shards[0].data.shape == (layers, D // 8, D)


# ------------------------------------------------------------------------------------
# Work on local shards


def softmax_of_scores(q, k):
    scores = jnp.einsum("bthd,bshd->bhts", q, k)
    return (
        jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), k),
        scores.max((2, 3)),
    )


@pytest.mark.parametrize(
    ("kind", "batch"),
    [
        ("auto", 6),
        ("explicit", 8),  # whose axes must divide: see the error below
        ("tensor", 8),
        ("manual", 8),
        *exhaustive(
            *(("none", 8), ("none", 6), ("auto", 8), ("tensor", 6), ("manual", 6))
        ),
    ],
)
def test_per_shard_equals_the_whole(kind, batch):
    rng = np.random.default_rng(0)
    q, k = (rng.normal(size=(batch, 5, 4, 8)).astype("float32") for _ in range(2))
    axes, rules = ("batch", None, "act_heads", None), fsdp_tp()
    local = per_shard(
        softmax_of_scores, [axes, axes], [axes, ("batch", "act_heads")], rules
    )

    def loss(fn, q, k):
        out, top = fn(q, k)
        return jnp.sum(out**2) + jnp.sum(top)

    expected = jax.jit(softmax_of_scores)(q, k)
    expected_grads = jax.jit(
        jax.grad(partial(loss, softmax_of_scores), argnums=(0, 1))
    )(q, k)
    run, grads = local, jax.grad(partial(loss, local), argnums=(0, 1))
    mesh = mesh_of(kind)
    if kind == "manual":
        rows = P() if batch == 6 else P("fsdp")
        both = {"mesh": mesh, "in_specs": (rows, rows), "out_specs": (rows, rows)}
        run, grads = jax.shard_map(run, **both), jax.shard_map(grads, **both)
    if kind == "none":
        got = run(jnp.asarray(q), jnp.asarray(k)), grads(jnp.asarray(q), jnp.asarray(k))
    else:
        with jax.set_mesh(mesh):
            got = jax.jit(run)(q, k), jax.jit(grads)(q, k)
    pairs = zip(jax.tree.leaves(got), (*expected, *expected_grads), strict=True)
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < TOLERANCE


def test_per_shard_does_not_communicate():
    axes, rules = ("batch", None, "act_heads", None), fsdp_tp()
    local = per_shard(
        softmax_of_scores, [axes, axes], [axes, ("batch", "act_heads")], rules
    )
    mesh = mesh_of("auto")
    x = put(np.ones((8, 5, 4, 8), np.float32), mesh, axes, rules)
    assert not collectives(local, x, x)


# ------------------------------------------------------------------------------------
# Edges


@pytest.mark.parametrize("shape", [(3, 1), (1, 16), (6, 2)])
@pytest.mark.parametrize("jit", [True, False])
def test_auto_axes_that_do_not_divide_are_left_to_the_compiler(shape, jit):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    with jax.set_mesh(mesh_of("auto")):
        fn = partial(constrain, axes=("batch", "tokens"), rules=fsdp_tp())
        np.testing.assert_array_equal((jax.jit(fn) if jit else fn)(jnp.asarray(x)), x)


def test_explicit_axes_that_do_not_divide_raise():
    with (
        jax.set_mesh(mesh_of("explicit")),
        pytest.raises(ValueError, match=r"'batch' of size 3 .* 4 devices .*batch=None"),
    ):
        constrain(jnp.ones((3, 2)), ("batch", "tokens"), fsdp_tp())


@pytest.mark.parametrize(
    ("subscripts", "out_axes"),
    [
        ("btd,df->fbt", ("act_mlp", "batch", None)),
        ("btd,df->tbf", (None, "batch", "act_mlp")),
        ("fd,btd->btf", None),
    ],
)
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_contract_in_any_order(kind, subscripts, out_axes):
    mesh, rules = mesh_of(kind), fsdp_tp()
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype("float32") for s in ((B, T, D), (D, F)))
    placed = (
        put(x, mesh, ("batch", None, None), rules),
        put(w, mesh, ("embed", "mlp"), rules),
    )
    if out_axes is None:  # the parameter is the second operand: not this order
        with pytest.raises(ValueError, match="do not fit operands of shapes"):
            contract(subscripts, *placed, ("embed", "mlp"), ("batch",), rules)
        return
    with jax.set_mesh(mesh):
        out = contract(subscripts, *placed, ("embed", "mlp"), out_axes, rules)
    expected = np.einsum(subscripts, x.astype("float64"), w)
    assert relative_error(out, expected) < TOLERANCE
    spec = NamedSharding(mesh, rules.spec(*out_axes))
    assert out.sharding.is_equivalent_to(spec, out.ndim)


def test_contract_accumulates_in_the_preferred_type():
    x = jnp.full((1, 4096), 1.0, jnp.bfloat16)
    w = jnp.full((4096, 1), 1.0 + 2**-7, jnp.bfloat16)
    axes = ("embed", "mlp"), ("batch", "act_mlp")
    out = contract("bd,df->bf", x, w, *axes, fsdp(), preferred_element_type=jnp.float32)
    assert out.dtype == jnp.float32
    assert out[0, 0] == 4096 * (1 + 2**-7)


@pytest.mark.parametrize("rows", [1, 3])
def test_contract_of_a_row_and_a_narrow_weight(rows):
    """One row goes with a row of zeros, which shows in neither result nor gradient."""
    rng = np.random.default_rng(0)
    x, w, dy = (
        rng.normal(size=s).astype("float32")
        for s in ((1, rows, 2048), (2048, 1024), (1, rows, 1024))
    )
    axes = ("embed", "mlp"), ("batch", None, "act_mlp")

    def product(x, w):
        return contract("b t d, d f -> b t f", x, w, *axes, REPLICATED)

    program = str(jax.make_jaxpr(product)(x, w))
    assert ("[1,2,2048]" in program) == (rows == 1)
    y, pullback = jax.vjp(product, x, w)
    dx, dw = pullback(dy)
    assert y.shape == dy.shape
    wide = [a.astype("float64")[0] for a in (x, dy)]
    assert relative_error(y[0], wide[0] @ w) < TOLERANCE
    assert relative_error(dx[0], wide[1] @ w.T) < TOLERANCE
    assert relative_error(dw, wide[0].T @ wide[1]) < TOLERANCE


@pytest.mark.parametrize("bad", ["btd,df", "...d,df->...f", "bd,df->bf"])
def test_contract_rejects_subscripts(bad):
    with pytest.raises(ValueError, match=r"subscripts .* do not fit .*one letter"):
        contract(bad, jnp.ones((2, 2, 2)), jnp.ones((2, 2)), (None,) * 2, (), dp())


def test_rank_mismatch():
    with pytest.raises(ValueError, match=r"axes \('batch',\) do not fit .*\(2, 3\)"):
        constrain(jnp.ones((2, 3)), ("batch",), dp())


def test_unknown_logical_axis():
    with pytest.raises(
        ValueError, match=r"'features' is unknown; use None or one of \['act_"
    ):
        fsdp().spec("batch", "features")


def test_one_mesh_axis_twice():
    with pytest.raises(ValueError, match="uses a mesh axis twice; give one of them"):
        fsdp_tp().spec("heads", "mlp")
    both = AxisRules(mlp=("tensor", "tensor"))
    with pytest.raises(ValueError, match="twice"):
        both.spec("mlp")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_mesh_axis_that_the_mesh_lacks(kind):
    mesh = Mesh(np.asarray(jax.devices()), ("rows",), axis_types=(kind,))
    with (
        jax.set_mesh(mesh),
        pytest.raises(ValueError, match=r"axis 'data', .* only \('rows',\); make"),
    ):
        constrain(jnp.ones((8,)), ("batch",), dp())


@pytest.mark.parametrize("entry", [["data"], "", 3, ("data", None)])
def test_bad_entries(entry, no_shape_hook):
    with pytest.raises(
        ValueError, match=r"rule batch is .*, expected a mesh axis, a t"
    ):
        AxisRules(batch=entry)


def test_presets_by_name():
    tables = {
        "replicated": REPLICATED,
        "dp": dp(),
        "fsdp": fsdp(),
        "fsdp_tp": fsdp_tp(),
    }
    assert {name: preset(name) for name in tables} == tables
    assert preset("megascale_3d") == dataclasses.replace(
        fsdp_tp(), layers="pipe", vocab=("pipe", "tensor")
    )
    with pytest.raises(ValueError, match=r"'zero' is no preset; use one of \['dp'"):
        preset("zero")


def test_features_are_split_as_the_parameters_that_make_them():
    rules = fsdp_tp()
    for name in ("heads", "kv_heads", "mlp", "vocab"):
        assert getattr(rules, name) == getattr(rules, f"act_{name}") == "tensor", name
    assert rules.embed == fsdp().embed == "fsdp"
    for rules in (dp(), fsdp(), fsdp_tp()):
        assert rules.batch == ("data", "fsdp")
    # None, not an empty tuple, and a name as it was: equal partitions compare so.
    assert fsdp_tp().without({"tensor"}, ["tokens", "embed"]) == dataclasses.replace(
        fsdp_tp(), tokens=None
    )


def test_rules_are_hashable_and_know_their_mesh_axes():
    assert hash(fsdp_tp()) == hash(fsdp_tp())
    assert fsdp_tp().mesh_axes() == {"data", "fsdp", "context", "tensor"}
    assert fsdp_tp().placing == {"data", "fsdp", "tensor"}
    assert megascale_3d().mesh_axes() == set(MESH_AXES)
    assert REPLICATED.mesh_axes() == set()
