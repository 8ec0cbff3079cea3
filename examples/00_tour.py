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

# %%
import math
import tempfile
from pathlib import Path

import jax


# Four simulated devices, so that sharding is real; a machine with GPUs uses those.
jax.config.update("jax_num_cpu_devices", 4)

import dataclasses

import matplotlib.pyplot as plt
import numpy as np

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
# takes the record of every step; the usual ones are a progress bar, JSON lines and
# TensorBoard.


# %%
class History(training.Writer):
    """Keeps the records for a plot."""

    def __init__(self):
        self.records = []

    def write(self, record):
        self.records.append(record)


history = History()
train_data, eval_data = training.packed_batches(config, text)
result = training.fit(
    config, train_data=train_data, eval_data=eval_data, writers=[history]
)
guess, trained = math.log(config.model.vocab_size), result.evaluation
assert trained  # held-out batches were given
print(f"held-out loss {guess:.2f} (a guess) to {trained.loss:.2f}")

# %%
for name in ("loss", "eval_loss"):
    points = [(r["step"], r[name]) for r in history.records if name in r]
    plt.plot(*zip(*points, strict=True), label=name)
plt.xlabel("step")
plt.ylabel("nats a token")
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
print(result.state.model.blocks.mlp.up.kernel[...].sharding.spec, "before")
print(restored.state.model.blocks.mlp.up.kernel[...].sharding.mesh.shape, "after")
again = restored.evaluation
assert again
print(f"{trained.loss:.6f} and {again.loss:.6f}")

# %% [markdown]
# ## Hugging Face and back
#
# `models.save` writes `config.json`, safetensors and the tokenizer, which transformers
# reads; `models.load` streams such a directory, ours or a downloaded one,
# tensor by tensor to where it belongs.

# %%
models.save(restored.state.model, folder / "exported", tokenizer=text.tokenizer)
model = models.load(folder / "exported")
print(sorted(path.name for path in (folder / "exported").iterdir()))

# %% [markdown]
# ## Generate
#
# Requests join and leave the running batch at every token.

# %%
prompts = ["def __init__(self", "import ", "The"]
ids = [text.tokenizer.encode(prompt) for prompt in prompts]
drawn = inference.generate(
    model,
    ids,
    max_new_tokens=24,
    sampling=inference.SamplingParams(temperature=0.7, top_k=40, seed=0),
)
for prompt, before, new in zip(prompts, ids, drawn, strict=True):
    print(repr(prompt + text.tokenizer.continuation(before, new)))

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert trained.loss < guess - 1, "training did not learn"
assert abs(trained.loss - again.loss) < 1e-5, "restore changed"
alone = inference.generate(model, [ids[0]], max_new_tokens=8)
together = inference.generate(model, ids[:2], max_new_tokens=8)
assert alone[0] == together[0], "a prompt's continuation depends on its neighbors"
with jax.set_mesh(sharding.make_mesh(flat.mesh)):
    sharded = restored.state.model(np.array([ids[0]] * count))
whole = model(np.array([ids[0]]))
assert np.allclose(sharded[:1], whole, atol=1e-4), "the exported model differs"
print("trained, saved, restored, exported and generated")
