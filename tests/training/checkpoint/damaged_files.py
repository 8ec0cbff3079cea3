"""Every file of a checkpoint damaged in turn in four ways, before a real `fit`.

    python -m tests.training.checkpoint.damaged_files

The run has checkpoints of the steps 10 and 20, and is started again up to 24. Printed
are seconds until damage was told, until a step was done again, and steps lost.
"""

import logging
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jax

from jaxscale.sharding import create, make_mesh
from jaxscale.training import Writer, fit, packed_batches
from tests.training import toy
from tests.training.faulty_rank import poisoned_loss, settings, text


STEPS = 24


class Losses(Writer):
    """Of each step, and when the first was written."""

    def __init__(self):
        self.by_step, self.first = {}, None

    def write(self, record):
        self.first = self.first or time.time()
        self.by_step[record["step"]] = record["loss"]


class Said(logging.Handler):
    """Keeps what was logged, with its time."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def run(out):
    config = settings(str(out), STEPS)
    data, _ = packed_batches(config, text())
    losses, rules = Losses(), config.axis_rules
    fit(
        config,
        train_data=data,
        model=create(lambda: toy.Toy(rules=rules), make_mesh(config.mesh), rules),
        loss=poisoned_loss,
        writers=[losses],
    )
    return losses


def damaged(raw, how, rng):
    """The bytes of a file after an accident; None if it is gone."""
    if how == "flipped":
        at = rng.randrange(len(raw))
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    return {"cut off": raw[: len(raw) // 2], "empty": b"", "gone": None}[how]


def main():
    """Run all; whether every trace was that of the unbroken run."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    root = Path(tempfile.mkdtemp(prefix="damaged-"))
    jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    said, log = Said(), logging.getLogger("jaxscale.training")
    log.addHandler(said)
    log.propagate = False
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # Orbax's, of many lines
    wanted, rng, well = run(root / "unbroken").by_step, random.Random(0), True
    saved = root / "unbroken" / "checkpoints"
    shutil.rmtree(saved / str(STEPS))
    files = [f for f in (saved / "20").rglob("*") if f.is_file() and f.stat().st_size]
    for how in ("flipped", "cut off", "empty", "gone"):
        told, running, lost = [], [], []
        for file in files:
            out = root / "run"
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(saved, out / "checkpoints")
            place = out / "checkpoints" / file.relative_to(saved)
            content = damaged(place.read_bytes(), how, rng)
            place.unlink()
            if content is not None:
                place.write_bytes(content)
            said.records.clear()
            begun = time.time()
            losses = run(out)
            lines = [r for r in said.records if "is damaged and not" in r.getMessage()]
            first = min(losses.by_step)
            equal = all(wanted[s] == loss for s, loss in losses.by_step.items())
            good = equal and max(losses.by_step) == STEPS
            good = good and (first, len(lines)) in ((21, 0), (11, 1))
            if not good:
                print(f"{how} {file.relative_to(saved)}: WRONG, {lines}, from {first}")
            well = well and good
            told += [line.created - begun for line in lines]
            running.append(losses.first - begun)
            lost.append(21 - first)
        print(
            f"each of {len(files)} files {how:8}: {len(told):2} told after "
            f"{max(told, default=0):.1f} s at most, others do not matter; running "
            f"after {max(running):.1f} s at most, steps lost {set(lost)}; losses "
            f"equal: {well}",
            flush=True,
        )
    return well


if __name__ == "__main__":
    sys.exit(not main())
