"""How the Hopper kernel of layer normalization is cut."""

import dataclasses


__all__ = ["LayerNormConfig"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig:
    """How the kernel shares the rows among warps."""

    rows: int = 4
    """Rows that a block of four warps has in registers at a time; a multiple of 4."""
    blocks_per_sm: int = 0
    """0: a block for each group of rows. Otherwise so many blocks a multiprocessor stay
    and take one group after another."""
    stages: int = 0
    """0: rows are loaded into registers. Otherwise the copy engine brings so many
    groups at a time into shared memory."""

    def __post_init__(self) -> None:
        if self.rows < 4 or self.rows % 4:
            raise ValueError(f"rows {self.rows}, expected a positive multiple of 4")
        if not 0 <= self.blocks_per_sm <= 16:
            raise ValueError(
                f"blocks_per_sm {self.blocks_per_sm}, expected 0 to 16: so many blocks"
                " of four warps fit in a multiprocessor"
            )
        if self.stages < 0 or (self.stages and not self.blocks_per_sm):
            raise ValueError(
                f"stages {self.stages} with blocks_per_sm {self.blocks_per_sm},"
                " expected 0, or a positive number with blocks that stay"
            )
