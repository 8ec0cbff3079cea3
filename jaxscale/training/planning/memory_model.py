"""A lower bound on the GPU memory of a training step.

It is counted, not fitted. XLA reserves more: gathered parameters, logits, temporaries,
fragmentation. ``jaxscale plan --compile`` says how much.
"""

from jaxscale.sharding.schedule import stash_size
from jaxscale.training.planning.cost_model import (
    Layout,
    Shape,
    local_parameters,
    saved_bytes,
)


_BF16, _FP32 = 2, 4  # bytes of a number


def least_memory(shape: Shape, seq_len: int, layout: Layout) -> dict[str, float]:
    """Minimum bytes per GPU of a step, by part.

    Parameters and gradients are in fp32; ZeRO-1 and 2 also hold all parameters in bf16.
    Gradients of a single microbatch reuse the memory of the activations; with gradient
    accumulation, as in a pipeline, they are held besides. Without a pipeline it also
    holds parameters as they are multiplied: in bf16, or in fp8 in both layouts.

    Returns:
        ``parameters``, ``optimizer state``, ``gradients``, ``activations``.
    """
    local, shards = local_parameters(shape, layout), layout.fsdp
    tokens = layout.rows * seq_len / layout.context
    chunks_in_flight = 1
    if layout.pipe > 1:
        chunks_in_flight = stash_size(layout.pipe, layout.microbatches, layout.chunks)
    layers = layout.layers(shape) // layout.chunks * chunks_in_flight
    kept = tokens * layers * saved_bytes(shape, layout) / layout.tensor
    gradients = local * _FP32 / shards
    if layout.pipe > 1 or layout.microbatches > 1:
        gradients *= 1 if layout.zero > 1 else shards
    else:
        kept = max(0.0, kept - gradients)
    gathered = shards > 1 and layout.zero < 3
    narrow = _BF16 * gathered
    if layout.pipe == 1 and layout.microbatches > 1:
        narrow = _BF16 / (1 if gathered else shards)
        if gathered and layout.quantization and layout.tensor == 1:
            narrow *= 2
    moments = layout.moment_bytes * local / shards
    return {
        "parameters": local * (_FP32 / shards + narrow),
        "optimizer state": moments if layout.memory_kind == "device" else 0.0,
        "gradients": gradients,
        "activations": kept,
    }
