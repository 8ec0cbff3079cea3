"""The planner's cost model of a training step: its time, part by part.

The time of a step is that of `m` microbatches on one stage, plus the pipeline bubble,
plus the costs once per step:

    time = (m + (p - 1) / v) stage + data + optimizer + fixed
    stage = matmuls + attention + elementwise + exposed communication

`step_time` describes each part, `jaxscale.training.planning.memory_model` the minimum
memory of a step. The constants of machines are in `jaxscale.training.hardware`, those
of programs in `Program`; ``benchmarks/publish/plan.py`` shows the error on published
and measured runs.

GPUs are numbered so that the axes vary from slow to fast as ``pipe``, ``data``,
``fsdp``, ``context``, ``tensor``: a pipeline needs the least bandwidth.

Legend: p stages, v chunks per stage, m microbatches, L layers, D model, F hidden, N and
K query and key heads of H features, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, runtime_checkable

from jaxscale.checks import check_choice, check_integers
from jaxscale.sharding.schedule import check_schedule, place_layers
from jaxscale.training.hardware import Hardware


type Remat = Literal["none", "attention", "full"]

# Bytes per value of bf16 and of fp32.
_BF16, _FP32 = 2, 4


@runtime_checkable
class Shape(Protocol):
    """The interface of a decoder's shape; a `DecoderConfig` has it."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding table, V."""
        ...

    @property
    def d_model(self) -> int:
        """Width, D."""
        ...

    @property
    def num_layers(self) -> int:
        """Blocks, L."""
        ...

    @property
    def num_heads(self) -> int:
        """Query heads, N."""
        ...

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads, K."""
        ...

    @property
    def head_dim(self) -> int:
        """Features of a head, H."""
        ...

    @property
    def d_ff(self) -> int:
        """Hidden features, F."""
        ...

    @property
    def max_seq_len(self) -> int:
        """Longest sequence."""
        ...

    @property
    def position(self) -> Any:
        """``rope``, which is applied in every layer, or another kind."""
        ...

    @property
    def windows(self) -> Sequence[int | None]:
        """The window of each layer."""
        ...

    @property
    def parallel_block(self) -> bool:
        """Whether the block is parallel, with one tensor-parallel region."""
        ...

    @property
    def parallel_mlp_norm(self) -> bool:
        """Whether a parallel block has two norms."""
        ...

    @property
    def tie_embeddings(self) -> bool:
        """Whether the output projection is the embedding table."""
        ...

    @property
    def num_mlp_kernels(self) -> int:
        """Kernels of the feed-forward network."""
        ...

    def num_parameters(self) -> int:
        """Parameters of the whole model."""
        ...

    def flops_per_token(self, seq_len: int, causal: bool) -> float:
        """FLOPs of forward and backward pass for one token."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """A parallelism layout.

    Example:
        >>> layout = Layout(fsdp=16, pipe=8, tensor=8, chunks=5, batch_size=512)
        >>> layout.gpus, layout.microbatches
        (1024, 32)
    """

    data: int = 1
    """Data-parallel replicas."""
    fsdp: int = 1
    """FSDP shards of parameters or optimizer state, see `zero`; also data-parallel."""
    pipe: int = 1
    """Pipeline-parallel stages, p."""
    context: int = 1
    """Context-parallel shards of each sequence."""
    tensor: int = 1
    """Tensor-parallel shards of heads and hidden features."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage of `fsdp`. 1: optimizer state and fp32 parameters; full gradients are
    accumulated, and reduce-scattered once a step. 2: gradients too, reduce-scattered
    after each microbatch. 3: also the compute parameters, all-gathered before each
    use."""
    chunks: int = 1
    """Model chunks per stage (virtual stages), v."""
    batch_size: int
    """Global batch size, in sequences."""
    rows: int = 1
    """Sequences per microbatch of one of the `data` x `fsdp` groups."""
    remat: Remat = "none"
    """Activation checkpointing policy."""
    moment_bytes: int = 8
    """Bytes of optimizer state per parameter."""
    memory_kind: Literal["device", "pinned_host"] = "device"
    """Where optimizer state is stored between steps."""

    def __post_init__(self) -> None:
        sizes = ("data", "fsdp", "pipe", "context", "tensor")
        check_integers(self, 1, *sizes, "chunks", "batch_size", "rows", "moment_bytes")
        check_choice("memory_kind", self.memory_kind, ("device", "pinned_host"))
        check_choice("zero", self.zero, (1, 2, 3))
        check_choice("remat", self.remat, Remat)
        each = self.rows * self.groups
        if self.batch_size % each:
            raise ValueError(
                f"batch_size {self.batch_size} is not divisible by rows {self.rows} x "
                f"data {self.data} x fsdp {self.fsdp} = {each}"
            )

    @property
    def gpus(self) -> int:
        """GPUs of the layout."""
        return self.groups * self.pipe * self.context * self.tensor

    @property
    def groups(self) -> int:
        """Data-parallel groups of GPUs."""
        return self.data * self.fsdp

    @property
    def microbatches(self) -> int:
        """Microbatches per step, m."""
        return self.batch_size // (self.rows * self.groups)

    def check(self, shape: Shape, seq_len: int) -> None:
        """Raise if the model does not divide over the layout.

        Raises:
            ValueError: it does not; the message names the size and the axis.
        """
        for name, size, axis in (
            ("num_heads", shape.num_heads, "tensor"),
            ("num_kv_heads", shape.num_kv_heads, "tensor"),
            ("d_ff", shape.d_ff, "tensor"),
            ("d_model", shape.d_model, "fsdp"),
        ):
            if size % (ways := getattr(self, axis)):
                raise ValueError(f"{name} {size} is not divisible by {axis} {ways}")
        parts = self.context * self.tensor
        if self.context > 1:  # a device has two pieces of a sequence
            parts = math.lcm(parts, 2 * self.context)
        if seq_len % parts:
            raise ValueError(
                f"seq_len {seq_len} is not divisible by {parts} for context "
                f"{self.context} x tensor {self.tensor}"
            )
        if self.pipe * self.chunks > shape.num_layers:
            raise ValueError(
                f"num_layers {shape.num_layers} are fewer than pipe {self.pipe} x "
                f"chunks {self.chunks}"
            )
        if self.chunks > 1 and self.pipe == 1:
            raise ValueError(f"chunks {self.chunks} need a pipeline; set pipe above 1")
        if self.pipe > 1:
            check_schedule(self.pipe, self.microbatches, self.chunks)
            _check_windows(tuple(shape.windows), self.pipe, self.chunks)

    def layers(self, shape: Shape) -> int:
        """Layers per stage that count for time; uneven chunks count as the largest."""
        return self.chunks * -(-shape.num_layers // (self.pipe * self.chunks))


@functools.lru_cache(maxsize=4096)
def _check_windows(windows: tuple[int | None, ...], stages: int, chunks: int) -> None:
    """Raise if the windows of the layers do not repeat with each chunk."""
    if len(set(windows)) < 2:
        return
    places = place_layers(len(windows), stages, chunks)
    for layers in places.reshape(-1, places.shape[-1]).T:
        if len({windows[i] for i in layers if i >= 0}) > 1:
            raise ValueError(
                f"the windows of the layers do not repeat with each chunk of pipe "
                f"{stages} x chunks {chunks}, and all stages run one program"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """The exposed fraction of each kind of communication, and overheads."""

    name: str
    """Name in tables."""
    tensor_exposed: float = 1.0
    """Exposed fraction of tensor-parallel collectives."""
    pipe_exposed: float = 1.0
    """Exposed fraction of sends and receives between stages."""
    context_exposed: float = 1.0
    """Exposed fraction of all-gathers of keys and values."""
    step_exposed: float = 1.0
    """Exposed fraction of collectives that run once per step."""
    layer_exposed: float = 1.0
    """Exposed fraction of collectives per layer and microbatch (ZeRO-2 and 3), at least
    the time beyond all computation."""
    elementwise: float = 1.0
    """Memory traffic of norms, residuals and activations, relative to fused ones."""
    accumulation: float = 0.0
    """Bytes read and written per parameter to accumulate the gradients of a microbatch;
    0 if that is part of the matmuls and of their rate."""
    layer_copies: float = 0.0
    """Bytes read and written per parameter before each forward or backward pass of its
    layer, on a stage of several chunks, which slices the layer out."""
    split_vocabulary: bool = True
    """Whether all stages share the output projection; otherwise the last one has it,
    and the others wait."""
    network: float = 1.0
    """Achieved fraction of the network cards' bandwidth."""
    fixed: float = 0.0
    """Seconds per step for data and the host."""
    jitter: float = 0.0
    """Fraction of a step per doubling of the GPUs above 256, in which all wait for the
    slowest."""


JAXSCALE_XLA = Program(
    name="jaxscale, collectives by XLA",
    pipe_exposed=0.25,
    layer_exposed=0.3,
    elementwise=1.4,
    accumulation=12.0,
    layer_copies=4.0,
    jitter=0.01,
)
"""This library with ``tensor_parallel="xla"``. `elementwise` is set by training LLaMA
1B on one H200 and by a 70B layer on four. That XLA hides three quarters of sends and
70% of the gathers of ZeRO-3 is assumed, not measured; `jitter` is MegaScale's."""

JAXSCALE_FUSED = dataclasses.replace(
    JAXSCALE_XLA,
    name="jaxscale, fused kernels",
    tensor_exposed=0.15,
)
"""This library with ``tensor_parallel="fused"``, which runs inside one process alone:
80% to 88% of the communication of a 70B layer were measured to be hidden."""


def step_time(
    shape: Shape, seq_len: int, layout: Layout, hardware: Hardware, program: Program
) -> dict[str, float]:
    """Seconds of a training step, by part; their sum is the step.

    Matmuls run at the rate of large ones, attention at its own, elementwise operations
    at that of memory; full remat computes the forward pass twice, ``attention`` only
    elementwise operations. A tensor-parallel region all-gathers and reduce-scatters its
    tokens forward, the same backward and half of that again, because the gathered input
    is not saved. ``bubble`` is (p - 1) / v of a stage. ``elementwise`` includes other
    memory traffic: gradient accumulation, and layers that are sliced out of chunks.

    Returns:
        ``matmuls``, ``attention``, ``elementwise``, ``tensor``, ``context``, ``pipe``,
        ``bubble``, ``data``, ``optimizer``, ``fixed``, ``jitter``. Communication counts
        where it is exposed.
    """
    m, stage = layout.microbatches, _stage(shape, seq_len, layout, hardware, program)
    busy = sum(stage.values())
    parts = {name: m * seconds for name, seconds in stage.items()}
    parts["bubble"] = (layout.pipe - 1) / layout.chunks * busy
    once, each = _data(shape, layout, hardware, program)
    steady = m * busy
    hidden = max(program.layer_exposed * each, each - steady)
    parts["data"] = program.step_exposed * once + hidden
    # Optimizer state, parameters and gradients read, written and clipped, and cast to
    # bf16.
    local = local_parameters(shape, layout) / layout.fsdp
    parts["optimizer"] = 42 * local / hardware.hbm
    if layout.memory_kind == "pinned_host":
        # The next parameter's state is copied in while the previous one's is copied
        # out.
        parts["optimizer"] += 1.5 * layout.moment_bytes * local / hardware.host
    parts["fixed"] = program.fixed
    doublings = max(0.0, math.log2(layout.gpus / 256))
    parts["jitter"] = program.jitter * doublings * sum(parts.values())
    return parts


def _stage(
    shape: Shape, seq_len: int, layout: Layout, hardware: Hardware, program: Program
) -> dict[str, float]:
    """Seconds per microbatch on a stage, forward and backward."""
    t, p, v, c = layout.tensor, layout.pipe, layout.chunks, layout.context
    d, layers = shape.d_model, layout.layers(shape)
    tokens = layout.rows * seq_len / c
    full = layout.remat == "full"
    passes = 3 + full
    block, attention = _work(shape, seq_len)
    products = 2 * passes * block * layers
    products += 6 * shape.vocab_size * d / (p if program.split_vocabulary else 1)
    # The backward pass of attention has five matmuls, the forward pass two.
    attended = (3.5 + full) / 3 * attention * layers
    # Bytes per token forward, and twice that backward: reads and writes in bf16.
    one_norm = shape.parallel_block and not shape.parallel_mlp_norm
    touched = (14 * (2 - one_norm) + 6) * d + 2 * shape.num_mlp_kernels * shape.d_ff
    if shape.position == "rope":
        touched += 4 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    again = 3 + (layout.remat != "none")
    elementwise = again * touched * layers * program.elementwise / hardware.hbm
    added = 0.0
    if layout.microbatches > 1:
        added = program.accumulation * local_parameters(shape, layout) / hardware.hbm
        added /= layout.fsdp if layout.zero > 1 else 1
    if v > 1:
        cut = layers * block / t / (layout.fsdp if layout.zero == 3 else 1)
        added += 2 * program.layer_copies * cut / hardware.hbm
    # Each region all-gathers and reduce-scatters its tokens.
    regions = 1 if shape.parallel_block else 2
    moved = (passes - 0.5) * 2 * regions * layers * _BF16 * d * (t - 1) / t
    tensor = moved / hardware.rate(stride=1, size=t)
    # Keys and values of the other parts of a sequence, in the backward pass too unless
    # they are saved, and their gradients back.
    kv = 2 * shape.num_kv_heads * shape.head_dim * _BF16 / t
    gathered = (again - 1) * kv * (c - 1) * layers
    context = gathered / _rate(hardware, program, stride=t, size=c)
    # One activation each way per chunk; sent, then received.
    stride = t * c * layout.groups
    sent = 4 * v * _BF16 * d / t if p > 1 else 0.0
    nic = hardware.neighbor_rate(stride=stride, size=p)
    pipe = sent / (nic if nic == hardware.link else nic * program.network)
    return {
        "matmuls": tokens * products / t / hardware.matmul,
        "attention": tokens * attended / t / hardware.attention,
        "elementwise": tokens * elementwise / t + added,
        "tensor": tokens * tensor * program.tensor_exposed,
        "context": tokens * context * program.context_exposed,
        "pipe": tokens * pipe * program.pipe_exposed,
    }


def _data(
    shape: Shape, layout: Layout, hardware: Hardware, program: Program
) -> tuple[float, float]:
    """Seconds of data-parallel collectives: once per step, and per microbatch."""
    f, inner = layout.fsdp, layout.context * layout.tensor
    local = local_parameters(shape, layout)
    shard_rate = _rate(hardware, program, stride=inner, size=f)
    # Parameters in bf16 are gathered, gradients scattered, over fsdp.
    part = local * (f - 1) / f / shard_rate
    if layout.zero == 3:  # gathered forward and backward, then scattered
        once, each = 0.0, 3 * _BF16 * part
    elif layout.zero == 2:
        once, each = _BF16 * part, _BF16 * part
    else:
        once, each = (_BF16 + _FP32) * part, 0.0
    # Replicas of the parameters, over data and context, reduce the gradients of a
    # shard.
    copies = layout.data * layout.context
    if copies > 1:
        far = (inner * f, layout.data)
        stride, size = far if layout.data > 1 else (layout.tensor, layout.context)
        rate = _rate(hardware, program, stride=stride, size=size)
        once += 2 * _FP32 * (local / f) * (copies - 1) / copies / rate
    return once, layout.microbatches * each


def _rate(hardware: Hardware, program: Program, *, stride: int, size: int) -> float:
    rate = hardware.rate(stride=stride, size=size)
    inside = stride * size <= hardware.host_gpus
    return rate if inside else rate * program.network


@functools.lru_cache(maxsize=64)
def _work(shape: Shape, seq_len: int) -> tuple[float, float]:
    """Parameters of a layer in matmuls, and FLOPs of its attention per token."""
    heads = 2 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    block = shape.d_model * (heads + shape.num_mlp_kernels * shape.d_ff)
    products = shape.num_layers * block + shape.d_model * shape.vocab_size
    attention = shape.flops_per_token(seq_len, causal=True) - 6 * products
    return block, attention / shape.num_layers


def local_parameters(shape: Shape, layout: Layout) -> float:
    """Parameters on one GPU, before `fsdp` splits them."""
    tables = 1 if shape.tie_embeddings else 2
    vocabulary = tables * shape.vocab_size * shape.d_model
    layer = (_num_parameters(shape) - vocabulary) / shape.num_layers
    return layer * layout.layers(shape) / layout.tensor + vocabulary / (
        layout.pipe * layout.tensor
    )


@functools.lru_cache(maxsize=64)
def _num_parameters(shape: Shape) -> int:
    return shape.num_parameters()
