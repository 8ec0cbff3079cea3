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
# # Flover: requests join and leave at every token
#
# A server that decodes a batch until its longest answer ends leaves the places of short
# answers empty, and whoever arrives meanwhile waits for all of them. Flover
# ([arXiv 2305.13484](https://arxiv.org/abs/2305.13484)) decodes everybody in one loop:
# a request joins at the next token and leaves at its last. Here a tiny model with
# random weights serves the same requests both ways, and we count steps, not seconds:
# [docs/flover.md](../docs/flover.md) has the engine.
#
# To run it, in a clone of the project: `pip install '.[notebooks]'`. On Colab,
# clone the project there and put the same into a first cell, with `%` before `pip` and
# `'.[notebooks,cuda12]'` for its GPU.

# %%
import statistics
import time

import jax


# GPUs would otherwise round the operands of products in fp32.
jax.config.update("jax_default_matmul_precision", "float32")

import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jaxscale import inference, models


print(jax.devices()[0].device_kind)

# %% [markdown]
# ## An engine
#
# `LLM` and `AsyncEngine` run one in a thread. Here we turn the crank ourselves: a call
# of `step` is a tick, at most one prefill and one step of decoding. Its programs are
# compiled now, and nothing is compiled later.

# %%
SLOTS = 4
model = models.Decoder(models.preset("llama_tiny"), rngs=nnx.Rngs(0))
config = inference.EngineConfig(
    num_slots=SLOTS,
    buckets=(SLOTS,),  # one size of batch: results are equal bit for bit
    max_len=96,
    page_size=16,
    prefill_tokens=(32,),
    steps=1,
    prefix_cache=False,
)
start = time.perf_counter()
engine = inference.make_engine(model, config=config, quiet=True)
print(f"compiled in {time.perf_counter() - start:.0f} s")

# %% [markdown]
# ## Requests
#
# Prompts of 2 to 23 tokens, answers of 4 to 59, which arrive over some hundred ticks.

# %%
random = np.random.default_rng(0)
COUNT = 14
arrives = np.sort(random.integers(0, 110, COUNT))
arrives -= arrives[0]
wanted = random.integers(4, 60, COUNT)
prompts = [
    random.integers(0, model.config.vocab_size, size).tolist()
    for size in random.integers(2, 24, COUNT)
]


def request(i):
    """Request i: greedy, of just the wanted length, with log-probabilities."""
    params = inference.SamplingParams(
        temperature=0.0, max_tokens=int(wanted[i]), ignore_eos=True, logprobs=0
    )
    return inference.Request(prompt=prompts[i], id=str(i), params=params)


class Play:
    """What happened: rows of each tick, and when the tokens of each request came."""

    def __init__(self, chosen, *, static=False):
        self.rows, self.seconds, self.ticks, self.answers = [], [], {}, {}
        waiting, tick = list(chosen), 0
        while waiting or not engine.idle:
            joining = [i for i in waiting if arrives[i] <= tick]
            if static:  # nobody joins a batch that runs
                joining = joining[:SLOTS] if engine.idle else []
            for i in joining:
                self.ticks[i], self.answers[i] = [], []
                engine.admit(request(i), lambda news, i=i: self.hear(i, news))
                waiting.remove(i)
            self.tick = tick
            start = time.perf_counter()
            engine.step()
            self.seconds.append(time.perf_counter() - start)
            live = engine.scheduler.sequences()
            self.rows.append({c.slot: int(c.request.id) for c in live})
            tick += 1

    def hear(self, i, news):
        """Note the tokens of request i, and their log-probabilities."""
        for output in news:
            self.ticks[i] += [self.tick] * len(output.tokens)
            self.answers[i] += [(x.token, x.logprob) for x in output.logprobs]

    def waits(self):
        """Ticks from the arrival of each request to its first token."""
        return [ticks[0] - arrives[i] for i, ticks in sorted(self.ticks.items())]


static, fused = Play(range(COUNT), static=True), Play(range(COUNT))

# %% [markdown]
# ## Slots against time
#
# A bar is a request in its slot. Above, a batch holds its slots until its longest
# answer ends; below, a slot is taken again as soon as it is free.

# %%
colors = plt.get_cmap("tab20")
figure, axes = plt.subplots(2, 1, figsize=(10, 4.5), sharex=True)
for axis, play, title in zip(
    axes, (static, fused), ("a batch at a time", "one loop"), strict=True
):
    for tick, rows in enumerate(play.rows):
        for slot, i in rows.items():
            if slot is not None:
                axis.barh(slot, 1, left=tick, height=0.9, color=colors(i % 20))
    for i, tick in enumerate(arrives):
        axis.plot([tick, tick], [SLOTS - 0.45, SLOTS - 0.1], color=colors(i % 20))
    axis.set(title=title, ylabel="slot", yticks=range(SLOTS))
axes[-1].set_xlabel("tick (strokes above the slots: arrivals)")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## What it costs to come late
#
# To the one who comes: ticks until the first token. To the others: the tick in which a
# prompt is computed takes longer. Prompts go in chunks, so it is a bounded pause, and
# several prompts share one.

# %%
for name, play in (("a batch at a time", static), ("one loop", fused)):
    waits, ticks = play.waits(), len(play.rows)
    busy = sum(map(len, play.ticks.values())) / (SLOTS * ticks)
    print(
        f"{name:>18}: {ticks} ticks, slots {busy:.0%} in use, first token after "
        f"{statistics.mean(waits):.1f} ticks, at worst {max(waits)}"
    )

joined = {ticks[0] - 1 for ticks in fused.ticks.values()}  # read a tick later
with_prompt = [s for tick, s in enumerate(fused.seconds) if tick in joined]
without = [s for tick, s in enumerate(fused.seconds) if tick not in joined]
print(
    f"a tick takes {1e3 * statistics.median(without):.2f} ms, one with a prompt "
    f"{1e3 * statistics.median(with_prompt):.2f} ms"
)

# %% [markdown]
# ## Neighbors change nothing
#
# The same requests one by one: tokens and log-probabilities are the same bits.

# %%
alone = {}
for i in range(COUNT):
    alone |= Play([i]).answers
print(alone[0][:3])

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert all(len(fused.answers[i]) == wanted[i] for i in range(COUNT))
assert alone == fused.answers == static.answers, "neighbors change nothing"
assert len(fused.rows) < len(static.rows), "slots are taken again at once"
assert statistics.mean(fused.waits()) < statistics.mean(static.waits()) / 2
pool = engine.scheduler.pool
assert pool.num_free == pool.num_pages, "every page came back"
print("requests joined and left at every token, and none noticed the others")
