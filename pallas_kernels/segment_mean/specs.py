"""Packed rows of real requests: one list for tests."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class SegmentMeanSpec:
    """Sizes of a call, in bfloat16."""

    tokens: int
    features: int
    sequences: int


SPECS = {
    "bert_base_256": SegmentMeanSpec(tokens=256, features=768, sequences=32),
    "bert_base_2688": SegmentMeanSpec(tokens=2688, features=768, sequences=88),
    "bert_large_16384": SegmentMeanSpec(tokens=16384, features=1024, sequences=512),
}
"""Every shape that is lowered in the tests."""
