"""One-shot all-reduce, for sums so small that only latency matters.

Every device pushes its array to all peers at once and sums the received arrays in the
order of the devices, so that the sums are bitwise equal on all of them and between
runs. That is one exchange, where a ring has 2 (D - 1) and a reduce-scatter followed by
an all-gather has two, for D / 2 times the bytes of the latter.

`one_shot_all_reduce` needs nothing but its argument. It depends on semaphores, which
XLA clears before each call, and on XLA's barrier over devices, which guarantees that
the peers' arrays exist. Both together take longer than the exchange.

`low_latency_all_reduce` needs neither. It writes to an `AllReduceWorkspace` that
outlives the call, made once per program: *cells* that hold data with the word that they
are there (`pallas_kernels.mosaic.cells`). Reading a cell empties it.

Two sets of cells, used alternately, are enough. When a block of device A writes the
cells of a block of device B for call e + 2, it has finished call e + 1, so it has read
what that block of B wrote for call e + 1; B began that call after it finished call e,
in which it read and emptied the cells that A now writes. With one set A might be a call
ahead of B, and overwrite what B has not read.

When a device finishes a call it has read all that was sent to it. So the workspace may
be freed after the last call without another barrier.

Axis letters: L elements of the array; D devices. A *chunk* is what a block sends and
sums at a time.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Num

from pallas_kernels.collective_matmul.communicator import peers, wait_for_signal
from pallas_kernels.mosaic import DeviceSpec, as_varying, unmarked, varying
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.cells import LINE, receive, send


CHUNK = (32, 64)
"""Rows and columns of a chunk, with the array viewed as rows of 64 elements."""


def one_shot_all_reduce(
    y: jax.Array, *, axis_name: str, device: DeviceSpec
) -> jax.Array:
    """All-reduces an array over a mesh axis, in fp32 and in the order of the devices.

    Args:
        y: any shape; bfloat16 or float16.
        axis_name: mesh axis of the sum.
        device: the GPU that the kernel is built for.

    Returns:
        The sum, rounded once; shape and type of y.
    """
    devices = lax.axis_size(axis_name)
    # Whole rows are copied as contiguous bytes: past the last row of a device the copy
    # would reach the first rows of the next one.
    flat = jnp.pad(y.reshape(-1), (0, -y.size % math.prod(CHUNK)))
    flat = flat.reshape(-1, CHUNK[1])  # [L/64,64]
    chunks = flat.shape[0] // CHUNK[0]
    blocks = min(chunks, device.num_sms)

    def body(
        y_ref: Ref, out_ref: Ref, received: Ref, buffer: Ref, loaded: Ref, added: Ref
    ) -> None:
        arrived = pl.get_global(plgpu.SemaphoreType.REGULAR((chunks,)))
        me = lax.axis_index(axis_name)
        block = lax.axis_index("block")
        mine = lax.div(chunks - 1 - block + blocks, jnp.int32(blocks))

        def chunk_of(i: Scalar) -> tuple[Scalar, Scalar]:
            chunk = i * blocks + block
            return chunk, pl.ds(chunk * CHUNK[0], CHUNK[0])

        def push(i: jax.Array, _: None) -> None:
            chunk, rows = chunk_of(i)
            plgpu.copy_gmem_to_smem(y_ref.at[rows], buffer.at[0], loaded)
            plgpu.barrier_wait(loaded)
            others = [peer for _, peer in peers(axis_name, devices)]
            for peer in others:
                there = plgpu.remote_ref(received, peer)
                plgpu.copy_smem_to_gmem(buffer.at[0], there.at[me, rows])
            plgpu.copy_smem_to_gmem(buffer.at[0], received.at[me, rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            for peer in others:
                pl.semaphore_signal(arrived.at[chunk], device_id=peer)

        lax.fori_loop(0, mine, push, None)

        def add(i: jax.Array, _: None) -> None:
            chunk, rows = chunk_of(i)
            wait_for_signal(arrived.at[chunk], devices - 1)
            for source in range(devices):
                plgpu.copy_gmem_to_smem(
                    received.at[source, rows], buffer.at[source], added
                )
            plgpu.barrier_wait(added)
            total = buffer[0].astype(jnp.float32)
            for source in range(1, devices):
                total += buffer[source].astype(jnp.float32)
            buffer[0] = total.astype(y.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(buffer.at[0], out_ref.at[rows])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        lax.fori_loop(0, mine, add, None)
        plgpu.wait_smem_to_gmem(0)

    out, _ = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct(flat.shape, y.dtype),
            jax.ShapeDtypeStruct((devices, *flat.shape), y.dtype),
        ],
        scratch_types=[
            plgpu.SMEM((devices, *CHUNK), y.dtype),
            plgpu.Barrier(),
            plgpu.Barrier(num_arrivals=devices),
        ],
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="one_shot_all_reduce",
    )(flat)
    return out.reshape(-1)[: y.size].reshape(y.shape)  # [L/64,64] to [L] to [B,M,N]


# --- Without a barrier ----------------------------------------------------------------

_FASTER = {
    ("nvidia_h100_80gb_hbm3", 2): 64 * 4096,
    ("nvidia_h100_80gb_hbm3", 4): 32 * 8192,
}
"""By GPU and number of devices, the largest sums with which whole decode steps were
measured to be faster than with XLA's all-reduce."""

_LAYOUT = plgpu.Layout.WG_STRIDED((LINE,), vec_size=4)


class AllReduceWorkspace(NamedTuple):
    """Memory of one device that its peers write to, for consecutive calls.

    Each call takes the workspace of the previous one, and all devices make the same
    calls. Peers write to this very memory, so a program must use it linearly, without
    copies, for example as the carry of a loop: a copy that XLA makes between two calls
    loses what a peer wrote before it.
    """

    cells: jax.Array
    """int32 [2,D,chunks,512], by set, sender and chunk: pairs of data and flag."""
    turns: jax.Array
    """int32 [blocks]: which set of cells a block uses next."""


def make_all_reduce_workspace(
    elements: int, dtype: jnp.dtype, *, axis_name: str, device: DeviceSpec
) -> AllReduceWorkspace:
    """Makes a workspace for the calls of a program, on all devices of an axis.

    Its one exchange comes after XLA's barrier: from then on the cells of all devices
    are known to be empty.

    Args:
        elements: maximum number of elements of an array.
        dtype: type of the arrays: bfloat16 or float16.
        axis_name: mesh axis of the sums.
        device: the GPU that the kernel is built for.

    Returns:
        The workspace of the first call, on each device its own.
    """
    chunks = -(-max(elements, 1) // LINE)
    blocks = min(chunks, device.num_sms)
    chunks = -(-chunks // blocks) * blocks
    cells = jnp.zeros((2, lax.axis_size(axis_name), chunks, LINE), jnp.int32)
    workspace = AllReduceWorkspace(cells, jnp.zeros(blocks, jnp.int32))
    start = jnp.zeros((1, LINE), dtype)
    return _exchange(start, workspace, axis_name=axis_name, barrier=True)[1]


def low_latency_all_reduce(
    y: Num[Array, "*L"], workspace: AllReduceWorkspace, *, axis_name: str
) -> tuple[Num[Array, "*L"], AllReduceWorkspace]:
    """All-reduces an array over a mesh axis, in fp32 and in the order of the devices.

    Args:
        y: any shape; bfloat16 or float16.
        workspace: from `make_all_reduce_workspace` or the previous call, large enough
            for y.
        axis_name: mesh axis of the sum.

    Returns:
        The sum, rounded once, in shape and type of y; and the workspace of the next
        call.

    Raises:
        ValueError: y does not fit the workspace, or is of another type.

    Example:
        >>> from jax.sharding import AxisType, PartitionSpec as P
        >>> from pallas_kernels.mosaic import H200
        >>> mesh = jax.make_mesh((4,), ("tensor",), axis_types=(AxisType.Auto,))
        >>> def sums(a, b):  # of all calls of a program, one after the other
        ...     workspace = make_all_reduce_workspace(
        ...         a.size, a.dtype, axis_name="tensor", device=H200)
        ...     a, workspace = low_latency_all_reduce(a, workspace, axis_name="tensor")
        ...     return a, low_latency_all_reduce(b, workspace, axis_name="tensor")[0]
        >>> f = jax.shard_map(sums, mesh=mesh, in_specs=P("tensor"),
        ...     out_specs=P(), check_vma=False)
        >>> y = jax.ShapeDtypeStruct((4 * 64, 128), jnp.bfloat16)
        >>> [total.shape for total in jax.eval_shape(f, y, y)]  # it runs on GPUs
        [(64, 128), (64, 128)]
    """
    if y.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(f"y has type {y.dtype}, expected bfloat16 or float16")
    most = workspace.cells.shape[2] * LINE
    if y.size > most:
        raise ValueError(
            f"y has {y.size} elements, expected at most the {most} of its workspace;"
            " make a larger one"
        )
    if y.size == 0:
        return y, workspace
    flat = jnp.pad(y.reshape(-1), (0, -y.size % LINE)).reshape(-1, LINE)  # [L/512,512]
    # XLA fuses a slice, as of a matmul of padded rows, with the kernel that reads it,
    # and the fusion loses the aliasing of the workspace.
    flat = lax.optimization_barrier(flat)
    axes, all_axes = varying(y), varying(y, *workspace) | {axis_name}
    total, workspace = unmarked(
        lambda *operands: _exchange(
            operands[0],
            AllReduceWorkspace(*operands[1:]),
            axis_name=axis_name,
            barrier=False,
        )
    )(flat, *workspace)
    total = as_varying(total, axes - {axis_name})
    workspace = AllReduceWorkspace(*(as_varying(part, all_axes) for part in workspace))
    return total.reshape(-1)[: y.size].reshape(y.shape), workspace


def was_faster(elements: int, devices: int, device: DeviceSpec) -> bool:
    """Whether decode steps were measured to be faster than with XLA's all-reduce.

    Example:
        >>> from pallas_kernels.mosaic import H200
        >>> was_faster(4096, 2, H200)
        False
    """
    return elements <= _FASTER.get((device.name, devices), 0)


def _exchange(
    flat: jax.Array, workspace: AllReduceWorkspace, *, axis_name: str, barrier: bool
) -> tuple[jax.Array, AllReduceWorkspace]:
    """The sum of chunks [L/512,512]; the workspace is updated in place."""
    blocks = workspace.turns.size

    def body(y: Ref, cells: Ref, turns: Ref, out: Ref) -> None:
        block = lax.axis_index("block")
        turn = turns[block]
        exchange(y, out, cells, turn, axis_name=axis_name, blocks=blocks)
        finish_turn(turns.at[pl.ds(block, 1)], 1 - turn)

    cells, turns = (jax.new_ref(part) for part in workspace)
    total = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="low_latency_all_reduce",
        compiler_params=plgpu.CompilerParams(skip_device_barrier=not barrier),
    )(flat, cells, turns)
    return total, AllReduceWorkspace(jax.freeze(cells), jax.freeze(turns))


def exchange(
    y: Ref, out: Ref, cells: Ref, turn: Scalar, *, axis_name: str, blocks: int
) -> None:
    """One call of one block: sends its chunks to all, then sums what all sent.

    Args:
        y: [chunks,512], the term of this device.
        out: as y, the sums.
        cells: as in `AllReduceWorkspace`.
        turn: int32, which of the two sets of cells.
        axis_name: mesh axis of the sum.
        blocks: blocks of the grid. A block always has the same chunks, so that it
            waits for the same block of the peers, call after call.
    """
    devices, chunks = cells.shape[1], y.shape[0]
    me, block = lax.axis_index(axis_name), lax.axis_index("block")
    mine = lax.div(chunks - 1 - block + blocks, jnp.int32(blocks))

    def send_chunk(i: Scalar, _: None) -> None:
        chunk = i * blocks + block
        values = plgpu.load(y.at[chunk], layout=_LAYOUT, optimized=False)
        others = [peer for _, peer in peers(axis_name, devices)]
        for peer in others:
            there = plgpu.remote_ref(cells, peer)
            send(there.at[turn, me, chunk], values, _LAYOUT)
        send(cells.at[turn, me, chunk], values, _LAYOUT)

    def add_chunk(i: Scalar, _: None) -> None:
        chunk = i * blocks + block
        total = jnp.zeros((), jnp.float32)
        for source in range(devices):
            here = cells.at[turn, source, chunk]
            part = receive(here, (LINE,), y.dtype, _LAYOUT)
            total = total + part.astype(jnp.float32)
        out[chunk] = total.astype(y.dtype)

    lax.fori_loop(0, mine, send_chunk, None)
    lax.fori_loop(0, mine, add_chunk, None)


def finish_turn(turn: Ref, following: Scalar) -> None:
    """Writes the next set of cells, once all warps have read the current one.

    Args:
        turn: int32 [1] of global memory.
        following: int32.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
    )
    def write_turn(ctx: Any, turn: Any, following: mgpu.FragmentedArray) -> None:
        del ctx
        mgpu.utils.warpgroup_barrier()
        llvm.inline_asm(
            ir.Type.parse("!llvm.void"),
            [mgpu.utils.memref_ptr(turn), following.registers.item()],
            "st.global.b32 [$0], $1;",
            "l,r",
            has_side_effects=True,
        )

    write: Any = write_turn  # the decorator supplies the context
    write(turn, following)
