"""Sums over the devices of a tensor-parallel layer, within its launch.

Where a weight is split by its input features, as those of `out` and `down`, each device
has a part of the sums. Whoever finishes some of them sends its part to all devices, in
bfloat16, and adds what they sent in the order of the devices: sums have the same bits
on all of them, whenever parts arrive. The same features are finished by the same
warpgroup on every device, so it waits for its like alone, and weights go on coming in.

Parts go to cells of an `AllReduceWorkspace`: two sets, used in turn, so that a layer,
which has two sums, ends with the set with which it began. A set is empty when it is
used again. A device sends parts of a sum only when it has all of the sum before: `down`
multiplies what `gate_up` made of all of `out`, and `out` of the next call begins when
this one has ended. So when it sends parts of sum e + 2 it has parts of sum e + 1 from
all peers, who thus had all of sum e, and had emptied the cells of that.

Axis letters: D devices, M requests.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.collective_matmul.communicator import peers
from pallas_kernels.decode_layer.config import GROUP, quotient
from pallas_kernels.mosaic.aliases import Ref, Scalar
from pallas_kernels.mosaic.cells import LINE, receive, send


_EIGHT = LINE // GROUP
"""Requests of a chunk: 64 features of 8 are what is sent at a time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The devices whose parts are added."""

    cells: Ref
    """`AllReduceWorkspace.cells`, int32 [2,D,chunks,512]."""
    turn: Scalar
    """The set of the first sum."""
    axis_name: str
    """The mesh axis of the devices."""
    rows: int
    """M, a multiple of 8."""

    def add(
        self, number: int, groups: Sequence[Scalar], row: Scalar, parts: list[jax.Array]
    ) -> list[jax.Array]:
        """The sums over devices of parts.

        Args:
            number: which sum of the layer, 0 or 1.
            groups: which 64 features each part has.
            row: the first request.
            parts: [64,some requests] each, in fp32 and the layout of tensor cores.
        """
        devices, me = self.cells.shape[1], lax.axis_index(self.axis_name)
        turn = self.turn if number == 0 else 1 - self.turn
        eights = range(parts[0].shape[1] // _EIGHT)

        def chunk(group: Scalar, eight: int) -> Scalar:
            first = quotient(row, _EIGHT)
            return group * (self.rows // _EIGHT) + first + eight

        for group, part in zip(groups, parts, strict=True):
            rounded = part.astype(jnp.bfloat16)
            for n in eights:
                values = rounded[:, _EIGHT * n : _EIGHT * (n + 1)]
                where = turn, me, chunk(group, n)
                for _, peer in peers(self.axis_name, devices):
                    there = plgpu.remote_ref(self.cells, peer)
                    send(there.at[where], values, plgpu.Layout.WGMMA)
                send(self.cells.at[where], values, plgpu.Layout.WGMMA)

        def total(where: Scalar) -> jax.Array:
            found = [
                receive(
                    self.cells.at[turn, device, where],
                    (GROUP, _EIGHT),
                    jnp.dtype(jnp.bfloat16),
                    plgpu.Layout.WGMMA,
                ).astype(jnp.float32)
                for device in range(devices)
            ]
            return sum(found[1:], start=found[0])

        return [
            jnp.concatenate([total(chunk(group, n)) for n in eights], axis=1)
            for group in groups
        ]
