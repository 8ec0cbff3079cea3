"""Decoders whose collectives are written out against the same without a mesh."""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxscale.models import Decoder, load, preset
from jaxscale.models.serving import serving_rules
from jaxscale.nn import attention_state
from jaxscale.sharding import (
    REPLICATED,
    MeshConfig,
    create,
    fsdp_tp,
    logical_axes,
    make_mesh,
    place,
)
from pallas_kernels.mosaic import H200, use_device
from tests.decoding import decode
from tests.lowering import CUSTOM_CALL, lower_for_cuda
from tests.models.packed_rows import packed_rows, wave_loss
from tests.sharding.test_rules import collectives_of
from tests.tiers import exhaustive
from tests.tolerances import assert_same_step, relative_error


TOKENS, BOUNDS = packed_rows(4)
RULES = fsdp_tp()
CONFIGS = {
    # Eight query heads that share four key heads: four devices have one each.
    "llama": dataclasses.replace(
        preset("llama_tiny"), num_heads=8, num_kv_heads=4, head_dim=4
    ),
    "gpt2": preset("gpt2_tiny"),
    "gptj": preset("gptj_tiny"),
    "gemma2": dataclasses.replace(
        preset("gemma2_tiny"), num_layers=1, global_layers=()
    ),
}


def make(name, rules=REPLICATED, **options):
    model = Decoder(CONFIGS[name], rules=rules, rngs=nnx.Rngs(0), **options)
    model.blocks = jax.tree.map(lambda p: 12 * p if p.ndim == 3 else p, model.blocks)
    return model


def on_mesh(name, sizes, tensor_parallel, *, kind="auto", rules=RULES, **options):
    count = int(np.prod(list(sizes.values())))
    config = MeshConfig(**{**sizes, "axis_type": kind})
    mesh = make_mesh(config, jax.devices()[:count])
    options["tensor_parallel"] = tensor_parallel
    with jax.set_mesh(mesh):
        return mesh, place(make(name, rules, **options), mesh, rules)


@jax.jit
def whole_rows(model, tokens):
    return model(tokens)


@functools.cache
def expected(name):
    return jax.jit(jax.value_and_grad(wave_loss))(make(name), TOKENS, BOUNDS)


def gradients(mesh, model):
    rows = NamedSharding(mesh, RULES.spec("batch", None))
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(wave_loss))(
            model, *jax.device_put((TOKENS, BOUNDS), rows)
        )


@pytest.mark.parametrize(
    ("name", "sizes", "kind", "tensor_parallel"),
    [
        ("llama", {"data": 2, "tensor": 4}, "auto", "xla"),
        ("gemma2", {"fsdp": 2, "tensor": 2}, "explicit", "fused"),
        *exhaustive(
            ("gpt2", {"data": 2, "fsdp": 2, "tensor": 2}, "explicit", "xla"),
            ("gptj", {"tensor": 2}, "auto", "fused"),
        ),
    ],
)
def test_loss_and_gradients(name, sizes, kind, tensor_parallel):
    mesh, model = on_mesh(name, sizes, tensor_parallel, kind=kind)
    assert_same_step(gradients(mesh, model), expected(name))


def test_bf16_is_as_far_off_as_without_a_mesh():
    low = {"dtype": jnp.bfloat16}
    mesh, model = on_mesh("llama", {"tensor": 4}, "xla", **low)
    exact = whole_rows(make("llama"), TOKENS)
    alone = whole_rows(make("llama", **low), TOKENS)
    with jax.set_mesh(mesh):
        logits = whole_rows(model, TOKENS)
    error = relative_error(alone, exact)
    assert 1e-4 < error < 0.05
    assert relative_error(np.asarray(logits), exact) < 2 * error


def test_key_heads_fewer_than_devices_are_copied():
    rules = dataclasses.replace(RULES, kv_heads=None, act_kv_heads=None)
    sizes = {"data": 2, "tensor": 4}
    config = dataclasses.replace(CONFIGS["llama"], num_kv_heads=2)
    with pytest.raises(ValueError, match="num_kv_heads 2 is not divisible by 4"):
        config.check_mesh({**sizes, "fsdp": 1, "pipe": 1}, RULES)
    config.check_mesh({**sizes, "fsdp": 1, "pipe": 1}, rules)
    mesh, model = on_mesh("llama", sizes, "xla", rules=rules)
    assert_same_step(gradients(mesh, model), expected("llama"))


@pytest.mark.parametrize("tensor_parallel", ["fused", "xla", None])
def test_parameters_are_the_same(tensor_parallel):
    def described(model):
        leaves, _ = jax.tree_util.tree_flatten_with_path(
            model, is_leaf=lambda node: isinstance(node, nnx.Variable)
        )
        return {
            jax.tree_util.keystr(path): (v.shape, v.dtype, logical_axes(v))
            for path, v in leaves
        }

    build = functools.partial(make, "gptj", RULES)
    model = jax.eval_shape(lambda: build(tensor_parallel=tensor_parallel))
    assert described(model) == described(jax.eval_shape(build))
    assert model.tensor_parallel == tensor_parallel


@pytest.mark.parametrize("name", ["llama3_gqa", "qwen3", "neox"])
def test_pretrained_models_take_the_option(name):
    path = f"tests/fixtures/models/{name}"
    tokens = TOKENS[:, :8] % 128
    mesh = make_mesh(MeshConfig(data=2, tensor=2), jax.devices()[:4])
    model = load(
        path, mesh=mesh, rules=RULES, tensor_parallel="xla", param_dtype=jnp.float32
    )
    alone = load(path, param_dtype=jnp.float32)
    with jax.set_mesh(mesh):
        logits = whole_rows(model, tokens)
    assert relative_error(np.asarray(logits), whole_rows(alone, tokens)) < 1e-5
    with pytest.raises(ValueError, match="'xla' needs rules that split heads and mlp"):
        load(path, tensor_parallel="xla")


# ------------------------------------------------------------------------------------
# New tokens


@pytest.mark.parametrize(
    ("name", "tensor_parallel"), [("llama", "fused"), *exhaustive(("gptj", "xla"))]
)
def test_new_tokens(name, tensor_parallel):
    """Prompts whose tokens are split, then single tokens, which are not."""
    sizes, rules = {"data": 2, "tensor": 2}, serving_rules(RULES)
    mesh, model = on_mesh(name, sizes, tensor_parallel, rules=rules)
    with jax.set_mesh(mesh):
        logits, pages = jax.jit(lambda m: decode(m, TOKENS[:, :10], 8, 1, 1))(model)
    assert pages.sharding.spec[3] == "tensor"
    expected = whole_rows(make(name), TOKENS)[:, :10]
    assert relative_error(logits, expected) < 1e-5


# ------------------------------------------------------------------------------------
# What is communicated and kept


def activations_moved(compiled):
    """Collectives on activations, [rows, tokens, features], by what they are."""
    found = Counter()
    for (name, shape), count in collectives_of(compiled.as_text()).items():
        if len(shape) == 3:
            found[name] += count
    return found


@pytest.mark.parametrize(("name", "each"), [("llama", 2), ("gptj", 1)])
def test_collectives_of_a_block(name, each):
    mesh, model = on_mesh(name, {"data": 2, "fsdp": 2, "tensor": 2}, "xla")
    # Two rows a device: a single one has no axis of its own in a collective.
    x = jax.device_put(
        jnp.ones((8, 16, 32)), NamedSharding(mesh, RULES.spec("batch", "tokens", None))
    )
    state = attention_state((8, 16))

    def run(blocks, x):
        def layer(x, block):
            return block(x, state)[0], None

        return jnp.sum(jax.lax.scan(layer, x, blocks)[0] ** 2)

    with jax.set_mesh(mesh):
        forward = jax.jit(run).lower(model.blocks, x).compile()
        grad = jax.grad(run, argnums=(0, 1))
        backward = jax.jit(grad).lower(model.blocks, x).compile()
    # Each form is once in the compiled loop over layers.
    assert activations_moved(forward) == {"all-gather": each, "reduce-scatter": each}
    assert activations_moved(backward) == {
        "all-gather": 2 * each,
        "reduce-scatter": 2 * each,
    }


def test_recomputation_keeps_the_same():
    """Policies know the products that are written out; only fused gathers are kept."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def kept(remat, tensor_parallel):
        model = jax.eval_shape(
            lambda: make("llama", RULES, remat=remat, tensor_parallel=tensor_parallel)
        )
        with jax.set_mesh(mesh):
            pull = jax.eval_shape(
                lambda m: jax.vjp(lambda m: m.hidden(TOKENS), m)[1], model
            )
        return sum(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size"))

    gathered = 2 * 2 * 2 * TOKENS.size * 32  # per layer two, on each of two devices
    for remat in ("full", "dots_no_batch", "attention"):
        by_compiler = kept(remat, None)
        assert kept(remat, "xla") == by_compiler, remat
        more = 0 if remat == "full" else gathered
        assert kept(remat, "fused") == by_compiler + more, remat


@pytest.mark.parametrize(
    ("name", "remat", "kernels"),
    [
        # One gather and one scatter, each way.
        *exhaustive(("gptj", "attention", 4)),
        # The forward pass twice, but for the last sum, which nothing needs again.
        ("llama", "full", 11),
    ],
)
def test_fused_kernels_of_a_block(name, remat, kernels):
    """What a GPU would run, in a loop over layers and beside FSDP."""
    shape = {"d_model": 256, "d_ff": 512, "num_heads": 4, "head_dim": 64}
    config = dataclasses.replace(CONFIGS[name], num_kv_heads=4, **shape)
    options = {"dtype": jnp.bfloat16, "attention_implementation": "xla"}
    model = jax.eval_shape(
        lambda: Decoder(
            config,
            rules=RULES,
            remat=remat,
            tensor_parallel="fused",
            rngs=nnx.Rngs(0),
            **options,
        )
    )

    def loss(model, tokens):
        return jnp.square(model.hidden(tokens).astype(jnp.float32)).sum()

    with use_device(H200):
        text = lower_for_cuda(
            jax.grad(loss),
            model,
            jax.ShapeDtypeStruct((4, 4096), jnp.int32),
            mesh={"data": 1, "fsdp": 2, "pipe": 1, "tensor": 2},
        )
    assert text.count(f"@{CUSTOM_CALL}") == kernels


def test_recomputation_changes_nothing():
    options = {"remat": "attention", "scan_layers": False}
    mesh, model = on_mesh("llama", {"fsdp": 2, "tensor": 2}, "fused", **options)
    assert_same_step(gradients(mesh, model), expected("llama"))


def test_inside_a_shard_map_over_data():
    mesh, model = on_mesh("gemma2", {"data": 2, "fsdp": 2, "tensor": 2}, "xla")
    whole, rows = PartitionSpec(), PartitionSpec("data")

    def step(model, tokens, bounds):
        return jax.lax.pmean(
            jax.value_and_grad(wave_loss)(model, tokens, bounds), "data"
        )

    run = jax.shard_map(
        step,
        in_specs=(whole, rows, rows),
        out_specs=(whole, whole),
        axis_names={"data"},
        check_vma=False,
    )
    with jax.set_mesh(mesh):
        assert_same_step(jax.jit(run)(model, TOKENS, BOUNDS), expected("gemma2"))


@pytest.mark.multigpu
@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_fused_on_gpus(name):
    """In bf16 the kernels are as near to fp32 as the compiler's collectives are."""
    shape = {"d_model": 512, "d_ff": 1024, "num_heads": 8, "head_dim": 64}
    heads = 4 if name == "llama" else 8
    config = dataclasses.replace(
        CONFIGS[name], num_kv_heads=heads, max_seq_len=4096, **shape
    )
    count = 4 if jax.device_count() >= 4 else 2
    mesh = make_mesh(MeshConfig(tensor=count), jax.devices()[:count])
    rng = np.random.default_rng(1)
    # As many rows as kernels are preferred from.
    tokens = jnp.asarray(rng.integers(0, 256, (2, 2048)), jnp.int32)

    def run(tensor_parallel, dtype):
        def init():
            model = Decoder(
                config,
                dtype=dtype,
                rules=RULES,
                tensor_parallel=tensor_parallel,
                rngs=nnx.Rngs(0),
            )
            # Attention that prefers some tokens, so that its gradients count.
            scale = lambda p: 3 * p if p.ndim == 3 else p  # noqa: E731
            model.blocks = jax.tree.map(scale, model.blocks)
            return model

        def loss(model):
            wave = jnp.cos(jnp.arange(2048.0)[:, None] + jnp.arange(256.0))
            return (jax.nn.log_softmax(model(tokens)) * wave).mean()

        def steps(model):
            return decode(model, tokens[:, :257], 256, 1, page_size=64)[0]

        model = create(init, mesh, RULES)
        with jax.set_mesh(mesh), jax.default_matmul_precision("highest"):
            value, grads = jax.jit(jax.value_and_grad(loss))(model)
            return jax.device_get((value, grads, jax.jit(steps)(model)))

    exact = jax.tree.leaves(run(None, jnp.float32))
    compiler, fused = (
        [
            relative_error(a, e)
            for a, e in zip(jax.tree.leaves(found), exact, strict=True)
        ]
        for found in (run(None, jnp.bfloat16), run("fused", jnp.bfloat16))
    )
    # The worst of all: of one number, such as the loss, an error may be small by luck.
    assert max(fused) < 1.5 * max(compiler) + 2e-3, (fused, compiler)
