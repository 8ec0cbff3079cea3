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
# # MegaScale: pipelines, stragglers, crashes and plans
#
# A large run is as fast as its GPUs are busy, and as long as it has to begin again
# ([arXiv 2402.15627](https://arxiv.org/abs/2402.15627)). Here a pipeline is drawn and
# run, a slow rank is found, a process of a job is killed and the job goes on, and a
# layout for 1,024 GPUs is chosen. Devices are simulated on the CPU, so nothing here
# says how fast a GPU is: [docs/megascale.md](../docs/megascale.md) has the system.
#
# To run it, in a clone of the project: `pip install '.[notebooks]'`. On Colab,
# clone the project there and put the same into a first cell, with `%` before `pip` and
# `'.[notebooks,cuda12]'` for its GPU.

# %%
import os


# Simulated devices, and programs that compile fast; for processes started here too.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"

import dataclasses
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax


jax.config.update("jax_num_cpu_devices", 8)

import matplotlib.pyplot as plt
import numpy as np

from jaxscale import models, observability, sharding, supervision, training
from jaxscale.supervision.slow import slow_ranks


folder = Path(tempfile.mkdtemp())
print(jax.device_count(), "simulated devices")

# %% [markdown]
# ## A pipeline, drawn
#
# Four stages hold two chunks of the layers each, and eight microbatches follow each
# other. A schedule is a table of integers, made and checked without a device: which
# microbatch a stage works on at a tick, forward and backward.

# %%
STAGES, MICROBATCHES, CHUNKS = 4, 8, 2
schedule = sharding.pipeline_schedule(STAGES, MICROBATCHES, CHUNKS)

figure, axis = plt.subplots(figsize=(12, 3))
forward = ("Blues", schedule.f_mb, schedule.f_chunk, 0.45)
backward = ("Greens", schedule.b_mb, schedule.b_chunk, 0.05)
for colors, microbatch, chunk, offset in (forward, backward):
    for tick, stage in zip(*np.nonzero(microbatch >= 0), strict=True):
        shade = plt.get_cmap(colors)(0.35 + 0.3 * chunk[tick, stage])
        axis.barh(stage + offset, 1, height=0.4, left=tick, align="edge", color=shade)
        text = str(microbatch[tick, stage])
        axis.text(tick + 0.5, stage + offset + 0.2, text, ha="center", va="center")
axis.set(
    xlabel="tick", ylabel="stage", yticks=np.arange(4) + 0.45, yticklabels=range(4)
)
axis.set_title("blue: forward, green: backward, darker: the second chunk")
axis.invert_yaxis()
plt.show()

# %% [markdown]
# White is waiting. A stage has 16 forward and 16 backward passes, one of each chunk and
# microbatch; all stages go from tick to tick together.

# %%
busy = int((schedule.f_mb >= 0).sum())
ticks = int((schedule.f_mb >= 0).any(axis=1).sum())
counted = 1 - busy / (ticks * STAGES)
formula = (STAGES - 1) / (CHUNKS * MICROBATCHES + STAGES - 1)
print(f"bubble: {counted:.1%} counted, {formula:.1%} by the formula")
print(f"with one chunk: {sharding.pipeline_schedule(STAGES, MICROBATCHES).bubble:.1%}")

# %% [markdown]
# ## The same pipeline, run
#
# Eight layers on four stages, over two devices each that share parameters and rows,
# against the same model on one device. Only the mesh and the rules differ.

# %%
data = training.DataConfig(
    paths=(str(Path(json.__file__).parent),),  # a few files of Python
    vocab_size=300,
    seq_len=32,
    batch_size=16,
    held_out_fraction=0.0,
)
alone = training.TrainConfig(
    model=models.DecoderConfig(
        vocab_size=300,
        d_model=32,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        d_ff=64,
        max_seq_len=32,
    ),
    data=data,
    optimizer=training.OptimizerConfig(learning_rate=5e-3, warmup_steps=5, eps=1e-5),
    steps=20,
    scan_layers=True,
    dtype="float32",
    output_dir=str(folder / "alone"),
)
piped = dataclasses.replace(
    alone,
    mesh=sharding.MeshConfig(pipe=STAGES, fsdp=2),
    rules="megascale_3d",
    microbatches=MICROBATCHES,
    chunks=CHUNKS,
    output_dir=str(folder / "piped"),
)
corpus = training.load_text(data)


class Losses(training.Writer):
    """Keeps the losses."""

    def __init__(self):
        self.losses = []

    def write(self, record):
        self.losses.append(record["loss"])


def losses(config, devices):
    """The losses of a run on some of the devices."""
    batches, _ = training.packed_batches(config, corpus, devices)
    kept = Losses()
    training.fit(config, train_data=batches, writers=[kept], devices=devices)
    return np.array(kept.losses)


start = time.perf_counter()
one = losses(alone, jax.devices()[:1])
eight = losses(piped, jax.devices())
seconds = time.perf_counter() - start
print(f"{seconds:.0f} s; largest difference {abs(one - eight).max():.1e}")

# %%
plt.figure(figsize=(6, 3))
plt.plot(one, linewidth=5, alpha=0.4, label="one device")
plt.plot(eight, label="4 stages x 2, 8 microbatches, 2 chunks")
plt.xlabel("step")
plt.ylabel("nats/token")
plt.legend()
plt.show()

# %% [markdown]
# ## A straggler, found
#
# All ranks end a step together, so how long a step takes names nobody. What differs is
# how long a rank is at work by itself, which a run measures now and then
# (`--profile-every`) and its supervisor compares. Here 64 ranks are made up: each step
# varies by 5%, sometimes one of them or all are held up, and rank 37 is 15% slow.

# %%
SLOW = 37
random = np.random.default_rng(0)
work = 0.1 * random.lognormal(0, 0.05, (64, 48))
work *= np.where(random.random(48) < 0.05, 3, 1)  # the network, for all
work *= np.where(random.random((64, 48)) < 0.02, 2, 1)  # a collection of garbage
work[SLOW] *= 1.15
found = slow_ranks(dict(enumerate(work.tolist())))
print([f"rank {slow.rank} takes {slow.factor:.2f} times as long" for slow in found])

relative = work / np.median(work, axis=0)
figure, axes = plt.subplots(1, 2, figsize=(12, 3.5))
axes[0].imshow(relative, vmin=0.8, vmax=1.5, aspect="auto", cmap="magma")
axes[0].set(xlabel="step", ylabel="rank", title="time at work over that of most ranks")
axes[1].bar(range(64), np.median(relative, axis=1), color="tab:gray")
axes[1].bar([s.rank for s in found], [s.factor for s in found], color="tab:red")
axes[1].set(xlabel="rank", title="a rank over its steps", ylim=(0.9, 1.2))
plt.show()

# %% [markdown]
# ## A crash, survived
#
# `--supervise` starts the processes of a job, here two, and watches them from outside.
# The job is run twice. In the second run a process is killed in the midst of a step, as
# the kernel does when memory runs out.

# %%
OPTIONS = [
    *("--data.paths", *data.paths, "--data.vocab-size", "300"),
    *(
        "--data.seq-len",
        "64",
        "--data.batch-size",
        "8",
        "--data.held-out-fraction",
        "0",
    ),
    *("--steps", "40", "--checkpoint-every", "10", "--optimizer.warmup-steps", "5"),
    *("--mesh.fsdp", "2", "--rules", "fsdp", "--scan-layers", "--dtype", "float32"),
    *("--supervise", "--supervise.processes", "2"),
]


def begin(name):
    """Start a supervised job."""
    command = [sys.executable, "-m", "jaxscale", "train", "llama_tiny"]
    directory = ["--output-dir", str(folder / name)]
    with (folder / f"{name}.txt").open("w") as log:
        return subprocess.Popen(
            [*command, *OPTIONS, *directory],
            stdout=log,
            stderr=log,
            env=os.environ | {"JAX_NUM_CPU_DEVICES": "1"},
        )


def kill_one(name, step):
    """Kill process 1 of a job once it has done a step."""
    path = folder / name / "events-1.jsonl"
    for _ in range(6000):
        events = supervision.read_events(path) if path.exists() else []
        if any(e["name"] == "done" and e["step"] >= step for e in events):
            started = next(e for e in events if e["name"] == "start")
            return os.kill(int(started["args"]["pid"]), signal.SIGKILL)
        time.sleep(0.02)
    raise TimeoutError((folder / f"{name}.txt").read_text())


start = time.perf_counter()
assert begin("unbroken").wait(300) == 0, (folder / "unbroken.txt").read_text()
job = begin("broken")
kill_one("broken", 15)
assert job.wait(300) == 0, (folder / "broken.txt").read_text()
print((folder / "broken.txt").read_text())
print(f"{time.perf_counter() - start:.0f} s for both")

# %% [markdown]
# The files that each process writes say what happened. Steps after the newest
# checkpoint are computed twice: the second time with the same bits.

# %%
runs = {name: observability.read_run(folder / name) for name in ("unbroken", "broken")}
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 3))
for name, run in runs.items():
    steps = run.ranks[0].steps
    for cycle in np.unique(steps.cycle):
        mine = steps.cycle == cycle
        left.plot(steps.step[mine], steps.loss[mine], label=f"{name}, start {cycle}")
        if name == "broken":
            right.plot(steps.done[mine] - run.begin, steps.step[mine], ".")
left.set(xlabel="step", ylabel="nats/token")
left.legend()
right.set(xlabel="seconds since the start of the broken run", ylabel="step")
plt.show()

for part, seconds in observability.goodput(runs["broken"]).seconds.items():
    print(f"{part:>12} {seconds:5.1f} s")
print(
    "the same and more:", observability.write_page(runs["broken"], folder / "run.html")
)

# %% [markdown]
# ## A layout for 1,024 GPUs
#
# The planner estimates time and memory of a step for every way in which GPUs can share
# it, and needs none of them.

# %%
plan = training.plan_layouts(
    models.preset("llama3_70b"), training.PlanConfig(gpus=1024)
)
print(f"{plan.num_fitting:,} layouts fit, {plan.num_too_large:,} are too large")
shown = {"the best": plan.best}
for stages in (4, 8, 16):
    shown[f"pipe {stages}"] = plan.fastest["pipe", stages]
figure, axis = plt.subplots(figsize=(10, 2.5))
for row, chosen in enumerate(shown.values()):
    begun = 0.0
    for number, (part, seconds) in enumerate(chosen.time.items()):
        color = plt.get_cmap("tab20")(number)
        label = part if row == 0 else None
        axis.barh(row, seconds, left=begun, color=color, label=label)
        begun += seconds
axis.set(
    yticks=range(len(shown)), yticklabels=shown, xlabel="seconds a step, estimated"
)
axis.invert_yaxis()
axis.legend(bbox_to_anchor=(1, 1), fontsize=8)
plt.show()
for name, chosen in shown.items():
    layout = chosen.layout
    print(
        f"{name:>8}: pipe {layout.pipe} x fsdp {layout.fsdp} x tensor {layout.tensor}, "
        f"MFU {chosen.mfu:.0%}, {chosen.bytes / 1e9:.0f} GB a GPU"
    )

# %% [markdown]
# ## What this showed
#
# The last cell checks it, so that a notebook that runs is a test that passed.

# %%
assert np.isclose(counted, formula) and np.isclose(counted, schedule.bubble)
assert np.allclose(one, eight, atol=1e-4), "the pipeline computes something else"
assert one[-1] < one[0] - 0.5, "training did not learn"


def written(name):
    """The losses by step."""
    return {record["step"]: record["loss"] for record in runs[name].metrics}


assert len(written("broken")) == 40
assert written("broken") == written("unbroken"), "the crash changed the losses"
assert [slow.rank for slow in found] == [SLOW], "the slow rank was not named"
again = runs["broken"].ranks[0].steps
assert set(again.cycle) == {1, 2}, "the job was started twice"
first, second = (
    dict(zip(again.step[mine], again.loss[mine], strict=True))
    for mine in (again.cycle == 1, again.cycle == 2)
)
twice = [step for step in first if step in second and np.isfinite(first[step])]
assert twice and all(first[step] == second[step] for step in twice)
assert plan.best.bytes < plan.limit
print("a pipeline ran, a straggler was found, a crash survived, a layout chosen")
