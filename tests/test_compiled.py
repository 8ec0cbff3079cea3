"""Programs compiled for H200s without a GPU: spills, donation, collectives, memory."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxscale.nn.linear import ColumnParallelLinear, Linear, project_together
from jaxscale.sharding import (
    column_parallel,
    fsdp,
    fsdp_tp,
    make_mesh,
    row_parallel,
    shardings,
)
from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import (
    CollectiveConfig,
    all_gather_matmul,
    low_latency_all_gather_matmul,
    low_latency_all_reduce,
    make_all_reduce_workspace,
    make_gather_workspace,
    matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.config import CollectiveProblem, in_order_of_k
from pallas_kernels.mosaic import H200
from tests import compiled, manifest, registers
from tests.compiled import compile_for_h200
from tests.registers import on_one
from tests.tiers import first
from tests.training import test_step, toy


P = jax.sharding.PartitionSpec


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op, cases in registers.CASES.items() for name in cases],
)
def test_kernels_spill_nothing(op, name, request):
    others = name != next(iter(registers.CASES[op]))
    taken = request.config.option.exhaustive or not others
    if not taken and manifest.is_written(op, manifest.read()):
        pytest.skip("the same code was compiled when the manifest was written")
    registers.check(op, name)


def test_sums_of_attention_gradients_are_cut_into_tiles_at_once():
    name = "dense_d128_l4096_causal"
    found = compile_for_h200(registers.kernels, "varlen_attention", name)
    fusions = {x.operation for x in found.written(2**20) if "fusion" in x.operation}
    # Sums, and tiles of them: no array of where queries see anything between the two.
    assert fusions == {"fusion reduce select", "fusion concatenate"}


def test_spills_are_read():
    said = """ptxas info : Function properties for one_mosaic_gpu_kernel
    8 bytes stack frame, 12 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
ptxas info    : Function properties for two_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers
"""
    assert compiled.kernels_in(said) == [
        {"name": "one", "registers": 168, "spilled": 32},
        {"name": "two", "registers": 40, "spilled": 0},
    ]


def collective_product(devices, rows_of_all=4096, config=None, reduces=False):
    mesh = Mesh(np.array(devices), ("tensor",))
    rows, columns = P("tensor"), P(None, "tensor")
    specs, out_specs = (rows, columns), columns
    if reduces:
        specs, out_specs = (columns, rows), rows
    run = functools.partial(
        matmul_reduce_scatter if reduces else all_gather_matmul,
        axis_name="tensor",
        implementation="mosaic_gpu",
        config=config and CollectiveConfig(**config),
    )
    fn = jax.shard_map(
        run, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
    )
    shapes = (rows_of_all, 4096), (4096, 4096)
    operands = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    )
    return jax.jit(fn), tuple(operands)


@pytest.mark.parametrize("index", first(range(4), 0, 3))
def test_gathers_in_the_order_of_k_spill_nothing(index):
    problem = CollectiveProblem(
        kind="all_gather",
        m=1024,
        n=(2048,),
        k=(4096,),
        devices=2,
        dtype=jnp.dtype(jnp.bfloat16),
    )
    config = dataclasses.asdict(in_order_of_k(problem, H200)[index])
    found = compile_for_h200(collective_product, 1024, config, count=2)
    assert [(k.name, k.spilled) for k in found.kernels] == [("all_gather_matmul", 0)]
    assert found.count("all-gather") == found.count("copy") == 0


def test_a_collective_kernel_leaves_nothing_to_xla():
    found = compile_for_h200(collective_product, count=2)
    assert [(k.name, k.spilled) for k in found.kernels] == [("all_gather_matmul", 0)]
    assert found.count("all-gather") == found.count("copy") == 0


@pytest.mark.parametrize("cluster", ["none", "m"])
def test_sums_written_to_their_owners_spill_nothing(cluster):
    config = {"cluster": cluster, "transfer": "push"}
    found = compile_for_h200(collective_product, 4096, config, True, count=2)
    assert [(k.name, k.spilled) for k in found.kernels] == [
        ("matmul_reduce_scatter", 0)
    ]
    assert found.count("reduce-scatter") == found.count("all-reduce") == 0
    assert found.count("copy") == 0


def layers_over_devices(devices, layers, rows_of_one, start, layer):
    """Steps of layers, which hand a workspace on."""
    mesh = Mesh(np.array(devices), ("tensor",))

    def local(x, w):
        def step(carry, _):
            for _ in range(layers):
                carry = layer(jnp.tanh(carry[0]), w, carry[1])
            return carry, None

        return jax.lax.scan(step, (x, start(x)), length=8)[0][0]

    fn = jax.shard_map(
        local, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor"), check_vma=False
    )
    rows = NamedSharding(mesh, P("tensor"))
    return jax.jit(fn), tuple(
        jax.ShapeDtypeStruct((size * len(devices), 4096), jnp.bfloat16, sharding=rows)
        for size in (rows_of_one, 4096)
    )


def decoding(devices, layers, rows_of_one=16):
    """A product and a sum over devices in each layer."""

    def start(x):
        return make_all_reduce_workspace(
            x.size, x.dtype, axis_name="tensor", device=H200
        )

    def layer(x, w, workspace):
        return low_latency_all_reduce(x @ w, workspace, axis_name="tensor")

    return layers_over_devices(devices, layers, rows_of_one, start, layer)


@pytest.mark.parametrize("layers", first((1, 3), 3))
def test_nothing_moves_the_cells_that_peers_write_to(layers):
    """A copy between two calls would lose what a peer wrote before it."""
    found = compile_for_h200(decoding, layers, count=2)
    assert [(k.name, k.spilled) for k in found.kernels] == [
        ("low_latency_all_reduce", 0)
    ] * (1 + layers)
    cells = 2 * 2 * 16 * 4096 * 4
    assert max(found.sizes("copy")) < cells // 4
    assert found.count("all-reduce") == 0


def gathers(devices, layers, push):
    """Rows are gathered in each layer; their own results are the next ones."""
    options = {"axis_name": "tensor", "device": H200}

    def start(x):
        return make_gather_workspace(*x.shape, x.dtype, push=push, **options)

    def layer(x, w, workspace):
        y, workspace = low_latency_all_gather_matmul(x, w, workspace, **options)
        return y[: x.shape[0]], workspace

    return layers_over_devices(devices, layers, 512, start, layer)


@pytest.mark.parametrize("push", [False, True])
def test_nothing_moves_the_rows_and_counters_that_peers_write_to(push):
    found = compile_for_h200(gathers, 2, push, count=2)
    assert [(k.name, k.spilled) for k in found.kernels] == [
        ("begin_gathers", 0),
        *[("all_gather_matmul", 0)] * 2,
    ]
    rows, copied = 2 * 512 * 4096, found.sizes("copy")  # of a set
    assert max(copied, default=0) < rows
    # Two counters and one for each step of a row block; and the number of each block.
    for count in (2 + 2 * 4 * 8, 132):
        assert f"s32[2,{count}]" in found.hlo and 2 * count not in copied
    assert found.count("all-gather") == 0


def test_a_product_of_padded_rows_does_not_swallow_the_kernel():
    """XLA cuts its rows off, and fuses that cut with what reads it."""
    found = compile_for_h200(decoding, 1, 2, count=2)
    assert "dynamic-slice-fusion" not in found.hlo
    assert (
        found.hlo.count("output_to_operand_aliasing={{1}: (1, {}), {2}: (2, {})}") == 2
    )


def product(devices, donate):
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    fn = jax.jit(lambda a, b: jnp.tanh(a @ b), donate_argnums=(0,) * donate)
    return fn, on_one(devices, (x, x))


@pytest.mark.parametrize("products", ["cublas", "triton"])
def test_where_products_come_from_and_what_is_donated(products):
    size = 2 * 4096**2
    found = compile_for_h200(product, True, products=products)
    assert (found.arguments, found.outputs, found.aliased) == (2 * size, size, size)
    assert ("__cublas" in found.hlo) == (products == "cublas")
    assert ("gemm_fusion" in found.hlo) == (products == "triton")
    assert compile_for_h200(product, False, products=products).aliased == 0


def training(devices):
    optimizer, step = test_step.parts()
    state = jax.eval_shape(lambda: test_step.fresh(optimizer))
    return step, on_one(devices, (state, toy.batch(0)))


def test_a_training_step_donates_its_state():
    state = jax.eval_shape(lambda: test_step.fresh(test_step.parts()[0]))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    found = compile_for_h200(training)
    assert found.aliased == pytest.approx(size, abs=64)


def tensor_parallel(devices, closed):
    mesh = Mesh(np.array(devices), ("tensor",))

    def block(x, up, down):
        y = jax.nn.relu(x @ up) @ down
        return jax.lax.with_sharding_constraint(y, NamedSharding(mesh, P())) + closed

    def shape(spec, *sizes):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=sharding)

    up, down = P(None, "tensor"), P("tensor", None)
    return jax.jit(block), (
        shape(P(), 1024, 1024),
        shape(up, 1024, 4096),
        shape(down, 4096, 1024),
    )


def test_two_products_need_one_all_reduce():
    found = compile_for_h200(tensor_parallel, 1, count=4)
    assert found.count("all-reduce") == 1
    assert found.count("all-gather") == found.count("all-to-all") == 0
    # Weights are a quarter on each device.
    assert found.arguments == 2 * (1024 * 1024 + 2 * 1024 * 1024)


def stored_over_fsdp(devices, copies, kernel):
    """Gradients of two layers, by the kernel or by the compiler alone."""
    mesh, rules = make_mesh({"data": copies, "fsdp": -1}, devices), fsdp()
    names = {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "act_mlp")}

    def make():
        layer = functools.partial(
            ColumnParallelLinear, 1024, 2048, use_bias=True, dtype=jnp.bfloat16
        )
        options = {"rules": rules, "rngs": nnx.Rngs(0), **names}
        return [layer(**options), layer(**options)]

    def loss(layers, x):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            if kernel:
                ys = project_together(layers, x, ["gelu", "gelu"])
            else:
                ys = [Linear.__call__(layer, x, "gelu") for layer in layers]
        return sum(jnp.square(y.astype(jnp.float32)).sum() for y in ys)

    layers = jax.eval_shape(make)
    layers = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        layers,
        layout := shardings(layers, mesh, rules),
    )
    rows = NamedSharding(mesh, rules.spec("batch", None, None))
    x = jax.ShapeDtypeStruct((32, 512, 1024), jnp.bfloat16, sharding=rows)
    gradient = jax.grad(loss, argnums=(0, 1))
    return jax.jit(gradient, out_shardings=(layout, rows)), (layers, x)


@pytest.mark.parametrize("copies", first((1, 2), 2))
def test_weights_that_fsdp_stores_reach_the_kernel(copies):
    by_kernel = compile_for_h200(stored_over_fsdp, copies, True, count=4)
    assert {kernel.name for kernel in by_kernel.kernels} == {"dense", "matmul"}
    by_xla = compile_for_h200(stored_over_fsdp, copies, False, count=4)
    assert by_xla.kernels == ()
    operations = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")
    counts, without = (
        [found.count(operation) for operation in operations]
        for found in (by_kernel, by_xla)
    )
    if copies == 1:
        # Both weights at once, forward and again backward; gradients are scattered, and
        # those of the biases summed.
        assert counts == without == [2, 1, 1, 0]
    else:
        # XLA sums whole gradients over all devices and then drops what is not a
        # device's own. Written out, they are scattered first.
        assert (counts, without) == ([2, 1, 2, 0], [2, 0, 1, 0])


def broken(devices):
    return jax.jit(lambda x: jnp.dot(x, jnp.ones(4))), on_one(devices, (jnp.zeros(3),))


def test_the_traceback_of_a_program_comes_back():
    with pytest.raises(RuntimeError, match="TypeError"):
        compile_for_h200(broken)


def fp8_network(devices, tensor_parallel):
    """Gradients of two layers in fp8 whose tokens are split over the devices."""
    mesh, rules = make_mesh({"tensor": len(devices)}, devices), fsdp_tp()
    config = CollectiveConfig(tile_m=128, tile_n=128, tile_k=128, stages=4)
    features, hidden = 2048, 4096
    options = {"rules": rules, "tensor_parallel": tensor_parallel}
    options["quantization"] = "fp8"

    def network(ups, down, x):
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            tuned_configs.override("collective_matmul", config),
        ):
            up, gate = column_parallel(
                x,
                ups,
                kernel_axes=[("embed", "mlp")] * 2,
                out_axes=[("batch", None, "act_mlp")] * 2,
                **options,
            )
            return row_parallel(
                [jax.nn.silu(gate) * up],
                [down],
                kernel_axes=[("mlp", "embed")],
                out_axes=("batch", "tokens", "act_embed"),
                **options,
            )

    def step(ups, down, x, g):
        y, back = jax.vjp(network, ups, down, x)
        with tuned_configs.override("collective_matmul", config):
            return y, back(g)

    def shape(axes, *sizes):
        where = NamedSharding(mesh, rules.spec(*axes))
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16, sharding=where)

    tokens = shape(("batch", "tokens", None), 1, 2048, features)
    up = shape(("embed", "mlp"), features, hidden)
    return jax.jit(step), (
        [up, up],
        shape(("mlp", "embed"), hidden, features),
        tokens,
        tokens,
    )


def test_layers_in_fp8_take_the_kernels_that_communicate():
    found = compile_for_h200(fp8_network, "fused", count=2)
    kernels = [kernel.name for kernel in found.kernels]
    # A gather and a reduction forward, and one of each backward.
    assert kernels.count("all_gather_matmul") == 2
    assert kernels.count("matmul_reduce_scatter") == 2
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    assert found.count("reduce-scatter") == 0
    # The input is gathered again for the gradient of its weights, in fp8, with scales.
    gathers = re.findall(r"= (.*) all-gather(?:-start)?\(", found.hlo)
    assert gathers and not any("bf16[" in types for types in gathers)
