"""A rank of a real run, of a toy model, that breaks when told; see faults.py.

    python -m tests.training.faulty_rank DIRECTORY STEPS [FAULT ...]

A fault is ``kind:rank:step``; it happens once, or with ``kind!`` at every start.
"""

import dataclasses
import os
import sys
import threading
import time
from pathlib import Path

from jaxscale.supervision import current


SPOILED = ("nan", "spike", "leave-out")
WRONG = ("wrong", "tied")
SPIKE, POISON = 30, 31  # tokens that multiply the loss by 20, or make it NaN


def main(directory, steps, *faults):
    current()  # before jax is imported, which takes seconds
    import jax

    jax.config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or "cpu")
    # With two devices each, most replicas are right.
    wrong = any(fault.startswith("wrong") for fault in faults)
    jax.config.update("jax_num_cpu_devices", 2 if wrong else 1)
    from jaxscale.sharding import create, initialize, make_mesh
    from jaxscale.training import JsonlWriter, fit, packed_batches
    from tests.training import toy

    out, config = Path(directory), settings(directory, int(steps))
    if any(fault.startswith(WRONG) for fault in faults):
        config = with_replicas(config)
    strike(faults, out, int(os.environ.get("JAX_PROCESS_ID", 0)), 0)
    rank = initialize().process_id
    data, _ = packed_batches(config, text())
    rules = config.axis_rules

    def hook(step, state, metrics):
        time.sleep(0.05)  # a step as long as one that is worth supervising
        return strike(faults, out, rank, step, state)

    fit(
        config,
        train_data=Poisoned(data, out, faults),
        model=create(lambda: toy.Toy(rules=rules), make_mesh(config.mesh), rules),
        loss=poisoned_loss,
        hooks=[hook],
        writers=[JsonlWriter(out / "metrics.jsonl")] if rank == 0 else [],
    )


def settings(directory, steps):
    from jaxscale.sharding import MeshConfig
    from jaxscale.training import DataConfig, OptimizerConfig, TrainConfig
    from tests.training import toy

    return TrainConfig(
        model=toy.Toy.config,
        data=DataConfig(
            vocab_size=toy.VOCAB, seq_len=8, batch_size=8, max_sequences=4, prefetch=0
        ),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
        mesh=MeshConfig(fsdp=-1),
        rules="fsdp",
        steps=steps,
        checkpoint_every=10,
        output_dir=directory,
    )


def with_replicas(config):
    """The same where each device holds all parameters, and they are compared."""
    from jaxscale.sharding import MeshConfig

    mesh, every = MeshConfig(data=-1), 4
    return dataclasses.replace(
        config, mesh=mesh, rules="dp", check_replicas_every=every
    )


def text():
    from jaxscale.models import Tokenizer
    from jaxscale.training import TextData, TokenCorpus

    documents = [[(3 * i + j) % 29 + 1 for j in range(5 + i % 9)] for i in range(60)]
    return TextData(
        tokenizer=Tokenizer.train(["abc"], 300),
        train=TokenCorpus.from_ids(documents),
        held_out=None,
    )


def poisoned_loss(model, batch):
    import jax.numpy as jnp

    from jaxscale.training import next_token_loss

    loss, sums = next_token_loss()(model, batch)
    poison = jnp.where((batch.tokens == POISON).any(), jnp.nan, 1.0)
    poison = jnp.where((batch.tokens == SPIKE).any(), 20.0, poison)
    return loss * poison, sums._replace(nll=sums.nll * poison)


def strike(faults, out, rank, step, state=None):
    """Break, if it is this rank's turn; or return a state that is wrong."""
    from tests.supervision.fake_rank import break_

    for fault in faults:
        kind, who, when = fault.split(":")
        if (int(who), int(when)) != (rank, step) or kind.startswith(SPOILED):
            continue
        if kind == "kill":
            await_done(out, step - 1)
        if first(out, fault):
            if kind.startswith(WRONG):
                return spoiled(state)
            if kind == "save":  # in the midst of the checkpoint after this step
                threading.Thread(target=kill_in_save, args=(out, step)).start()
            elif kind == "unwritable":  # what was a directory is a file
                (out / "checkpoints").rename(out / "checkpoints.away")
                (out / "checkpoints").touch()
            else:
                break_(kind.strip("!"))
    return None


def spoiled(state):
    """`state` with one element a little larger on the last device of this process."""
    import jax

    from tests.training.checkpoint.test_digest import broken_on

    leaves, structure = jax.tree.flatten(state)
    i = max(range(len(leaves)), key=lambda i: leaves[i].ndim)
    leaves[i] = broken_on(leaves[i], jax.local_devices()[-1].id)
    return jax.tree.unflatten(structure, leaves)


def await_done(out, step, seconds=120.0):
    """Let rank 0 say that it is done with a step, which it does a little later."""
    from jaxscale.supervision.events import read_events

    file, deadline = out / "events-0.jsonl", time.monotonic() + seconds
    while time.monotonic() < deadline:
        if any(e["name"] == "done" and e["step"] == step for e in read_events(file)):
            return
        time.sleep(0.01)


def first(out, fault):
    """Whether a fault happens now, and when, for the record."""
    mark = out / f"struck-{fault}"
    if mark.exists() and "!" not in fault:
        return False
    mark.touch()
    if not (out / "struck").exists():
        (out / "struck").write_text(str(time.time()))
    return True


def kill_in_save(out, step):
    from tests.supervision.fake_rank import break_

    while not list((out / "checkpoints").glob(f"{step}.*tmp*")):
        time.sleep(0.001)
    (out / "struck").write_text(str(time.time()))
    break_("kill")


class Poisoned:
    """Batches, of which the faults ``nan`` and ``spike`` spoil one for all ranks."""

    def __init__(self, data, out, faults):
        self._data, self._out = data, out
        left_out = [f for f in faults if f.startswith("leave-out")]
        self._left_out = int(left_out[0].split(":")[2]) if left_out else 0
        self._faults = [f for f in faults if f.startswith(("nan", "spike"))]

    def __iter__(self):
        return Iterator(iter(self._data), self._out, self._faults, self._left_out)


class Iterator:
    def __init__(self, batches, out, faults, left_out):
        self._batches, self._out, self._faults = batches, out, faults
        self._step, self._left_out = 0, left_out

    def __iter__(self):
        return self

    def __next__(self):
        batch = next(self._batches)
        self._step += 1
        if self._step == self._left_out:
            return next(self)
        for fault in self._faults:
            # Before the first start is over, so that all ranks do the same.
            again = self._out / f"again-{fault}"
            if int(fault.split(":")[2]) == self._step and (
                "!" in fault or not again.exists()
            ):
                first(self._out, fault)
                token = POISON if fault.startswith("nan") else SPIKE
                tokens = batch.tokens.at[0, 0].set(token)
                batch = dataclasses.replace(batch, tokens=tokens)
        return batch

    def get_state(self):
        return {"inner": self._batches.get_state(), "step": self._step}

    def set_state(self, state):
        self._batches.set_state(state["inner"])
        self._step = state["step"]
        for fault in self._faults:
            if (self._out / f"struck-{fault}").exists():
                (self._out / f"again-{fault}").touch()


if __name__ == "__main__":
    main(*sys.argv[1:])
