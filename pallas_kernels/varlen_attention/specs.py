"""Named shapes of real models and workloads, and patterns of sequence lengths.

One list feeds the tests (`VarlenSpec.scaled` down) and the benchmarks.

Axes: B sequences, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Int

from pallas_kernels.varlen_attention.segments import Window


type Lengths = Int[np.ndarray, " B"]


def constant(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """Every sequence has `max_len` tokens."""
    del seed
    return np.full(num_seqs, max_len)


def uniform(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """Uniform in [max_len / 2, max_len]."""
    return _between(num_seqs, max_len // 2, max_len, seed)


def wide(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """Uniform in [1, max_len]."""
    return _between(num_seqs, 1, max_len, seed)


def bytetransformer(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """Uniform in [0.2 max_len, max_len], 0.6 on average: ByteTransformer's benchmark.

    Padding to `max_len` would cost 1.67x in matmuls and 2.42x in attention.
    """
    return _between(num_seqs, max_len // 5, max_len, seed)


def long_tail(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """One sequence in eight has `max_len` tokens, the rest 1/16 to 1/8 of it."""
    lengths = _between(num_seqs, max_len // 16, max_len // 8, seed)
    lengths[::8] = max_len
    return np.random.default_rng(seed).permutation(lengths)


def bimodal(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """Half have `max_len` tokens, half an eighth of it, in random order."""
    lengths = np.full(num_seqs, max_len)
    lengths[1::2] = max(1, max_len // 8)
    return np.random.default_rng(seed).permutation(lengths)


def skewed(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """``max_len / (b + 1)`` for sequence b: the long ones come first."""
    del seed
    return np.maximum(1, max_len // np.arange(1, num_seqs + 1))


def skewed_shuffled(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """`skewed` in random order."""
    return np.random.default_rng(seed).permutation(skewed(num_seqs, max_len))


def zero_length(num_seqs: int, max_len: int, seed: int = 0) -> Lengths:
    """`wide`, with every third sequence empty."""
    lengths = wide(num_seqs, max_len, seed)
    lengths[::3] = 0
    return lengths


def documents(num_seqs: int, num_tokens: int, seed: int = 0) -> Lengths:
    """`num_seqs` documents of random length that fill `num_tokens` exactly."""
    cuts = np.random.default_rng(seed).choice(num_tokens - 1, num_seqs - 1, False) + 1
    return np.diff([0, *sorted(cuts.tolist()), num_tokens])


PATTERNS: Mapping[str, Callable[[int, int, int], Lengths]] = {
    "constant": constant,
    "uniform": uniform,
    "wide": wide,
    "bytetransformer": bytetransformer,
    "long_tail": long_tail,
    "bimodal": bimodal,
    "skewed": skewed,
    "skewed_shuffled": skewed_shuffled,
    "zero_length": zero_length,
}
"""Patterns by name: functions of (num_seqs, max_len, seed)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VarlenSpec:
    """A call of `varlen_attention`, without its data.

    Example:
        >>> spec = next(s for s in SPECS if s.name == "prefill_q512_k4096")
        >>> spec.lengths_q[0], spec.lengths_k[0]
        (512, 4096)
        >>> spec.scaled(tokens=72).lengths_k[0]
        8
    """

    name: str
    """Name in tables."""
    pattern: str
    """Distribution of the lengths."""
    lengths_q: tuple[int, ...]
    """Queries of each sequence."""
    lengths_k: tuple[int, ...]
    """Keys of each sequence."""
    num_heads: int
    """N."""
    num_kv_heads: int
    """K."""
    head_dim: int
    """H."""
    causal: bool = False
    """Causal mask: keys to the right of the diagonal are hidden."""
    window: Window = (None, None)
    """Keys visible left and right of the diagonal."""
    softcap: float | None = None
    """Bound on scores."""
    sinks: bool = False
    """Attention sinks, one per head."""
    alibi: bool = False
    """ALiBi, with a slope per head."""
    value_dim: int | None = None
    """Hv; None: H."""

    @property
    def value_size(self) -> int:
        """Hv."""
        return self.value_dim or self.head_dim

    @property
    def max_len(self) -> int:
        """The longest sequence, in tokens: what a padded batch would be padded to."""
        return max(*self.lengths_q, *self.lengths_k)

    def cu_seqlens(self) -> tuple[Int[np.ndarray, " bounds"], ...]:
        """``(cu_seqlens_q, cu_seqlens_k)``, int32 [B+1]."""
        return tuple(
            np.cumsum([0, *lengths], dtype=np.int32)
            for lengths in (self.lengths_q, self.lengths_k)
        )

    def flops(self) -> int:
        """Useful operations of the forward pass: ``2 N (H + Hv)`` per visible pair.

        It counts two matmuls, each a multiplication and an addition, over the pairs
        that the causal mask and the window leave; the backward pass does 2.5 times as
        much.
        """
        left, right = self.window
        right = 0 if self.causal else right
        pairs = 0
        for len_q, len_k in zip(self.lengths_q, self.lengths_k, strict=True):
            diagonal = np.arange(len_q, dtype=np.int64) + len_k - len_q
            start = 0 if left is None else np.maximum(diagonal - left, 0)
            stop = len_k if right is None else np.minimum(diagonal + right + 1, len_k)
            seen = np.broadcast_to(np.maximum(stop - start, 0), len_q)
            pairs += int(seen.sum(dtype=np.int64))
        return 2 * self.num_heads * (self.head_dim + self.value_size) * pairs

    def scaled(
        self, *, tokens: int, max_heads: int = 4, head_dim: int = 8
    ) -> "VarlenSpec":
        """The same proportions in a budget of `tokens`, for tests on a CPU.

        Lengths and window shrink by one factor, the shortest to one token; heads keep
        their ratio as far as `max_heads` allows.
        """
        total = max(sum(self.lengths_q), sum(self.lengths_k))
        room = tokens - len(self.lengths_q)
        if room < 0:
            raise ValueError(
                f"tokens={tokens} are too few for {len(self.lengths_q)} sequences"
            )
        factor = min(1.0, room / total)
        shrink = functools.partial(_shrink, factor)
        groups = min(self.num_heads // self.num_kv_heads, max_heads)
        kv_heads = min(self.num_kv_heads, max_heads // groups)
        left, right = (None if w is None else shrink(w) for w in self.window)
        return dataclasses.replace(
            self,
            lengths_q=tuple(map(shrink, self.lengths_q)),
            lengths_k=tuple(map(shrink, self.lengths_k)),
            window=(left, right),
            num_heads=groups * kv_heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=self.value_dim and self.value_dim * head_dim // self.head_dim,
        )


def _between(num_seqs: int, low: int, high: int, seed: int) -> Lengths:
    return np.random.default_rng(seed).integers(max(1, low), high + 1, num_seqs)


def _shrink(factor: float, length: int) -> int:
    return max(1, int(length * factor)) if length else 0


def _spec(name: str, pattern: str, lengths: Lengths, **fields: object) -> VarlenSpec:
    both = tuple(int(length) for length in lengths)
    options = {"lengths_q": both, "lengths_k": both, **fields}
    return VarlenSpec(name=name, pattern=pattern, **options)  # pyright: ignore[reportArgumentType]


def _dense() -> list[VarlenSpec]:
    """FlashAttention-3's grid: 16k tokens, hidden size 2048."""
    return [
        _spec(
            f"dense_d{head_dim}_l{length}_{'causal' if causal else 'full'}",
            "constant",
            constant(16384 // length, length),
            num_heads=2048 // head_dim,
            num_kv_heads=2048 // head_dim,
            head_dim=head_dim,
            causal=causal,
        )
        for head_dim in (64, 128, 256)
        for length in (512, 1024, 2048, 4096, 8192, 16384)
        for causal in (False, True)
    ]


def _bert() -> list[VarlenSpec]:
    """ByteTransformer's grid: BERT-base, 12 heads of 64."""
    return [
        _spec(
            f"bert_base_b{batch}_l{length}",
            "bytetransformer",
            bytetransformer(batch, length),
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
        )
        for batch in (1, 8, 16, 64)
        for length in (64, 128, 256, 384, 512, 768, 1024)
    ]


def _patterns() -> list[VarlenSpec]:
    """FlashAttention's scheduling benchmark with uneven lengths."""
    return [
        _spec(
            f"{pattern}_{batch}x{length}_d{head_dim}_{'causal' if causal else 'full'}",
            pattern,
            PATTERNS[pattern](batch, length, 0),
            num_heads=16,
            num_kv_heads=16,
            head_dim=head_dim,
            causal=causal,
        )
        for pattern in PATTERNS
        if pattern != "bytetransformer"
        for batch, length in ((32, 1024), (16, 2048))
        for head_dim in (64, 128)
        for causal in (False, True)
    ]


def _training() -> list[VarlenSpec]:
    """Packed pretraining with LLaMA-3's heads, documents of random length."""
    return [
        _spec(
            f"llama_packed_t{tokens}_docs{number}",
            "documents",
            documents(number, tokens),
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            causal=True,
        )
        for tokens in (8192, 32768)
        for number in (3, 8, 12, 64)
    ]


def _serving() -> list[VarlenSpec]:
    """Chunked prefill: one chunk of queries against a longer prompt."""
    return [
        _spec(
            f"prefill_q512_k{keys}",
            "constant",
            constant(8, 512),
            lengths_k=(keys,) * 8,
            num_heads=32,
            num_kv_heads=8,
            head_dim=128,
            causal=True,
        )
        for keys in (4096, 16384)
    ]


def _features() -> list[VarlenSpec]:
    """Models with more than a causal mask."""
    return [
        _spec(
            "modernbert_local",
            "bytetransformer",
            bytetransformer(16, 1024),
            num_heads=12,
            num_kv_heads=12,
            head_dim=64,
            window=(64, 64),
        ),
        _spec(
            "gpt_oss_local",
            "documents",
            documents(8, 8192),
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            causal=True,
            window=(127, None),
            sinks=True,
        ),
        _spec(
            "gemma2_local",
            "documents",
            documents(3, 8192),
            num_heads=16,
            num_kv_heads=8,
            head_dim=256,
            causal=True,
            window=(4095, None),
            softcap=50.0,
        ),
        _spec(
            "mpt_7b_alibi",
            "documents",
            documents(8, 8192),
            num_heads=32,
            num_kv_heads=32,
            head_dim=128,
            causal=True,
            alibi=True,
        ),
        _spec(
            "deepseek_v2_lite",
            "documents",
            documents(8, 8192),
            num_heads=16,
            num_kv_heads=16,
            head_dim=192,
            value_dim=128,
            causal=True,
        ),
        *(
            _spec(
                name,
                "documents",
                documents(8, 8192),
                num_heads=32,
                num_kv_heads=32,
                head_dim=head_dim,
                causal=True,
            )
            for name, head_dim in (("phi_3_mini", 96), ("phi_2", 80))
        ),
        _spec(
            "falcon_7b_multi_query",
            "documents",
            documents(8, 8192),
            num_heads=71,
            num_kv_heads=1,
            head_dim=64,
            causal=True,
        ),
    ]


def _whole() -> list[VarlenSpec]:
    """Unpacked sequences, as in decoder and encoder training."""
    causal = {"causal": True}
    variants = (
        ("llama3_1b", (8, 2048), (32, 8, 64), causal),
        ("llama3_8b", (4, 4096), (32, 8, 128), causal),
        ("mistral_7b", (2, 8192), (32, 8, 128), causal | {"window": (4095, None)}),
        ("gemma2_9b", (4, 4096), (16, 8, 256), causal | {"softcap": 50.0}),
        ("grok_1", (4, 4096), (48, 8, 128), causal | {"softcap": 30.0}),
        ("gpt_oss", (4, 4096), (64, 8, 64),
         causal | {"window": (127, None), "sinks": True}),
        ("mpt_7b", (8, 2048), (32, 32, 128), causal | {"alibi": True}),
        ("modernbert", (16, 1024), (12, 12, 64), {"window": (64, 64)}),
    )  # fmt: skip
    latent = _spec(
        "whole_deepseek_v2_lite_b4_l4096",
        "whole",
        constant(4, 4096),
        num_heads=16,
        num_kv_heads=16,
        head_dim=192,
        value_dim=128,
        causal=True,
    )
    return [
        latent,
        *(
            _spec(
                f"whole_{name}_b{batch}_l{length}",
                "whole",
                constant(batch, length),
                num_heads=heads,
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                **options,
            )
            for name, (batch, length), (heads, kv_heads, head_dim), options in variants
        ),
    ]


SPECS: tuple[VarlenSpec, ...] = (
    *_dense(),
    *_bert(),
    *_patterns(),
    *_training(),
    *_serving(),
    *_features(),
    *_whole(),
)
"""Every shape that is tested and benchmarked."""
