"""Tiling of the Hopper kernel of paged attention."""

import dataclasses


BLOCK = 64
"""Keys per step. With 128, fewer steps are in flight, and nothing is gained."""

MOST_PAGES = 64
"""Pages of a split by default: with those of a last split that is longer, a warpgroup
copies the numbers of 96 at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionConfig:
    """Tiling of the work, and its distribution over warpgroups."""

    split: int | None = None
    """Tokens per split, a multiple of 64; None is `default_split`. Splits of a sequence
    run in parallel and are combined in order. They start at multiples of this number,
    so that the result of a sequence does not depend on what other sequences hold; with
    a number given here, not on how many they are, either. The last split is up to half
    a split longer or shorter."""
    teams: int | None = None
    """Pairs of a copying and a computing warpgroup per block; each pair takes splits of
    its own. None is 2, and 1 with head dim 256. 3 is for fp8 pages, head dim 128 and up
    to 8 queries per key/value head: a step waits for one thing after the other, and
    has half of the bytes to hide that."""
    slots: int | None = None
    """Tiles of 64 keys or values in the shared memory of a team; None is as many as
    fit, up to 8."""

    def __post_init__(self) -> None:
        if self.split is not None and (self.split < BLOCK or self.split % BLOCK):
            raise ValueError(
                f"split {self.split}, expected a positive multiple of {BLOCK}"
            )
        if self.teams not in (None, 1, 2, 3):
            raise ValueError(f"teams {self.teams}, expected None, 1, 2 or 3")
        if self.slots is not None and self.slots < 2:
            raise ValueError(f"slots {self.slots}, expected None or at least 2")


def default_split(rows: int, kv_heads: int, page: int, num_sms: int) -> int:
    """Tokens per split where none are named.

    A split has a fixed cost, and a row a sum of its splits; but while there are fewer
    splits than teams, more of them read memory faster. So a context of 4,096 tokens is
    cut into as many as fill the GPU once, of 512 to 2,048 tokens: with longer ones a
    row that is far longer than the others would end alone. The number of tiles, one a
    row and key/value head, decides, and no length: bits of a row are the same whatever
    the others of the call hold. For 4,096 tokens of 8 key/value heads of 128 on 132
    multiprocessors splits of 512, 1,024 and 2,048 tokens took, in 8 bits, 19, 26 and
    42 us with one row, 34, 32 and 45 with 8, and 94, 90 and 86 with 32; in 16 bits 43
    and 40 with 8, and 135, 135 and 133 with 32.

    Args:
        rows: B, of the call, whether they are real or not.
        kv_heads: K.
        page: G; a split has at most `MOST_PAGES` pages.
        num_sms: multiprocessors, each with two teams.
    """
    share = rows * kv_heads / (2 * num_sms)  # of the teams, if each had a tile
    split = 2048 if share > 0.375 else 1024 if share > 0.1875 else 512
    return min(split, MOST_PAGES * page)
