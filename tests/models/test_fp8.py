"""Models whose linear layers multiply in fp8: what does, what does not, over a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.models import Decoder, EncoderModel, preset
from jaxscale.models.families.bert import bert_tiny
from jaxscale.nn import blocks, linear
from jaxscale.nn.linear import Linear
from jaxscale.pruning import (
    PruneConfig,
    magnitude_scores,
    make_model_masks,
    sparsify,
)
from jaxscale.sharding import REPLICATED, MeshConfig, fsdp_tp, make_mesh, place
from jaxscale.training import DataConfig, TrainConfig
from tests.tiers import exhaustive


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 16)), jnp.int32)
BOUNDS = jnp.tile(jnp.array([[0, 5, 5, 16, 16], [0, 16, 16, 16, 16]]), (2, 1))
CONFIG = dataclasses.replace(preset("llama_tiny"), num_heads=4, num_kv_heads=2)


def decoder(rules=REPLICATED, **options):
    options = {"quantization": "fp8", **options}
    model = Decoder(CONFIG, rules=rules, rngs=nnx.Rngs(0), **options)
    model.blocks = jax.tree.map(lambda p: 8 * p if p.ndim == 3 else p, model.blocks)
    return model


def loss(model, tokens, cu_seqlens):
    logits = model(tokens, cu_seqlens=cu_seqlens)
    wave = jnp.cos(jnp.arange(16.0)[:, None] + jnp.arange(256.0))
    return (jax.nn.log_softmax(logits) * wave).mean()


def distance(actual, reference):
    gap, size = (np.linalg.norm(x) for x in (actual - reference, reference))
    return gap / size


def test_packed_rows_over_a_mesh_and_recomputed_layers_give_the_same():
    mesh = make_mesh(MeshConfig(fsdp=2, tensor=2), jax.devices()[:4])
    rules = fsdp_tp()
    step = jax.value_and_grad(loss)
    value, grads = jax.jit(step)(decoder(), TOKENS, BOUNDS)
    options = {"remat": "attention", "tensor_parallel": "fused"}
    with jax.set_mesh(mesh):
        model = place(decoder(rules, **options), mesh, rules)
    rows = jax.device_put(
        (TOKENS, BOUNDS), NamedSharding(mesh, rules.spec("batch", None))
    )
    with jax.set_mesh(mesh):
        found, found_grads = jax.jit(step)(model, *rows)
    np.testing.assert_allclose(found, value, rtol=1e-4)
    pairs = zip(*map(jax.tree.leaves, (found_grads, grads)), strict=True)
    # Sums in another order change a few roundings to fp8.
    assert max(distance(np.asarray(a), np.asarray(b)) for a, b in pairs) < 0.02


@pytest.mark.parametrize(
    ("changes", "quantization"),
    [
        (
            {"activation": "geglu_tanh", "norm": "rmsnorm_1p", "output_norms": True},
            "fp8",
        ),
        ({}, "fp8_blockwise"),
        *exhaustive(
            ({}, "fp8"),
            ({"parallel_block": True}, "fp8"),
            ({"norm": "layernorm"}, "fp8"),
        ),
    ],
)
def test_what_is_rounded_as_it_is_computed_changes_no_number(
    changes, quantization, monkeypatch
):
    """Norms and gates of every kind, against layers that round what they are given."""
    config = dataclasses.replace(CONFIG, **changes)

    def run():
        model = Decoder(config, quantization=quantization, rngs=nnx.Rngs(0))
        return jax.jit(jax.value_and_grad(loss))(model, TOKENS, BOUNDS)

    found = run()
    for module in (linear, blocks):
        monkeypatch.setattr(module, "rounds_rows", lambda *_: False)
    jax.clear_caches()  # what was traced
    for a, b in zip(*map(jax.tree.leaves, (found, run())), strict=True):
        assert distance(np.asarray(a), np.asarray(b)) < 1e-5


def test_blocks_are_in_fp8_and_what_is_around_them_is_not():
    made = {
        "decoder": decoder(),
        "encoder": EncoderModel(
            bert_tiny(), quantization="fp8_tensorwise", rngs=nnx.Rngs(0)
        ),
    }
    for name, model in made.items():
        layers = [m for _, m in nnx.iter_modules(model.blocks) if isinstance(m, Linear)]
        kinds = {layer.quantization for layer in layers}
        assert kinds == {model.quantization}, name
    assert made["decoder"].lm_head.quantization is None


def test_serving_multiplies_in_the_type_of_the_model():
    model = decoder()
    served = model.for_inference()
    modules = [m for _, m in nnx.iter_modules(served) if hasattr(m, "quantization")]
    assert modules and {m.quantization for m in modules} == {None}
    assert model.quantization == model.blocks.mlp.up.quantization == "fp8"


def test_sparse_layers_are_refused():
    model = decoder()
    config = PruneConfig(sparsity=0.5, tile=8)
    masks = make_model_masks(model, magnitude_scores(model), config)
    with pytest.raises(ValueError, match=r"quantization 'fp8'.*with quantization=None"):
        sparsify(model, masks)


def test_a_run_may_change_its_numbers_but_not_to_unknown_ones(no_shape_hook):
    plain = TrainConfig(
        model=CONFIG, data=DataConfig(vocab_size=256, seq_len=16, batch_size=4)
    )
    low = dataclasses.replace(plain, quantization="fp8")
    assert low.identity() == plain.identity()
    assert low.of_model(decoder(quantization="fp8_tensorwise")).quantization == (
        "fp8_tensorwise"
    )
    with pytest.raises(ValueError, match="quantization 'int8' is for inference"):
        dataclasses.replace(plain, quantization="int8")
    with pytest.raises(ValueError, match="quantization 'mx' is unknown"):
        decoder(quantization="mx")
