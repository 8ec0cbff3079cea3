"""Operands in 8 bits: portable and interpreted, bit for bit, and what is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.fp8_operands import (
    inverse_scale,
    power_of_two_scale,
    quantize_and_transpose,
    quantize_gated,
    quantize_gated_gradients,
    quantize_rms_norm,
    quantize_rows,
    quantize_squares,
    reference,
    transpose,
    transpose_blocks,
    transpose_rows,
)
from pallas_kernels.fp8_operands.specs import SPECS
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.pallas_kernels.fp8_operands import stand_ins  # noqa: F401


BF16, FP32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
TYPES = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
SMALL = dataclasses.replace(H200, num_sms=2)


def numbers(m, k, dtype=BF16, seed=0):
    """Normal numbers, rows and columns of many sizes, and an outlier."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(m, k))
    x *= 2.0 ** random.integers(-12, 12, (m, 1)) * 2.0 ** random.integers(-9, 9, k)
    x[m // 2, k // 3] = 2.0**90
    most = float(jnp.finfo(dtype).max)
    return jnp.asarray(np.clip(x, -most, most), dtype)


def assert_same(found, expected):
    """Equal in every bit, but for the kind of a NaN."""
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a[b == 0]), np.signbit(b[b == 0]))


def all_of(x, dtype, implementation, through=None):
    """What every function of the op makes of x.

    Each is compiled by itself: of one program XLA takes out the rounding to 8 bits
    where fp32 follows, and rounds other numbers then.
    """

    def run(f, *arrays, **options):
        options |= {"implementation": implementation}
        return jax.jit(functools.partial(f, **options))(*arrays)

    rows = run(quantize_rows, x, dtype=dtype, through=through)
    scale = power_of_two_scale(jnp.max(rows.largest), dtype)
    both = run(quantize_and_transpose, x, scale, dtype=dtype, through=through)
    turned = run(transpose_rows, *rows)
    return rows, turned, both, run(transpose, rows.data)


def interpreted(x, dtype, through=None):
    with use_device(SMALL), interpret_mosaic_gpu(detect_races=True) as ran:
        found = all_of(x, dtype, "mosaic_gpu", through)
        found = jax.tree.map(np.asarray, found)
    assert ran.kernels == 4
    assert not ran.races_found
    return found


def expected(x, dtype):
    data, scale, largest = reference.quantize_rows(x, dtype)
    column_scale, one = (reference.scale_of(x, dtype, axis) for axis in (0, None))
    turned = reference.requantize_transposed(data, scale, column_scale, dtype)
    whole = reference.requantize_transposed(x, jnp.ones(()), one, dtype)
    return (data, scale, largest), (turned, column_scale), (whole.T, whole), data.T


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_portable_is_the_definition(spec):
    x = numbers(64, spec.k, BF16, seed=spec.m)
    found = all_of(x, spec.dtype, "xla")
    assert_same(found, expected(x, spec.dtype))


@pytest.mark.parametrize(
    ("m", "k", "dtype", "x_dtype"),
    [
        (128, 256, E4M3, BF16),  # loads of 2 bytes
        (128, 1024, E5M2, BF16),
        (384, 384, E4M3, jnp.float16),  # more rows than blocks and rows of each
        (128, 4096, E5M2, BF16),
        (256, 512, E4M3, FP32),
    ],
)
def test_interpreted_kernels_are_the_portable_op_in_every_bit(m, k, dtype, x_dtype):
    x = numbers(m, k, x_dtype)
    through = BF16 if x_dtype == FP32 else None
    assert_same(interpreted(x, dtype, through), all_of(x, dtype, "xla", through))


@pytest.mark.parametrize(
    ("rows", "device"),
    [
        (129, SMALL),  # each block takes 16 rows at a time
        (5, dataclasses.replace(H200, num_sms=4)),  # two
    ],
)
def test_rows_of_any_number(rows, device):
    x = numbers(rows, 1024)
    with use_device(device), interpret_mosaic_gpu(detect_races=True):
        found, alone = (
            quantize_rows(x, E4M3, columns=columns, implementation="mosaic_gpu")
            for columns in (True, False)
        )
        found, alone = jax.tree.map(np.asarray, (found, alone))
    assert_same(found, quantize_rows(x, E4M3, implementation="xla"))
    assert_same(alone[:2], found[:2])
    assert alone.largest is None


def computed(arrays, implementation):
    """What is rounded in the pass that computes it: norms, a gate and its gradients.

    With tokens of many sizes, as in `numbers`, but no features that a gate would close.
    """
    options = {"implementation": implementation}
    gated = {"activation": "silu", **options}

    @jax.jit
    def run(x, up, g, weight, short):
        return (
            quantize_rms_norm(x, weight, E4M3, eps=0.5, **options),
            quantize_rms_norm(x, short, E4M3, eps=0.5, **options),
            quantize_gated(x, up, E4M3, **gated),
            quantize_gated(jnp.concatenate([up, x], 1), None, E4M3, **gated),
            *quantize_gated_gradients(x, up, g, E5M2, **gated),
        )

    # Rounded out here: XLA would leave out a rounding that is undone at once.
    short = arrays[-1].astype(arrays[0].dtype)
    return jax.tree.map(np.asarray, run(*arrays, short))


def tokens(m, k, seed=0):
    random = np.random.default_rng(seed)
    normal = (random.normal(size=(m, k)) for _ in range(3))
    x, up, g = (jnp.asarray(a * 2.0 ** random.integers(-3, 3, (m, 1))) for a in normal)
    arrays = (a.astype(BF16) for a in (x, up, g))
    return *arrays, jnp.asarray(random.normal(size=k), FP32)


def assert_nearly_same(found, expected):
    """Equal but for a few numbers that are rounded to a neighbor."""
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        a, b = (np.asarray(x).astype(np.float32) for x in (a, b))
        assert np.mean(a != b) < 0.01
        np.testing.assert_allclose(a, b, rtol=0.26, atol=2.0**-7)


def test_what_is_rounded_as_it_is_computed_is_what_the_definition_gives():
    x, up, g, weight = tokens(64, 384)
    norm, short, hidden, joined, *both = computed((x, up, g, weight), "xla")
    exact = (
        reference.rms_norm(x, weight, 0.5),
        reference.rms_norm(x, weight.astype(BF16).astype(FP32), 0.5),
        reference.swiglu(x, up),
        reference.swiglu(up, x),
    )
    for found, wide in zip((norm, short, hidden, joined), exact, strict=True):
        assert_nearly_same(
            tuple(found), reference.quantize_rows(wide.astype(BF16), E4M3)
        )
    wide = [a.astype(BF16) for a in reference.swiglu_gradients(x, up, g)]
    joined = jnp.concatenate(wide, 1)  # which share the scale of a row
    data, scale, largest = reference.quantize_rows(joined, E5M2)
    for i, found in enumerate(both):
        part = slice(384 * i, 384 * (i + 1))
        assert_nearly_same(tuple(found), (data[:, part], scale, largest[part]))


@pytest.mark.parametrize(
    ("m", "k"),
    [
        (20, 512),
        (37, 2432),  # parts of 16 and of 3 lines, and groups of rows that overlap
        (8, 4096),  # two parts of a row
    ],
)
def test_interpreted_kernels_round_what_they_compute(m, k):
    arrays = tokens(m, k)
    with use_device(SMALL), interpret_mosaic_gpu(detect_races=True) as ran:
        found = computed(arrays, "mosaic_gpu")
    assert ran.kernels == 5 and not ran.races_found
    assert_nearly_same(found, computed(arrays, "xla"))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_what_is_not_finite_stays_in_its_row_as_it_is_computed(implementation):
    x, up, g, weight = tokens(16, 256)
    g, x = g.at[3, 5].set(jnp.nan), x.at[6, 7].set(jnp.inf)
    with use_device(SMALL), interpret_mosaic_gpu():
        *four, _, _ = both = computed((x, up, g, weight), implementation)
    for found, bad in (
        *((each, [6]) for each in four),
        *((each, [3, 6]) for each in both[4:]),
    ):
        rows = np.isnan(found.data.astype(np.float32)).all(1)
        assert np.flatnonzero(rows).tolist() == bad
        assert np.flatnonzero(np.isnan(found.scale)).tolist() == bad


def by_blocks(arrays, implementation):
    """What every function of the op makes of blocks."""
    x, up, g, weight = arrays
    options = {"implementation": implementation}
    gated = {"activation": "silu", "blocks": True, **options}
    rows = quantize_rows(x, E4M3, blocks=True, **options)
    found = (
        rows,
        transpose_blocks(rows.data, rows.scale, **options),
        quantize_squares(x, E4M3, **options),
        quantize_rms_norm(x, weight, E4M3, eps=0.5, blocks=True, **options),
        quantize_gated(x, up, E4M3, **gated),
        *quantize_gated_gradients(x, up, g, E5M2, **gated),
    )
    return jax.tree.map(np.asarray, found)


def blocks_of(x, dtype, rows, columns):
    """The definition: each block by itself."""
    data, scale = (
        np.zeros(x.shape, dtype),
        np.zeros((-(-x.shape[0] // rows), -(-x.shape[1] // columns)), np.float32),
    )
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            part = (
                slice(i * rows, (i + 1) * rows),
                slice(j * columns, (j + 1) * columns),
            )
            scale[i, j] = reference.scale_of(x[part], dtype)
            data[part] = (x[part].astype(jnp.float32) / scale[i, j]).astype(dtype)
    return data, scale


def test_blocks_are_those_of_the_definition():
    """In whole blocks and in parts of some."""
    x, up, g, weight = tokens(130, 200)
    rows, turned, squares, norm, hidden, *both = by_blocks((x, up, g, weight), "xla")
    data, scale = blocks_of(x, E4M3, 1, 128)
    assert_same(rows, (data, scale, None))
    back = jnp.asarray(data.astype(np.float32) * scale.repeat(128, 1)[:, :200])
    assert_same(turned, blocks_of(back.T, E4M3, 1, 128))
    data, scale = blocks_of(x, E4M3, 128, 128)
    assert_same(squares, (data, data.T, scale))
    exact = [reference.rms_norm(x, weight, 0.5), reference.swiglu(x, up)]
    exact += reference.swiglu_gradients(x, up, g)
    for found, wide in zip((norm, hidden, *both), exact, strict=True):
        data, scale = blocks_of(wide.astype(BF16), found.data.dtype, 1, 128)
        assert_nearly_same(tuple(found), (data, scale, None))


@pytest.mark.parametrize(("m", "k"), [(128, 1024), (256, 512)])  # 8 numbers a lane, 4
def test_interpreted_kernels_round_blocks(m, k):
    arrays = tokens(m, k)
    arrays = (arrays[0].at[3, 5].set(jnp.nan).at[7].set(0), *arrays[1:])
    with use_device(SMALL), interpret_mosaic_gpu(detect_races=True) as ran:
        found = by_blocks(arrays, "mosaic_gpu")
    assert ran.kernels == 6 and not ran.races_found
    expected = by_blocks(arrays, "xla")
    assert np.isnan(expected[0].data[3].astype(np.float32)).sum() == 128
    assert_same(found[:3], expected[:3])
    assert_nearly_same(found[3:], expected[3:])


@TYPES
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_zeros_and_what_is_not_finite(dtype, implementation):
    x = np.array(numbers(128, 256, FP32))
    x[x == 2.0**90] = 1
    x[3], x[:, 7] = 0, 0
    x[10, 20], x[11, 21], x[12, 22] = np.nan, np.inf, -np.inf
    bad_rows, bad_columns = [10, 11, 12], [20, 21, 22]
    good = np.setdiff1d(np.arange(128), bad_rows)
    x = jnp.asarray(x, BF16)
    run = interpreted if implementation == "mosaic_gpu" else all_of
    more = () if implementation == "mosaic_gpu" else ("xla",)
    rows, (turned, column_scale), both, _ = run(x, dtype, *more)
    assert rows.scale[3] == 1 and not np.any(np.asarray(rows.data[3], np.float32))
    assert column_scale[7] == 1 and rows.largest[7] == 0
    assert np.isnan(rows.scale[np.array(bad_rows)]).all()
    assert np.isfinite(rows.scale[good]).all()
    assert np.isnan(np.asarray(rows.data, np.float32)[bad_rows]).all()
    assert np.isfinite(np.asarray(rows.data, np.float32)[good]).all()
    assert np.isnan(column_scale[np.array(bad_columns)]).all()
    assert np.isnan(np.asarray(turned, np.float32)[:, bad_rows]).all()
    assert np.isnan(np.asarray(both[0], np.float32)).all()  # one scale, which is NaN
    again = map(jnp.asarray, rows)
    assert_same(turned, transpose_rows(*again, implementation="xla")[0])
    zeros = run(jnp.zeros((128, 256), BF16), dtype, *more)
    for leaf in jax.tree.leaves(zeros):
        assert set(np.unique(np.asarray(leaf, np.float32))) <= {0, 1}


@TYPES
def test_what_is_cut_off_and_what_vanishes(dtype):
    most, least = float(jnp.finfo(dtype).max), float(jnp.finfo(dtype).tiny)
    x = jnp.asarray([[most, -most, least, least / 64, 1.0]], FP32)
    data, scale, _ = quantize_rows(x, dtype, implementation="xla")
    assert scale[0] == 1
    assert np.asarray(data, np.float32).tolist()[0] == [most, -most, least, 0, 1]
    # By scales of columns nothing of it would have been lost, but rows come first.
    turned, column_scale = transpose_rows(data, scale, jnp.abs(x[0]))
    back = np.asarray(turned, np.float32)[:, 0] * column_scale
    np.testing.assert_array_equal(back, np.asarray(data, np.float32)[0])


@TYPES
def test_scales_against_wide_arithmetic(dtype):
    random = np.random.default_rng(0)
    x = (2.0 ** random.uniform(-126, 127.9, 4096)).astype(np.float32)
    most = float(jnp.finfo(dtype).max)
    x = np.concatenate([x, most * 2.0 ** np.arange(-100, 100, 7.0)]).astype(np.float32)
    x = np.concatenate([x, np.nextafter(x[-29:], np.float32(np.inf))])
    exact = np.log2(x.astype(np.float64) / most)
    wanted = 2.0 ** np.maximum(np.ceil(exact), -126)
    scale = power_of_two_scale(jnp.asarray(x), dtype)
    np.testing.assert_array_equal(scale, wanted)
    np.testing.assert_array_equal(inverse_scale(scale), 1 / wanted)
    np.testing.assert_array_equal(
        reference.scale_of(jnp.asarray(x[:, None]), dtype, 1), wanted
    )


@TYPES
def test_what_was_rounded_above_the_largest_of_its_column(dtype):
    """Below the normal numbers of its row, where the next one may be twice as large."""
    least = float(jnp.finfo(dtype).smallest_subnormal)
    most = float(jnp.finfo(dtype).max)
    x = np.zeros((128, 256), np.float32)
    x[:, 0], x[:, 1], x[:, 2] = most, 1.625 * least, -0.75 * least
    x = jnp.asarray(x, BF16)
    (data, scale, largest), (turned, column_scale), *_ = interpreted(x, dtype)
    assert (np.asarray(data, np.float32)[:, 1] * scale > largest[1]).all()
    back = np.asarray(turned, np.float32)[1:3] * column_scale[1:3, None]
    assert (np.abs(turned.astype(np.float32)) <= most).all()
    assert (np.abs(back) <= 2 * largest[1:3, None]).all()
    again = map(jnp.asarray, (data, scale, largest))
    assert_same(turned, transpose_rows(*again, implementation="xla")[0])


def test_rows_and_columns_of_very_different_sizes():
    """A product of two factors first would overflow, and make NaN of zeros."""
    x = np.zeros((128, 256), np.float32)
    x[0, 0], x[1, 1] = 2.0**100, 2.0**-110
    _rows, (turned, scale), *_ = interpreted(jnp.asarray(x, BF16), E4M3)
    found = np.asarray(turned, np.float64).T * np.asarray(scale, np.float64)
    np.testing.assert_array_equal(found, x)


def test_many_devices_inside_a_checked_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, columns = jax.P("data"), jax.P(None, "data")

    def local(x):
        data, scale, largest = quantize_rows(x, E4M3, implementation="mosaic_gpu")
        turned, _ = transpose_rows(data, scale, largest, implementation="mosaic_gpu")
        return data, turned

    f = jax.shard_map(local, mesh=mesh, in_specs=rows, out_specs=(rows, columns))
    with use_device(H200):
        data, turned = jax.eval_shape(f, numbers(256, 256))
    assert data.shape == turned.shape == (256, 256)


def test_what_the_kernels_cannot_do_goes_to_xla():
    with use_device(H200):
        for m, k, dtype in (
            (0, 256, BF16),
            (8, 128, BF16),
            (8, 320, BF16),
            (2, 16_512, BF16),
            (8, 256, FP32),
        ):
            x = jnp.ones((m, k), dtype)
            with pytest.raises(Unsupported, match="use implementation='xla'"):
                quantize_rows(x, E4M3, implementation="mosaic_gpu")
            assert quantize_rows(x, E4M3).data.shape == (m, k)
        q = quantize_rows(jnp.ones((64, 256), BF16), E4M3, implementation="xla")
        for f in (
            functools.partial(transpose_rows, *q),
            functools.partial(transpose, q.data),
            functools.partial(
                quantize_and_transpose, jnp.ones((64, 256)), q.scale[0], E4M3
            ),
        ):
            with pytest.raises(Unsupported, match=r"shape \(64, 256\)"):
                f(implementation="mosaic_gpu")
            assert f()[0].shape
        wide = jnp.ones((8, 8320), BF16)
        with pytest.raises(Unsupported, match="activation 'gelu', the kernel takes"):
            quantize_gated_gradients(
                wide, wide, wide, E5M2, activation="gelu", implementation="mosaic_gpu"
            )
        with pytest.raises(Unsupported, match="the kernel takes at most 8192"):
            quantize_rms_norm(
                wide, wide[0].astype(FP32), E4M3, eps=0.0, implementation="mosaic_gpu"
            )
    with pytest.raises(Unsupported, match="Hopper"):
        transpose(q.data, implementation="mosaic_gpu")


def test_mistakes(no_shape_hook):
    x = jnp.ones((4, 8))
    q = quantize_rows(x, E4M3)
    with pytest.raises(ValueError, match=r"shape \(8,\), expected a matrix"):
        quantize_rows(x[0], E4M3)
    with pytest.raises(ValueError, match="x has type int32"):
        quantize_rows(x.astype(jnp.int32), E4M3)
    with pytest.raises(ValueError, match="dtype has type bfloat16"):
        quantize_rows(x, BF16)
    with pytest.raises(
        ValueError, match=r"weight has .* shape \(4,\), expected float32"
    ):
        quantize_rms_norm(x, x[:, 0], E4M3, eps=0.0)
    with pytest.raises(ValueError, match=r"operands are float32 \(4, 8\), bfloat16"):
        quantize_gated(x, x.astype(BF16), E4M3, activation="silu")
    with pytest.raises(ValueError, match="expected an even number of columns"):
        quantize_gated(x[:, 1:], None, E4M3, activation="silu")
    with pytest.raises(ValueError, match="activation 'swish', expected"):
        quantize_gated_gradients(x, x, x, E5M2, activation="swish")
    with pytest.raises(ValueError, match=r"shapes \[\(8,\), \(4,\)\]"):
        transpose_rows(q.data, q.largest, q.scale)
    with pytest.raises(ValueError, match="data has type float32"):
        transpose(x)
    with pytest.raises(ValueError, match=r"shape \(4,\), expected one float32"):
        quantize_and_transpose(x, q.scale, E4M3)


def test_nothing_is_differentiated():
    for f in (
        lambda x: quantize_rows(x, E4M3).largest.sum(),
        lambda x: (
            quantize_and_transpose(x, jnp.float32(1), E4M3)[0].astype(jnp.float32).sum()
        ),
    ):
        with pytest.raises(NotImplementedError, match="has no derivatives"):
            jax.grad(f)(jnp.ones((4, 8)))
