# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Flux: products that communicate
#
# Tensor parallelism splits each weight over several GPUs, so that every layer sends
# activations between them. Flux ([arXiv 2406.06858](https://arxiv.org/abs/2406.06858))
# hides this communication inside the matrix products. This notebook shows the three
# operations, the layers made of them, and what can be gained at best, on simulated
# devices: it says that the numbers are right, not how fast anything is.
# [docs/flux.md](../docs/flux.md) has the kernels and what they reach on GPUs.
#
# To run it, in a clone of the project: `pip install '.[notebooks]'`. On Colab,
# clone the project there and put the same into a first cell, with `%` before `pip` and
# `'.[notebooks,cuda12]'` for its GPU.

# %%
import functools
import json
import os
import re
from pathlib import Path

import jax


# Four simulated devices, so that communication is real; a machine with GPUs uses those.
jax.config.update("jax_num_cpu_devices", 4)
# GPUs would otherwise round the operands of products in fp32.
jax.config.update("jax_default_matmul_precision", "float32")

import dataclasses

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxscale import models, nn, sharding
from pallas_kernels import collective_matmul as ops


count = 4 if jax.device_count() >= 4 else jax.device_count()
devices = jax.devices()[:count]
mesh = sharding.make_mesh({"tensor": count}, devices)
print(f"{count} x {devices[0].device_kind}")

# %% [markdown]
# ## What can be gained
#
# A column-parallel layer gathers the rows of its input and multiplies them by its
# columns of the weight; a row-parallel layer multiplies by its rows and scatters the
# sums. With D devices, M rows and a weight [K, N], each device does
#
# - `2 M N K / D` operations,
# - and receives `(D - 1) / D` of `M K` (gather) or of `M N` (scatter) elements.
#
# One after the other they take `t_mm + t_comm`, and no overlap takes less than
# `max(t_mm, t_comm)`. For Llama 70B on four GPUs, with round numbers for an H200, 800
# TFLOP/s and 300 GB/s in each direction, and 8192 rows:

# %%
FLOPS, BYTES, WAYS, ROWS = 800e12, 300e9, 4, 8192
LAYERS = {  # N, K, and what is communicated
    "qkv": (10240, 8192, "gather"),
    "attention output": (8192, 8192, "scatter"),
    "gate and up": (57344, 8192, "gather"),
    "down": (8192, 28672, "scatter"),
}


def bounds(n, k, kind):
    """Microseconds of the product and of the communication, in bf16."""
    moved = (WAYS - 1) / WAYS * ROWS * (k if kind == "gather" else n) * 2
    return 2 * ROWS * n * k / WAYS / FLOPS * 1e6, moved / BYTES * 1e6


print(f"{'':18}{'t_mm':>8}{'t_comm':>8}{'sum':>8}{'max':>8}  at best")
for name, layer in LAYERS.items():
    t_mm, t_comm = bounds(*layer)
    total, least = t_mm + t_comm, max(t_mm, t_comm)
    line = f"{name:18}{t_mm:8.0f}{t_comm:8.0f}{total:8.0f}{least:8.0f}"
    print(f"{line}  {total / least:.2f}x")

# %% [markdown]
# The large layers of the feed-forward network leave little to gain, those of attention
# almost a factor of two. This is arithmetic, not a measurement.
#
# Drawn, for the gather and the product of `qkv` on one GPU. A product that begins with
# the rows that are there, and goes on as others arrive, waits less. In four steps it
# waits for each message; in tiles, as the fused kernel works, for almost nothing.

# %%
t_mm, t_comm = bounds(*LAYERS["qkv"])


def overlapped(parts):
    """Begin and length of each message and product, when both are cut into `parts`."""
    messages = [(i * t_comm / parts, t_comm / parts) for i in range(parts)]
    own = t_mm / WAYS  # its own rows need no message
    products, end = [(0.0, own)], own
    for begin, length in messages:
        begin = max(end, begin + length)
        products.append((begin, (t_mm - own) / parts))
        end = begin + (t_mm - own) / parts
    return messages, products


figure, axis = plt.subplots(figsize=(9, 2.4))
ways = {
    "one after the other": ([(0.0, t_comm)], [(t_comm, t_mm)]),
    f"in {WAYS} steps": overlapped(WAYS - 1),
    "in tiles": overlapped(64),
}
for row, (messages, products) in enumerate(ways.values()):
    axis.broken_barh(messages, (row - 0.4, 0.38), color="tab:orange", ec="white")
    axis.broken_barh(products, (row + 0.02, 0.38), color="tab:blue", ec="white")
    end = sum(products[-1])
    axis.text(end, row + 0.2, f" {end:.0f} us", va="center")
axis.set(yticks=range(len(ways)), yticklabels=ways, xlabel="microseconds")
axis.set(title="orange: messages, blue: the product", xlim=(0, 1.1 * (t_mm + t_comm)))
axis.invert_yaxis()
plt.show()

# %% [markdown]
# ## The operations
#
# They are called inside `jax.shard_map`, on the arrays of one device, and name the mesh
# axis over which they communicate. Several weights share one gather.

# %%
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-2]), jnp.float32)


x = normal(2, 64, 256)  # [batch, tokens, features]: tokens are split
w_gate, w_up, w_down = normal(256, 512), normal(256, 512), normal(512, 256)
ROWS_SPLIT, COLUMNS, ROW_WEIGHT = P(None, "tensor"), P(None, "tensor"), P("tensor")


def feed_forward(x, w_gate, w_up, w_down, implementation=None):
    options = {"axis_name": "tensor", "implementation": implementation}
    gate, up = ops.all_gather_matmul(x, [w_gate, w_up], **options)
    return ops.matmul_reduce_scatter(jax.nn.silu(gate) * up, w_down, **options)


def on_mesh(implementation):
    return jax.jit(
        jax.shard_map(
            functools.partial(feed_forward, implementation=implementation),
            mesh=mesh,
            in_specs=(ROWS_SPLIT, COLUMNS, COLUMNS, ROW_WEIGHT),
            out_specs=ROWS_SPLIT,
        )
    )


def alone(x, w_gate, w_up, w_down):
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def error(actual, reference):
    actual, reference = np.asarray(actual), np.asarray(reference)
    return float(np.abs(actual - reference).max() / np.abs(reference).max())


arguments = (x, w_gate, w_up, w_down)
expected = alone(*arguments)
for implementation in ("xla", "xla_ring", None):
    print(implementation, error(on_mesh(implementation)(*arguments), expected))

# %% [markdown]
# `"xla"` is a collective and then a product; `"xla_ring"` cuts both into steps that the
# compiler may overlap; None takes the fused kernel where there is one, and here the
# plain form. What the compiler was given:

# %%
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "collective-permute")


def collectives(fn, *args):
    text = fn.lower(*args).compile().as_text()
    found = {
        name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES
    }
    return {name: number for name, number in found.items() if number}


for implementation in ("xla", "xla_ring"):
    print(implementation, collectives(on_mesh(implementation), *arguments))

# %% [markdown]
# The gradient of a gather is a scatter and the other way round, so the backward pass
# runs through the same operations; the gathered rows are kept for the gradients of the
# weights.

# %%


def gradients(fn):
    loss = lambda *arguments: jnp.sum(jnp.sin(fn(*arguments)))  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))


ours, theirs = gradients(on_mesh("xla")), gradients(alone)
errors = [
    error(a, b) for a, b in zip(ours(*arguments), theirs(*arguments), strict=True)
]
print("gradients:", errors)

# %% [markdown]
# ## Layers
#
# `ColumnParallelLinear` and `RowParallelLinear` hold the same parameters as `Linear`.
# `tensor_parallel` says who communicates: `"fused"` kernels, `"xla"` collectives, or
# the compiler (None). They take whole arrays, and need no `shard_map` around them.

# %%
rules = sharding.fsdp_tp()
options = {"rules": rules, "tensor_parallel": "fused", "use_bias": True}


def layers():
    inner = {"kernel_axes": ("embed", "mlp"), "out_axes": ("batch", None, "act_mlp")}
    outer = {
        "kernel_axes": ("mlp", "embed"),
        "out_axes": ("batch", "tokens", "act_embed"),
    }
    return (
        nn.ColumnParallelLinear(256, 512, rngs=nnx.Rngs(0), **inner, **options),
        nn.RowParallelLinear(512, 256, rngs=nnx.Rngs(1), **outer, **options),
    )


up, down = sharding.create(layers, mesh, rules)
with jax.set_mesh(mesh):
    hidden = jax.jit(lambda up, x: up(x))(up, x)
    out = jax.jit(lambda down, h: down(jnp.tanh(h)))(down, hidden)
print("inside:", hidden.sharding.spec, "between:", out.sharding.spec)

# %% [markdown]
# ## A whole model
#
# LLaMA and GPT take the same option. Between blocks the tokens are split over the
# devices (sequence parallelism), inside them heads and hidden features. Parameters have
# the same names, shapes and places, so a run may change the option at a checkpoint. One
# loss and all gradients, on one device and three times on the mesh:

# %%
config = dataclasses.replace(models.preset("llama_tiny"), num_kv_heads=4)
tokens = jnp.asarray(rng.integers(0, 256, (2, 32)), jnp.int32)


def loss(model):
    return -jax.nn.log_softmax(model(tokens)[:, :-1])[:, :, 7].mean()


def run(tensor_parallel, rules=rules):
    def init():
        options = {"rules": rules, "tensor_parallel": tensor_parallel}
        return models.Decoder(config, rngs=nnx.Rngs(0), **options)

    with jax.set_mesh(mesh):
        model = sharding.create(init, mesh, rules)
        moved = collectives(jax.jit(lambda m: m.hidden(tokens)), model)
        return *jax.device_get(jax.jit(jax.value_and_grad(loss))(model)), moved


value, grads = jax.jit(jax.value_and_grad(loss))(
    models.Decoder(config, rngs=nnx.Rngs(0))
)
scale = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads))
differences = {}
for tensor_parallel in ("fused", "xla", None):
    found, found_grads, moved = run(tensor_parallel)
    pairs = zip(jax.tree.leaves(found_grads), jax.tree.leaves(grads), strict=True)
    worst = max(float(np.abs(a - np.asarray(b)).max()) for a, b in pairs) / scale
    differences[tensor_parallel] = max(abs(float(found - value)), worst)
    print(f"{tensor_parallel!s:6} difference {differences[tensor_parallel]:.1e}", moved)

# %% [markdown]
# With the collectives written out, the compiled loop over layers has two gathers and
# two scatters: queries, keys and values share one, gate and up the other. The one
# all-reduce is the look-up in the table of embeddings, whose rows are split.
#
# ## On GPUs
#
# Measurements are made by `python -m benchmarks.collective_matmul`; where its results
# are on disk, this draws them, a layer in each panel: the share of the exposed
# communication that is hidden, `E = 1 - (t - t_mm) / (t_xla - t_mm)`, by rows. 1 hides
# all of it, 0 is as slow as XLA's collective and product.

# %%
results = Path.cwd().parent if Path.cwd().name == "examples" else Path.cwd()
results = results / "benchmarks/results/nvidia_h200"
curves = {}
for file in sorted(results.glob("collective_matmul*.json")):
    for row in json.loads(file.read_text())["rows"]:
        value = row.get("metrics", {}).get("overlap_efficiency")
        if row["implementation"] == "mosaic_gpu" and value is not None:
            panel = curves.setdefault(row["case"], {})
            curve = panel.setdefault(row["params"].get("tp"), [])
            curve.append((row["params"]["M"], value))
if curves:
    height = -(-len(curves) // 5)
    figure, axes = plt.subplots(
        height, 5, figsize=(12, 2.2 * height), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (case, panel) in zip(axes.flat, curves.items(), strict=False):
        for ways, points in sorted(panel.items()):
            color = {2: "tab:orange", 4: "tab:blue"}.get(ways, "tab:green")
            line = zip(*sorted(points), strict=True)
            axis.plot(*line, marker=".", color=color, label=f"{ways} GPUs")
        axis.set_xscale("log", base=2)
        axis.set(title=case, ylim=(0, 1))
        axis.grid(alpha=0.3)
    axes[0, 0].legend(loc="lower right")
    figure.supxlabel("rows M")
    figure.supylabel("hidden, E")
    figure.tight_layout()
    plt.show()
else:
    print("no measurements of collective products in", os.path.relpath(results))

# %% [markdown]
# ## What this showed

# %%
assert all(error(on_mesh(i)(*arguments), expected) < 1e-4 for i in ("xla", "xla_ring"))
assert max(errors) < 1e-4, "gradients differ"
assert max(differences.values()) < 1e-4, "the model differs between the options"
assert up.bias is not None and down.bias is not None
by_hand = (
    jnp.tanh(x @ up.kernel[...] + up.bias[...]) @ down.kernel[...] + down.bias[...]
)
assert error(out, by_hand) < 1e-4, "the layers differ from their formula"
if count > 1 and jax.default_backend() == "cpu":
    assert collectives(on_mesh("xla"), *arguments) == {
        "all-gather": 1,
        "reduce-scatter": 1,
    }
print("gathered, multiplied, scattered: the same numbers in every form")
