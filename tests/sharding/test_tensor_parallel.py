"""Column- and row-parallel products against numpy, and what they communicate.

The network is a feed-forward layer with two inputs of its last product, as a parallel
block has; its definition is the same in numpy, in float64.
"""

import dataclasses
import logging
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.nn import ColumnParallelLinear, Linear, RowParallelLinear
from jaxscale.sharding import (
    REPLICATED,
    AxisRules,
    MeshConfig,
    column_parallel,
    create,
    fsdp,
    fsdp_tp,
    make_mesh,
    row_parallel,
)
from jaxscale.sharding.tensor_parallel import check_tensor_parallel
from tests.sharding.test_rules import collectives, put
from tests.tolerances import RELATIVE, relative_error


B, T, D, F, G = 4, 16, 32, 64, 24
TOLERANCE = RELATIVE[jnp.dtype("float32")]
RULES = fsdp_tp()
AXES = {
    "up": ("embed", "mlp"),
    "gate": ("embed", "heads"),
    "down": ("mlp", "embed"),
    "out": ("heads", "embed"),
}
SPLIT = ("batch", "tokens", "act_embed")


def network(params, x, *, rules, tensor_parallel):
    options = {"rules": rules, "tensor_parallel": tensor_parallel}
    up, gate = column_parallel(
        x,
        [params["up"], params["gate"]],
        kernel_axes=[AXES["up"], AXES["gate"]],
        out_axes=[("batch", None, "act_mlp"), ("batch", None, "act_heads")],
        **options,
    )
    return row_parallel(
        [jnp.tanh(up), jnp.sin(gate)],
        [params["down"], params["out"]],
        kernel_axes=[AXES["down"], AXES["out"]],
        out_axes=SPLIT,
        **options,
    )


def loss(params, x, target, **options):
    return jnp.sum(network(params, x, **options) * target)


def definition(params, x, target):
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}
    up, gate = x @ p["up"], x @ p["gate"]
    d_up = target @ p["down"].T / np.cosh(up) ** 2
    d_gate = target @ p["out"].T * np.cos(gate)
    grads = {
        "up": np.einsum("btd,btf->df", x, d_up),
        "gate": np.einsum("btd,btf->df", x, d_gate),
        "down": np.einsum("btf,btd->fd", np.tanh(up), target),
        "out": np.einsum("btf,btd->fd", np.sin(gate), target),
    }
    d_x = d_up @ p["up"].T + d_gate @ p["gate"].T
    return np.tanh(up) @ p["down"] + np.sin(gate) @ p["out"], (grads, d_x)


def problem(tokens=T, rows=B):
    rng = np.random.default_rng(0)
    shapes = {"up": (D, F), "gate": (D, G), "down": (F, D), "out": (G, D)}
    params = {
        n: rng.normal(size=s).astype("float32") / np.sqrt(s[0]).astype("float32")
        for n, s in shapes.items()
    }
    x, target = (rng.normal(size=(rows, tokens, D)).astype("float32") for _ in range(2))
    return params, x, target


def on_mesh(args, mesh, rules):
    params, x, target = args
    params = {n: put(v, mesh, AXES[n], rules) for n, v in params.items()}
    whole = ("batch", None, None) if x.shape[0] % 2 == 0 else (None, None, None)
    return params, *(put(v, mesh, whole, rules) for v in (x, target))


def check(args, mesh, rules, tensor_parallel):
    options = {"rules": rules, "tensor_parallel": tensor_parallel}
    placed = on_mesh(args, mesh, rules)
    with jax.set_mesh(mesh):
        out = jax.jit(partial(network, **options))(*placed[:2])
        grads = jax.jit(jax.grad(partial(loss, **options), argnums=(0, 1)))(*placed)
    expected, expected_grads = definition(*args)
    assert relative_error(out, expected) < TOLERANCE
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True)
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < TOLERANCE
    return out, grads[0]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize(
    "sizes", [{"data": 2, "tensor": 4}, {"data": 2, "fsdp": 2, "tensor": 2}]
)
@pytest.mark.parametrize("tensor_parallel", ["xla", "fused"])
def test_products_equal_their_definition(sizes, kind, tensor_parallel):
    mesh = make_mesh(MeshConfig(**sizes, axis_type=kind))
    out, grads = check(problem(), mesh, RULES, tensor_parallel)
    spec = NamedSharding(mesh, RULES.spec(*SPLIT))
    assert out.sharding.is_equivalent_to(spec, 3)
    for name, grad in grads.items():
        spec = NamedSharding(mesh, RULES.spec(*AXES[name]))
        assert grad.sharding.is_equivalent_to(spec, 2), name


@pytest.mark.parametrize(
    ("tokens", "rows", "rules"),
    [
        (1, 4, RULES),  # one new token: sums on every device
        (7, 4, RULES),
        (16, 4, dataclasses.replace(RULES, tokens=None)),
        (16, 3, RULES),  # rows that do not divide
        (16, 4, dataclasses.replace(RULES, heads=None, act_heads=None)),
        (16, 4, fsdp()),
    ],
    ids=["one token", "odd tokens", "no sequence", "odd rows", "copied", "fsdp"],
)
def test_what_does_not_split(tokens, rows, rules):
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    check(problem(tokens, rows), mesh, rules, "xla")


def test_a_copied_kernel_beside_a_split_one():
    """Key heads that are fewer than devices: each device multiplies by all of them."""
    params, x, _ = problem()
    params = {"up": params["up"], "gate": params["gate"]}
    rules = dataclasses.replace(RULES, kv_heads=None, act_kv_heads=None)
    axes = {"up": ("embed", "mlp"), "gate": ("embed", "kv_heads")}

    def loss(params, x, tensor_parallel):
        up, gate = column_parallel(
            x,
            [params["up"], params["gate"]],
            kernel_axes=list(axes.values()),
            out_axes=[("batch", None, "act_mlp"), ("batch", None, "act_kv_heads")],
            rules=rules,
            tensor_parallel=tensor_parallel,
        )
        return jnp.sum(jnp.tanh(up) ** 2) + jnp.sum(jnp.sin(gate))

    expected = jax.grad(loss, argnums=(0, 1))(params, x, None)
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    placed = {n: put(v, mesh, axes[n], rules) for n, v in params.items()}
    with jax.set_mesh(mesh):
        run = jax.jit(partial(jax.grad(loss, argnums=(0, 1)), tensor_parallel="xla"))
        grads = run(placed, x)
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < TOLERANCE


@pytest.mark.parametrize("manual", [("data",), ("data", "fsdp", "pipe", "tensor")])
def test_inside_a_shard_map(manual):
    """Over the batch the tensor axis stays ours; over all axes arrays are local."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params, x, target = problem()
    rows = PartitionSpec("data")

    def step(params, x, target):
        options = {"rules": RULES, "tensor_parallel": "xla"}
        grads = jax.grad(partial(loss, **options))(params, x, target)
        return network(params, x, **options), jax.lax.psum(grads, "data")

    run = jax.shard_map(
        step,
        in_specs=(PartitionSpec(), rows, rows),
        out_specs=(rows, PartitionSpec()),
        axis_names=set(manual),
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        out, grads = jax.jit(run)(params, x, target)
    expected, (expected_grads, _) = definition(params, x, target)
    assert relative_error(out, expected) < TOLERANCE
    for name, grad in grads.items():
        assert relative_error(grad, expected_grads[name]) < TOLERANCE, name


# ------------------------------------------------------------------------------------
# What is communicated


def test_one_gather_and_one_scatter_each_way():
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    placed = on_mesh(problem(), mesh, RULES)
    placed = placed[0], *(put(v, mesh, SPLIT, RULES) for v in problem()[1:])
    options = {"rules": RULES, "tensor_parallel": "xla"}
    gather = ("all-gather", (B // 2, T, D))
    scatter = ("reduce-scatter", (B // 2, T // 4, D))
    with jax.set_mesh(mesh):
        assert collectives(partial(network, **options), *placed[:2]) == {
            gather: 1,
            scatter: 1,
        }
        grad = jax.grad(partial(loss, **options), argnums=(0, 1))
        found = collectives(grad, *placed)
    # Gradients of the parameters are summed over `data`; the loss itself is not asked
    # for, so its product need not run.
    activations = {k: n for k, n in found.items() if len(k[1]) == 3}
    assert activations == {gather: 2, scatter: 1}
    assert {name for name, shape in found if len(shape) == 2} == {"all-reduce"}


def test_one_token_is_summed_once():
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    placed = on_mesh(problem(tokens=1), mesh, RULES)
    run = partial(network, rules=RULES, tensor_parallel="xla")
    with jax.set_mesh(mesh):
        assert collectives(run, *placed[:2]) == {("all-reduce", (B // 2, 1, D)): 1}


def test_fsdp_gathers_kernels_again_in_the_backward_pass():
    """Gathered kernels are not kept; their gradients leave scattered."""
    layers, mesh = 3, make_mesh(MeshConfig(fsdp=4, tensor=2))
    params, x, _ = problem()
    stack = {n: np.stack([v] * layers) for n, v in params.items()}
    stack = {n: put(v, mesh, ("layers", *AXES[n]), RULES) for n, v in stack.items()}
    x = put(x, mesh, SPLIT, RULES)

    def run(stack, x):
        def layer(x, params):
            out = network(params, x, rules=RULES, tensor_parallel="xla")
            return jnp.tanh(out), None

        return jnp.sum(jax.lax.scan(layer, x, stack)[0] ** 2)

    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(run)).lower(stack, x).compile().as_text()
        found = collectives(jax.grad(run), stack, x)
    # Of `gate`, forward and backward.
    assert found["all-gather", (D, G // 2)] == 2, found
    assert found["reduce-scatter", (D // 4, G // 2)] == 1, found
    assert f"[{layers},{D // 4},{G // 2}]" in text
    assert f"[{layers},{D},{G // 2}]" not in text


# ------------------------------------------------------------------------------------
# Modules and errors


@pytest.mark.parametrize("tensor_parallel", ["xla", "fused", None])
def test_layers_equal_linear(tensor_parallel):
    from flax import nnx

    up = {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "act_mlp")}
    down = {"kernel_axes": ("mlp", "embed"), "out_axes": SPLIT}
    ones = jax.nn.initializers.ones

    class Layers(nnx.Module):
        def __init__(self, first, last, **options):
            self.up = first(D, F, use_bias=True, rngs=nnx.Rngs(0), **up, **options)
            self.down = last(F, D, use_bias=True, rngs=nnx.Rngs(1), **down, **options)
            for layer in (self.up, self.down):
                layer.bias[...] = layer.bias[...] + ones(None, layer.bias.shape)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    def loss(model, x):
        return jnp.sum(jnp.sin(model(x)))

    _, x, _ = problem()
    expected = jax.value_and_grad(loss)(Layers(Linear, Linear), jnp.asarray(x))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    options = {"rules": RULES, "tensor_parallel": tensor_parallel}
    model = create(
        lambda: Layers(ColumnParallelLinear, RowParallelLinear, **options), mesh, RULES
    )
    with jax.set_mesh(mesh):
        actual = jax.jit(jax.value_and_grad(loss))(model, x)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < TOLERANCE


def test_fused_says_what_runs(caplog, monkeypatch):
    from pallas_kernels import dispatch

    monkeypatch.setattr(dispatch, "_logged", set())
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    placed = on_mesh(problem(), mesh, RULES)
    run = partial(network, rules=RULES, tensor_parallel="fused")
    with jax.set_mesh(mesh), caplog.at_level(logging.INFO, logger="pallas_kernels"):
        jax.jit(run).lower(*placed[:2])
        jax.jit(run).lower(*placed[:2])
    said = Counter(record.getMessage().split()[0] for record in caplog.records)
    assert said == {"all_gather_matmul": 1, "matmul_reduce_scatter": 1}


@pytest.mark.parametrize("tensor_parallel", ["xla", "fused", None])
def test_eager_layers_run_on_the_mesh_of_their_parameters(tensor_parallel):
    """Without a mesh in the context, on an input that lies on one device."""
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    params, x, _ = problem()
    params = {n: put(v, mesh, AXES[n], RULES) for n, v in params.items()}
    options = {"rules": RULES, "tensor_parallel": tensor_parallel}
    out = network(params, jnp.asarray(x), **options)
    assert relative_error(out, definition(*problem())[0]) < TOLERANCE


@pytest.mark.parametrize("tensor_parallel", ["xla", None])
def test_shapes_that_disagree(no_shape_hook, tensor_parallel):
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    params, x, _ = problem()
    run = partial(network, rules=RULES, tensor_parallel=tensor_parallel)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"x has shape \(16, 32\) and its kernel"):
            run(params, x[0])
        with pytest.raises(ValueError, match=r"\[batch, tokens, 32 features\]"):
            run(params, x[..., :24])
        with pytest.raises(ValueError, match=r"and its kernel \(40, 32\), expected"):
            run({**params, "down": np.ones((40, D), "float32")}, x)


def test_errors(no_shape_hook):
    with pytest.raises(ValueError, match=r"tensor_parallel 'nccl' is unknown; use one"):
        check_tensor_parallel("nccl")
    with pytest.raises(ValueError, match=r"got heads=None and mlp=None; use fsdp_tp"):
        check_tensor_parallel("xla", REPLICATED)
    several = dataclasses.replace(RULES, mlp=("tensor", "pipe"))
    with pytest.raises(ValueError, match=r"over the mesh axes \['pipe', 'tensor'\]"):
        check_tensor_parallel("xla", several)
    with pytest.raises(ValueError, match="single mesh axis, or set tensor_parallel=No"):
        check_tensor_parallel("xla", AxisRules(heads="tensor", mlp="pipe"))
    with pytest.raises(ValueError, match=r"over the mesh axes \['fsdp', 'tensor'\]"):
        check_tensor_parallel(
            "xla", dataclasses.replace(RULES, embed=None, mlp=("fsdp", "tensor"))
        )
    check_tensor_parallel(None, REPLICATED)
