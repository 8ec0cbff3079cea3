"""Layer norms of real models: one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerNormSpec:
    """A named norm of ``[t,d]`` of bfloat16."""

    name: str
    """Model and rows."""
    t: int
    """Rows: packed tokens of a step."""
    d: int
    """Columns: features."""


SPECS: tuple[LayerNormSpec, ...] = (
    *(
        LayerNormSpec(name=f"bert_base_{t}", t=t, d=768)
        for t in (1, 130, 2471, 4939, 9984, 19902)
    ),
    LayerNormSpec(name="bert_large_9984", t=9984, d=1024),
    LayerNormSpec(name="minilm_9984", t=9984, d=384),
    LayerNormSpec(name="deberta_v2_xlarge_4939", t=4939, d=1536),
    LayerNormSpec(name="gpt2_medium_2048", t=2048, d=2048),
    LayerNormSpec(name="albert_xxlarge_4096", t=4096, d=4096),
    LayerNormSpec(name="opt_13b_2048", t=2048, d=5120),
)
"""Every shape that is lowered in the tests and benchmarked."""
