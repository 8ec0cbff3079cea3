"""The training step: accumulation, skipping, sharding, and against plain Adam."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jaxscale.models import Decoder, preset
from jaxscale.sharding import MeshConfig, StateRules, create, fsdp_tp, make_mesh
from jaxscale.training.gradients import _cut, accumulated
from jaxscale.training.optimizer import OptimizerConfig, make_optimizer, make_schedule
from jaxscale.training.step import (
    TrainState,
    global_norm,
    make_eval_step,
    make_train_step,
    next_token_loss,
    state_shardings,
)
from pallas_kernels.mosaic import H200, use_device
from tests.sharding.test_rules import collectives_of
from tests.training import toy


CONFIG = OptimizerConfig(learning_rate=0.01, warmup_steps=3, clip_norm=0.5)
STEPS = 12
LOSS = next_token_loss(chunk_size=5, z_loss=1e-3)


def parts(config=CONFIG, *, shardings=None, **options):
    optimizer = make_optimizer(config, STEPS)
    step = make_train_step(
        accumulated(LOSS, **options),
        optimizer,
        schedule=make_schedule(config, STEPS),
        shardings=shardings,
    )
    return optimizer, step


def fresh(optimizer, **options):
    return TrainState.create(toy.Toy(**options), optimizer)


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def plain():
    """One compiled step shared by the tests."""
    return parts()


def trace(step, state, seeds):
    losses = []
    for seed in seeds:
        state, metrics = step(state, toy.batch(seed))
        losses.append(float(metrics["loss"]))
    return losses, state


def test_equals_adamw_written_out(plain):
    optimizer, step = plain
    state = fresh(optimizer)
    params = nnx.to_pure_dict(nnx.state(state.model, nnx.Param))
    params = {k: np.asarray(v, np.float64) for k, v in params.items()}
    mu = dict.fromkeys(params, 0.0)
    nu = dict.fromkeys(params, 0.0)
    schedule = make_schedule(CONFIG, STEPS)

    def mean_loss(params, batch):
        model = toy.Toy()
        graph, _, rest = nnx.split(model, nnx.Param, ...)
        fresh_state = nnx.state(model, nnx.Param)
        nnx.replace_by_pure_dict(fresh_state, params)
        model = nnx.merge(graph, fresh_state, rest)
        logits = model.hidden(jnp.asarray(batch.tokens)) @ model.output[...]
        lse = jax.nn.logsumexp(logits, -1)
        nll = lse - jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
        return jnp.where(batch.loss_mask, nll + 1e-3 * lse**2, 0).sum() / float(
            batch.loss_mask.sum()
        )

    clip = CONFIG.clip_norm
    assert clip is not None
    for n in range(3):
        batch = toy.batch(n)
        grads = jax.grad(mean_loss)(
            {k: jnp.asarray(v, jnp.float32) for k, v in params.items()}, batch
        )
        grads = {k: np.asarray(v, np.float64) for k, v in grads.items()}
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-4)
        assert norm > clip  # else the clip is not tested
        for k in params:
            g = grads[k] * clip / norm
            mu[k] = CONFIG.b1 * mu[k] + (1 - CONFIG.b1) * g
            nu[k] = CONFIG.b2 * nu[k] + (1 - CONFIG.b2) * g**2
            first = mu[k] / (1 - CONFIG.b1 ** (n + 1))
            second = nu[k] / (1 - CONFIG.b2 ** (n + 1))
            decay = 0.0 if k == "scale" else CONFIG.weight_decay
            update = first / (np.sqrt(second) + CONFIG.eps) + decay * params[k]
            params[k] = params[k] - float(schedule(n)) * update
    got = nnx.to_pure_dict(nnx.state(state.model, nnx.Param))
    for k in params:
        np.testing.assert_allclose(got[k], params[k], atol=2e-5)


def test_accumulation_gives_the_same_update(plain):
    optimizer, step = plain
    _, step4 = parts(microbatches=4)
    one, four = fresh(optimizer), fresh(optimizer)
    batch = toy.batch(0)
    counts = batch.loss_mask.reshape(2, 4, -1).sum((0, 2))
    assert len(set(counts.tolist())) > 1  # microbatches of unequal weight
    one, a = step(one, batch)
    four, b = step4(four, batch)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=2e-5, err_msg=name)
    for x, y in zip(arrays(one.opt_state), arrays(four.opt_state), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7)


def test_loss_of_a_model_whose_logits_are_bounded():
    config = dataclasses.replace(preset("gemma2_tiny"), logit_softcap=0.3)
    model = Decoder(config, rngs=nnx.Rngs(0))
    model.embed.table[...] = 10 * model.embed.table[...]
    data = jax.tree.map(jnp.asarray, toy.batch(0, rows=2))
    logits = model(data.tokens)
    assert 0.25 < float(jnp.abs(logits).max()) < 0.3001
    each = -jnp.take_along_axis(
        jax.nn.log_softmax(logits), data.targets[..., None], axis=-1
    )[..., 0]
    loss, _ = next_token_loss(chunk_size=5)(model, data)
    np.testing.assert_allclose(
        loss, jnp.where(data.loss_mask, each, 0).sum(), rtol=1e-5
    )


def test_metrics_are_means_by_token_before_the_update(plain):
    optimizer, step = plain
    evaluate, batch = make_eval_step(LOSS), toy.batch(0)
    one = np.zeros_like(batch.loss_mask)
    one[3, 5] = True
    for mask in (batch.loss_mask, one):
        state, masked = fresh(optimizer), dataclasses.replace(batch, loss_mask=mask)
        squares = [np.square(x, dtype=np.float64).sum() for x in arrays(state.model)]
        sums, tokens = evaluate(state.model, masked), int(mask.sum())
        assert 0 < int(sums.correct) < tokens or tokens == 1
        _, metrics = step(state, masked)
        # Its memory is reused.
        assert all(x.is_deleted() for x in jax.tree.leaves(state))
        assert int(metrics["tokens"]) == tokens
        for name, expected in {
            "loss": sums.nll / tokens,
            "z_loss": sums.z_loss / tokens,
            "accuracy": sums.correct / tokens,
            "param_norm": np.sqrt(sum(squares)),
        }.items():
            np.testing.assert_allclose(metrics[name], expected, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize("part", ["nll", "z_loss", "gradient"])
def test_each_number_that_is_not_finite_skips_the_update(part):
    """The loss alone, its penalty alone, the gradient of a finite loss."""
    optimizer = make_optimizer(CONFIG, STEPS)

    def loss(model, batch):
        total, sums = LOSS(model, batch)
        if part == "gradient":  # the root of zero has an infinite derivative
            return total + jnp.sqrt(0 * jnp.sum(model.output[...])), sums
        bad = {part: jnp.inf * jnp.ones(())}
        return total, sums._replace(inputs=sums.tokens + 7, **bad)

    step = make_train_step(
        accumulated(loss), optimizer, schedule=make_schedule(CONFIG, STEPS)
    )
    state = fresh(optimizer)
    before = arrays((state.model, state.opt_state))
    state, metrics = step(state, batch := toy.batch(0))
    assert np.isfinite(metrics["loss"]) == (part != "nll")
    if part != "gradient":  # the loss says what the model read
        assert int(metrics["tokens"]) == int(batch.loss_mask.sum()) + 7
    assert (int(state.step), int(state.skipped), int(metrics["skipped"])) == (1, 1, 1)
    for x, y in zip(arrays((state.model, state.opt_state)), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_not_finite_skips_the_update(plain):
    optimizer, step = plain
    state, _ = step(fresh(optimizer), toy.batch(0))
    before = arrays((state.model, state.opt_state))
    poisoned = jax.tree.map(jnp.copy, state)
    poisoned.model.scale[...] = poisoned.model.scale[...].at[1, 3].set(jnp.nan)
    broken = arrays((poisoned.model, poisoned.opt_state))
    poisoned, metrics = step(poisoned, toy.batch(1))
    assert np.isnan(metrics["loss"])
    assert (int(poisoned.step), int(poisoned.skipped)) == (2, 1)
    for x, y in zip(arrays((poisoned.model, poisoned.opt_state)), broken, strict=True):
        np.testing.assert_array_equal(x, y)
    # The next update has the learning rate that the skipped one would have had.
    healthy = dataclasses.replace(
        poisoned,
        model=jax.tree.map(jnp.copy, state.model),
        opt_state=jax.tree.map(jnp.copy, state.opt_state),
    )
    healthy, metrics = step(healthy, toy.batch(1))
    expected, reference = step(state, toy.batch(1))
    assert float(metrics["lr"]) == float(reference["lr"])
    np.testing.assert_allclose(metrics["lr"], 0.01 * 2 / 3, rtol=1e-6)
    assert int(metrics["skipped"]) == 1
    for x, y in zip(arrays(healthy.model), arrays(expected.model), strict=True):
        np.testing.assert_array_equal(x, y)
    assert any(
        (x != y).any() for x, y in zip(arrays(expected.model), before, strict=False)
    )


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_sharded_trace_equals_unsharded(plain, kind):
    optimizer, step = plain
    expected, _ = trace(step, fresh(optimizer), range(4))
    rules = fsdp_tp()
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2, axis_type=kind))
    state = create(lambda: fresh(optimizer, rules=rules), mesh, rules)
    layout = jax.tree.map(lambda x: x.sharding, state)
    _, sharded_step = parts(microbatches=2, rules=rules, shardings=layout)
    moment = state.opt_state[1].mu["up"]
    assert moment[...].sharding == state.model.up[...].sharding
    assert "tensor" in moment[...].sharding.spec
    with jax.set_mesh(mesh):
        rows = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
        losses = []
        for seed in range(4):
            batch = jax.device_put(toy.batch(seed), rows)
            state, metrics = sharded_step(state, batch)
            losses.append(float(metrics["loss"]))
        program = str(sharded_step.trace(state, batch).jaxpr)
    if kind == "auto":  # the compiler is told how gradients are split
        shape = ",".join(map(str, state.model.up[...].shape))
        assert f"f32[{shape}] = sharding_constraint" in program
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert sharded_step._cache_size() == 1
    assert [x.sharding for x in jax.tree.leaves(state)] == jax.tree.leaves(layout)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_parameters_may_be_whole_between_steps(plain, kind):
    optimizer, step = plain
    expected, _ = trace(step, fresh(optimizer), range(3))
    rules = fsdp_tp()
    tables = StateRules.zero(rules, 1, replicated=True)
    devices = jax.devices()[:4]
    mesh = make_mesh(MeshConfig(fsdp=4, axis_type=kind), devices)
    with jax.set_mesh(mesh):
        abstract = jax.eval_shape(lambda: fresh(optimizer, rules=rules))
        layout = state_shardings(abstract, mesh, tables)
        init = jax.jit(lambda: fresh(optimizer, rules=rules), out_shardings=layout)
        state = init()
        assert state.model.up[...].sharding.shard_shape((2, 16, 32)) == (2, 16, 32)
        moment = state.opt_state[1].mu["up"][...].sharding
        assert moment.shard_shape((2, 16, 32)) == (2, 4, 32)
        _, sharded_step = parts(
            microbatches=2, rules=rules, state_rules=tables, shardings=layout
        )
        rows = jax.NamedSharding(mesh, rules.spec("batch"))
        losses = []
        for seed in range(3):
            batch = jax.device_put(toy.batch(seed), rows)
            state, metrics = sharded_step(state, batch)
            losses.append(float(metrics["loss"]))
    assert [x.sharding for x in jax.tree.leaves(state)] == jax.tree.leaves(layout)
    assert sharded_step._cache_size() == 1
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_held_out_loss_falls(plain):
    optimizer, step = plain
    evaluate = make_eval_step(LOSS)
    state = fresh(optimizer)

    def held_out(model):
        sums = evaluate(model, toy.batch(1000, rows=16))
        return float(sums.nll) / int(sums.tokens)

    before = held_out(state.model)
    _, state = trace(step, state, range(STEPS))
    assert held_out(state.model) < 0.8 * before


def test_bf16_parameters_keep_their_type_and_moments():
    config = dataclasses.replace(CONFIG, mu_dtype="bfloat16")
    optimizer, step = parts(config=config, microbatches=2)  # added in fp32
    state = fresh(optimizer, param_dtype=jnp.bfloat16)
    types = [x.dtype for x in jax.tree.leaves(state)]
    losses, state = trace(step, state, range(6))
    assert [x.dtype for x in jax.tree.leaves(state)] == types
    assert state.opt_state[1].mu["up"].dtype == jnp.bfloat16
    assert state.opt_state[1].nu["up"].dtype == jnp.float32
    assert losses[-1] < losses[0]


def test_the_loss_by_default_is_plain_with_few_logits_at_a_time():
    """No penalty, the bias of the model, its bounds, and chunks of up to 1,024."""
    bias = jnp.sin(jnp.arange(float(toy.VOCAB)))

    class Biased(toy.Toy):
        def hidden(self, tokens, *, cu_seqlens=None):
            assert cu_seqlens is batch.cu_seqlens
            return super().hidden(tokens)

        def output_embedding(self):
            return self.output[...], bias

    batch = jax.tree.map(jnp.asarray, toy.batch(0, rows=1, length=1025))
    model, loss = Biased(), next_token_loss()
    program = jax.make_jaxpr(lambda model: loss(model, batch))(model)
    assert f"[1,513,{toy.VOCAB}]" in str(program)
    total, sums = loss(model, batch)
    logits = toy.Toy().hidden(batch.tokens) @ model.output[...] + bias
    nll = -jax.nn.log_softmax(logits)[0, jnp.arange(1025), batch.targets[0]]
    expected = nll[batch.loss_mask[0]].sum()
    np.testing.assert_allclose([total, sums.nll], [expected] * 2, rtol=1e-5)
    assert float(sums.z_loss) == 0


def test_cutting_moves_no_row_between_devices():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2), jax.devices()[:4])
    split = jax.NamedSharding(mesh, jax.P(("data", "fsdp")))
    rows = jax.device_put(jnp.arange(8), split)
    with jax.set_mesh(mesh):
        cut = jax.jit(lambda x: _cut(x, 2, fsdp_tp())).lower(rows).compile()
    assert not collectives_of(cut.as_text())
    np.testing.assert_array_equal(cut(rows), [[0, 2, 4, 6], [1, 3, 5, 7]])


def test_norms_are_taken_in_fp32():
    x = jax.random.normal(jax.random.key(0), (1000,), jnp.bfloat16)
    expected = np.linalg.norm(np.asarray(x, np.float64)) * np.sqrt(2)
    np.testing.assert_allclose(global_norm({"a": x, "b": x}), expected, rtol=1e-5)


def test_rows_that_cannot_be_cut():
    optimizer, step = parts(microbatches=3)
    with pytest.raises(ValueError, match="microbatches 3 must divide the 8 rows"):
        step(fresh(optimizer), toy.batch(0))
    with pytest.raises(ValueError, match="microbatches 0 must be at least 1"):
        parts(microbatches=0)


def test_masked_batch_changes_no_moment_by_nan(plain):
    optimizer, step = plain
    batch = toy.batch(0)
    batch = dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))
    state, metrics = step(fresh(optimizer), batch)
    assert int(metrics["tokens"]) == 0
    assert float(metrics["loss"]) == 0
    assert all(np.isfinite(x).all() for x in arrays(state))


def test_extra_transforms_see_the_update_before_the_learning_rate():
    optimizer = make_optimizer(CONFIG, STEPS, transforms=[optax.set_to_zero()])
    step = make_train_step(
        accumulated(LOSS), optimizer, schedule=make_schedule(CONFIG, STEPS)
    )
    state = fresh(optimizer)
    before = arrays(state.model)
    state, _ = step(state, toy.batch(0))
    for x, y in zip(arrays(state.model), before, strict=True):
        np.testing.assert_array_equal(x, y)


def test_recomputed_layers_on_shards_of_rows_are_traced_for_hopper():
    """Rows without boundaries, whose attention is a kernel on each device."""
    config = dataclasses.replace(
        preset("llama_tiny"), d_model=128, num_heads=2, num_kv_heads=2, head_dim=64
    )
    model = Decoder(
        config,
        dtype=jnp.bfloat16,
        remat="attention",
        scan_layers=False,
        rules=fsdp_tp(),
        rngs=nnx.Rngs(0),
    )
    tokens = jnp.zeros((2, 64), jnp.int32)
    with use_device(H200), jax.set_mesh(make_mesh({"fsdp": 2}, jax.devices()[:2])):
        loss = lambda model: model.hidden(tokens).astype(jnp.float32).sum()  # noqa: E731
        program = str(jax.jit(jax.grad(loss)).trace(model).jaxpr)
    assert "varlen_attention_backward" in program
