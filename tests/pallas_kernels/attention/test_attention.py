"""Attention of whole rows: values, who computes it, and why."""

import collections
import dataclasses
import functools
import json
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  registers them
from jaxscale.models.stack import REMAT_POLICIES
from pallas_kernels.attention import attention, cudnn
from pallas_kernels.attention.config import Problem
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from pallas_kernels.varlen_attention import varlen_attention
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
from tests.pallas_kernels import triton_interpreter
from tests.tiers import exhaustive
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
RESULTS = (
    pathlib.Path(__file__).parents[3]
    / "benchmarks/results/nvidia_h200/varlen_attention.json"
)
A100 = dataclasses.replace(H200, name="nvidia_a100", compute_capability=(8, 0))


def operands(b, t, s, n, k, h, dtype=BF16):
    keys = jax.random.split(jax.random.key(t + h), 3)
    shapes = [(b, t, n, h), (b, s, k, h), (b, s, k, h)]
    return [
        jax.random.normal(key, shape, dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def definition(
    q,
    k,
    v,
    *,
    causal=False,
    window=(None, None),
    softcap=None,
    sinks=None,
    alibi_slopes=None,
):
    """In numpy, row by row and head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    (_, t, n, h), s = q.shape, k.shape[1]
    right_of = np.arange(s) - np.arange(t)[:, None] - (s - t)
    left, right = window
    visible = np.ones((t, s), bool) if not causal else right_of <= 0
    visible &= right_of <= (s + t if right is None else right)
    visible &= -right_of <= (s + t if left is None else left)
    for i in range(n):
        head = i // (n // k.shape[2])
        logits = np.einsum("bth,bsh->bts", q[:, :, i], k[:, :, head]) / np.sqrt(h)
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        if alibi_slopes is not None:
            logits -= float(alibi_slopes[i]) * np.abs(right_of)
        weights = np.exp(logits) * visible
        total = weights.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(float(sinks[i]))
        weights /= np.where(total > 0, total, 1)
        out[:, :, i] = weights @ v[:, :, head]
    return out


PER_HEAD = jnp.array([0.7, 0.2])
CASES = {
    "causal": ((70, 70, 64), {"causal": True}),
    "more keys": ((16, 70, 64), {"causal": True, "sinks": PER_HEAD}),
    "more queries": ((40, 24, 64), {"causal": True}),  # some of which see nothing
    "both sides": ((70, 90, 64), {"window": (20, 3), "softcap": 2.0}),
    "all": (
        (70, 70, 128),
        {
            "causal": True,
            "window": (40, None),
            "softcap": 2.0,
            "sinks": PER_HEAD,
            "alibi_slopes": PER_HEAD,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_values_of_xla(name):
    (t, s, h), options = CASES[name]
    args = operands(2, t, s, 2, 1, h)
    out = attention(*args, implementation="xla", **options)
    assert out.dtype == BF16
    assert relative_error(out, definition(*args, **options)) < RELATIVE[BF16]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_the_kernel(name):
    (t, s, h), options = CASES[name]
    args = operands(2, t, s, 2, 1, h)
    dout = operands(2, t, t, 2, 2, h)[1]
    per_head = {x: options[x] for x in ("sinks", "alibi_slopes") if x in options}

    def both(args, per_head, dout, implementation):
        def attend(args, per_head):
            return attention(
                *args, implementation=implementation, **(options | per_head)
            )

        out, pullback = jax.vjp(attend, args, per_head)
        return out, pullback(dout.astype(out.dtype))

    run = jax.jit(both, static_argnums=3)
    exact = [x.astype(jnp.float32) for x in args]
    want = run(exact, per_head, dout, "xla")
    assert relative_error(want[0], definition(*exact, **options)) < 1e-5
    with (
        use_device(dataclasses.replace(H200, num_sms=2)),
        interpret_mosaic_gpu() as interpreted,
    ):
        got = jax.tree.map(np.asarray, run(args, per_head, dout, "mosaic_gpu"))
        assert interpreted.kernels == 2
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative_error(ours, theirs) < RELATIVE[BF16]


@pytest.fixture
def installed(monkeypatch):
    """cuDNN is there; what it is called with is counted."""
    calls = []

    def dot_product_attention(q, k, v, **options):
        calls.append(options)
        return q

    monkeypatch.setattr(cudnn, "_missing", lambda: None)
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    return calls


def chosen(
    calls, t, h, device, *, s=None, dtype=BF16, gradient=False, kernels=(), **options
):
    """Who computes attention, by what is traced; `kernels` are launches of Triton's."""
    shapes = jax.eval_shape(lambda: operands(2, t, s or t, 4, 2, h, dtype))
    calls.clear()
    run = functools.partial(attention, **options)

    def differentiated(*args):
        out, pullback = jax.vjp(run, *args)
        return pullback(out)

    with use_device(device):
        text = str(jax.make_jaxpr(differentiated if gradient else run)(*shapes))
    if kernels:
        names = {launch.name for launch in kernels}
        backward = "varlen_attention_gradient_of_keys" in names
        assert not calls and backward == gradient
        return "triton"
    if "varlen_attention" in text:
        assert not calls and ("varlen_attention_backward" in text) == gradient
        return "mosaic_gpu"
    assert not calls or calls[0]["implementation"] == "cudnn"
    return "cudnn" if calls else "xla"


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_the_faster_kernel_is_chosen(installed, causal, gradient):
    choose: Any = functools.partial(chosen, installed, causal=causal, gradient=gradient)
    assert choose(2048, 64, H200) == choose(8192, 128, H200) == "mosaic_gpu"
    assert choose(4096, 128, H200) == "mosaic_gpu"
    assert choose(511, 64, H200) == choose(8192, 256, H200) == "cudnn"
    assert choose(4096, 256, H200) == ("cudnn" if gradient else "mosaic_gpu")
    short = "cudnn" if causal or gradient else "mosaic_gpu"
    assert choose(512, 64, H200) == choose(1023, 64, H200) == short
    few = "mosaic_gpu" if causal and not gradient else "cudnn"
    assert choose(2048, 256, H200) == few and choose(2047, 256, H200) == "cudnn"
    at_1024 = {64: gradient or not causal, 128: gradient}
    for h, ours in at_1024.items():
        assert choose(1024, h, H200) == ("mosaic_gpu" if ours else "cudnn")
    assert choose(1024, 64, H200, implementation="cudnn") == "cudnn"
    assert choose(512, 128, H200, implementation="mosaic_gpu") == "mosaic_gpu"
    assert choose(4096, 80, H200) == "cudnn"
    assert choose(512, 264, H200) == choose(512, 64, H200, dtype=jnp.float32) == "xla"
    assert choose(4096, 128, A100) == "cudnn"
    assert choose(64, 136, A100) == choose(64, 64, A100, softcap=2.0) == "xla"
    # What cuDNN cannot do.
    for options in (
        {"softcap": 2.0},
        {"s": 600},
        {"window": (8, 8)},
        {"sinks": jnp.ones(4)},
        {"alibi_slopes": jnp.ones(4)},
    ):
        if not (causal and "window" in options):
            assert choose(512, 64, H200, **options) == "mosaic_gpu"


@pytest.mark.parametrize("gradient", [False, True])
def test_what_cudnn_cannot_do_is_left_to_triton(installed, gradient, monkeypatch):
    """Before Hopper, so that no scores are stored."""
    kernels = triton_interpreter.installed(monkeypatch)

    def choose(t, h, device=A100, **options):
        kernels.clear()
        options |= {"kernels": kernels, "gradient": gradient}
        return chosen(installed, t, h, device, **options)

    assert choose(4096, 128) == choose(64, 64, causal=True) == "cudnn"
    assert choose(64, 136) == choose(64, 256) == "triton"
    for options in (
        {"softcap": 2.0},
        {"s": 600},
        {"window": (8, 8)},
        {"sinks": jnp.ones(4)},
        {"alibi_slopes": jnp.ones(4)},
        {"implementation": "triton"},
    ):
        assert choose(512, 64, **options) == "triton"
    assert choose(512, 264) == choose(512, 64, dtype=jnp.float32) == "xla"
    monkeypatch.setattr(cudnn, "_missing", lambda: "there is none")
    assert choose(4096, 128) == "triton"


def test_what_is_asked_for_by_name_is_not_replaced(installed):
    choose: Any = functools.partial(chosen, installed, 512)
    refused = (
        ("cudnn", 64, H200, {"softcap": 2.0}, "no softcap, sinks or ALiBi"),
        ("cudnn", 64, H200, {"sinks": jnp.ones(4)}, "no softcap, sinks"),
        ("mosaic_gpu", 264, H200, {}, "takes at most 256"),
        ("mosaic_gpu", 64, A100, {}, r"needs compute capability 9.x"),
        ("mosaic_gpu", 64, H200, {"dtype": jnp.float32}, "takes bfloat16 or float16"),
    )
    for implementation, h, device, options, message in refused:
        with pytest.raises(Unsupported, match=message):
            choose(h, device, implementation=implementation, **options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"sinks": jnp.ones(3)}, ValueError, "each of the N=4 query heads"),
        (
            {"alibi_slopes": jnp.ones(4, int)},
            TypeError,
            "alibi_slopes must be floating",
        ),
        ({"window": (-1, None)}, ValueError, "got left=-1"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ],
)
def test_options_are_checked(options, error, message, no_shape_hook):
    with pytest.raises(error, match=message):
        attention(*operands(1, 4, 4, 4, 2, 8), **options)


def test_cudnn_gets_the_window(installed):
    assert chosen(installed, 512, 64, H200, causal=True, window=(7, None)) == "cudnn"
    assert installed[0]["local_window_size"] == (7, 0) and installed[0]["is_causal"]


def test_cudnn_declines_where_jax_cannot_partition_it(installed):
    """In a region over some mesh axes only, as that of a pipeline."""
    q, k, v = jax.eval_shape(lambda: operands(2, 256, 256, 4, 2, 64))

    def trace(names, implementation=None):
        attend = functools.partial(attention, implementation=implementation)
        mesh = jax.make_mesh((2, 1), ("pipe", "tensor"), (AxisType.Auto,) * 2)
        where = {"mesh": mesh, "in_specs": P("pipe"), "out_specs": P("pipe")}
        region = jax.shard_map(attend, axis_names=names, check_vma=False, **where)
        installed.clear()
        with use_device(H200), jax.set_mesh(mesh):
            return str(jax.make_jaxpr(region)(q, k, v))

    assert "varlen_attention" not in trace({"pipe", "tensor"}) and installed
    assert "varlen_attention" in trace({"pipe"}) and not installed
    with pytest.raises(Unsupported, match=r"only.*pipe.*of the mesh axes"):
        trace({"pipe"}, "cudnn")


def test_without_cudnn_our_kernel_is_lowered_for_a_gpu():
    """As on a machine without one, where JAX finds no cuDNN."""
    shapes = jax.eval_shape(lambda: operands(2, 128, 128, 4, 2, 64))
    with use_device(H200):
        run = functools.partial(attention, causal=True)
        text = lower_for_cuda(run, *shapes, kernels=1)
        # Nothing but the kernel: what its schedule is made of are constants.
        made = {"constant", "iota", "multiply", "broadcast_in_dim"}
        assert set(re.findall(r"stablehlo\.(\w+)", text)) == made | {"custom_call"}
        with pytest.raises(Unsupported, match="cuDNN is not detected"):
            attention(*operands(2, 8, 8, 4, 2, 64), implementation="cudnn")


def test_the_rule_is_what_was_measured():
    """Rows of equal length beside cuDNN's, forward and with the gradient."""
    times = collections.defaultdict(dict)
    for row in json.loads(RESULTS.read_text())["rows"]:
        p = row["params"]
        if p["tokens"] == p["batch"] * p["max_len"] and p["pattern"] == "constant":
            times[json.dumps(p)][row["implementation"]] = row["time_us"]
    ratios = {True: [], False: []}
    for params, found in times.items():
        if found.keys() >= {"mosaic_gpu", "cudnn_padded"}:
            p = json.loads(params)
            problem = Problem(
                batch=p["batch"],
                queries=p["max_len"],
                keys=p["max_len"],
                heads=int(p["heads"]),
                kv_heads=int(p["heads"]),
                head_dim=p["head_dim"],
                dtype=BF16,
                causal=p["causal"],
                window=(None, None),
                softcap=None,
                sinks=False,
                alibi=False,
                gradient=p["pass"] == "fwd_bwd",
            )
            taken = problem.declines(H200) is None
            # Whole rows take the form without tables, where its rows exist.
            ours = found.get("mosaic_gpu_static", found["mosaic_gpu"])
            ratios[taken].append(ours / found["cudnn_padded"])
    assert len(ratios[True]) >= 47 and len(ratios[False]) >= 33
    assert max(ratios[True]) < 1.01 and np.mean(ratios[True]) < 0.94
    assert np.mean(ratios[False]) > 1.03


@pytest.mark.parametrize(("remat", "forward"), [("attention", 1), ("full", 2)])
def test_the_choice_for_gradients_is_kept_in_a_loop_over_layers(
    installed, remat, forward
):
    """1,024 causal tokens: cuDNN computes the values alone, our kernel both."""

    def loss(x, scales):
        def layer(x, scale):
            q = x * scale
            return x + attention(q, x[:, :, :2], q[:, :, :2], causal=True), None

        policy = REMAT_POLICIES[remat]
        x, _ = jax.lax.scan(jax.checkpoint(layer, policy=policy), x, scales)
        return x.astype(jnp.float32).sum()

    shapes = (
        jax.ShapeDtypeStruct((2, 1024, 4, 64), BF16),
        jax.ShapeDtypeStruct((3,), BF16),
    )
    with use_device(H200):
        lower_for_cuda(jax.grad(loss, (0, 1)), *shapes, kernels=forward + 1)
        installed.clear()
        jax.eval_shape(loss, *shapes)
        assert installed


@pytest.mark.parametrize("rows", ["alike", "different", *exhaustive("whole")])
def test_schedules_are_constants_where_all_devices_have_the_same(rows):
    mesh = jax.make_mesh((2, 2), ("d", "t"), (jax.sharding.AxisType.Explicit,) * 2)
    where = jax.sharding.NamedSharding(mesh, jax.P("d", None, "t"))
    x = jax.ShapeDtypeStruct((2, 2048, 4, 128), BF16, sharding=where)
    cu = {
        "whole": (),
        "alike": (np.array([[0, 100, 2048]] * 2),),
        "different": (np.array([[0, 100, 2048], [0, 3, 2048]]),),
    }[rows]

    def run(q, k, v, dout):
        def attend(q, k, v):
            return varlen_attention(q, k, v, *cu, implementation="mosaic_gpu")

        return jax.vjp(attend, q, k, v)[1](dout)

    with use_device(H200), jax.set_mesh(mesh):
        text = lower_for_cuda(run, x, x, x, x, kernels=2)
    tables = re.findall(r"stablehlo.constant .*tensor<\d+x(?:5|12|16)xi32>", text)
    assert len(tables) == (0 if rows == "different" else 3)


def test_heads_that_do_not_fit_are_named():
    q, k, v = operands(1, 4, 4, 3, 2, 8)
    with pytest.raises(ValueError, match="q has 3 heads, no multiple of the 2"):
        attention(q, k, v)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("t", "s", "h", "options"),
    [
        (2048, 2048, 64, {"causal": True}),
        (2048, 2048, 128, {"causal": False}),
        (256, 700, 128, {"causal": True}),
        (300, 300, 64, {"causal": True, "softcap": 2.0}),
        (1024, 1024, 128, {"causal": True}),  # where cuDNN has the forward pass alone
        (1000, 1000, 64, {"window": (64, 64)}),
        (300, 200, 128, {"causal": True, "sinks": jnp.linspace(-1.0, 1.0, 8)}),
        (700, 700, 128, {"causal": True, "alibi_slopes": 0.5 ** jnp.arange(1.0, 9.0)}),
    ],
)
def test_the_kernel_on_a_gpu(t, s, h, options):
    args = operands(2, t, s, 8, 2, h)
    weights = jax.random.normal(jax.random.key(1), args[0].shape)

    def loss(q, k, v, implementation):
        out = attention(q, k, v, implementation=implementation, **options)
        return (out.astype(jnp.float32) * weights).sum(), out

    run = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True), static_argnums=3)
    assert "mosaic_gpu" in run.lower(*args, None).as_text()
    exact = [x.astype(jnp.float32) for x in args]
    with jax.default_matmul_precision("highest"):
        expected = run(*exact, "xla")
    found = run(*args, None)
    for ours, theirs in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        assert relative_error(ours, theirs) < RELATIVE[BF16]
