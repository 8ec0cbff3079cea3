"""How long a server takes until it is ready, cold and warm.

``python -m benchmarks.workloads.serving_start`` writes a model with arbitrary weights
to a folder, as a download is there, and starts a server on it in new processes: cold,
without compiled programs, then warm, with those that the start before has left. Seconds
are from the start of Python; the files were just written, so the machine has them in
its memory. Once it is ready, it answers many requests at once. ``--whole`` waits until
all programs are compiled.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


_LOOK_SECONDS = 0.1
_LONGEST = 600.0
_TIMEOUT = 60.0
_REQUESTS, _PROMPT, _TOKENS = 256, 64, 32


def write_model(name: str, folder: str) -> None:
    """Write a model in bf16, all of whose blocks are alike."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import safetensors.numpy
    from flax import nnx

    from benchmarks.workloads.serving_http import words
    from jaxscale import models
    from jaxscale.models.families.registry import config_to_hf

    config = models.preset(name)
    single = dataclasses.replace(config, num_layers=1)
    types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
    shapes = jax.eval_shape(lambda: models.Decoder(single, rngs=nnx.Rngs(0), **types))
    some = 0.02 * np.random.default_rng(0).standard_normal(2**20, np.float32)
    some = some.astype(jnp.bfloat16)
    model = jax.tree.map(lambda x: jnp.asarray(np.resize(some, x.shape)), shapes)
    tokenizer = words(config.vocab_size)
    models.save(model, folder, tokenizer=tokenizer, max_shard_bytes=2**40)
    whole = Path(folder, "model.safetensors")
    arrays = safetensors.numpy.load_file(whole)
    block = {key: arrays.pop(key) for key in list(arrays) if ".0." in key}
    parts = [arrays] + [
        {key.replace(".0.", f".{layer}.", 1): x for key, x in block.items()}
        for layer in range(config.num_layers)
    ]
    files = [f"model-{i:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(_write, [Path(folder, file) for file in files], parts))
    whole.unlink()
    names = {key: file for file, part in zip(files, parts, strict=True) for key in part}
    index = {"metadata": {}, "weight_map": names}
    Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
    file = Path(folder, "config.json")
    of_all = {**json.loads(file.read_text()), **config_to_hf(config)}
    file.write_text(json.dumps(of_all))


def _write(file: Path, arrays: dict[str, Any]) -> None:
    """Write a file of safetensors, without Python's lock."""
    header, end = {}, 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        about = {"dtype": "BF16", "shape": array.shape, "data_offsets": [begin, end]}
        header[name] = about
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as safetensors aligns it
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            out.write(array.view("u1").reshape(-1).data)


def serve(folder: str, programs: str) -> None:
    """Serve the model of a folder, as ``jaxscale serve`` does, and print the port."""
    from jaxscale.inference import EngineConfig
    from jaxscale.inference.engine.device_share import reserve_for_serving
    from jaxscale.inference.server import ServerConfig
    from jaxscale.inference.server import serve as serve_http
    from jaxscale.inference.server.backend import Loading
    from jaxscale.inference.server.load import served

    threading.Thread(target=_end_with_parent, daemon=True).start()
    reserve_for_serving()
    engine = EngineConfig(program_cache=programs)

    def load(progress: Any) -> Any:
        texts = lambda fields: loading.on_texts(fields)  # noqa: E731
        return served(folder, engine=engine, progress=progress, on_texts=texts)

    def bound(port: int) -> None:
        print(port, flush=True)

    code = 1
    try:
        loading = Loading(load)
        serve_http(loading, ServerConfig(), port=0, on_bound=bound, own_process=True)
        code = 0
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # what still compiles is not waited for


def _end_with_parent() -> None:
    """Its end closes standard input, however it ends."""
    sys.stdin.read()
    os._exit(1)


def start(folder: str, programs: str, *, whole: bool) -> dict[str, float]:
    """Start a server and end it; seconds until it says something new."""
    job = [sys.executable, "-m", __spec__.name, "--serve", folder, programs]
    begun, seen = time.perf_counter(), {}
    pipe = subprocess.PIPE
    with subprocess.Popen(job, stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        port = child.stdout.readline()
        try:
            while not seen.get("whole" if whole else "ready"):
                now = time.perf_counter() - begun
                if not port or child.poll() is not None or now > _LONGEST:
                    raise RuntimeError(f"no server after {now:.0f} s")
                for name in _news(int(port)):
                    seen.setdefault(name, time.perf_counter() - begun)
                time.sleep(_LOOK_SECONDS)
            _ask(int(port), 1)
            seen["first answer"] = time.perf_counter() - begun
            _ask(int(port), _REQUESTS)
            seen[f"{_REQUESTS} answers"] = time.perf_counter() - begun
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(_TIMEOUT)
            except subprocess.TimeoutExpired:
                child.kill()
    return seen


def _ask(port: int, count: int) -> None:
    """Send requests at once, each with a prompt of its own, and await the answers."""

    def ask(number: int) -> None:
        prompt = [(number * _PROMPT + i) % 200 for i in range(_PROMPT)]
        body = {"prompt": prompt, "max_tokens": _TOKENS, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps({"model": "model", "temperature": 0, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
            tokens = json.load(answer)["usage"]["completion_tokens"]
        if tokens != _TOKENS:
            raise RuntimeError(f"an answer of {tokens} tokens, expected {_TOKENS}")

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        list(pool.map(ask, range(count)))


def _news(port: int) -> list[str]:
    """What a server has, by now."""
    try:
        address = f"http://127.0.0.1:{port}/ready"
        with urllib.request.urlopen(address, timeout=_TIMEOUT) as answer:
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which ends the server
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
