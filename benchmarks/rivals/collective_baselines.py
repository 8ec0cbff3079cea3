"""What collective matmuls are measured against, run on each device.

Bounds: the matmul alone and the communication alone (`push`, a kernel that does
nothing but copy). Baselines: XLA, and the collective matmul among jax's own samples.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec, check_hopper, smem_transforms


AXIS = "tensor"
"""Name of the mesh axis."""

Kind = Literal["all_gather", "reduce_scatter", "all_reduce"]

LATENCY_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}
"""Options of the compiler for ``xla_lhs``."""

ONE_SHOT = {
    "xla_gpu_experimental_use_collective_kernels": "COLLECTIVE_KERNEL_ALL_REDUCE"
}
"""Options of the compiler for ``xla_one_shot``. In bf16 XLA's kernels of sums have a
form of one and one of two exchanges; the one that needs NVLink multicast is of fp32
alone."""

PUSH_BLOCKS = (16, 48, 132)
"""Numbers of blocks that `push` is tried with; 15 multiprocessors fill NVLink."""

SAMPLE_CONFIGS = (
    {"wg": "M", "minor": "N", "width": 8},
    {"wg": "M", "minor": "M", "width": 8},
    {"wg": "N", "minor": "N", "width": 8},
    {"wg": "N", "minor": "M", "width": 8},
)
"""How the sample of jax is tried; the rest as in its own example."""


# --- XLA ------------------------------------------------------------------------------


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """The matmul alone; XLA calls cuBLAS."""
    return jnp.matmul(x, w)


def xla_collective(kind: Kind) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Collective and matmul one after the other, as XLA runs them (NCCL, cuBLAS)."""

    def all_gather(x: jax.Array, w: jax.Array) -> jax.Array:
        return product(lax.all_gather(x, AXIS, axis=0, tiled=True), w)

    def reduce_scatter(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum_scatter(product(x, w), AXIS, scatter_dimension=0, tiled=True)

    def all_reduce(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(product(x, w), AXIS)

    return {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_reduce": all_reduce,
    }[kind]


def windowed(size: int) -> list[dict[str, Any]]:
    """Options of the compiler for ``xla_windowed``; the fastest count.

    Matmuls of the partitioner go around in parts, of any size; by default from
    100,000 MiB on. XLA then gives the parts streams of their own, in a pass that
    unrolls the loop over them and counts its turns where it should count parts: with
    more than two devices parts are written over each other (jax 0.11.2). There the
    loop stays as the partitioner leaves it, with and without the pass that makes one
    matmul of the two in a turn, which then has to wait for both.

    Args:
        size: number of devices.
    """
    parts = {"xla_gpu_threshold_for_windowed_einsum_mib": 0, **LATENCY_HIDING}
    if size == 2:
        return [{**parts, "xla_gpu_multi_streamed_windowed_einsum": True}]
    passes = "windowed-einsum-handler", "windowed-einsum-handler,dot-merger"
    return [{**parts, "xla_disable_hlo_passes": some} for some in passes]


# --- The communication alone ----------------------------------------------------------


def push_all_gather(
    x: jax.Array, *, size: int, blocks: int, device: DeviceSpec | None
) -> jax.Array:
    """Every device writes its rows to all devices.

    Args:
        x: [m,K] rows of this device.
        size: number of devices, D.
        blocks: how many blocks copy.
        device: the GPU.

    Returns:
        [D*m,K], bitwise ``lax.all_gather(x, axis=0, tiled=True)``.
    """
    m, columns = x.shape
    tile = math.gcd(m, 128), math.gcd(columns, 128)
    return _push(
        x,
        rows=m,
        tile=tile,
        parts=1,
        copies=size,
        out_shape=(size * m, columns),
        source=lambda ref, part, me: ref,
        targets=lambda ref, part, me: [
            (ref if r == 0 else _peer(ref, me, r, size)).at[pl.ds(me * m, m)]
            for r in range(size)
        ],
        size=size,
        blocks=blocks,
        device=device,
    )


def push_reduce_scatter(
    x: jax.Array, *, size: int, blocks: int, device: DeviceSpec | None
) -> jax.Array:
    """Every device writes the rows of each other device to that device.

    Nothing is summed: these are the bytes of a reduce-scatter without its sums.

    Args:
        x: [D*m,N], rows of all devices.
        size: number of devices, D.
        blocks: how many blocks copy.
        device: the GPU.

    Returns:
        [D-1,m,N]; entry ``r`` holds what the device ``r + 1`` places before this one
        has for it.
    """
    rows, columns = x.shape
    m = rows // size
    tile = math.gcd(m, 64), math.gcd(columns, 128)
    return _push(
        x,
        rows=m,
        tile=tile,
        parts=size - 1,
        copies=1,
        out_shape=(size - 1, m, columns),
        source=lambda ref, part, me: ref.at[
            pl.ds(lax.rem(me + part + 1, jnp.int32(size)) * m, m)
        ],
        targets=lambda ref, part, me: [_peer(ref, me, part + 1, size).at[part]],
        size=size,
        blocks=blocks,
        device=device,
    )


def push_all_reduce(x: jax.Array, **options: Any) -> jax.Array:
    """The bytes of a reduce-scatter and of an all-gather after it.

    Args:
        x: [M,N], as in `push_reduce_scatter`.
        **options: as there.

    Returns:
        [M,N]: for each device, in order, what the device before it had for it.
    """
    return push_all_gather(push_reduce_scatter(x, **options)[0], **options)


def _peer(ref: Any, me: jax.Array, distance: int, size: int) -> Any:
    peer: Any = {AXIS: lax.rem(me + distance, jnp.int32(size))}
    return plgpu.remote_ref(ref, peer)


def _push(
    x: jax.Array,
    *,
    rows: int,
    tile: tuple[int, int],
    parts: int,
    copies: int,
    out_shape: tuple[int, ...],
    source: Callable[[Any, int, jax.Array], Any],
    targets: Callable[[Any, int, jax.Array], list],
    size: int,
    blocks: int,
    device: DeviceSpec | None,
) -> jax.Array:
    """Copies tiles through shared memory by the copy engine, to here and to peers.

    A part is `rows` rows of x, and its tiles go to the same places of its targets, of
    which there are `copies`. A step of a block takes one tile of each part; loads run
    ahead of the stores by the depth of the ring. A block ends when all of its peers'
    blocks have written, so that no device leaves while another writes to it.
    """
    check_hopper(device, "push")
    columns = x.shape[1]
    counts = rows // tile[0], columns // tile[1]
    total = math.prod(counts)
    blocks = min(blocks, total)
    stages = min(4, 196_608 // (parts * math.prod(tile) * x.dtype.itemsize))

    def body(x_ref, out_ref, ring, full):
        finished = pl.get_global(plgpu.SemaphoreType.REGULAR)
        me, block = lax.axis_index(AXIS), lax.axis_index("block")
        mine = lax.div(total - 1 - block + blocks, jnp.int32(blocks))

        def window(step):
            index = step * blocks + block
            row = lax.div(index, jnp.int32(counts[1])) * tile[0]
            column = lax.rem(index, jnp.int32(counts[1])) * tile[1]
            return pl.ds(row, tile[0]), pl.ds(column, tile[1])

        def load(step, slot):
            for part in range(parts):
                plgpu.copy_gmem_to_smem(
                    source(x_ref, part, me).at[window(step)],
                    ring.at[slot, part],
                    full.at[slot],
                )

        for slot in range(stages - 1):

            @pl.when(slot < mine)
            def _first(slot=slot):
                load(jnp.int32(slot), slot)

        def step(i, _):
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(full.at[slot])
            for part in range(parts):
                for target in targets(out_ref, part, me):
                    plgpu.copy_smem_to_gmem(ring.at[slot, part], target.at[window(i)])
            # The stores of the step before have left the slot that is loaded next.
            plgpu.wait_smem_to_gmem(parts * copies, wait_read_only=True)

            @pl.when(i + stages - 1 < mine)
            def _ahead():
                load(i + stages - 1, lax.rem(i + stages - 1, jnp.int32(stages)))

        lax.fori_loop(0, mine, step, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=False)
        for distance in range(1, size):
            peer = lax.rem(me + distance, jnp.int32(size))
            pl.semaphore_signal(finished, device_id={AXIS: peer})
        pl.semaphore_wait(finished, (size - 1) * blocks, decrement=False)

    # Fewer than eight rows do not fill a tile of the swizzled layout.
    transforms = smem_transforms(tile[1], x.dtype) if tile[0] % 8 == 0 else ()
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(out_shape, x.dtype),
        scratch_types={
            "ring": plgpu.SMEM((stages, parts, *tile), x.dtype, transforms=transforms),
            "full": plgpu.Barrier(num_arrivals=parts, num_barriers=stages),
        },
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="push",
    )(x)


# --- The sample of jax ----------------------------------------------------------------


def jax_sample(
    x: jax.Array, w: jax.Array, *, wg: str, minor: str, width: int
) -> jax.Array:
    """The all-gather matmul of `jax.experimental.pallas.ops.gpu`.

    Args:
        x: [m,K] rows of this device.
        w: [K,n].
        wg: dimension that the two consumers of a block share, "M" or "N".
        minor: dimension of the grid that varies faster.
        width: tiles across a band of the grid.

    Raises:
        Unsupported: the sizes do not fit its tiles, or there are other devices.
    """
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as sample

    check_hopper(DeviceSpec.current(), "jax_sample")
    config = sample.TuningConfig(
        tile_m=min(128, max(64, x.shape[0] // (2 if wg == "M" else 1))),
        tile_n=128,
        tile_k=64,
        max_concurrent_steps=4,
        grid_minor_dim=sample.MatmulDimension[minor],
        grid_tile_width=width,
        wg_dimension=sample.MatmulDimension[wg],
    )
    try:
        return sample.all_gather_lhs_matmul(x, w, AXIS, config=config, dtype=x.dtype)
    except ValueError as error:
        raise Unsupported(f"jax's sample: {error}") from error
