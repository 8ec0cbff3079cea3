"""Moves of pages: portable and in the interpreter, refusals, lowering."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.move_pages import move_pages, reference
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda


P = jax.sharding.PartitionSpec
FP8 = jnp.float8_e4m3fn


def bits(x):
    """Equal where numbers are equal bit for bit, NaN too."""
    x = np.asarray(x)
    return x.view(f"u{x.dtype.itemsize}")


def pool(shape, dtype, seed=0):
    """Pages of which some numbers are NaN."""
    values = np.random.default_rng(seed).normal(size=shape)
    values[..., 0] = np.nan
    return jnp.asarray(values, jnp.float32).astype(dtype)


def interpreted(num_sms=2, **options):
    def run(pages, source, target):
        device = dataclasses.replace(H200, num_sms=num_sms)
        with use_device(device), interpret_mosaic_gpu(**options):
            moved = move_pages(pages, source, target, implementation="mosaic_gpu")
            return np.asarray(moved)

    return run


# Sources and targets, of which some are no pages.
MOVES = {
    "some": ([3, 0, 8, 5], [1, 2, 6, 4]),
    "one": ([7], [0]),
    "none": ([-1, 9, 2, 3], [0, 1, -5, 100]),
    "mixed": ([-1, 3, 99, 5, 8], [0, 1, 2, 9, 4]),
}


@pytest.mark.parametrize("moves", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, FP8])
def test_pages_move_in_all_layers(moves, dtype):
    source, target = map(np.array, moves)
    pages = pool((3, 9, 2, 2, 4, 16), dtype)
    wanted = reference.move_pages(pages, source, target)
    for found in (
        move_pages(pages, source, target),
        jax.jit(move_pages)(pages, jnp.asarray(source), jnp.asarray(target)),
    ):
        np.testing.assert_array_equal(bits(found), bits(wanted))


@pytest.mark.parametrize(
    ("moves", "dtype", "shape"),
    [
        ("some", jnp.bfloat16, (3, 9, 2, 2, 16, 64)),
        ("mixed", FP8, (2, 9, 2, 3, 64, 128)),  # several tiles of a page
        ("none", jnp.float32, (1, 9, 2, 1, 8, 8)),
        ("one", jnp.float32, (5, 9, 6, 4)),  # fewer tiles than the ring has
    ],
)
def test_interpreted_kernel(moves, dtype, shape):
    source, target = map(np.array, MOVES[moves])
    pages = pool(shape, dtype)
    found = interpreted()(pages, source, target)
    wanted = reference.move_pages(pages, source, target)
    np.testing.assert_array_equal(bits(found), bits(wanted))


def test_no_races():
    """More tiles than the ring has, so that slots are used again."""
    source, target = map(np.array, MOVES["some"])
    pages = pool((5, 9, 2, 1, 4, 8), jnp.float32)
    found = interpreted(num_sms=1, detect_races=True)(pages, source, target)
    wanted = reference.move_pages(pages, source, target)
    np.testing.assert_array_equal(bits(found), bits(wanted))


@pytest.mark.parametrize("kind", ["auto", "explicit", "manual"])
def test_heads_on_several_devices(kind):
    source, target = map(np.array, MOVES["some"])
    pages = pool((2, 9, 2, 2, 4, 8), jnp.float32)
    explicit = jax.sharding.AxisType.Explicit
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh(
        (2,), ("tensor",), axis_types=(explicit if kind == "explicit" else auto,)
    )
    heads = P(None, None, None, "tensor")
    run = move_pages
    if kind == "manual":
        run = jax.shard_map(run, in_specs=(heads, P(), P()), out_specs=heads)
    with jax.set_mesh(mesh):
        placed = jax.device_put(pages, jax.sharding.NamedSharding(mesh, heads))
        found = jax.jit(run)(placed, jnp.asarray(source), jnp.asarray(target))
    assert found.addressable_shards[0].data.shape[3] == 1
    wanted = reference.move_pages(pages, source, target)
    np.testing.assert_array_equal(bits(found), bits(wanted))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ([1, 2], [3, 3], "target 3 is named twice"),
        ([1, 3], [3, 4], "target 3 is also a source"),
        ([1, 2], [3], r"source has shape \(2,\) and target \(1,\)"),
    ],
)
def test_moves_that_are_not_defined(source, target, message, no_shape_hook):
    pages = jnp.zeros((1, 5, 2))
    with pytest.raises(ValueError, match=message):
        move_pages(pages, np.array(source), np.array(target))


def test_what_is_refused(no_shape_hook):
    ids = np.array([0]), np.array([1])
    with pytest.raises(TypeError, match="source must hold integers, got float"):
        move_pages(jnp.zeros((1, 2, 2)), np.array([0.0]), np.array([1]))
    with pytest.raises(ValueError, match=r"shape \(1, 2\), expected \[L, P"):
        move_pages(jnp.zeros((1, 2)), *ids)
    with pytest.raises(TypeError, match="has no derivative"):
        jax.grad(lambda pages: move_pages(pages, *ids).sum())(jnp.ones((1, 2, 4)))
    with use_device(H200):
        for shape, dtype, message in (
            ((1, 2, 4, 6), jnp.float32, "last dimension of 6 numbers"),
            ((1, 2, 4, 512), jnp.bfloat16, "256 numbers at most"),
            ((1, 2, 4, 16), jnp.int8, "type int8"),
        ):
            pages = jnp.ones(shape, dtype)
            with pytest.raises(Unsupported, match=message):
                move_pages(pages, *ids, implementation="mosaic_gpu")
            moved = move_pages(pages.at[:, 0].set(3), *ids)
            assert (moved == 3).all()
        stacked = jnp.ones((2, 1, 2, 4, 16))
        with pytest.raises(NotImplementedError, match="all moves into one call"):
            jax.vmap(lambda pages: move_pages(pages, *ids))(stacked)
    with pytest.raises(Unsupported, match="needs an NVIDIA Hopper GPU"):
        move_pages(jnp.ones((1, 2, 4, 16)), *ids, implementation="mosaic_gpu")


def test_one_kernel_lowers():
    pages = jax.ShapeDtypeStruct((2, 9, 2, 2, 64, 128), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    with use_device(H200):
        lower_for_cuda(move_pages, pages, ids, ids, kernels=1)
