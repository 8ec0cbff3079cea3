"""Decoders made ready to serve: other parameters, the same logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import Decoder, preset
from jaxscale.models.serving import serving_rules
from jaxscale.nn import ColumnParallelLinear, JoinedLinear, TileSparseLinear
from jaxscale.nn.joined import join_inputs
from jaxscale.pruning import PruneConfig
from jaxscale.sharding import REPLICATED, create, fsdp_tp, make_mesh
from tests.pruning.test_convert import pruned
from tests.tolerances import RELATIVE, relative_error


FAMILIES = (
    *("gpt2", "gptj", "neox", "llama", "mistral", "qwen2", "qwen3"),
    *("gemma2", "gemma3"),
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 250, (2, 12)), jnp.int32)


def perturbed(model):
    """At their initial size blocks hardly change a token, and biases are zero."""
    rng = np.random.default_rng(1)

    def change(p):
        return 12 * p if p.ndim == 3 else p + 0.1 * rng.standard_normal(p.shape, "f4")

    model.blocks = jax.tree.map(change, model.blocks)
    return model


def make(name, **options):
    return perturbed(Decoder(preset(f"{name}_tiny"), rngs=nnx.Rngs(0), **options))


@jax.jit
def logits(model):
    return model(TOKENS)


def test_projections_of_one_input_are_joined():
    """That the logits stay the same is tested for each family in `nn/test_cache`."""
    model = make("llama")
    for block in model.for_inference().blocks:
        assert block.attention.query is block.attention.key is None
        assert block.mlp.up is block.mlp.gate is None
    assert type(model.blocks.attention.query) is ColumnParallelLinear  # as it was


def test_parameters_are_in_the_type_of_the_computation():
    model = make("gpt2", dtype=jnp.bfloat16)
    served = model.for_inference()
    kinds = {p.dtype for p in jax.tree.leaves(served) if p.ndim == 2}
    assert kinds == {jnp.dtype("bfloat16")}
    assert served.norm.scale.dtype == jnp.dtype("float32")
    assert (
        relative_error(logits(served), logits(model)) < RELATIVE[jnp.dtype("bfloat16")]
    )


@pytest.mark.parametrize(
    ("name", "sizes", "kind"),
    [
        ("llama", {"fsdp": 2, "tensor": 2}, "explicit"),
        ("gpt2", {"data": 2, "tensor": 4}, "auto"),
    ],
)
def test_tensor_parallelism_is_left(name, sizes, kind):
    """Devices that shared the batch hold everything; heads stay apart."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh, rules = make_mesh({**sizes, "axis_type": kind}, devices), fsdp_tp()
    model = create(lambda: make(name, rules=rules), mesh, rules)
    served = model.for_inference()
    kernel = served.blocks[0].attention.joined.kernel[...]
    assert kernel.sharding.spec == jax.P(None, "tensor")
    whole = make(name).for_inference()
    with jax.set_mesh(kernel.sharding.mesh):
        assert relative_error(logits(served), logits(whole)) < 1e-5
    # The part of a device is that of queries, keys and values that it had.
    part = kernel.addressable_shards[0].data
    query = make(name).blocks.attention.query.kernel[0]
    width = query.shape[1] // sizes["tensor"]
    assert relative_error(part[:, :width], query[:, :width]) < 1e-6


@pytest.mark.parametrize(("heads", "ways"), [(1, 2), (2, 4)])
def test_key_value_heads_are_repeated_on_more_devices(heads, ways):
    mesh = make_mesh({"tensor": ways}, jax.devices()[:ways])
    config = dataclasses.replace(preset("llama_tiny"), num_kv_heads=heads)
    model = perturbed(Decoder(config, rules=fsdp_tp(), rngs=nnx.Rngs(0)))
    served = model.for_inference(mesh)
    assert served.config.num_kv_heads == ways
    assert model.config.num_kv_heads == heads
    kernel = served.blocks[0].attention.joined.kernel[...]
    h = config.head_dim
    key = model.blocks.attention.key.kernel[0]  # [D, K H]
    per_device = config.num_heads // ways * h  # queries
    for i, shard in enumerate(kernel.addressable_shards):
        own = i * heads // ways  # the head that the device's queries read
        found = shard.data[:, per_device : per_device + h]
        np.testing.assert_array_equal(found, key[:, own * h : (own + 1) * h])
    whole = logits(model)
    with jax.set_mesh(kernel.sharding.mesh):
        assert relative_error(logits(served), whole) < 1e-5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 6}, "num_heads 6 is not divisible by 4"),
        ({"num_heads": 12, "num_kv_heads": 3}, "num_kv_heads 3 is not divisible by 4"),
    ],
)
def test_heads_that_cannot_be_split_are_refused(change, message):
    config = dataclasses.replace(preset("llama_tiny"), **change)
    model = Decoder(config, rules=fsdp_tp(), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=message):
        model.for_inference(make_mesh({"tensor": 4}, jax.devices()[:4]))


def test_of_sparse_layers_gate_and_up_are_one():
    model = make("llama")
    _, _, sparse = pruned(model, PruneConfig(sparsity=0.5, tile=8))
    served = sparse.for_inference()
    attention, mlp = served.blocks[1].attention, served.blocks[1].mlp
    assert attention.joined is None
    assert isinstance(attention.query, TileSparseLinear)
    assert isinstance(mlp.joined, TileSparseLinear)
    assert mlp.inputs == (mlp.joined,)
    assert relative_error(logits(served), logits(sparse)) < 1e-5
    assert served.for_inference() is served
    shapes = jax.eval_shape(lambda model: model, sparse).for_inference()
    assert nnx.graphdef(shapes) == nnx.graphdef(served)
    pairs = zip(jax.tree.leaves(shapes), jax.tree.leaves(served), strict=True)
    assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in pairs)


def test_keys_and_values_are_one_beside_sparse_queries():
    config = PruneConfig(sparsity=0.5, tile=8, dense=("*.key", "*.value", "*.mlp.*"))
    _, _, sparse = pruned(make("llama"), config)
    served = sparse.for_inference()
    attention = served.blocks[1].attention
    assert isinstance(attention.query, TileSparseLinear)
    assert isinstance(attention.joined, JoinedLinear)
    assert attention.inputs == (attention.query, attention.joined)
    assert relative_error(logits(served), logits(sparse)) < 1e-5
    assert served.for_inference() is served


def test_layers_that_differ_are_not_joined():
    def layer(axis="heads", use_bias=False, size=8, rules=REPLICATED):
        return ColumnParallelLinear(
            4,
            size,
            kernel_axes=("embed", axis),
            out_axes=("batch", None, f"act_{axis}"),
            use_bias=use_bias,
            rules=rules,
            rngs=nnx.Rngs(0),
        )

    class Holder(nnx.Module):
        def __init__(self, a, b):
            self.a, self.b, self.joined = a, b, None

    apart = serving_rules(fsdp_tp()).without({"tensor"}, ["kv_heads"])
    for other, shards in (
        (layer(use_bias=True), 1),
        (layer("kv_heads", rules=apart), 1),
        (layer(size=6), 4),
    ):
        holder = Holder(layer(rules=other.rules), other)
        join_inputs(holder, ("a", "b"), shards)
        assert holder.joined is None and holder.a is not None
    holder = Holder(layer(), layer("kv_heads"))
    join_inputs(holder, ("a", "b"), 4)
    assert isinstance(holder.joined, JoinedLinear) and holder.a is None


def test_rules_keep_what_does_not_split_the_batch():
    rules = serving_rules(fsdp_tp())
    assert rules.batch is None and rules.embed is None
    assert rules.heads == rules.act_mlp == rules.tokens == "tensor"
    assert serving_rules(REPLICATED) == REPLICATED
