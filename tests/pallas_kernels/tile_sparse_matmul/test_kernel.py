"""The Hopper kernels on a CPU: interpreted with race detection, lowered for CUDA."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuned_configs
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul.activations import ACTIVATIONS, activate
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import (
    mosaic_gpu,
    mosaic_gpu_grad,
    tile_sparse_matmul,
)
from pallas_kernels.tile_sparse_matmul.config import (
    GradConfig,
    Problem,
    TileSparseConfig,
    candidates,
    heuristic,
)
from pallas_kernels.tile_sparse_matmul.specs import SPECS
from pallas_kernels.tile_sparse_matmul.transposed import has_tiles, transposed
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels.tile_sparse_matmul import stand_ins  # noqa: F401
from tests.pallas_kernels.tile_sparse_matmul.cases import random_weight
from tests.tiers import first
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
SMALL = TileSparseConfig(block_tokens=64, stages=3, lag=1, cluster=1, store_slots=1)
WIDE = dataclasses.replace(SMALL, block_tokens=128)


def normal(seed, shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def interpreted(x, w, config, layout, num_sms=1, **epilogue):
    device = dataclasses.replace(H200, num_sms=num_sms)
    with interpret_mosaic_gpu(detect_races=True):
        return np.asarray(
            mosaic_gpu.tile_sparse_matmul(
                x, w, feature_major=layout, config=config, device=device, **epilogue
            )
        )


@pytest.mark.parametrize(
    ("tokens", "weight", "layout", "config", "num_sms"),
    [
        # Uneven tiles: none, one row, more than all stages hold; the ring carries over.
        (64, (256, 384, 128, [0, 1, 256], 1), (True, True), SMALL, 1),
        (64, (256, 256, 128, [65, 192], 1), (True, False), SMALL, 2),
        (64, (256, 256, 128, [8, 136], 8), (False, True), SMALL, 1),
        # More stages and lag than a tile has steps.
        (
            64,
            (128, 256, 128, [64, 64], 1),
            (True, True),
            dataclasses.replace(SMALL, stages=6, lag=4),
            1,
        ),
        # Clusters, one of them half past the end; bands of one.
        (
            192,
            (192, 256, 128, [130, 20], 1),
            (True, True),
            dataclasses.replace(SMALL, cluster=2, group=1),
            2,
        ),
        (
            128,
            (192, 256, 128, [130, 20], 1),
            (True, False),
            dataclasses.replace(SMALL, cluster=2),
            2,
        ),
        (24, (128, 128, 128, [100], 1), (True, True), SMALL, 1),  # few tokens
        (24, (128, 128, 128, [100], 1), (True, False), SMALL, 1),
        (5, (128, 128, 128, [100], 1), (False, False), SMALL, 1),  # padded
        (100, (128, 100, 64, [100, 7], 1), (True, True), WIDE, 1),
        (128, (128, 192, 64, [70, 128, 3], 1), (True, False), WIDE, 1),
        (64, (128, 256, 256, [90], 1), (True, True), SMALL, 1),
        # Sums too large for two producers; indices of two steps at a time.
        (
            256,
            (256, 256, 128, [130, 130], 1),
            (True, True),
            TileSparseConfig(stages=3, lag=1, ahead=3),
            1,
        ),
        (
            64,
            (256, 384, 128, [200, 200, 200], 1),
            (True, True),
            dataclasses.replace(SMALL, ahead=2),
            1,
        ),
        # Uneven tiles, whose last indices are read beside some past the end.
        (
            16,
            (256, 512, 128, [0, 1, 256, 150], 1),
            (True, True),
            dataclasses.replace(SMALL, ahead=3),
            1,
        ),
        (
            16,
            (256, 256, 128, [256, 100], 1),
            (True, False),
            dataclasses.replace(SMALL, ahead=8, splits=2),
            2,
        ),
        # Groups of 64 rows, by the copy engine, from both layouts.
        (128, (256, 256, 128, [64, 192], 64), (True, True), SMALL, 1),
        (128, (256, 256, 128, [64, 192], 64), (False, True), SMALL, 1),
        (72, (256, 256, 128, [128, 0], 64), (False, False), SMALL, 1),
        # Bands and, where there is one, rounds of blocks that go forth and back, the
        # last one not full.
        (
            128,
            (128, 512, 128, [70, 128, 3, 64], 1),
            (True, True),
            dataclasses.replace(SMALL, group=1),
            3,
        ),
        (128, (128, 512, 128, [70, 128, 3, 64], 1), (True, True), SMALL, 3),
        # An output one line wide: what lies past its columns is not stored.
        (64, (128, 100, 64, [100, 7], 1), (True, True), WIDE, 1),
        (64, (128, 64, 128, [100], 1), (False, False), SMALL, 1),
        (
            40,
            (128, 128, 128, [128], 1),
            (True, True),
            dataclasses.replace(SMALL, cluster=2),
            2,
        ),
        (
            40,
            (256, 256, 256, [200], 8),
            (True, True),
            dataclasses.replace(SMALL, splits=2),
            1,
        ),
        # Split sums: parts of unequal and of no steps.
        (
            16,
            (256, 256, 128, [192, 64], 1),
            (True, True),
            dataclasses.replace(SMALL, splits=2),
            2,
        ),
        (
            16,
            (256, 200, 128, [192, 64], 1),
            (True, False),
            dataclasses.replace(SMALL, splits=4),
            1,
        ),
    ],
)
def test_interpreted_kernel_equals_the_reference(
    tokens, weight, layout, config, num_sms
):
    w, dense, _ = random_weight(*weight, dtype=BF16)
    x, bias = normal(1, (tokens, w.shape[0])), normal(2, (w.shape[1],))
    y = interpreted(
        x.T if layout[0] else x,
        w,
        config,
        layout,
        num_sms,
        bias=bias,
        activation="gelu",
    )
    want = x.astype(jnp.float32) @ dense + bias.astype(jnp.float32)
    want = ACTIVATIONS["gelu"](want)
    assert y.dtype == BF16
    assert relative_error(y.T if layout[1] else y, want) < RELATIVE[BF16]


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_interpreted_epilogues(activation):
    w, dense, _ = random_weight(128, 192, 128, [65, 0], dtype=BF16)
    x, bias = normal(1, (64, 128)), normal(2, (192,))
    y_major = activation in (None, "silu", "relu")
    y = interpreted(x.T, w, SMALL, (True, y_major), bias=bias, activation=activation)
    want = x.astype(jnp.float32) @ dense + bias.astype(jnp.float32)
    want = activate(want, activation)
    assert relative_error(y.T if y_major else y, want) < RELATIVE[BF16]


@pytest.mark.parametrize(
    ("tokens", "weight", "layout", "config", "num_sms"),
    [
        # A block without rows, one partly kept, tokens padded to whole steps.
        (
            144,
            (512, 256, 128, [3, 300], 1),
            (True, True),
            GradConfig(block_rows=128, stages=3, lag=1),
            1,
        ),
        (
            128,
            (512, 240, 128, [320, 70], 1),
            (False, False),
            GradConfig(block_rows=128, stages=4, lag=2, cluster=2),
            2,
        ),
        (
            64,
            (256, 128, 64, [0, 130], 1),
            (True, True),
            GradConfig(block_rows=256, stages=3, lag=1),
            1,
        ),
        (
            64,
            (128, 256, 256, [70], 1),
            (True, True),
            GradConfig(block_rows=64, stages=3, lag=1),
            1,
        ),
    ],
)
def test_interpreted_gradient_equals_the_reference(
    tokens, weight, layout, config, num_sms
):
    w, _, mask = random_weight(*weight, dtype=BF16)
    x, dy = normal(1, (tokens, w.shape[0])), normal(2, (tokens, w.shape[1]))
    with interpret_mosaic_gpu(detect_races=True):
        grad = mosaic_gpu_grad.grad_values(
            x.T if layout[0] else x,
            dy.T if layout[1] else dy,
            w,
            feature_major=layout,
            config=config,
            device=dataclasses.replace(H200, num_sms=num_sms),
        )
    want = np.where(mask, x.T.astype(jnp.float32) @ dy.astype(jnp.float32), 0)
    assert relative_error(w.with_values(grad).to_dense(), want) < RELATIVE[BF16]
    past = np.arange(w.room) >= np.asarray(w.counts)[:, None]
    assert grad.dtype == BF16 and not np.any(np.asarray(grad)[past])


def test_every_number_of_tokens_has_a_config():
    for tile in (64, 128, 256):
        for m in (1, 8, 31, 32, 33, 64, 100, 128, 4096):
            w = dataclasses.replace(SPECS[0], tile=tile).weight_shape()
            x = jax.ShapeDtypeStruct((4096, m), jnp.bfloat16)
            found = candidates(Problem.of(x, w, (True, True)), H200)
            assert min(c.block_tokens for c in found) < max(2 * m, 129)


@pytest.mark.parametrize("layout", [(True, True), (False, False), (True, False)])
@pytest.mark.parametrize(
    ("tokens", "weight", "changes"),
    [
        (1, (256, 384, 128, [0, 1, 200], 1), {}),
        (1, (192, 200, 128, [130, 64], 8), {"splits": 2, "store_slots": 2}),
        (1, (128, 100, 64, [100, 7], 1), {"block_tokens": 128}),
        (1, (128, 60, 128, [100], 1), {"cluster": 2}),
        (1, (256, 256, 128, [64, 192], 64), {}),
        (3, (256, 256, 128, [64, 192], 64), {"cluster": 2}),
        (7, (128, 256, 256, [100], 1), {}),
    ],
)
def test_few_tokens_are_stored_as_they_are(tokens, weight, changes, layout):
    """Fewer than eight: the copy engine clips, and one token is the same either way."""
    w, dense, _ = random_weight(*weight, dtype=BF16)
    x, bias = normal(1, (tokens, w.shape[0])), normal(2, (w.shape[1],))
    config = dataclasses.replace(SMALL, **changes)
    y = interpreted(
        x.T if layout[0] else x, w, config, layout, config.cluster, bias=bias
    )
    want = x.astype(jnp.float32) @ dense + bias.astype(jnp.float32)
    assert y.shape == (want.T if layout[1] else want).shape
    assert relative_error(y.T if layout[1] else y, want) < RELATIVE[BF16]


@pytest.mark.parametrize(
    ("layout", "granularity"),
    first(
        itertools.product([(True, True), (False, False), (False, True)], [1, 64]),
        ((False, False), 1),
        ((False, True), 64),
    ),
)
def test_few_tokens_take_no_needless_kernels(layout, granularity):
    """No slices of what is stored, nothing that orders uneven tiles."""
    spec = dataclasses.replace(SPECS[0], granularity=granularity, feature_major=layout)
    uneven = spec.weight_shape()
    static = (uneven.shape, granularity, False, None)
    leaves = [*jax.tree.leaves(uneven), None, None, uneven.counts]
    uneven = uneven.tree_unflatten(static, leaves)

    def operations(tokens):
        shape = (spec.k, tokens) if layout[0] else (tokens, spec.k)
        x = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        config = heuristic(Problem.of(x, uneven, layout), H200)
        run = functools.partial(
            mosaic_gpu.tile_sparse_matmul,
            feature_major=layout,
            config=dataclasses.replace(config, splits=1),  # sums of parts are needed
            device=H200,
        )
        text = lower_for_cuda(run, x, uneven, kernels=1)
        return {
            name: text.count(f"stablehlo.{name}")
            for name in ("slice", "pad", "reduce(", "compare")
        }

    nothing = {"slice": 0, "pad": 0, "reduce(": 0, "compare": 0}
    assert operations(1) == nothing | {"pad": int(granularity == 1)}
    assert operations(64) == nothing
    assert operations(4096) == nothing


def test_pruned_columns_are_put_in_place_without_a_scatter():
    """Where they come from was found when the weight was packed."""
    w, _, _ = random_weight(256, 384, 128, [64, 64], dtype=BF16, pruned=range(128))

    def run(x, w):
        return tile_sparse_matmul(x, w, implementation="mosaic_gpu")

    with use_device(H200):
        text = lower_for_cuda(run, normal(0, (1, 256)), w, kernels=1)
    assert "stablehlo.scatter" not in text


def test_few_tokens_stay_rows_in_a_program():
    """Else XLA stores the residual stream, which leads to a transpose, by feature."""
    w, _, _ = random_weight(256, 256, 128, [64, 192], dtype=BF16)

    def constraints(tokens, layout=(False, False), transform=lambda f: f):
        def run(x, w):
            y = tile_sparse_matmul(
                x, w, feature_major=layout, implementation="mosaic_gpu"
            )
            return jnp.sum(y.astype(jnp.float32))

        x = normal(0, (tokens, 256))
        with use_device(H200):
            text = lower_for_cuda(transform(run), x.T if layout[0] else x, w)
        return text.count("LayoutConstraint")

    assert constraints(32) == 2  # of the input and of the output
    assert constraints(32, (True, False)) == constraints(32, (False, True)) == 1
    assert constraints(32, (True, True)) == constraints(1) == constraints(128) == 0
    gradient = functools.partial(jax.value_and_grad, argnums=0)
    assert constraints(32, transform=gradient) == 4


def test_split_sums_of_an_odd_number_of_tokens_lower():
    w = dataclasses.replace(SPECS[0], room=512).weight_shape()
    for m in (40, 100):
        x = jax.ShapeDtypeStruct((4096, m), jnp.bfloat16)
        config = heuristic(Problem.of(x, w, (True, True)), H200)
        run = functools.partial(
            mosaic_gpu.tile_sparse_matmul,
            feature_major=(True, True),
            config=dataclasses.replace(config, splits=2),
            device=H200,
        )
        lower_for_cuda(run, x, w, kernels=1)


def shapes(spec, dtype=jnp.bfloat16):
    """Shapes of x, w and dy of a named problem."""
    w = spec.weight_shape(dtype)
    x_major, y_major = spec.feature_major
    x, y = (spec.m, spec.k), (spec.m, spec.n)
    return (
        jax.ShapeDtypeStruct(x[::-1] if x_major else x, dtype),
        w,
        jax.ShapeDtypeStruct(y[::-1] if y_major else y, dtype),
    )


TUNED = [*SPECS[:5], next(spec for spec in SPECS if spec.m == 8)]


@pytest.mark.parametrize("spec", first(TUNED, TUNED[-1]), ids=lambda spec: spec.name)
def test_every_candidate_of_the_tuner_lowers(spec):
    x, w, _ = shapes(spec)
    for config in candidates(Problem.of(x, w, spec.feature_major), H200):
        run = functools.partial(
            mosaic_gpu.tile_sparse_matmul,
            feature_major=spec.feature_major,
            config=config,
            device=H200,
        )
        lower_for_cuda(run, x, w, kernels=1)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("layout", [(True, True), (False, False)])
def test_epilogues_lower(activation, layout):
    spec = dataclasses.replace(SPECS[0], feature_major=layout)
    x, w, _ = shapes(spec, jnp.float16)
    bias = jax.ShapeDtypeStruct((spec.n,), jnp.float16)

    def run(x, w, bias):
        return tile_sparse_matmul(
            x,
            w,
            bias=bias,
            activation=activation,
            feature_major=layout,
            implementation="mosaic_gpu",
        )

    with use_device(H200):
        lower_for_cuda(run, x, w, bias, kernels=1)


def test_rematerialization_may_keep_the_product():
    x, w, _ = shapes(SPECS[0])

    def kernels(*names):
        keep = jax.checkpoint_policies.save_only_these_names(*names)

        @functools.partial(jax.checkpoint, policy=keep)
        def layer(x, values, w):
            y = tile_sparse_matmul(
                x,
                w.with_values(values),
                activation="silu",
                feature_major=SPECS[0].feature_major,
                implementation="mosaic_gpu",
            )
            return jnp.sum(y.astype(jnp.float32))

        with use_device(H200):
            text = lower_for_cuda(jax.value_and_grad(layer), x, w.values, w)
        return text.count("@mosaic_gpu_v2")

    assert kernels("tile_sparse_matmul_out") == kernels() - 1


def test_dispatch_chooses():
    def text(spec, **kwargs):
        x, w, _ = shapes(spec)
        with use_device(H200):
            return str(
                jax.make_jaxpr(
                    functools.partial(
                        tile_sparse_matmul, feature_major=spec.feature_major, **kwargs
                    )
                )(x, w)
            )

    sparse = SPECS[0]
    full = dataclasses.replace(sparse, room=sparse.k, m=8192)
    assert "dot_general" not in text(sparse)
    assert "dot_general" in text(full)  # nothing is pruned: unpacked and multiplied
    assert "dot_general" not in text(full, config=TileSparseConfig())
    with tuned_configs.override("tile_sparse_matmul", TileSparseConfig()):
        assert "dot_general" not in text(full)
    assert "dot_general" in text(sparse, implementation="xla")
    odd = dataclasses.replace(sparse, tile=32)
    assert "dot_general" in text(odd)  # no kernel takes tiles of 32


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("block_tokens", 192, "block_tokens 192, expected 64, 128 or 256"),
        ("lag", 3, "stages 4 with lag 3: expected at least 5"),
        ("cluster", 3, "cluster 3, expected 1 or 2"),
        ("splits", 0, "splits 0, expected an integer of at least 1"),
        ("group", 2.0, "group 2.0, expected an integer"),
    ],
)
def test_impossible_configs_are_refused(no_shape_hook, field, value, message):
    with pytest.raises(ValueError, match=message):
        TileSparseConfig(**{field: value})


def test_the_kernel_says_what_it_needs():
    w, _, _ = random_weight(128, 128, 128, [64], dtype=BF16)
    small, _, _ = random_weight(128, 128, 32, [64, 1, 2, 3], dtype=BF16)
    x = normal(0, (64, 128))
    run = functools.partial(tile_sparse_matmul, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match="needs an NVIDIA Hopper GPU"):
        run(x, w)
    with pytest.raises(Unsupported, match=r"XLA takes no config"):
        tile_sparse_matmul(x, w, implementation="xla", config=SMALL)
    with use_device(H200):
        with pytest.raises(Unsupported, match=r"tile 32, the kernel takes \(64, 128"):
            run(x, small)
        with pytest.raises(Unsupported, match=r"bytes of shared memory.*fewer stages"):
            run(x, w, config=dataclasses.replace(SMALL, stages=40))
        with pytest.raises(Unsupported, match=r"float32.*bfloat16 or float16"):
            run(x.astype(jnp.float32), w.with_values(w.values.astype(jnp.float32)))


def test_transpose_on_the_device():
    w, dense, mask = random_weight(256, 384, 128, [64, 0, 192], granularity=64)
    assert has_tiles(w) and not has_tiles(random_weight(256, 384, 128, [64] * 3)[0])
    turned = jax.jit(transposed)(w)
    assert (turned.shape, turned.tile, turned.granularity) == ((384, 256), 64, 64)
    np.testing.assert_array_equal(turned.to_dense(), dense.T)
    np.testing.assert_array_equal(turned.mask(), mask.T)


def test_gradient_of_the_inputs_is_sparse_for_groups_of_rows():
    w, dense, _ = random_weight(256, 256, 128, [64, 192], granularity=64, dtype=BF16)
    dy = normal(1, (64, 256))
    dx = interpreted(
        dy, transposed(w), dataclasses.replace(WIDE, stages=3), (False, False)
    )
    want = dy.astype(jnp.float32) @ dense.T
    assert relative_error(dx, want) < RELATIVE[BF16]
    spec = SPECS[2]
    x, shape, dy = shapes(spec)

    def grad(x, w, dy):
        run = functools.partial(tile_sparse_matmul, feature_major=spec.feature_major)
        return jax.vjp(lambda x: run(x, w), x)[1](dy)

    with use_device(H200):
        lowered = jax.jit(grad).trace(x, shape, dy)
        assert "dot_general" not in str(lowered.jaxpr)
        lower_for_cuda(grad, x, shape, dy)
