"""Linear layers with bias and activation: portable, interpreted and lowered."""

import dataclasses
import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul import MatmulConfig, dense, gelu
from pallas_kernels.matmul.activations import ACTIVATIONS, KERNEL_ACTIVATIONS
from pallas_kernels.matmul.mosaic_gpu_dense import dense as kernel
from pallas_kernels.matmul.mosaic_gpu_dense import dense_config
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
ONE = dataclasses.replace(H200, num_sms=1)
SMALL = MatmulConfig(tile_m=128, tile_n=64, stages=2, store_slots=1)
WIDE = MatmulConfig(tile_m=128, tile_n=128, stages=2, store_slots=2)
PLAIN = {
    None: lambda y: y,
    "relu": lambda y: np.maximum(y, 0),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "silu": lambda y: y * (0.5 + 0.5 * np.tanh(0.5 * np.float64(y))),
}


def operands(m, widths, k, dtype=BF16):
    keys = iter(jax.random.split(jax.random.key(0), 2 * len(widths) + 1))
    x = jax.random.normal(next(keys), (m, k), dtype)
    ws = [
        jax.random.normal(next(keys), (k, n), dtype) * jnp.asarray(k**-0.5, dtype)
        for n in widths
    ]
    return x, ws, [jax.random.normal(next(keys), (n,), dtype) for n in widths]


def expected(x, ws, biases, activation):
    """By the definition, in fp32."""
    x, ws, biases = jax.tree.map(lambda a: a.astype(jnp.float32), (x, ws, biases))
    products = (
        jnp.einsum("...k,kn->...n", x, w, precision="highest") + bias
        for w, bias in zip(ws, biases, strict=True)
    )
    return [PLAIN[activation](y) for y in products]


def assert_close(actual, wanted):
    assert len(actual) == len(wanted)
    for y, want in zip(actual, wanted, strict=True):
        assert relative_error(y, want) < RELATIVE[BF16]


@pytest.mark.parametrize(
    ("num_sms", "m", "widths", "k", "activation", "config"),
    [
        (1, 256, (64,), 320, "gelu", SMALL),  # kept from tile to tile
        (2, 264, (128, 128), 192, None, WIDE),  # rows past the end of a tile
        (1, 256, (128, 256), 64, "gelu_tanh", WIDE),  # pieces left after one stage
        (1, 128, (64, 128), 128, "relu", SMALL),
        (1, 128, (192,), 192, "gelu", dense_config(128, [192], ONE)),
        (1, 128, (64,), 128, "silu", SMALL),
    ],
)
def test_interpreted_kernel(num_sms, m, widths, k, activation, config):
    x, ws, biases = operands(m, widths, k)
    device = dataclasses.replace(H200, num_sms=num_sms)
    with interpret_mosaic_gpu(detect_races=True):
        ys = kernel(x, ws, biases, activation=activation, config=config, device=device)
        ys = [np.asarray(y) for y in ys]
    assert [y.shape for y in ys] == [(m, n) for n in widths]
    assert_close(ys, expected(x, ws, biases, activation))


def test_kernel_of_a_batch_of_layers():
    x, ws, biases = operands(128, (64,), 64)
    batch = jax.tree.map(lambda a: jnp.stack([a, -2 * a]), (x, ws, biases))
    run = functools.partial(dense, activation="gelu", implementation="mosaic_gpu")
    with use_device(ONE), interpret_mosaic_gpu():
        ys = jax.tree.map(np.asarray, jax.vmap(run)(*batch))
    for i in range(2):
        x, ws, biases = jax.tree.map(lambda a, i=i: a[i], batch)
        assert_close([y[i] for y in ys], expected(x, ws, biases, "gelu"))


def test_gradients_of_the_kernel():
    x, ws, biases = operands(128, (64, 64), 64)
    dys = [jax.random.normal(jax.random.key(i), (128, 64)) for i in (3, 4)]

    def loss(arguments, implementation):
        x, ws, biases = arguments
        ys = dense(x, ws, biases, activation="gelu", implementation=implementation)
        return sum(
            jnp.vdot(y.astype(jnp.float32), d) for y, d in zip(ys, dys, strict=True)
        )

    def wanted(arguments):
        x, ws, biases = arguments
        ys = expected(x, ws, biases, "gelu")
        return sum(jnp.vdot(y, d) for y, d in zip(ys, dys, strict=True))

    want = jax.grad(wanted)((x, ws, biases))
    with use_device(ONE), interpret_mosaic_gpu():
        found = jax.grad(loss)((x, ws, biases), "mosaic_gpu")
        found = jax.tree.map(np.asarray, found)
    portable = jax.grad(loss)((x, ws, biases), "xla")
    for actual in (found, portable):
        for g, w in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
            assert relative_error(g, w) < 2 * RELATIVE[BF16]


@pytest.mark.parametrize("activation", list(PLAIN))
def test_portable_layers(activation):
    x, ws, biases = operands(6, (5, 7), 4, jnp.float32)
    ys = dense(x.reshape(2, 3, 4), ws, biases, activation=activation)
    assert [y.shape for y in ys] == [(2, 3, 5), (2, 3, 7)]
    flat = [y.reshape(6, -1) for y in ys]
    assert_close(flat, expected(x, ws, biases, activation))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_kernels(name):
    x = jnp.concatenate([jnp.linspace(-9, 9, 30_001), jnp.array([-1e30, 1e30])])
    found, want = KERNEL_ACTIVATIONS[name](x), PLAIN[name](x)
    # Less than half of what rounding to bfloat16 does at 1, and where the gate closes.
    near = jnp.abs(x) < 4
    assert float(jnp.max(jnp.abs(found - want), where=near, initial=0)) < 2e-5
    bound = jnp.maximum(1e-4, 5e-5 * jnp.abs(x))
    assert bool(jnp.all(jnp.abs(found - want) < bound))
    if name != "silu":  # which is NaN in XLA too
        assert float(KERNEL_ACTIVATIONS[name](jnp.float32(-jnp.inf))) <= 0
    assert bool(jnp.isnan(KERNEL_ACTIVATIONS[name](jnp.float32(jnp.nan))))
    assert ACTIVATIONS["gelu"] is gelu


@pytest.mark.parametrize(
    ("m", "columns"),
    [(128, 64), (256, 64), (688, 128), (1088, 192), (2688, 192), (9984, 192)],
)
def test_few_tiles_are_cut_while_all_run_at_once(m, columns):
    assert dense_config(m, [768] * 3, H200).tile_n == columns


@pytest.mark.parametrize(("m", "by"), [(120, "xla"), (128, "mosaic_gpu")])
def test_small_products_go_to_xla(m, by, monkeypatch):
    module, taken = sys.modules["pallas_kernels.matmul.dense"], []
    for name in ("xla", "mosaic_gpu"):

        def take(x, *_, name=name, **__):
            taken.append(name)
            return (x,)

        monkeypatch.setattr(module, f"_{name}", take)
    with use_device(H200):
        dense(*operands(m, (3072,), 768))
    assert taken == [by]


def test_what_the_kernel_cannot_do_goes_to_xla():
    run = functools.partial(dense, activation="gelu")
    with use_device(H200):
        for args in (
            operands(128, (64,), 64, jnp.float32),
            operands(12, (64,), 64),
            operands(128, (96,), 64),
            operands(8, (64 * 257,), 64),  # the bias in more lines than one copy moves
        ):
            with pytest.raises(Unsupported):
                run(*args, implementation="mosaic_gpu")
            ys = run(*args, implementation=("mosaic_gpu", "xla"))
            assert_close(ys, expected(*args, "gelu"))
        nothing = operands(0, (64,), 64)
        with pytest.raises(Unsupported, match="empty product"):
            run(*nothing, implementation="mosaic_gpu")
        (y,) = run(*nothing, implementation=("mosaic_gpu", "xla"))
        assert y.shape == (0, 64)
    with pytest.raises(Unsupported, match="dense"):
        run(*operands(128, (64,), 64), implementation="mosaic_gpu")


def test_mistakes():
    x, ws, biases = operands(8, (4, 4), 4)
    with pytest.raises(ValueError, match="activation 'tanh'"):
        dense(x, ws, biases, activation="tanh")
    with pytest.raises(ValueError, match="2 weights and 1 biases"):
        dense(x, ws, biases[:1])
    with pytest.raises(ValueError, match=r"expected \[\*B, M, K\], \[K, N\] and \[N\]"):
        dense(x, ws, [b[:3] for b in biases])
    with pytest.raises(ValueError, match="expected one type"):
        dense(x, ws, [b.astype(jnp.float32) for b in biases])


def stacks(x, ws, biases):
    """Three layers, of which the others would spoil the result."""
    spoil = lambda a: jnp.stack([jnp.full_like(a, jnp.nan), a, 1 + a])  # noqa: E731
    return x, *jax.tree.map(spoil, (ws, biases))


@pytest.mark.parametrize("number", [1, 2])
def test_interpreted_kernel_reads_a_layer_in_place(number):
    x, ws, biases = operands(128, (128, 128), 192)
    many = stacks(x, ws, biases)
    with interpret_mosaic_gpu(detect_races=True):
        run = functools.partial(kernel, activation="gelu", config=WIDE, device=ONE)
        ys = [np.asarray(y) for y in run(*many, jnp.int32(number))]
    one = jax.tree.map(lambda a: a[number], many[1:])
    assert_close(ys, expected(x, *one, "gelu"))


def test_a_layer_of_stacks_is_read_by_all():
    x, ws, biases = operands(128, (64, 64), 64)
    want = expected(x, ws, biases, "gelu")
    run = functools.partial(dense, layer=jnp.int32(1), activation="gelu")
    assert_close(run(*stacks(x, ws, biases)), want)
    with use_device(ONE), interpret_mosaic_gpu():
        ys = run(*stacks(x, ws, biases), implementation="mosaic_gpu")
        assert_close([np.asarray(y) for y in ys], want)
    with pytest.raises(ValueError, match=r"\[L, K, N\]"):
        run(x, ws, biases)
    with pytest.raises(ValueError, match="one int32"):
        dense(*stacks(x, ws, biases), layer=jnp.int8(1))
