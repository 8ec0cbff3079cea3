"""Decode steps of real models: one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedSpec:
    """A named decode step: `batch` sequences with `context` cached tokens each."""

    name: str
    """Model, batch and context."""
    batch: int
    """B, sequences."""
    context: int
    """Tokens of each sequence in the cache before the step."""
    num_heads: int
    """N."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    queries: int = 1
    """R, new tokens per sequence: 1 plus the draft tokens."""
    page: int = 64
    """G, tokens per page."""
    dtype: str = "bfloat16"
    """Type of the pages; with float8_e4m3fn the queries are bfloat16."""
    window: int | None = None
    """Tokens that a query attends to."""

    @property
    def width(self) -> int:
        """W: pages per sequence, with room for the new tokens."""
        return -(-(self.context + self.queries) // self.page)

    @property
    def visible(self) -> int:
        """Tokens of the cache that a sequence reads."""
        if self.window is None:
            return self.context
        return min(self.context, self.window - 1)

    def kv_bytes(self) -> int:
        """Bytes of keys and values that one step reads from the cache."""
        itemsize = 1 if self.dtype == "float8_e4m3fn" else 2
        token = 2 * self.num_kv_heads * self.head_dim * itemsize
        return self.batch * self.visible * token


_MODELS: dict[str, tuple[int, int, int]] = {
    "llama3_8b": (32, 8, 128),
    "llama2_7b": (32, 32, 128),
    "llama3_70b_tp4": (16, 2, 128),
    "llama3_70b_tp8": (8, 1, 128),
    "gpt2": (12, 12, 64),
    "gptj_6b": (16, 16, 256),
}
"""Query heads, key/value heads and head dim; of one device if the name says so."""


def _spec(model: str, batch: int, context: int, kind: str = "", **more) -> PagedSpec:  # noqa: ANN003
    heads, kv_heads, head_dim = _MODELS[model]
    name = "_".join(filter(None, (model, kind, f"b{batch}", f"c{context}")))
    return PagedSpec(
        name=name,
        batch=batch,
        context=context,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        **more,
    )


SPECS: tuple[PagedSpec, ...] = (
    *(
        _spec("llama3_8b", batch, context)
        for batch, context in (
            (1, 4096),
            (1, 32768),
            (8, 4096),
            (8, 32768),
            (32, 264),
            (32, 4096),
            (128, 1024),
        )
    ),
    _spec("llama2_7b", 1, 264),
    _spec("llama2_7b", 32, 264),
    _spec("llama2_7b", 32, 1024),
    _spec("llama3_70b_tp4", 32, 4096),
    _spec("llama3_70b_tp8", 1, 32768),
    _spec("llama3_70b_tp8", 128, 1024),
    _spec("gpt2", 32, 264),
    _spec("gptj_6b", 32, 264),
    _spec("gptj_6b", 8, 1024),
    _spec("llama3_8b", 32, 4096, "drafts3", queries=4),
    _spec("llama3_8b", 32, 4096, "page16", page=16),
    _spec("llama3_8b", 8, 32768, "window4096", window=4096),
    _spec("llama3_8b", 32, 4096, "fp8", dtype="float8_e4m3fn"),
    _spec("llama3_8b", 1, 32768, "fp8", dtype="float8_e4m3fn"),
)
"""Every shape that is lowered in the tests and benchmarked."""
