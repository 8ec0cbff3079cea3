"""Shardings of modules: stacked layers, creation on the mesh, placement, errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxscale.models import Decoder, preset
from jaxscale.sharding import (
    MeshConfig,
    create,
    dp,
    fsdp,
    fsdp_tp,
    logical_axes,
    make_mesh,
    partitioned,
    place,
    shardings,
    specs,
)


LAYERS = 3


class Layer(nnx.Module):
    def __init__(self, *, rngs):
        # Exact however it is compiled: no shift that rounds near zero.
        init = partitioned(jax.nn.initializers.uniform(0.3), "embed", "mlp")
        self.kernel = nnx.Param(init(rngs.params(), (16, 32), jnp.float32))
        self.scale = nnx.Param(jnp.ones((7,)))  # without logical axes


class Model(nnx.Module):
    def __init__(self, *, rngs):
        metadata = {nnx.PARTITION_NAME: "layers"}

        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(transform_metadata=metadata)
        def stack(rngs):
            return Layer(rngs=rngs)

        self.blocks = stack(rngs)
        init = partitioned(jax.nn.initializers.normal(), "embed", "vocab")
        self.head = nnx.Param(init(rngs.params(), (16, 48), jnp.float32))


def make():
    return Model(rngs=nnx.Rngs(0))


def values(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


@pytest.fixture
def mesh():
    return make_mesh({"fsdp": 4, "tensor": 2})


def test_rank_of_each_spec_equals_rank_of_its_array():
    model = make()
    tree = specs(model, fsdp_tp())
    assert jax.tree.structure(tree) == jax.tree.structure(model)
    for spec, leaf in zip(jax.tree.leaves(tree), jax.tree.leaves(model), strict=True):
        assert len(spec) == leaf.ndim
    assert logical_axes(model.blocks.kernel) == ("layers", "embed", "mlp")
    assert tree.blocks.kernel.get_value() == P(None, "fsdp", "tensor")
    assert logical_axes(model.blocks.scale) == (None, None)
    assert tree.head.get_value() == P("fsdp", "tensor")


@pytest.mark.parametrize("name", ["llama_tiny", "gpt2_tiny", "gptj_tiny"])
@pytest.mark.parametrize("scan_layers", [True, False])
def test_every_parameter_of_the_decoders_names_its_axes(name, scan_layers, mesh):
    model = jax.eval_shape(
        lambda: Decoder(preset(name), scan_layers=scan_layers, rngs=nnx.Rngs(0))
    )
    variables = jax.tree.leaves(model, is_leaf=lambda n: isinstance(n, nnx.Variable))
    placed = jax.tree.leaves(shardings(model, mesh, fsdp()))
    for variable, sharding in zip(variables, placed, strict=True):
        axes = logical_axes(variable)
        assert len(sharding.spec) == len(axes) == variable.ndim
        # FSDP splits every matrix; only vectors, stacked over layers or not, are whole.
        split = sharding.shard_shape(variable.shape) != variable.shape
        assert split or len([axis for axis in axes if axis != "layers"]) == 1, axes
    shardings(model, mesh, fsdp_tp())  # everything divides


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_create_splits_without_changing_values(kind):
    mesh = make_mesh(MeshConfig(fsdp=4, tensor=2, axis_type=kind))
    model = create(make, mesh, fsdp_tp())
    kernel = model.blocks.kernel.get_value()
    assert kernel.sharding == NamedSharding(mesh, P(None, "fsdp", "tensor"))
    assert kernel.addressable_shards[0].data.shape == (LAYERS, 16 // 4, 32 // 2)
    for ours, theirs in zip(values(model), values(make()), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)  # fused under jit


def test_place_moves_between_meshes_and_recipes(mesh):
    model = place(make(), mesh, fsdp_tp())
    model = place(model, make_mesh({"data": 8}), dp())
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(model))
    again = place(model, mesh, fsdp())
    assert again.head.get_value().sharding == NamedSharding(mesh, P("fsdp", None))
    for ours, theirs in zip(values(again), values(make()), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_abstract_modules_and_states_have_the_same_shardings(mesh):
    expected = jax.tree.leaves(shardings(make(), mesh, fsdp_tp()))
    for form in (jax.eval_shape(make), nnx.state(make())):
        assert jax.tree.leaves(shardings(form, mesh, fsdp_tp())) == expected


def test_moments_of_the_optimizer_follow_their_parameters(mesh):
    parameters = nnx.state(make(), nnx.Param)
    expected = jax.tree.leaves(shardings(parameters, mesh, fsdp_tp()))
    moments = shardings(optax.adam(1e-3).init(parameters), mesh, fsdp_tp())
    count, *rest = jax.tree.leaves(moments)
    assert count == NamedSharding(mesh, P())
    assert rest == expected * 2


def test_indivisible_parameter_is_named():
    mesh = make_mesh({"tensor": 8})
    rules = dataclasses.replace(fsdp_tp(), layers="tensor", mlp=None)
    with pytest.raises(
        ValueError,
        match=r"parameter blocks.kernel of shape \(3, 16, 32\) .*'tensor': 8",
    ):
        shardings(make(), mesh, rules)


def test_layers_stacked_without_their_axis_are_named(mesh):
    class Bare(nnx.Module):
        def __init__(self):
            keys = jax.random.split(jax.random.key(0), LAYERS)
            self.blocks = jax.vmap(lambda key: Layer(rngs=nnx.Rngs(key)))(keys)

    with pytest.raises(
        ValueError, match=r"blocks.kernel .*\(3, 16, 32\) .* expected 3; .*nnx.vmap"
    ):
        shardings(Bare(), mesh, fsdp_tp())


def test_unknown_logical_axis_names_the_parameter(mesh):
    class Odd(nnx.Module):
        def __init__(self):
            self.bias = nnx.Param(
                jnp.ones(4), out_sharding=("rows",), eager_sharding=False
            )

    with pytest.raises(ValueError, match=r"parameter bias: logical axis 'rows' is unk"):
        shardings(Odd(), mesh, fsdp_tp())


def test_unknown_logical_axis_is_refused_by_the_initializer():
    with pytest.raises(ValueError, match="logical axis 'rows' is unknown; use None or"):
        partitioned(jax.nn.initializers.ones, "embed", "rows")


def test_mesh_without_the_axes_of_the_rules():
    mesh = Mesh(np.asarray(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match=r"axis 'fsdp', .* only \('data',\)"):
        shardings(make(), mesh, fsdp())
