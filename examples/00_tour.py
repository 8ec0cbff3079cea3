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
# # A tour of jaxscale
#
# Train a small LLaMA on real text, save it, restore it on another mesh, hand it over in
# the Hugging Face format and generate from it: under a minute on a laptop without a
# GPU. The numbers here say that things work, not how fast they are on a GPU.
#
# To run it, in a clone of the project: `pip install '.[notebooks]'`. On Colab,
# clone the project there and put the same into a first cell, with `%` before `pip` and
# `'.[notebooks,cuda12]'` for its GPU.

# %%
import json
import math
import tempfile
from pathlib import Path

import jax


# Four simulated devices, so that sharding is real; a machine with GPUs uses those.
jax.config.update("jax_num_cpu_devices", 4)

import dataclasses

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

from jaxscale import inference, models, sharding, training


folder = Path(tempfile.mkdtemp())
count = jax.device_count()
print(f"{count} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Text
#
# Every CPython carries its documentation and library source. That is real text, split
# here by file into documents to train on and documents held out. Documents are packed
# into rows of 128 tokens; `cu_seqlens` says where each begins, and attention never
# crosses from one into another.

# %%
data = training.DataConfig(vocab_size=1024, seq_len=128, batch_size=8)
text = training.load_text(data)
print(f"{text.train.num_tokens:,} tokens to train on in {len(text.train)} documents")

# %% [markdown]
# ## A run
#
# A run is a dataclass. `rules` names a table that maps logical axes, such as `heads`
# or `mlp`, to mesh axes; it is the one place that decides what is split.

# %%
tensor = 2 if count % 4 == 0 else 1
config = training.TrainConfig(
    model=models.DecoderConfig(
        vocab_size=1024,
        d_model=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        d_ff=192,
        max_seq_len=512,
    ),
    data=data,
    optimizer=training.OptimizerConfig(learning_rate=1e-2, warmup_steps=10),
    mesh=sharding.MeshConfig(fsdp=-1, tensor=tensor),
    rules="fsdp_tp",
    steps=120,
    eval_every=30,
    eval_batches=4,
    dtype="float32",
    output_dir=str(folder / "run"),
)
print("kernel of the MLP:", config.axis_rules.spec("embed", "mlp"))

# %% [markdown]
# ## Train
#
# `fit` is about a hundred lines: state, step, evaluation, checkpoint. It saves at the
# end, and a second call continues from the newest checkpoint, bit for bit. A writer
# takes the record of every step; these are a progress bar, JSON lines and TensorBoard.

# %%
train_data, eval_data = training.packed_batches(config, text)
result = training.fit(config, train_data=train_data, eval_data=eval_data)
guess, trained = math.log(config.model.vocab_size), result.evaluation
assert trained  # held-out batches were given
print(f"held-out loss {guess:.2f} (a guess) to {trained.loss:.2f}")

# %%
lines = (folder / "run/metrics.jsonl").read_text().splitlines()
records = [json.loads(line) for line in lines]
plt.figure(figsize=(6, 3))
for name, label in (("loss", "training"), ("eval_loss", "held out")):
    points = [(r["step"], r[name]) for r in records if name in r]
    plt.plot(*zip(*points, strict=True), label=label)
plt.xlabel("step")
plt.ylabel("loss, nats/token")
plt.legend()
plt.show()

# %% [markdown]
# ## Restore on another mesh
#
# A checkpoint stores parameters by name, whole, whatever mesh they were trained on. The
# run is finished, so `fit` restores it onto the new mesh and only evaluates.

# %%
flat = dataclasses.replace(config, mesh=sharding.MeshConfig(fsdp=-1))
train_data, eval_data = training.packed_batches(flat, text)
restored = training.fit(flat, train_data=train_data, eval_data=eval_data, writers=())
again = restored.evaluation
assert again
print(f"held-out loss {trained.loss:.6f} and {again.loss:.6f}")

# %% [markdown]
# Where a weight lies, before and after: each color is a device, which holds that part
# of the matrix and no other.


# %%
def draw(axis, array):
    """The last two axes of an array, by the devices that hold them."""
    height, width = array.shape[-2:]
    places = array.sharding.devices_indices_map(array.shape)
    for number, (device, index) in enumerate(places.items()):
        top, bottom, _ = index[-2].indices(height)
        left, right, _ = index[-1].indices(width)
        color = plt.get_cmap("Set2")(number)
        size = (right - left, bottom - top)
        axis.add_patch(Rectangle((left, top), *size, facecolor=color, ec="white"))
        middle = ((left + right) / 2, (top + bottom) / 2)
        axis.text(*middle, f"device {device.id}", ha="center", va="center")
    axis.set(xlim=(0, width), ylim=(height, 0), xlabel="outputs", ylabel="inputs")


figure, axes = plt.subplots(1, 2, figsize=(9, 3))
for axis, found, which in zip(
    axes, (result, restored), ("trained", "restored"), strict=True
):
    kernel = found.state.model.blocks.mlp.up.kernel[...]
    sizes = {k: n for k, n in kernel.sharding.mesh.shape.items() if n > 1}
    axis.set_title(f"{which} on {sizes}")
    draw(axis, kernel)
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Hugging Face and back
#
# `models.save` writes `config.json`, safetensors and the tokenizer, which transformers
# reads; `Decoder.from_pretrained` streams such a directory, ours or a downloaded one,
# tensor by tensor to where it belongs.

# %%
models.save(restored.state.model, folder / "exported", tokenizer=text.tokenizer)
model = models.Decoder.from_pretrained(folder / "exported")
print(sorted(path.name for path in (folder / "exported").iterdir()))

# %% [markdown]
# ## Generate
#
# `LLM` takes texts and gives texts. Requests join and leave the running batch at every
# token. Its programs are compiled first, and nothing is compiled later.

# %%
engine = inference.EngineConfig(
    num_slots=4, buckets=(4,), max_len=96, page_size=16, prefill_tokens=(32,), steps=1
)
llm = inference.LLM(model, text.tokenizer, config=engine, quiet=True)
params = inference.SamplingParams(temperature=0.7, top_k=40, seed=0, max_tokens=24)
prompts = ["def __init__(self", "import ", "The"]
drawn = llm.generate(prompts, params)
for prompt, found in zip(prompts, drawn, strict=True):
    print(repr(prompt + found.text))

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert trained.loss < guess - 1, "training did not learn"
assert abs(trained.loss - again.loss) < 1e-5, "restore changed"
alone = llm.generate(prompts[:1], params, progress=False)
assert alone[0].tokens == drawn[0].tokens, "neighbors change a continuation"
llm.close()
ids = text.tokenizer.encode(prompts[0])
with jax.set_mesh(sharding.make_mesh(flat.mesh)):
    sharded = restored.state.model(np.array([ids] * count))
whole = model(jax.numpy.array([ids]))
assert np.allclose(sharded[:1], whole, atol=1e-4), "the exported model differs"
print("trained, saved, restored, exported and generated")
