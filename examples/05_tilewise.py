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
# # Tile-wise sparsity
#
# Prune a small language model by several patterns, train it on under a mask, and turn
# it into one that stores and computes only what is kept
# ([arXiv 2008.13006](https://arxiv.org/abs/2008.13006)). On a CPU this says what
# pruning does to the model, and nothing of speed:
# [docs/tilewise.md](../docs/tilewise.md) has the kernels and what they reach on GPUs.
#
# To run it, in a clone of the project: `pip install '.[notebooks]'`. On Colab,
# clone the project there and put the same into a first cell, with `%` before `pip` and
# `'.[notebooks,cuda12]'` for its GPU.

# %%
import sysconfig
import tempfile
from pathlib import Path

import jax


# GPUs would otherwise round the operands of products in fp32.
jax.config.update("jax_default_matmul_precision", "float32")

import dataclasses

import matplotlib.pyplot as plt
import numpy as np

from jaxscale import models, pruning, recipes, training


folder = Path(tempfile.mkdtemp())
# What is trained twice below is compiled once.
jax.config.update("jax_compilation_cache_dir", str(folder / "programs"))
print(jax.devices()[0].device_kind)

# %% [markdown]
# ## A trained model
#
# On some packages of Python's library, for a few seconds.

# %%
LIBRARY = Path(sysconfig.get_path("stdlib"))
PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest", "urllib")
config = training.TrainConfig(
    model=models.DecoderConfig(
        vocab_size=1024,
        d_model=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=256,
        max_seq_len=512,
    ),
    data=training.DataConfig(
        paths=tuple(str(LIBRARY / name) for name in PACKAGES),
        vocab_size=1024,
        seq_len=128,
        batch_size=8,
        held_out_fraction=0.1,
    ),
    optimizer=training.OptimizerConfig(learning_rate=1e-2, warmup_steps=10),
    steps=80,
    eval_batches=4,
    scan_layers=True,
    dtype="float32",
    output_dir=str(folder / "dense"),
)
text = training.load_text(config.data)
train_data, eval_data = training.packed_batches(config, text)
trained = training.fit(config, train_data=train_data, eval_data=eval_data)
dense = trained.state.model
assert trained.evaluation is not None  # some text is held out
print(f"held-out loss {trained.evaluation.loss:.3f}")

# %% [markdown]
# ## Scores
#
# What would the loss lose with a weight? Taylor scores estimate it to first order from
# gradients on a few batches; `magnitude_scores` need no data.

# %%
loss = recipes.mean_loss()
train_batches = iter(train_data)
batches = [next(train_batches) for _ in range(4)]
scores = pruning.taylor_scores(dense, loss, batches)
print({name: score.shape for name, score in scores.items()})

# %% [markdown]
# ## Patterns
#
# Each keeps exactly a quarter of the weights of the blocks, ranked over all layers
# together. The freer a pattern, the more of the score it keeps; only tiles run fast.

# %%
kept, masks = {}, {}
for pattern in ("ew", "tew", "tw", "bw"):
    settings = pruning.PruneConfig(
        sparsity=0.75, pattern=pattern, tile=16, block=16, single_fraction=0.1
    )
    masks[pattern] = pruning.make_model_masks(dense, scores, settings)
    layers = pruning.layer_reports(masks[pattern], scores)
    total = sum(score.sum() for score in scores.values())
    kept[pattern] = sum(scores[n][masks[pattern][n]].sum() for n in scores) / total

figure, axes = plt.subplots(1, 4, figsize=(12, 3.6), sharey=True)
for axis, (pattern, found) in zip(axes, masks.items(), strict=True):
    axis.imshow(found["blocks.mlp.gate"][0], cmap="Blues", aspect="auto")
    axis.set(title=f"{pattern}: {kept[pattern]:.0%} of the score", xlabel="outputs")
axes[0].set_ylabel("inputs")
figure.suptitle("What is kept (blue) of the gate of the first layer")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Training under a mask
#
# `prune_and_tune`, the recipe of `jaxscale prune`, scores the model and calls
# `fit` with a `Pruner`. That is a hook, which prunes at the steps of its schedule, and
# a transform of the gradients, which holds pruned weights at zero in between. Training
# on lowers the loss of any model, so with `control` the dense one is trained for as
# many steps on the same batches: that is what to compare with.

# %%
settings = dataclasses.replace(masks["tw"].config, equal_work=True)
tuning = dataclasses.replace(
    config,
    steps=40,
    optimizer=dataclasses.replace(config.optimizer, learning_rate=5e-3),
    output_dir=str(folder / "pruned"),
)
schedule = recipes.TuneConfig(schedule="cubic", stages=3, score_batches=4, control=True)
tuned = recipes.prune_and_tune(tuning, dense, text, settings, schedule)
assert tuned.control is not None  # asked for
final = tuned.masks
work = pruning.work(final)
for name, evaluation in (
    ("dense", tuned.before),
    (f"pruned to {final.sparsity:.0%} at once", tuned.after),
    (f"... and {tuning.steps} steps under the masks", tuned.tuned),
    (f"dense, {tuning.steps} extra steps", tuned.control),
):
    print(f"{name:>35}: held-out loss {evaluation.loss:.3f}")
print(f"{work.tiled:,} of {work.dense:,} multiply-adds a token are left")

# %% [markdown]
# Layers are ranked together, so they do not lose the same. A layer of which nothing is
# left would give zeros, whatever it reads, so each keeps a quarter of what it would
# keep if all were pruned alike; `PruneConfig(max_layer_sparsity=...)` sets another
# bound.
# `scope="layer"` prunes each layer alike, and `dense=` leaves some as they are.

# %%
reports = pruning.layer_reports(final, tuned.scores)
most = max(report.sparsity for report in reports)
print(f"no layer has lost more than {most:.1%}")

figure, axis = plt.subplots(figsize=(8, 4))
shares = [1 - report.sparsity for report in reports]
names = [report.name.removeprefix("blocks.") for report in reports]
axis.barh(names, shares, color="tab:blue")
for row, share in enumerate(shares):
    axis.text(share, row, f" {share:.0%}", va="center")
axis.axvline(1 - final.sparsity, color="gray", linestyle=":")
axis.set(xlabel="share of the weights that is kept (dots: of all)", xlim=(0, 1.1))
axis.invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Only what is kept
#
# `sparsify` replaces the layers: values and row numbers of each tile, no zeros.

# %%
masked = tuned.result.state.model
sparse = pruning.sparsify(masked, final)
layer = sparse.blocks.mlp.up
print("rows that each tile of `up` keeps, of 64, in the first and the second layer:")
print(*layer.counts[...].tolist(), sep="\n")
print("dense kernel", dense.blocks.mlp.up.kernel.shape, "sparse", layer.values.shape)

PROMPT = "def read_lines(path):"
ids = text.tokenizer.encode(PROMPT)
forward = jax.jit(lambda model, tokens: model(tokens))
row, end = np.zeros((1, 32), np.int32), len(ids)
row[0, :end] = ids
for at in range(end, end + 16):  # the likeliest token each time; what follows is unseen
    row[0, at] = forward(sparse, row)[0, at - 1].argmax()
print(repr(text.tokenizer.decode(row[0, : end + 16].tolist())))

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert kept["ew"] > kept["tew"] > kept["tw"] > kept["bw"], "freer patterns keep more"
assert all(m.sparsity == 0.75 for m in masks.values()), "sparsity is exact"
for name, linear in pruning.linears(masked).items():
    assert not np.asarray(linear.kernel[...])[~final[name]].any(), "a weight came back"
assert np.allclose(forward(sparse, row), forward(masked, row), atol=1e-4), (
    "the sparse model differs"
)
assert tuned.tuned.loss < tuned.after.loss, "training under the mask helps"
assert tuned.control.loss < tuned.tuned.loss, "zeros for nothing"
assert most < 0.95, "a layer is all but gone"
print("pruned, trained under the masks, and turned into a sparse model")
