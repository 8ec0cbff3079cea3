"""What the interpreter runs in place of the kernel's own instructions."""

import numpy as np

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  tickets, rows
from pallas_kernels.paged_attention import operands
from tests.interpreter import register_inline


def _search_split(lengths, num_new, number, found, *more, closure):
    cut, rows = closure["cut"], []
    for row, pair in enumerate(zip(lengths, num_new, strict=True)):
        _, count, _ = cut.splits(*map(np.int32, pair), ops=np)
        rows += [(row, i) for i in range(count)]
    row, within = rows[number] if number < len(rows) else (-1, 0)
    found[:] = row, within, lengths[max(row, 0)], num_new[max(row, 0)], *more


def _ticket_and_count(counters, at, counts, mailbox):
    ticket, others = counters[0], counters[at]
    counters[0] += 1
    counters[at] += counts
    return np.int32(ticket), np.int32(others)


def _copy_ids(table, first, stop, target, closure):
    at = first + np.arange(len(target))
    ids = np.where(at < stop, table[np.minimum(at, len(table) - 1)], -1)
    target[:] = np.where((ids >= 0) & (ids < closure["num_pages"]), ids, -1)


def _store_leading_rows(ref, values, stop):
    ref[:stop] = values[: min(stop, len(ref))]


def _leading_rows(ref, values, stop):
    return (slice(0, min(int(stop), len(ref))),)


def _store_as_rows(ref, values):
    ref[:] = values.T


def _load_wide_keys(ref):
    keys = ref[:, operands.in_order_of_keys(ref.shape[1])].astype(np.float16)
    return tuple(np.split(keys, keys.shape[1] // 64, axis=1))


def _load_wide_values(ref, *bounds):
    first, stop = bounds or (0, len(ref))
    at = np.arange(len(ref))
    held = ((first <= at) & (at < stop))[:, None]
    values = np.where(held, ref, np.zeros_like(ref)).astype(np.float16)
    return values[:, operands.in_order_of_values(ref.shape[1])].T


def _store_leading_columns(ref, values, stop, closure):
    rows = values.T[: min(stop, len(ref))]
    if closure["interleaved"]:
        rows[:, operands.in_order_of_values(ref.shape[1])] = rows.copy()
    ref[:stop] = rows


register_inline("find_largest", lambda values, of_warps: values.max(axis=0))
register_inline("add_columns", lambda values, of_warps: values.sum(axis=0))
register_inline("load_wide_keys", _load_wide_keys)
register_inline("load_wide_values", _load_wide_values)
register_inline("store_as_rows", _store_as_rows, writes=(0,))
register_inline(
    "store_leading_columns",
    _store_leading_columns,
    writes=(0,),
    part=_leading_rows,
)
register_inline("search_split", _search_split, writes=(3,))
register_inline("ticket_and_count", _ticket_and_count, writes=(0,), flags=(0,))
register_inline("copy_ids", _copy_ids, writes=(3,))
register_inline(
    "store_leading_rows", _store_leading_rows, writes=(0,), part=_leading_rows
)
