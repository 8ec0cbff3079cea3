"""Moves of real models: one list for tests and benchmarks."""

import dataclasses


__all__ = ["SPECS", "MoveSpec"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoveSpec:
    """Requests of `context` tokens each that move to other pages of one device."""

    name: str
    """Model, requests and context."""
    requests: int
    """How many move: half of a batch where it shrinks."""
    context: int
    """Tokens of each."""
    num_layers: int
    """L."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    page: int = 64
    """G, tokens of a page."""
    dtype: str = "bfloat16"
    """Type of the pages."""

    @property
    def moves(self) -> int:
        """M: pages that move."""
        return self.requests * -(-self.context // self.page)

    @property
    def num_pages(self) -> int:
        """P: those that are read, those that are written, and some of nobody."""
        return 2 * self.moves + 3

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the pages, [L, P, 2, K, G, H]."""
        page = self.page, self.head_dim
        return self.num_layers, self.num_pages, 2, self.num_kv_heads, *page

    def moved_bytes(self) -> int:
        """Bytes that are read; as many are written."""
        itemsize = 1 if self.dtype == "float8_e4m3fn" else 2
        token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize
        return self.moves * self.page * token


_MODELS: dict[str, tuple[int, int, int]] = {
    "llama2_7b": (32, 32, 128),
    "llama3_8b": (32, 8, 128),
    "llama3_70b_tp4": (80, 2, 128),
    "gptj_6b": (28, 16, 256),
}
"""Layers, key/value heads and head dim, of one device where it says so."""


def _spec(model: str, requests: int, context: int, kind: str = "", **more) -> MoveSpec:  # noqa: ANN003
    layers, kv_heads, head_dim = _MODELS[model]
    name = "_".join(filter(None, (model, kind, f"n{requests}", f"c{context}")))
    return MoveSpec(
        name=name,
        requests=requests,
        context=context,
        num_layers=layers,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **more,
    )


SPECS: tuple[MoveSpec, ...] = (
    _spec("llama2_7b", 1, 512),
    _spec("llama2_7b", 16, 264),
    _spec("llama3_8b", 1, 1024),
    _spec("llama3_8b", 32, 1024),
    _spec("llama3_8b", 32, 1024, "page16", page=16),
    _spec("llama3_8b", 32, 1024, "fp8", dtype="float8_e4m3fn"),
    _spec("llama3_70b_tp4", 16, 1024),
    _spec("gptj_6b", 16, 264),
)
"""Every shape that is lowered in the tests and benchmarked."""
