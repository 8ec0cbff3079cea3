"""Decoders with 8-bit weights, for inference."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxscale.checks import check_choice
from jaxscale.models.decoder import Decoder
from jaxscale.models.serving import compiled, mesh_of, prepare_read
from jaxscale.nn.linear import Linear
from jaxscale.nn.quantized_linear import Quantization, QuantizedLinear
from jaxscale.sharding.rules import AxisRules


def quantize(
    model: Decoder, weights: Quantization = "int8", *, mesh: Mesh | None = None
) -> Decoder:
    """The model as `Decoder.for_inference` returns it, with 8-bit weights.

    The kernels of attention, feed-forward networks and output projection become
    `jaxscale.nn.QuantizedLinear`: 8-bit values with a scale per output feature, rounded
    to nearest. Activations, sums, norms, biases and the embedding table keep their
    types. With tied embeddings the output projection is a quantized copy of the table,
    and a step reads only the copy. Sparse layers stay as they are. ``"fp8_dynamic"``
    rounds activations as well where many tokens are multiplied, except before the
    output projection.

    The result is for inference: it has no derivatives and cannot be saved. Layers are
    quantized one after another; the given model is not changed. To hold at most one
    unquantized block at a time, quantize while loading: ``load(path,
    quantization="int8")``.

    Args:
        model: A decoder, before or after `Decoder.for_inference`.
        weights: ``"int8"``, ``"fp8"`` (E4M3), or ``"fp8_dynamic"``: weights and
            activations in fp8, see `jaxscale.nn.quantized_linear.Quantization`.
        mesh: Target devices; by default the model's own mesh.

    Raises:
        ValueError: `weights` is unknown, a weight is NaN or infinite, or the model is
            quantized already.

    Example:
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> block = quantize(model, "fp8").blocks[0]
        >>> block.mlp.down.kernel.shape, block.mlp.down.kernel.dtype
        ((32, 64), dtype(float8_e4m3fn))
    """
    check_choice("weights", weights, Quantization)
    result = model.for_inference(mesh)
    if any(isinstance(m, QuantizedLinear) for _, m in nnx.iter_modules(result)):
        raise ValueError("model is quantized already; quantize the one it was made of")
    result = jax.tree.map(lambda p: p, result)
    mesh = mesh_of(result)
    for number, block in enumerate(result.blocks):
        _quantize_block(block, weights, mesh, result.rules, number)
    return quantize_rest(result, weights, mesh)


def quantize_read(
    block: nnx.Module,
    number: int,
    convert: Callable[[Any], Any],
    *,
    weights: Quantization,
    mesh: Mesh | None,
    rules: AxisRules,
) -> nnx.Module:
    """Prepare a block for inference, as it was read, and quantize it.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    block = prepare_read(block, number, convert, mesh=mesh, rules=rules)
    _quantize_block(block, weights, mesh, rules, number)
    return block


def quantize_rest(model: Decoder, weights: Quantization, mesh: Mesh | None) -> Decoder:
    """Quantize the output projection and the tables of a model with quantized blocks.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    name = "embed" if model.lm_head is None else "lm_head"
    head = compiled(_head_maker(weights), model, mesh, model.rules)
    model.lm_head = nnx.data(_checked(head, name))
    for table in (model.embed, model.positions):
        if table is not None:
            table.table.set_value(table.table[...].astype(table.dtype))
    return model


def replace_linear(
    module: nnx.Module, make: Callable[[Linear, str], QuantizedLinear]
) -> None:
    """Replace each `Linear` by ``make(layer, path)``, one after the other."""
    for path, parent in list(nnx.iter_modules(module)):
        for attribute, layer in list(vars(parent).items()):
            if isinstance(layer, Linear):
                made = make(layer, ".".join(map(str, (*path, attribute))))
                setattr(parent, attribute, nnx.data(made))


def quantized_head(model: Decoder, weights: Quantization) -> QuantizedLinear:
    """The output projection with 8-bit weights; for tied embeddings a copy."""
    kernel, bias = model.output_embedding()
    return QuantizedLinear(
        kernel,
        # Logits keep the precision of the activations, and few tokens have logits.
        "fp8" if weights == "fp8_dynamic" else weights,
        kernel_axes=("embed", "vocab"),
        out_axes=("batch", None, "act_vocab"),
        bias=bias,
        dtype=model.dtype,
        out_dtype=jnp.float32,
        rules=model.rules,
    )


def _quantize_block(
    block: nnx.Module,
    weights: Quantization,
    mesh: Mesh | None,
    rules: AxisRules,
    number: int,
) -> None:
    def make(layer: Linear, path: str) -> QuantizedLinear:
        made = compiled(_maker(weights), layer, mesh, rules)
        return _checked(made, f"blocks.{number}.{path}")

    replace_linear(block, make)


def _checked(layer: QuantizedLinear, name: str) -> QuantizedLinear:
    if not jnp.isfinite(layer.scale[...]).all():
        raise ValueError(
            f"{name} has a weight that is NaN or infinite, which no number of 8 bits "
            "stands for; repair the file, or the training that made it"
        )
    return layer


# The same function each time: it is compiled once for layers that are alike.


@functools.cache
def _maker(weights: Quantization) -> Any:
    return lambda layer: QuantizedLinear.of(layer, weights)


@functools.cache
def _head_maker(weights: Quantization) -> Any:
    return lambda model: quantized_head(model, weights)
