"""Tiling of the Hopper kernel of paged attention."""

import dataclasses


BLOCK = 64
"""Keys per step. With 128, fewer steps are in flight, and nothing is gained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionConfig:
    """Tiling of the work, and its distribution over warpgroups."""

    split: int = 512
    """Tokens per split, a multiple of 64. Splits of a sequence run in parallel and are
    combined in order. They start at multiples of this number, so that the result of a
    sequence depends neither on the other sequences nor on their number; the last split
    is up to half a split longer or shorter."""
    teams: int | None = None
    """Pairs of a copying and a computing warpgroup per block; each pair takes splits of
    its own. None is 2, and 1 with head dim 256. 3 is for fp8 pages, head dim 128 and up
    to 8 queries per key/value head: a step waits for one thing after the other, and
    has half of the bytes to hide that."""
    slots: int | None = None
    """Tiles of 64 keys or values in the shared memory of a team; None is as many as
    fit, up to 8."""

    def __post_init__(self) -> None:
        if self.split < BLOCK or self.split % BLOCK:
            raise ValueError(
                f"split {self.split}, expected a positive multiple of {BLOCK}"
            )
        if self.teams not in (None, 1, 2, 3):
            raise ValueError(f"teams {self.teams}, expected None, 1, 2 or 3")
        if self.slots is not None and self.slots < 2:
            raise ValueError(f"slots {self.slots}, expected None or at least 2")
