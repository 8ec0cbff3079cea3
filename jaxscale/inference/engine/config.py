"""The sizes of the engine: `EngineConfig`, and what a model allows.

Legend: S slots, P pages, G tokens of a page.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from jaxscale.checks import check_integers
from jaxscale.inference.engine.scheduling.scheduler_config import (
    SchedulerConfig,
    SchedulerSettings,
    is_power,
)
from jaxscale.keywords import explained
from jaxscale.models.config import DecoderConfig


MAX_QUERIES = 64
"""Queries per key/value head and step: its query heads times the tokens of a
sequence."""


MIXED = 256
"""Most prompt tokens, and most rows, of a mixed batch."""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig(SchedulerSettings):
    """The sizes of the inference engine; None is chosen by model and device.

    Example:
        >>> EngineConfig(num_slots=8, max_len=4096, kv_dtype="fp8").page_size
        64
    """

    max_len: int | None = None
    """Maximum tokens of prompt and completion together; None is the model's limit."""
    num_slots: int | None = None
    """S, maximum number of running requests, which decode together: a power of two.
    None is as many as the KV cache holds at 256 tokens each, from 128 to 1,024; on a
    CPU 8."""
    num_pages: int | None = None
    """P, pages (blocks) of the KV cache; None fills `memory_fraction`."""
    kv_dtype: Literal["fp8"] | None = None
    """Data type of the KV cache: None is that of the computation, fp8 (E4M3) holds
    twice as many tokens."""
    memory_fraction: float = 0.9
    """Fraction of each device's memory for weights, KV cache and computation, as far as
    JAX has reserved it: up to 0.95 where a command or `LLM.from_pretrained` comes
    first, otherwise 0.75, or ``XLA_CLIENT_MEM_FRACTION``."""
    prefill_tokens: tuple[int, ...] | None = None
    """Sizes, in prompt tokens per engine step, that prefill is compiled for; None is
    128, 256 and so on to 2,048, on a CPU 16, 64 and 256."""
    buckets: tuple[int, ...] | None = None
    """Batch sizes that decode is compiled for, the largest S; None is 2, 8, 32, from 64
    on four up to each power of two (160, 192, 224, 256), and S."""
    mixed_batches: bool | None = None
    """Whether the prompts of a step and its decoding go through the layers together,
    where both are small; their weights are then read once, and how a token is rounded
    may depend on who joins. None is yes on a GPU with several `buckets`; with `drafts`
    there are none."""
    all_reduce: Literal["xla", "low_latency"] | None = None
    """All-reduce of decode over the tensor-parallel devices: XLA's, the kernel
    ``low_latency``, or None: the kernel where it gave faster steps, and where layers of
    one launch add in its workspace."""
    program_cache: str | None = None
    """Directory that caches compiled programs for the next start; None compiles them
    each time."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction {self.memory_fraction} must be above 0 and at most 1"
            )
        given = ("max_len", "num_slots", "num_pages")
        names = [name for name in given if getattr(self, name) is not None]
        names += ["draft_bucket", "shortest_ngram", "longest_ngram"]
        check_integers(self, 1, "page_size", "steps", *names)
        check_integers(self, 0, "drafts")
        if self.kv_dtype not in (None, "fp8"):
            raise ValueError(f"kv_dtype {self.kv_dtype!r} must be None or 'fp8'")

    @classmethod
    def for_prompts(cls, lengths: Sequence[int], max_new_tokens: int) -> "EngineConfig":
        """Settings with the fewest programs for prompts of these lengths."""
        longest, size = max(lengths), cls.page_size
        slots = 1 << (max(2, min(len(lengths), 32)) - 1).bit_length()
        return cls(
            max_len=max(2, longest + max_new_tokens),
            num_slots=slots,
            buckets=(slots,),
            prefill_tokens=(min(-(-longest // size), 8) * size,),
        )

    def chunks(self, *, on_cpu: bool) -> Sequence[int]:
        """`prefill_tokens`, or its default."""
        default = (16, 64, 256) if on_cpu else (128, 256, 512, 1024, 2048)
        return self.prefill_tokens or default

    def mixed(
        self, buckets: Sequence[int], *, on_cpu: bool
    ) -> Sequence[tuple[int, int]]:
        """Prompt tokens and decode rows of the programs for mixed batches.

        Args:
            buckets: Batch sizes that decode is compiled for.
            on_cpu: The device is one.
        """
        wanted = self.mixed_batches
        if wanted is None:
            wanted = not on_cpu and len(buckets) > 1
        if not wanted or self.drafts:
            return ()
        chunks = self.chunks(on_cpu=on_cpu)
        # Beyond that each of both fills the device by itself.
        few = [tokens for tokens in chunks if tokens <= MIXED] or [min(chunks)]
        powers = [rows for rows in buckets if is_power(rows)]
        rows = [n for n in powers if MIXED // 4 <= n <= MIXED] or powers[-1:]
        # Tensor parallelism splits the tokens of both evenly.
        return [(t, r) for t in few for r in rows if r % 8 == 0]

    def scheduler(
        self, model: DecoderConfig, eos_ids: Sequence[int], *, on_cpu: bool
    ) -> SchedulerConfig:
        """The sizes for `model`, with the fewest pages unless `num_pages` is given.

        Raises:
            ValueError: `max_len` is more than the model can do, or sizes do not fit.
        """
        longest = self.max_len or model.max_cache_len or model.max_seq_len
        check_max_len(model, longest)
        most = max(self.chunks(on_cpu=on_cpu))
        pages = -(-longest // self.page_size)
        slots = self.num_slots or (8 if on_cpu else 128)
        together = min(16, slots)
        # No more keys than the prompts that go together can have; a CPU takes its time
        # to gather those that nobody has, too.
        keys = (4096 if on_cpu else 16_384) // self.page_size
        return SchedulerConfig(
            num_pages=self.num_pages or pages,
            vocab_size=model.vocab_size,
            max_len=longest,
            page_size=self.page_size,
            num_slots=slots,
            prefill_requests=together,
            prefill_keys=max(pages, min(together * pages, keys)) * self.page_size,
            eos_ids=sorted(set(eos_ids)),
            prefill_tokens=most,
            # Chunks end at whole pages.
            split=self.page_size * max(1, min(512, most) // self.page_size),
            steps=self.steps,
            drafts=self.drafts,
            draft_bucket=self.draft_bucket,
            shortest_ngram=self.shortest_ngram,
            longest_ngram=self.longest_ngram,
            prefix_cache=self.prefix_cache,
            max_waiting=self.max_waiting,
            max_waiting_tokens=self.max_waiting_tokens,
        )


def check_max_len(model: DecoderConfig, max_len: int) -> None:
    """Raise unless sequences of `max_len` tokens can be continued token by token."""
    limit = model.max_cache_len
    if limit is None or max_len <= limit:
        return
    why = "the size of the table of learned positions"
    if model.position == "rope":
        why = (
            "the original length of dynamic rotary scaling, beyond which keys in pages "
            "would have to be rotated anew"
        )
    raise ValueError(
        f"max_len {max_len} exceeds {limit}, the longest sequence that the model can "
        f"continue: {why}; lower max_len"
    )


def check_drafts(model: DecoderConfig, drafts: int) -> None:
    """Raise if a step has more queries per key/value head than a kernel tile."""
    group = model.num_heads // model.num_kv_heads
    if drafts and group * (1 + drafts) > MAX_QUERIES:
        raise ValueError(
            f"drafts {drafts} and the newest token, with {group} query heads a "
            f"key/value head, are more than the {MAX_QUERIES} queries that attention "
            f"over pages takes; use at most {max(MAX_QUERIES // group - 1, 0)}"
        )
