"""How long a server takes until it is ready, cold and warm.

``python -m benchmarks.workloads.serving_start`` writes a model with arbitrary weights
to a folder, as a download is there, and starts a server on it in new processes: cold,
without compiled programs, then warm, with those that the start before has left. Seconds
are from the start of Python; the files were just written, so the machine has them in
its memory. ``--whole`` waits until all programs are compiled.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


_LOOK_SECONDS = 0.1
_LONGEST = 600.0


def write_model(name: str, folder: str) -> None:
    """Write a model in bf16; most of the time goes to the disk."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx

    from benchmarks.workloads.serving_http import words
    from jaxscale import models

    config = models.preset(name)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    shapes = jax.eval_shape(lambda: models.Decoder(config, rngs=nnx.Rngs(0), **types))
    some = 0.02 * np.random.default_rng(0).standard_normal(2**20, np.float32)
    some = some.astype(jnp.bfloat16)
    model = jax.tree.map(lambda x: jnp.asarray(np.resize(some, x.shape)), shapes)
    models.save(model, folder, tokenizer=words(config.vocab_size))


def serve(folder: str, programs: str) -> None:
    """Serve the model of a folder, as ``jaxscale serve`` does, and print the port."""
    from jaxscale.inference import EngineConfig
    from jaxscale.inference.engine.device_share import reserve_for_serving
    from jaxscale.inference.server import ServerConfig
    from jaxscale.inference.server import serve as serve_http
    from jaxscale.inference.server.backend import Loading
    from jaxscale.inference.server.load import served

    reserve_for_serving()
    engine = EngineConfig(program_cache=programs)

    def load(progress: Any) -> Any:
        return served(folder, engine=engine, progress=progress)

    def bound(port: int) -> None:
        print(port, flush=True)

    serve_http(Loading(load), ServerConfig(), port=0, on_bound=bound, own_process=True)
    os._exit(0)  # what still compiles is not waited for


def start(folder: str, programs: str, *, whole: bool) -> dict[str, float]:
    """Start a server and end it; seconds until it says something new."""
    job = [sys.executable, "-m", __spec__.name, "--serve", folder, programs]
    begun, seen = time.perf_counter(), {}
    with subprocess.Popen(job, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        try:
            while not seen.get("whole" if whole else "ready"):
                now = time.perf_counter() - begun
                if child.poll() is not None or now > _LONGEST:
                    raise RuntimeError(f"no server after {now:.0f} s")
                for name in _news(port):
                    seen.setdefault(name, time.perf_counter() - begun)
                time.sleep(_LOOK_SECONDS)
        finally:
            child.send_signal(signal.SIGTERM)
    return seen


def _news(port: int) -> list[str]:
    """What a server has, by now."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready") as answer:
            state = json.load(answer)
    except urllib.error.HTTPError as error:
        state = json.load(error)
    except OSError:
        return []
    compiled, programs = state.get("compiled", 0), state.get("programs", 0)
    ready = state["status"] == "ready"
    return ["answers"] + [
        name
        for name, there in {
            "weights": ready or state.get("weights") == "loaded",
            "first programs": ready or 0 < programs == compiled,
            "ready": ready,
            "whole": ready and 0 < programs == compiled,
        }.items()
        if there
    ]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama3_8b")
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--warm", type=int, default=1, help="warm starts")
    parser.add_argument("--folder", help="keeps model and programs")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
    if options.write:
        write_model(options.model, options.write)
        return
    with contextlib.ExitStack() as stack:
        made = options.folder or stack.enter_context(tempfile.TemporaryDirectory())
        model, programs = Path(made, "model"), Path(made, "programs")
        if not (model / "config.json").is_file():
            begun = time.perf_counter()
            job = [sys.executable, "-m", __spec__.name, "--model", options.model]
            env = {**os.environ, "JAX_PLATFORMS": "cpu"}
            subprocess.run([*job, "--write", str(model)], env=env, check=True)
            print(f"written in {time.perf_counter() - begun:.0f} s", flush=True)
        for kind in ["cold", *["warm"] * options.warm]:
            seen = start(str(model), str(programs), whole=options.whole)
            parts = ", ".join(f"{name} {s:.1f}" for name, s in seen.items())
            print(f"{kind}: {parts} s", flush=True)


if __name__ == "__main__":
    main()
