"""What a training step cannot do without: a lower bound of a GPU's memory, counted.

Nothing is fitted. What XLA reserves is more: copies in bf16, gathered parameters,
logits, room to work in, holes. ``jaxscale plan --compile`` says how much that is.
"""

from jaxscale.sharding.schedule import stash_size
from jaxscale.training.planning.cost_model import Layout, Shape, local_parameters


_BF16, _FP32 = 2, 4  # bytes of a number


def least_memory(shape: Shape, seq_len: int, layout: Layout) -> dict[str, float]:
    """Bytes of a GPU that a step needs at least, by part.

    Parameters and gradients are in fp32; ZeRO-1 and 2 hold all parameters in bf16
    besides. Gradients of one microbatch take the place of
    the activations that they are computed from; those of several are added up, as in a
    pipeline, and stand beside them.

    Args:
        shape: The model.
        seq_len: Tokens of a row.
        layout: How the GPUs share the step.

    Returns:
        ``parameters``, ``moments``, ``gradients``, ``activations``.
    """
    local, shards = local_parameters(shape, layout), layout.fsdp
    tokens = layout.rows * seq_len / layout.context
    chunks_in_flight = 1
    if layout.pipe > 1:
        chunks_in_flight = stash_size(layout.pipe, layout.microbatches, layout.chunks)
    layers = layout.layers(shape) // layout.chunks * chunks_in_flight
    kept = tokens * layers * _kept(shape, layout.remat) / layout.tensor
    gradients = local * _FP32 / shards
    if layout.pipe > 1 or layout.microbatches > 1:
        gradients *= 1 if layout.zero > 1 else shards
    else:
        kept = max(0.0, kept - gradients)
    gathered = shards > 1 and layout.zero < 3
    moments = layout.moment_bytes * local / shards
    return {
        "parameters": local * (_FP32 / shards + _BF16 * gathered),
        "moments": moments if layout.memory_kind == "device" else 0.0,
        "gradients": gradients,
        "activations": kept,
    }


def _kept(shape: Shape, remat: str) -> float:
    """Bytes of a token and layer that the backward pass finds, of all GPUs."""
    d, f = shape.d_model, shape.d_ff
    if remat == "full":  # the input
        return _BF16 * d
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if remat == "attention":  # results of products and of attention, and the input
        return _BF16 * (3 * d + 2 * q + 2 * kv + (shape.num_mlp_kernels - 1) * f)
    # Inputs of norms, their outputs, queries, keys, values, what attention and the
    # feed-forward network feed their last products.
    norms = 1 if shape.parallel_block and not shape.parallel_mlp_norm else 2
    return _BF16 * (2 * norms * d + 2 * q + 2 * kv + shape.num_mlp_kernels * f)
