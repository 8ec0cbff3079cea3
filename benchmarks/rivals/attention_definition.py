"""What attention over packed sequences computes, in fp32, and how far results are off.

Errors are those of a head (of the query heads of a key head) in up to four sequences,
the longest and the shortest among them: by the largest element, and by norms.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.measure import harness, timing
from benchmarks.rivals.attention_baselines import Form, sinks_of, slopes_of
from pallas_kernels.varlen_attention.segments import Window
from pallas_kernels.varlen_attention.specs import VarlenSpec


SAMPLED = 4
"""Sequences that are compared with fp32."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Which sequences and which key head are compared."""

    sequences: tuple[int, ...]
    kv_head: int


def sample(spec: VarlenSpec) -> Sample:
    """The longest, the shortest that is not empty, and random others."""
    lengths = np.asarray(spec.lengths_q)
    random = np.random.default_rng(0)
    order = [int(lengths.argmax()), int(np.where(lengths, lengths, 2**30).argmin())]
    order += [int(b) for b in random.permutation(len(lengths)) if lengths[b]]
    chosen = tuple(dict.fromkeys(order))[:SAMPLED]
    return Sample(chosen, int(random.integers(spec.num_kv_heads)))


def definition(window: Window, softcap: float | None, scale: float) -> Callable:
    """Attention of one sequence and key head in fp32, and its gradients.

    Args:
        window: keys attended to on the left and right of the diagonal; causal
            attention has none on the right.
        softcap: bound on scores.
        scale: of scores.

    Returns:
        A function of q [L,G,H], k and v [S,H], the gradient of the result, slopes and
        sinks [G], and the numbers of queries and keys that count.
    """
    left, right = window

    def attend(
        q: Any, k: Any, v: Any, slopes: Any, sinks: Any, len_q: Any, len_k: Any
    ) -> Any:
        i, j = jnp.arange(q.shape[0])[:, None], jnp.arange(k.shape[0])[None]
        distance = j - i - (len_k - len_q)
        mask = (i < len_q) & (j < len_k)
        mask &= True if left is None else distance >= -left
        mask &= True if right is None else distance <= right
        scores = scale * jnp.einsum("lgh,sh->gls", q, k)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores -= slopes[:, None, None] * jnp.abs(distance).astype(jnp.float32)
        scores = jnp.where(mask, scores, -1e30)
        sinks = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sinks], -1), axis=-1)
        weights = jnp.where(mask, weights[..., :-1], 0.0)
        return jnp.einsum("gls,sh->lgh", weights, v)

    def run(q: Any, k: Any, v: Any, dout: Any, *rest: Any) -> tuple:
        out, back = jax.vjp(lambda q, k, v: attend(q, k, v, *rest), q, k, v)
        return out, *back(dout)

    return run


def _room(length: int) -> int:
    return max(64, 1 << (length - 1).bit_length())


@functools.cache
def _definition_program(
    pool: ThreadPoolExecutor,
    window: Window,
    softcap: float | None,
    rows: int,
    keys: int,
    groups: int,
    dim: int,
    value_dim: int,
) -> Future:
    """Compiles `definition` for sequences of up to so many rows."""
    shapes = [(rows, groups, dim), (keys, dim)]
    shapes += [(keys, value_dim), (rows, groups, value_dim)]
    shapes += [(groups,), (groups,)]
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    length = jax.ShapeDtypeStruct((), jnp.int32)
    run = definition(window, softcap, dim**-0.5)
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(run).lower(*arguments, length, length)
    # Trying out the matmuls of many lengths would take longer than all else.
    options = {"xla_gpu_autotune_level": 0} if timing.on_gpu() else None
    return pool.submit(lowered.compile, options)


def programs(spec: VarlenSpec, pool: ThreadPoolExecutor) -> list[Future]:
    """For each sampled sequence, its program."""
    groups = spec.num_heads // spec.num_kv_heads
    return [
        _definition_program(
            pool,
            (spec.window[0], 0 if spec.causal else spec.window[1]),
            spec.softcap,
            _room(spec.lengths_q[b]),
            _room(spec.lengths_k[b]),
            groups,
            spec.head_dim,
            spec.value_size,
        )
        for b in sample(spec).sequences
    ]


def _group(spec: VarlenSpec) -> slice:
    """The query heads of the key head that is compared."""
    groups = spec.num_heads // spec.num_kv_heads
    head = sample(spec).kv_head
    return slice(head * groups, (head + 1) * groups)


def expected(
    spec: VarlenSpec, packed: Sequence[jax.Array], programs: Sequence[Future]
) -> list[list[np.ndarray]]:
    """The results and gradients of each sampled sequence."""
    bounds_q, bounds_k = spec.cu_seqlens()
    q, k, v, dout = (np.asarray(x) for x in packed)
    head, group = sample(spec).kv_head, _group(spec)
    slopes, sinks = slopes_of(spec), sinks_of(spec)
    if slopes is None:
        slopes = np.zeros(spec.num_heads, np.float32)
    if sinks is None:
        sinks = np.full(spec.num_heads, -np.inf, np.float32)
    found = []
    for b, program in zip(sample(spec).sequences, programs, strict=True):
        len_q, len_k = spec.lengths_q[b], spec.lengths_k[b]
        rows, keys = slice(bounds_q[b], bounds_q[b + 1]), slice(*bounds_k[b : b + 2])
        own = [q[rows, group], k[keys, head], v[keys, head], dout[rows, group]]
        rooms = [_room(len_q), _room(len_k), _room(len_k), _room(len_q)]
        own = [
            np.pad(
                x.astype(np.float32), ((0, room - len(x)), *((0, 0),) * (x.ndim - 1))
            )
            for x, room in zip(own, rooms, strict=True)
        ]
        own += [slopes[group], sinks[group]]
        out = program.result()(*own, np.int32(len_q), np.int32(len_k))
        sizes = (len_q, len_q, len_k, len_k)
        found.append([np.asarray(x)[:n] for x, n in zip(out, sizes, strict=True)])
    return found


def errors(
    spec: VarlenSpec,
    form: Form,
    found: Sequence[np.ndarray],
    wanted: Sequence[Sequence[np.ndarray]],
) -> tuple[float, float]:
    """Errors of the result and the gradients: by the largest, and by norms."""
    head, group = sample(spec).kv_head, _group(spec)
    worst = [0.0, 0.0]
    for i, array in enumerate(found):
        lengths = spec.lengths_k if i >= 2 else spec.lengths_q
        heads = slice(head, head + 1) if i >= 2 else group
        rows = [
            form.layout.rows(array, lengths, b)[:, heads].astype(np.float32)
            for b in sample(spec).sequences
        ]
        factor = form.dq_factor if i == 1 else 1.0
        actual = factor * np.concatenate([x.reshape(-1) for x in rows])
        right = np.concatenate([one[i].reshape(-1) for one in wanted])
        by_norm = float(np.linalg.norm(actual - right) / np.linalg.norm(right))
        by_largest = harness.max_rel_error(actual, right)
        by_norm = by_norm if np.isfinite(by_norm) else float("inf")
        worst = [max(worst[0], by_largest), max(worst[1], by_norm)]
    return worst[0], worst[1]
