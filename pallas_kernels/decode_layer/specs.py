"""Decoder layers of real models: one list for tests and benchmarks."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeLayerSpec:
    """A named layer, and queries, keys and values of the next."""

    name: str
    """Model, requests, and weights other than bfloat16."""
    m: int
    """Requests of a step."""
    d_model: int
    d_ff: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    bias: bool = False
    """Whether queries, keys and values have one."""
    weights: str = "bfloat16"
    """Type of the weights: that, int8 or float8_e4m3fn."""
    keep: float = 1.0
    """Share of the input features that each tile of 128 columns keeps; below one,
    weights are tile-sparse."""
    uneven: bool = False
    """Whether tiles keep from half to one and a half times as many."""

    context: int = 0
    """Tokens of a request, where the attention before is lowered in the launch, too."""

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """Input and output features of the weights."""
        features = self.heads * self.head_dim
        columns = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "out": (features, self.d_model),
            "gate_up": (self.d_model, 2 * self.d_ff),
            "down": (self.d_ff, self.d_model),
            "qkv": (self.d_model, columns),
        }

    def room(self, k: int) -> int:
        """The most rows that a tile of a tile-sparse weight keeps of `k`."""
        return round(k * self.keep * (1.5 if self.uneven else 1) / 64) * 64


_MODELS = {
    "llama3_8b": {"d_model": 4096, "d_ff": 14336, "heads": 32, "kv_heads": 8},
    "qwen2_7b": {
        "d_model": 3584,
        "d_ff": 18944,
        "heads": 28,
        "kv_heads": 4,
        "bias": True,
    },
}

SPECS: tuple[DecodeLayerSpec, ...] = (
    tuple(
        DecodeLayerSpec(
            name=f"{name}_m{m}", m=m, context=8192 * (m in (1, 32)), **sizes
        )
        for name, sizes in _MODELS.items()
        for m in ((1, 8, 32, 64) if name == "llama3_8b" else (8,))
    )
    + tuple(
        DecodeLayerSpec(
            name=f"llama3_8b_m{m}_{short}",
            m=m,
            weights=weights,
            context=8192,
            **_MODELS["llama3_8b"],
        )
        for short, weights in {"int8": "int8", "fp8": "float8_e4m3fn"}.items()
        for m in (1, 32)
    )
    + tuple(
        DecodeLayerSpec(
            name=f"llama3_8b_m{m}_{short}",
            m=m,
            keep=0.25,
            uneven=short == "uneven75",
            **_MODELS["llama3_8b"],
        )
        for short in ("sparse75", "uneven75")
        for m in (1, 32)
    )
)
"""Every shape that is lowered in the tests and benchmarked."""
