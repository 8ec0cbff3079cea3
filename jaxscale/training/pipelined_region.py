"""The Manual region of a pipeline: sharding of parameters, computation of a stage.

It is Manual over the stages and over data-parallel and context-parallel axes; `tensor`
is left to the layers.

Legend: B batch, T tokens of a (packed) row, D model, v chunks per stage, p stages, k
groups per chunk, of g layers each, m microbatches.
"""

import dataclasses
import functools
import typing
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jaxtyping import Array, Float

from jaxscale.models.stack import lose, period_of
from jaxscale.models.stack_layout import StackLayout, place_variants
from jaxscale.nn.attention import AttentionConfig
from jaxscale.nn.blocks import Block
from jaxscale.nn.context import own_part
from jaxscale.sharding.manual import scattered, whole
from jaxscale.sharding.operations import constrain
from jaxscale.sharding.parameters import specs
from jaxscale.sharding.pipeline import (
    PipelineProgram,
    run_forward,
    run_schedule,
)
from jaxscale.sharding.rules import STACK_AXES, AxisRules, as_tuple
from jaxscale.sharding.schedule import Kind, check_schedule, pipeline_schedule
from jaxscale.sharding.state_rules import StateRules, beyond
from jaxscale.training.gradients import cast_layers, sum_once
from jaxscale.training.losses import LossSums


_AXIS = "pipe"
_MOVES = ("sharding_constraint", "reshape", "slice", "rev", "concatenate")


@typing.runtime_checkable
class PipelinedLoss(typing.Protocol):
    """A loss that a pipeline can compute separately from the layers."""

    def of_hidden(
        self,
        model: Any,
        hidden: Float[Array, "B T D"],
        batch: Any,
        vocab_axes: tuple[str, ...] = (),
    ) -> tuple[Array, LossSums]:
        """The summed loss of the activations after the last norm, and its parts.

        Args:
            model: The model with the output projection.
            hidden: Activations of `batch`.
            batch: Tokens and targets.
            vocab_axes: Manual mesh axes over which the vocabulary is split.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Region:
    """A model in the Manual region, and the sharding of its parameters."""

    loss: PipelinedLoss
    rules: AxisRules
    layout: StackLayout
    microbatches: int
    tables: StateRules
    rows: tuple[str, ...]
    """Manual data-parallel axes."""
    context: tuple[str, ...]
    """Manual context-parallel axes."""
    model: Any
    graph: Any
    blocks: Any
    """Parameters of the layers."""
    ends: Any
    """Parameters of embedding, last norm and output projection."""
    rest: Any
    """The part of the model that is not parameters."""
    variants: list[AttentionConfig]
    """The attention of each layer of a group, the shortest repeating pattern of a
    chunk."""

    @classmethod
    def of(
        cls,
        loss: PipelinedLoss,
        model: Any,
        rules: AxisRules,
        microbatches: int,
        chunks: int,
        tables: StateRules,
    ) -> "Region":
        """Check that model, mesh and settings fit together.

        Raises:
            ValueError: they do not.
        """
        mesh = jax.sharding.get_abstract_mesh()
        sizes = mesh.shape
        _check_model(model, rules, mesh)
        layout = StackLayout(
            num_layers=model.config.num_layers, stages=sizes[_AXIS], chunks=chunks
        )
        check_schedule(layout.stages, microbatches, chunks)
        if not layout.holds(model.blocks):
            raise ValueError(
                f"the blocks of the model are not stored for stages {layout.stages} "
                f"and chunks {layout.chunks}; make the model of "
                "StackLayout(num_layers=..., stages=..., chunks=...).arrange(model)"
            )
        graph, blocks, ends, rest = nnx.split(
            model, nnx.All(nnx.Param, nnx.PathContains("blocks")), nnx.Param, ...
        )
        return cls(
            loss=loss,
            rules=rules,
            layout=layout,
            microbatches=microbatches,
            tables=tables,
            rows=tuple(n for n in as_tuple(rules.batch) if n in sizes),
            context=tuple(n for n in as_tuple(rules.context) if n in sizes),
            model=model,
            graph=graph,
            blocks=blocks["blocks"],
            ends=ends,
            rest=rest,
            variants=_pattern(place_variants(model.config, layout)),
        )

    @property
    def others(self) -> tuple[str, ...]:
        """Manual data-parallel and context-parallel axes."""
        return self.rows + self.context

    @property
    def vocab_axes(self) -> tuple[str, ...]:
        """Manual axes over which the vocabulary is split."""
        return tuple(n for n in as_tuple(self.rules.vocab) if n == _AXIS)

    def split(self, tree: Any, rules: AxisRules, *, leading: int | None = None) -> Any:
        """The partition of each parameter over data-parallel axes."""
        return self._inside(specs(tree, rules.only(self.rows)), leading)

    def placed(self, tree: Any, *, leading: int | None = None) -> Any:
        """As `split`, over all axes, including those left to the compiler."""
        return self._inside(specs(tree, self.rules), leading)

    def _inside(self, found: Any, leading: int | None) -> Any:
        if leading is None:
            return found
        drop = 1 if self.layout.is_flat else len(STACK_AXES)
        return jax.tree.map(
            lambda s: PartitionSpec(*[None] * leading, *s[drop:]), found
        )

    def run(
        self, kind: Kind, batch: Any, *, gradients: bool = True
    ) -> tuple[LossSums, Any]:
        """The sums, and the gradients, of a batch."""
        self._check_rows(batch)
        manual, tables = (_AXIS, *self.rows), self.tables
        stored, split = (
            (specs(self.blocks, table), specs(self.ends, table))
            for table in (tables.parameters.only(manual), tables.moments.only(manual))
        )
        run = functools.partial(self._local, kind, gradients)
        region = jax.shard_map(
            run,
            axis_names={_AXIS, *self.others},
            in_specs=(*stored, PartitionSpec(), self.rules.only(manual).spec("batch")),
            out_specs=(PartitionSpec(), split if gradients else PartitionSpec()),
            check_vma=False,
        )
        sums, grads = region(self.blocks, self.ends, self.rest, batch)
        if not gradients:
            return sums, None
        blocks, ends = grads
        return sums, nnx.merge_state(nnx.State({"blocks": blocks}), ends)

    def _check_rows(self, batch: Any) -> None:
        sizes = jax.sharding.get_abstract_mesh().shape
        ways = self.microbatches
        for name in self.rows:
            ways *= sizes[name]
        for x in jax.tree.leaves(batch):
            if x.shape[0] % ways:
                raise ValueError(
                    f"a batch of {x.shape[0]} rows is not divisible by microbatches "
                    f"{self.microbatches} x the {ways // self.microbatches} devices of "
                    f"{self.rows}; change the batch size or microbatches"
                )

    def _local(
        self, kind: Kind, gradients: bool, blocks: Any, ends: Any, rest: Any, batch: Any
    ) -> tuple[LossSums, Any]:
        """The computation of one stage with its layers and its shard of the batch."""
        layout, tables = self.layout, self.tables
        batch = own_part(batch, self.rules)
        blocks = cast_layers(blocks, self.model.dtype)
        blocks = jax.tree.map(  # [v, k g, ...]
            lambda x: x[None] if layout.is_flat else x[:, 0], blocks
        )
        stored, computed, added, split = (
            self.split(self.blocks, table, leading=2)
            for table in (
                tables.parameters,
                tables.computed,
                tables.gradients,
                tables.moments,
            )
        )
        places = self.placed(self.blocks, leading=2), self.placed(self.ends)
        blocks = jax.tree.map(
            lambda x, s, c, placed: whole(x, beyond(s, c), placed),
            *(blocks, stored, computed, places[0]),
        )
        ends = jax.tree.map(
            whole, ends, self.split(self.ends, tables.parameters), places[1]
        )
        blocks = jax.tree.map(self._grouped, blocks)  # [v, k, g, ...]
        m = self.microbatches
        batch = jax.tree.map(
            lambda x: x.reshape(m, x.shape[0] // m, *x.shape[1:]), batch
        )
        stage = _Stage(region=self, rest=rest, batch=batch, blocks=blocks)
        schedule = pipeline_schedule(layout.stages, m, layout.chunks, kind)
        program = stage.program()
        if not gradients:
            sums = run_forward(schedule, program, blocks, ends)[1]
            return sum_once(sums, (), self.others, split=(), done=(), placed=())
        if kind == "forward":
            (_, sums), grads = jax.value_and_grad(
                functools.partial(run_forward, schedule, program),
                argnums=(0, 1),
                has_aux=True,
            )(blocks, ends)
        else:
            sums, *grads = run_schedule(schedule, program, blocks, ends)
        g_blocks, g_ends = grads
        g_blocks = jax.tree.map(  # [v, k g, ...]
            lambda g: g.reshape(g.shape[0], -1, *g.shape[3:]), g_blocks
        )
        done = computed if kind == "forward" else added
        total, g_blocks = sum_once(
            sums, g_blocks, self.others, split=split, done=done, placed=places[0]
        )
        split = self.split(self.ends, tables.moments)
        done = jax.tree.map(lambda _: PartitionSpec(), split)
        _, g_ends = sum_once(
            sums, g_ends, self.others, split=split, done=done, placed=places[1]
        )
        g_blocks = jax.tree.map(
            lambda g: (g[0] if layout.is_flat else g[:, None]).astype(jnp.float32),
            g_blocks,
        )
        return total, (g_blocks, g_ends)

    def _grouped(self, x: Array) -> Array:
        """Parameters of layers by groups, [v, k, g, ...]."""
        return x.reshape(x.shape[0], -1, len(self.variants), *x.shape[2:])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stage:
    """The functions of a `PipelineProgram`."""

    region: Region
    rest: Any
    batch: Any
    """This device's shard of the batch, [m, B, ...]."""
    blocks: Any

    def program(self) -> PipelineProgram:
        """The functions, as `run_schedule` takes them."""
        region = self.region
        added, computed = (
            region.split(region.blocks, table, leading=1)
            for table in (region.tables.gradients, region.tables.computed)
        )

        placed = region.placed(region.blocks, leading=1)

        def reduce(grads: Any) -> Any:
            return jax.tree.map(
                lambda g, a, c, placed: scattered(g, beyond(a, c), placed),
                *(grads, added, computed, placed),
            )

        return PipelineProgram(
            embed=self.embed,
            layer=self.layer,
            loss=self.loss,
            activation=self.activation,
            reduce=reduce,
            axis=_AXIS,
        )

    def activation(self, leading: tuple[int, ...]) -> Array:
        """Zeros with the shape and the sharding of a residual stream."""
        model = self.region.model
        _, rows, length = self.batch.tokens.shape
        x = jnp.zeros((*leading, rows, length, model.config.d_model), model.dtype)
        return self._placed(x)

    def embed(self, ends: Any, mb: Array) -> Array:
        """The input of the first layer."""
        region, batch = self.region, self._rows(mb)
        model = self._model(ends)
        state = model.attention_state(batch.tokens.shape, batch.cu_seqlens)
        x, lost = model.embedded(batch.tokens, state, region.vocab_axes)
        return self._placed(lose(x, lost, region.rules))

    def layer(self, group: Any, x: Array, mb: Array, c: Array, i: Array) -> Array:
        """The residual stream after a group of layers."""
        region, batch = self.region, self._rows(mb)
        model, layout = region.model, region.layout
        graph, _, rest = nnx.split(model.blocks, nnx.Param, ...)
        state = model.attention_state(batch.tokens.shape, batch.cu_seqlens)
        active = None
        if not layout.is_even:
            on = jnp.asarray(layout.places >= 0).swapaxes(0, 1)  # [p, v, k g]
            active = region._grouped(on[jax.lax.axis_index(_AXIS)])[c, i]
        y, _ = model.run_blocks(
            x,
            state,
            blocks=nnx.merge(graph, group, rest),
            variants=region.variants,
            active=active,
            call=self._call,
            scan=True,  # otherwise slices of the stack would be saved
        )
        return self._placed(y)

    def loss(self, ends: Any, y: Array, mb: Array) -> tuple[Array, LossSums]:
        """The loss of the output of the last layer."""
        region, model = self.region, self._model(ends)
        return region.loss.of_hidden(
            model, model.norm(y), self._rows(mb), region.vocab_axes
        )

    def _call(self, block: Block, x: Array, state: Any) -> tuple[Array, Any]:
        """Run a block with its parameters gathered."""
        region = self.region
        gathered = set(region.others)

        def run(block: Block, x: Array, state: Any) -> tuple[Array, Any]:
            split = region.split(region.blocks, region.tables.computed, leading=0)
            graph, params, rest = nnx.split(block, nnx.Param, ...)
            placed = region.placed(region.blocks, leading=0)
            params = jax.tree.map(whole, params, split, placed)
            return nnx.merge(graph, params, rest)(x, state)

        def saveable(primitive: Any, *_: Any, **params: Any) -> bool:
            # Parameters, and keys and values of whole rows, are gathered again in the
            # backward pass, or the stash would hold a copy of them for each microbatch.
            if primitive.name in _MOVES:
                return False
            names = as_tuple(params.get("axis_name", ()))
            return primitive.name != "all_gather" or gathered.isdisjoint(names)

        if region.model.remat == "none":
            run = jax.checkpoint(run, policy=saveable, prevent_cse=False)
        return run(block, x, state)

    def _model(self, ends: Any) -> Any:
        region = self.region
        blocks = nnx.State({"blocks": self.blocks})  # not read
        return nnx.merge(region.graph, blocks, ends, self.rest)

    def _rows(self, mb: Array) -> Any:
        return jax.tree.map(
            lambda x: jax.lax.dynamic_index_in_dim(x, mb, 0, keepdims=False), self.batch
        )

    def _placed(self, x: Array) -> Array:
        axes = (*[None] * (x.ndim - 3), "batch", "tokens", "act_embed")
        return constrain(x, axes, self.region.rules)


def _pattern(variants: list[AttentionConfig]) -> list[AttentionConfig]:
    """The shortest list that `variants` repeats exactly."""
    period = period_of(variants)
    return variants if len(variants) % period else variants[:period]


def _check_model(model: Any, rules: AxisRules, mesh: AbstractMesh) -> None:
    """Raise if a model cannot run through the stages of a mesh."""
    if not hasattr(model, "run_blocks") or not isinstance(model.blocks, Block):
        raise ValueError(
            f"model is a {type(model).__name__} whose layers are no stack of a "
            "Decoder, which a pipeline needs; set the mesh axis pipe to 1"
        )
    if mesh.shape.get(_AXIS, 1) < 2:
        raise ValueError(
            f"the mesh {dict(mesh.shape)} has no stages; call under jax.set_mesh(mesh) "
            f"of a mesh whose axis {_AXIS!r} is at least 2, or use accumulated"
        )
    if AxisType.Explicit in mesh.axis_types:
        raise ValueError(
            "the mesh has Explicit axes, on which no pipeline runs; make it with "
            "axis_type='auto'"
        )
    if as_tuple(rules.layers) != (_AXIS,):
        raise ValueError(
            f"the rule layers is {rules.layers!r}, expected {_AXIS!r} for a pipeline; "
            "use megascale_3d()"
        )
    if any("blocks" in path for path, _ in nnx.to_flat_state(_others(model))):
        raise ValueError(
            "the blocks hold arrays that are no nnx.Param, such as those of sparse "
            "layers, which a pipeline does not split; train the dense model"
        )


def _others(model: Any) -> Any:
    return nnx.split(model, nnx.Param, ...)[2]
