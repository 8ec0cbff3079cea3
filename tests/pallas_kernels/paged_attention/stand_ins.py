"""What the interpreter runs in place of the kernel's own instructions."""

import numpy as np

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  tickets, rows
from tests.interpreter import register_inline


def _search_split(lengths, num_new, number, head, found, closure):
    cut, rows = closure["cut"], []
    for row, pair in enumerate(zip(lengths, num_new, strict=True)):
        _, count, _ = cut.splits(*map(np.int32, pair), ops=np)
        rows += [(row, i) for i in range(count)]
    row, within = rows[number] if number < len(rows) else (-1, 0)
    found[:] = row, within, lengths[max(row, 0)], num_new[max(row, 0)], head


def _count_and_fence(counter, mailbox):
    mailbox[0] = counter[0]
    counter[0] += 1
    return np.int32(mailbox[0])


def _copy_ids(table, first, stop, target, closure):
    at = first + np.arange(len(target))
    ids = np.where(at < stop, table[np.minimum(at, len(table) - 1)], -1)
    target[:] = np.where((ids >= 0) & (ids < closure["num_pages"]), ids, -1)


def _store_leading_rows(ref, values, stop):
    ref[:stop] = values[: min(stop, len(ref))]


def _leading_rows(ref, values, stop):
    return (slice(0, min(int(stop), len(ref))),)


register_inline("search_split", _search_split, writes=(4,))
register_inline("count_and_fence", _count_and_fence, writes=(0, 1))
register_inline("copy_ids", _copy_ids, writes=(3,))
register_inline(
    "store_leading_rows", _store_leading_rows, writes=(0,), part=_leading_rows
)
