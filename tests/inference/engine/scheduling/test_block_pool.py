"""Pages: who holds which, which can be found, which are forgotten first."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxscale.inference.engine.scheduling.block_pool import ROOT, BlockPool, page_hash


def names(*tokens, salt=""):
    found = []
    for token in tokens:
        found.append(page_hash(found[-1] if found else ROOT, [token], salt))
    return found


def test_names_say_everything_before_them():
    assert names(1, 2, 3)[:2] == names(1, 2)
    assert names(1, 2)[1] != names(3, 2)[1]
    assert names(1, 2)[1] != names(1, 2, salt="x")[1]
    assert len({len(name) for name in names(1, 2**31 - 1)}) == 1


def test_the_end_of_the_oldest_is_forgotten_first():
    pool = BlockPool(num_pages=4, page_size=1)
    old, new = pool.allocate(2), pool.allocate(2)
    for pages, tokens in ((old, (1, 2)), (new, (3, 4))):
        for page, name in zip(pages, names(*tokens), strict=True):
            pool.name(page, name)
    pool.release(old)
    pool.release(new)
    assert pool.num_cached == 4
    pool.hold(pool.find(names(1))), pool.release(old[:1])  # found, so the newest now
    taken = [pool.allocate(1)[0] for _ in range(4)]
    assert taken == [old[1], new[1], new[0], old[0]]
    assert pool.find(names(1, 2)) == pool.find(names(3, 4)) == []


def test_equal_pages_are_found_once():
    pool = BlockPool(num_pages=3, page_size=1)
    first, second = pool.allocate(2)
    pool.name(first, names(1)[0])
    pool.name(second, names(1)[0])
    assert pool.find(names(1, 2)) == [first]
    pool.release([second])
    assert (pool.num_free, pool.num_cached) == (2, 0)
    pool.release([first], keep=False)
    assert (pool.num_free, pool.num_cached, pool.find(names(1))) == (3, 0, [])


def test_misuse_is_noticed():
    pool = BlockPool(num_pages=2, page_size=1)
    pages = pool.allocate(2)
    with pytest.raises(ValueError, match="1 pages were asked for, 0 are available"):
        pool.allocate(1)
    pool.release(pages)
    with pytest.raises(ValueError, match="page 1 is released, but nobody holds it"):
        pool.release([1])
    with pytest.raises(ValueError, match="page 0 is free, or has another name"):
        pool.name(0, b"name")
    with pytest.raises(ValueError, match="num_pages 0 must be an integer of at least"):
        BlockPool(num_pages=0, page_size=1)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 2**16), min_size=5, max_size=60))
def test_every_page_is_in_one_state(steps):
    """A pool and a list of who holds what agree, whatever happens."""
    pool = BlockPool(num_pages=6, page_size=1)
    holders = []
    for step in steps:
        kind, number = step % 5, step // 5
        if kind == 0 and pool.num_available >= number % 3:
            holders.append(pool.allocate(number % 3))
        elif kind == 1 and holders:
            pool.release(holders.pop(number % len(holders)), keep=bool(number % 3))
        elif kind == 2 and holders:
            pages = holders[number % len(holders)]
            for page, name in zip(pages, names(number % 2, 7), strict=False):
                if pool._names[page] is None:
                    pool.name(page, name)
        elif kind == 3:
            found = pool.find(names(number % 2, 7))
            pool.hold(found)
            holders.append(found)
        elif kind == 4 and number % 11 == 0:
            pool.clear()
            assert pool.num_cached == 0
        held = [page for pages in holders for page in pages]
        assert [pool.holders(p) for p in range(6)] == [held.count(p) for p in range(6)]
        assert pool.num_held == len(set(held))
        assert pool.num_free + pool.num_cached + pool.num_held == 6
        assert set(pool._pages.values()) == {
            page for page, name in enumerate(pool._names) if name is not None
        }
