"""A stack of Transformer blocks: construction and execution.

The parameters of the blocks are stacked along a leading ``layers`` axis. Legend: B
batch, T tokens of a (packed) row, D model, L layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxscale.checks import check_choice
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import Block
from jaxscale.nn.context import packed_attention_saveable
from jaxscale.nn.embeddings import Embed
from jaxscale.nn.self_attention import ROTATED_NAME, AttentionState, Packed
from jaxscale.sharding.fp8 import OUT_NAME as FP8_NAME
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import AxisRules
from pallas_kernels.collective_matmul.ops import (
    GATHER_OUT_NAME,
    GATHERED_NAME,
    REDUCE_OUT_NAME,
    SCATTER_OUT_NAME,
)
from pallas_kernels.matmul.dense import OUT_NAME as DENSE_NAME
from pallas_kernels.tile_sparse_matmul.passes import OUT_NAME as TILE_SPARSE_NAME


type _Carry = tuple[Array, tuple[Any, ...]]
"""The residual stream, and the carried part of the state."""
type _Layer = tuple[Block, Array | None]
"""A block, and whether it is active."""

_policies = jax.checkpoint_policies
# A fused matmul is no dot to the policies; the names are those of the results.
_linear_saveable = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable,
    _policies.save_only_these_names(
        GATHER_OUT_NAME,
        SCATTER_OUT_NAME,
        REDUCE_OUT_NAME,
        DENSE_NAME,
        FP8_NAME,
        TILE_SPARSE_NAME,
    ),
)
_rotated_saveable = _policies.save_only_these_names(ROTATED_NAME)
_gathered_saveable = _policies.save_only_these_names(GATHERED_NAME)


def _attention_saveable(primitive: Any, *args: Any, **params: Any) -> bool:
    """Save the results of linear layers and of fused attention."""
    return (
        # cuDNN's forward pass, whose result and log-sum-exp carry no names.
        primitive.name.startswith("dot_product_attention_fwd")
        or packed_attention_saveable(primitive, *args, **params)
        or _rotated_saveable(primitive, *args, **params)
        or _linear_saveable(primitive, *args, **params)
    )


REMAT_POLICIES: dict[str, Callable[..., Any] | None] = {
    "none": None,
    "full": _policies.nothing_saveable,
    "dots": _policies.save_from_both_policies(
        _policies.dots_saveable, _linear_saveable
    ),
    "dots_no_batch": _linear_saveable,
    "attention": _attention_saveable,
}
"""Activation checkpointing: what a block's forward pass saves for the backward pass.

- ``none``: everything. Fastest, most memory.
- ``full``: the block's input only; the block is recomputed.
- ``dots``: results of all matmuls, attention scores among them.
- ``dots_no_batch``: results of the linear layers; attention and elementwise operations
  are recomputed.
- ``attention``: the same and the results of fused attention (ours, cuDNN's), with
  queries and keys as rotated for it, so that only other elementwise operations are
  recomputed. The usual choice.

fp8 linear layers save their inputs in fp8 with ``none``; with the others they quantize
them again, unless your own policy saves the name ``fp8_operand``.

With ``tensor_parallel="fused"`` the last three also save the gathered inputs of the
linear layers, which only the kernel could recompute; ``"xla"`` gathers them again.
"""


def check_remat(remat: str) -> None:
    """Raise unless `remat` is the name of a policy."""
    check_choice("remat", remat, tuple(REMAT_POLICIES))


def make_stack(
    make_block: Callable[[nnx.Rngs], Block], num_layers: int, rngs: nnx.Rngs
) -> Block:
    """`num_layers` blocks that `make_block` makes, each parameter stacked."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> Block:
        return make_block(rngs)

    return make(rngs)


def unstacked[Model: nnx.Module](model: Model) -> Model:
    """`model` with unstacked ``blocks``, each with its own parameters.

    A compiled program that runs the blocks of a stack one by one copies each parameter
    out of the stack; unstacked parameters are read in place.
    """
    result: Any = jax.tree.map(lambda p: p, model)
    result.scan_layers = False
    if isinstance(blocks := result.blocks, Block):
        (count,) = {p.shape[0] for p in jax.tree.leaves(blocks)}

        @jax.jit
        def split(blocks: Block) -> list[Block]:
            return [single_block(blocks, i) for i in range(count)]

        result.blocks = nnx.List(split(blocks))
    return result


def single_block(blocks: Block, layer: int) -> Block:
    """One block of a stack, without the layer axis."""
    block = jax.tree.map(lambda p: p[layer], blocks)
    is_variable = lambda node: isinstance(node, nnx.Variable)  # noqa: E731
    for variable in jax.tree.leaves(block, is_leaf=is_variable):
        if (axes := variable.get_metadata().get("out_sharding")) is not None:
            variable.set_metadata(out_sharding=axes[1:])
    return block


def run_stack[State: AttentionState](
    blocks: Block | Sequence[Block],
    x: Float[Array, "B T D"],
    state: State,
    *,
    variants: Sequence[AttentionConfig | None],
    remat: str,
    scan: bool,
    order: Sequence[int] | None = None,
    keep_gathered: bool = False,
    active: Bool[Array, "L"] | None = None,
    call: Callable[[Block, Array, State], tuple[Array, State]] | None = None,
) -> tuple[Float[Array, "B T D"], State]:
    """Run all blocks in turn, ``x, state = block(x, state)``.

    Args:
        blocks: The stack, or the result of `unstacked`, which is not scanned.
        x: Residual stream.
        state: The attention state, whose carried fields are passed from layer to layer.
        variants: The attention of each layer. A scan compiles the shortest pattern that
            repeats.
        remat: A name of `REMAT_POLICIES`.
        scan: Scan over the blocks in the compiled program, instead of one copy each.
        order: Block number of each layer, if layers share blocks.
        keep_gathered: True also saves the gathered input of `all_gather_matmul`, if
            `remat` saves results of linear layers.
        active: Which blocks are layers; the others pass `x` through. None: all are.
        call: How a block is called; ``block(x, state)`` if None.
    """
    num_layers = len(variants)

    def run_layer(
        layer: Array | int, variant: AttentionConfig | None
    ) -> Callable[[_Carry, _Layer], _Carry]:
        def body(carry: _Carry, layer_of_stack: _Layer) -> _Carry:
            block, on = layer_of_stack
            x, carried = carry
            before = state.carrying(carried).at(layer, variant)
            y, after = block(x, before) if call is None else call(block, x, before)
            return y if on is None else jnp.where(on, y, x), after.carried

        # Inside a scan, XLA cannot undo the recomputation by merging it with the
        # forward pass; outside, it must be kept from doing so.
        return _checkpointed(body, remat, keep_gathered, prevent_cse=not scan)

    stack = blocks, active

    @functools.cache
    def layers() -> list[_Layer]:
        return _split(stack)

    @functools.cache
    def apart() -> tuple[list[Block], list[Block] | Block]:
        """What receives the gradients of each block, and what it is read from."""
        assert isinstance(blocks, Block)
        fixed = jax.lax.stop_gradient(blocks)
        if REMAT_POLICIES[remat] is None:
            fixed = _split(fixed)
        return _split(_as_computed(blocks)), fixed

    def block_at(layer: int) -> _Layer:
        layer = layer if order is None else order[layer]
        if not isinstance(blocks, Block):
            return blocks[layer], None
        return layers()[layer]

    carry, done = (x, state.carried), 0
    if scan and isinstance(blocks, Block):
        period = period_of(variants)
        done = num_layers // period * period
        # States that carry nothing do not need the layer number.
        firsts = jnp.arange(0, done, period) if state.carried else None
        if order is not None and len(set(order)) == 1:
            parts, block_of = None, lambda part, i: block_at(0)
        elif order is not None:
            parts = jnp.asarray(order[:done]).reshape(-1, period)
            block_of = lambda part, i: jax.tree.map(lambda p: p[part[i]], stack)  # noqa: E731
        elif period == 1:
            parts, block_of = stack, lambda part, i: part
        else:
            parts = jax.tree.map(
                lambda p: p[:done].reshape(-1, period, *p.shape[1:]), stack
            )  # [L / period, period, ...]
            block_of = lambda part, i: jax.tree.map(lambda p: p[i], part)  # noqa: E731

        def group(carry: _Carry, xs: tuple[Any, Array | None]) -> tuple[_Carry, None]:
            part, first = xs
            for i in range(period):
                layer = i if first is None else first + i
                carry = run_layer(layer, variants[i])(carry, block_of(part, i))
            return carry, None

        length = done // period
        carry, _ = jax.lax.scan(group, carry, (parts, firsts), length=length)
    for layer in range(done, num_layers):
        (block, on), variant = block_at(layer), variants[layer]
        if call is None and on is None:
            number, values = jnp.int32(layer), None
            if isinstance(blocks, Block) and order is None:
                parts, values = apart()
                block = parts[layer]
                values = values if isinstance(values, Block) else values[layer]
            carry = _run_block(
                block, values, *carry, state, number, variant, remat, keep_gathered
            )
        else:
            carry = run_layer(layer, variant)(carry, (block, on))
    x, carried = carry
    return x, state.carrying(carried)


def _split(stack: Any) -> list[Any]:
    """The parts of a stack along its first axis.

    The transpose of one split is one concatenation. The transpose of slicing part by
    part is a sum of as many arrays as there are parts, each as large as the stack.
    """
    leaves, tree = jax.tree.flatten(stack)
    parts = map(_parts, leaves)
    return [jax.tree.unflatten(tree, part) for part in zip(*parts, strict=True)]


@jax.custom_vjp
def _parts(stack: Array) -> list[Array]:
    return [part[0] for part in jax.lax.split(stack, [1] * stack.shape[0])]


def _joined(_: None, parts: list[Array]) -> tuple[Array]:
    return (jax.lax.concatenate([part[None] for part in parts], 0),)


_parts.defvjp(lambda stack: (_parts(stack), None), _joined)


def _as_computed(blocks: Block) -> Block:
    """A stack whose matrices have the type in which they are multiplied.

    That is the type of their gradients, which are kept in it until they are used.
    """
    layer: Any = blocks.mlp.down

    def cast(x: Array) -> Array:
        # [L, in, out]; what is in 8 bits has no gradients.
        return x.astype(layer.dtype) if x.ndim > 2 and x.dtype.itemsize > 1 else x

    return jax.tree.map(cast, blocks)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _run_block(
    block: Block,
    values: Block | None,
    x: Array,
    carried: tuple[Any, ...],
    state: AttentionState,
    layer: Array,
    variant: AttentionConfig | None,
    remat: str,
    keep_gathered: bool,
) -> _Carry:
    """One layer; equal layers are traced and lowered once.

    With `values`, the parameters are read from there, and `block` is what receives
    their gradients. They are a block, or the stack where activations are recomputed: a
    checkpoint would copy each part of a stack that it is given, to read it again in the
    backward pass.
    """

    def run(
        block: Block,
        values: Block | None,
        x: Array,
        carried: tuple[Any, ...],
        state: AttentionState,
    ) -> _Carry:
        if values is not None:
            place = None if remat == "none" else _place(block, values, layer, x)
            read = functools.partial(_read, _in_fp8(block), place)
            block = jax.tree.map(read, block, values)
        x, after = block(x, state.carrying(carried).at(layer, variant))
        return x, after.carried

    # What is closed over, the number of the layer, remains known to the compiler.
    cse = (True,) * 5
    kept = _checkpointed(run, remat, keep_gathered, prevent_cse=cse)
    return kept(block, values, x, carried, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(as_stored: bool, place: Array | None, part: Array, values: Array) -> Array:
    """``values``, or ``values[place]``, with the gradient of `part`, and its type.

    Layers in fp8 round what they read themselves, and read it `as_stored`.
    """
    if place is not None:
        values = jax.lax.dynamic_index_in_dim(values, place, keepdims=False)
    return values if as_stored else values.astype(part.dtype)


def _read_forward(
    as_stored: bool, place: Array | None, part: Array, values: Array
) -> tuple[Any, Any]:
    return _read(as_stored, place, part, values), jnp.zeros((), part.dtype)


def _read_backward(_: bool, like: Any, gradient: Any) -> tuple[None, Any, None]:
    return None, gradient.astype(like.dtype), None


_read.defvjp(_read_forward, _read_backward)


def _in_fp8(block: Block) -> bool:
    return getattr(block.mlp.down, "quantization", None) is not None


def _place(block: Block, values: Block, layer: Array, x: Array) -> Array:
    """The number of a layer, as the compiler has to know it.

    Kernels for 8 bits, and matmuls of a stack that has their type, read a part of it in
    place where they know which. A conversion to 16 bits reads it in place anyway, but
    where XLA knows which part it is, it would rather convert the whole stack, for each
    layer, and where it may read all of them at once, it keeps them all.
    """
    parts, stacks = jax.tree.leaves(block), jax.tree.leaves(values)
    converted = any(a.dtype != b.dtype for a, b in zip(parts, stacks, strict=True))
    if _in_fp8(block) or not converted:
        return layer
    return jax.lax.optimization_barrier((layer, jax.lax.stop_gradient(x)))[0]


def _checkpointed[**P, R](
    run: Callable[P, R],
    remat: str,
    keep_gathered: bool,
    *,
    prevent_cse: bool | tuple[bool, ...],
) -> Callable[P, R]:
    """`run` with activation checkpointing as `remat` says."""
    policy = REMAT_POLICIES[remat]
    if policy is None:
        return run
    if keep_gathered and remat != "full":
        policy = _policies.save_from_both_policies(policy, _gathered_saveable)
    return jax.checkpoint(run, policy=policy, prevent_cse=prevent_cse)


def look_up(
    state: AttentionState,
    lookups: Sequence[tuple[Int[Array, "B T"], Embed]],
    rules: AxisRules,
    row_axes: Sequence[tuple[str, ...]] | None = None,
    *,
    checked: bool = False,
) -> tuple[Float[Array, "B T D"], Bool[Array, "B T"] | None]:
    """The sum of look-ups in several tables, and the tokens whose look-up failed.

    An index outside of its table gives NaN, which attention would spread from a packed
    sequence to its neighbors: kernels multiply masked values by zero. So the whole
    sequence takes row 0, and `lose` sets its activations to NaN in the end.

    Args:
        state: The attention state.
        lookups: Indices, and the table that they are rows of.
        rules: The sharding rules.
        row_axes: The `row_axes` of each table, as `Embed` takes them; none if None.
        checked: All indices are known to be in their tables.

    Returns:
        The sum, and which tokens are undefined; None if none can be, or if rows are not
        packed, where NaN stays in its own row.
    """
    lost, split = None, row_axes or [()] * len(lookups)
    if isinstance(state, Packed) and not checked:
        placed = [constrain(at, ("batch", None), rules) for at, _ in lookups]
        outside = [
            (at < 0) | (at >= table.num_embeddings)
            for at, (_, table) in zip(placed, lookups, strict=True)
        ]
        lost = state.in_sequence_with(functools.reduce(jnp.logical_or, outside), rules)
        tables = (table for _, table in lookups)
        inside = (jnp.where(lost, 0, at) for at in placed)
        lookups = list(zip(inside, tables, strict=True))
    rows = (
        table(indices, axes)
        for (indices, table), axes in zip(lookups, split, strict=True)
    )
    return functools.reduce(jnp.add, rows), lost


def lose(
    x: Float[Array, "B T D"], lost: Bool[Array, "B T"] | None, rules: AxisRules
) -> Float[Array, "B T D"]:
    """`x` with NaN at the tokens that `look_up` marked."""
    if lost is None:
        return x
    lost = constrain(lost, ("batch", "tokens"), rules)
    return jnp.where(lost[..., None], jnp.nan, x)


def period_of(variants: Sequence[Any]) -> int:
    """Length of the shortest repeating pattern of `variants`."""
    return next(
        size
        for size in range(1, len(variants) + 1)
        if all(v == variants[i % size] for i, v in enumerate(variants))
    )
