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

# %%
import tempfile
from pathlib import Path

import jax


# GPUs would otherwise round the operands of products in fp32.
jax.config.update("jax_default_matmul_precision", "float32")

import dataclasses

import matplotlib.pyplot as plt
import numpy as np

from jaxscale import inference, models, pruning, recipes, training


folder = Path(tempfile.mkdtemp())
print(jax.devices()[0].device_kind)

# %% [markdown]
# ## A trained model
#
# On the documentation and source of the running Python, for a few seconds.

# %%
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
    data=training.DataConfig(vocab_size=1024, seq_len=128, batch_size=8),
    optimizer=training.OptimizerConfig(learning_rate=1e-2, warmup_steps=10),
    steps=100,
    eval_batches=4,
    scan_layers=True,
    dtype="float32",
    output_dir=str(folder / "dense"),
)
text = training.load_text(config.data)
train_data, eval_data = training.packed_batches(config, text)
trained = training.fit(config, train_data=train_data, eval_data=eval_data, writers=())
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

figure, axes = plt.subplots(1, 4, figsize=(12, 3.6))
for axis, (pattern, found) in zip(axes, masks.items(), strict=True):
    axis.imshow(found["blocks.mlp.down"][0].T, cmap="Blues", interpolation="nearest")
    axis.set_title(f"{pattern}: {kept[pattern]:.0%} of the score")
plt.show()

# %% [markdown]
# ## Training under a mask
#
# `prune_and_tune`, the recipe of `jaxscale prune`, scores the model and calls
# `fit` with a `Pruner`. That is a hook, which prunes at the steps of its schedule, and
# a transform of the gradients, which holds pruned weights at zero in between.

# %%
settings = dataclasses.replace(masks["tw"].config, equal_work=True)
tuning = dataclasses.replace(
    config,
    steps=50,
    optimizer=dataclasses.replace(config.optimizer, learning_rate=5e-3),
    output_dir=str(folder / "pruned"),
)
schedule = recipes.TuneConfig(schedule="cubic", stages=3, score_batches=4)
tuned = recipes.prune_and_tune(tuning, dense, text, settings, schedule, writers=[])
final = tuned.masks
work = pruning.work(final)
print(f"held-out loss {tuned.tuned.loss:.3f} at {final.sparsity:.0%}")
print(f"{work.tiled:,} of {work.dense:,} multiply-adds a token are left")

# %% [markdown]
# ## Only what is kept
#
# `sparsify` replaces the layers: values and row numbers of each tile, no zeros.

# %%
masked = tuned.result.state.model
sparse = pruning.sparsify(masked, final)
layer = sparse.blocks.mlp.up
print("rows of each tile:", layer.counts[...].tolist())
print("dense kernel", dense.blocks.mlp.up.kernel.shape, "sparse", layer.values.shape)

prompt = [text.tokenizer.encode("def read_lines(path):")]
options = {"max_new_tokens": 16, "sampling": inference.GREEDY}
drawn = inference.generate(sparse, prompt, **options)
print(repr(text.tokenizer.continuation(prompt[0], drawn[0])))

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert kept["ew"] > kept["tew"] > kept["tw"] > kept["bw"], "freer patterns keep more"
assert all(m.sparsity == 0.75 for m in masks.values()), "sparsity is exact"
for name, linear in pruning.linears(masked).items():
    assert not np.asarray(linear.kernel[...])[~final[name]].any(), "a weight came back"
tokens = np.array(prompt)
assert np.allclose(sparse(tokens), masked(tokens), atol=1e-4), (
    "the sparse model differs"
)
assert drawn == inference.generate(masked, prompt, **options)
assert tuned.tuned.loss < tuned.after.loss, "training under the mask helps"
print("pruned, trained under the masks, and turned into a sparse model")
