"""What the interpreter runs in place of the kernels' own instructions."""

import jax.numpy as jnp
import numpy as np

import tests.pallas_kernels.fp8_operands.stand_ins  # noqa: F401  registers them
from tests.interpreter import register_inline


def _rows(first, stop, size):
    first = min(max(0, int(first)), size)
    return slice(first, min(max(first, int(stop)), size))


def _store_some_rows(ref, values, first, stop, *column):
    place = _stored_part(ref, values, first, stop, *column)
    ref[place] = values[place[0], : ref[place].shape[1]] if column else values[place]


def _stored_part(ref, values, first, stop, column=None):
    rows = _rows(first, stop, len(ref))
    if column is None:
        return (rows,)
    return rows, slice(int(column), min(int(column) + values.shape[1], ref.shape[1]))


def _load_some_rows(ref, first, stop, closure):
    values = np.full(len(ref), np.float32(closure["otherwise"]))
    rows = _rows(first, stop, len(ref))
    values[rows] = ref[rows]
    return values


def _store_some_columns(ref, values, first):
    ref[:, int(first) : int(first) + values.shape[1]] = values


def _stored_columns(ref, values, first):
    return slice(0, len(ref)), slice(int(first), int(first) + values.shape[1])


def _next_ticket(counter, mailbox):
    mailbox[0] = counter[0]
    counter[0] += 1
    return np.int32(mailbox[0])


def _read_one_number(ref):
    return np.int32(ref[0])


def _copy_one_line(source, target, last):
    target[:-1] = source
    target[-1] = last


def _search_tile(bounds, number, closure):
    ends = np.append(bounds[1:], closure["tokens"])
    counts = -(-(ends - bounds) // closure["block"])
    order = np.argsort(-counts, stable=True)
    tiles = [(e, i) for e in order for i in range(counts[e])]
    sequence, index = tiles[number] if number < len(tiles) else (-1, 0)
    return np.int32(sequence), np.int32(index)


def _measure_distances(values, shift):
    rows, columns = np.indices(values.shape)
    return np.abs(columns - rows + int(shift)).astype(np.float32)


def _mask_outside_band(values, *bounds, closure):
    rows, columns = np.indices(values.shape)
    indices = rows, rows, columns, columns, columns - rows, columns - rows
    keep, bounds = np.ones(values.shape, bool), iter(bounds)
    for i, (index, given) in enumerate(zip(indices, closure["given"], strict=True)):
        if given:
            keep &= index <= next(bounds) if i % 2 else next(bounds) <= index
    return np.where(keep, values, np.float32(-np.inf))


def _add_shared_row(values, row, closure):
    return values * np.float32(closure["factor"]) + row


def _side_by_side(chunks):
    return np.concatenate([np.asarray(x, np.float32) for x in chunks], axis=1)


def _multiply_values(sums, values, *weights):
    return sums + _side_by_side(weights) @ _side_by_side(values)


def _multiply_keys(sums, queries, keys, *held):
    queries = _side_by_side([*held, *queries[len(held) :]])
    return sums + queries @ _side_by_side(keys).T


def _add_diagonals(products, base, part, table, boxes, closure):
    terms, boxes = closure["terms"], iter(boxes)
    table = table.reshape(-1)
    rows, columns = np.indices(products.shape)
    block = base + terms.reach
    mine = block + part * terms.rows
    entries = table[mine + rows - columns]
    sums = products.copy()
    if terms.by_query:
        first = table[mine - terms.keys + 1]
        first = min(first, terms.num_entries - terms.query_width) // 8 * 8
        sums += next(boxes)[rows, entries - first].astype(np.float32)
    if terms.by_key:
        first = table[block - terms.keys + 1]
        first = min(first, terms.num_entries - terms.key_width) // 8 * 8
        sums += next(boxes)[columns, entries - first].astype(np.float32)
    return sums


def _store_diagonal_sums(ds, table, gradient, carry, *numbers, closure):
    terms, of_keys, table = closure["terms"], closure["of_keys"], table.reshape(-1)
    base, first_row, stop_row, first, stop, begins, ends = map(int, numbers)
    sign = 1 if of_keys else -1
    tile = (ds.T if of_keys else ds).astype(np.float32)
    rows = _rows(first_row, stop_row, len(tile))
    columns = np.arange(first - 1, stop + 1)
    for row in range(rows.start, rows.stop):
        entries = table[base + terms.reach + sign * (columns - row)]
        total = np.float32(0) if begins else carry[row]
        for at, column in enumerate(range(first, stop), 1):
            total = tile[row, column] + total * (entries[at] == entries[at - 1])
            is_last = ends and column == stop - 1
            if is_last or entries[at] != entries[at + 1]:
                gradient[row, entries[at]] = total
        carry[row] = total


def _summed_rows(ds, table, gradient, carry, base, first, stop, *numbers):
    return (_rows(first, stop, len(ds)),)


def _round_to_operand(values):
    """Lanes keep what they have: pairs of columns 8 apart become four in a row."""
    values = np.clip(values, -448, 448).astype(jnp.float8_e4m3fn)
    halves = values.reshape(len(values), -1, 2, 4, 2)
    return halves.swapaxes(2, 3).reshape(values.shape)


register_inline(
    "add_own_columns", lambda values: values.reshape(len(values), -1, 8).sum(axis=1)
)
register_inline("multiply_values", _multiply_values, wgmma=True)
register_inline("multiply_keys", _multiply_keys, wgmma=True)
register_inline("add_diagonals", _add_diagonals)
register_inline("flatten_registers", lambda values: values.reshape(16, 256))
register_inline("unflatten_registers", lambda values: values.reshape(64, 64))
register_inline("load_some_rows", _load_some_rows)
register_inline("store_some_rows", _store_some_rows, writes=(0,), part=_stored_part)
register_inline(
    "store_some_columns", _store_some_columns, writes=(0,), part=_stored_columns
)
register_inline("store_sums", _store_diagonal_sums, writes=(2, 3), part=_summed_rows)
register_inline("next_ticket", _next_ticket, writes=(0, 1))
register_inline("search_tile", _search_tile)
register_inline("mask_outside_band", _mask_outside_band)
register_inline("measure_distances", _measure_distances)
register_inline("add_shared_row", _add_shared_row)
register_inline("vote_of_warp", np.any)
register_inline("read_one_number", _read_one_number)
register_inline("copy_one_line", _copy_one_line, writes=(1,))
register_inline("round_to_operand", _round_to_operand)
