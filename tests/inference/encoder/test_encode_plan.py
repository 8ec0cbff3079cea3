"""Rows of texts are nearly full, whatever the lengths, and of few sizes."""

import itertools
import math

import numpy as np
import pytest

from jaxscale.inference.encoder.encode_plan import budgets, capacities, plan_rows


def lists_of_lengths():
    """Some that leave rows half empty where they can, and random ones."""
    rng = np.random.default_rng(0)
    for most in (512, 1024, 8192, 16384):
        yield [most // 2 + 1] * 7  # two never share a row
        yield [most // 3 + 1] * 5
        yield [1] * (most + 1)
        yield [2] * most
        yield [most, *[1] * 50]
        for size in budgets(most)[:-1]:
            yield [size + 1]  # one token too many
            yield [size // 2 + 1] * 2
    for _ in range(200):
        longest = int(rng.choice([3, 20, 128, 512, 4096]))
        yield (1 + rng.integers(longest, size=rng.integers(1, 80))).tolist()
    for _ in range(20):
        yield np.minimum(1 + rng.zipf(1.3, 200), 512).tolist()


@pytest.mark.parametrize("token_budget", [16384, 8192, 2000])
def test_no_row_wastes_more_than_15_percent(token_budget):
    sizes = budgets(token_budget)
    for lengths in lists_of_lengths():
        if max(lengths) > token_budget:
            continue
        plan = plan_rows(lengths, token_budget)
        assert sorted(itertools.chain(*plan.rows)) == list(range(len(lengths)))
        assert {*plan.budgets} <= {*sizes}
        assert len(plan.rows) <= 1 + 2 * sum(lengths) // token_budget
        for row, size, room in zip(
            plan.rows, plan.budgets, plan.capacities, strict=True
        ):
            used = sum(lengths[i] for i in row)
            assert used <= size and len(row) <= room and room in capacities(size)
            assert size - used <= 0.15 * size or (used < 109 and size == 128), lengths


def test_the_batches_of_the_paper():
    """4,939 tokens of 16 texts were once computed as 16,384."""
    lengths = [512, *[295] * 14, 297]
    plan = plan_rows(lengths, 16384)
    assert plan.num_tokens == 4939 and plan.budgets == (5504,)
    assert plan.capacities == (48,)


def test_devices_share_rows_evenly():
    """In as few steps as there can be, each of the size that its fullest row needs."""
    rng = np.random.default_rng(1)
    for count in (1, 3, 4, 50, 400):
        lengths = (1 + rng.integers(512, size=count)).tolist()
        plan = plan_rows(lengths, 4096, parts=4)
        assert sorted(itertools.chain(*plan.rows)) == list(range(count))
        groups = [plan.budgets[i : i + 4] for i in range(0, len(plan.budgets), 4)]
        assert all(len({*group}) == 1 for group in groups)
        assert len(groups) <= -(-len(plan_rows(lengths, 4096).rows) // 4)
        if count >= 50:
            assert plan.num_tokens > 0.8 * 4 * sum(group[0] for group in groups)


def test_texts_that_fit_share_one_row():
    """The smallest size that holds them, the longest first, in order on a tie."""
    rng = np.random.default_rng(1)
    for budget, count in itertools.product((64, 300, 4096), (1, 2, 16, 60)):
        lengths = rng.integers(1, max(2, budget // count + 1), count).tolist()
        plan = plan_rows(lengths, budget)
        order = sorted(range(count), key=lambda i: (-lengths[i], i))
        size = min(size for size in budgets(budget) if size >= sum(lengths))
        room = min(room for room in capacities(size) if room >= count)
        assert plan.rows == (tuple(order),) and plan.lengths == tuple(lengths)
        assert (plan.budgets, plan.capacities) == ((size,), (room,))


def test_budgets_are_few():
    for size in (1, 5, 128, 129, 512, 1000, 2049, 16384, 100_000):
        sizes = budgets(size)
        assert sizes[-1] == size and len(sizes) <= 3 + 5 * math.log2(max(size / 128, 1))
        assert all(a < b for a, b in itertools.pairwise(sizes))
        assert all(a % 16 == 0 and a >= 128 for a in sizes[:-1])
    assert len(budgets(16384)) == 35
