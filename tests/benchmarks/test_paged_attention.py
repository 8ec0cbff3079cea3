"""The benchmark of paged attention: its layouts, its state and its quick run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import paged_attention as benchmark
from benchmarks.measure import command
from tests.tolerances import RELATIVE, relative_error


TINY = benchmark.case(benchmark.QUICK[0]).params


def test_steps_go_on_in_pages_of_their_own():
    """Pages are given up by a call, the inputs are not."""
    arrays = benchmark.inputs(TINY, jax.random.key(0))
    step = benchmark.ours("xla").make(TINY)
    first, again = step(*arrays), step(*arrays)
    np.testing.assert_array_equal(first, again)
    wanted = benchmark.definition(TINY)(*arrays)
    assert relative_error(first, wanted) < RELATIVE[first.dtype]


def test_baselines_get_all_keys_and_values():
    spec = benchmark.QUICK[0]
    q, kv, pages, _, table, _ = arrays = benchmark.inputs(TINY, jax.random.key(1))
    k, v = benchmark.contiguous(spec, kv, pages, table)
    assert k.shape == (spec.batch, spec.context + 1, spec.num_kv_heads, spec.head_dim)
    out = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)))
    wanted = benchmark.definition(TINY)(*arrays)
    assert relative_error(out, wanted) < RELATIVE[jnp.dtype(jnp.bfloat16)]


def test_quick_run(capsys):
    assert command.main(benchmark.BENCHMARK, ["--quick", "--impl", "xla"]) == 0
    said = capsys.readouterr().out
    for spec in benchmark.QUICK:
        assert spec.name in said
    assert "copy_share" in said


def test_baselines_refuse_what_they_cannot_do():
    for spec in benchmark.QUICK[1:]:
        with pytest.raises(NotImplementedError, match="one new token"):
            benchmark.plain(benchmark.case(spec).params)
