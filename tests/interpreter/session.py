"""The context manager: what it checks, patches and cleans up."""

import contextlib
import inspect
import itertools
import math
from collections.abc import Iterator

import jax
import numpy as np
from jax._src import callback as jax_callback
from jax._src import dispatch, effects
from jax._src.pallas.mosaic.interpret import thread_map as stock_thread_map
from jax._src.pallas.mosaic.interpret import utils as interpret_utils
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as callbacks
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as pallas_call
from jax._src.pallas.mosaic_gpu.interpret import jaxpr_interpret as stock
from jax._src.pallas.mosaic_gpu.interpret import race_detection_state as stock_races
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.interpreter.devices import (
    Barrier,
    SharedMemory,
    call_device_barrier,
    cluster_finished,
)
from tests.interpreter.host import (
    HOST_CALLBACK,
    HOST_JAX,
    HOST_LAX,
    HOST_NUMPY,
    device_info,
    interpret_pallas_call,
    thread_map,
)
from tests.interpreter.operations import (
    copy_gmem_to_smem,
    copy_smem_to_gmem,
    get_uninitialized_array,
    resolve_ref,
)
from tests.interpreter.races import RaceDetection
from tests.interpreter.run import RaceError, Run, set_current_run
from tests.interpreter.thread import Interpreter
from tests.interpreter.version import ADVICE, check_version


# What is patched or relied on, with the parameters that each must still have.
EXPECTED = {
    (stock, "resolve_ref"): "aval allocation_key_as_array transforms",
    (stock, "get_uninitialized_array"): "shape dtype memory_space uninitialized_memory",
    (stock, "_member_inner_aval"): "member",
    (stock, "union_members"): "aval",
    (stock.JaxprInterpreter, "interpret"): "self jaxpr token args",
    (
        stock.JaxprInterpreter,
        "_interpret_inline_mgpu_p",
    ): "self eqn token get_invals",
    (stock.JaxprInterpreter, "_interpret_wgmma_ref_p"): "self eqn token get_invals",
    (
        stock.JaxprInterpreter,
        "_interpret_wgmma_accumulator_deref_p",
    ): "self eqn token get_invals",
    (callbacks, "copy_gmem_to_smem"): (
        "token mesh_location thread src_allocation_key_as_array src_transforms "
        "dst_allocation_key_as_array dst_transforms barrier_allocation_key_as_array "
        "source_info"
    ),
    (callbacks, "copy_smem_to_gmem"): (
        "token mesh_location thread src_allocation_key_as_array src_transforms "
        "dst_allocation_key_as_array dst_transforms predicate source_info "
        "commit_group reduction_op"
    ),
    (callbacks, "cluster_finished"): "token",
    (callbacks, "call_update_clocks_for_device_barrier"): "token device",
    (callbacks, "_clear_shared_memory"): "",
    (memory.GPUSharedMemory, "reset_per_cluster_state"): "self",
    (memory.GPUSharedMemory, "set_failed"): "self exception failed_thread top_level",
    (memory.Barrier, "wait"): "self thread logging_info",
    **{
        (stock_races.GPURaceDetectionState, f"check_{kind}"): (
            "self thread clock buffer_key rnge source_info"
        )
        for kind in ("read", "write")
    },
    (stock_races.GPURaceDetectionState, "_check_ref_union"): (
        "self thread clock buffer_key is_write source_info"
    ),
    (memory, "_to_int"): "x",
    (
        jax_callback,
        "io_callback_impl",
    ): "args result_avals callback sharding ordered",
}


def check_jax() -> None:
    """Raise unless jax has every private name that is patched, as it was."""
    check_version()
    for (owner, name), parameters in EXPECTED.items():
        where = f"{owner.__name__}.{name}"
        if not hasattr(owner, name):
            raise RuntimeError(f"{where} is gone" + ADVICE)
        found = " ".join(inspect.signature(getattr(owner, name)).parameters)
        if found != parameters:
            raise RuntimeError(
                f"{where} takes ({found}), expected ({parameters})" + ADVICE
            )


@contextlib.contextmanager
def interpret_mosaic_gpu(
    *,
    detect_races: bool = False,
    allow_races: bool = False,
    concurrent_blocks: bool = False,
    timeout: float = 300.0,
) -> Iterator[Run]:
    """Interpret every Mosaic GPU kernel traced in the block, on CPU devices.

    Args:
        detect_races: Follow happens-before with vector clocks, print unordered accesses
            and raise on leaving if there were any. Slower by about a third.
        allow_races: Do not raise; look at ``races_found`` instead.
        concurrent_blocks: Run all blocks of the grid at once, as a GPU with enough
            multiprocessors does. One host thread per warpgroup of the whole grid.
        timeout: Seconds that any single wait in a kernel may last.

    Yields:
        The :class:`Run`.

    Raises:
        RaceError: On leaving, if races were found and are not allowed.
        TimeoutError: If a barrier, a semaphore or another device kept a wait waiting.
        Exception: Whatever first failed in a kernel, with its own type.
    """
    check_jax()
    params = plgpu.InterpretGPUParams(
        detect_races=detect_races,
        # More than the default, because two copies that share one look ordered. The
        # parameters are part of jit's key, so the modes must differ in them.
        num_tma_threads_per_device=33 if concurrent_blocks else 32,
    )
    run = Run(timeout, concurrent_blocks)
    set_current_run(run)
    try:
        with (
            _patches(),
            plgpu.force_gpu_interpret_mode(params),
            jax.default_device(jax.devices("cpu")[0]),
        ):
            try:
                yield run
                jax.effects_barrier()
            except Exception as error:
                if run.failure is not None:
                    raise run.failure from error
                raise
        if run.races_found and not allow_races:
            raise RaceError("races found (printed above); see allow_races")
    finally:
        with contextlib.suppress(Exception):
            jax.effects_barrier()
        # A failed kernel leaves its error in the tokens of ordered effects.
        dispatch.runtime_tokens.clear()
        callbacks.reset_gpu_interpret_mode_state()
        set_current_run(None)


@contextlib.contextmanager
def _patches() -> Iterator[None]:
    replaced = {
        (stock, "JaxprInterpreter"): Interpreter,
        (stock, "resolve_ref"): resolve_ref,
        (stock, "get_uninitialized_array"): get_uninitialized_array,
        (memory, "GPUSharedMemory"): SharedMemory,
        (memory, "Barrier"): Barrier,
        (callbacks, "GPURaceDetectionState"): RaceDetection,
        (memory, "_to_int"): int,
        (callbacks, "copy_gmem_to_smem"): copy_gmem_to_smem,
        (callbacks, "copy_smem_to_gmem"): copy_smem_to_gmem,
        (callbacks, "cluster_finished"): cluster_finished,
        (callbacks, "call_update_clocks_for_device_barrier"): call_device_barrier,
        (pallas_call, "interpret_pallas_call"): interpret_pallas_call,
        (stock_thread_map, "thread_map"): thread_map,
        (stock, "DeviceInfo"): device_info,
        (stock, "lax"): HOST_LAX,
        (pallas_call, "jax"): HOST_JAX,
        **{
            (module, "callback"): HOST_CALLBACK
            for module in (stock, callbacks, pallas_call)
        },
        **{
            (module, "jnp"): HOST_NUMPY
            for module in (stock, callbacks, pallas_call, interpret_utils)
        },
        # Kernels under `jax.checkpoint` and within rules of derivatives.
        **{
            (allowed, "_effect_types"): (
                allowed._effect_types | {jax_callback.OrderedIOEffect}
            )
            for allowed in (
                effects.remat_allowed_effects,
                effects.custom_derivatives_allowed_effects,
            )
        },
        (jax_callback, "io_callback_impl"): io_callback_impl,
    }
    originals = {(owner, name): getattr(owner, name) for owner, name in replaced}
    for (owner, name), value in replaced.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name), value in originals.items():
            setattr(owner, name, value)


def io_callback_impl(*args, result_avals, callback, sharding, ordered):
    """Hand numpy arrays over; to make jax arrays of them takes most of the time."""
    del result_avals, sharding, ordered
    with jax.default_device(jax.devices("cpu")[0]):
        # Copies: what XLA hands over is its own memory, and the interpreter keeps some.
        return jax.tree.map(np.asarray, callback(*map(np.array, args)))


def cpu_mesh(**axis_sizes: int) -> jax.sharding.Mesh:
    """A mesh of simulated devices with automatic axes: ``cpu_mesh(dp=2, tp=2)``."""
    count = math.prod(axis_sizes.values())
    devices = list(itertools.islice(jax.devices("cpu"), count))
    return jax.make_mesh(
        tuple(axis_sizes.values()),
        tuple(axis_sizes),
        (jax.sharding.AxisType.Auto,) * len(axis_sizes),
        devices=devices,
    )
