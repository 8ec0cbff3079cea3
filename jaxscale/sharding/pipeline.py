"""Run a pipeline schedule inside a Manual region, for any model.

One `jax.lax.scan` per phase of the schedule loops over its ticks, whose rows of
integers say what each stage does (`jaxscale.sharding.schedule_table` describes a tick).
Idle stages compute on zeros: in lock step that costs no time, so no layer is inside a
conditional, and no collective runs on only some devices.

The backward pass is `jax.vjp` inside a tick, layer by layer. Nothing differentiates
through a loop, so activation memory is the stash alone, however many microbatches there
are; a layer writes its residuals into the stash and accumulates its gradient in place,
without a temporary array of all layers.

XLA reads the parameters of a layer in place if a loop counter selects it. With several
chunks a table selects the chunk, and each layer is copied for each of its passes.
Copying a chunk once, when a stage switches to it, would gain nothing: the next stage
switches a tick later, when the late activation arrives.

Legend: p stages, v chunks per stage, k layers per chunk, m microbatches.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxscale.sharding.manual import sum_for_all, use_on_each
from jaxscale.sharding.schedule_table import Phase, PipelineSchedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineProgram:
    """The functions that stages run. All devices call each function in the same ticks.

    `ends` are the parameters outside of the chunks (embedding, head); their gradients
    are the same on all stages, or those of the shard that a stage holds.
    """

    embed: Callable[[Any, Array], Array]
    """``embed(ends, microbatch)``: the input of the first chunk, on all stages."""
    layer: Callable[[Any, Array, Array, Array, Array], Array]
    """``layer(params, x, microbatch, c, i)``: the output of layer i of chunk c."""
    loss: Callable[[Any, Array, Array], tuple[Array, Any]]
    """``loss(ends, y, microbatch)``: the loss of an output, and metrics to add up."""
    activation: Callable[[tuple[int, ...]], Array]
    """``activation(leading)``: zeros with the shape and the sharding of `x`, after
    leading dimensions."""
    reduce: Callable[[Any], Any] = lambda grads: grads
    """Applied to the gradient of a layer before it is accumulated."""
    axis: str = "pipe"
    """The Manual mesh axis of the stages."""


class _Carry(NamedTuple):
    """The loop state, from tick to tick."""

    y: Any
    """Output of the forward pass of the last tick."""
    dx: Any
    """Gradient from the next stage, sent in the last tick."""
    dy: Any
    """Gradient of the output whose loss was computed in the last tick."""
    stash: Any
    outputs: Any
    """Outputs of the last stage that wait for their loss."""
    chunk_grads: Any
    end_grads: Any
    value: Any
    """Sum of the losses."""
    sums: Any


def run_schedule(
    schedule: PipelineSchedule, program: PipelineProgram, chunks: Any, ends: Any
) -> tuple[Any, Any, Any]:
    """The summed loss and metrics of all microbatches, and the gradients of a stage.

    Runs inside a `jax.shard_map` that is Manual over ``program.axis`` and has
    ``check_vma=False``.

    Args:
        schedule: The table, with backward passes.
        program: What the stages compute.
        chunks: Parameters of the stage, a pytree of arrays [v, k, ...].
        ends: Parameters outside of the chunks.

    Returns:
        The sums, and the gradients of `chunks` and of `ends` in fp32, summed over
        microbatches, but not over data-parallel mesh axes.
    """
    runner = _Runner(schedule=schedule, program=program, chunks=chunks, ends=ends)
    carry = runner.run(gradients=True)
    return carry.sums, carry.chunk_grads, carry.end_grads


def run_forward(
    schedule: PipelineSchedule, program: PipelineProgram, chunks: Any, ends: Any
) -> tuple[Float[Array, ""], Any]:
    """The loss of all microbatches and their metrics, by a table of forward passes.

    Differentiated by `jax.grad` inside the region it is GPipe: the loop then saves the
    activations of all microbatches. Arguments are as for `run_schedule`.
    """
    runner = _Runner(schedule=schedule, program=program, chunks=chunks, ends=ends)
    carry = runner.run(gradients=False)
    return carry.value, carry.sums


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Runner:
    schedule: PipelineSchedule
    program: PipelineProgram
    chunks: Any
    ends: Any

    @property
    def stage(self) -> Array:
        """The number of this stage."""
        return jax.lax.axis_index(self.program.axis)

    def run(self, *, gradients: bool) -> _Carry:
        """Run all ticks, phase by phase."""
        carry = self._start(gradients=gradients)
        for phase in self.schedule.phases():
            ticks = slice(phase.start, phase.stop)
            rows = {name: jnp.asarray(x[ticks]) for name, x in self._table().items()}

            def tick(
                carry: _Carry, row: dict[str, Array], phase: Phase = phase
            ) -> tuple[_Carry, None]:
                return self._tick(carry, row, phase), None

            carry, _ = jax.lax.scan(tick, carry, rows)
        return carry

    def _table(self) -> dict[str, np.ndarray]:
        """The columns of the schedule, and the entries of the first stage's chunk 0."""
        table = self.schedule
        names = ("f_mb", "f_chunk", "b_mb", "b_chunk", "b_slot")
        columns = {name: getattr(table, name) for name in names}
        columns["f_slot"] = table.f_put
        for name in ("loss_mb", "loss_slot", "out_slot"):
            columns[name] = getattr(table, name)
        for kind in ("f", "b"):
            mb, chunk = columns[f"{kind}_mb"][:, 0], columns[f"{kind}_chunk"][:, 0]
            columns[f"{kind}_first"] = np.where(chunk == 0, mb, -1)
        return columns

    def _start(self, *, gradients: bool) -> _Carry:
        program, table = self.program, self.schedule
        zero = program.activation(())
        _, sums = jax.eval_shape(program.loss, self.ends, zero, jnp.int32(0))
        sums = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)
        empty = _Carry(
            y=zero,
            dx=None,
            dy=None,
            stash=None,
            outputs=program.activation((table.num_out_slots,)),
            chunk_grads=None,
            end_grads=None,
            value=jnp.zeros((), jnp.float32),
            sums=sums,
        )
        if not gradients:
            return empty
        none = jnp.int32(0)
        layer, place = self._layer(none, none), (none, none, none)
        kept = jax.eval_shape(
            lambda layer, x: self._forward(layer, x, *place)[1], layer, zero
        )
        size = table.num_slots, self.layers
        stash = [jnp.zeros((*size, *x.shape), x.dtype) for x in kept]
        reduced = jax.eval_shape(program.reduce, layer)
        return empty._replace(
            dx=zero,
            dy=zero,
            stash=stash,
            chunk_grads=jax.tree.map(
                lambda x: jnp.zeros((table.chunks, self.layers, *x.shape), jnp.float32),
                reduced,
            ),
            end_grads=jax.tree.map(
                lambda x: jnp.zeros(x.shape, jnp.float32), self.ends
            ),
        )

    def _tick(self, carry: _Carry, row: dict[str, Array], phase: Phase) -> _Carry:
        p = self.schedule.stages
        onward = [(i, (i + 1) % p) for i in range(p)]
        # The transfer overlaps with backward passes and the loss.
        arrived = jax.lax.ppermute(carry.y, self.program.axis, onward)
        dx = carry.dx
        if phase.backward:
            arrived, dx, carry = self._run_backward(carry, row, phase, arrived)
        carry = self._run_loss(carry, row, phase)._replace(dx=dx)
        if phase.forward:
            carry = self._run_forward(carry, row, phase, arrived)
        return carry

    def _run_backward(
        self, carry: _Carry, row: dict[str, Array], phase: Phase, arrived: Array
    ) -> tuple[Array, Array, _Carry]:
        """`arrived`, the gradient from the stage behind, and new gradients."""
        program, p = self.program, self.schedule.stages
        entry, on = self._entry(row, "b")
        mb, c, slot = entry
        is_last = (self.stage == p - 1) & (c == self.schedule.chunks - 1)
        dy = jnp.where(on, jnp.where(is_last, carry.dy, carry.dx), 0)

        def backward_of(n: Array, at: tuple[Array, Any]) -> tuple[Array, Any]:
            (dy, grads), i = at, self.layers - 1 - n
            kept = _at(carry.stash, slot, i)
            pull = self._pullback(self._layer(c, i), kept, mb, c, i)
            d_layer, dx = pull(dy)
            return dx, _add_at(grads, program.reduce(d_layer), on, c, i)

        dx, grads = jax.lax.fori_loop(
            0, self.layers, backward_of, (dy, carry.chunk_grads)
        )
        # Both transfers have time: one overlaps with this pass, one with the next.
        arrived, dx = jax.lax.optimization_barrier((arrived, jnp.where(on, dx, 0)))

        def add(end_grads: Any) -> Any:
            _, pull = jax.vjp(
                lambda ends: program.embed(ends, row["b_first"]), self.ends
            )
            (d_ends,) = pull(self._from_stage(dx, 0))
            return _add(end_grads, d_ends)

        flags = self._table()["b_first"][phase.start : phase.stop] >= 0
        end_grads = _where_on(flags, row["b_first"], add, lambda x: x, carry.end_grads)
        backward = [(i, (i - 1) % p) for i in range(p)]
        # Needed in the next tick: the transfer overlaps with loss and forward passes.
        sent = jax.lax.ppermute(dx, program.axis, backward)
        return arrived, sent, carry._replace(chunk_grads=grads, end_grads=end_grads)

    def _run_loss(self, carry: _Carry, row: dict[str, Array], phase: Phase) -> _Carry:
        """Keep the last stage's output, and compute the loss of a kept one."""
        at, made = jnp.maximum(row["out_slot"], 0), row["out_slot"] >= 0
        kept = jnp.where(made, carry.y, _at(carry.outputs, at))
        outputs = _put(carry.outputs, kept, at)
        carry = carry._replace(outputs=outputs)

        def with_loss(carry: _Carry) -> _Carry:
            mb = row["loss_mb"]
            y = self._from_stage(
                _at(outputs, row["loss_slot"]), self.schedule.stages - 1
            )
            if carry.end_grads is None:
                value, sums = self.program.loss(self.ends, y, mb)
            else:
                value, pull, sums = jax.vjp(
                    lambda ends, y: self.program.loss(ends, y, mb),
                    self.ends,
                    y,
                    has_aux=True,
                )
                d_ends, dy = pull(jnp.ones_like(value))
                carry = carry._replace(dy=dy, end_grads=_add(carry.end_grads, d_ends))
            return carry._replace(
                value=carry.value + value,
                sums=jax.tree.map(jnp.add, carry.sums, sums),
            )

        # Only what a loss changes goes through the conditional.
        names = ("dy", "end_grads", "value", "sums")
        flags = self.schedule.loss_mb[phase.start : phase.stop] >= 0

        def on(part: tuple[Any, ...]) -> tuple[Any, ...]:
            after = with_loss(carry._replace(**dict(zip(names, part, strict=True))))
            return tuple(getattr(after, name) for name in names)

        part = tuple(getattr(carry, name) for name in names)
        part = _where_on(flags, row["loss_mb"], on, lambda x: x, part)
        return carry._replace(**dict(zip(names, part, strict=True)))

    def _run_forward(
        self, carry: _Carry, row: dict[str, Array], phase: Phase, arrived: Array
    ) -> _Carry:
        program = self.program
        entry, on = self._entry(row, "f")
        mb, c, slot = entry

        def embedded(x: Array) -> Array:
            first = program.embed(self.ends, row["f_first"])
            used: Any = use_on_each(first, (program.axis,))
            return jnp.where((self.stage == 0) & (c == 0), used, x)

        flags = self._table()["f_first"][phase.start : phase.stop] >= 0
        x = _where_on(flags, row["f_first"], embedded, lambda x: x, arrived)
        x = jnp.where(on, x, 0)
        if carry.stash is None:  # to be differentiated: what is looped over is given

            def plain(x: Array, at: tuple[Array, Any]) -> tuple[Array, None]:
                i, layer = at
                return program.layer(layer, x, mb, c, i), None

            layers = jnp.arange(self.layers), self._chunk(c)
            return carry._replace(y=jax.lax.scan(plain, x, layers)[0])

        def forward(i: Array, at: tuple[Array, Any]) -> tuple[Array, Any]:
            x, stash = at
            y, kept = self._forward(self._layer(c, i), x, mb, c, i)
            return y, _put(stash, kept, slot, i)

        y, stash = jax.lax.fori_loop(0, self.layers, forward, (x, carry.stash))
        return carry._replace(y=y, stash=stash)

    def _forward(
        self, layer: Any, x: Array, mb: Array, c: Array, i: Array
    ) -> tuple[Array, Any]:
        """The output of a layer, and its residuals other than `layer`."""
        y, pull = jax.vjp(lambda b, x: self.program.layer(b, x, mb, c, i), layer, x)
        ours = {id(leaf) for leaf in jax.tree.leaves(layer)}
        return y, [leaf for leaf in jax.tree.leaves(pull) if id(leaf) not in ours]

    def _pullback(
        self, layer: Any, kept: Any, mb: Array, c: Array, i: Array
    ) -> Callable[[Array], Any]:
        """The VJP of a layer from the residuals that `_forward` returned."""
        program = self.program
        # A derivative is a pytree: an abstract evaluation gives its structure, the
        # parameters stand in their places and the rest is what was kept.
        places: list[int | None] = []

        def abstract(layer: Any, x: Array) -> Any:
            _, pull = jax.vjp(lambda b, x: program.layer(b, x, mb, c, i), layer, x)
            at = {id(leaf): n for n, leaf in enumerate(jax.tree.leaves(layer))}
            places[:] = [at.get(id(leaf)) for leaf in jax.tree.leaves(pull)]
            return pull

        pull = jax.eval_shape(abstract, layer, program.activation(()))
        ours, rest = jax.tree.leaves(layer), iter(kept)
        leaves = [next(rest) if n is None else ours[n] for n in places]
        return jax.tree.unflatten(jax.tree.structure(pull), leaves)

    @property
    def layers(self) -> int:
        """Layers per chunk, k."""
        return jax.tree.leaves(self.chunks)[0].shape[1]

    def _chunk(self, c: Int[Array, ""]) -> Any:
        if self.schedule.chunks == 1:
            return jax.tree.map(lambda x: x[0], self.chunks)
        return _at(self.chunks, c)

    def _layer(self, c: Int[Array, ""], i: Int[Array, ""]) -> Any:
        if self.schedule.chunks == 1:
            return _at(self._chunk(c), i)
        return _at(self.chunks, c, i)

    def _entry(
        self, row: dict[str, Array], kind: Literal["f", "b"]
    ) -> tuple[list[Array], Bool[Array, ""]]:
        """Microbatch, chunk and slot of this stage, and whether there is work."""
        entry = [row[f"{kind}_{name}"][self.stage] for name in ("mb", "chunk", "slot")]
        return [jnp.maximum(x, 0) for x in entry], entry[0] >= 0

    def _from_stage(self, x: Array, stage: int) -> Array:
        """Broadcast `x` from one stage to all."""
        x = jnp.where(self.stage == stage, x, 0)
        return sum_for_all(x, (self.program.axis,))


def _where_on[T](
    flags: np.ndarray,
    entry: Array,
    on: Callable[[T], T],
    off: Callable[[T], T],
    operand: T,
) -> T:
    """`on` in the ticks whose entry is not negative: the same on all devices."""
    if flags.all():
        return on(operand)
    if not flags.any():
        return off(operand)
    return jax.lax.cond(entry >= 0, on, off, operand)


def _at(tree: Any, *place: Array) -> Any:
    """Each array of `tree` at a place of its first dimensions."""

    def at(x: Array) -> Array:
        start = (*place, *[0] * (x.ndim - len(place)))
        size = (*[1] * len(place), *x.shape[len(place) :])
        part = jax.lax.dynamic_slice(x, start, size, allow_negative_indices=False)
        return part.reshape(x.shape[len(place) :])

    return jax.tree.map(at, tree)


def _put(tree: Any, values: Any, *place: Array) -> Any:
    """`tree` with `values` there."""

    def put(x: Array, value: Array) -> Array:
        value = value[(None,) * len(place)]  # [1, ..., *value.shape]
        start = (*place, *[0] * (x.ndim - len(place)))
        return jax.lax.dynamic_update_slice(
            x, value, start, allow_negative_indices=False
        )

    return jax.tree.map(put, tree, values)


def _add(total: Any, part: Any) -> Any:
    return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, part)


def _add_at(total: Any, part: Any, on: Array, *place: Array) -> Any:
    """`total` with `part` added there, where `on`."""

    def add(t: Array, g: Array) -> Array:
        g = jnp.where(on, g.astype(t.dtype), 0)
        return t.at[place].add(g, mode="promise_in_bounds", unique_indices=True)

    return jax.tree.map(add, total, part)
