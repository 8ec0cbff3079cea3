"""What holds of every public module: Flax can tabulate it, and it checks arguments.

Legend: B batch, T tokens, D features.
"""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from docs.api_pages import pages
from jaxscale import models, nn
from jaxscale.sharding import create, fsdp_tp, make_mesh
from pallas_kernels.tile_sparse_matmul import TileSparse


D = 8
HEADS = nn.AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=4)
X = jax.random.normal(jax.random.key(0), (1, 5, D))
WHOLE = nn.attention_state((1, 5))
TOKENS = jnp.arange(5)[None]
RNGS = {"rngs": nnx.Rngs(0)}


def disentangled():
    config = nn.DisentangledConfig(
        num_heads=2,
        num_kv_heads=2,
        head_dim=4,
        use_bias=True,
        causal=False,
        relative=nn.RelativePositions(span=4, max_distance=16),
    )
    state = nn.attention_state((1, 5), relative=jnp.ones((8, D)))
    return nn.DisentangledAttention(D, config, **RNGS), (X, state)


def joined():
    axes = {"kernel_axes": ("embed", "heads"), **RNGS}
    return nn.JoinedLinear(
        [nn.ColumnParallelLinear(D, size, **axes) for size in (8, 2)], shards=1
    )


def tile_sparse():
    weight = TileSparse.from_dense(jnp.ones((D, 8)), jnp.ones((D, 8), bool), tile=8)
    return nn.TileSparseLinear(
        TileSparse.stack([weight]),
        split=None,
        kernel_axes=("embed", "mlp"),
        out_axes=("batch", None, "act_mlp"),
    )


def head():
    config = models.HeadConfig(kind="sequence", num_labels=3, transform="tanh")
    return models.Head(config, D, **RNGS)


def encoder():
    config = models.encoder_preset("bert_tiny")
    return models.EncoderModel(config, **RNGS)


MODULES = {
    "Attention": lambda: (nn.Attention(D, HEADS, **RNGS), (X, WHOLE)),
    "Block": lambda: (
        nn.Block(nn.BlockConfig(d_model=D, d_ff=16, attention=HEADS), **RNGS),
        (X, WHOLE),
    ),
    "ColumnParallelLinear": lambda: (nn.ColumnParallelLinear(D, 4, **RNGS), (X,)),
    "Decoder": lambda: (
        models.Decoder(models.preset("llama_tiny"), **RNGS),
        (TOKENS,),
    ),
    "DisentangledAttention": disentangled,
    "Embed": lambda: (nn.Embed(16, D, **RNGS), (TOKENS,)),
    "EncoderModel": lambda: (encoder(), (TOKENS,)),
    "Head": lambda: (head(), (X,)),
    "JoinedLinear": lambda: (joined(), (X,)),
    "LayerNorm": lambda: (nn.LayerNorm(D, **RNGS), (X,)),
    "Linear": lambda: (nn.Linear(D, 4, **RNGS), (X,)),
    "MLP": lambda: (nn.MLP(D, 16, **RNGS), (X,)),
    "QuantizedLinear": lambda: (
        nn.QuantizedLinear(
            jnp.ones((D, 8)),
            "int8",
            kernel_axes=("embed", "mlp"),
            out_axes=("batch", None, "act_mlp"),
        ),
        (X,),
    ),
    "RMSNorm": lambda: (nn.RMSNorm(D, **RNGS), (X,)),
    "RowParallelLinear": lambda: (nn.RowParallelLinear(D, 4, **RNGS), (X,)),
    "SequenceConvolution": lambda: (
        nn.SequenceConvolution(D, 3, **RNGS),
        (X, TOKENS),
    ),
    "TileSparseLinear": lambda: (tile_sparse(), (X,)),
}


def public_modules():
    found = {
        name: getattr(package, name)
        for package in (nn, models)
        for name in package.__all__
    }
    return {
        name: value
        for name, value in found.items()
        if inspect.isclass(value) and issubclass(value, nnx.Module)
    }


def test_all_public_modules_are_here():
    assert sorted(MODULES) == sorted(public_modules())


@pytest.mark.parametrize("name", MODULES)
def test_modules_can_be_tabulated(name):
    """As Flax's documentation shows a model. It puts wrappers around all methods, and
    after an error they would stay."""
    module, arguments = MODULES[name]()
    before = jax.tree.leaves(module(*arguments))
    text = nnx.tabulate(module, *arguments)
    assert name in text and "Total" in text
    after = jax.tree.leaves(module(*arguments))
    for found, expected in zip(after, before, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", sorted(set(MODULES) - {"JoinedLinear"}))
def test_modules_take_rules(name):
    """A joined layer has those of its parts."""
    parameters = inspect.signature(public_modules()[name].__init__).parameters
    assert {"rules", "options"} & set(parameters)


@pytest.mark.parametrize("name", MODULES)
def test_help_and_pages_show_constructor_and_call(name):
    """The metaclass of NNX takes any arguments."""
    cls = public_modules()[name]
    package = next(p for p in (nn, models) if name in p.__all__)
    signature = inspect.signature(cls)
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    assert list(signature.parameters.values()) == parameters
    text = "".join(pages(package.__name__).values())
    arguments = re.search(rf"autoclass:: {name}\((.*)\)\n", text)
    assert arguments and all(p.name in arguments[1] for p in parameters)
    assert f"automethod:: {name}.__call__\n" in text
    assert cls.__init__.__doc__ and cls.__call__.__doc__

    class Narrow(cls):
        def __init__(self, width):
            pass

    assert str(inspect.signature(Narrow)) == "(width)"


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_keep_their_rules(name):
    assert public_modules()[name](D, rules=fsdp_tp(), **RNGS).rules == fsdp_tp()


@pytest.mark.parametrize("kind", [nn.Linear, nn.ColumnParallelLinear])
@pytest.mark.parametrize(
    "axes",
    [
        {"kernel_axes": ("embed", "hidden")},
        {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "hidden")},
    ],
)
def test_unknown_axes_are_refused_when_a_layer_is_made(kind, axes):
    with pytest.raises(ValueError, match="logical axis 'hidden' is unknown; use None"):
        kind(4, 8, **axes, **RNGS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.RMSNorm(4, axis="hidden", **RNGS),
        lambda: nn.Embed(4, 4, row_axis="hidden", **RNGS),
        lambda: nn.QuantizedLinear(
            jnp.ones((8, 8)), "int8", kernel_axes=("embed", "hidden"), out_axes=()
        ),
    ],
)
def test_unknown_axes_of_other_layers_are_refused(make):
    with pytest.raises(ValueError, match="logical axis 'hidden' is unknown"):
        make()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 2, 2)])
def test_linear_without_axes_takes_rows_of_any_rank(shape, no_shape_hook):
    layer = nn.Linear(6, 5, use_bias=True, **RNGS)
    layer.bias[...] = jnp.arange(5.0)
    x = jax.random.normal(jax.random.key(1), (*shape, 6))
    expected = np.asarray(x) @ np.asarray(layer.kernel[...]) + np.arange(5)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)
    found = jax.grad(lambda x: (layer(x) ** 2).sum())(x)
    np.testing.assert_allclose(
        found, 2 * expected @ np.asarray(layer.kernel[...]).T, rtol=1e-4, atol=1e-5
    )


def test_axes_of_the_result_follow_those_of_the_kernel():
    mesh, rules = make_mesh({"data": -1, "tensor": 2}), fsdp_tp()
    layer = create(
        lambda: nn.Linear(
            4, 8, kernel_axes=("embed", "mlp"), rules=rules, rngs=nnx.Rngs(0)
        ),
        mesh,
        rules,
    )
    with jax.set_mesh(mesh):
        assert layer(jnp.ones((4, 3, 4))).sharding.spec == P(
            ("data", "fsdp"), None, "tensor"
        )
        assert layer(jnp.ones((4, 4))).sharding.spec == P(("data", "fsdp"), "tensor")


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (nn.Linear, (2, 3, 5), r"x of shape \(2, 3, 5\) has 5 features.*in_features=4"),
        (nn.Linear, (4,), r"1 dimensions, expected \[batch, ..., features\]; add"),
        (nn.ColumnParallelLinear, (2, 4), r"expected \[batch, tokens, features\]"),
        (nn.RowParallelLinear, (2, 4), r"expected \[batch, tokens, features\]"),
        (nn.RowParallelLinear, (1, 2, 3), "has 3 features, but the layer was made"),
    ],
)
def test_wrong_inputs_of_linear_layers(kind, shape, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        kind(4, 8, **RNGS)(jnp.ones(shape))


Q, KV = jnp.ones((1, 6, 4, 8)), jnp.ones((1, 6, 2, 8))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q, KV, KV), {"cu_seqlens": jnp.array([0, 6])}, r"pass cu_seqlens\[None\]"),
        ((Q, KV, KV), {"cu_seqlens": jnp.array([[0, 6]] * 2)}, "with B=1"),
        ((Q[0], KV, KV), {}, r"q of shape \(6, 4, 8\) has 3 dimensions, expected"),
        ((Q, KV, KV[..., :4]), {}, "v has the shape"),
        ((Q[..., :4], KV, KV), {}, "the same rows B and features of a head H"),
        ((Q[:, :, :3], KV, KV), {}, "q has 3 heads, no multiple of the 2 of k and v"),
    ],
)
def test_wrong_arguments_of_attention(arguments, options, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        nn.attention(*arguments, **options)
