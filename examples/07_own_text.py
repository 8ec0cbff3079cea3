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
# # A model that continues your own text
#
# A decoder in Hugging Face files, texts of your own, low-rank adapters (LoRA), and text
# in, text out: what one does with a Llama or a Qwen on a GPU, here with a model small
# enough for a minute on a CPU. It knows next to nothing, so look at what changes, not
# at what it says.
#
# To run it, in a clone of the project: `pip install '.[notebooks,serve]'`. On Colab,
# clone the project there and put the same line into a first cell, with `%` before `pip`
# and `'.[notebooks,serve,cuda12]'` for its GPU.

# %%
import ast
import dataclasses
import json
import logging
import sysconfig
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

from jaxscale import inference, models, nn, recipes, training
from jaxscale.inference.chat import ChatTemplate
from jaxscale.training import run as run_directory


logging.getLogger("absl").setLevel("ERROR")  # it warns that export only reads
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## A model to begin with
#
# Yours would be a name on the hub, as `"meta-llama/Llama-3.2-1B"`, or a directory. To
# need no network, we make one: a small LLaMA that has read some packages of Python's
# library for some seconds, in the same files.

# %%
LIBRARY = Path(sysconfig.get_path("stdlib"))
PACKAGES = ("asyncio", "email", "http", "json", "logging", "unittest", "urllib")
config = training.TrainConfig(
    model=models.DecoderConfig(
        vocab_size=1024,
        d_model=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        d_ff=256,
        max_seq_len=256,
    ),
    data=training.DataConfig(
        paths=tuple(str(LIBRARY / name) for name in PACKAGES),
        vocab_size=1024,
        seq_len=128,
        batch_size=8,
        held_out_fraction=0.0,
    ),
    optimizer=training.OptimizerConfig(learning_rate=4e-3, warmup_steps=10),
    steps=200,
    scan_layers=True,
    dtype="float32",
    output_dir=str(folder / "base"),
)
text = training.load_text(config.data)
train_data, _ = training.packed_batches(config, text)
base = training.fit(config, train_data=train_data)

source = folder / "model"
models.save(base.state.model, source, tokenizer=text.tokenizer)
print(sorted(path.name for path in source.iterdir()))

# %% [markdown]
# ## Conversations as text
#
# A chat template lays out a conversation as one text. Models for chats bring theirs
# with the tokenizer; ours brings none, so we write one. It is the same template that
# prepares the texts to learn from and, later, the questions.

# %%
TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == "user" %}Question: {{ message.content }}
Answer:{% else %} {{ message.content }}
{% endif -%}
{%- endfor -%}"""

tokenizer = models.Tokenizer.from_file(source)
chat = ChatTemplate(tokenizer, TEMPLATE)


def question(name):
    return [{"role": "user", "content": f"What does {name} do?"}]


print(chat.render([*question("close"), {"role": "assistant", "content": "Close it."}]))

# %% [markdown]
# ## Your text
#
# A file of JSON lines, one record for each text. Here the questions are names of
# functions of Python's library, and the answers what their docstrings say.


# %%
def functions():
    """Names of public functions, and the first line of what they do."""
    for file in sorted(LIBRARY.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(errors="replace"))):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                line = (ast.get_docstring(node) or "").partition("\n")[0]
                if 20 < len(line) < 90:
                    yield node.name, line


answers = dict(functions())
path = folder / "questions.jsonl"
with path.open("w") as file:
    for name, line in answers.items():
        messages = [*question(name), {"role": "assistant", "content": line}]
        text_of_chat = chat.render(messages, add_generation_prompt=False)
        file.write(json.dumps({"text": text_of_chat}) + "\n")
print(f"{len(answers):,} questions, such as: {text_of_chat}")

# %% [markdown]
# ## Adapters
#
# LoRA ([arXiv 2106.09685](https://arxiv.org/abs/2106.09685)) leaves every weight as it
# is and adds to each linear layer a product of two thin matrices, which alone are
# trained. The gradients, the moments of the optimizer and the checkpoints are as small
# as they are. For a large model this decides whether it fits.

# %%
tuning = recipes.from_source(str(source))
tuning = dataclasses.replace(
    tuning,
    data=dataclasses.replace(
        tuning.data,
        paths=(str(path),),
        held_out_fraction=0.1,
        seq_len=128,
        batch_size=8,
    ),
    optimizer=dataclasses.replace(tuning.optimizer, learning_rate=1e-2, warmup_steps=5),
    lora=nn.LoraConfig(rank=16),
    steps=240,
    eval_every=80,
    eval_batches=4,
    scan_layers=True,
    dtype="float32",
    output_dir=str(folder / "tuned"),
)
task = recipes.prepare(tuning)
print(task.told)

directory = Path(tuning.output_dir)
run_directory.write(directory, task.config, task.text)
result = training.fit(task.config, train_data=task.train_data, eval_data=task.eval_data)

# %%
lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for name, label in (("loss", "training"), ("eval_loss", "held out")):
    points = [(x["step"], x[name]) for x in lines if name in x]
    left.plot(*zip(*points, strict=True), label=label)
left.set(xlabel="step", ylabel="loss, nats/token")
left.legend()

sizes = {
    "the model": config.model.num_parameters(),
    "adapters": sum(
        np.size(x) for x in jax.tree.leaves(nnx.state(result.state.model, nnx.Param))
    ),
}
right.barh(list(sizes), list(sizes.values()), color=["tab:gray", "tab:orange"])
for row, size in enumerate(sizes.values()):
    right.text(size, row, f" {size:,}", va="center")
right.set(xlabel="parameters", xlim=(0, 1.3 * sizes["the model"]))
right.invert_yaxis()
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Text in, text out
#
# `export` merges the adapters into the weights and writes Hugging Face files again.
# What comes after a question, as the model was and as it is now? None of these
# questions was in the file.

# %%
print(recipes.export(directory, folder / "merged"))
names = ("load_pictures", "is_ripe", "sum_of_squares", "open_window")
assert not answers.keys() & set(names)
prompts = [chat.encode(question(name)) for name in names]
likeliest = {}
for where in ("model", "merged"):
    logits = models.load(folder / where)(jax.numpy.array(prompts[:1]))[0, -1]
    shares = jax.nn.softmax(logits)
    tokens = np.argsort(-shares)[:4]
    likeliest[where] = [tokenizer.decode([int(token)]) for token in tokens]
    shown = (
        f"{x!r} {shares[t]:.0%}" for x, t in zip(likeliest[where], tokens, strict=True)
    )
    print(f"{where:>6}: {', '.join(shown)}")

# %% [markdown]
# Before, a question was a line of a program, and the next line came. Now an answer
# begins. `LLM` reads such files and continues prompts, all of them in one batch.

# %%
params = [
    inference.SamplingParams(
        temperature=0.5, top_k=20, max_tokens=24, stop=("\n",), seed=seed
    )
    for seed in range(len(names))
]
small = inference.EngineConfig(
    num_slots=4,
    buckets=(4,),
    max_len=96,
    page_size=16,
    prefill_tokens=(64,),
    steps=1,
    prefix_cache=False,
)
with inference.LLM.from_pretrained(folder / "merged", config=small) as llm:
    said = [generation.text for generation in llm.generate(prompts, params)]
for name, answer in zip(names, said, strict=True):
    print(f"What does {name} do?{answer}")

# %% [markdown]
# They have the form of answers, and little sense: that is the size of the model. For a
# conversation, put the answer and the next question behind the messages and encode all
# of them again.
#
# The same by commands is `jaxscale train --from SOURCE --data.paths questions.jsonl
# --lora.rank 16`, `jaxscale export`, and `jaxscale serve` for the API of OpenAI:
# [docs/recipes.md](../docs/recipes.md) and [docs/serving.md](../docs/serving.md).
#
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
first, last = ([x["eval_loss"] for x in lines if "eval_loss" in x][i] for i in (0, -1))
assert last < first, "tuning did not help"
table = models.Decoder.from_pretrained(source).embed.table[...]
assert np.array_equal(result.state.model.embed.table[...], table), "it was trained"
assert sizes["adapters"] < sizes["the model"] / 5
assert "\n" in likeliest["model"][0], "the model could answer before"
assert "\n" not in "".join(likeliest["merged"]), "it does not begin an answer"
assert sum(len(answer) > 5 for answer in said) >= 3, "the answers are empty"
print("tuned by adapters, merged, exported, and asked")
