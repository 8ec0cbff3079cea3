"""Sums of rows, and the gradients of look-ups that are made of them."""

import itertools
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.sharding import dp, fsdp, fsdp_tp, gather, make_mesh
from jaxscale.sharding.lookup import row_sums
from tests.compiled import compile_for_h200
from tests.tiers import exhaustive, first


P = jax.sharding.PartitionSpec
summed = jax.jit(row_sums, static_argnums=(2, 3))
RULES = {"data": dp, "fsdp": fsdp, "tensor": fsdp_tp}
TABLE_AXES, OUT_AXES = ("vocab", "embed"), ("batch", "tokens", "act_embed")


def values_of(indices, rest, dtype=jnp.float32):
    random = np.random.default_rng(len(indices))
    shape = (len(indices), *rest)
    return jnp.asarray(random.normal(size=shape), dtype)


def expected(values, indices, rows):
    sums = np.zeros((rows, *values.shape[1:]))
    for index, value in zip(indices, np.asarray(values, np.float64), strict=True):
        if 0 <= index < rows:
            sums[index] += value
    return sums


def drawn(n, low, high):
    return np.random.default_rng(n + high).integers(low, high, n)


INDICES = {
    "one": [2],
    "none_inside": [-1, 5, 7],
    "few": drawn(7, 0, 5),
    "a_chunk": drawn(128, 0, 5),
    "one_more": drawn(129, -1, 6),
    "all_equal": np.full(700, 3),
    "all_different": np.random.default_rng(0).permutation(1000),
    "over_many_chunks": np.repeat([0, 1, 4, 3], [128, 300, 1, 500]),
    "mixed": np.concatenate([drawn(600, -3, 40), np.full(400, 7)]),
}


@pytest.mark.parametrize(
    ("name", "rest"),
    first(
        itertools.product(INDICES, [(6,), (), (2, 3)]),
        *((name, (6,)) for name in INDICES),
        ("mixed", ()),
        ("mixed", (2, 3)),
    ),
)
def test_row_sums(name, rest):
    indices = np.asarray(INDICES[name], np.int32)
    rows = 1000 if name == "all_different" else 5
    values = values_of(indices, rest)
    sums = summed(values, jnp.asarray(indices), rows)
    assert sums.shape == (rows, *rest) and sums.dtype == jnp.float32
    np.testing.assert_allclose(
        sums, expected(values, indices, rows), rtol=2e-6, atol=1e-5
    )


def test_narrow_values_are_summed_in_fp32():
    """In bf16, 512 ones and a thousand times 1/64 would stop at 512."""
    values = jnp.concatenate([jnp.ones(512), jnp.full(1024, 1 / 64)])
    sums = summed(values.astype(jnp.bfloat16), jnp.zeros(1536, jnp.int32), 1)
    assert sums.dtype == jnp.bfloat16 and float(sums[0]) == 528
    values = jnp.full(1000, 1 + 1 / 128, jnp.bfloat16)
    sums = summed(values, jnp.zeros(1000, jnp.int32), 1, jnp.dtype(jnp.float32))
    assert sums.dtype == jnp.float32 and float(sums[0]) == 1000 * (1 + 1 / 128)


def test_narrow_indices():
    """Places that are dropped have numbers that do not fit them."""
    indices, values = np.arange(200) % 100, values_of(range(200), (3,))
    sums = summed(values, jnp.asarray(indices, jnp.int8), 120)
    np.testing.assert_allclose(sums, expected(values, indices, 120), atol=1e-6)


def test_no_values():
    assert (
        row_sums(jnp.zeros((0, 2)), jnp.zeros(0, jnp.int32), 3).tolist() == [[0, 0]] * 3
    )


def test_the_type_of_the_result():
    """Cotangents come in it, and are added up in that of the table."""
    random = np.random.default_rng(0)
    table = jnp.asarray(random.normal(size=(5, 4)), jnp.float32)
    indices = jnp.asarray(random.integers(0, 5, (2, 300)), jnp.int32)
    dy = jnp.asarray(random.normal(size=(2, 300, 4)), jnp.bfloat16)

    def look_up(table):
        return gather(
            table, indices, TABLE_AXES, OUT_AXES, fsdp_tp(), dtype=jnp.bfloat16
        )

    @jax.jit
    def with_gradient(table, dy):
        found, pull = jax.vjp(look_up, table)
        return found, *pull(dy)

    found, sums = with_gradient(table, dy)
    assert (found == table.astype(jnp.bfloat16)[indices]).all()
    assert sums.dtype == jnp.float32
    want = expected(dy.reshape(-1, 4), indices.reshape(-1).tolist(), 5)
    np.testing.assert_allclose(sums, want, rtol=2e-6, atol=1e-5)


def gradient(devices, axis, rows, features, tokens):
    """Of a table by a loss of what is looked up, for `tokens` of each device."""
    mesh, rules = make_mesh({axis: len(devices)}, devices), RULES[axis]()

    def loss(table, indices, dy):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            found = gather(table, indices, TABLE_AXES, OUT_AXES, rules)
        return (found * dy).sum()

    def place(spec):
        return jax.sharding.NamedSharding(mesh, spec)

    shape = (len(devices), tokens)
    stored = place(rules.spec(*TABLE_AXES))
    arguments = (
        jax.ShapeDtypeStruct((rows, features), jnp.float32, sharding=stored),
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place(rules.spec("batch"))),
        jax.ShapeDtypeStruct(
            (*shape, features), jnp.float32, sharding=place(rules.spec(*OUT_AXES))
        ),
    )
    return jax.jit(jax.grad(loss), out_shardings=stored), arguments


@pytest.mark.skipif(sys.platform != "linux", reason="the compiler is for Linux")
@pytest.mark.parametrize(
    ("axis", "rows", "collective"),
    [
        ("fsdp", 65536, "all-to-all"),  # more rows than tokens: columns in place
        ("tensor", 512, None),
        *exhaustive(
            ("data", 512, "all-reduce"),
            ("fsdp", 512, "reduce-scatter"),  # more tokens than rows: whole rows
        ),
    ],
)
def test_no_sum_depends_on_what_comes_first(axis, rows, collective):
    """On a GPU a scatter whose indices may be equal adds in any order."""
    found = compile_for_h200(gradient, axis, rows, 256, 1024, count=4)
    scatters = re.findall(r" scatter\(.*", found.hlo)
    assert scatters and all("unique_indices=true" in line for line in scatters)
    if collective is not None:
        assert found.count(collective) == 1


@pytest.mark.parametrize(
    ("kind", "batch", "sizes", "rows"),
    [
        ("auto", 8, {"data": 2, "fsdp": 2, "tensor": 2}, 16),
        ("auto", 2, {"fsdp": 8}, 512),
        ("explicit", 8, {"data": 2, "fsdp": 2, "tensor": 2}, 512),
        ("explicit", 8, {"fsdp": 8}, 16),
        *exhaustive(
            ("auto", 8, {"fsdp": 8}, 512),
            ("auto", 2, {"data": 2, "fsdp": 2, "tensor": 2}, 512),
            ("auto", 2, {"fsdp": 8}, 16),
            ("explicit", 8, {"fsdp": 8}, 512),
        ),
    ],
)
def test_gradients_on_meshes(kind, sizes, rows, batch):
    """Those of one device; Auto axes need not divide the batch."""
    mesh, rules = make_mesh({**sizes, "axis_type": kind}), fsdp_tp()
    random = np.random.default_rng(rows)
    table = jnp.asarray(random.normal(size=(rows, 16)), jnp.float32)
    indices = jnp.asarray(random.integers(0, rows, (batch, 12)), jnp.int32)
    dy = jnp.asarray(random.normal(size=(batch, 12, 16)), jnp.float32)

    def loss(table, indices, dy):
        return (gather(table, indices, TABLE_AXES, OUT_AXES, rules) * dy).sum()

    want = expected(dy.reshape(-1, 16), indices.reshape(-1).tolist(), rows)
    axes = TABLE_AXES, OUT_AXES[:2], OUT_AXES
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, jax.sharding.NamedSharding(mesh, rules.spec(*names)))
            if batch == 8
            else x
            for x, names in zip((table, indices, dy), axes, strict=True)
        ]
        sums = jax.jit(jax.grad(loss))(*placed)
    np.testing.assert_allclose(sums, want, rtol=2e-6, atol=1e-5)
