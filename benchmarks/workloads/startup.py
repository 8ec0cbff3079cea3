"""What a server compiles before its first request, and how long that takes.

``python -m benchmarks.workloads.startup`` lists the programs of an engine in bf16 with
default sizes, with seconds for each: tracing, lowering (Python, one program at a time
whatever the machine has) and compiling (XLA, in parallel). It does so twice, in new
processes: cold, and warm with the programs of the first run in a folder.

With a GPU that is the start as it is, but for reading weights. Without one programs are
compiled for an H200 by the plugin that `tests.compiled` describes, one after the other,
so that the seconds of each are its own, and without XLA's trials of matmuls, which
need a GPU; and warm, programs are found and read but cannot be loaded. ``cpu`` is what
one after the other takes where the machine has nothing else to do.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import timing


ROOT = Path(__file__).parents[2]
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
COLUMNS = (*PHASES.values(), "all", "cpu")


def abstract_runner(name: str, layers: int | None, devices: list[Any]) -> Any:
    """The engine's programs for a model without weights, and the pages of 16 GiB."""
    import jax
    import jax.numpy as jnp
    from flax import nnx
    from jax.sharding import SingleDeviceSharding

    from jaxscale.inference import EngineConfig
    from jaxscale.inference.engine.runner import Runner
    from jaxscale.inference.engine.scheduling.scheduler_config import bucket_sizes
    from jaxscale.models import Decoder, preset

    config = preset(name)
    config = dataclasses.replace(config, num_layers=layers or config.num_layers)
    here = SingleDeviceSharding(devices[0])

    def make() -> Decoder:
        types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        return Decoder(config, rngs=nnx.Rngs(0), **types).for_inference()

    model = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
        jax.eval_shape(make),
    )
    options = EngineConfig(max_len=8192, num_pages=2048)
    sizes = options.scheduler(config, (), on_cpu=False)
    chunks = options.chunks(on_cpu=False)
    mixed = options.mixed(bucket_sizes(sizes, None), on_cpu=False)
    return Runner(model, sizes, prefill_tokens=chunks, mixed=mixed)


def start(runner: Any, folder: str, workers: int, loadable: bool) -> None:
    """Compile or find all programs, and print what it took."""
    import jax

    from jaxscale.inference.engine.program_cache import ProgramCache
    from pallas_kernels import mosaic

    local = threading.local()

    def listen(event: str, seconds: float, **_: Any) -> None:
        if event in PHASES and hasattr(local, "spent"):
            local.spent[PHASES[event]] += seconds

    jax.monitoring.register_event_duration_secs_listener(listen)
    cache = ProgramCache(folder, runner.devices)
    warm = any(Path(folder).iterdir())

    def one(item: Any) -> tuple[Any, dict[str, float]]:
        key, fn, shapes = item
        local.spent, begin = collections.Counter(), time.monotonic()
        cpu = time.process_time()
        on = contextlib.nullcontext() if loadable else mosaic.use_device(mosaic.H200)
        with on:
            traced = fn.trace(*shapes)
            if warm and not loadable:
                (Path(folder) / cache.name(traced)).read_bytes()
            else:
                cache.compile(traced)
        local.spent["cpu"] = time.process_time() - cpu
        local.spent["all"] = time.monotonic() - begin
        return key, local.spent

    begin = time.monotonic()
    print(f"{'seconds of':34}" + "".join(f"{name:>8}" for name in COLUMNS))
    total = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        for key, spent in pool.map(one, runner.programs()):
            total.update(spent, programs=1)
            print(_row(" ".join(map(str, key)), spent), flush=True)
    wall = time.monotonic() - begin
    size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 2**20
    print(_row(f"{total['programs']} programs", total))
    print(
        f"{'warm' if warm else 'cold'}: {wall:.1f} s with {workers} at a time; "
        f"{size:.0f} MiB in the folder"
    )


def _row(name: str, spent: Any) -> str:
    return f"{name:34}" + "".join(f"{spent[column]:8.2f}" for column in COLUMNS)


def child(options: argparse.Namespace) -> None:
    """One start, in a process of its own."""
    import jax

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if timing.on_gpu():
        workers = os.cpu_count() or 1
        runner = abstract_runner(options.model, options.layers, jax.devices())
        start(runner, options.folder, workers, loadable=True)
        return
    from jaxscale.training.planning.compiled import target_devices

    runner = abstract_runner(options.model, options.layers, target_devices(1))
    start(runner, options.folder, 1, loadable=False)


def main() -> int:
    """Start twice."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="llama3_1_8b", help="a preset")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder is not None:
        child(options)
        return 0
    environ = dict(os.environ)
    if not timing.on_gpu():
        environ |= {
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / ".cuda")]),
            "XLA_FLAGS": "--xla_gpu_autotune_level=0",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.workloads.startup", *sys.argv[1:]]
        for _ in ("cold", "warm"):
            subprocess.run([*command, "--folder", folder], env=environ, check=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
