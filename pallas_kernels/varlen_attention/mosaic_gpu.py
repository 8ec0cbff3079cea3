"""Hopper implementation of variable-length attention: what surrounds the kernels.

The kernels take a batch of R packed rows in one grid, so that the blocks of all rows
share the multiprocessors; `jax.vmap` of a call makes one with more rows. What is done
here: checks, padding, the choice of the kernel, the batching rule.

Axes: R rows of the batch, T packed queries, S packed keys, N query heads, K key/value
heads, H head dim.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import (
    DeviceSpec,
    as_varying,
    check_hopper,
    check_smem,
    varying,
)
from pallas_kernels.mosaic.copies import CHUNK
from pallas_kernels.partition import check_local
from pallas_kernels.varlen_attention import xla
from pallas_kernels.varlen_attention.backward import backward
from pallas_kernels.varlen_attention.backward_relative import (
    backward_relative,
    relative_smem,
)
from pallas_kernels.varlen_attention.backward_short import backward_short
from pallas_kernels.varlen_attention.batching import LARGEST_INT, batched
from pallas_kernels.varlen_attention.config import (
    BACKWARD_TILES,
    FORWARD_DIMS,
    HEAD_DIMS,
    LATENT_DIMS,
    LATENT_GRADIENT_DIMS,
    MOST_SHORT_SEQUENCES,
    ROWS,
    BackwardBlocks,
    ForwardBlocks,
    MosaicGpuConfig,
    Problem,
    backward_blocks,
    backward_smem,
    forward_blocks,
    forward_smem,
)
from pallas_kernels.varlen_attention.forward import forward
from pallas_kernels.varlen_attention.forward_short import forward_short
from pallas_kernels.varlen_attention.inputs import (
    Inputs,
    Passes,
    Scores,
    check_arrays,
)
from pallas_kernels.varlen_attention.mainloop import tile_terms


def varlen_attention_mosaic_gpu(
    x: Inputs, scores: Scores, *, device: DeviceSpec | None, config: object
) -> Passes:
    """The passes by the Hopper kernels, if they can serve the inputs.

    Head dims other than 64, 96, 128 and 256 run as the next of them, but up to 192 with
    values of up to 128 as these (`LATENT_DIMS`). Gradients, ALiBi and 8 bits take 128
    for 96, and gradients 256 and 128 for the latter. The columns that are missing are
    zeros in shared memory; only in 8 bits, with a relative bias and up to 64 arrays are
    padded. The gradient with a relative bias is that of the portable implementation
    where there is no kernel for it (`_Kernels.has_backward`).
    """
    device = check_hopper(device, "varlen_attention")
    check_local("varlen_attention", x.q, x.k, x.v)
    check_arrays(x, HEAD_DIMS[-1], fp8=True)
    if config is not None and not isinstance(config, MosaicGpuConfig):
        raise Unsupported(
            f"mosaic_gpu varlen_attention takes a MosaicGpuConfig, got {config!r}; pass"
            " the config of the implementation that you name"
        )
    for terms in (x.query_terms, x.key_terms):
        if terms is not None and terms.dtype != x.q.dtype:
            raise Unsupported(
                f"varlen_attention: terms of a relative bias of type {terms.dtype.name}"
                f", the kernel takes that of q, {x.q.dtype.name}; cast them or use "
                "implementation='xla'"
            )
    kernels = _Kernels(scores, config or MosaicGpuConfig(), device)
    # Raised here, where another implementation may still be chosen.
    problem = _problem(x, kernels.forward_dims(x))
    kernels.forward_blocks(dataclasses.replace(problem, rows=1))
    return kernels


def _problem(x: Inputs, head_dims: tuple[int, int]) -> Problem:
    head_dim, value_dim = head_dims
    for name, a in (("q", x.q), ("k", x.k)):
        if (size := math.prod(a.shape[1:])) > LARGEST_INT:
            raise Unsupported(
                f"varlen_attention: {name} has {size} elements in a row, the kernel "
                f"counts to {LARGEST_INT}; split it or use implementation='xla'"
            )
    return Problem(
        rows=x.q.shape[0],
        queries=x.q.shape[1],
        keys=x.k.shape[1],
        max_seqs=x.cu_q.shape[1] - 1,
        heads=x.q.shape[2],
        kv_heads=x.k.shape[2],
        head_dim=head_dim,
        dtype=x.q.dtype,
        value_dim=None if value_dim == head_dim else value_dim,
    )


# --- The two passes -------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The passes by the Hopper kernels."""

    scores: Scores
    config: MosaicGpuConfig
    device: DeviceSpec

    def forward_dims(self, x: Inputs) -> tuple[int, int]:
        """Head dims of queries and keys and of values in the forward kernel."""
        if self.is_latent(x) and self.config.forward is None:
            return LATENT_DIMS
        # With slopes, heads of 96 would take more registers than there are.
        own = not (x.fp8 or self.scores.alibi or self.scores.relative)
        return _next_of(FORWARD_DIMS if own else HEAD_DIMS, x)

    def backward_dims(self, x: Inputs) -> tuple[int, int]:
        """The same in the backward kernel."""
        return LATENT_GRADIENT_DIMS if self.is_latent(x) else _next_of(HEAD_DIMS, x)

    def is_latent(self, x: Inputs) -> bool:
        """Whether heads have the sizes of multi-head latent attention."""
        most, most_values = LATENT_DIMS
        fits = most_values < x.q.shape[3] <= most and x.v.shape[3] <= most_values
        return fits and not x.fp8 and self.scores.relative is None

    def forward(self, x: Inputs, with_rest: bool) -> tuple[Array, Array, Array | None]:
        """``(out, lse, rest)``."""
        head_dims = self.forward_dims(x)
        by_row = _by_row(x, head_dims)
        axes = varying(*jax.tree.leaves(by_row))
        results = batched(functools.partial(self._forward, head_dims, with_rest))(
            by_row
        )
        out, lse, *rest = (as_varying(a, axes) for a in results)
        out, *rest = (a[..., : x.v.shape[3]] for a in (out, *rest))  # [R, T, N, Hv]
        return out, lse, rest[0] if with_rest else None

    def _forward(
        self, head_dims: tuple[int, int], with_rest: bool, x: Inputs
    ) -> tuple[Array, ...]:
        x = x.with_known()
        problem = _problem(x, head_dims)
        blocks = self.forward_blocks(problem)
        if blocks.consumers == 1:
            return forward_short(problem, self.scores, blocks, x, with_rest)
        return forward(problem, self.scores, blocks, x, with_rest, self.device)

    def backward(self, x: Inputs, dout: Array, lse: Array, delta: Array) -> Inputs:
        """The gradients."""
        head_dims = self.backward_dims(x)
        by_row = _by_row(x._replace(sinks=None), head_dims)
        if not self.has_backward(_problem(by_row, head_dims)):
            portable = xla.default_passes(self.scores, x, self.device)
            return portable.backward(x, dout, lse, delta)
        dout = _pad(dout, by_row.v.shape[3])
        axes = varying(*jax.tree.leaves((by_row, dout)))
        run = functools.partial(self._backward, head_dims)
        grads = batched(run)(by_row, dout, lse, delta)
        dq, dk, dv, *more = (as_varying(a, axes) for a in grads)
        dq, dk = (a[..., : x.q.shape[3]] for a in (dq, dk))  # [R, T or S, N or K, H]
        dv = dv[..., : x.v.shape[3]]  # [R, S, K, Hv]
        grads = x._replace(q=dq, k=dk, v=dv)
        if x.slopes is not None:
            slopes = jnp.sum(more[0], axis=0)  # [R, N] to [N]
            return grads._replace(slopes=slopes.astype(x.slopes.dtype))
        terms = {n: getattr(x, n) for n in ("query_terms", "key_terms")}
        there = (n for n, a in terms.items() if a is not None)
        entries = {
            n: a[..., : terms[n].shape[-1]] for n, a in zip(there, more, strict=True)
        }  # [R, T or S, N, P]
        return grads._replace(**entries)

    def _backward(
        self,
        head_dims: tuple[int, int],
        x: Inputs,
        dout: Array,
        lse: Array,
        delta: Array,
    ) -> tuple[Array, ...]:
        x = x.with_known()
        problem = _problem(x, head_dims)
        blocks = self.backward_blocks(problem)
        if blocks.consumers == 1:
            run = backward_short if self.scores.relative is None else backward_relative
            return run(problem, self.scores, blocks, x, dout, lse, delta)
        lse = jnp.where(lse > -jnp.inf, lse, jnp.inf)
        grads = backward(problem, self.scores, blocks, x, dout, lse, delta)
        return tuple(grad for grad in grads if grad is not None)

    def forward_blocks(self, problem: Problem) -> ForwardBlocks:
        """Return the tiling of the forward kernel; raises where there is none."""
        alibi = self.scores.alibi
        blocks = self.config.forward or forward_blocks(
            problem, self.device, alibi, self.scores.window
        )
        if self.scores.relative is not None and self.config.forward is None:
            blocks = ForwardBlocks(block_k=64)  # the terms take more room than the keys
        most = MOST_SHORT_SEQUENCES
        if problem.fp8 and (self.scores.relative or blocks.consumers == 1):
            raise Unsupported(
                "varlen_attention: 8-bit operands take no relative bias and "
                f"consumers=2 or 3, got consumers={blocks.consumers}; use bfloat16"
            )
        takes_80 = (
            not problem.fp8
            and blocks.consumers > 1
            and problem.page is None
            and problem.value_size in (128, 256)
        )
        if blocks.block_k == 80 and not takes_80:
            raise Unsupported(
                "varlen_attention: block_k=80 takes values of 128 or 256 columns in 16 "
                "bits, consumers=2 or more and no pages, got "
                f"{problem.value_size} columns of {problem.dtype}, consumers="
                f"{blocks.consumers} and page={problem.page}; expected 64 or 128"
            )
        if blocks.consumers == 1 and (self.scores.relative or problem.max_seqs > most):
            raise Unsupported(
                "varlen_attention: consumers=1 takes no relative bias and at most "
                f"{most} sequences, got {problem.max_seqs}; expected 2 or 3"
            )
        if problem.groups % blocks.heads or (self.scores.relative and blocks.heads > 1):
            raise Unsupported(
                f"varlen_attention: heads={blocks.heads} of {problem.groups} query "
                "heads, expected a divisor, and 1 with a relative bias"
            )
        size = forward_smem(problem, blocks)
        if (relative := tile_terms(self.scores, blocks)) is not None:
            size += relative.smem(blocks.stages, problem.dtype.itemsize)
        check_smem(size, self.device, f"varlen_attention with {blocks}")
        return blocks

    def has_backward(self, problem: Problem) -> bool:
        """Whether there is a backward kernel; for some relative biases there is none.

        Theirs takes what the one for short sequences takes, whatever the lengths.
        """
        if self.scores.relative is None or self.config.backward is not None:
            return True
        few = problem.max_seqs <= MOST_SHORT_SEQUENCES
        return problem.head_dim == 64 and few and not self.scores.alibi

    def backward_blocks(self, problem: Problem) -> BackwardBlocks:
        """Return the tiling of the backward kernel; raises where there is none."""
        alibi, relative = self.scores.alibi, self.scores.relative is not None
        blocks = self.config.backward
        if blocks is None:
            window = self.scores.window
            blocks = backward_blocks(problem, self.device, alibi, relative, window)
        if relative and blocks.consumers != 1:
            raise Unsupported(
                "varlen_attention: a gradient with a relative bias and consumers="
                f"{blocks.consumers}, expected 1"
            )
        tile, expected = (
            (blocks.block_q, blocks.block_k),
            BACKWARD_TILES[problem.head_dim],
        )
        if blocks.consumers == 1:
            expected, most = (ROWS, ROWS), MOST_SHORT_SEQUENCES
            if problem.head_dim != 64 or alibi or problem.max_seqs > most:
                raise Unsupported(
                    "varlen_attention: a gradient with consumers=1 takes head dim 64, "
                    f"no ALiBi and at most {most} sequences, got head dim "
                    f"{problem.head_dim} and {problem.max_seqs} sequences; expected 2"
                )
        if tile != expected:
            raise Unsupported(
                f"varlen_attention: block_q, block_k = {tile} with head dim"
                f" {problem.head_dim}, expected {expected}"
            )
        if problem.groups % blocks.splits:
            raise Unsupported(
                f"varlen_attention: splits={blocks.splits} of {problem.groups} query "
                "heads, expected a divisor"
            )
        size = backward_smem(problem, blocks)
        if relative:
            size += relative_smem(problem, self.scores)
        check_smem(size, self.device, f"gradient of varlen_attention with {blocks}")
        return blocks


def _next_of(head_dims: tuple[int, ...], x: Inputs) -> tuple[int, int]:
    """The least head dim that has room for keys and values, for both."""
    size = min(n for n in head_dims if n >= max(x.q.shape[3], x.v.shape[3]))
    return size, size


def _by_row(x: Inputs, head_dims: tuple[int, int]) -> Inputs:
    """The arrays that kernels read: lines of heads, numbers by row, lines of terms.

    Args:
        x: the inputs of the call.
        head_dims: those of the kernel, of queries and keys, and of values.
    """
    # What the copy engine reads past a row is zero: the kernels of tiles need no more
    # than lines of 16 bytes, and a chunk.
    whole = x.fp8 or head_dims[0] == CHUNK or x.query_terms is not None
    whole |= x.key_terms is not None

    def padded(a: Array, head_dim: int) -> Array:
        return _pad(a, head_dim if whole else max(-(-a.shape[3] // 8) * 8, CHUNK))

    def lines(a: Array | None) -> Array | None:
        # The copy engine moves whole lines of 16 bytes.
        return None if a is None else _pad(a, -(-a.shape[-1] // 8) * 8)

    return x.numbers_by_row()._replace(
        q=padded(x.q, head_dims[0]),
        k=padded(x.k, head_dims[0]),
        v=padded(x.v, head_dims[1]),
        query_terms=lines(x.query_terms),
        key_terms=lines(x.key_terms),
    )


def _pad(x: Array, size: int) -> Array:
    """The last dimension filled up with zeros."""
    missing = size - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]) if missing else x
