"""The planner's cost model of this library's training step: its time, part by part.

The time of a step is that of `m` microbatches on one stage, plus the pipeline bubble,
plus the costs once per step:

    time = (m + (p - 1) / v) stage + data + optimizer
    stage = matmuls + attention + elementwise + exposed communication

`step_time` describes each part, `jaxscale.training.planning.memory_model` the minimum
memory of a step. The constants of machines are in `jaxscale.training.hardware`, those
of the program here; ``benchmarks/publish/plan.py`` shows the error on measured runs.
Other programs recompute, overlap and communicate differently: nothing here describes
them.

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
    """What is read of a `DecoderConfig`, under the names that it has there."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def d_model(self) -> int: ...

    @property
    def num_layers(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def d_ff(self) -> int: ...

    @property
    def max_seq_len(self) -> int: ...

    @property
    def position(self) -> Any: ...

    @property
    def windows(self) -> Sequence[int | None]: ...

    @property
    def parallel_block(self) -> bool: ...

    @property
    def parallel_mlp_norm(self) -> bool: ...

    @property
    def tie_embeddings(self) -> bool: ...

    @property
    def num_mlp_kernels(self) -> int: ...

    def num_parameters(self) -> int: ...

    def flops_per_token(self, seq_len: int, causal: bool) -> float: ...


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
    quantization: Literal["fp8", "fp8_blockwise", "fp8_tensorwise"] | None = None
    """fp8 in the matmuls of the blocks, or None for bf16."""

    def __post_init__(self) -> None:
        sizes = ("data", "fsdp", "pipe", "context", "tensor")
        check_integers(self, 1, *sizes, "chunks", "batch_size", "rows", "moment_bytes")
        check_choice("memory_kind", self.memory_kind, ("device", "pinned_host"))
        check_choice("zero", self.zero, (1, 2, 3))
        check_choice("remat", self.remat, Remat)
        check_choice("quantization", self.quantization, (*_ROUNDING, None))
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


type TensorParallel = Literal["fused", "xla"]

# A tensor-parallel collective takes a fixed time and a fraction of what its bytes need
# on the links: fits of `benchmarks.collective_matmul` over two and four GPUs, 2,048 to
# 16,384 rows, at widths of 4,096 and 8,192.
_TENSOR_SECONDS = {"fused": 20e-6, "xla": 30e-6}
_TENSOR_EXPOSED = {"fused": 0.2, "xla": 1.0}
# Of the links, what XLA's collectives reach between two GPUs, from the same rows.
_PAIR = 0.8
# Exposed fraction of sends between stages, and of FSDP's collectives per layer and
# microbatch. Assumed, not measured.
_PIPE_EXPOSED, _LAYER_EXPOSED = 0.25, 0.3
# Memory traffic of norms, residuals and activations, relative to what they must read
# and write: set by LLaMA 1B on one H200 and by a 70B layer on four.
_ELEMENTWISE = 1.4
# Bytes read and written per parameter, by the compiled program: to accumulate the
# gradients of a microbatch, and by a pass of a layer that is sliced out of chunks.
_ACCUMULATION, _LAYER_COPIES = 12, 4
# Bytes read and written to round a value of an input, of a gradient and of a parameter
# to fp8, in forward and backward pass together; and per parameter that is rounded once
# a step for all microbatches.
_ROUNDING = {
    "fp8": (5, 5, 12),
    "fp8_blockwise": (5, 5, 12),
    "fp8_tensorwise": (7, 6, 20),
}
_ROUNDED_ONCE = 9


def step_time(
    shape: Shape,
    seq_len: int,
    layout: Layout,
    hardware: Hardware,
    tensor_parallel: TensorParallel = "xla",
) -> dict[str, float]:
    """Seconds of a training step, by part; their sum is the step.

    Matmuls run at the rate of large ones, attention at its own, elementwise operations
    at that of memory; full remat computes the forward pass twice, ``attention`` only
    elementwise operations. A tensor-parallel region all-gathers and reduce-scatters its
    tokens forward, the same backward and half of that again, because the gathered input
    is not saved. ``bubble`` is (p - 1) / v of a stage. ``elementwise`` includes other
    memory traffic: rounding to fp8, gradient accumulation, and layers that are sliced
    out of chunks.

    Returns:
        ``matmuls``, ``attention``, ``elementwise``, ``tensor``, ``context``, ``pipe``,
        ``bubble``, ``data``, ``optimizer``. Communication counts where it is exposed.

    Raises:
        ValueError: the matmuls are in fp8, which this GPU does not have.
    """
    m = layout.microbatches
    stage = _stage(shape, seq_len, layout, hardware, tensor_parallel)
    busy = sum(stage.values())
    parts = {name: m * seconds for name, seconds in stage.items()}
    parts["bubble"] = (layout.pipe - 1) / layout.chunks * busy
    once, each = _data(shape, layout, hardware)
    parts["data"] = once + max(_LAYER_EXPOSED * each, each - m * busy)
    # Optimizer state, parameters and gradients read, written and clipped, and cast to
    # bf16.
    local = local_parameters(shape, layout) / layout.fsdp
    parts["optimizer"] = 42 * local / hardware.hbm
    if layout.memory_kind == "pinned_host":
        # The next parameter's state is copied in while the previous one's is copied
        # out.
        parts["optimizer"] += 1.5 * layout.moment_bytes * local / hardware.host
    return parts


def _stage(
    shape: Shape,
    seq_len: int,
    layout: Layout,
    hardware: Hardware,
    tensor_parallel: TensorParallel,
) -> dict[str, float]:
    """Seconds per microbatch on a stage, forward and backward."""
    t, p, v, c = layout.tensor, layout.pipe, layout.chunks, layout.context
    d, layers = shape.d_model, layout.layers(shape)
    tokens = layout.rows * seq_len / c
    full = layout.remat == "full"
    passes = 3 + full
    block, attention = _work(shape, seq_len)
    # All stages share the output projection.
    products = 2 * passes * block * layers / _block_rate(layout, hardware)
    products += 6 * shape.vocab_size * d / p / hardware.matmul
    # The backward pass of attention has five matmuls, the forward pass two.
    attended = (3.5 + full) / 3 * attention * layers
    # Bytes per token forward, and twice that backward: reads and writes in bf16.
    touched = (14 * _norms(shape) + 6) * d + 2 * shape.num_mlp_kernels * shape.d_ff
    if shape.position == "rope":
        touched += 4 * (shape.num_heads + shape.num_kv_heads) * shape.head_dim
    again = 3 + (layout.remat != "none")
    of_token, of_parameter = _rounding(shape, layout)
    # What a scan saves beyond what must be, written and read.
    of_token += 2 * (saved_bytes(shape, layout) - least_saved(shape, layout))
    elementwise = layers * (again * touched * _ELEMENTWISE + of_token)
    added = of_parameter * block * layers / t
    if layout.microbatches > 1:
        shards = layout.fsdp if layout.zero > 1 else 1
        added += _ACCUMULATION * local_parameters(shape, layout) / shards
    if v > 1:
        cut = layers * block / t / (layout.fsdp if layout.zero == 3 else 1)
        added += 2 * _LAYER_COPIES * cut
    # Each region all-gathers, in fp8 if that is multiplied, and reduce-scatters its
    # tokens.
    tensor = 0.0
    if t > 1:
        regions = layers * (1 if shape.parallel_block else 2)
        wide = passes * (1 if layout.quantization else _BF16) + (passes - 1) * _BF16
        rate = hardware.rate(stride=1, size=t)
        rate *= _PAIR if t == 2 and tensor_parallel == "xla" else 1
        moved = tokens * regions * wide * d * (t - 1) / t / rate
        tensor = _TENSOR_EXPOSED[tensor_parallel] * moved
        tensor += (2 * passes - 1) * regions * _TENSOR_SECONDS[tensor_parallel]
    # Keys and values of the other parts of a sequence, in the backward pass too unless
    # they are saved, and their gradients back.
    kv = 2 * shape.num_kv_heads * shape.head_dim * _BF16 / t
    gathered = (again - 1) * kv * (c - 1) * layers
    # One activation each way per chunk; sent, then received.
    stride = t * c * layout.groups
    sent = 4 * v * _BF16 * d / t if p > 1 else 0.0
    return {
        "matmuls": tokens * products / t,
        "attention": tokens * attended / t / hardware.attention,
        "elementwise": (tokens * elementwise / t + added) / hardware.hbm,
        "tensor": tensor,
        "context": tokens * gathered / hardware.rate(stride=t, size=c),
        "pipe": _PIPE_EXPOSED
        * tokens
        * sent
        / hardware.neighbor_rate(stride=stride, size=p),
    }


def _block_rate(layout: Layout, hardware: Hardware) -> float:
    """FLOP/s of the matmuls of the blocks."""
    if layout.quantization is None:
        return hardware.matmul
    if hardware.matmul_fp8 is None:
        raise ValueError(
            f"quantization {layout.quantization!r}: the {hardware.name} has no matmuls "
            "in fp8; leave it out"
        )
    return hardware.matmul_fp8


def _rounding(shape: Shape, layout: Layout) -> tuple[float, float]:
    """Bytes that rounding to fp8 moves, per token of a layer and per parameter."""
    if layout.quantization is None:
        return 0.0, 0.0
    inputs, gradients, parameters = _ROUNDING[layout.quantization]
    again = layout.quantization != "fp8" and layout.fsdp > 1 and layout.zero == 3
    if layout.microbatches > 1 and layout.pipe == layout.tensor == 1 and not again:
        parameters = _ROUNDED_ONCE / layout.microbatches
    heads, d = shape.num_heads * shape.head_dim, shape.d_model
    read = 2 * d + heads + shape.d_ff
    made = 2 * d + heads + 2 * shape.num_kv_heads * shape.head_dim
    made += (shape.num_mlp_kernels - 1) * shape.d_ff
    return inputs * read + gradients * made, parameters


def _data(shape: Shape, layout: Layout, hardware: Hardware) -> tuple[float, float]:
    """Seconds of data-parallel collectives: once per step, and per microbatch."""
    f, inner = layout.fsdp, layout.context * layout.tensor
    local = local_parameters(shape, layout)
    # Parameters in bf16 are gathered, gradients scattered, over fsdp.
    part = local * (f - 1) / f / hardware.rate(stride=inner, size=f)
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
        rate = hardware.rate(stride=stride, size=size)
        once += 2 * _FP32 * (local / f) * (copies - 1) / copies / rate
    return once, layout.microbatches * each


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


def saved_bytes(shape: Shape, layout: Layout) -> float:
    """Bytes per token and layer saved for the backward pass, over all GPUs.

    The layers of a pipeline are scanned. Without activation checkpointing a scan saves
    what the gradient of each operation reads, the norms' in fp32.
    """
    if layout.pipe == 1 or layout.remat != "none":
        return least_saved(shape, layout)
    d, f, norms = shape.d_model, shape.d_ff, _norms(shape)
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    kept = 14 * norms * d + 8 * q + 4 * kv + 2 * (shape.num_mlp_kernels + 3) * f
    return kept - (norms * d + q + f if layout.quantization else 0)


def least_saved(shape: Shape, layout: Layout) -> float:
    """The same without what is saved twice or could be computed from the rest."""
    d, f, norms = shape.d_model, shape.d_ff, _norms(shape)
    if layout.remat == "full":  # the input
        return _BF16 * d
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if layout.remat == "attention":  # results of matmuls and of attention, and input
        return _BF16 * (3 * d + 2 * q + 2 * kv + (shape.num_mlp_kernels - 1) * f)
    # Inputs and outputs of norms, queries, keys, values, inputs of the output and down
    # projections; inputs of fp8 matmuls take one byte.
    kept = _BF16 * (2 * norms * d + 2 * q + 2 * kv + shape.num_mlp_kernels * f)
    return kept - (norms * d + f if layout.quantization else 0)


def _norms(shape: Shape) -> int:
    """Norms of a block."""
    return 1 if shape.parallel_block and not shape.parallel_mlp_norm else 2
