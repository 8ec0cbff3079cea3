"""The order of blocks: every block once, and equal work for all multiprocessors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import H200
from pallas_kernels.tile_sparse_matmul import mosaic_gpu
from pallas_kernels.tile_sparse_matmul.config import Problem, heuristic
from pallas_kernels.tile_sparse_matmul.order import balanced_turns, shares


def schedules(tiles, tokens, k, workers):
    """Places in the order and clusters of tokens of each worker, [W, rounds].

    They are those of the kernel, which counts with scalars of a GPU; -1 past the end.
    """
    problem = Problem(
        m=tokens,
        n=128 * tiles,
        k=k,
        room=512,
        tile=128,
        granularity=1,
        dtype=jnp.dtype(jnp.bfloat16),
        x_major=True,
        y_major=True,
    )
    cut = mosaic_gpu._Cut(
        problem=problem,
        config=heuristic(problem, H200),
        tokens_stored=tokens,
        has_bias=False,
        activation=None,
        equal_steps=None,
    )
    refs = {"order": jnp.arange(tiles), "counts": jnp.arange(tiles)}
    rounds = -(-cut.blocks // workers)

    def one(_):
        schedule = mosaic_gpu._Schedule(cut, refs)
        there = jnp.arange(rounds) < schedule.mine
        places, _, clusters = jax.vmap(schedule.locate)(jnp.arange(rounds))
        return jnp.where(there, places, -1), jnp.where(there, clusters, -1)

    found = jax.vmap(one, axis_name="worker")(jnp.arange(workers))
    return cut, *map(np.asarray, found)


@pytest.mark.parametrize(
    ("tiles", "tokens", "k"),
    [
        (16, 4096, 4096),  # one band
        (16, 4096, 16384),  # bands that turn
        (28, 4096, 16384),  # bands and rounds that turn
        (20, 8192, 8192),
        (77, 2000, 4096),
        (133, 256, 4096),  # one cluster of tokens
    ],
)
def test_every_block_is_computed_once_and_the_work_is_equal(tiles, tokens, k):
    cut, places, clusters = schedules(tiles, tokens, k, 132)
    there = places >= 0
    blocks = places * cut.token_clusters + clusters
    assert sorted(blocks[there]) == [*range(tiles * cut.token_clusters)]
    rng = np.random.default_rng(0)
    counts = np.sort(rng.uniform(0.3, 1, tiles))[::-1]
    work = np.where(there, counts[places], 0).sum(1)
    turns = balanced_turns(
        tiles,
        cut.token_clusters,
        132,
        min(cut.config.group, cut.token_clusters),
        resident=2 * tokens * k <= 32 * 2**20,
    )
    np.testing.assert_allclose(
        work / work.mean(), shares(turns, counts, cut.token_clusters, 132), rtol=1e-6
    )


@pytest.mark.parametrize("clusters", [8, 16, 32])
@pytest.mark.parametrize("resident", [True, False])
def test_uneven_tiles_cost_little_more_than_even_ones(clusters, resident):
    """Falling counts, over numbers of tiles that fill the last round well enough."""
    for tiles in range(8, 120):
        filled = tiles * clusters / 132
        if filled < 1.9 or np.ceil(filled) / filled > 1.1:
            continue
        counts = np.linspace(1, 0.3, tiles)
        turns = balanced_turns(tiles, clusters, 132, 4, resident)
        found = shares(turns, counts, clusters, 132).max()
        assert found < (1.17 if filled < 4 else 1.1), (tiles, turns)
        assert turns.group <= 8 or resident


def test_one_multiprocessor_and_one_tile():
    for tiles, clusters, workers in ((1, 1, 1), (1, 5, 2), (3, 1, 2)):
        turns = balanced_turns(tiles, clusters, workers, 1, resident=True)
        assert shares(turns, np.ones(tiles), clusters, workers).sum() == workers
