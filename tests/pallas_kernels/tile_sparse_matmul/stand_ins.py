"""Numpy stand-ins for the inline functions of the gather; import to register them."""

import numpy as np

from tests.interpreter import register_inline


def _places(held, per_warp):
    """Row of the gather of each index that the threads hold, [4, lanes, held]."""
    lanes = np.arange(32) % min(per_warp, 32)
    return (
        np.arange(4)[:, None, None] * per_warp
        + lanes[None, :, None] * held
        + np.arange(held)
    )


def load_row_indices(rows, closure):
    return rows[_places(closure["held"], closure["per_warp"]).reshape(-1)]


def gather_into_smem(x, indices, start, smem, closure):
    places = _places(closure["held"], closure["per_warp"]).reshape(-1)
    rows = np.empty(smem.shape[0], np.int64)
    rows[places] = indices
    width = 8 * closure["chunks"]
    part = x[rows, int(start) : int(start) + width]
    assert closure["masked"] or part.shape[1] == width
    smem[...] = np.nan  # what is left alone must not matter
    smem[:, :width] = 0
    smem[:, : part.shape[1]] = part


register_inline("load_row_indices", load_row_indices)
register_inline("gather_into_smem", gather_into_smem, writes=(3,))
register_inline("commit_gather_group", lambda: None)
register_inline("wait_gather_groups", lambda: None)
