"""Runs Mosaic GPU kernels on a CPU, semaphores and peers included (the second ring).

``interpret_mosaic_gpu`` puts jax's own Mosaic GPU interpreter in place of the compiler
and teaches it what the kernels of this project use beyond it::

    with interpret_mosaic_gpu(detect_races=True) as run:
        y = np.asarray(jax.jit(kernel)(x))
    assert not run.races_found  # also checked on leaving

Added to the interpreter of jax 0.11.2:

- semaphores, as scratch and through ``pl.get_global``: ``semaphore_signal`` and
  ``semaphore_wait`` with ``device_id``, ``inc`` and ``decrement``;
- ``plgpu.remote_ref`` for loads, stores and TMA copies on meshes of any rank;
- the barrier over devices before a kernel, and after each point of the grid;
- ``copy_smem_to_gmem`` with ``reduction_op="add"`` and with a predicate;
- ``wgmma`` with its left operand in registers; for race detection, wgmma reads shared
  memory until ``wgmma_wait`` or a read of the accumulator;
- accumulators that start with a value: ``pl.run_state(f)(plgpu.ACC.init(x))`` and
  ``acc[...] = x``;
- ``RefUnion`` of a swizzled view (for TMA at any row) with a swizzled and tiled view as
  wide as a tile (for wgmma), which name the same bytes;
- ``inline_mgpu`` through numpy stand-ins (:func:`register_inline`), also of semaphores,
  of flags in arrays, and of refs that reach past the end of an array;
- TMA loads of rows before the first, which read as zero;
- TMA copies that begin within 16 bytes along the last axis of an array are refused, at
  which a GPU stops the kernel as at an illegal instruction;
- a bound on every wait: a deadlock is a ``TimeoutError`` that names the line;
- a kernel is one callback, whose equations run on numpy values and whose warpgroups
  are threads of Python: to compile a program for each took 80% of the time, and its
  blocked callbacks used up XLA's threads;
- kernels under ``jax.checkpoint``, which keeps their results instead of computing them
  again, and under ``check_vma=True``;
- two races that only hardware would show: a peer still writes or reads a device's
  arrays when the device leaves the kernel, and those between blocks
  (``concurrent_blocks=True``).

What it cannot do, and therefore needs a test on a GPU:

- NVLink multicast (``multicast_ref``, ``multimem_*``), which this project never uses;
- ``RefUnion`` aliasing between views that differ in more than a tiling as wide as the
  array: such members have buffers of their own, and race detection takes two stages of
  a ring for one, as in reductions of transposed weights with tiles wider than 64;
- ``mma``, atomics (``plgpu.atomic_*``), ``semaphore_read``, TMA loads without a
  barrier, TMA gather, dynamic grids;
- swizzles and tilings: buffers have their logical shape, so an access that reads wrong
  rows on hardware reads right ones here;
- without ``concurrent_blocks`` the blocks of a grid run one after another (all devices
  in step), so a block may only wait for itself and for blocks before it.

It patches private names of jax, so it refuses any other version (:func:`check_jax`).
"""

# ruff: noqa: E402 -- the version is checked before private names are imported
from tests.interpreter.version import check_version


check_version()

from tests.interpreter.inline import NotYet, register_inline, unregister_inline
from tests.interpreter.run import RaceError, Run
from tests.interpreter.session import check_jax, cpu_mesh, interpret_mosaic_gpu


__all__ = [
    "NotYet",
    "RaceError",
    "Run",
    "check_jax",
    "cpu_mesh",
    "interpret_mosaic_gpu",
    "register_inline",
    "unregister_inline",
]
