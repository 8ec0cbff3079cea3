"""Compile training steps for H200s without a GPU.

The compiler is JAX's CUDA plugin, which needs neither GPU nor driver. It reports what a
run on these GPUs would get, except for XLA's autotuner, which does not run: memory, and
which collectives run where and how often.

It runs in a separate process, since XLA's flags are read once, and so that a
compilation that takes too long can be ended.
"""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import time
from typing import Any

import jax

from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.xla_flags import XLA_PRESETS
from jaxscale.training.assemble import abstract_step
from jaxscale.training.config import TrainConfig
from jaxscale.training.planning.hlo import Transfer, transfers
from jaxscale.training.run import from_dict, to_dict
from pallas_kernels.mosaic import H200, use_device


H200_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98
  device_memory_size: 150754820096 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  driver_version: "13.0.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 19 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")
_ANSWER = "jaxscale-compiled "


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """A compiled training step; sizes are per GPU, in bytes."""

    gpus: int
    """Number of GPUs that it is compiled for."""
    seconds: float
    """Compilation time, in seconds."""
    arguments: int
    """State and batch."""
    outputs: int
    """The state after the step, and metrics."""
    aliased: int
    """Outputs that alias arguments."""
    temporaries: int
    """Everything else at the peak."""
    collectives: tuple[Transfer, ...]
    """Collectives in program order."""

    @property
    def bytes(self) -> int:
        """Memory at the peak."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


def compile_step(
    config: TrainConfig,
    gpus: int,
    *,
    xla_flags: tuple[str, ...] = (),
    timeout: float = 900,
) -> CompiledStep:
    """Compile the training step of a decoder for a number of H200s.

    Raises:
        ImportError: JAX's CUDA plugin is not installed; the message says how to.
        TimeoutError: it takes longer.
        ValueError: the settings do not fit the GPUs.
        RuntimeError: the step does not compile, with the traceback.
    """
    config.check_mesh(config.mesh.sizes(gpus))
    check_compiler()
    flags = ["--xla_gpu_autotune_level=0"]
    flags += [flag for preset in xla_flags for flag in XLA_PRESETS[preset]]
    settings = {
        "XLA_FLAGS": " ".join(flags),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    request = json.dumps({"config": to_dict(config), "gpus": gpus})
    try:
        child = subprocess.run(
            [sys.executable, "-m", "jaxscale.training.planning.compiled"],
            env=os.environ | settings,
            input=request,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"the step for {gpus} GPUs did not compile within {timeout:g} s; allow "
            "more, or plan with remat, which compiles one layer instead of all"
        ) from None
    lines = [x for x in child.stdout.splitlines() if x.startswith(_ANSWER)]
    if child.returncode or not lines:
        raise RuntimeError(
            f"the step for {gpus} GPUs does not compile (exit code "
            f"{child.returncode}):\n{child.stderr[-4000:]}"
        )
    answer = json.loads(lines[-1].removeprefix(_ANSWER))
    found = tuple(Transfer.from_json(x) for x in answer.pop("collectives"))
    return CompiledStep(**answer, collectives=found)


def check_compiler() -> None:
    """Raise if JAX's CUDA plugin is not installed.

    Raises:
        ImportError: says what to install.
    """
    if not any(_has(name) for name in _PLUGINS):
        version = jax.__version__
        raise ImportError(
            "compiling for H200s needs JAX's CUDA plugin, though no GPU, and it is not "
            f"installed; pip install --no-deps --target cuda_plugin jax-cuda13-pjrt=="
            f"{version} jax-cuda13-plugin=={version}, which are for Linux, and put the "
            "directory cuda_plugin into PYTHONPATH"
        )


def _has(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # there is no `jax_plugins` at all
        return False


def target_devices(count: int, *, host_gpus: int | None = None) -> list[Any]:
    """Abstract H200s that programs can be compiled for.

    Args:
        count: Number of H200s.
        host_gpus: GPUs per host; None is one host for all.
    """
    from jax.experimental import topologies

    jax.devices()  # discovers the plugin
    host = host_gpus if host_gpus and count % host_gpus == 0 else count
    topology = topologies.get_topology_desc(
        platform="cuda",
        target_config=H200_TARGET,
        topology=f"1x{count // host}x{host}",
    )
    return topology.devices


def donate_in_place(module: Any) -> None:
    """Put donated arguments into the memory kind of the results that alias them.

    Abstract devices have no memory kinds, so the shardings of arguments cannot name
    one. Results that a program moves to the host reveal it.
    """
    from jax.extend.mlir import ir

    with module.context:
        functions = {op.attributes["sym_name"].value: op for op in module.body}
        main = functions["main"].attributes
        kinds = [x.get("mhlo.memory_kind") for x in map(_entries, main["res_attrs"])]
        arguments = []
        for entries in map(_entries, main["arg_attrs"]):
            result = entries.get("tf.aliasing_output")
            if result is not None and kinds[result.value] is not None:
                entries["mhlo.memory_kind"] = kinds[result.value]
            arguments.append(ir.DictAttr.get(entries))
        main["arg_attrs"] = ir.ArrayAttr.get(arguments)


def _entries(dictionary: Any) -> dict[str, Any]:
    return {entry.name: entry.attr for entry in dictionary}


def _compile(config: TrainConfig, gpus: int) -> dict[str, Any]:
    """In the compiling process: the fields of a `CompiledStep`, as JSON."""
    begin = time.monotonic()
    mesh = make_mesh(config.mesh, target_devices(gpus))
    step, arguments = abstract_step(config, mesh)
    with use_device(H200), jax.set_mesh(mesh):
        lowered = step.lower(*arguments)
    donate_in_place(lowered.compiler_ir())
    compiled = lowered.compile()
    memory = compiled.memory_analysis()
    found = transfers(compiled.as_text(), mesh.shape)
    return {
        "gpus": gpus,
        "seconds": time.monotonic() - begin,
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "collectives": [transfer.to_json() for transfer in found],
    }


def _serve() -> None:
    """Serve the request on standard input."""
    request = json.load(sys.stdin)
    config = from_dict(TrainConfig, request["config"])
    answer = _compile(config, request["gpus"])
    print(_ANSWER + json.dumps(answer))


if __name__ == "__main__":
    _serve()
