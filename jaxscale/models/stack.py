"""A stack of Transformer blocks: how it is made and run.

The parameters of the blocks are stacked along a leading ``layers`` axis. Legend:
B batch, T tokens of a row, D model, L layers.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxscale.nn.blocks import Block
from jaxscale.sharding.operations import per_shard
from jaxscale.sharding.rules import AxisRules
from pallas_kernels.varlen_attention import positions_from_cu_seqlens


_policies = jax.checkpoint_policies
# A fused product is no dot to the policies; the names are those of the results.
_linear_saveable = _policies.save_from_both_policies(
    _policies.dots_with_no_batch_dims_saveable,
    _policies.save_only_these_names(
        "all_gather_matmul_out",
        "matmul_reduce_scatter_out",
        "matmul_all_reduce_out",
        "dense_out",
        "tile_sparse_matmul_out",
    ),
)
_gathered_saveable = _policies.save_only_these_names("all_gather_matmul_gathered")
_packed_attention_saveable = _policies.save_only_these_names(
    "varlen_attention_out", "varlen_attention_lse"
)


def _attention_saveable(primitive: Any, *args: Any, **params: Any) -> bool:
    """Whether to keep the result of a linear layer or of a fused attention."""
    return (
        # cuDNN's forward pass, whose result and log-sum-exp carry no names.
        primitive.name.startswith("dot_product_attention_fwd")
        or _packed_attention_saveable(primitive, *args, **params)
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
"""What the forward pass of a block keeps for the backward pass.

- ``none``: everything. Fastest, most memory.
- ``full``: the block's input only; the block is computed twice.
- ``dots``: results of all matrix products, attention scores among them.
- ``dots_no_batch``: results of the linear layers; attention and elementwise operations
  are computed twice.
- ``attention``: the same and the results of fused attention (packed, cuDNN), so that
  only elementwise operations are computed twice. The usual choice.

With ``tensor_parallel="fused"`` the last three also keep the gathered inputs of the
linear layers, which only the kernel could make again; ``"xla"`` gathers them again.
"""


def check_remat(remat: str) -> None:
    """Raise unless `remat` is the name of a policy."""
    if remat not in REMAT_POLICIES:
        raise ValueError(
            f"remat {remat!r} is unknown; use one of {tuple(REMAT_POLICIES)}"
        )


def make_stack(
    make_block: Callable[[nnx.Rngs], Block], num_layers: int, rngs: nnx.Rngs
) -> Block:
    """`num_layers` blocks that `make_block` makes, each parameter stacked."""

    @nnx.split_rngs(splits=num_layers)
    @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
    def make(rngs: nnx.Rngs) -> Block:
        return make_block(rngs)

    return make(rngs)


def unstack(blocks: Block) -> Sequence[Block]:
    """The blocks of a stack, each with parameters of its own.

    A compiled program that runs the blocks of a stack one by one copies each parameter
    out of it; those of single blocks it reads where they are.
    """
    (count,) = {p.shape[0] for p in jax.tree.leaves(blocks)}

    @jax.jit
    def split(blocks: Block) -> list[Block]:
        return [jax.tree.map(lambda p, i=i: p[i], blocks) for i in range(count)]

    return nnx.List(split(blocks))


def run_stack[Variant](
    blocks: Block | Sequence[Block],
    x: Float[Array, "B T D"],
    call: Callable[[Block, Array, Variant], Array],
    *,
    variants: Sequence[Variant],
    remat: str,
    scan: bool,
    shared: bool = False,
    keep_gathered: bool = False,
) -> Float[Array, "B T D"]:
    """`x` after all blocks, ``x = call(block, x, variant)`` one after the other.

    Args:
        blocks: The stack, or blocks that `unstack` made, which are not scanned.
        x: Residual stream.
        call: Runs one block.
        variants: What `call` is told besides, one for each layer. A scan compiles the
            shortest pattern that repeats.
        remat: A name of `REMAT_POLICIES`.
        scan: Loop over the blocks in the compiled program, instead of one copy each.
        shared: The stack holds one block, which is every layer.
        keep_gathered: Where `remat` keeps results of linear layers, also keep what
            `all_gather_matmul` gathered for them.
    """
    policy, num_layers = REMAT_POLICIES[remat], len(variants)
    if keep_gathered and remat not in ("none", "full"):
        policy = _policies.save_from_both_policies(policy, _gathered_saveable)

    def one(x: Array, block: Block, variant: Variant) -> Array:
        def body(x: Array, block: Block) -> Array:
            return call(block, x, variant)

        if policy is not None:
            # Inside a scan, XLA cannot undo the recomputation by merging it with the
            # forward pass; outside, it must be kept from doing so.
            body = jax.checkpoint(body, policy=policy, prevent_cse=not scan)
        return body(x, block)

    def block_at(layer: int) -> Block:
        layer = 0 if shared else layer
        if not isinstance(blocks, Block):
            return blocks[layer]
        return jax.tree.map(lambda p: p[layer], blocks)

    period, done = _period(variants), 0
    stack = blocks if scan and isinstance(blocks, Block) else None
    if stack is not None and (shared or period == 1):
        only = block_at(0)  # without a layer axis; read if all layers are this one

        def layers(x: Array, block: Block | None) -> tuple[Array, None]:
            for variant in variants[:period]:
                x = one(x, only if block is None else block, variant)
            return x, None

        done = num_layers // period * period
        xs = None if shared else stack
        x, _ = jax.lax.scan(layers, x, xs, length=done // period)
    elif stack is not None:
        done = num_layers // period * period

        def group(x: Array, part: Block) -> tuple[Array, None]:
            for i, variant in enumerate(variants[:period]):
                x = one(x, jax.tree.map(lambda p, i=i: p[i], part), variant)
            return x, None

        parts = jax.tree.map(
            lambda p: p[:done].reshape(-1, period, *p.shape[1:]), stack
        )
        x, _ = jax.lax.scan(group, x, parts)
    for layer in range(done, num_layers):
        x = one(x, block_at(layer), variants[layer])
    return x


def token_positions(
    tokens: Int[Array, "B T"],
    cu_seqlens: Int[Array, "B seqs_plus_1"] | None,
    rules: AxisRules,
) -> Int[Array, "B T"]:
    """Positions counted from the start of each row or packed sequence."""
    num_tokens = tokens.shape[1]
    if cu_seqlens is None:
        return jnp.broadcast_to(jnp.arange(num_tokens), tokens.shape)

    def positions(cu_seqlens: Array) -> tuple[Array]:
        row = functools.partial(positions_from_cu_seqlens, num_tokens=num_tokens)
        return (jax.vmap(row)(cu_seqlens),)

    axes = [("batch", None)]
    return per_shard(positions, axes, axes, rules)(cu_seqlens)[0]


def _period(variants: Sequence[Any]) -> int:
    """Length of the shortest pattern whose repetition begins with `variants`."""
    return next(
        size
        for size in range(1, len(variants) + 1)
        if all(v == variants[i % size] for i, v in enumerate(variants))
    )
