"""Attention of whole rows: values, who computes it, and why."""

import collections
import dataclasses
import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tests.pallas_kernels.varlen_attention.stand_ins  # noqa: F401  registers them
from pallas_kernels.attention import attention, cudnn
from pallas_kernels.attention.config import Problem
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from tests.interpreter import interpret_mosaic_gpu
from tests.lowering import lower_for_cuda
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


def definition(q, k, v, *, causal, softcap):
    """In numpy, row by row and head by head."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros(q.shape)
    (_, t, n, h), s = q.shape, k.shape[1]
    for i in range(n):
        head = i // (n // k.shape[2])
        logits = np.einsum("bth,bsh->bts", q[:, :, i], k[:, :, head]) / np.sqrt(h)
        logits = logits if softcap is None else softcap * np.tanh(logits / softcap)
        hidden = np.arange(s) > np.arange(t)[:, None] + s - t
        logits[:, causal & hidden] = -np.inf
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[:, :, i] = weights @ v[:, :, head]
    return out


@pytest.mark.parametrize(
    ("t", "s", "causal", "softcap"),
    [(70, 70, True, None), (16, 70, True, None), (64, 64, False, 2.0)],
)
@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_values(implementation, t, s, causal, softcap):
    args = operands(2, t, s, 2, 1, 64)
    run = functools.partial(
        attention, causal=causal, softcap=softcap, implementation=implementation
    )
    if implementation == "mosaic_gpu":
        with use_device(dataclasses.replace(H200, num_sms=2)), interpret_mosaic_gpu():
            out = np.asarray(run(*args))
    else:
        out = run(*args)
    assert out.dtype == BF16
    assert (
        relative_error(out, definition(*args, causal=causal, softcap=softcap))
        < RELATIVE[BF16]
    )


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


def chosen(calls, t, h, device, *, s=None, dtype=BF16, **options):
    """Who computes attention, by what is traced."""
    shapes = jax.eval_shape(lambda: operands(2, t, s or t, 4, 2, h, dtype))
    calls.clear()
    with use_device(device):
        run = jax.make_jaxpr(functools.partial(attention, **options))
        text = str(run(*shapes))
    if calls:
        assert calls[0]["implementation"] == "cudnn"
        return "cudnn"
    return "xla" if "dot_general" in text else "mosaic_gpu"


@pytest.mark.parametrize("causal", [False, True])
def test_the_faster_kernel_is_chosen(installed, causal):
    choose: Any = functools.partial(chosen, installed, causal=causal)
    assert choose(2048, 64, H200) == choose(4096, 128, H200) == "mosaic_gpu"
    assert choose(1024, 64, H200) == choose(4096, 256, H200) == "cudnn"
    assert choose(4096, 80, H200) == "cudnn"
    assert choose(512, 264, H200) == choose(512, 64, H200, dtype=jnp.float32) == "xla"
    assert choose(4096, 128, A100) == "cudnn"
    assert choose(64, 136, A100) == choose(64, 64, A100, softcap=2.0) == "xla"
    # What cuDNN cannot do.
    for options in ({"softcap": 2.0}, {"s": 600}, {"window": (8, 8)}):
        if not (causal and "window" in options):
            assert choose(512, 64, H200, **options) == "mosaic_gpu"


def test_cudnn_gets_the_window(installed):
    assert chosen(installed, 512, 64, H200, causal=True, window=(7, None)) == "cudnn"
    assert installed[0]["local_window_size"] == (7, 0) and installed[0]["is_causal"]


def test_without_cudnn_our_kernel_is_lowered_for_a_gpu():
    """As on a machine without one, where JAX finds no cuDNN."""
    shapes = jax.eval_shape(lambda: operands(2, 128, 128, 4, 2, 64))
    with use_device(H200):
        lower_for_cuda(functools.partial(attention, causal=True), *shapes, kernels=1)
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
            )
            taken = problem.declines(H200) is None
            ratios[taken].append(found["mosaic_gpu"] / found["cudnn_padded"])
    assert len(ratios[True]) >= 30 and len(ratios[False]) >= 30
    assert max(ratios[True]) < 1.02 and np.mean(ratios[True]) < 0.93
    assert np.mean(ratios[False]) > 1


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
