"""Memory that peers write to, handed from call to call, so that none needs a barrier.

A kernel that reaches into its peers depends on XLA for two things: semaphores, which
XLA clears before each call, and a barrier over all devices, after which the operands
of the peers are there. For few rows both together take longer than what they protect.
A gather that gets a `GatherWorkspace` needs neither: it counts in two *sets* of
counters that outlive the call, and calls use the sets in turn.

Why two sets are enough. Call them e, e + 1, ... in the order in which all devices make
them; call e uses set e mod 2. In each call the first block of a device clears the other
set, and then tells all peers that it is *ready*. No device ends a call before

1. it has heard from all peers that they are ready, and
2. all else that they send it in this call has arrived: each piece of their rows where
   they write them here (some tile waits for it); where it is they who read, the last
   word of each of their blocks, which is that it reads no more.

What could go wrong is that a peer signals for call e + 2, or writes rows of it, while
set e mod 2 of this device is in use for call e, or before it is cleared. But a peer
that is in call e + 2 has ended call e + 1, so by 1 it has heard that this device is
ready in call e + 1. Before it said so this device had ended call e, since its kernels
follow each other, and so had read what was sent for it; and it had cleared set e mod 2,
to which by 2 nothing of call e was still under way. What a warp has written before it
raises a counter (which releases it) is seen by whoever waits for that (which acquires
it), and by all that follows.

With one set a peer may be a call ahead of this device, and writes what it has not read.

Which set is next stands in memory as well, so that a CUDA graph that is replayed goes
on where the last replay ended. It alternates between 0 and 1 and never overflows.

Axis letters: B leading axes, m rows of one device, K contraction; D devices.
"""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul.communicator import (
    Chunks,
    peers,
    wait_for_signal,
)
from pallas_kernels.collective_matmul.layout import RowLayout
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.counters import (
    await_from_warp,
    clear_from_warp,
    raise_from_warp,
    toggle,
)
from pallas_kernels.mosaic.pipeline import proxy_fence


Form = Literal["barrier", "pull", "push"]
"""How rows are gathered: read from the peers after XLA's barrier, read once the peers
have told that they are there, or written by the peers."""

LEFT, READY, ARRIVED = range(3)
"""Counters of a set: blocks of peers that read here no more; peers that are ready; from
here on, pieces of rows that have arrived."""

MOVER, PRODUCER = range(2)
"""Warps of a block that each keep the number of the next set for themselves."""

_MOST_PUSHED = 4 << 20
"""Bytes of a device's rows up to which it is faster to write them: by 4 to 9 % with 2
and 4 MiB; with 8 MiB it is 8 to 17 % slower (two H200s, trials)."""

_STEP_BYTES = 1024
"""The smallest buffer for rows of a peer: the smaller, the more steps along K."""


class GatherWorkspace(NamedTuple):
    """Memory of one device that its peers write to, for consecutive gathers.

    Each call takes the workspace of the previous one, and all devices make the same
    calls. Peers write to this very memory, so a program must use it linearly, without
    copies, for example as the carry of a loop.
    """

    rows: jax.Array | None
    """[2,B*D,m,K] by set: rows that peers write. None: they are read from the peers."""
    counters: jax.Array
    """int32 [2,count] by set."""
    turns: jax.Array
    """int32 [2,blocks], by warp and block: which set is next."""

    @property
    def form(self) -> Form:
        """How a gather with this workspace is done."""
        return "pull" if self.rows is None else "push"


def make_gather_workspace(
    rows: int,
    depth: int,
    dtype: jnp.dtype,
    *,
    axis_name: str,
    device: DeviceSpec,
    batch: int = 1,
    push: bool | None = None,
) -> GatherWorkspace:
    """Makes a workspace for the gathers of a program, on all devices of an axis.

    Its one signal comes after XLA's barrier: from then on the workspaces of all devices
    are known to be there, and their counters to be zero.

    Args:
        rows: maximum number of rows of a device within one leading index.
        depth: K of all calls.
        dtype: type of the rows: bfloat16 or float16.
        axis_name: mesh axis of the gathers.
        device: the GPU that the kernel is built for.
        batch: number of leading axes of all calls.
        push: peers write their rows here; else they are read from them. None: what was
            faster on two H200s for as many bytes.

    Returns:
        The workspace of the first call, on each device its own.

    Raises:
        NameError: not called where `axis_name` is bound, as in `jax.shard_map`.
    """
    devices = lax.axis_size(axis_name)
    rows, depth = -(-rows // 8) * 8, -(-depth // 64) * 64
    nbytes = batch * rows * depth * jnp.dtype(dtype).itemsize
    push = nbytes <= _MOST_PUSHED if push is None else push
    steps = Chunks.of(1, depth, jnp.dtype(dtype), _STEP_BYTES).across
    count = ARRIVED + devices * batch * -(-rows // 128) * steps
    workspace = GatherWorkspace(
        jnp.zeros((2, batch * devices, rows, depth), dtype) if push else None,
        jnp.zeros((2, count), jnp.int32),
        jnp.zeros((2, device.num_sms), jnp.int32),
    )

    def body(counters: Ref, *rest: Ref) -> None:
        del rest

        @plgpu.warp_map
        def _meet(warp: jax.Array) -> None:
            @pl.when(warp == 0)
            def _one() -> None:
                # In set 1: the first call uses set 0, and clears this one.
                for _, peer in peers(axis_name, devices):
                    there = plgpu.remote_ref(counters, peer)
                    raise_from_warp(there.at[1, pl.ds(READY, 1)])
                here = counters.at[1, pl.ds(READY, 1)]
                await_from_warp(here, jnp.int32(devices - 1))

    refs = jax.tree.map(jax.new_ref, workspace)
    others = [ref for ref in (refs.rows, refs.turns) if ref is not None]
    plgpu.kernel(
        body,
        out_type=(),
        grid=(1,),
        grid_names=("block",),
        kernel_name="begin_gathers",
    )(refs.counters, *others)
    return jax.tree.map(jax.freeze, refs)


class Semaphores(NamedTuple):
    """The signals of a call before which XLA clears semaphores and puts a barrier."""

    layout: RowLayout
    """Rows and devices."""
    arrived: Ref
    """Pieces of rows that have arrived here."""
    left: Ref
    """Blocks of peers that read here no more."""

    @classmethod
    def of(cls, layout: RowLayout, count: int) -> "Semaphores":
        """Semaphores of a kernel: `count` for what arrives."""
        kind = plgpu.SemaphoreType.REGULAR
        return cls(layout, pl.get_global(kind((count,))), pl.get_global(kind))

    def turn(self, warp: int) -> Any:
        """There is one set."""

    def begin(self, turn: Scalar) -> None:
        """Nothing is left to do after XLA's barrier."""

    def arrive(self, turn: Scalar, index: Scalar, device: Any) -> None:
        """Counts a piece that this device has read."""
        del turn, device
        plgpu.semaphore_signal(self.arrived.at[index], memory_scope="gpu")

    def wait(self, turn: Scalar, index: Scalar, pieces: Scalar) -> None:
        """Waits for pieces; copies of them may follow at once."""
        del turn
        wait_for_signal(self.arrived.at[index], pieces, "gpu")

    def leave(self, turn: Scalar) -> None:
        """What moves rows is done."""
        del turn
        self.layout.leave(self.left)

    def finish(self) -> None:
        """The consumers are done."""


class Counters(NamedTuple):
    """The signals of a call in the counters of a workspace."""

    layout: RowLayout
    """Rows and devices."""
    push: bool
    """Peers write their rows here; else they are read from them."""
    counters: Ref
    """`GatherWorkspace.counters`."""
    turns: Ref
    """`GatherWorkspace.turns`."""

    def turn(self, warp: int) -> Scalar:
        """The set of this call, as `MOVER` or `PRODUCER` of this block read it."""
        return self.turns[warp, self.layout.block]

    def begin(self, turn: Scalar) -> None:
        """Clears the other set before anything is sent; rows to be read are there."""

        @pl.when(self.layout.block == 0)
        def _first() -> None:
            clear_from_warp(self.counters.at[1 - turn])
            self._tell(turn, READY)

        if not self.push:
            self._wait(turn, READY, self.layout.devices - 1)

    def arrive(self, turn: Scalar, index: Scalar, device: Any) -> None:
        """Counts a piece that has come here, or that was written to a device."""
        self._count(turn, ARRIVED + index, device)

    def wait(self, turn: Scalar, index: Scalar, pieces: Scalar) -> None:
        """Waits for pieces; copies of them may follow at once."""
        self._wait(turn, ARRIVED + index, pieces)

    def leave(self, turn: Scalar) -> None:
        """What moves rows is done; where they are read, peers have read them too."""
        layout, last, count = self.layout, READY, self.layout.devices - 1
        if not self.push:
            self._tell(turn, LEFT)
            last, count = LEFT, count * layout.num_blocks
        pl.when(layout.block == 0)(lambda: self._wait(turn, last, count))
        self._end(MOVER, "warp")

    def finish(self) -> None:
        """The consumers are done, and so the producer has read which set it is."""
        first = lax.axis_index("warpgroup") == 0
        pl.when(first)(lambda: self._end(PRODUCER, "warpgroup"))

    def _tell(self, turn: Scalar, index: int) -> None:
        for _, peer in peers(self.layout.axis_name, self.layout.devices):
            self._count(turn, index, peer[self.layout.axis_name])

    def _count(self, turn: Scalar, index: Scalar, device: Any) -> None:
        counters = self.counters
        if device is not None:
            there: Any = {self.layout.axis_name: device}
            counters = plgpu.remote_ref(counters, there)
        scope = "gpu" if device is None else "sys"
        raise_from_warp(counters.at[turn, pl.ds(index, 1)], scope)

    def _wait(self, turn: Scalar, index: Scalar, value: Scalar) -> None:
        await_from_warp(self.counters.at[turn, pl.ds(index, 1)], value)
        proxy_fence()  # pyright: ignore[reportCallIssue]  (the context is passed)

    def _end(self, who: int, readers: Literal["warp", "warpgroup"]) -> None:
        number = self.turns.at[who, pl.ds(self.layout.block, 1)]
        toggle(number, readers=readers)
