"""Adapters: the same numbers as the merged kernel, and gradients of nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models import (
    Decoder,
    EncoderModel,
    encoder_head,
    encoder_preset,
    preset,
)
from jaxscale.nn import (
    ColumnParallelLinear,
    Linear,
    LoraConfig,
    RowParallelLinear,
    add_adapters,
    merge_adapters,
)
from jaxscale.nn.lora import Frozen, LowRank
from jaxscale.sharding import fsdp_tp, make_mesh, place


LAYERS = {
    "plain": (Linear, ("embed", "mlp"), ("batch", None, "act_mlp"), {}),
    "column": (ColumnParallelLinear, ("embed", "mlp"), ("batch", None, "act_mlp"), {}),
    "column_xla": (
        *(ColumnParallelLinear, ("embed", "mlp"), ("batch", None, "act_mlp")),
        {"tensor_parallel": "xla"},
    ),
    "row": (RowParallelLinear, ("mlp", "embed"), ("batch", "tokens", "act_embed"), {}),
    "row_xla": (
        *(RowParallelLinear, ("mlp", "embed"), ("batch", "tokens", "act_embed")),
        {"tensor_parallel": "xla"},
    ),
}


class Net(nnx.Module):
    """A model with one layer in its blocks."""

    def __init__(self, layer):
        self.blocks = nnx.List([layer])

    def __call__(self, x):
        return self.blocks[0](x)


def randomized(model, seed=0):
    """`model` with random `b` in its adapters, which are zero at first."""
    for i, (_, node) in enumerate(nnx.iter_modules(model)):
        if isinstance(node, LowRank):
            key = jax.random.key(seed + i)
            node.b.set_value(0.3 * jax.random.normal(key, node.b.shape))
    return model


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_values_and_gradients_are_those_of_the_formula(kind, sharded):
    make, axes, out_axes, options = LAYERS[kind]
    sizes = {"fsdp": 2, "tensor": 2} if sharded else {"data": 1}
    mesh = make_mesh(sizes, jax.devices()[: 4 if sharded else 1])
    layer = make(
        *(8, 12),
        kernel_axes=axes,
        out_axes=out_axes,
        use_bias=True,
        rules=fsdp_tp(),
        rngs=nnx.Rngs(1),
        **options,
    )
    layer.bias.set_value(jax.random.normal(jax.random.key(2), (12,)))
    config = LoraConfig(rank=3, alpha=7.5)
    net = randomized(add_adapters(Net(layer), config))
    adapter = net.blocks[0].low_rank
    w, bias, a, b = (
        np.asarray(v[...], np.float64)
        for v in (layer.kernel, layer.bias, adapter.a, adapter.b)
    )
    x = np.random.default_rng(0).normal(size=(2, 4, 8))
    g = np.random.default_rng(1).normal(size=(2, 4, 12))

    with jax.set_mesh(mesh):
        placed = place(net, mesh, fsdp_tp())
        graph, trained, rest = nnx.split(placed, nnx.Param, ...)
        assert len(jax.tree.leaves(trained)) == 2

        @jax.jit
        def run(trained, x):
            def loss(trained, x):
                out = nnx.merge(graph, trained, rest)(x)
                return (out * g.astype(np.float32)).sum(), out

            return jax.grad(loss, (0, 1), has_aux=True)(trained, x)

        (grads, dx), out = run(trained, jnp.asarray(x, jnp.float32))
    scale = 7.5 / 3
    found = grads["blocks"][0]["low_rank"]
    for have, want in (
        (out, x @ w + scale * (x @ a) @ b + bias),
        (found["a"][...], scale * np.einsum("bti,bto,ro->ir", x, g, b)),
        (found["b"][...], scale * np.einsum("bti,ir,bto->ro", x, a, g)),
        (dx, g @ (w + scale * a @ b).T),
    ):
        np.testing.assert_allclose(np.asarray(have), want, rtol=2e-5, atol=2e-5)
    merged = merge_adapters(net).blocks[0]
    np.testing.assert_allclose(merged.kernel[...], w + scale * a @ b, rtol=1e-5)
    assert type(merged.kernel) is nnx.Param and merged.low_rank is None
    assert merged.kernel.get_metadata() == layer.kernel.get_metadata()


@pytest.mark.parametrize("family", ["llama_tiny", "gpt2_tiny", "deberta_v3_tiny"])
def test_a_model_computes_as_its_merged_one(family):
    """With biases (gpt2) and relative positions (deberta), stacked."""
    if family in ("llama_tiny", "gpt2_tiny"):
        model = Decoder(preset(family), rngs=nnx.Rngs(0))
    else:
        model = EncoderModel(encoder_preset(family), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (2, 16), 0, 200)
    adapted = randomized(add_adapters(model, LoraConfig(rank=2)))
    before, after = model.hidden(tokens), adapted.hidden(tokens)
    merged = merge_adapters(adapted)
    assert abs(after - before).max() > 1e-2
    np.testing.assert_allclose(merged.hidden(tokens), after, rtol=2e-4, atol=2e-5)
    assert jax.tree.structure(merged) == jax.tree.structure(model)


def test_layers_are_chosen_by_name():
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))

    def adapted(*layers):
        found = add_adapters(model, LoraConfig(rank=2, layers=layers))
        return sorted(
            ".".join(map(str, path[1:-1]))
            for path, node in nnx.iter_modules(found)
            if isinstance(node, LowRank)
        )

    assert adapted("query", "value") == ["attention.query", "attention.value"]
    assert adapted("blocks.mlp.*") == ["mlp.down", "mlp.gate", "mlp.up"]
    with pytest.raises(ValueError, match=r"lora.layers 'quiry' is no linear layer"):
        adapted("query", "quiry")


def test_all_but_adapters_and_the_head_is_frozen():
    config = encoder_preset("bert_tiny")
    head = encoder_head(config, "sequence", num_labels=2)
    model = EncoderModel(config, head=head, rngs=nnx.Rngs(0))
    adapted = add_adapters(model, LoraConfig(rank=1, layers=("query",)))
    trained = nnx.to_flat_state(nnx.state(adapted, nnx.Param))
    assert {path[0] if path[0] == "head" else path[-2] for path, _ in trained} == {
        "head",
        "low_rank",
    }
    frozen = jax.tree.leaves(nnx.state(adapted, Frozen))
    assert len(frozen) + len(trained) - 2 == len(jax.tree.leaves(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": -1}, "rank -1, expected at least 1, or 0 for none"),
        ({"rank": 1, "alpha": 0.0}, "alpha 0.0, expected above 0"),
        ({"rank": 1, "alpha": float("nan")}, "alpha nan, expected above 0"),
        ({"rank": 1, "layers": ()}, "layers is empty"),
    ],
)
def test_wrong_settings(options, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**options)


def test_rank_zero_makes_none():
    with pytest.raises(ValueError, match="rank 0 makes no adapters"):
        add_adapters(Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0)), LoraConfig())
