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


def places_of(words):
    """The rows [64,32] of 64 that wgmma.sp multiplies, of the metadata [128] of a step.

    As CUTLASS has it (``ELayout_64x32``): thread (2,2,8,4) and bits (16,2) lie at
    column + 64 row = (1024,0,1,16) and (64,8); the second 2 are the two instructions.
    """
    places = np.full((64, 32), -1)
    for thread, word in enumerate(words.view(np.uint32)):
        sixteen, instruction, column, warp = np.unravel_index(
            thread, (2, 2, 8, 4), order="F"
        )
        for upper in range(2):
            for four in range(4):
                at = 1024 * sixteen + column + 16 * warp + 64 * 4 * four + 8 * upper
                row = 32 * instruction + at // 64
                bits = int(word) >> (16 * upper + 4 * four)
                pair = row + (bits & 3), row + (bits >> 2 & 3)
                assert pair[0] < pair[1]
                places[at % 64, row // 2 : row // 2 + 2] = pair
    return places


def multiply_24(sums, w, words, x):
    sums, x, w = sums.copy(), x.astype(np.float32), w.astype(np.float32)
    for block, metadata in enumerate(words.reshape(-1, 128)):
        mine = slice(64 * block, 64 * (block + 1))
        sums[mine] += np.einsum("gk,gkm->gm", w[mine], x[places_of(metadata)])
    return sums


register_inline("start_sums_24", lambda closure: np.zeros(closure["shape"], np.float32))
register_inline("load_words_24", lambda metadata: metadata.reshape(-1), wgmma=True)
register_inline("multiply_24", multiply_24, wgmma=True)
register_inline("keep_words_24", lambda words: None)
register_inline("finish_sums_24", lambda sums: sums)
