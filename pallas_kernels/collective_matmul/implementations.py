"""Which implementation computes a collective matrix product here.

Axis letters: B merged leading axes, m rows of a device, M rows of all, K contraction,
N columns, D devices of the axis.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from pallas_kernels.collective_matmul import xla
from pallas_kernels.dispatch import Unsupported, dispatch


__all__ = ["IMPLEMENTATIONS", "OPS", "Call", "run"]

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")

PREFERRED = ("xla",)
"""What ``implementation=None`` tries, in this order."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a call of an op asks for, apart from its operands."""

    axis_name: str
    """Mesh axis over which devices communicate."""
    size: int
    """D, devices of that axis."""
    rhs_transposed: bool
    """Weights are stored as [N,K]."""
    out_dtype: Any
    """Type of the products."""
    implementation: str | tuple[str, ...] | None
    """As the caller gave it."""
    config: Any
    """As the caller gave it; gradients look theirs up."""
    tracked: bool
    """Types say over which mesh axes arrays vary: `check_vma` of `jax.shard_map`."""
    return_gathered: bool = False
    """The gathered operand is an output."""
    deterministic: bool = True
    """Sums are equal bit for bit between runs."""

    def transposed(self, out_dtype: Any, **changes: Any) -> "Call":
        """The call that multiplies by the transposed weights."""
        return dataclasses.replace(
            self,
            rhs_transposed=not self.rhs_transposed,
            out_dtype=out_dtype,
            config=None,
            **changes,
        )


def _without_config(op_name: str, function: Callable[..., Any], name: str) -> Any:
    """An XLA form, which knows no config and needs no permission."""

    @functools.wraps(function)
    def implementation(x: Any, ws: Any, call: Call) -> Any:
        if call.config is not None:
            raise Unsupported(
                f"{op_name}: {name!r} takes no config, got {call.config!r}; pass None"
                " or use implementation='mosaic_gpu'"
            )
        return function(
            x,
            ws,
            axis_name=call.axis_name,
            out_dtype=call.out_dtype,
            rhs_transposed=call.rhs_transposed,
        )

    return implementation


# A kernel joins here, as "mosaic_gpu", and in PREFERRED.
IMPLEMENTATIONS: Mapping[str, Mapping[str, Callable[[Any, Any, Call], Any]]] = {
    op_name: {
        "xla": _without_config(op_name, getattr(xla, op_name), "xla"),
        "xla_ring": _without_config(
            op_name, getattr(xla, f"ring_{op_name}"), "xla_ring"
        ),
    }
    for op_name in OPS
}
"""Op and name to implementation."""


def run(op_name: str, x: Any, ws: tuple[jax.Array, ...], call: Call) -> Any:
    """Computes an op without its gradient rule.

    Args:
        op_name: one of `OPS`.
        x: [B,m,K], or of reductions a tuple of [B,M,K_i].
        ws: a tuple of weights.
        call: the rest.

    Returns:
        As the functions of `pallas_kernels.collective_matmul.xla`.
    """
    names = PREFERRED if call.implementation is None else call.implementation
    return dispatch(op_name, IMPLEMENTATIONS[op_name], names, x, ws, call)
