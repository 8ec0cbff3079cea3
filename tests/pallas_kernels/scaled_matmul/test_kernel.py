"""The Hopper kernel of scaled 8-bit operands: interpreted, lowered, and chosen."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.scaled_matmul import (
    ScaledMatmulConfig,
    quantize_fp8,
    reference,
    scaled_matmul,
    tunable,
)
from pallas_kernels.scaled_matmul.specs import SPECS
from tests.interpreter import interpret_mosaic_gpu, operations
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.scaled_matmul.test_scaled_matmul import (
    E4M3,
    E5M2,
    block_operands,
    operands,
)
from tests.tolerances import RELATIVE, relative_error


SMALL = ScaledMatmulConfig(tile_n=64, stages=2, store_slots=1)
WIDE = ScaledMatmulConfig(tile_n=256, stages=2, store_slots=1)  # two promotions a stage
SQUARE = ScaledMatmulConfig(tile_n=128, stages=2, store_slots=1)
FLAT = ScaledMatmulConfig(tile_m=64, tile_n=128, split="n", stages=3, store_slots=1)


def interpreted(arrays, config, num_sms=1, **options):
    with (
        use_device(dataclasses.replace(H200, num_sms=num_sms)),
        tuned_configs.override("scaled_matmul", config),
        interpret_mosaic_gpu(detect_races=True),
    ):
        # Without a name: a config asks for the kernel.
        return np.asarray(scaled_matmul(*arrays, **options))


@pytest.mark.parametrize(
    ("m", "n", "k", "config", "num_sms", "types", "axes"),
    [
        # Rows past the end of a tile, which are padded; tiles follow each other.
        (131, 128, 384, SMALL, 1, (E4M3, E4M3), (-1, -1)),
        # Columns past the end within a tile; the two halves are promoted in turn.
        (128, 320, 256, WIDE, 1, (E4M3, E5M2), (None, -1)),
        (64, 192, 384, FLAT, 1, (E5M2, E4M3), (-1, None)),
        (
            *(256, 128, 256, dataclasses.replace(SMALL, cluster="m"), 2),
            *((E5M2, E5M2), (None, None)),
        ),
        (
            *(64, 384, 128, dataclasses.replace(FLAT, cluster="n"), 2),
            *((E4M3, E4M3), (-1, -1)),
        ),
    ],
)
def test_interpreted_kernel_equals_the_reference(m, n, k, config, num_sms, types, axes):
    arrays = operands(m, n, k, types, axes)
    y = interpreted(arrays, config, num_sms)
    assert y.shape == (m, n) and y.dtype == jnp.bfloat16
    want = reference.scaled_matmul(*arrays)
    assert relative_error(y, want) < RELATIVE[y.dtype]
    # Each row by itself: their sizes differ.
    error = np.abs(y.astype(np.float32) - want).max(axis=1)
    assert np.all(error < 1e-2 * np.abs(want).max(axis=1))


@pytest.mark.parametrize(
    ("m", "n", "k", "config", "num_sms", "square"),
    [
        (131, 192, 384, SMALL, 1, True),
        (64, 320, 128, SQUARE, 1, False),
        (64, 320, 256, SQUARE, 1, True),
        (64, 256, 384, FLAT, 1, False),
        (64, 256, 128, FLAT, 1, True),  # two consumers have one square
        (256, 128, 256, dataclasses.replace(SMALL, cluster="m"), 2, False),
    ],
)
def test_scales_of_blocks(m, n, k, config, num_sms, square):
    arrays = block_operands(m, n, k, (E5M2, E4M3), square=square)
    y = interpreted(arrays, config, num_sms)
    assert relative_error(y, reference.scaled_matmul(*arrays)) < RELATIVE[y.dtype]


def test_sums_of_tensor_cores_are_promoted(monkeypatch):
    """Interpreted with tensor cores that keep 14 bits, as those of Hopper do."""

    def accumulate(sums, products):
        mantissa, exponent = np.frexp(sums + products)
        return np.ldexp(np.trunc(mantissa * 2**14) / 2**14, exponent).astype(sums.dtype)

    monkeypatch.setattr(operations, "accumulate", accumulate)
    a, b = (jax.random.uniform(jax.random.key(i), (64, 1024)) for i in (0, 1))
    (a, a_scale), (b, b_scale) = (quantize_fp8(x) for x in (a, b))
    y = interpreted((a, b, a_scale, b_scale), SMALL, out_dtype=jnp.float32)
    want = np.asarray(reference.scaled_matmul(a, b, a_scale, b_scale))
    sums = np.zeros_like(y)
    for k in range(0, 1024, 128):
        parts = (np.asarray(x[:, k : k + 128], np.float32) for x in (a, b))
        sums = accumulate(sums, np.matmul(next(parts), next(parts).T))
    in_one_go = sums * np.asarray(a_scale * b_scale)
    assert 1e-5 < relative_error(y, want) < 2**-13 < relative_error(in_one_go, want)


def test_a_row_of_nan_stays_in_its_row():
    a, b, a_scale, b_scale = operands(72, 64, 128)
    a = a.at[3, 7].set(jnp.nan)
    y = interpreted((a, b, a_scale, b_scale), SMALL)
    want = reference.scaled_matmul(a, b, a_scale, b_scale)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(want))
    assert np.isnan(y).any(axis=1).tolist() == [i == 3 for i in range(72)]


def test_a_column_of_nan_stays_in_its_half_of_a_wide_tile():
    """The sums of the second half begin in the registers of those of the first."""
    a, b, a_scale, b_scale = operands(64, 256, 256)
    b = b.at[5, 7].set(jnp.nan)
    y = interpreted((a, b, a_scale, b_scale), WIDE)
    assert np.isnan(y).any(axis=0).tolist() == [i == 5 for i in range(256)]
    want = np.asarray(reference.scaled_matmul(a, b, a_scale, b_scale))
    assert relative_error(y[:, 128:], want[:, 128:]) < RELATIVE[y.dtype]


def test_candidates_of_the_tuner_lower():
    """Those with the most shared memory and the widest part."""
    problems = list(tunable.problems().values())
    for problem in (problems[0], problems[-2]):
        found = tunable.candidates(problem, H200)
        assert len(found) >= 3
        shapes = jax.eval_shape(lambda problem=problem: tunable.arguments(problem))
        config = max(found, key=lambda c: c.stages * (c.tile_m + c.tile_n))
        lower_for_cuda(tunable.kernel(problem, config, H200), *shapes, kernels=1)


def test_scales_of_blocks_have_configs_of_their_own():
    problem = next(iter(tunable.problems().values()))
    blocks = dataclasses.replace(problem, blocks=True)
    assert blocks.key == problem.key + " blocks"
    assert blocks.cut(H200).scales_blocks and not problem.cut(H200).scales_blocks
    assert all(config.scales_blocks for config in tunable.candidates(blocks, H200))


def test_specs_have_names_of_their_own():
    assert len({spec.name for spec in SPECS}) == len(SPECS)


def test_the_kernel_is_chosen_where_it_keeps_the_gpu_busy_or_was_faster(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("PALLAS_KERNELS_TUNED_DIR", str(tmp_path))

    def lower(n=256):
        shapes = [
            jax.ShapeDtypeStruct((n, 256), E4M3),
            jax.ShapeDtypeStruct((n, 256), E5M2),
            *[jax.ShapeDtypeStruct((), jnp.float32)] * 2,
        ]
        with use_device(H200):
            lower_for_cuda(functools.partial(scaled_matmul), *shapes, kernels=1)

    lower(4096)
    with pytest.raises(AssertionError, match="found 0"):
        lower()
    key = "m=256 n=256 k=256 e4m3 rhs=e5m2 out=bf16 rhs_transposed"
    entry = tuned_configs.TunedEntry(
        config=dataclasses.asdict(SMALL),
        time_us=10.0,
        xla_us=11.0,
        jax=jax.__version__,
        date="2026-11-24",
    )
    path = tuned_configs.table_path(H200)
    tuned_configs.save_table(path, "scaled_matmul", {key: entry})
    lower()


def test_what_the_kernel_cannot_do_says_so():
    a, b, a_scale, b_scale = operands(8, 64, 128)
    run = functools.partial(scaled_matmul, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match="Hopper"):
        run(a, b, a_scale, b_scale)
    with use_device(H200):
        with pytest.raises(Unsupported, match=r"k=64, .* multiple of 128"):
            run(a[:, :64], b[:, :64], a_scale, b_scale)
        with pytest.raises(Unsupported, match=r"n=40, .* multiple of 64"):
            run(a, b[:40], a_scale, b_scale)
        with pytest.raises(Unsupported, match="empty product"):
            run(a[:0], b, a_scale[:0], b_scale)
        with pytest.raises(Unsupported, match="64 columns with tile_n=256"):
            run(a, b, a_scale, b_scale, config=WIDE)
        y = scaled_matmul(a[:0], b, a_scale[:0], b_scale)
        assert y.shape == (0, 64)
        blocks = block_operands(8, 256, 128, (E5M2, E4M3), square=True)
        with pytest.raises(Unsupported, match="at most 64 x 128 of the tile"):
            run(*blocks, config=WIDE)
    with pytest.raises(Unsupported, match="XLA takes no config"):
        scaled_matmul(a, b, a_scale, b_scale, implementation="xla", config=WIDE)
    with pytest.raises(ValueError, match="tile_k 64, expected 128"):
        ScaledMatmulConfig(tile_k=64)
    with pytest.raises(ValueError, match=r"tile_m 512 x tile_n 64, .* 192 reg"):
        ScaledMatmulConfig(tile_m=512, tile_n=64)
