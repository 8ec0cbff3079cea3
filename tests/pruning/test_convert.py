"""Sparse models against the masked dense ones that they are made from."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale import sharding
from jaxscale.models import Decoder, EncoderModel, HeadConfig, encoder_preset
from jaxscale.nn import TileSparseLinear
from jaxscale.pruning import (
    PruneConfig,
    apply_masks,
    choose,
    dense_layers,
    linears,
    magnitude_scores,
    make_model_masks,
    sparsify,
)
from jaxscale.training import Checkpointer
from tests.pruning.conftest import CONFIG, batches, mean_loss, perturbed
from tests.tiers import exhaustive
from tests.tolerances import RELATIVE, relative_error


TILES = PruneConfig(sparsity=0.75, tile=8)


def pruned(model, config=TILES, dense_above=1.0, **options):
    """The masked dense model and the sparse one."""
    masks = make_model_masks(model, magnitude_scores(model), config)
    sparse = sparsify(model, masks, dense_above=dense_above, **options)
    return masks, apply_masks(model, masks), sparse


def sparse_layers(model):
    return {
        ".".join(map(str, path)): node
        for path, node in nnx.iter_modules(model)
        if isinstance(node, TileSparseLinear)
    }


@jax.jit
def dense_parts(weight):
    """The weights [L, S, K, N] of all layers of a stack and all shards of each."""
    return jax.vmap(jax.vmap(lambda w: w.to_dense()))(weight)


def dense_kernel(layer, place):
    """The weight of one layer of a stack, put together from its shards."""
    parts = np.asarray(dense_parts(layer.weight))[place]
    return np.concatenate(list(parts), axis=0 if layer.split == "rows" else 1)


def tensor_mesh(fsdp=2, tensor=2):
    devices = jax.devices()[: fsdp * tensor]
    return sharding.make_mesh(sharding.MeshConfig(fsdp=fsdp, tensor=tensor), devices)


@pytest.mark.parametrize(
    "changes",
    [
        {"pattern": "tw_k", "k_granularity": 8},
        {"pattern": "tw", "equal_work": True, "shards": 2},
        {"pattern": "tw", "dense": ("*.1",), "shards": 4, "tile": 4},
        {"pattern": "tw", "sparsity": 0.97},
        {"pattern": "tw_k", "sparsity": 0.0},
        {"pattern": "tew", "single_fraction": 0.2, "shards": 2},
    ],
)
def test_a_sparse_layer_holds_the_kept_weights(changes, model):
    """Exactly, for stacks, shards, empty tiles and layers that keep everything."""
    model = jax.tree.map(lambda x: x, model)
    for layer in linears(model).values():
        layer.rules = sharding.preset("fsdp_tp")
    config = dataclasses.replace(TILES, **changes)
    masks, masked, sparse = pruned(model, config, drop_hidden=False)
    layers = sparse_layers(sparse)
    assert set(layers) == set(masks)
    for name, dense in linears(masked).items():
        for place in range(2):
            found = dense_kernel(layers[name], place)
            np.testing.assert_array_equal(found, dense.kernel[...][place])


@pytest.mark.parametrize("parallel", [False, True])
def test_packed_rows_give_what_the_masked_model_gives(parallel):
    """Blocks in a row and in parallel, whose first layers are called together."""
    config = dataclasses.replace(CONFIG, parallel_block=parallel, mlp_bias=parallel)
    _, masked, sparse = pruned(perturbed(Decoder(config, rngs=nnx.Rngs(0))))
    batch = batches(1)[0]
    run = jax.jit(lambda m, b: m(b.tokens, cu_seqlens=b.cu_seqlens))
    expected = run(masked, batch)
    assert relative_error(run(sparse, batch), expected) < RELATIVE[expected.dtype]
    assert np.abs(expected).max() > 0.1


def biased(**options):
    config = dataclasses.replace(
        CONFIG,
        activation="gelu",
        mlp_bias=True,
        attention_bias=True,
        attention_out_bias=True,
    )
    rules = sharding.preset("fsdp_tp")
    return perturbed(Decoder(config, rules=rules, rngs=nnx.Rngs(0), **options))


def test_gradients_are_those_of_the_masked_model():
    """With biases; of the kept weights, and of everything else."""
    model = biased()
    masks, masked, sparse = pruned(model, drop_hidden=False)
    batch = batches(1)[0]

    def gradients(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        grads = jax.grad(lambda p: mean_loss(nnx.merge(graph, p, rest), batch))(params)
        return nnx.merge(graph, grads, rest)

    expected, found = jax.jit(gradients)(masked), jax.jit(gradients)(sparse)
    layers = sparse_layers(found)
    for name, layer in linears(expected).items():
        kernel = np.where(masks[name], layer.kernel[...], 0)
        for place in range(2):
            np.testing.assert_allclose(
                dense_kernel(layers[name], place), kernel[place], rtol=1e-3, atol=1e-7
            )
        a, b = layers[name].bias, layer.bias
        assert a is not None and b is not None
        np.testing.assert_allclose(a[...], b[...], rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(
        found.embed.table[...], expected.embed.table[...], rtol=1e-3, atol=1e-7
    )


@jax.jit
def loss_and_gradient(model, batch):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params):
        return mean_loss(nnx.merge(graph, params, rest), batch)

    return jax.value_and_grad(loss)(params)


@pytest.fixture(scope="module")
def two_shards():
    """A sparse model of two shards, with its loss and gradients on one device."""
    _, masked, sparse = pruned(biased(), dataclasses.replace(TILES, shards=2))
    batch = batches(1)[0]
    loss, grads = loss_and_gradient(sparse, batch)
    np.testing.assert_allclose(loss, jax.jit(mean_loss)(masked, batch), rtol=1e-5)
    return sparse, batch, loss, grads


@pytest.mark.parametrize("tensor", [2, *exhaustive(1)])
def test_sharded_equals_unsharded(tensor, two_shards):
    """Two shards on two devices, and both on each of them; values and gradients."""
    sparse, batch, loss, grads = two_shards
    mesh, rules = tensor_mesh(2 // tensor, tensor), sharding.preset("fsdp_tp")
    placed = sharding.place(sparse, mesh, rules)
    values = placed.blocks.mlp.up.values[...]
    if tensor == 2:
        assert values.sharding.spec[1] == "tensor"
        shard = values.addressable_shards[0].data.shape
        assert shard[1] == values.shape[1] // 2
    with jax.set_mesh(mesh):
        split_loss, split_grads = loss_and_gradient(placed, batch)
    np.testing.assert_allclose(split_loss, loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(split_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-6)


def test_fused_layers_that_stay_dense_go_on_as_they_are():
    model, batch = biased(tensor_parallel="fused"), batches(1)[0]
    config = dataclasses.replace(TILES, shards=2, dense=("blocks.attention.*",))
    _, masked, sparse = pruned(model, config)
    mesh = tensor_mesh(1, 2)
    placed = sharding.place(sparse, mesh, sharding.preset("fsdp_tp"))
    run = jax.jit(mean_loss)
    with jax.set_mesh(mesh):
        found = run(placed, batch)
    np.testing.assert_allclose(found, run(masked, batch), rtol=1e-5)


@pytest.mark.parametrize("kind, shards", [("gated", 2), ("biased", 1)])
def test_pruned_hidden_features_are_left_out(kind, shards, model):
    """Of gate, up and down, with their biases; the model gives what it gave."""
    model = perturbed(model) if kind == "gated" else biased()
    if shards > 1:
        model = jax.tree.map(lambda x: x, model)
        for layer in linears(model).values():
            layer.rules = sharding.preset("fsdp_tp")
    config = dataclasses.replace(TILES, shards=shards, sparsity=0.6)
    masks, masked, sparse = pruned(model, config)
    whole = sparsify(model, masks, drop_hidden=False)
    up, down = sparse.blocks.mlp.up, sparse.blocks.mlp.down
    hidden = up.shape[1]
    assert hidden == down.shape[0] < whole.blocks.mlp.up.shape[1]
    assert up.columns is None and down.rows[...].max() < hidden
    names = ["up", "down"] if kind == "biased" else ["gate", "up", "down"]
    for layer in names:
        few, many = (getattr(m.blocks.mlp, layer) for m in (sparse, whole))
        assert few.counts[...].sum() == many.counts[...].sum()  # none was in vain
    batch = batches(1)[0]
    run = jax.jit(lambda m, b: m(b.tokens, cu_seqlens=b.cu_seqlens))
    expected = run(masked, batch)
    assert relative_error(run(sparse, batch), expected) < RELATIVE[expected.dtype]


def test_hidden_features_stay_where_leaving_them_out_would_change_the_model():
    """Down keeps rows of features that are nothing but a bias."""
    model = biased()
    config = dataclasses.replace(TILES, sparsity=0.6, hidden_together=False)
    masks, masked, sparse = pruned(model, config)
    fed = masks.tiled["blocks.mlp.up"].any(axis=1)
    assert (masks["blocks.mlp.down"].any(axis=2) & ~fed).any()
    assert sparse.blocks.mlp.up.shape[1] == CONFIG.d_ff
    batch = batches(1)[0]
    run = jax.jit(lambda model: model(batch.tokens))
    expected = run(masked)
    assert relative_error(run(sparse), expected) < RELATIVE[expected.dtype]


@pytest.mark.parametrize("kind, shards", [("biased", 2), *exhaustive(("gated", 1))])
def test_single_weights_become_rows_of_tiles(kind, shards, model):
    """Values and gradients of tile-element-wise masks; what is pruned stays zero."""
    model = perturbed(model) if kind == "gated" else biased()
    if shards > 1:
        model = jax.tree.map(lambda x: x, model)
        for layer in linears(model).values():
            layer.rules = sharding.preset("fsdp_tp")
    config = dataclasses.replace(
        TILES, pattern="tew", single_fraction=0.2, shards=shards, sparsity=0.9
    )
    masks, masked, sparse = pruned(model, config)
    layers = sparse_layers(sparse)
    assert sum(int((masks[n] & ~masks.tiled[n]).sum()) for n in masks) > 100
    assert any(layer.zeros_stay for layer in layers.values())
    stored = {n: int((layer.values[...] != 0).sum()) for n, layer in layers.items()}
    for name in masks:  # all but what belongs to hidden features that are zero
        assert stored[name] <= masks[name].sum(), name
        assert "mlp" in name or stored[name] == masks[name].sum(), name
    if kind == "gated":
        assert layers["blocks.mlp.up"].shape[1] < CONFIG.d_ff
    batch = batches(1)[0]

    def gradients(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        loss, grads = jax.value_and_grad(
            lambda p: mean_loss(nnx.merge(graph, p, rest), batch)
        )(params)
        return loss, nnx.merge(graph, grads, rest)

    loss, wanted = jax.jit(gradients)(masked)
    mesh = tensor_mesh(1, shards) if shards > 1 else None
    with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
        if mesh:
            sparse = sharding.place(sparse, mesh, sharding.preset("fsdp_tp"))
        found_loss, found = jax.jit(gradients)(sparse)
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(
        found.embed.table[...], wanted.embed.table[...], rtol=1e-3, atol=1e-6
    )
    moved = sparse_layers(found)
    for name, layer in layers.items():
        moves = np.asarray(moved[name].values[...]) != 0
        assert moves.any() and not moves[np.asarray(layer.values[...]) == 0].any()


@pytest.mark.parametrize(
    "name, unstacked",
    [
        ("modernbert", "before"),
        ("deberta_v3", None),
        *exhaustive(("modernbert", "after")),
    ],
)
def test_encoders(name, unstacked):
    """A first layer of its own; positions through the layers of queries and keys."""
    head = HeadConfig(kind="sequence", num_labels=3, transform="tanh")
    config = encoder_preset(f"{name}_tiny")
    model = perturbed(EncoderModel(config, head=head, rngs=nnx.Rngs(0)))
    masks, masked, sparse = pruned(
        model.unstacked() if unstacked == "before" else model
    )
    sparse = sparse.unstacked() if unstacked == "after" else sparse
    assert not [name for name in masks if name.startswith(("head", "embed"))]
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)), jnp.int32)
    run = jax.jit(lambda m: m(tokens, cu_seqlens=jnp.array([[0, 5, 16], [0, 16, 16]])))
    valid = np.array([[True, True], [True, False]])
    found, expected = run(sparse)[valid], run(masked)[valid]
    assert relative_error(found, expected) < RELATIVE[expected.dtype]


def test_tiles_of_a_layer_have_equal_room(model):
    config = dataclasses.replace(TILES, equal_work=True, scope="layer")
    _, _, sparse = pruned(model, config)
    for layer in sparse_layers(sparse).values():
        counts = np.asarray(layer.counts[...])
        assert counts.max() - counts.min() <= 1


def copied(model, directory):
    """The model, saved and restored."""
    with Checkpointer(directory) as checkpoints:
        checkpoints.save(1, {"model": model}, {})
    target = jax.eval_shape(lambda: model)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), target
    )
    with Checkpointer(directory, read_only=True) as checkpoints:
        return checkpoints.restore_model(target)


def test_a_checkpoint_brings_the_sparse_model_back(model, tmp_path):
    _, _, sparse = pruned(perturbed(model))
    restored = copied(sparse, tmp_path)
    tokens = jnp.array([[1, 2, 3]])
    np.testing.assert_array_equal(restored(tokens), sparse(tokens))


def test_layers_that_keep_most_stay_dense(model, tmp_path):
    """Masked; of a stack as a whole, or each that is separate, also when saved."""
    model = perturbed(model)
    half = dataclasses.replace(TILES, sparsity=0.5, dense=("*.mlp.*.1",))
    masks, masked, sparse = pruned(model, half, dense_above=0.7)
    assert dense_layers(model, masks, 0.7) == [n for n in masks if ".mlp." in n]
    assert set(sparse_layers(sparse)) == {n for n in masks if "attention" in n}
    kernel = sparse.blocks.mlp.up.kernel[...]
    np.testing.assert_array_equal(kernel, masked.blocks.mlp.up.kernel[...])
    single = sparsify(model, masks, dense_above=0.7, separate=True)
    assert {n.split(".")[1] for n in sparse_layers(single) if "mlp" in n} == {"0"}
    assert single.for_inference().blocks[1].mlp.joined is not None
    tokens = jnp.array([[1, 2, 3]])
    expected = masked(tokens)
    for each in (sparse, single, single.for_inference(), copied(single, tmp_path)):
        assert relative_error(each(tokens), expected) < RELATIVE[expected.dtype]
    with pytest.raises(ValueError, match=r"dense_above 75, expected a share, 0 to 1"):
        sparsify(model, masks, dense_above=75)


def test_types_stay(model):
    low = Decoder(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.float32, rngs=nnx.Rngs(0))
    _, masked, sparse = pruned(low)
    assert sparse.blocks.mlp.up.values.dtype == jnp.float32
    batch = batches(1)[0]
    run = jax.jit(lambda model: model.hidden(batch.tokens))
    hidden = run(sparse)
    assert hidden.dtype == jnp.bfloat16
    error = relative_error(hidden, run(masked))
    assert error < RELATIVE[hidden.dtype]


def test_what_cannot_be_converted(model):
    masks, _, sparse = pruned(model)
    with pytest.raises(ValueError, match=r"blocks.attention.key is sparse already"):
        choose(sparse)
    with pytest.raises(ValueError, match=r"is sparse already; prune the dense model"):
        sparsify(sparse, masks)
    with pytest.raises(ValueError, match=r"is sparse already"):
        apply_masks(sparse, masks)
    blocks = dataclasses.replace(TILES, pattern="bw", block=8)
    masks = make_model_masks(model, magnitude_scores(model), blocks)
    with pytest.raises(ValueError, match=r"pattern 'bw' has no sparse form, expected"):
        sparsify(model, masks)
