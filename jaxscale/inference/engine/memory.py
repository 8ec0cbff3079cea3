"""How many KV cache pages fit in device memory.

Legend: S slots, P pages, G tokens of a page.
"""

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding

from jaxscale.inference.engine.config import EngineConfig
from jaxscale.inference.engine.device_share import (
    SERVING,
    reserved_share,
    share_name,
)
from jaxscale.inference.engine.kv_scales import FP8
from jaxscale.inference.engine.scheduling.scheduler_config import (
    SchedulerConfig,
    bucket_sizes,
    decode_sizes,
)
from jaxscale.inference.engine.scheduling.scheduler_output import KEY_BLOCK
from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.serving import is_abstract
from pallas_kernels.varlen_attention.paged import gathers_pages


_log = logging.getLogger(__name__)
_FILLED = 0.95  # of what JAX reserves; the rest is lost between arrays
_SLOTS = (1024, 512, 256)
_TOKENS_A_SLOT = 256  # of prompt and answer together, half way through the answer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of each device, in bytes."""

    available: int | None
    """Usable memory of the device; None if unknown."""
    weights: int
    """Bytes of the parameters."""
    page: int
    """Bytes of one page."""
    num_pages: int
    """P, number of pages."""
    page_size: int
    """G, tokens per page."""
    computation: int
    """Bytes for intermediate results."""

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
    """The sizes with as many pages as fit on the devices, and slots for them.

    Args:
        model: A result of `Decoder.for_inference`, maybe abstract.
        config: The other sizes.
        options: What is given: pages, slots, share of the memory.

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
        # One byte per value, and a scale of four bytes per head.
        page = page // itemsize + shape.num_layers * 2 * (heads // ways) * 4
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        available = usable(
            stats["bytes_limit"],
            options.memory_fraction,
            given=options.num_pages is None
            and options.memory_fraction != EngineConfig.memory_fraction,
        )
        used = int(stats.get("bytes_in_use", 0))
        taken = used + weights if is_abstract(model) else max(used, weights)
    else:
        # A CPU shares its memory with everything else.
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        available, taken = int(options.memory_fraction * free) // 2, weights

    mesh: Any = where.mesh if isinstance(where, NamedSharding) else None
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        pages_dtype = model.dtype if options.kv_dtype is None else FP8
        gathers = gathers_pages(
            model.dtype, pages_dtype, shape.head_dim, config.page_size
        )

    def fitted(config: SchedulerConfig) -> tuple[int, int]:
        """Bytes for computation, and the pages that there is room for."""
        size = computation_size(
            shape, config, itemsize, options.buckets, gathers=gathers
        )
        room = (available - taken - size) // page
        if len(where.addressable_devices) < len(where.device_set):
            # All hosts have the pages of the one with the least memory.
            rooms = multihost_utils.process_allgather(np.int32(max(room, 0)))
            room = int(np.min(rooms))
        return size, room

    given = options.num_slots or options.buckets
    if not given and device.platform != "cpu":
        config = with_slots(config, lambda x: options.num_pages or fitted(x)[1])
    computation, room = fitted(config)
    most = config.num_slots * config.table_width
    memory = Memory(
        available=available,
        weights=weights,
        page=page,
        num_pages=options.num_pages or min(room, most),
        page_size=config.page_size,
        computation=computation,
    )
    needed = options.num_pages or config.table_width
    if room < needed:
        others = (taken - weights) / 2**30
        beside = f", beside {others:.2f} GiB of others" if others >= 0.005 else ""
        raise ValueError(
            f"{memory.weights / 2**30:.2f} GiB of weights, "
            f"{computation / 2**30:.2f} GiB for computation and {needed:,} pages of "
            f"{page / 2**20:.2f} MiB do not fit into {available / 2**30:.2f} GiB of a "
            f"device{beside}; lower max_len, "
            "num_slots, prefill_tokens or num_pages, raise memory_fraction (and "
            f"{share_name()}, what JAX reserves), or split the model over more devices"
        )
    return dataclasses.replace(config, num_pages=memory.num_pages), memory


def usable(limit: int, fraction: float, *, given: bool) -> int:
    """Bytes of a GPU that an engine may fill.

    Args:
        limit: What JAX reserves of it.
        fraction: `EngineConfig.memory_fraction`, of the whole GPU.
        given: Whether the user counts on it, and is warned if it is less.
    """
    share = reserved_share()
    wanted, most = int(fraction * limit / share), int(_FILLED * limit)
    if given and most < wanted:
        _log.warning(
            "memory_fraction %g of each GPU is more than the engine can have: JAX has "
            "reserved %g of it. Set %s=%g before JAX is first used",
            fraction,
            share,
            share_name(),
            max(SERVING, share),
        )
    return min(wanted, most)


def with_slots(
    config: SchedulerConfig, pages: Callable[[SchedulerConfig], int]
) -> SchedulerConfig:
    """The sizes with as many slots as there are pages for.

    Args:
        config: The sizes, with the fewest slots.
        pages: Pages that there is room for beside the programs of some sizes.

    Example:
        >>> config = SchedulerConfig(num_pages=1, vocab_size=9, max_len=4096)
        >>> with_slots(config, lambda sizes: 4000).num_slots
        512
    """
    for slots in _SLOTS:
        larger = dataclasses.replace(config, num_slots=slots)
        if pages(larger) * config.page_size >= slots * _TOKENS_A_SLOT:
            return larger
    return config


def computation_size(
    model: DecoderConfig,
    config: SchedulerConfig,
    itemsize: int,
    buckets: Sequence[int] | None = None,
    *,
    gathers: bool,
) -> int:
    """Maximum bytes that programs need on a device besides weights and pages.

    Args:
        model: The shape of the model.
        config: The sizes.
        itemsize: Bytes of an activation.
        buckets: As for `Runner`.
        gathers: Whether a prefill gathers the keys and values that it reads.
    """
    width = 4 * model.d_model + 3 * model.d_ff + 3 * model.num_heads * model.head_dim
    prefill = config.prefill_tokens * width * itemsize
    if gathers:
        keys = config.keys_budget + KEY_BLOCK * config.prefill_requests
        prefill += 3 * keys * 2 * model.num_kv_heads * model.head_dim * itemsize
    # Logits, and the temporaries of the full sampler.
    decoded = decode_sizes(config, bucket_sizes(config, buckets))
    rows = max(128, *(bucket * (1 + drafts) for bucket, _, drafts in decoded))
    computation = max(prefill, rows * model.vocab_size * 4 * 6)
    computation += config.num_slots * model.vocab_size * 2  # counts
    if config.drafts:
        # The history, and a copy while rows move.
        computation += 2 * config.num_slots * config.longest * 4
    return computation


def _shard_size(array: Any) -> int:
    return math.prod(array.sharding.shard_shape(array.shape))
