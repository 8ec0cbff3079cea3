"""The planner's model of the memory of a training step, part by part.

No constant is set by measurements: it counts the arrays that live at the peak of
programs that XLA compiled for 8 to 512 GPUs, see
``tests/training/planning/planned_memory.py``.
"""

import dataclasses

from jaxscale.sharding.schedule import stash_size
from jaxscale.training.planning.cost_model import (
    Layout,
    Program,
    Shape,
    local_parameters,
    local_tables,
)


# Bytes of a number of bf16 and of fp32.
_BF16, _FP32 = 2, 4
_LOSS_CHUNK = 1024
"""Positions of each row whose logits exist at one time; that of `TrainConfig`."""


def step_memory(
    shape: Shape, seq_len: int, layout: Layout, program: Program
) -> dict[str, float]:
    """Bytes of a GPU at the peak of a step, by part; their sum is the peak.

    It counts what lives at the peak of programs that XLA compiled: parameters in fp32,
    bf16 copies of what is computed with, tables of the vocabulary in fp32, gradients
    until they are scattered, and what the backward pass finds of each layer. A layer is
    added whose forward pass is there a second time. With a pipeline the stash holds
    what `remat` keeps of the layers of each chunk in flight, and of two more chunks,
    one that is read and one that is written. Of moments on the host an update holds
    those of one parameter and a half, at the size of the largest, where passes held
    activations: what it takes more than these counts.

    Args:
        shape: The model.
        seq_len: Tokens of a row.
        layout: How the GPUs share the step.
        program: Whether gathered inputs are kept.

    Returns:
        ``parameters``, ``moments``, ``gradients``, ``activations``, ``logits``.
    """
    f, layers = layout.fsdp, layout.layers(shape)
    local, vocabulary = local_parameters(shape, layout), local_tables(shape, layout)
    tokens = layout.rows * seq_len / layout.context
    chunk = layers // layout.chunks
    looped = layout.pipe > 1
    kept = tokens * chunk * _kept(shape, layout.remat, layout.tensor, program, looped)
    run = tokens * _kept(shape, "none", layout.tensor, program)
    rows = layout.rows * min(_LOSS_CHUNK, seq_len / layout.context)
    split = layout.tensor * layout.pipe
    logits = rows * shape.vocab_size * (_FP32 + _BF16) / split
    parts = _Parts(
        shape=shape,
        layout=layout,
        local=local,
        tables=vocabulary,
        layer=(local - vocabulary) / layers,
        kept=kept,
        run=run,
        logits=logits,
        looks_up_more=tokens >= shape.vocab_size,
    )
    found = parts.piped() if looped else parts.whole()
    sizes = {
        "parameters": local * _FP32 / f + found["computed"],
        "moments": layout.moment_bytes * local / f,
        "gradients": found["gradients"],
        "activations": found["activations"],
        "logits": max(0.0, found["logits"]),
    }
    if layout.memory_kind == "pinned_host":
        tables = shape.d_model * shape.vocab_size / split
        largest = max(shape.d_model * shape.d_ff * layers / layout.tensor, tables)
        update = (1.5 * layout.moment_bytes * largest + local * _FP32) / f
        passes = sum(sizes.values()) - sizes["moments"] - local * _FP32 / f
        sizes["moments"] = max(0.0, update - passes)
    return sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """What a step holds besides its state; numbers of parameters, or bytes."""

    shape: Shape
    layout: Layout
    local: float
    """Parameters before `fsdp` splits them."""
    tables: float
    """Those of embedding and output projection."""
    layer: float
    """Those of a layer."""
    kept: float
    """Bytes that the backward pass finds of all layers of a chunk."""
    run: float
    """Bytes of one layer that is computed again."""
    logits: float
    """Bytes of the logits of a chunk of the loss."""
    looks_up_more: bool
    """Whether a GPU has more tokens than the table rows, and so gathers it."""

    @property
    def blocks(self) -> float:
        """Parameters of the layers."""
        return self.local - self.tables

    @property
    def copied(self) -> float:
        """Bytes of parameters that XLA copies to update them.

        Sizes of compiled programs have them beside `tensor` alone; why is not known.
        """
        layout = self.layout
        return self.local * _FP32 / layout.fsdp if layout.tensor > 1 else 0.0

    def piped(self) -> dict[str, float]:
        """A pipeline: stash, gathered tables and parameters, sums of gradients."""
        layout, f = self.layout, self.layout.fsdp
        gathered = layout.zero == 3 and f > 1
        computed = (2 * self.layer if gathered else self.blocks) * _BF16
        if f > 1:  # tables are whole
            computed += self.tables * _FP32 + self.copied
        shards = f if layout.zero > 1 else 1
        added = self.blocks / shards + 2 * self.tables  # the sum, and one more
        slots = stash_size(layout.pipe, layout.microbatches, layout.chunks)
        return {
            "computed": computed,
            "gradients": added * _FP32,
            "activations": slots * self.kept + self.run,
            "logits": self.logits,
        }

    def whole(self) -> dict[str, float]:
        """All layers on each GPU."""
        if self.layout.fsdp == 1:
            return self._copied()
        return self._gathered() if self.layout.zero == 3 else self._once()

    def _copied(self) -> dict[str, float]:
        """Nothing is gathered."""
        layout = self.layout
        whole = self.local
        if layout.remat != "none":  # cast to bf16 again
            whole = 2 * self.layer + self.tables
        fresh = self.local * _FP32
        activations = self.kept + self.run
        if layout.remat == "none" and layout.microbatches == 1:
            # They take the place of activations as these are used up.
            least = self.tables / (1 if self.shape.tie_embeddings else 2) * _FP32
            fresh = max(least, fresh - activations)
        added = self.local * _FP32 if layout.microbatches > 1 else 0.0
        return {
            "computed": whole * _BF16,
            "gradients": added + fresh,
            "activations": activations,
            "logits": self.logits,
        }

    def _once(self) -> dict[str, float]:
        """ZeRO-1 and 2: gathered once a step."""
        layout, f = self.layout, self.layout.fsdp
        computed = self.blocks * _BF16 + self.tables * _FP32
        if layout.zero == 1:
            computed += self.copied
        scattered = layout.zero == 2 or layout.microbatches == 1
        fresh = self.blocks * _BF16
        activations = self.kept + self.run
        if scattered:  # in fp32, when activations are used up
            fp32 = (self.blocks + self.local / f) * _FP32
            fresh = max(fresh, fp32 - activations)
        added = self.local * _FP32 / (f if layout.zero == 2 else 1)
        return {
            "computed": computed,
            "gradients": added * (layout.microbatches > 1)
            + fresh
            + self.tables * _FP32,
            "activations": activations,
            "logits": self.logits,
        }

    def _gathered(self) -> dict[str, float]:
        """ZeRO-3: layers are gathered one ahead, tables each for its use."""
        layout, f, shape = self.layout, self.layout.fsdp, self.shape
        table = self.tables / (1 if shape.tie_embeddings else 2)
        computed, alone = 0.0, layout.tensor == 1
        if not alone:
            # Gathers want the split dimension first; these parameters have it last.
            heads = shape.num_heads * shape.head_dim
            moved = shape.num_layers * shape.d_model * (shape.d_ff + heads)
            computed = (moved / layout.tensor + table) * _FP32 / f
        working = table * (_FP32 + _BF16)  # before, during and after the layers
        working = max(working, 2 * self.layer * _BF16 + self.run)
        if layout.remat == "none" and alone:
            # The backward pass finds what the forward pass gathered.
            computed += self.blocks * _BF16
        # The output projection's is whole; an embedding of its own stays split.
        whole = self.tables if self.looks_up_more else table
        fresh = (self.blocks / f + whole + (self.tables - whole) / f) * _FP32
        several = layout.microbatches > 1
        # A loop over microbatches holds the zeros that each of them begins with.
        twice = 1 + several
        return {
            "computed": computed + working,
            "gradients": twice * fresh + several * self.tables / f * _FP32,
            "activations": self.kept
            * (twice if layout.remat != "none" and not alone else 1),
            "logits": self.logits - working,
        }


def _kept(
    shape: Shape, remat: str, tensor: int, program: Program, looped: bool = False
) -> float:
    """Bytes of a token and layer that the backward pass finds, on one GPU.

    In a loop over layers XLA cannot make again what it could leave out.
    """
    d, f = shape.d_model, shape.d_ff
    if remat == "full":
        return _BF16 * d / tensor
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    one_norm = shape.parallel_block and not shape.parallel_mlp_norm
    if remat == "none" and looped:
        # Of each norm three arrays in fp32 and its output, queries before and after
        # they are rotated, and twice what goes into and comes out of an activation.
        numbers = (1 if one_norm else 2) * 7 * d + 3 * q + 3 * kv
        numbers += 2 * shape.num_mlp_kernels * f
    elif remat == "none":
        # Inputs of norms, their outputs, queries, keys, values, what attention and the
        # feed-forward network feed their last products.
        numbers = (2 if one_norm else 4) * d + 2 * q + 2 * kv
        numbers += shape.num_mlp_kernels * f
    else:  # results of products and of attention, and the input
        numbers = 3 * d + 2 * q + 2 * kv + (shape.num_mlp_kernels - 1) * f
    gathered = (1 if shape.parallel_block else 2) * d * (tensor > 1)
    extra = gathered if program.keeps_gathered else 0
    return _BF16 * (numbers / tensor + extra)
