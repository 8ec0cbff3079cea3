"""How much the engine takes on, and how many pages the devices have room for.

Legend: S slots, P pages, G tokens of a page.
"""

import dataclasses
import math
import os
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxscale.checks import check_integers
from jaxscale.inference.engine import program_sizes
from jaxscale.inference.engine.scheduler_config import SchedulerConfig
from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder


MAX_QUERIES = 64
"""Queries of a key/value head in a step: its query heads, times the tokens of a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How much the engine takes on at a time; None is chosen by model and device.

    Example:
        >>> EngineConfig(num_slots=8, max_len=4096, kv_dtype="fp8").page_size
        64
    """

    max_len: int | None = None
    """Most tokens of prompt and continuation together; None is what the model was made
    for."""
    num_slots: int | None = None
    """S, most requests that are decoded together: a power of two. None is 128, on a CPU
    8."""
    num_pages: int | None = None
    """P, pages of keys and values; None takes `memory_fraction`."""
    page_size: int = 64
    """G, tokens of a page."""
    kv_dtype: Literal["fp8"] | None = None
    """Type of keys and values in pages; None is that of the computation, fp8 (E4M3)
    holds twice as many tokens."""
    memory_fraction: float = 0.9
    """Share of the memory of each device for weights, pages and computation."""
    prefill_tokens: tuple[int, ...] | None = None
    """How many tokens of prompts the compiled programs compute in a tick; None is
    128, 512 and 2,048, on a CPU 16, 64 and 256."""
    buckets: tuple[int, ...] | None = None
    """How many rows the compiled programs decode, powers of two, the largest S; None is
    2, 8, 32 and so on, and S."""
    steps: int = 4
    """Tokens that a request draws in one call of the device while none waits."""
    drafts: int = 0
    """Tokens guessed ahead for each request and step, from what the same tokens were
    followed by earlier in it; 0 guesses none. Results stay what they are."""
    draft_bucket: int = 8
    """Guess while at most this many rows are decoded; more keep the device busy."""
    shortest_ngram: int = 2
    """Fewest tokens that have to occur again before anything is guessed."""
    longest_ngram: int = 4
    """Most tokens that are looked for; the longest that occur again decide."""
    prefix_cache: bool = True
    """Whether prompts that begin alike are computed once."""
    contiguous: bool = False
    """Give each slot neighboring pages of its own, for `max_len` tokens, and move what
    they hold when rows move, as Flover does: for comparison."""
    max_waiting: int = 2048
    """Most requests that wait for their first turn; then more are refused."""
    max_waiting_tokens: int = 2**20
    """Most tokens of prompts that wait."""
    all_reduce: Literal["xla", "low_latency"] | None = None
    """Who sums the tokens of a step over the devices that a model is split over: XLA,
    the kernel ``low_latency``, or None: that with which steps were faster."""
    program_cache: str | None = None
    """A folder that keeps compiled programs for the next start; None compiles them
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
        """The fewest programs for prompts of these lengths, all of one size."""
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
        return self.prefill_tokens or ((16, 64, 256) if on_cpu else (128, 512, 2048))

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
            num_pages=self.num_pages or pages * (slots if self.contiguous else 1),
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
            contiguous=self.contiguous,
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
    """Raise where a step has more queries of a key/value head than a tile has rows."""
    group = model.num_heads // model.num_kv_heads
    if drafts and group * (1 + drafts) > MAX_QUERIES:
        raise ValueError(
            f"drafts {drafts} and the newest token, with {group} query heads a "
            f"key/value head, are more than the {MAX_QUERIES} queries that attention "
            f"over pages takes; use at most {max(MAX_QUERIES // group - 1, 0)}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """What lies on each device, in bytes."""

    available: int | None
    """The share of the device that may be used; None where it is unknown."""
    weights: int
    """The parameters."""
    page: int
    """One page."""
    num_pages: int
    """P."""
    page_size: int
    """G."""
    computation: int
    """Room for intermediate results."""

    def __str__(self) -> str:
        def gib(size: int) -> str:
            return f"{size / 2**30:.2f} GiB"

        tokens = self.num_pages * self.page_size
        of = "" if self.available is None else f" of {gib(self.available)}"
        return (
            f"memory of a device{of}: weights {gib(self.weights)}, {self.num_pages:,} "
            f"pages ({tokens:,} tokens) {gib(self.num_pages * self.page)}, computation "
            f"{gib(self.computation)}"
        )


def fit(
    model: Decoder, config: SchedulerConfig, options: EngineConfig
) -> tuple[SchedulerConfig, Memory]:
    """The sizes with as many pages as the devices have room for.

    Args:
        model: Made by `Decoder.for_inference`.
        config: The other sizes.
        options: `EngineConfig.num_pages` and `EngineConfig.memory_fraction`.

    Raises:
        ValueError: weights, computation and the pages of one request do not fit; the
            message says how large each is.
    """
    arrays = jax.tree.leaves(model)
    where = arrays[0].sharding
    device = min(where.addressable_devices, key=lambda device: device.id)
    weights = sum(a.dtype.itemsize * _shard_size(a) for a in arrays)
    shape, heads = model.config, model.config.num_kv_heads
    sizes = dict(where.mesh.shape) if isinstance(where, NamedSharding) else {}
    names = model.rules.mesh_axes(["act_kv_heads"])
    ways = math.prod(sizes.get(name, 1) for name in names)
    itemsize = np.dtype(model.dtype).itemsize
    page = shape.num_layers * 2 * (heads // ways) * config.page_size * shape.head_dim
    page *= itemsize
    if options.kv_dtype is not None:
        # Numbers of a byte, and a scale of four for those of a head.
        page = page // itemsize + shape.num_layers * 2 * (heads // ways) * 4
    computation = computation_size(shape, config, itemsize, options.buckets)
    most = config.num_slots * config.table_width
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        available = int(options.memory_fraction * stats["bytes_limit"])
        taken = max(int(stats.get("bytes_in_use", 0)), weights)
    else:
        # A CPU shares its memory with everything else.
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available, taken = int(options.memory_fraction * free) // 2, weights
    room = (available - taken - computation) // page
    if len(where.addressable_devices) < len(where.device_set):
        # All hosts have the pages of the one that has least room.
        rooms = multihost_utils.process_allgather(np.int32(max(room, 0)))
        room = int(np.min(rooms))
    memory = Memory(
        available=available,
        weights=weights,
        page=page,
        num_pages=options.num_pages or min(room, most),
        page_size=config.page_size,
        computation=computation,
    )
    needed = options.num_pages or (most if config.contiguous else config.table_width)
    if room < needed:
        raise ValueError(
            f"{memory.weights / 2**30:.2f} GiB of weights, "
            f"{computation / 2**30:.2f} GiB for computation and {needed:,} pages of "
            f"{page / 2**20:.2f} MiB do not fit into {available / 2**30:.2f} GiB of a "
            f"device, of which {taken / 2**30:.2f} GiB are taken; lower max_len, "
            "num_slots, prefill_tokens or num_pages, raise memory_fraction, or split "
            "the model over more devices"
        )
    return dataclasses.replace(config, num_pages=memory.num_pages), memory


def computation_size(
    model: DecoderConfig,
    config: SchedulerConfig,
    itemsize: int,
    buckets: Sequence[int] | None = None,
) -> int:
    """Bytes that programs need on a device besides weights and pages, at most.

    Args:
        model: Its shape.
        config: The sizes.
        itemsize: Bytes of a number of the computation.
        buckets: As `EngineConfig.buckets`.
    """
    # Activations of a prefill, and the keys and values that it reads.
    width = 4 * model.d_model + 3 * model.d_ff + 3 * model.num_heads * model.head_dim
    keys = config.keys_budget + 128 * config.prefill_requests
    read = 3 * keys * 2 * model.num_kv_heads * model.head_dim
    prefill = (config.prefill_tokens * width + read) * itemsize
    # Logits, and what the full sampler makes of them.
    decoded = program_sizes.decode_sizes(
        config, program_sizes.bucket_sizes(config, buckets)
    )
    rows = max(128, *(bucket * (1 + drafts) for bucket, _, drafts in decoded))
    computation = max(prefill, rows * model.vocab_size * 4 * 6)
    computation += config.num_slots * model.vocab_size * 2  # counts
    if config.drafts:
        # The history, and a copy while rows move.
        computation += 2 * config.num_slots * config.longest * 4
    return computation


def _shard_size(array: Any) -> int:
    return math.prod(array.sharding.shard_shape(array.shape))
