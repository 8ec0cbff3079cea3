"""What the results of `benchmarks.collective_matmul` are compared with."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from benchmarks.measure.loop_programs import Check
from benchmarks.rivals.collective_baselines import AXIS
from pallas_kernels.scaled_matmul import quantize_fp8


SAMPLED_ROWS = 16
"""Rows of each device that are compared with the reference."""

SAMPLED_COLUMNS = 128
"""Columns that are compared."""


def checks(params: Mapping[str, Any]) -> dict[str, Check]:
    """Comparisons on rows of every device and some columns, in fp32."""
    kind, tp, m, n, k = (params[name] for name in ("kind", "tp", "M", "N", "K"))
    random = np.random.default_rng(0)
    mine = np.sort(random.choice(m // tp, min(SAMPLED_ROWS, m // tp), replace=False))
    every = (np.arange(tp)[:, None] * (m // tp) + mine).ravel()
    if m < tp:  # an all-reduce, whose rows have no owner
        every = np.arange(m)
    width = n // tp if kind == "all_gather" else n
    columns = np.sort(random.choice(width, min(SAMPLED_COLUMNS, width), replace=False))

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.matmul(x.astype(jnp.float32), w[:, columns].astype(jnp.float32))

    def partial(drawn: Any) -> jax.Array:
        return product(drawn["x"][every], drawn["w"])

    if kind == "all_gather":
        some = np.sort(random.choice(k, min(SAMPLED_COLUMNS, k), replace=False))

        def gathered(drawn: Any) -> jax.Array:
            return lax.all_gather(drawn["x"][mine], AXIS, tiled=True)

        return {
            "result": Check(
                expected=lambda drawn: product(gathered(drawn), drawn["w"]),
                found=lambda y: y[every][:, columns],
                spec=P(None, AXIS),
            ),
            "rounded": Check(
                expected=lambda drawn: product(
                    gathered(rounded(drawn)), rounded(drawn)["w"]
                ),
                found=lambda y: y[every][:, columns],
                spec=P(None, AXIS),
            ),
            "pushed": Check(
                expected=lambda drawn: gathered(drawn)[:, some],
                found=lambda y: y[every][:, some],
                spec=P(AXIS),
            ),
        }

    def arrived(drawn: Any) -> jax.Array:
        """What each other device has for this one: [D-1, rows, columns]."""
        rows = drawn["partial"][every][:, columns].reshape(tp, len(mine), len(columns))
        return jnp.stack(
            [
                lax.ppermute(
                    jnp.take(rows, (lax.axis_index(AXIS) + r) % tp, axis=0),
                    AXIS,
                    [(i, (i + r) % tp) for i in range(tp)],
                )
                for r in range(1, tp)
            ]
        )

    compared = {
        "product": Check(
            expected=partial, found=lambda y: y[every][:, columns], spec=P(AXIS)
        )
    }
    if kind == "reduce_scatter":
        return compared | {
            "result": Check(
                expected=lambda drawn: lax.psum_scatter(
                    partial(drawn), AXIS, tiled=True
                ),
                found=lambda y: y[mine][:, columns],
                spec=P(AXIS),
            ),
            "rounded": Check(
                expected=lambda drawn: lax.psum_scatter(
                    partial(rounded(drawn)), AXIS, tiled=True
                ),
                found=lambda y: y[mine][:, columns],
                spec=P(AXIS),
            ),
            "pushed": Check(
                expected=arrived,
                found=lambda y: y[:, mine][:, :, columns],
                spec=P(AXIS),
            ),
        }
    return compared | {
        "result": Check(
            expected=lambda drawn: lax.psum(partial(drawn), AXIS),
            found=lambda y: y[every][:, columns],
            spec=P(AXIS),
        ),
        "pushed": Check(
            expected=lambda drawn: lax.all_gather(arrived(drawn)[0], AXIS, tiled=True),
            found=lambda y: y[every][:, columns],
            spec=P(AXIS),
        ),
    }


def rounded(drawn: Any) -> dict[str, jax.Array]:
    """What the operands in 8 bits stand for."""

    def wide(x: jax.Array) -> jax.Array:
        # Without the barrier XLA keeps the digits that are rounded away.
        q, scale = lax.optimization_barrier(quantize_fp8(x, axis=-1))
        return q.astype(jnp.float32) * scale[:, None]

    return {**drawn, "x": wide(drawn["x"]), "w": wide(drawn["w"].T).T}
