"""Collective matrix products on simulated devices, against sums without devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels.collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.specs import SPECS
from pallas_kernels.dispatch import Unsupported
from tests.pallas_kernels.collective_matmul.cases import (
    OPS,
    P,
    by_device,
    check,
    expected,
    expected_with_gradients,
    make_mesh,
    normal,
    on_devices,
    with_gradients,
)


FORMS = ("xla", "xla_ring")
F32 = jnp.float32


def operands(name, size, m, n, k, dtype=F32, batch=()):
    """Stacked x, w and dy; m rows on a device where rows are split."""
    rows = (m if name == "all_gather_matmul" else size * m, k)
    x = by_device(size, (*batch, *rows), dtype, 1)
    w = by_device(size, (k, n), dtype, 2)
    outputs = m if name == "matmul_reduce_scatter" else size * m
    return x, w, normal((size, *batch, outputs, n), dtype, 3)


@pytest.mark.parametrize(
    ("size", "check_vma"), [(1, True), (2, True), (4, True), (4, False), (8, True)]
)
@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(name, size, implementation, check_vma):
    x, w, dy = operands(name, size, m=5, n=12, k=24)
    op = functools.partial(OPS[name], axis_name="tensor", implementation=implementation)
    f = on_devices(make_mesh(size), op, check_vma=check_vma)
    got = with_gradients(f, (x, w), dy)
    check(got, expected_with_gradients(name, x, w, dy), F32)


@pytest.mark.parametrize(
    ("sizes", "check_vma"),
    [({"m": 0}, True), ({"m": 0}, False), ({"n": 0}, True), ({"k": 0}, True)],
)
@pytest.mark.parametrize("implementation", FORMS)
def test_where_nothing_is_to_be_sent(sizes, implementation, check_vma):
    """XLA refuses collectives of empty arrays on types that vary, or waits forever."""
    for name in OPS:
        x, w, dy = operands(name, 4, **{"m": 2, "n": 12, "k": 8, **sizes})
        op = functools.partial(
            OPS[name], axis_name="tensor", implementation=implementation
        )
        f = on_devices(make_mesh(4), op, check_vma=check_vma)
        y, gradients = with_gradients(f, (x, w), dy)
        for got, like in zip((y, *gradients), (dy, x, w), strict=True):
            np.testing.assert_array_equal(got, np.zeros_like(like), strict=True)


@pytest.mark.parametrize(
    ("dtype", "rhs_transposed"), [(jnp.bfloat16, True), (jnp.float16, False)]
)
@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", OPS)
def test_types_and_storage(name, implementation, rhs_transposed, dtype):
    x, w, dy = operands(name, 2, m=6, n=16, k=32, dtype=dtype)
    op = functools.partial(
        OPS[name],
        axis_name="tensor",
        implementation=implementation,
        rhs_transposed=rhs_transposed,
    )
    stored = w.mT if rhs_transposed else w
    y, (dx, dw) = with_gradients(on_devices(make_mesh(2), op), (x, stored), dy)
    assert y.dtype == dx.dtype == dw.dtype == dtype
    dw = dw.mT if rhs_transposed else dw
    want = expected_with_gradients(name, x, w, dy)
    check((y, (dx, dw)), want, dtype)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", OPS)
def test_wide_outputs_keep_the_sums(name, implementation):
    x, w, _ = operands(name, 4, m=4, n=8, k=512, dtype=jnp.bfloat16)
    op = functools.partial(
        OPS[name],
        axis_name="tensor",
        implementation=implementation,
        out_dtype=jnp.float32,
    )
    y = on_devices(make_mesh(4), op)(x, w)
    assert y.dtype == jnp.float32
    check(y, expected(name, x, w), F32)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", OPS)
def test_leading_axes_keep_their_rows(name, implementation):
    x, w, dy = operands(name, 2, m=3, n=8, k=16, batch=(2, 3))
    op = functools.partial(OPS[name], axis_name="tensor", implementation=implementation)
    got = with_gradients(on_devices(make_mesh(2), op), (x, w), dy)
    check(got, expected_with_gradients(name, x, w, dy), F32)


@pytest.mark.parametrize("implementation", FORMS)
def test_several_weights_share_one_gather(implementation):
    x, _, _ = operands("all_gather_matmul", 4, m=3, n=8, k=16)
    ws = [by_device(4, (16, n), F32, n) for n in (8, 12, 20)]
    dys = [normal((4, 12, n), F32, n + 1) for n in (8, 12, 20)]
    dgathered = normal((4, 12, 16), F32, 9)

    def op(x, ws):
        ys, gathered = all_gather_matmul(
            x,
            ws,
            axis_name="tensor",
            return_gathered=True,
            implementation=implementation,
        )
        return [*ys, gathered]

    def reference_op(x, ws):
        gathered = jnp.stack([jnp.concatenate(list(x))] * 4)
        return [*(expected("all_gather_matmul", x, w) for w in ws), gathered]

    f = on_devices(make_mesh(4), op)
    got = with_gradients(f, (x, ws), [*dys, dgathered])
    want = with_gradients(reference_op, (x, ws), [*dys, dgathered])
    np.testing.assert_array_equal(got[0][-1], want[0][-1])
    check(got, want, F32)
    gather = "collective-permute(" if implementation == "xla_ring" else "all-gather("
    text = str(f.lower(x, ws).compile().as_text())
    assert text.count(gather) == (3 if implementation == "xla_ring" else 1)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_several_products_share_one_reduction(name, implementation):
    xs = [by_device(4, (12, k), F32, k) for k in (16, 24)]
    ws = [by_device(4, (k, 8), F32, k + 1) for k in (16, 24)]
    rows = 3 if name == "matmul_reduce_scatter" else 12
    dy = normal((4, rows, 8), F32, 9)
    op = functools.partial(OPS[name], axis_name="tensor", implementation=implementation)

    def reference_op(xs, ws):
        return sum(expected(name, x, w) for x, w in zip(xs, ws, strict=True))

    f = on_devices(make_mesh(4), op)
    got = with_gradients(f, (xs, ws), dy)
    check(got, with_gradients(reference_op, (xs, ws), dy), F32)
    text = str(f.lower(xs, ws).compile().as_text())
    if implementation == "xla_ring":
        assert text.count("collective-permute(") == 3
    else:
        assert text.count("all-reduce(") + text.count("reduce-scatter(") == 1


@pytest.mark.parametrize("name", OPS)
def test_the_ring_passes_shards_on(name):
    """No step of the ring needs all shards at once, forward or backward."""
    x, w, dy = operands(name, 4, m=4, n=8, k=16)
    op = functools.partial(OPS[name], axis_name="tensor", implementation="xla_ring")
    f = on_devices(make_mesh(4), op)

    def backward(x, w, dy):
        return jax.vjp(f, x, w)[1](dy)

    forward_text = str(f.lower(x, w).compile().as_text())
    both = forward_text + str(jax.jit(backward).lower(x, w, dy).compile().as_text())
    assert forward_text.count("collective-permute(") == 3
    assert "reduce-scatter(" not in both
    if name != "matmul_all_reduce":
        assert "all-reduce(" not in both
        assert "all-gather(" not in both


MESHES = [
    ((2, 2), "tensor", "xla"),
    ((2, 2), "data", "xla_ring"),
    ((2, 2, 2), "data", "xla"),
    ((2, 2, 2), "data", "xla_ring"),
]


@pytest.mark.parametrize(("sizes", "axis", "implementation"), MESHES)
@pytest.mark.parametrize("name", OPS)
def test_one_axis_of_several(name, sizes, axis, implementation):
    """Groups of devices along the other axes each have their own operands."""
    names = ("tensor", "data", "pipe")[: len(sizes)]
    others = tuple(n for n in names if n != axis)
    groups = 2 ** len(others)
    cases = [operands(name, 2, m=3, n=8, k=16) for _ in range(groups)]
    x, w, dy = (
        jnp.stack([(1 + g) * case[i] for g, case in enumerate(cases)]) for i in range(3)
    )
    op = functools.partial(OPS[name], axis_name=axis, implementation=implementation)

    def local(x, w):
        return op(x[0, 0], w[0, 0])[None, None]

    spec = P(others, axis)
    f = jax.jit(
        jax.shard_map(
            local, mesh=make_mesh(*sizes), in_specs=(spec, spec), out_specs=spec
        )
    )
    got = with_gradients(f, (x, w), dy)
    for g in range(groups):
        want = expected_with_gradients(name, x[g], w[g], dy[g])
        check(jax.tree.map(lambda a, g=g: a[g], got), want, F32)


def test_gradients_of_a_weight_on_every_device_are_summed():
    """Over the axis of the op and over axes that it does not know."""
    x = normal((2, 2, 6, 16), F32, 1)
    w = normal((16, 8), F32, 2)

    def loss(check_vma, x, w):
        def local(x, w):
            y = all_gather_matmul(x[0, 0], w, axis_name="tensor")
            y = matmul_reduce_scatter(jnp.sin(y), w.T, axis_name="tensor")
            return jnp.sum(y**2)[None, None]

        f = jax.shard_map(
            local,
            mesh=make_mesh(2, 2),
            in_specs=(P("data", "tensor"), P()),
            out_specs=P("data", "tensor"),
            check_vma=check_vma,
        )
        return jnp.sum(f(x, w))

    def want(x, w):
        total = 0.0
        for group in x:
            hidden = jnp.sin(group.reshape(12, 16) @ w)
            total += jnp.sum((2 * hidden @ w.T) ** 2)
        return total

    for check_vma in (True, False):
        got = jax.jit(jax.grad(functools.partial(loss, check_vma), (0, 1)))(x, w)
        check(got, jax.grad(want, (0, 1))(x, w), F32)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", FORMS)
def test_all_reduce_is_psum_to_gradients_inside_shard_map(implementation, check_vma):
    """What `jax.grad` makes of an equal output depends on `check_vma`."""
    x, w, _ = operands("matmul_all_reduce", 4, m=3, n=8, k=16)

    def gradient(product, x, w):
        def loss(x, w):
            y = product(x, w)
            weight = 1 + lax.axis_index("tensor").astype(F32)
            mine = jnp.sum(jnp.sin(y) * weight)
            return lax.psum(mine, "tensor") + jnp.sum(y**2)

        return jax.grad(loss, (0, 1))(x, w)

    def ours(x, w):
        return matmul_all_reduce(
            x, w, axis_name="tensor", implementation=implementation
        )

    def plain(x, w):
        return lax.psum(x @ w, "tensor")

    got, want = (
        on_devices(
            make_mesh(4), functools.partial(gradient, product), check_vma=check_vma
        )(x, w)
        for product in (ours, plain)
    )
    check(got, want, F32)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("implementation", FORMS)
def test_a_stack_of_layers(implementation, check_vma):
    """Under jit, scan over layers, remat that gathers again, donation."""
    layers, size = 3, 4
    x = normal((8, 16), F32, 1)
    up = 0.1 * normal((layers, 16, 32), F32, 2)
    down = 0.1 * normal((layers, 32, 16), F32, 3)
    options = {"axis_name": "tensor", "implementation": implementation}
    policy = jax.checkpoint_policies.save_only_these_names("all_gather_matmul_out")

    def run(x, up, down):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(x, weights):
            hidden = jnp.sin(all_gather_matmul(x, weights[0], **options))
            return x + matmul_reduce_scatter(hidden, weights[1], **options), None

        return lax.scan(layer, x, (up, down))[0]

    f = jax.shard_map(
        run,
        mesh=make_mesh(size),
        in_specs=(P("tensor"), P(None, None, "tensor"), P(None, "tensor")),
        out_specs=P("tensor"),
        check_vma=check_vma,
    )

    def step(run, x, up, down):
        loss, grads = jax.value_and_grad(lambda *a: jnp.sum(run(*a) ** 2), (0, 1, 2))(
            x, up, down
        )
        return loss, jax.tree.map(lambda a, g: a - 1e-3 * g, (x, up, down), grads)

    def plain(x, up, down):
        for layer in range(layers):
            x = x + jnp.sin(x @ up[layer]) @ down[layer]
        return x

    want = step(plain, x, up, down)
    donated = jax.jit(functools.partial(step, f), donate_argnums=(0, 1, 2))
    check(donated(x, up, down), want, F32)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_layer(spec):
    """A hundredth of the size: the XLA forms do not depend on it."""
    size = 4
    n, k = (features // 256 for features in spec.local(size))
    names = ["all_gather_matmul"]
    if spec.kind == "reduce_scatter":
        names = ["matmul_reduce_scatter", "matmul_all_reduce"]
    for name in names:
        x, w, _ = operands(name, size, m=2, n=n, k=k, dtype=jnp.bfloat16)
        op = functools.partial(OPS[name], axis_name="tensor")
        y = on_devices(make_mesh(size), op)(x, w)
        check(y, expected(name, x, w), jnp.bfloat16)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize("name", OPS)
def test_vmap(name, implementation):
    """Over operands and weights, and over either alone, at any place."""
    x, w, _ = operands(name, 2, m=3, n=8, k=16)
    xs, ws = (jnp.stack([a, 2 * a, -a], axis=2) for a in (x, w))
    op = functools.partial(OPS[name], axis_name="tensor", implementation=implementation)
    for x_axis, w_axis, factors in ((1, 1, (1, 4, 1)), (1, None, (1, 2, -1))):
        f = on_devices(make_mesh(2), jax.vmap(op, (x_axis, w_axis)))
        y = f(xs, w if w_axis is None else ws)
        want = expected(name, x, w)
        check(y, jnp.stack([f * want for f in factors], axis=1), F32)


def test_eager_calls():
    x, w, _ = operands("all_gather_matmul", 2, m=3, n=8, k=16)
    got = jax.shard_map(
        lambda x, w: all_gather_matmul(x[0], w[0], axis_name="tensor")[None],
        mesh=make_mesh(2),
        in_specs=P("tensor"),
        out_specs=P("tensor"),
    )(x, w)
    check(got, expected("all_gather_matmul", x, w), F32)


def traced(f, *shapes, size=2, dtype=F32):
    """Traces ``f`` on one of `size` devices."""
    arrays = [jnp.ones(shape, dtype) for shape in shapes]

    def local(*arrays):
        return f(*arrays)[None]

    mapped = jax.shard_map(
        local, mesh=make_mesh(size), in_specs=P(), out_specs=P("tensor")
    )
    return jax.eval_shape(mapped, *arrays)


@pytest.mark.parametrize("name", OPS)
def test_mistakes_that_all_ops_share(no_shape_hook, name):
    op = functools.partial(OPS[name], axis_name="tensor")
    with pytest.raises(ValueError, match=r"x has shape \(4,\).*\[\*B, rows, f"):
        traced(op, (4,), (4, 6))
    with pytest.raises(ValueError, match=r"w has shape \(1, 4, 6\).*a matrix"):
        traced(op, (8, 4), (1, 4, 6))
    with pytest.raises(ValueError, match=r"w has shape \(6, 4\).*expected 4 input"):
        traced(op, (8, 4), (6, 4))
    with pytest.raises(ValueError, match=r"w\[1\] .*\(rhs_transposed=True\), exp"):
        several = [(8, 4)] if name == "all_gather_matmul" else [(8, 4), (8, 4)]

        def transposed(*arrays):
            xs, ws = arrays[: len(several)], arrays[len(several) :]
            x = xs[0] if name == "all_gather_matmul" else xs
            return op(x, ws, rhs_transposed=True)

        traced(transposed, *several, (6, 4), (4, 6))
    with pytest.raises(ValueError, match="w has type bfloat16, expected that of x"):
        traced(lambda x, w: op(x, w.astype(jnp.bfloat16)), (8, 4), (4, 6))
    with pytest.raises(ValueError, match="x has type int32, expected a floating type"):
        traced(op, (8, 4), (4, 6), dtype=jnp.int32)
    with pytest.raises(ValueError, match="out_dtype int8, expected a floating type"):
        traced(functools.partial(op, out_dtype=jnp.int8), (8, 4), (4, 6))
    with pytest.raises(ValueError, match="w is empty, expected an array"):
        traced(lambda x: op(x, []), (8, 4))
    with pytest.raises(ValueError, match="axis_name 'model' is no axis of an encl"):
        traced(functools.partial(op, axis_name="model"), (8, 4), (4, 6))
    with pytest.raises(ValueError, match=r"'tensor' is no axis.*call the op"):
        op(jnp.ones((8, 4)), jnp.ones((4, 6)))
    with pytest.raises(ValueError, match=r"axis_name \('tensor',\), expected the"):
        traced(functools.partial(op, axis_name=("tensor",)), (8, 4), (4, 6))
    with pytest.raises(ValueError, match=f"'nccl' of {name} does not exist; expected"):
        traced(functools.partial(op, implementation="nccl"), (8, 4), (4, 6))
    with pytest.raises(ValueError, match=f"implementation 3 of {name}: expected None"):
        traced(functools.partial(op, implementation=3), (8, 4), (4, 6))
    for form in FORMS:
        with pytest.raises(Unsupported, match=f"{form!r} takes no config, got 'tiles'"):
            given = functools.partial(op, implementation=form, config="tiles")
            traced(given, (8, 4), (4, 6))


@pytest.mark.parametrize("name", ["matmul_reduce_scatter", "matmul_all_reduce"])
def test_mistakes_in_sequences(no_shape_hook, name):
    op = functools.partial(OPS[name], axis_name="tensor")
    shapes = ((8, 4), (8, 4), (4, 6), (4, 6))
    with pytest.raises(ValueError, match="x holds 2 arrays and w 1, expected one wei"):
        traced(lambda a, b, u, _: op([a, b], u), *shapes)
    with pytest.raises(ValueError, match="x is empty, expected an array"):
        traced(lambda u: op([], [u]), (4, 6))
    with pytest.raises(ValueError, match=r"x\[0\], x\[1\] have rows \[\(8,\), \(6"):
        traced(lambda a, b, u, v: op([a, b], [u, v]), (8, 4), (6, 4), (4, 6), (4, 6))
    with pytest.raises(ValueError, match=r"w\[0\], w\[1\] have output features \[6"):
        traced(lambda a, b, u, v: op([a, b], [u, v]), (8, 4), (8, 4), (4, 6), (4, 5))


def test_rows_that_devices_cannot_share(no_shape_hook):
    scatter = functools.partial(matmul_reduce_scatter, axis_name="tensor")
    with pytest.raises(ValueError, match=r"x has shape \(7, 4\), expected rows M=7"):
        traced(scatter, (7, 4), (4, 6))
    reduce = functools.partial(matmul_all_reduce, axis_name="tensor")
    assert traced(reduce, (7, 4), (4, 6)).shape == (2, 7, 6)
    with pytest.raises(Unsupported, match="rows in multiples of the 2 devices of 't"):
        traced(functools.partial(reduce, implementation="xla_ring"), (7, 4), (4, 6))


def test_one_array_is_gathered(no_shape_hook):
    op = OPS["all_gather_matmul"]
    with pytest.raises(ValueError, match="x is a sequence of 2 arrays, expected one"):
        traced(
            lambda a, b, w: op([a, b], w, axis_name="tensor"),
            (8, 4),
            (8, 4),
            (4, 6),
        )
