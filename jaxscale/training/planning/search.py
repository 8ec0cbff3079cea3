"""Search for parallelism layouts of a training step: enumerate, rank and explain them.

Costs are estimated by `jaxscale.training.planning.cost_model`. Neither jax nor a device
is needed.
"""

import collections
import dataclasses
import functools
import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxscale.training.hardware import mfu
from jaxscale.training.planning.config import CHOICES, MOMENTS, PlanConfig
from jaxscale.training.planning.cost_model import Layout, Shape, step_time
from jaxscale.training.planning.memory_model import least_memory


COMMUNICATION = ("tensor", "context", "pipe", "data")
"""Parts of the time that are communication."""

_TOKENS = 2**22
_LEAST_TOKENS = 4096  # of a context-parallel shard, unless the context is given
_MOST_ROWS = 64
_KEPT = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A layout with its estimated cost."""

    layout: Layout
    """The parallelism layout."""
    time: Mapping[str, float]
    """Seconds of a step, by part."""
    memory: Mapping[str, float]
    """Minimum bytes per GPU of the step, by part."""
    tokens: int
    """Tokens per batch."""
    mfu: float
    """Model FLOP/s utilization, counting the causal half of attention."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(self.time.values())

    @property
    def bytes(self) -> float:
        """Minimum bytes per GPU of the step; XLA reserves more."""
        return sum(self.memory.values())

    @property
    def bubble(self) -> float:
        """Bubble: fraction of the step in which a stage waits for another."""
        return self.time["bubble"] / self.seconds

    @property
    def communication(self) -> float:
        """Fraction of the step that is exposed communication."""
        return sum(self.time[part] for part in COMMUNICATION) / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The layouts that were tried."""

    config: PlanConfig
    """The request, with the sizes of a batch filled in."""
    ranked: Sequence[Estimate]
    """Layouts that fit, the fastest first; at most a thousand."""
    num_fitting: int
    """Number of layouts that fit."""
    num_too_large: int
    """Number of layouts that need too much memory."""
    refused: Mapping[str, int]
    """Number of layouts that the model does not divide over, by reason."""
    fastest: Mapping[tuple[str, Any], Estimate]
    """The fastest layout that fits, by a choice and its value."""
    smallest: Mapping[tuple[str, Any], Estimate]
    """The too large layout with the least memory, by a choice and its value."""

    @property
    def best(self) -> Estimate:
        """The fastest layout that fits."""
        return self.ranked[0]

    @property
    def limit(self) -> float:
        """Bytes per GPU that a step may use."""
        return self.config.memory_share * self.config.hardware.memory

    def alternatives(self) -> "Iterator[tuple[str, Any, Estimate]]":
        """Each other value of the best layout's choices, with everything else
        re-optimized.

        Yields the choice, the value, and the fastest such layout that fits, or the
        smallest if none does.
        """
        for key in sorted(
            self.fastest.keys() | self.smallest.keys(),
            key=lambda key: (CHOICES.index(key[0]), _order(key[1])),
        ):
            if key[1] != getattr(self.best.layout, key[0]):
                yield *key, self.fastest.get(key) or self.smallest[key]

    def verdict(self, other: Estimate) -> str:
        """Why a layout is not the best: how much slower it is, or what does not fit.

        For a slower one it names the part of the time that grows most.
        """
        best = self.best
        if other.bytes > self.limit:
            return (
                f"needs at least {other.bytes / 1e9:,.0f} of {self.limit / 1e9:,.0f} GB"
            )
        growth = {part: other.time[part] - best.time[part] for part in best.time}
        part = max(growth, key=lambda name: growth[name])
        share = other.seconds / best.seconds - 1
        if share < 5e-4:
            return "as fast"
        return f"+{share:.1%}, {part} +{growth[part] / best.seconds:.1%}"


def plan_layouts(shape: Shape, config: PlanConfig) -> Plan:
    """Enumerate the layouts of `config.gpus` GPUs, and rank those that fit by time.

    Args:
        shape: The model, a `DecoderConfig`.
        config: What to plan for.

    Raises:
        ValueError: no layout fits. The message says how much memory is missing, or why
            the model does not divide.

    Example:
        >>> from jaxscale.models.families.llama import llama3_8b
        >>> found = plan_layouts(llama3_8b(), PlanConfig(gpus=8, batch_size=64, pipe=1))
        >>> found.best.layout.gpus
        8
        >>> plan_layouts(llama3_8b(), PlanConfig(gpus=1, batch_size=64))
        Traceback (most recent call last):
        ...
        ValueError: no layout of 1 H200 fits: ...
    """
    config = _sized(shape, config)
    fastest: dict[tuple[str, Any], Estimate] = {}
    smallest: dict[tuple[str, Any], Estimate] = {}
    refused: collections.Counter[str] = collections.Counter()
    limit = config.memory_share * config.hardware.memory
    kept: list[tuple[float, int, Estimate]] = []
    fitting = too_large = 0
    for layout in _layouts(shape, config, refused):
        found = estimate(shape, layout, config)
        keys = [(name, getattr(layout, name)) for name in CHOICES]
        if found.bytes > limit:
            too_large += 1
            _keep_least(smallest, keys, found, lambda x: x.bytes)
            continue
        fitting += 1
        _keep_least(fastest, keys, found, lambda x: x.seconds)
        heapq.heappush(kept, (-found.seconds, fitting, found))
        if len(kept) > _KEPT:
            heapq.heappop(kept)
    if not kept:
        raise ValueError(_nothing_fits(shape, config, smallest, refused, limit))
    return Plan(
        config=config,
        ranked=tuple(e for _, _, e in sorted(kept, key=lambda x: (-x[0], x[1]))),
        num_fitting=fitting,
        num_too_large=too_large,
        refused=refused,
        fastest=fastest,
        smallest=smallest,
    )


def estimate(shape: Shape, layout: Layout, config: PlanConfig) -> Estimate:
    """The estimated cost of one layout, whether or not it fits.

    Raises:
        ValueError: the model does not divide over the layout.
    """
    seq_len = config.seq_len or _seq_len(shape)
    layout.check(shape, seq_len)
    hardware = config.hardware
    time = step_time(shape, seq_len, layout, hardware, config.communication)
    tokens = layout.batch_size * seq_len
    rate = tokens / sum(time.values()) / layout.gpus
    return Estimate(
        layout=layout,
        time=time,
        memory=least_memory(shape, seq_len, layout),
        tokens=tokens,
        mfu=mfu(rate, shape.flops_per_token(seq_len, causal=True), hardware.peak),
    )


def train_settings(found: Estimate, config: PlanConfig) -> dict[str, Any]:
    """The settings of a `TrainConfig` that a layout decides, by dotted name."""
    layout = found.layout
    return {
        "mesh.pipe": layout.pipe,
        "mesh.data": layout.data,
        "mesh.fsdp": layout.fsdp,
        "mesh.context": layout.context,
        "mesh.tensor": layout.tensor,
        "mesh.axis_type": "auto",
        "data.batch_size": layout.batch_size,
        "data.seq_len": found.tokens // layout.batch_size,
        "microbatches": layout.microbatches,
        "rules": "megascale_3d" if layout.pipe > 1 else "fsdp_tp",
        "chunks": layout.chunks,
        "zero": layout.zero if layout.fsdp > 1 else 3,
        "replicated": False,
        "remat": layout.remat,
        # For layers that are not scanned XLA saves and moves more than is planned.
        "scan_layers": layout.remat != "none",
        "tensor_parallel": config.communication if layout.tensor > 1 else None,
        "quantization": layout.quantization,
        **{f"optimizer.{name}": getattr(config, name) for name in MOMENTS},
    }


def train_command(name: str, run: Any, found: Estimate, config: PlanConfig) -> str:
    """The command that trains with a layout."""
    options = []
    for setting, value in train_settings(found, config).items():
        if functools.reduce(getattr, setting.split("."), run) == value:
            continue
        option = setting.replace("_", "-")
        if isinstance(value, bool):
            *group, last = option.split(".")
            options.append("--" + ".".join([*group, last if value else f"no-{last}"]))
        else:
            options.append(f"--{option} {value}")
    options += [f"--xla-flags {preset}" for preset in xla_flags(found.layout)]
    share = f"XLA_CLIENT_MEM_FRACTION={max(config.memory_share, 0.75):g}"
    return f"{share} jaxscale train {name} " + " ".join(options)


def xla_flags(layout: Layout) -> tuple[str, ...]:
    """The presets of XLA flags whose overlap a plan assumes."""
    return ("overlap",) if layout.gpus > 1 else ()


def _seq_len(shape: Shape) -> int:
    return min(shape.max_seq_len, 8192)


def _sized(shape: Shape, config: PlanConfig) -> PlanConfig:
    """`config` with the sizes of a batch."""
    seq_len = config.seq_len or _seq_len(shape)
    if seq_len > shape.max_seq_len:
        raise ValueError(
            f"seq_len {seq_len} is longer than the model's max_seq_len "
            f"{shape.max_seq_len}; lower seq_len"
        )
    rows = config.batch_size or max(1, _TOKENS // seq_len)
    return dataclasses.replace(config, seq_len=seq_len, batch_size=rows)


def _layouts(
    shape: Shape, config: PlanConfig, refused: "collections.Counter[str]"
) -> Iterator[Layout]:
    """The layouts that the model divides over."""
    for sizes in _meshes(shape, config):
        for options in _options(shape, config, sizes):
            try:
                layout = Layout(
                    batch_size=config.batch_size or 1,
                    moment_bytes=config.moment_bytes,
                    memory_kind=config.memory_kind,
                    quantization=config.quantization,
                    **sizes,
                    **options,
                )
                layout.check(shape, config.seq_len or _seq_len(shape))
            except ValueError as error:
                refused[str(error).partition(";")[0]] += 1
                continue
            yield layout


def _meshes(shape: Shape, config: PlanConfig) -> Iterator[dict[str, int]]:
    """The sizes of the axes whose product is the number of GPUs."""
    host = config.hardware.host_gpus
    seq_len = config.seq_len or _seq_len(shape)
    for t in _sizes(config.tensor, config.gpus, most=host):
        for p in _sizes(config.pipe, config.gpus // t, most=shape.num_layers):
            rest = config.gpus // (t * p)
            most = max(1, seq_len // _LEAST_TOKENS)
            for c in _sizes(config.context, rest, most=most):
                groups = rest // c
                inside = [f for f in _divisors(groups) if f * t * c <= host]
                for f in sorted({1, max(inside, default=1), groups}):
                    yield from _split(config, p, t, c, groups, f)
                extra = config.fsdp or (groups // config.data if config.data else 1)
                if extra not in (1, max(inside, default=1), groups):
                    yield from _split(config, p, t, c, groups, extra)


def _split(
    config: PlanConfig, p: int, t: int, c: int, groups: int, f: int
) -> Iterator[dict[str, int]]:
    """The sizes with `f` shards, if they are as `config` gives them."""
    if f < 1 or groups % f:
        return
    sizes = {"data": groups // f, "fsdp": f, "pipe": p, "context": c, "tensor": t}
    if all(getattr(config, name) in (None, size) for name, size in sizes.items()):
        yield sizes


def _options(
    shape: Shape, config: PlanConfig, sizes: Mapping[str, int]
) -> Iterator[dict[str, Any]]:
    """The choices of a layout besides the sizes of its axes."""
    p = sizes["pipe"]
    each = max(1, (config.batch_size or 1) // (sizes["data"] * sizes["fsdp"]))
    rows = [r for r in _divisors(each) if r <= _MOST_ROWS and r & (r - 1) == 0]
    zeros: Sequence[int] = (1,)
    if sizes["fsdp"] > 1:
        # A pipeline accumulates full gradients over all microbatches.
        zeros = (1, 2, 3) if p == 1 else (1, 3)
    most = 1 if p == 1 else shape.num_layers // p
    largest = [-(-shape.num_layers // (p * v)) for v in range(1, most + 1)]
    # For equally many layers in the largest chunk, the fewest chunks.
    chunks = sorted({largest.index(layers) + 1 for layers in largest})
    remats: Sequence[str] = ("none", "attention", "full")
    for r in [config.rows] if config.rows else rows:
        # Several chunks need microbatches in groups of p.
        fitting = chunks if each // r % p == 0 else [1]
        for zero in [config.zero] if config.zero else zeros:
            for v in [config.chunks] if config.chunks else fitting:
                for remat in [config.remat] if config.remat else remats:
                    yield {"rows": r, "zero": zero, "chunks": v, "remat": remat}


def _sizes(given: int | None, total: int, *, most: int) -> list[int]:
    if given is not None:
        return [given] if total % given == 0 else []
    return [size for size in _divisors(total) if size <= most]


def _divisors(n: int) -> list[int]:
    low = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*low, *(n // i for i in low)})


def _keep_least(
    best: dict[tuple[str, Any], Estimate],
    keys: Sequence[tuple[str, Any]],
    found: Estimate,
    measure: Any,
) -> None:
    size = measure(found)
    for key in keys:
        if key not in best or size < measure(best[key]):
            best[key] = found


def _order(value: Any) -> Any:
    return ("none", "attention", "full").index(value) if value in _NAMES else value


_NAMES = ("none", "attention", "full")


def _nothing_fits(
    shape: Shape,
    config: PlanConfig,
    smallest: Mapping[tuple[str, Any], Estimate],
    refused: Mapping[str, int],
    limit: float,
) -> str:
    """The error that says how much memory is missing, or why nothing divides."""
    where = f"no layout of {config.gpus} {config.hardware.name}"
    if not smallest:
        most = sorted(refused, key=lambda reason: -refused[reason])[:4]
        reasons = "; ".join(most) or "no GPUs are left for an axis that is not given"
        return (
            f"{where} divides this model and batch: {reasons}; change the batch, the "
            "number of GPUs, or what is given"
        )
    least = min(smallest.values(), key=lambda found: found.bytes)
    part = max(least.memory, key=lambda name: least.memory[name])
    on_device = config.moment_bytes if config.memory_kind == "device" else 0
    state = (4 + on_device) * shape.num_parameters()
    kept = "Parameters and optimizer state" if on_device else "Parameters"
    enough = math.ceil(state / limit)
    return (
        f"{where} fits: the smallest, {describe(least.layout)}, needs "
        f"at least {least.bytes / 1e9:,.1f} GB of a GPU, which may take "
        f"{limit / 1e9:,.1f} GB, so {(least.bytes - limit) / 1e9:,.1f} GB are short; "
        f"the largest part is {part}, {least.memory[part] / 1e9:,.1f} GB. {kept} alone "
        f"are {state / 1e9:,.0f} GB, the memory of {enough} such GPUs; use more GPUs, "
        "shorter or fewer sequences, optimizer state in bfloat16 or on the host, or a "
        "smaller model"
    )


def describe(layout: Layout) -> str:
    """The layout in one line.

    Example:
        >>> describe(Layout(fsdp=4, tensor=2, zero=3, batch_size=8, remat="full"))
        'fsdp 4 x tensor 2, zero 3, rows 1, microbatches 2, remat full'
    """
    axes = ("pipe", "data", "fsdp", "context", "tensor")
    sizes = [f"{a} {getattr(layout, a)}" for a in axes if getattr(layout, a) > 1]
    parts = [" x ".join(sizes) or "one GPU"]
    if layout.fsdp > 1:
        parts.append(f"zero {layout.zero}")
    if layout.chunks > 1:
        parts.append(f"chunks {layout.chunks}")
    parts.append(f"rows {layout.rows}")
    parts.append(f"microbatches {layout.microbatches}")
    parts.append(f"remat {layout.remat}")
    return ", ".join([*parts, *([layout.quantization] if layout.quantization else [])])
