"""Tiling of the Hopper kernel of paged attention."""

import dataclasses


__all__ = ["BLOCK", "PagedAttentionConfig"]

BLOCK = 64
"""Keys of a step. With 128 fewer steps are on their way, and nothing is gained."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttentionConfig:
    """Tiling of the work, and its distribution among warpgroups."""

    split: int = 512
    """Tokens of a split, a multiple of 64. Splits of a row run side by side and are
    added in their order. They start at multiples of this number, so that what a row
    gets depends neither on the other rows nor on how many there are; the last has up to
    half as many more or less."""
    teams: int | None = None
    """Pairs of a warpgroup that copies and one that computes, in a block: each takes
    splits of its own. None takes 2, and 1 with head dim 256."""
    slots: int | None = None
    """Tiles of 64 keys or values that fit in the shared memory of a team; None takes
    as many as fit, up to 8."""

    def __post_init__(self) -> None:
        if self.split < BLOCK or self.split % BLOCK:
            raise ValueError(
                f"split {self.split}, expected a positive multiple of {BLOCK}"
            )
        if self.teams not in (None, 1, 2):
            raise ValueError(f"teams {self.teams}, expected None, 1 or 2")
        if self.slots is not None and self.slots < 2:
            raise ValueError(f"slots {self.slots}, expected None or at least 2")
