"""A real run of four processes of which one is slow, and what its supervisor says.

    python -m tests.training.slow_rank [none | host | device | stopped]
    JAX_PLATFORMS=cuda python -m tests.training.slow_rank [none | host | shared]

``host`` sleeps between steps of rank 1; ``device`` stops the process of rank 1 for a
half of the time, so that whatever it computes takes twice as long; ``stopped`` for 70%
of it, in tenths of a second. ``shared``, on two GPUs, starts another program on the GPU
of rank 1. All ranks meet in the collectives of each step, and so end it together.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxscale.supervision import current


ON_GPUS = os.environ.get("JAX_PLATFORMS") == "cuda"
STEPS, SLOW, PROCESSES = (200, 1, 2) if ON_GPUS else (120, 1, 4)
STOPS = {"device": (0.005, 0.005), "stopped": (0.07, 0.03)}


def run(kind):
    """Run it supervised; what the driver said, and its directory."""
    from tests.training.faults import Job

    job = Job(kind, steps=STEPS, module="training.slow_rank", options=OPTIONS)
    job.wait(400)
    return job


OPTIONS = ["--processes", str(PROCESSES), "--deadlines.step", "60"]


def rank(directory, steps, kind):
    """One of the processes."""
    current()
    import jax

    if not ON_GPUS:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
    from jaxscale.sharding import create, initialize, make_mesh
    from jaxscale.training import fit, packed_batches
    from tests.training import toy
    from tests.training.faulty_rank import settings, text

    config = settings(directory, int(steps))
    config = dataclasses.replace(config, profile_every=3)
    mine = initialize().process_id == SLOW
    batches, _ = packed_batches(config, text())
    rules = config.axis_rules
    watcher = neighbor() if mine and kind == "shared" else None

    def hook(step, state, metrics):
        nonlocal watcher
        if mine and kind == "host":
            time.sleep(0.4)  # longer than the device takes
        if mine and kind in STOPS and watcher is None and step > 3:
            code = [sys.executable, "-m", "tests.training.slow_rank", "stop", kind]
            watcher = subprocess.Popen([*code, str(os.getpid())])

    fit(
        config,
        train_data=batches,
        model=create(lambda: toy.Toy(rules=rules), make_mesh(config.mesh), rules),
        loss=heavy_loss,
        hooks=[hook],
        writers=[],
    )
    if watcher is not None:
        watcher.kill()


def heavy_loss(model, batch):
    """The loss of the next token, and some work for each process."""
    import jax
    import jax.numpy as jnp

    from jaxscale.training import next_token_loss

    loss, sums = next_token_loss()(model, batch)
    size, times = (16384, 4) if ON_GPUS else (192, 200)
    x = jnp.full((size, size), 1e-3 * batch.tokens[0, 0])
    x = x.astype(jnp.bfloat16 if ON_GPUS else jnp.float32)
    x = jax.lax.fori_loop(0, times, lambda _, x: jnp.tanh(x @ x), x)
    # In a number that is read, or the compiler leaves it out.
    return loss, sums._replace(nll=sums.nll + 0 * jax.lax.stop_gradient(x.sum()))


def neighbor():
    """Another program on the same GPU, once it computes."""
    code = [sys.executable, "-m", "tests.training.slow_rank", "share", str(os.getpid())]
    # It is no process of the job.
    alone = {n: x for n, x in os.environ.items() if n.partition("_")[0] != "JAX"}
    environment = alone | {"JAX_PLATFORMS": "cuda"}
    other = subprocess.Popen(code, stdout=subprocess.PIPE, env=environment)
    assert other.stdout is not None
    other.stdout.readline()
    return other


def share(process):
    """Multiply on a GPU without a pause, until a process has gone."""
    import jax
    import jax.numpy as jnp

    multiply = jax.jit(lambda x: jnp.tanh(x @ x))
    x = multiply(jnp.full((8192, 8192), 1e-3, jnp.bfloat16)).block_until_ready()
    print("ready", flush=True)
    while os.getppid() == process:
        for _ in range(20):
            x = multiply(x)
        x.block_until_ready()


def stop(kind, process):
    """Let a process run for a part of the time, until it has gone."""
    stopped, running = STOPS[kind]
    while os.getppid() == process:
        os.kill(process, signal.SIGSTOP)
        time.sleep(stopped)
        os.kill(process, signal.SIGCONT)
        time.sleep(running)


def main(kinds):
    from jaxscale.observability import read_run

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))
    for kind in kinds:
        job = run(kind)
        print(
            f"--- {kind}: rank {SLOW} of {PROCESSES}" if kind != "none" else "--- none"
        )
        print("\n".join(job.said), flush=True)
        for known in read_run(job.out).ranks:
            profiles = [e.args for e in known.events if e.name == "profile"][2:]
            middle = {
                name: sorted(x[name] for x in profiles)[len(profiles) // 2]
                for name in ("seconds", "computing", "waiting")
            }
            shown = ", ".join(f"{k} {1e3 * v:.0f} ms" for k, v in middle.items())
            print(
                f"rank {known.number}, median of {len(profiles)} steps: {shown}",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["stop"]:
        stop(sys.argv[2], int(sys.argv[3]))
    elif sys.argv[1:2] == ["share"]:
        share(int(sys.argv[2]))
    elif len(sys.argv) == 4 and Path(sys.argv[1]).is_dir():
        rank(*sys.argv[1:])
    else:
        main(sys.argv[1:] or ["none", "host", "device", "stopped"])
