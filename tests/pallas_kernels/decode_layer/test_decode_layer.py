"""A decoder layer in one launch: XLA's form, and the kernel interpreted."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxscale.nn.quantized_linear import quantize_kernel
from pallas_kernels.decode_layer import (
    LayerWeights,
    NextProjection,
    as_residual,
    decode_layer,
    from_residual,
    mosaic_gpu,
    reference,
    rotation,
)
from pallas_kernels.decode_layer.config import DecodeLayerConfig, Problem, Schedule
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.quantized_matmul.widen import in_order_of_pairs
from tests.interpreter import interpret_mosaic_gpu, register_inline
from tests.pallas_kernels.quantized_matmul.test_quantized_matmul import (
    widen_e4m3,
    widen_int8,
)
from tests.tolerances import RELATIVE, relative_error


PAIRS = np.asarray(in_order_of_pairs(jnp.arange(64)[None]))[0]


def store_tokens(target, values, closure):
    tokens = values.T[: len(target)]
    target[:] = tokens[:, PAIRS] if closure["in_pairs"] else tokens


register_inline("widen_int8", widen_int8)
register_inline("widen_e4m3", widen_e4m3)
register_inline("store_tokens", store_tokens, writes=(0,))
register_inline("widen_int8_pairs", lambda values: values.astype(ml_dtypes.bfloat16))
register_inline("widen_e4m3_pairs", lambda values: values.astype(ml_dtypes.bfloat16))

EPS = 1e-5
BF16 = jnp.dtype(jnp.bfloat16)
TINY = Problem(
    m=3, d_model=256, d_ff=256, features=256, heads=2, kv_heads=1, head_dim=128
)
BIG = Problem(
    m=8, d_model=4096, d_ff=14336, features=4096, heads=32, kv_heads=8, head_dim=128
)
LAST = {"heads": 0, "kv_heads": 0, "head_dim": 0}
"""The changes of a problem that make it the last layer."""


def operands(problem, seed=0):
    """Arrays of a layer, whose results are of the size of one."""
    p, keys = problem, iter(jax.random.split(jax.random.key(seed), 16))
    columns = (p.heads + 2 * p.kv_heads) * p.head_dim

    def array(*shape, dtype=jnp.bfloat16, size=1.0):
        return (jax.random.normal(next(keys), shape) * size).astype(dtype)

    def weight(k, n):
        return array(k, n, size=k**-0.5)

    residual = array(p.d_model, p.rows, dtype=jnp.float32)
    found = {
        "attended": array(p.m, p.features),
        "residual": residual.at[:, p.m :].set(0),
        "out": weight(p.features, p.d_model),
        "mlp_norm": 1 + array(p.d_model, size=0.2),
        "gate_up": weight(p.d_model, 2 * p.d_ff),
        "down": weight(p.d_ff, p.d_model),
    }
    if p.projects:
        angles = array(p.head_dim // 2, p.rows, dtype=jnp.float32, size=9.0)
        found |= {
            "norm": 1 + array(p.d_model, size=0.2),
            "qkv": weight(p.d_model, columns),
            "cos": jnp.cos(angles),
            "sin": jnp.sin(angles),
        }
        found["next_out"] = weight(p.features, p.d_model)
    if p.bias:
        found["bias"] = array(columns)
    if p.narrow:
        found |= quantized(found, p.weights)
    return found


def quantized(given, weights):
    """Weights of 8 bits of an operand's features, with their scales."""
    kind = {"int8": "int8", "float8_e4m3fn": "fp8"}[weights]
    found = {}
    for name in ("out", "gate_up", "down", "qkv", "next_out"):
        if name in given:
            found[name], scale = quantize_kernel(given[name], kind)
            if name != "next_out":
                found[f"{name}_scale"] = scale
    return found


def reference_of(problem, given):
    return reference.decode_layer(
        given,
        heads=problem.heads + problem.kv_heads,
        head_dim=problem.head_dim,
        eps=EPS,
    )


def check(problem, given, found):
    residual, q, kv, *_ = found
    want, qkv = reference_of(problem, given)
    m = problem.m
    assert relative_error(residual[:, :m], want[:, :m]) < RELATIVE[BF16]
    if problem.projects:
        got = jnp.concatenate([q, kv], axis=1)
        assert got.dtype == BF16 and got.shape == qkv.shape
        assert relative_error(got, qkv) < 2 * RELATIVE[BF16]


def interpreted(problem, given, num_sms=1, **config):
    device = dataclasses.replace(H200, num_sms=num_sms)
    with interpret_mosaic_gpu(detect_races=True, concurrent_blocks=num_sms > 1):
        found = mosaic_gpu.decode_layer(
            given,
            problem=problem,
            config=DecodeLayerConfig(**config),
            device=device,
            eps=EPS,
        )
        return [None if a is None else np.asarray(a) for a in found]


FEW = {"weight_slots": 2, "activation_slots": 2}
INT8, FP8 = {"weights": "int8"}, {"weights": "float8_e4m3fn"}
SLOTS = {"weight_slots": 3, "requested": 2}
"""Not all slots are asked for at a time."""


@pytest.mark.parametrize(
    ("changes", "num_sms", "config"),
    [
        # All columns are whole: one block has them.
        ({"m": 16, "bias": True}, 1, {"tile_k": 64} | FEW),
        (LAST, 1, {"tile_k": 128}),
        # Sums are parts in memory; columns that one block has alone beside those that
        # two share.
        ({"m": 16, "d_ff": 384}, 2, FEW),
        # A block without a piece; columns that one block has, from registers.
        ({"m": 8, "d_model": 512, "d_ff": 256}, 3, FEW | SLOTS),
        # Weights of 8 bits: from registers, and parts in memory.
        ({"m": 8, "bias": True} | INT8, 1, FEW),
        ({"m": 16, "d_ff": 384} | FP8, 2, FEW | {"tile_k": 64}),
    ],
)
def test_interpreted_kernel_equals_the_reference(changes, num_sms, config):
    problem = dataclasses.replace(TINY, **changes)
    given = operands(problem)
    check(problem, given, interpreted(problem, given, num_sms, **config))


def arguments(problem, given):
    """What the public function takes."""

    def pick(kind, **more):
        names = [field.name for field in dataclasses.fields(kind)]
        return kind(**{name: given[name] for name in names if name in given}, **more)

    layer = pick(LayerWeights)
    if not problem.projects:
        return given["attended"], given["residual"], layer
    heads = {"heads": problem.heads, "kv_heads": problem.kv_heads}
    projection = pick(NextProjection, **heads)
    projection = dataclasses.replace(projection, out=given["next_out"])
    return given["attended"], given["residual"], layer, projection


@pytest.mark.parametrize("changes", [{}, {"m": 16, "bias": True} | INT8, LAST | FP8])
def test_xla_equals_the_reference(changes):
    problem = dataclasses.replace(TINY, **changes)
    given = operands(problem)
    residual, heads = decode_layer(*arguments(problem, given), eps=EPS)
    if heads is None:
        return check(problem, given, (residual, None, None))
    q, kv = heads
    assert q.shape == (problem.m, 2, 128) and kv.shape == (problem.m, 2, 1, 128)
    check(problem, given, (residual, *(x.reshape(problem.m, -1) for x in heads)))


def test_residual_and_rotation_are_feature_major():
    x = jax.random.normal(jax.random.key(0), (3, 128), BF16)
    np.testing.assert_array_equal(from_residual(as_residual(x), 3), x)
    angles = jnp.outer(jnp.arange(3.0), jnp.arange(1.0, 65.0))
    cos, sin = rotation(angles, factor=2.0)
    assert cos.shape == sin.shape == (64, 8)
    np.testing.assert_allclose(cos[:, :3] ** 2 + sin[:, :3] ** 2, 4, rtol=1e-5)


def test_errors_say_what_to_do():
    given = operands(TINY)
    attended, residual, layer, _ = arguments(TINY, given)
    with pytest.raises(ValueError, match=r"residual has shape .* expected \(256, 8\)"):
        decode_layer(attended, residual[:, :3], layer, eps=EPS)
    with pytest.raises(ValueError, match="use as_residual"):
        decode_layer(attended, residual.astype(BF16), layer, eps=EPS)
    with pytest.raises(Unsupported, match="Hopper"):
        decode_layer(attended, residual, layer, eps=EPS, implementation="mosaic_gpu")
    kernel = {"eps": EPS, "implementation": "mosaic_gpu"}
    with use_device(H200):
        with pytest.raises(Unsupported, match="m=12, the kernel takes 1 to 64"):
            decode_layer(
                jnp.tile(attended, (4, 1)), jnp.tile(residual, (1, 2)), layer, **kernel
            )
        with pytest.raises(Unsupported, match=r"of .*'float32'.* takes bfloat16"):
            wide = dataclasses.replace(layer, down=layer.down.astype(jnp.float32))
            decode_layer(attended, residual, wide, **kernel)
        with pytest.raises(Unsupported, match="multiples of 128"):
            thin = dataclasses.replace(
                layer, gate_up=layer.gate_up[:, :384], down=layer.down[:192]
            )
            decode_layer(attended, residual, thin, **kernel)
    with pytest.raises(NotImplementedError, match="no derivatives"):
        jax.grad(lambda x: decode_layer(x, residual, layer, eps=EPS)[0].sum())(attended)
    with pytest.raises(ValueError, match="tile_k 256"):
        DecodeLayerConfig(tile_k=256)


def test_every_tile_is_in_one_piece():
    """And no block has much more of them than another."""
    for workers in (1, 2, 5, 114, 132):
        device = dataclasses.replace(H200, num_sms=workers)
        for problem in (TINY, BIG, dataclasses.replace(BIG, d_ff=18944, m=64)):
            schedule = Schedule(
                problem=problem, config=DecodeLayerConfig(), device=device
            )
            for stage in schedule.stages:
                found, work = [], []
                for worker in range(workers):
                    pieces = [
                        stage.piece(worker, i) for i in range(stage.pieces(worker))
                    ]
                    assert all(piece.count > 0 for piece in pieces)
                    tiles = [(p.column, p.k(n)) for p in pieces for n in range(p.count)]
                    found += tiles
                    work.append(len(tiles))
                want = itertools.product(range(stage.columns), range(stage.depth))
                assert sorted(found) == list(want)
                if len(found) > 8 * workers:
                    assert max(work) < 1.25 * len(found) / workers


def test_every_feature_is_finished_once():
    for workers, m in itertools.product((2, 5, 132), (8, 64)):
        problem = dataclasses.replace(BIG, m=m)
        device = dataclasses.replace(H200, num_sms=workers)
        schedule = Schedule(problem=problem, config=DecodeLayerConfig(), device=device)
        for stage in schedule.stages:
            found, first = [], stage.units - stage.shared_units
            for unit in range(stage.units if stage.direct else first):
                rows = range(0, stage.rows, 8)
                found += itertools.product(stage.groups(unit), rows)
            for index in range(stage.items):
                unit, j, row = stage.item(index)
                groups = stage.groups(first + unit)[j : None if stage.pairs else j + 1]
                found += itertools.product(groups, range(row, row + stage.item_rows, 8))
            groups = range(stage.n // 64)
            assert sorted(found) == list(
                itertools.product(groups, range(0, stage.rows, 8))
            )
