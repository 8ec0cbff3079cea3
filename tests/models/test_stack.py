"""What a scan over layers compiles, and that it is what a loop over them computes."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive, jaxprs_in_params

from jaxscale.models import Decoder, preset, stack
from jaxscale.models.stack import REMAT_POLICIES, run_stack
from jaxscale.nn import PagedRows, attention_state
from jaxscale.nn.self_attention import ROTATED_NAME
from jaxscale.sharding import (
    REPLICATED,
    column_parallel,
    create,
    dp,
    fsdp_tp,
    make_mesh,
    row_parallel,
)
from pallas_kernels.collective_matmul import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from pallas_kernels.matmul import dense
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.tile_sparse_matmul import TileSparse, tile_sparse_matmul
from pallas_kernels.varlen_attention import varlen_attention
from tests.tolerances import RELATIVE, relative_error


def equations(jaxpr):
    """The equations of a program, those of each loop's body once."""
    for eqn in jaxpr.eqns:
        yield eqn
        for sub in jaxprs_in_params(eqn.params):
            yield from equations(sub)


def products(jaxpr) -> int:
    return sum(eqn.primitive is jax.lax.dot_general_p for eqn in equations(jaxpr))


@pytest.mark.parametrize(
    ("windows", "lengths", "blocks"),
    [
        ((None,) * 5, [5], 1),
        ((2, None, 2, None, 2), [2], 3),  # a pair in the loop, and the last alone
        ((2, 2, 2, None, 2), [1], 5),  # the pattern is as long as what is left of it
    ],
)
def test_a_scan_compiles_the_shortest_pattern(windows, lengths, blocks):
    config = dataclasses.replace(preset("llama_tiny"), num_layers=5)
    model = Decoder(config, rngs=nnx.Rngs(0))
    state = attention_state((2, 8))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, config.d_model)), "f")
    variants = [
        dataclasses.replace(config.attention(0), window=window) for window in windows
    ]

    def run(x, scan):
        options = {"variants": variants, "remat": "none", "scan": scan}
        return run_stack(model.blocks, x, state, **options)[0]

    scanned, looped = (
        jax.make_jaxpr(run, static_argnums=1)(x, s) for s in (True, False)
    )
    loops = [eqn for eqn in scanned.eqns if eqn.primitive is jax.lax.scan_p]
    assert [eqn.params["length"] for eqn in loops] == lengths
    assert products(scanned) * 5 == products(looped) * blocks
    actual, expected = (jax.jit(run, static_argnums=1)(x, s) for s in (True, False))
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize(
    ("order", "active"),
    [(None, None), ([2, 0, 1, 1, 2], None), (None, [True, False, True, True, False])],
)
def test_each_layer_gets_its_block_its_number_and_its_attention(order, active, scan):
    """In a scan of pairs, behind it and in a loop; what is no layer changes nothing."""
    config = dataclasses.replace(preset("llama_tiny"), num_layers=5)
    number = jnp.arange(5.0)
    blocks = jax.tree.map(
        lambda p: jnp.broadcast_to(number.reshape(5, *[1] * (p.ndim - 1)), p.shape),
        jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))).blocks,
    )
    windows = (2, None, 2, None, 2)
    attention = config.attention(0)
    lengths = jnp.zeros(1, jnp.int32)
    pages = jnp.zeros((5, 1, 2, 2, 4, config.head_dim))
    state = PagedRows.of(pages, lengths[None], lengths, lengths)

    def call(block, x, state):
        block = jax.tree.leaves(block)[0].max()
        number = 1 + state.layer.astype(jnp.float32)
        return 4 * x + block * number + (state.variant.window or 0), state

    x, _ = run_stack(
        blocks,
        jnp.ones((1, 1, 1)),
        state,
        variants=[dataclasses.replace(attention, window=w) for w in windows],
        remat="none",
        scan=scan,
        order=order,
        active=None if active is None else jnp.asarray(active),
        call=call,
    )
    expected = 1
    for layer, window in enumerate(windows):
        block = layer if order is None else order[layer]
        if active is None or active[block]:
            expected = 4 * expected + block * (1 + layer) + (window or 0)
    assert float(x[0, 0, 0]) == expected


def test_layers_start_with_parameters_of_their_own():
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
    first, second = model.blocks.mlp.up.kernel[...]
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.1


@pytest.mark.parametrize("remat", ["none", "full"])
def test_gradients_of_layers_are_joined_at_once(remat):
    """A sum of one array a layer, each as large as the stack, is as slow as a pass."""
    config = dataclasses.replace(preset("llama_tiny"), num_layers=3)
    model = Decoder(config, remat=remat, scan_layers=False, rngs=nnx.Rngs(0))

    def loss(model):
        return model.hidden(jnp.arange(4)[None]).sum()

    program = jax.make_jaxpr(jax.grad(loss))(model)
    stacked = {p.shape for p in jax.tree.leaves(model.blocks)}
    made = Counter(
        eqn.primitive.name
        for eqn in equations(program.jaxpr)
        if eqn.outvars[0].aval.shape in stacked
    )
    assert made["concatenate"] == len(jax.tree.leaves(model.blocks))
    free = {"stop_gradient", "optimization_barrier"}
    assert made.keys() <= {"concatenate"} | free


@pytest.mark.parametrize("remat", ["none", "attention"])
def test_layers_that_are_alike_are_lowered_once(remat):
    """A kernel takes a second to lower, and a layer has a dozen."""

    def loss(model):
        return model.hidden(jnp.arange(4)[None]).sum()

    def lowered(num_layers):
        config = dataclasses.replace(preset("llama_tiny"), num_layers=num_layers)
        model = Decoder(config, remat=remat, scan_layers=False, rngs=nnx.Rngs(0))
        return jax.jit(jax.grad(loss)).lower(model).as_text().count("dot_general")

    assert lowered(2) == lowered(4)


@pytest.mark.parametrize("scan", [True, False])
def test_recomputation_is_merged_with_nothing(scan):
    """Inside a loop the compiler cannot, and a barrier would cost something."""
    config = preset("llama_tiny")
    model = Decoder(config, remat="full", scan_layers=scan, rngs=nnx.Rngs(0))
    program = jax.make_jaxpr(model.hidden)(jnp.zeros((1, 4), jnp.int32))
    checkpoints = [
        eqn for eqn in equations(program.jaxpr) if "prevent_cse" in eqn.params
    ]
    kept_apart = [eqn.params["prevent_cse"] for eqn in checkpoints]
    if scan:
        assert kept_apart == [False]
        return
    assert len(kept_apart) == config.num_layers
    for eqn, apart in zip(checkpoints, kept_apart, strict=True):
        # The compiler may know the number of a layer, and constants.
        together = [v.aval for v, one in zip(eqn.invars, apart, strict=True) if not one]
        assert all(x.ndim < 2 or x.dtype == jnp.int32 for x in together)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_recomputed_layers_have_the_gradients_of_the_others(quantization):
    """They read their parameters from the stack, and hand over gradients as parts."""
    config = dataclasses.replace(preset("llama_tiny"), num_layers=2)

    def gradient(remat):
        model = Decoder(
            config,
            remat=remat,
            scan_layers=False,
            quantization=quantization,
            rngs=nnx.Rngs(0),
        )

        def loss(model):
            hidden = model.hidden(jnp.arange(8)[None])
            weights = jnp.linspace(-1, 1, hidden.size).reshape(hidden.shape)
            return (hidden * weights).sum()

        return jax.jit(jax.grad(loss))(model)

    expected = gradient("none")
    for remat in ("full", "attention"):
        found = gradient(remat)
        for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
            assert relative_error(a, b) < RELATIVE[jnp.dtype("float32")], remat
        for stacked in jax.tree.leaves(found.blocks):
            assert all(np.any(layer) for layer in np.asarray(stacked)), remat


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_recomputed_layers_of_a_mesh_have_the_gradients_of_one_device(quantization):
    config = dataclasses.replace(preset("llama_tiny"), num_layers=2)
    mesh, rules = make_mesh({"data": 2, "fsdp": 2, "tensor": 2}), fsdp_tp()
    tokens = jnp.arange(32).reshape(4, 8)

    def model(rules=REPLICATED):
        options = {"scan_layers": False, "quantization": quantization, "rules": rules}
        return Decoder(config, remat="attention", rngs=nnx.Rngs(0), **options)

    def loss(model):
        hidden = model.hidden(tokens)
        return (hidden * jnp.linspace(-1, 1, hidden.size).reshape(hidden.shape)).sum()

    expected = jax.jit(jax.grad(loss))(model())
    with jax.set_mesh(mesh):
        found = jax.jit(jax.grad(loss))(create(lambda: model(rules), mesh, rules))
    # Splitting features changes the scales of 8-bit rows only where numbers vanish.
    bound = 1e-5 if quantization is None else 0.1
    for a, b in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert relative_error(a, b) < bound


LINEAR = {
    "product",
    "all_gather_matmul_out",
    "matmul_reduce_scatter_out",
    "matmul_all_reduce_out",
    "dense_out",
    "tile_sparse_matmul_out",
}
PACKED = {"varlen_attention_out", "varlen_attention_lse"}
FUSED = "dot_product_attention_fwd_wrapper"  # cuDNN's


@pytest.mark.parametrize(
    ("remat", "kept"),
    [
        ("full", set()),
        ("dots", LINEAR | {"scores"}),
        ("dots_no_batch", LINEAR),
        ("attention", LINEAR | PACKED | {FUSED, ROTATED_NAME}),
    ],
)
def test_what_is_kept_for_the_backward_pass(remat, kept):
    x, w = jnp.ones((2, 3, 4)), jnp.ones((4, 5))

    def equation(function, *args):
        eqn = jax.make_jaxpr(function)(*args).eqns[0]
        return eqn.primitive, [v.aval for v in eqn.invars], eqn.params

    names = (LINEAR - {"product"}) | PACKED | {"all_gather_matmul_gathered"}
    names |= {ROTATED_NAME}
    results = {
        "product": equation(lambda x, w: x @ w, x, w),
        "scores": equation(jax.lax.batch_matmul, x[..., :3], x[..., :3]),
        "elementwise": equation(jnp.tanh, x),
        FUSED: (Primitive(FUSED), [], {}),
        **{n: equation(lambda x, n=n: checkpoint_name(x, n), x) for n in names},
    }
    gathered = "all_gather_matmul_gathered"
    for keep_gathered in (False, True):
        more = {gathered} if keep_gathered and remat != "full" else set()
        (policy,) = policies(remat, keep_gathered)
        assert kept | more == {
            name
            for name, (primitive, avals, params) in results.items()
            if policy(primitive, *avals, **params)
        }


@pytest.mark.parametrize("qk_norm", [False, True])
def test_queries_are_not_rotated_again(qk_norm, monkeypatch):
    """What is kept instead is no larger, but where norms need what was rotated."""
    config = dataclasses.replace(preset("llama_tiny"), num_layers=1, qk_norm=qk_norm)
    tokens = jnp.zeros((1, 8), jnp.int32)
    options = {"remat": "attention", "scan_layers": False}
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **options))

    def gradient():
        def run(model):
            return model.hidden(tokens)

        stack._run_block.clear_cache()
        _, pull = jax.eval_shape(lambda model: jax.vjp(run, model), model)
        kept = sum(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size"))
        grad = jax.make_jaxpr(jax.grad(lambda model: run(model).sum()))(model)
        return kept, sum(1 for _ in equations(grad.jaxpr))

    kept, operations = gradient()
    monkeypatch.setattr(stack, "_rotated_saveable", lambda *args, **params: False)
    kept_before, operations_before = gradient()
    stack._run_block.clear_cache()
    assert kept == kept_before
    assert (operations < operations_before) == (not qk_norm)


def policies(remat, keep_gathered):
    """What decides what a scan over layers keeps."""
    config = dataclasses.replace(preset("llama_tiny"), num_layers=2)
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))

    def run(blocks, x):
        return run_stack(
            blocks,
            x,
            attention_state((1, 4)),
            variants=[config.attention(0)] * 2,
            remat=remat,
            scan=True,
            keep_gathered=keep_gathered,
            call=lambda block, x, state: (x, state),
        )[0]

    program = jax.make_jaxpr(run)(model.blocks, jnp.ones((1, 4, config.d_model)))
    made = equations(program.jaxpr)
    return [eqn.params["policy"] for eqn in made if "policy" in eqn.params]


def collective(op, x_spec, w_spec, y_spec):
    """A collective product over two devices."""

    def run(x, w):
        return jax.shard_map(
            lambda x, w: op(x, w, axis_name="tensor", implementation="xla"),
            mesh=make_mesh({"tensor": 2}, devices=jax.devices()[:2]),
            in_specs=(jax.P(*x_spec), jax.P(*w_spec)),
            out_specs=jax.P(*y_spec),
        )(x, w)

    return run


def fused_layer(x, w):
    with use_device(H200):
        return dense(x, [w], [w[0]], implementation="mosaic_gpu")


def sparse_product(x, w):
    everything = np.ones(w.shape, bool)
    sparse = TileSparse.from_dense(np.zeros(w.shape, np.float32), everything)
    sparse = sparse.with_values(sparse.values.astype(x.dtype))
    return tile_sparse_matmul(x, sparse, implementation="xla")


def packed_attention(x, w):
    del w
    q = x.reshape(-1, 2, 8)
    starts = np.array([0, q.shape[0]])
    return varlen_attention(q, q, q, cu_seqlens_q=starts, implementation="xla")


COLUMNS = {
    "kernel_axes": [(None, None)],
    "out_axes": [("batch", None, None)],
    "rules": dp(),
    "quantization": "fp8",
}
ROWS = COLUMNS | {"out_axes": ("batch", None, None)}


@pytest.mark.parametrize(
    ("program", "names"),
    [
        (
            collective(
                all_gather_matmul, ["tensor"], [None, "tensor"], [None, "tensor"]
            ),
            {"all_gather_matmul_out", "all_gather_matmul_gathered"},
        ),
        (
            collective(matmul_reduce_scatter, [None, "tensor"], ["tensor"], ["tensor"]),
            {"matmul_reduce_scatter_out"},
        ),
        (
            collective(matmul_all_reduce, [None, "tensor"], ["tensor"], []),
            {"matmul_all_reduce_out"},
        ),
        (fused_layer, {"dense_out"}),
        (sparse_product, {"tile_sparse_matmul_out"}),
        (packed_attention, PACKED),
        (
            lambda x, w: column_parallel(x[None], [w], **COLUMNS),
            {"fp8_matmul_out", "fp8_operand"},
        ),
        (
            lambda x, w: row_parallel([x[None]], [w], **ROWS),
            {"fp8_matmul_out", "fp8_operand"},
        ),
    ],
    ids=["gather", "scatter", "reduce", "dense", "sparse", "packed", "fp8", "fp8_rows"],
)
def test_results_have_the_names_that_policies_keep(program, names):
    """One of another name would be computed again, and nothing would say so."""
    x = jnp.ones((128, 128), jnp.bfloat16)
    traced = jax.make_jaxpr(lambda x, w: jax.vjp(program, x, w)[0])(x, x)
    named = [e for e in equations(traced.jaxpr) if e.primitive.name == "name"]
    assert {eqn.params["name"] for eqn in named} == names
    kept = {
        eqn.params["name"]
        for eqn in named
        if REMAT_POLICIES["attention"](
            eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params
        )
    }
    assert kept == names - {"all_gather_matmul_gathered", "fp8_operand"}
