"""Loss and gradients of a batch, with gradient accumulation over microbatches.

`jaxscale.training.pipelined` computes the same with pipeline parallelism. Data-parallel
reductions happen once a step, outside of the loop over microbatches.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jaxscale.nn.context import own_part
from jaxscale.nn.linear import round_kernels
from jaxscale.sharding.manual import scattered, summed, whole
from jaxscale.sharding.operations import constrain, reshape
from jaxscale.sharding.parameters import logical_axes, specs
from jaxscale.sharding.rules import REPLICATED, AxisRules, MeshAxes, as_tuple
from jaxscale.sharding.state_rules import StateRules, Zero, beyond
from jaxscale.training.losses import LossSums
from jaxscale.training.optimizer import decays


type GradientFunction = Callable[[Any, Any], tuple[LossSums, Any]]
"""``gradients(model, batch)``: the sums of the batch, and the gradients of the loss by
the `nnx.Param` of the model, in fp32 and sharded as these are."""

type LossFunction = Callable[[Any, Any], tuple[Array, LossSums]]
"""``loss(model, batch)``: the loss to differentiate, summed over tokens, and its
parts."""


def accumulated(
    loss: LossFunction,
    *,
    microbatches: int = 1,
    rules: AxisRules = REPLICATED,
    zero: Zero = 3,
    state_rules: StateRules | None = None,
) -> GradientFunction:
    """Gradients of a batch, accumulated over microbatches in fp32.

    Each device splits its own rows, so nothing moves between devices. Gradients are
    all-reduced once a step over data-parallel axes that split no parameter. Over the
    axis that stores parameters (`fsdp`), `zero` decides:

    - 1: parameters are all-gathered once a step, in the type of the computation; full
      gradients are accumulated, and reduce-scattered once a step.
    - 2: the same, but the gradients of each microbatch are reduce-scattered.
    - 3: each layer is all-gathered before its use, its gradient reduce-scattered after
      it.

    With context parallelism (the rule `context`) each device takes its tokens of a
    `PackedBatch`, and gradients are also reduced once a step: see
    `jaxscale.nn.context`.

    Args:
        loss: Summed loss of a model on a microbatch.
        microbatches: Gradient-accumulation steps: microbatches per batch.
        rules: Sharding rules of parameters and batches.
        zero: ZeRO stage of `fsdp` during the step.
        state_rules: Sharding rules of parameters, gradients and optimizer state,
            instead of those that `rules` and `zero` make. The gradients come out
            sharded as optimizer state is.

    Raises:
        ValueError: `microbatches` is not positive or `zero` unknown; at the first call,
            the batch does not divide into microbatches, or its tokens over `context`.

    References:
        ZeRO: arXiv 1910.02054.
    """
    check_microbatches(microbatches)
    tables = state_rules or StateRules.zero(rules, zero)

    def gradients(model: Any, batch: Any) -> tuple[LossSums, Any]:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        dtype = getattr(model, "dtype", None)
        context = _shared(rules.context)
        apart = not tables.is_uniform or microbatches > 1 or context
        rows = _manual_rows(params, rules, tables.computed)
        manual = (*rows, *context) if apart else ()
        stored = specs(params, tables.parameters.only(manual))
        added = specs(params, tables.gradients.only(manual))
        split = specs(params, tables.moments.only(manual))
        placed = specs(params, rules)

        def one(merge: Any, params: Any, batch: Any) -> tuple[LossSums, Any]:
            def of(receivers: Any) -> tuple[Array, LossSums]:
                return loss(merge(jax.tree.map(_read, receivers, params)), batch)

            receivers = cast_layers(params, dtype)
            (_, sums), grads = jax.value_and_grad(of, has_aux=True)(receivers)
            if microbatches == 1:
                grads = jax.tree.map(_as_written, grads)
            grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
            grads = jax.tree.map(scattered, grads, added, placed)
            return sums, constrain_variables(grads, tables.gradients)

        def of_rows(params: Any, rest: Any, batch: Any) -> tuple[LossSums, Any]:
            batch = own_part(batch, rules)
            merge = lambda p: nnx.merge(graph, p, rest)  # noqa: E731
            if tables.parameters != tables.computed:
                params = cast_layers(params, dtype)
                params = jax.tree.map(whole, params, stored, placed)
            if microbatches > 1:
                # Once for all of them, and not again where layers are recomputed.
                merge = _rounded(merge(params))
                params = cast_layers(params, dtype)
            add = functools.partial(one, merge, params)
            sums, grads = _add_microbatches(add, batch, microbatches, rules)
            return sum_once(sums, grads, manual, split=split, done=added, placed=placed)

        if not manual:
            return of_rows(params, rest, batch)
        region = jax.shard_map(
            of_rows,
            axis_names=set(manual),
            in_specs=(stored, PartitionSpec(), rules.only(manual).spec("batch")),
            out_specs=(PartitionSpec(), split),
            check_vma=False,
        )
        sums, grads = region(params, rest, batch)
        return sums, constrain_variables(grads, tables.moments)

    return gradients


def _rounded(model: Any) -> Callable[[Any], Any]:
    """A function of the parameters of `model`, with its kernels of fp8 rounded here."""
    graph, _, rest = nnx.split(round_kernels(model), nnx.Param, ...)
    return lambda params: nnx.merge(graph, params, rest)


@jax.custom_vjp
def _read(receiver: Array, value: Array) -> Array:
    """`value`, whose gradient `receiver` gets, in its type."""
    del receiver
    return value


def _read_forward(receiver: Array, value: Array) -> tuple[Array, Array]:
    return value, jnp.zeros((), receiver.dtype)


def _read_backward(like: Array, gradient: Array) -> tuple[Array, None]:
    return gradient.astype(like.dtype), None


_read.defvjp(_read_forward, _read_backward)


def _as_written(gradient: Array) -> Array:
    """The gradient of a stack of layers, joined once for the norm and the optimizer.

    Each would join it again, and could not share a pass with others. Where gradients
    are accumulated, the sum alone reads them.
    """
    return jax.lax.optimization_barrier(gradient) if gradient.ndim > 2 else gradient


def _manual_rows(params: Any, rules: AxisRules, computed: AxisRules) -> tuple[str, ...]:
    """The mesh axes that `accumulated` reduces over explicitly.

    Axes over which parameters are gathered at each use are left to the compiler.
    """
    variables = jax.tree.leaves(params, is_leaf=_is_variable)
    used = frozenset().union(*(computed.mesh_axes(logical_axes(x)) for x in variables))
    return tuple(n for n in _shared(rules.batch) if n not in used)


def _shared(axes: MeshAxes) -> tuple[str, ...]:
    """The mesh `axes` with more than one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(n for n in as_tuple(axes) if mesh.shape.get(n, 1) > 1)


def accumulated_sums(
    loss: LossFunction, *, rules: AxisRules = REPLICATED
) -> Callable[[Any, Any], LossSums]:
    """``sums(model, batch)`` without gradients, for evaluation; see `accumulated`."""

    def sums(model: Any, batch: Any) -> LossSums:
        manual = _shared(rules.context)
        if not manual:
            return loss(model, batch)[1]

        def of_part(model: Any, batch: Any) -> LossSums:
            found = loss(model, own_part(batch, rules))[1]
            return sum_once(found, (), manual, split=(), done=(), placed=())[0]

        region = jax.shard_map(
            of_part,
            axis_names=set(manual),
            in_specs=(PartitionSpec(), PartitionSpec()),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
        return region(model, batch)

    return sums


def _add_microbatches(
    one: Callable[[Any], tuple[LossSums, Any]], batch: Any, count: int, rules: AxisRules
) -> tuple[LossSums, Any]:
    """The sum of ``one(part)`` over the parts of a batch."""
    if count == 1:
        return one(batch)
    parts = _cut(batch, count, rules)
    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], parts))
    sums, grads = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def add(total: Any, part: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, one(part)), None

    return jax.lax.scan(add, (sums, constrain_variables(grads, rules)), parts)[0]


def sum_once(
    sums: LossSums,
    grads: Any,
    axes: Sequence[str],
    *,
    split: Any,
    done: Any,
    placed: Any,
) -> tuple[LossSums, Any]:
    """Reduce sums and gradients over data-parallel devices; each keeps its gradient
    shard.

    Args:
        sums: Sums of this device's rows.
        grads: Gradients of this device's rows.
        axes: Manual data-parallel axes.
        split: Partition of each gradient.
        done: The partition over which it is already reduced and scattered.
        placed: Full partition, including axes that are left to the compiler.
    """

    def total(
        g: Array, split: PartitionSpec, done: PartitionSpec, placed: PartitionSpec
    ) -> Array:
        return summed(scattered(g, beyond(split, done), placed), axes, split)

    grads = jax.tree.map(total, grads, split, done, placed)
    return jax.tree.map(lambda x: summed(x, axes, PartitionSpec()), sums), grads


def cast_layers(params: Any, dtype: Any) -> Any:
    """`params` with layer matrices cast to the type of the computation.

    Otherwise a layer would cast them at each use; norms and tables compute in fp32.
    """

    def cast(node: Any) -> Any:
        if dtype is None or not ("layers" in logical_axes(node) and decays(node)):
            return node
        return jax.tree.map(lambda x: x.astype(dtype), node)

    return jax.tree.map(cast, params, is_leaf=_is_variable)


def _is_variable(node: Any) -> bool:
    return isinstance(node, nnx.Variable)


def check_microbatches(microbatches: int) -> None:
    """Raise unless there is at least one microbatch."""
    if microbatches < 1:
        raise ValueError(f"microbatches {microbatches} must be at least 1")


def _cut(batch: Any, parts: int, rules: AxisRules) -> Any:
    """Leaves [B, ...] as [parts, B / parts, ...]: each device splits its own rows."""

    def cut(x: Array) -> Array:
        rows = x.shape[0]
        if rows % parts:
            raise ValueError(
                f"microbatches {parts} must divide the {rows} rows of a batch"
            )
        inner = (None,) * (x.ndim - 1)
        # Rows r = a * parts + m go to part m: `a` keeps the split of the rows.
        shape = (rows // parts, parts, *x.shape[1:])
        x = reshape(x, shape, ("batch", None, *inner), rules)  # [B / parts, parts, ...]
        return constrain(jnp.moveaxis(x, 1, 0), (None, "batch", *inner), rules)

    return jax.tree.map(cut, batch)


def constrain_variables(tree: Any, rules: AxisRules) -> Any:
    """`tree` with each `nnx.Variable` sharded as its logical axes say."""

    def place(node: Any) -> Any:
        if not _is_variable(node):
            return node
        axes = logical_axes(node)
        return jax.tree.map(lambda x: constrain(x, axes, rules), node)

    return jax.tree.map(place, tree, is_leaf=_is_variable)
