"""Cross-entropy over a large vocabulary without storing its logits.

Axes: B batch, T tokens of a (packed) row, D model, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jaxscale.sharding.operations import constrain
from jaxscale.sharding.rules import REPLICATED, AxisRules, MeshAxes


class LossSums(NamedTuple):
    """Sums over the unmasked tokens of a batch; divide by `tokens` for means."""

    nll: Float[Array, ""]
    """Negative log-likelihood in nats."""
    z_loss: Float[Array, ""]
    """The penalty ``z_loss * logsumexp**2``, its coefficient included."""
    tokens: Int[Array, ""]
    """Number of unmasked tokens."""
    correct: Int[Array, ""] | None
    """Number of unmasked tokens whose target has the largest logit; None for
    regression."""
    inputs: Int[Array, ""] | None = None
    """Number of tokens that the model read, if it differs from the unmasked ones."""


def chunked_cross_entropy(
    hidden: Float[Array, "*B T D"],
    kernel: Float[Array, "D V"],
    targets: Int[Array, "*B T"],
    mask: Bool[Array, "*B T"],
    *,
    chunk_size: int = 1024,
    z_loss: float = 0.0,
    bias: Float[Array, "V"] | None = None,
    softcap: float | None = None,
    vocab_size: int | None = None,
    rules: AxisRules = REPLICATED,
    vocab_axes: tuple[str, ...] = (),
) -> tuple[Float[Array, ""], LossSums]:
    r"""Summed cross-entropy of ``hidden @ kernel + bias`` against `targets`.

    .. math:: L = \sum_t m_t (\mathrm{lse}_t - l_{t, y_t} + z\, \mathrm{lse}_t^2)

    with logits :math:`l_t = h_t W + b` and :math:`\mathrm{lse}_t = \log \sum_v
    e^{l_{tv}}`. Logits are computed for one chunk of positions at a time, in fp32; the
    matmul takes its operands in the type of `hidden`. When the loss is differentiated,
    the forward pass also computes the gradients of `hidden` and `kernel`, so that the
    logits are computed once (three matmuls instead of the four of a rematerialized
    loss) and nothing of size [T, V] is saved for the backward pass, which only scales
    them.

    Under a mesh the loss runs inside one `jax.shard_map`: the batch is sharded by the
    rule `batch`, the columns of `kernel` by `vocab`, and the gradient of `kernel` is
    reduced over the devices once, after the last chunk.

    Args:
        hidden: Output of the last norm; its type is that of the matmul.
        kernel: Output projection, in the type of the parameters.
        targets: Index of the correct token; ignored where masked.
        mask: Positions that count.
        chunk_size: Positions per row whose logits are computed at a time. A larger
            chunk takes more memory (6 V bytes per token on each device) and accumulates
            the fp32 gradient of `kernel` fewer times, which makes no difference on a
            GPU above about 2,000 tokens (rows times positions).
        z_loss: Coefficient of the penalty that keeps the log-sum-exp near zero.
        bias: Added to the logits.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        vocab_size: Columns of `kernel` that are tokens; the others are padding, which
            does not contribute to the loss and has no gradient. None is all.
        rules: Sharding rules of the arrays. On Manual mesh axes arrays are local: the
            caller reduces over them.
        vocab_axes: Manual mesh axes over which the caller has split the columns of
            `kernel`, and `bias`, outermost first. Each device gets the full loss and
            gradient of `hidden`, and the gradients of its columns.

    Returns:
        The sum over unmasked tokens, penalty included, and its parts. Only the first is
        differentiable.

    Raises:
        ValueError: `chunk_size` or `softcap` is not positive, or `z_loss` is negative
            or not finite.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> hidden, kernel = jnp.ones((4, 8)), jnp.zeros((8, 16))
        >>> targets, mask = jnp.arange(4), jnp.array([True, True, True, False])
        >>> loss, sums = chunked_cross_entropy(hidden, kernel, targets, mask)
        >>> print(f"{loss / int(sums.tokens):.4f} = log 16")
        2.7726 = log 16

    References:
        Z-loss: PaLM (arXiv 2204.02311), section 5. Gradients in the forward pass:
        Liger (arXiv 2410.10989), section 3.2, which does it inside Triton kernels.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size {chunk_size} must be at least 1 position")
    if not 0 <= z_loss < math.inf:
        raise ValueError(
            f"z_loss {z_loss} must not be negative, infinite or NaN; 0 switches it off"
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(
            f"softcap {softcap} must be positive and finite, or None for none"
        )
    flat = hidden.ndim == 2
    if flat:
        hidden, targets, mask = hidden[None], targets[None], mask[None]
    layout = _layout(rules, hidden.shape[1], vocab_axes, has_rows=not flat)
    rules = layout.rules
    hidden = constrain(hidden, ("batch", "tokens", None), rules)
    kernel = constrain(kernel, ("embed", "vocab"), rules)
    columns = kernel.shape[1] * math.prod(map(jax.lax.axis_size, vocab_axes))
    settings = _Settings(
        chunk_size=chunk_size,
        z_loss=z_loss,
        softcap=softcap,
        vocab_size=None if vocab_size == columns else vocab_size,
        layout=layout,
        varying=tuple(_varying(x) for x in (hidden, kernel, bias) if x is not None),
    )
    return _cross_entropy(settings, hidden, kernel, bias, targets, mask)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Layout:
    """The mesh axes of each dimension inside the `shard_map` of the loss."""

    mesh: tuple[str, ...] = ()
    """All axes that are not Manual already."""
    batch: tuple[str, ...] = ()
    vocab: tuple[str, ...] = ()
    embed: tuple[str, ...] = ()
    """Batch axes that the gradient of the kernel is scattered over (FSDP)."""
    tokens: tuple[str, ...] = ()
    """Vocabulary axes that the gradient of `hidden` is scattered over."""
    manual_vocab: tuple[str, ...] = ()
    """Axes that are Manual already and split the columns of the kernel."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All axes that split the columns of the kernel, outermost first."""
        return self.manual_vocab + self.vocab

    @property
    def rules(self) -> AxisRules:
        """The same as rules, without axes that the loss does not split."""
        return AxisRules(
            batch=self.batch, vocab=self.vocab, embed=self.embed, tokens=self.tokens
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Settings:
    chunk_size: int
    z_loss: float
    softcap: float | None
    vocab_size: int | None
    """Columns without padding, if there is padding."""
    layout: _Layout
    varying: tuple[frozenset[str], ...]
    """The Manual axes that each differentiable operand varies over."""


def _varying(x: Array) -> frozenset[str]:
    """The Manual mesh axes whose devices hold different values of `x`."""
    return jax.typeof(x).manual_axis_type.varying


def _layout(
    rules: AxisRules, length: int, vocab_axes: tuple[str, ...], *, has_rows: bool
) -> _Layout:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _Layout()
    free = {
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind != AxisType.Manual
    }

    def names(entry: MeshAxes) -> tuple[str, ...]:
        entry = (entry,) if isinstance(entry, str) else entry or ()
        return tuple(name for name in entry if name in free)

    batch = names(rules.batch) if has_rows else ()
    vocab, embed, tokens = names(rules.vocab), names(rules.embed), names(rules.tokens)
    split = 1
    for name in vocab:
        split *= mesh.shape[name]
    return _Layout(
        mesh=tuple(sorted(free)),
        batch=batch,
        vocab=vocab,
        embed=embed if set(embed) <= set(batch) else (),
        tokens=tokens if tokens == vocab and length % split == 0 else (),
        manual_vocab=vocab_axes,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    settings: _Settings,
    hidden: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    mask: Array,
) -> tuple[Array, LossSums]:
    return _run(settings, hidden, kernel, bias, targets, mask, gradients=False)[0]


def _forward(settings: _Settings, *operands: Any) -> tuple[Any, Any]:
    return _run(settings, *operands, gradients=True)


def _backward(settings: _Settings, gradients: Any, cotangents: Any) -> Any:
    scale = cotangents[0]
    leaves, structure = jax.tree.flatten(gradients)
    for i, (g, varying) in enumerate(zip(leaves, settings.varying, strict=True)):
        g = (scale * g.astype(jnp.float32)).astype(g.dtype)
        # The gradient of a value that is equal on several devices is the sum over them.
        sums = tuple(_varying(g) - varying)
        leaves[i] = jax.lax.psum(g, sums) if sums else g
    return *jax.tree.unflatten(structure, leaves), None, None


_cross_entropy.defvjp(_forward, _backward)


def _run(
    settings: _Settings,
    hidden: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    mask: Array,
    *,
    gradients: bool,
) -> tuple[tuple[Array, LossSums], Any]:
    """The loss, and its gradients if requested, on this device or on the whole mesh."""
    # FSDP gathers the kernel on the way into the shard_map: in the computation's type.
    operands: tuple[Any, ...]
    operands = (hidden, kernel.astype(hidden.dtype), bias, targets, mask)
    function = functools.partial(_local, settings, gradients=gradients)
    layout = settings.layout
    if layout.batch or layout.vocab:
        axes = (
            ("batch", None, None),
            (None, "vocab"),
            ("vocab",),
            *[("batch", None)] * 2,
        )
        operands = tuple(
            None if x is None else constrain(x, names, layout.rules)
            for x, names in zip(operands, axes, strict=True)
        )
        specs = tuple(
            None if x is None else layout.rules.spec(*names)
            for x, names in zip(operands, axes, strict=True)
        )
        out_gradients = (
            layout.rules.spec("batch", "tokens", None),
            layout.rules.spec("embed", "vocab"),
            None if bias is None else layout.rules.spec("vocab"),
        )
        mapped = jax.shard_map(
            function,
            axis_names=set(layout.mesh),
            in_specs=specs,
            out_specs=(PartitionSpec(), out_gradients if gradients else None),
            check_vma=False,
        )
        # As in `per_shard`: outside of `jax.jit` it would run one by one.
        function = jax.jit(mapped, inline=True)
    value, grads = function(*operands)
    if grads is not None:
        d_hidden, d_kernel, d_bias = grads
        grads = (
            d_hidden,
            d_kernel.astype(kernel.dtype),
            None if d_bias is None or bias is None else d_bias.astype(bias.dtype),
        )
    return value, grads


def _local(
    settings: _Settings,
    hidden: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    mask: Array,
    *,
    gradients: bool,
) -> tuple[tuple[Array, LossSums], Any]:
    """One device's shard: a scan over chunks of positions, then the reductions."""
    layout = settings.layout
    rows, length, features = hidden.shape
    chunks = -(-length // settings.chunk_size)
    size = -(-length // chunks)
    padding = chunks * size - length

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 2))
        x = x.reshape(rows, chunks, size, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)  # [chunks, B, T, ...]

    def body(carry: Any, chunk: Any) -> tuple[Any, Any]:
        sums, d_kernel, d_bias = carry
        h, target, keep = chunk
        new_sums, d_logits = _chunk(settings, h, kernel, bias, target, keep)
        sums = jax.tree.map(jnp.add, sums, new_sums)
        if not gradients:
            return (sums, None, None), None
        if d_bias is not None:
            d_bias += d_logits.sum((0, 1))
        d_logits = d_logits.astype(hidden.dtype)
        d_kernel += jnp.einsum(
            "btd,btv->dv", h, d_logits, preferred_element_type=jnp.float32
        )  # [D, V]
        d_h = jnp.einsum("btv,dv->btd", d_logits, kernel)  # [B, T, D]
        return (sums, d_kernel, d_bias), d_h

    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    d_kernel = jnp.zeros(kernel.shape, jnp.float32) if gradients else None
    d_bias = (
        jnp.zeros(bias.shape, jnp.float32) if gradients and bias is not None else None
    )
    carry = (LossSums(zero, zero, none, none), d_kernel, d_bias)
    varying = tuple(_varying(hidden) | _varying(kernel) | _varying(mask))
    if varying:
        carry = jax.tree.map(lambda x: jax.lax.pcast(x, varying, to="varying"), carry)
    carry, d_hidden = jax.lax.scan(body, carry, (cut(hidden), cut(targets), cut(mask)))
    sums, d_kernel, d_bias = carry
    if layout.batch:
        sums = jax.tree.map(lambda x: jax.lax.psum(x, layout.batch), sums)
    value = (sums.nll + sums.z_loss, sums)
    if not gradients:
        return value, None
    d_hidden = jnp.moveaxis(d_hidden, 0, 1)  # [B, chunks, T, D]
    d_hidden = d_hidden.reshape(rows, -1, features)[:, :length]  # [B, chunks T, D]
    others = tuple(name for name in layout.batch if name not in layout.embed)
    d_hidden = _sum(d_hidden, layout.columns, scatter=layout.tokens, dimension=1)
    d_kernel = _sum(d_kernel, others + layout.embed, scatter=layout.embed, dimension=0)
    if d_bias is not None:
        d_bias = _sum(d_bias, layout.batch, scatter=(), dimension=0)
    return value, (d_hidden, d_kernel, d_bias)


def _sum(
    x: Array, axes: tuple[str, ...], *, scatter: tuple[str, ...], dimension: int
) -> Array:
    """The sum over mesh `axes`, scattered over those in `scatter`."""
    if scatter:
        x = jax.lax.psum_scatter(x, scatter, scatter_dimension=dimension, tiled=True)
    rest = tuple(name for name in axes if name not in scatter)
    return jax.lax.psum(x, rest) if rest else x


def _chunk(
    settings: _Settings,
    hidden: Array,
    kernel: Array,
    bias: Array | None,
    targets: Array,
    mask: Array,
) -> tuple[LossSums, Array]:
    """The sums of one chunk, and the gradient of its logits before bias and matmul."""
    logits = jnp.einsum(
        "btd,dv->btv", hidden, kernel, preferred_element_type=jnp.float32
    )  # [B, T, V]
    if bias is not None:
        logits += bias.astype(jnp.float32)
    cap = settings.softcap
    if cap is not None:
        logits = cap * jnp.tanh(logits / cap)

    vocab = settings.layout.columns
    # These columns start at the position of the device along `vocab`.
    first = jax.lax.axis_index(vocab) * kernel.shape[1] if vocab else 0
    columns = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2)
    hot = columns == (targets - first)[..., None]  # [B, T, V]
    slope = None if cap is None else 1 - (logits / cap) ** 2
    if settings.vocab_size is not None:
        logits = jnp.where(columns < settings.vocab_size - first, logits, -jnp.inf)

    largest = logits.max(-1)  # [B, T]
    target = jnp.where(hot, logits, 0).sum(-1)  # [B, T]
    if vocab:
        largest, target = jax.lax.pmax(largest, vocab), jax.lax.psum(target, vocab)
    total = jnp.exp(logits - largest[..., None]).sum(-1)
    if vocab:
        total = jax.lax.psum(total, vocab)
    lse = largest + jnp.log(total)

    sums = LossSums(
        nll=jnp.where(mask, lse - target, 0).sum(),
        z_loss=settings.z_loss * jnp.where(mask, lse**2, 0).sum(),
        tokens=mask.sum(dtype=jnp.int32),
        correct=(mask & (target >= largest)).sum(dtype=jnp.int32),
    )
    scale = jnp.where(mask, 1 + 2 * settings.z_loss * lse, 0)[..., None]  # [B, T, 1]
    d_logits = scale * jnp.exp(logits - lse[..., None])  # [B, T, V]
    d_logits -= (hot & mask[..., None]).astype(jnp.float32)
    if slope is not None:
        d_logits *= slope
    return sums, d_logits
