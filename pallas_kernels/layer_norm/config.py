"""Tiling of the Hopper kernel of layer normalization."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormConfig:
    """Distribution of rows over warps."""

    rows: int = 4
    """Rows that a block of four warps holds in registers; a multiple of 4."""

    def __post_init__(self) -> None:
        if self.rows < 4 or self.rows % 4:
            raise ValueError(f"rows {self.rows}, expected a positive multiple of 4")
