"""The product with a quantized weight: XLA's form, and the kernel interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.quantized_matmul import (
    QuantizedMatmulConfig,
    quantized_matmul,
    reference,
    tunable,
    widen,
)
from pallas_kernels.quantized_matmul.config import Problem, heuristic
from pallas_kernels.quantized_matmul.specs import SPECS
from tests.interpreter import interpret_mosaic_gpu, register_inline
from tests.lowering import lower_for_cuda
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
P = jax.sharding.PartitionSpec
TYPES = ["int8", "float8_e4m3fn"]


def words(values):
    """Each four numbers of eight bits as a thread reads them."""
    return np.ascontiguousarray(values).view(np.uint32)


def stored(even, odd, shape):
    """The pairs of each word, where the tensor cores take them for neighbors."""
    pairs = np.stack([even, odd], -1)  # [..,words,2]
    halves = np.stack([pairs & 0xFFFF, pairs >> 16], -1).astype(np.uint16)
    halves = halves.view(ml_dtypes.bfloat16)
    # [..,sixteen,thread,pair,number] -> [..,sixteen,pair,thread,number]
    halves = halves.reshape(*shape[:-1], -1, 4, 2, 2).swapaxes(-3, -2)
    return halves.reshape(shape).astype(np.float32)


def widen_int8(values):
    """What the instructions of a thread do, four numbers at a time."""
    even, odd = words(values), words(values) >> 8
    low, power = (
        stored(*(pair & mask | widen.HIGH for pair in (even, odd)), values.shape)
        for mask in (0x007F007F, 0x00800080)
    )
    return (low - power).astype(ml_dtypes.bfloat16)


def widen_e4m3(values):
    """The same."""
    found = stored(
        *(
            pair & 0x80008000 | (pair & 0x7F007F00) >> 4
            for pair in (words(values) << 8, words(values))
        ),
        values.shape,
    )
    rebias = np.uint16(widen.REBIAS & 0xFFFF).view(ml_dtypes.bfloat16)
    return (found * np.float32(rebias)).astype(ml_dtypes.bfloat16)


register_inline("widen_int8", widen_int8)
register_inline("widen_e4m3", widen_e4m3)


def operands(m, n, k, dtype, x_dtype=BF16):
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (m, k), x_dtype)
    w = jax.random.normal(keys[1], (n, k)) * 40
    w = jnp.clip(jnp.round(w), -127, 127) if dtype == "int8" else w
    return x, w.astype(dtype), jax.random.uniform(keys[2], (n,), minval=1e-3)


def interpreted(x, w, scale, config, num_sms=1, **options):
    with (
        use_device(dataclasses.replace(H200, num_sms=num_sms)),
        tuned_configs.override("quantized_matmul", config),
        interpret_mosaic_gpu(detect_races=True),
    ):
        return np.asarray(
            quantized_matmul(x, w, scale, implementation="mosaic_gpu", **options)
        )


@pytest.mark.parametrize(
    ("widened", "dtype"),
    [(widen_int8, np.int8), (widen_e4m3, ml_dtypes.float8_e4m3fn)],
)
def test_every_number_is_widened_exactly(widened, dtype):
    every = np.arange(256, dtype=np.uint8)
    every = every.view(dtype).reshape(2, 128)
    exact = widen.in_order_of_pairs(jnp.asarray(every.astype(ml_dtypes.bfloat16)))
    numbers = ~np.isnan(exact)
    assert numbers.sum() >= 254
    np.testing.assert_array_equal(widened(every)[numbers], exact[numbers])


SMALL = QuantizedMatmulConfig(warpgroups=1, tile_k=64, stages=2)
SHARED = {"tile_tokens": 32, "warpgroups": 4, "depth": 2}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("m", "n", "k", "config", "num_sms"),
    [
        # More steps than stages; tokens that are padded.
        (3, 64, 192, SMALL, 1),
        # Two warpgroups, one of which has nothing to store; parts of the sums.
        (8, 192, 320, dataclasses.replace(SMALL, warpgroups=2, splits=3), 2),
        # Features past the end within a group, tokens past the end, two tiles of each.
        (72, 136, 128, QuantizedMatmulConfig(tile_tokens=64, warpgroups=1), 1),
        # Warpgroups that share features, the last with no inputs in the last stage.
        (8, 136, 320, dataclasses.replace(SMALL, warpgroups=4, depth=4, splits=2), 3),
        # Two groups of two, and more items than blocks.
        (20, 200, 384, dataclasses.replace(SMALL, **SHARED), 1),
    ],
)
def test_interpreted_kernel_equals_the_reference(m, n, k, config, num_sms, dtype):
    x, w, scale = operands(m, n, k, dtype)
    y = interpreted(x, w, scale, config, num_sms)
    assert y.shape == (m, n) and y.dtype == BF16
    assert relative_error(y, reference.quantized_matmul(x, w, scale)) < RELATIVE[BF16]


def test_logits_are_not_rounded():
    x, w, scale = operands(2, 64, 64, "int8")
    y = interpreted(x, w, scale, SMALL, out_dtype=jnp.float32)
    want = reference.quantized_matmul(x, w, scale)
    assert y.dtype == jnp.float32
    assert relative_error(y, want) < 1e-6


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
def test_xla_equals_the_reference(dtype, x_dtype):
    x, w, scale = operands(6, 40, 24, dtype, x_dtype)
    x = x.reshape(2, 3, 24)
    y = quantized_matmul(x, w, scale)
    assert y.dtype == x_dtype
    want = reference.quantized_matmul(x, w, scale)
    assert relative_error(y, want) < RELATIVE[y.dtype]


def test_a_device_multiplies_its_rows_on_explicit_axes():
    mesh = jax.make_mesh((2,), ("t",), axis_types=(jax.sharding.AxisType.Explicit,))
    x, w, scale = operands(4, 32, 16, "int8", jnp.float32)
    want = reference.quantized_matmul(x, w, scale)
    with jax.set_mesh(mesh):
        w, scale = jax.device_put(w, P("t")), jax.device_put(scale, P("t"))
        y = jax.jit(quantized_matmul)(jax.device_put(x, P()), w, scale)
    assert y.sharding.spec == P(None, "t")
    assert relative_error(y, want) < RELATIVE[y.dtype]


def test_errors_say_what_to_do():
    x, w, scale = operands(4, 64, 64, "int8")
    with pytest.raises(ValueError, match="types int16 and float32, expected one of"):
        quantized_matmul(x, w.astype(jnp.int16), scale)
    with pytest.raises(ValueError, match=r"\(4, 64\), \(64, 32\) and \(64,\)"):
        quantized_matmul(x, w[:, :32], scale)
    with pytest.raises(Unsupported, match="Hopper"):
        quantized_matmul(x, w, scale, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="before it is quantized"):
        jax.grad(lambda x: quantized_matmul(x, w, scale).sum())(x)
    with use_device(H200), pytest.raises(Unsupported, match=r"k=40, .* multiple of 64"):
        quantized_matmul(x[:, :40], w[:, :40], scale, implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="registers a thread"):
        QuantizedMatmulConfig(tile_tokens=256)
    with pytest.raises(ValueError, match="tile_tokens 12"):
        QuantizedMatmulConfig(tile_tokens=12)
    with pytest.raises(ValueError, match="depth 3, expected a divisor of warpgroups 4"):
        QuantizedMatmulConfig(depth=3)


def test_candidates_of_the_tuner_lower():
    """Some of them: those that hold the most registers or shared memory."""
    for m in (2, 128, 2048):
        problem = tunable.problems()[f"m={m} n=4096 k=4096 int8 bf16"]
        found = tunable.candidates(problem, H200)
        assert len(found) > 8
        shapes = jax.eval_shape(lambda problem=problem: tunable.arguments(problem))
        most = [max(found, key=lambda c: c.tile_k * c.tile_n), found[-1]]
        for config in most:
            lower_for_cuda(tunable.kernel(problem, config, H200), *shapes, kernels=1)


def test_few_tiles_are_split_and_many_are_not():
    def splits(m, n, k):
        x, w = (jax.ShapeDtypeStruct(s, jnp.int8) for s in ((m, k), (n, k)))
        return heuristic(Problem.of(x, w, BF16), H200).splits

    assert splits(2, 4096, 4096) == splits(2, 28672, 4096) == 2
    assert splits(2, 4096, 14336) == 2 and splits(2, 6144, 4096) == 4
    assert splits(64, 4096, 14336) == 8
    assert splits(2, 128256, 4096) == splits(2048, 4096, 4096) == 1
    assert len({spec.name for spec in SPECS}) == len(SPECS)
