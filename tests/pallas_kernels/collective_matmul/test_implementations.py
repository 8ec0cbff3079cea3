"""Which implementation runs where, and that the kernels are reached from the ops."""

import dataclasses
import functools
import json
import logging
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh

from pallas_kernels import dispatch as dispatch_module
from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import (
    CollectiveConfig,
    all_gather_matmul,
    device_order,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.collective_matmul.device_order import by_device_order
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, DeviceSpec, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import CUSTOM_CALL, lower_for_cuda
from tests.pallas_kernels.collective_matmul.cases import (
    OPS,
    P,
    check,
    make_mesh,
    normal,
)
from tests.tiers import exhaustive


BF16 = jnp.bfloat16
SMALL = CollectiveConfig(tile_m=128, tile_n=64, stages=2)
OPTIONS = {"axis_name": "tensor"}


def shape(*sizes, dtype=BF16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def mesh_of(*numbers, shape=None):
    devices = np.array([jax.devices()[i] for i in numbers]).reshape(shape or -1)
    names = ("tensor", "data")[: devices.ndim]
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * devices.ndim)


def split(name, mesh, check_vma=True, op=None, **options):
    """An op of global arrays [M,K] and [K,N]."""
    op = op or functools.partial(OPS[name], **OPTIONS, **options)
    specs = {
        "all_gather_matmul": (P("tensor"), P(None, "tensor"), P(None, "tensor")),
        "matmul_reduce_scatter": (P(None, "tensor"), P("tensor"), P("tensor")),
        "matmul_all_reduce": (P(None, "tensor"), P("tensor"), P()),
    }[name]
    return jax.shard_map(
        op, mesh=mesh, in_specs=specs[:2], out_specs=specs[2], check_vma=check_vma
    )


def text_for_cuda(f, *shapes):
    return jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.fixture
def said(caplog, monkeypatch):
    """Messages of the choice, as if nothing had been logged before."""
    monkeypatch.setattr(dispatch_module, "_logged", set())
    monkeypatch.setattr(device_order, "_logged", set())
    caplog.set_level(logging.INFO, logger="pallas_kernels")
    return caplog


@pytest.mark.parametrize("name", OPS)
def test_without_a_gpu_xla_runs_and_the_reason_is_said_once(name, said):
    for _ in range(2):
        jax.eval_shape(split(name, make_mesh(2)), shape(8, 16), shape(16, 4))
    [message] = [r.getMessage() for r in said.records]
    assert f"{name} runs implementation 'xla' (mosaic_gpu: {name}: " in message
    assert "needs an NVIDIA Hopper GPU and the backend is 'cpu'" in message


@pytest.mark.parametrize("name", OPS)
def test_xla_runs_on_a_mesh_of_cpus_beside_a_gpu(name, monkeypatch):
    """With as many rows as kernels are preferred from."""
    mesh = mesh_of(0, 1, 2, 3)
    x, w = normal((8192, 256), BF16, 1), normal((256, 256), BF16, 2)
    want = jax.jit(plain(name, mesh))(x, w)
    gpu = types.SimpleNamespace(
        device_kind="NVIDIA H200", compute_capability="9.0", core_count=132
    )
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu])
    assert DeviceSpec.current() == H200
    check(jax.jit(split(name, mesh))(x, w), want, BF16)
    with pytest.raises(Unsupported, match=r"an NVIDIA Hopper GPU .* is 'cpu'"):
        split(name, mesh, implementation="mosaic_gpu")(x, w)


def plain(name, mesh):
    """An op as its definition says, without any of ours."""

    def run(x, w):
        if name == "all_gather_matmul":
            return jnp.dot(lax.all_gather(x, "tensor", tiled=True), w)
        partial = jnp.dot(x, w)
        if name == "matmul_all_reduce":
            return lax.psum(partial, "tensor")
        return lax.psum_scatter(partial, "tensor", tiled=True)

    return split(name, mesh, op=run)


@pytest.mark.parametrize("name", OPS)
def test_dispatch_to_xla_costs_nothing(name):
    mesh = mesh_of(0, 1, 2, 3)
    operands = shape(64, 512), shape(512, 256)

    def work(f):
        """What the compiled program does, and on which shapes."""
        text = str(jax.jit(f).lower(*operands).compile().as_text())
        found = re.findall(r" = (\S+?)(?:{\S*})? ([a-z][\w-]*)\(", text)
        free = ("parameter", "bitcast", "constant")
        return sorted(x for x in found if x[1] not in free)

    assert work(split(name, mesh)) == work(plain(name, mesh)) != []


@pytest.mark.parametrize("check_vma", [True, *exhaustive(False)])
@pytest.mark.parametrize("name", OPS)
def test_the_order_of_devices_decides_when_a_function_is_lowered(name, check_vma, said):
    shapes = shape(8192, 512), shape(512, 1024)
    with use_device(H200):
        in_order = split(name, mesh_of(0, 1, 2, 3), check_vma)
        lower_for_cuda(in_order, *shapes, kernels=1)
        for numbers in ((3, 2, 1, 0), (2, 3)):  # permuted, and not the first
            text = text_for_cuda(split(name, mesh_of(*numbers), check_vma), *shapes)
            assert CUSTOM_CALL not in text
            found = [r.getMessage() for r in said.records]
            assert any(
                f"{name} runs without the kernel: the devices of the mesh are"
                f" {list(numbers)}" in message
                for message in found
            )
            named = split(name, mesh_of(*numbers), implementation="mosaic_gpu")
            with pytest.raises(Unsupported, match=r"need 0 to \d in order; use impl"):
                text_for_cuda(named, *shapes)
            given = split(name, mesh_of(*numbers), config=SMALL)
            with pytest.raises(Unsupported, match="in order"):
                text_for_cuda(given, *shapes)


def test_both_axes_of_a_mesh():
    mesh = mesh_of(0, 1, 2, 3, shape=(2, 2))
    with use_device(H200):
        for axis in ("tensor", "data"):
            f = jax.shard_map(
                functools.partial(
                    all_gather_matmul, axis_name=axis, implementation="mosaic_gpu"
                ),
                mesh=mesh,
                in_specs=(P(("tensor", "data")), P()),
                out_specs=P(("tensor", "data")),
            )
            lower_for_cuda(f, shape(4096, 512), shape(512, 512), kernels=1)


def product(x):
    return {"y": (2 * lax.all_gather(x, "tensor", tiled=True),)}


def other_product(x):
    return {"y": (3 * lax.all_gather(x, "tensor", tiled=True),)}


def test_the_chosen_form_runs():
    x = jnp.arange(4.0)

    def choose(mesh, portable=other_product):
        def local(x):
            trace = jax.make_jaxpr
            other = None if portable is None else trace(portable)(x)
            forms = trace(product)(x), other
            return by_device_order("op", *forms, x, axis_name="tensor")[0][:1]

        return jax.shard_map(
            local, mesh=mesh, in_specs=P("tensor"), out_specs=P("tensor")
        )

    def twice(f, x):
        return lax.scan(lambda x, _: (f(x) + 1, None), x, None, length=2)[0]

    for numbers, factor in (((0, 1, 2, 3), 2), ((1, 0, 2, 3), 3)):
        f = choose(mesh_of(*numbers))
        want = np.full(4, factor * x[0])
        for run in (f, jax.jit(f), jax.vmap(f)):
            if run is not f:
                np.testing.assert_array_equal(jax.jit(f)(x + 1), want + factor)
        np.testing.assert_array_equal(f(x + 1), want + factor)
        np.testing.assert_array_equal(
            jax.jit(functools.partial(twice, f))(x), np.full(4, factor + 1)
        )
    with pytest.raises(Unsupported, match=r"op: the devices of the mesh are \[1, 0, 2"):
        jax.jit(choose(mesh_of(1, 0, 2, 3), None))(x)
    with pytest.raises(TypeError, match=r"op: the kernel returns .* its replacement"):
        wide = lambda x: {"y": (product(x)["y"][0].astype(BF16),)}  # noqa: E731
        choose(mesh_of(0, 1), wide)(x)


def test_where_kernels_cannot_reach_their_peers():
    name = "matmul_reduce_scatter"
    shapes = shape(2400, 384), shape(384, 1024)
    with use_device(H200):
        with pytest.raises(
            Unsupported, match=r"'tensor' has 3 devices, expected one of"
        ):
            jax.eval_shape(
                split(name, make_mesh(3), implementation="mosaic_gpu"), *shapes
            )
        partly = jax.shard_map(
            functools.partial(
                matmul_all_reduce, **OPTIONS, implementation="mosaic_gpu"
            ),
            mesh=make_mesh(2, 2),
            in_specs=(P(None, "tensor"), P("tensor")),
            out_specs=P(),
            axis_names={"tensor"},
        )
        with pytest.raises(
            Unsupported, match=r"over axes \['data'\].*make all axes man"
        ):
            jax.eval_shape(partly, *shapes)
    ampere = dataclasses.replace(H200, name="nvidia_a100", compute_capability=(8, 0))
    with use_device(ampere), pytest.raises(Unsupported, match=r"9\.x, got \(8, 0\)"):
        jax.eval_shape(split(name, make_mesh(2), implementation="mosaic_gpu"), *shapes)


def test_the_kernel_runs_where_it_is_expected_to_gain(tmp_path, monkeypatch, said):
    name = "all_gather_matmul"
    mesh = make_mesh(4)
    few = shape(512, 512), shape(512, 1024)
    many = shape(8192, 512), shape(512, 1024)
    monkeypatch.setenv("PALLAS_KERNELS_TUNED_DIR", str(tmp_path))

    def uses_kernel(shapes, **options):
        return CUSTOM_CALL in text_for_cuda(split(name, mesh, **options), *shapes)

    with use_device(H200):
        assert not uses_kernel(few)
        assert "512 rows are too few to gain" in said.records[-1].getMessage()
        assert uses_kernel(many)
        enough = shape(1024, 512), shape(512, 1024)
        assert uses_kernel(enough)
        assert CUSTOM_CALL in text_for_cuda(split(name, make_mesh(2)), *few)
        for size in (2, 4):  # the fewer devices, the less is there to hide
            reduced = split("matmul_all_reduce", make_mesh(size))
            text = text_for_cuda(reduced, shape(2048, 1024), shape(1024, 512))
            assert (CUSTOM_CALL in text) == (size == 4)
        assert uses_kernel(few, implementation="mosaic_gpu")
        assert uses_kernel(few, implementation=("mosaic_gpu", "xla_ring"))
        assert uses_kernel(few, config=SMALL)
        with tuned_configs.override("collective_matmul", SMALL):
            assert uses_kernel(few)
        entry = {
            "config": {"tile_n": 128},
            "time_us": 100.0,
            "xla_us": 90.0,
            "jax": "0.11.2",
            "date": "2026-11-21",
        }
        key = "all_gather tp=4 m={} n=256 k=512 bf16"
        rows = {
            key.format(8192): entry,
            key.format(512): entry | {"xla_us": 110.0},
        }
        table = tmp_path / "nvidia_h200.json"
        table.write_text(json.dumps({"collective_matmul": rows}))
        assert not uses_kernel(many)
        assert uses_kernel(few)
        # Features that are no multiples of 64 are copied.
        assert uses_kernel((shape(4096, 500), shape(500, 1024)))
        padded = shape(2048, 500), shape(500, 1024)
        assert not uses_kernel(padded)
        assert uses_kernel(padded, implementation="mosaic_gpu")


def test_vmap_makes_leading_axes_or_a_loop():
    mesh = make_mesh(4)
    f = split("all_gather_matmul", mesh, implementation="mosaic_gpu")
    x, w = shape(3, 2048, 512), shape(512, 1024)
    with use_device(H200):
        text = lower_for_cuda(jax.vmap(f, (0, None)), x, w, kernels=1)
        assert "stablehlo.while" not in text
        assert "tensor<3x512x512xbf16>" in text
        each = jax.vmap(f, (None, 0))
        text = lower_for_cuda(each, shape(2048, 512), shape(3, 512, 1024), kernels=1)
        assert "stablehlo.while" in text


def layers(options, wrap, x, up, down):
    """A stack of layers that uses all three ops."""

    def layer(x, weights):
        up, down = weights
        a, b = all_gather_matmul(x, [up, up], **options)
        scattered = matmul_reduce_scatter([a, b], [down, down], **options)
        reduced = matmul_all_reduce(a, down, **options)
        return scattered + reduced[: x.shape[0]], None

    return lax.scan(wrap(layer), x, (up, down))[0]


def stack(mesh, check_vma, wrap=lambda layer: layer, **options):
    return jax.shard_map(
        functools.partial(layers, OPTIONS | options, wrap),
        mesh=mesh,
        in_specs=(P("tensor"), P(None, None, "tensor"), P(None, "tensor")),
        out_specs=P("tensor"),
        check_vma=check_vma,
    )


@pytest.mark.parametrize(
    ("check_vma", "saved", "kernels"),
    [
        (True, ["all_gather_matmul_out"], 6),
        # Three forward; backward one for each of the first two ops, nothing again.
        *exhaustive((True, None, 5), (False, None, 5)),
    ],
)
def test_kernels_of_a_stack_with_gradients(check_vma, saved, kernels):
    def wrap(layer):
        if saved is None:
            return layer
        policy = jax.checkpoint_policies.save_only_these_names(*saved)
        return jax.checkpoint(layer, policy=policy)

    def loss(*arrays):
        f = stack(make_mesh(4), check_vma, wrap, implementation="mosaic_gpu")
        return jnp.sum(jnp.sin(f(*arrays)).astype(jnp.float32))

    step = jax.jit(jax.value_and_grad(loss, (0, 1, 2)), donate_argnums=(0, 1, 2))
    arrays = shape(2048, 512), shape(2, 512, 1024), shape(2, 1024, 512)
    with use_device(H200):
        text = lower_for_cuda(step, *arrays, kernels=kernels)
    gathered = "tensor<2x1x2048x512xbf16>"  # of both layers
    assert (gathered in text) == (saved is None)


def test_hidden_features_need_no_multiple_of_64_on_a_device():
    """Of 27,392 over 8 devices, 3,424 each: both products and their gradients."""

    def loss(x, up, down):
        product = all_gather_matmul
        hidden = product(x, up, axis_name="tensor", implementation="mosaic_gpu")
        product = matmul_reduce_scatter
        y = product(hidden, down, axis_name="tensor", implementation="mosaic_gpu")
        return lax.psum(jnp.sum(y.astype(jnp.float32) ** 2), "tensor")

    mapped = jax.shard_map(
        jax.grad(loss, (0, 1, 2)),
        in_specs=(P("tensor"), P(None, "tensor"), P("tensor")),
        out_specs=(P("tensor"), P(None, "tensor"), P("tensor")),
        check_vma=False,
    )
    arrays = shape(8192, 5120), shape(5120, 27392), shape(27392, 5120)
    with use_device(H200):
        text = lower_for_cuda(mapped, *arrays, mesh={"tensor": 8}, kernels=4)
    assert "tensor<8192x3424xbf16>" in text and "x3456xbf16>" in text


def test_rows_of_an_all_reduce_need_not_divide():
    f = split("matmul_all_reduce", make_mesh(4), implementation="mosaic_gpu")
    with use_device(H200):
        text = lower_for_cuda(f, shape(1030, 512), shape(512, 1024), kernels=1)
        assert jax.eval_shape(f, shape(1030, 512), shape(512, 1024)).shape[0] == 1030
    assert "1032" in text


@pytest.mark.slow
def test_values_and_gradients_through_interpreted_kernels():
    """Every product of a forward and a backward pass, those without peers too."""
    x, dy = (normal((256, 192), jnp.float32, i) for i in (1, 2))
    up = 0.05 * normal((1, 192, 384), jnp.float32, 3)
    down = 0.05 * normal((1, 384, 192), jnp.float32, 4)
    arrays = [a.astype(BF16) for a in (x, up, down)]

    def run(**options):
        # Without check_vma: the interpreter does not track which values vary.
        f = stack(make_mesh(2), False, **options)

        def both(arrays, dy):
            y, pullback = jax.vjp(f, *arrays)
            return y, pullback(dy)

        return jax.tree.map(np.asarray, jax.jit(both)(arrays, dy.astype(BF16)))

    want = run(implementation="xla")
    device = dataclasses.replace(H200, num_sms=2)
    with (
        use_device(device),
        tuned_configs.override("collective_matmul", SMALL),
        interpret_mosaic_gpu(detect_races=False, concurrent_blocks=True),
    ):
        got = run(implementation="mosaic_gpu")
    check(got, want, BF16)
