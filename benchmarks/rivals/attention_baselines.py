"""Ways of computing attention over sequences of different length: ours and others'.

Each `Form` takes packed queries, keys, values and gradients of the result, lays them
out as it wants them (outside the timing), and is timed on that. Axes: B sequences, T
packed tokens, L padded length, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import attention
from pallas_kernels.varlen_attention import quantize_heads, varlen_attention
from pallas_kernels.varlen_attention.specs import VarlenSpec


ALL = "softcap", "sinks", "alibi", "value_dim"
"""What a spec may ask for beyond masks."""

SCORES_BYTES = 8e9
"""Most memory for scores of an implementation that stores them."""


def padded_length(lengths: Sequence[int]) -> int:
    """What a batch is padded to; odd lengths have no gradient in cuDNN."""
    return -(-max(lengths) // 8) * 8


@dataclasses.dataclass(frozen=True)
class BatchLayout:
    """Where the rows of sequences lie in an array: packed is [T, heads, H].

    Args:
        padded: [B, L, heads, H] instead, zero in the padding, L a multiple of 8.
        batched: [1, T, heads, H] instead.
        heads_first: the axis of heads before that of rows.
    """

    padded: bool = False
    batched: bool = False
    heads_first: bool = False

    def lay(self, x: jax.Array, lengths: Sequence[int]) -> jax.Array:
        """The packed rows in this layout."""
        if self.padded:
            starts = np.cumsum([0, *lengths[:-1]])
            offsets = np.arange(padded_length(lengths))
            inside = offsets < np.asarray(lengths)[:, None]  # [B, L]
            rows = np.where(inside, starts[:, None] + offsets, 0)
            x = jnp.where(inside[..., None, None], x[rows], jnp.zeros((), x.dtype))
        elif self.batched:
            x = x[None]
        return x.swapaxes(1, 2) if self.heads_first else x

    def rows(self, x: np.ndarray, lengths: Sequence[int], sequence: int) -> np.ndarray:
        """The rows of one sequence, [len, heads, H]."""
        if self.heads_first:
            x = x.swapaxes(1, 2)
        length = lengths[sequence]
        if self.padded:
            return x[sequence, :length]
        start = sum(lengths[:sequence])
        return (x[0] if self.batched else x)[start : start + length]


@dataclasses.dataclass(frozen=True)
class Form:
    """An implementation on one spec.

    Args:
        attend: q, k, v, then `extra`, to the result.
        layout: where rows lie in q, k, v and the result.
        extra: further operands, or functions that make them.
        torch: whether it takes tensors of torch.
        prepare: turns q, k, v into what `attend` takes, outside the timing.
        dq_factor: what the gradient of q is to be multiplied with.
        versions: of packages that this environment does not have.
    """

    attend: Callable
    layout: BatchLayout = BatchLayout()
    extra: tuple[np.ndarray | Callable[[], jax.Array], ...] = ()
    torch: bool = False
    prepare: Callable | None = None
    dq_factor: float = 1.0
    versions: Mapping[str, str] = MappingProxyType({})

    def lay(self, spec: VarlenSpec, gradient: bool, *packed: jax.Array) -> tuple:
        """The operands of `function` from packed q, k, v and gradients."""
        q, k, v, dout = packed
        laid = [self.layout.lay(q, spec.lengths_q)]
        laid += [self.layout.lay(x, spec.lengths_k) for x in (k, v)]
        if self.prepare is not None:
            laid = list(self.prepare(*laid))
        if gradient:
            dout = self.layout.lay(dout, spec.lengths_q).astype(laid[0].dtype)
            laid.append(dout)
        return *laid, *(jnp.asarray(x() if callable(x) else x) for x in self.extra)

    def function(self, gradient: bool) -> Callable:
        """What is timed: a tuple of the result and, if asked for, gradients."""
        attend = self.attend
        if not gradient:
            return lambda *operands: (attend(*operands),)
        if self.torch:
            return functools.partial(_torch_gradients, attend)

        def run(q: Any, k: Any, v: Any, dout: Any, *extra: Any) -> tuple:
            out, back = jax.vjp(lambda q, k, v: attend(q, k, v, *extra), q, k, v)
            return out, *back(dout)

        return run


def _torch_gradients(
    attend: Callable, q: Any, k: Any, v: Any, dout: Any, *extra: Any
) -> tuple:
    import torch

    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, *extra)
    return out, *torch.autograd.grad(out, (q, k, v), dout)


def self_attention(spec: VarlenSpec) -> bool:
    """Whether there are as many keys as queries, everywhere."""
    return spec.lengths_q == spec.lengths_k


def dense(spec: VarlenSpec) -> bool:
    """Whether no sequence would be padded."""
    return self_attention(spec) and len(set(spec.lengths_q)) == 1


def slopes_of(spec: VarlenSpec) -> np.ndarray | None:
    """ALiBi's slope of each head, [N], if the spec has them."""
    heads = np.arange(1, spec.num_heads + 1, dtype=np.float32)
    return 2 ** (-8 * heads / spec.num_heads) if spec.alibi else None


def sinks_of(spec: VarlenSpec) -> np.ndarray | None:
    """A random sink for each head, [N], if the spec has them."""
    random = np.random.default_rng(0)
    return random.normal(size=spec.num_heads).astype("f4") if spec.sinks else None


def want_no_more(spec: VarlenSpec, *supported: str, windows: bool = True) -> None:
    """Refuse what an implementation cannot do."""
    values = spec.value_size != spec.head_dim
    asked = spec.softcap is not None, spec.sinks, spec.alibi, values
    missing = [n for n, on in zip(ALL, asked, strict=True) if on and n not in supported]
    if not windows and spec.window != (None, None):
        missing.append("window")
    if missing:
        raise NotImplementedError(f"it has no {', '.join(missing)}")


def want_package(module: str, package: str) -> None:
    """Refuse where a module is not there.

    Raises:
        NotImplementedError: the package is not installed.
    """
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # what it lies in
        found = None
    if found is None:
        raise NotImplementedError(f"{package} is not installed")


def _want_gpu() -> None:
    if jax.devices()[0].platform != "gpu":
        raise NotImplementedError("cuDNN and Hopper kernels need a GPU")


def _want_top_left(spec: VarlenSpec) -> None:
    if spec.causal and not self_attention(spec):
        raise NotImplementedError("its causal mask begins at the top left corner")


def ours(
    implementation: str,
    spec: VarlenSpec,
    gradient: bool,
    deterministic: bool = True,
    fp8: bool = False,
) -> Form:
    """`varlen_attention`."""
    if gradient and fp8:
        raise NotImplementedError("8-bit operands have no gradients")
    if not gradient and not deterministic:
        raise NotImplementedError("without gradients it is the same")
    same = self_attention(spec)
    per_head = {"alibi_slopes": slopes_of(spec), "sinks": sinks_of(spec)}
    per_head = {name: x for name, x in per_head.items() if x is not None}

    def attend(q: Any, k: Any, v: Any, *rest: Any) -> Any:
        scales, (cu_q, cu_k, *heads) = rest[: 3 * fp8], rest[3 * fp8 :]
        return varlen_attention(
            q,
            k,
            v,
            cu_q,
            None if same else cu_k,
            causal=spec.causal,
            window=spec.window,
            softcap=spec.softcap,
            deterministic=deterministic,
            implementation=implementation,
            **dict(zip(DESCALES if fp8 else (), scales, strict=True)),
            **dict(zip(per_head, heads, strict=True)),
        )

    return Form(
        attend,
        extra=(*spec.cu_seqlens(), *per_head.values()),
        prepare=functools.partial(quantized, spec) if fp8 else None,
    )


DESCALES = "q_descale", "k_descale", "v_descale"


def quantized(spec: VarlenSpec, *packed: jax.Array) -> tuple[jax.Array, ...]:
    """Q, k and v in 8 bits, then the scales of each sequence and key head."""
    bounds_q, bounds_k = spec.cu_seqlens()
    pairs = [
        quantize_heads(x, bounds, num_kv_heads=spec.num_kv_heads)
        for x, bounds in zip(packed, (bounds_q, bounds_k, bounds_k), strict=True)
    ]
    return *(data for data, _ in pairs), *(scale for _, scale in pairs)


def whole_rows(spec: VarlenSpec, gradient: bool) -> Form:
    """Our kernel on rows of one length, which make its schedule a constant."""
    lengths = set(spec.lengths_q), set(spec.lengths_k)
    if any(len(x) > 1 or padded_length([*x]) not in x for x in lengths):
        raise NotImplementedError("whole rows have one length, a multiple of 8")
    want_no_more(spec, "softcap", "sinks", "alibi")
    per_head = {"alibi_slopes": slopes_of(spec), "sinks": sinks_of(spec)}
    per_head = {name: x for name, x in per_head.items() if x is not None}

    def attend(q: Any, k: Any, v: Any, *heads: Any) -> Any:
        return attention(
            q,
            k,
            v,
            causal=spec.causal,
            window=spec.window,
            softcap=spec.softcap,
            implementation="mosaic_gpu",
            **dict(zip(per_head, heads, strict=True)),
        )

    return Form(attend, BatchLayout(padded=True), extra=tuple(per_head.values()))


def cudnn_packed(spec: VarlenSpec, gradient: bool) -> Form:
    """Packed sequences in cuDNN: a private function of jax."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    _want_gpu()
    _want_top_left(spec)
    left, right = spec.window
    want_no_more(spec, windows=spec.causal and right is None)
    kinds = cudnn.MaskType
    bounds = [x[None] for x in spec.cu_seqlens()]

    def attend(q: Any, k: Any, v: Any, q_offsets: Any, kv_offsets: Any) -> Any:
        return cudnn.dot_product_attention(
            q,
            k,
            v,
            q_seqlen=jnp.diff(q_offsets),
            kv_seqlen=jnp.diff(kv_offsets),
            q_offsets=q_offsets,
            kv_offsets=kv_offsets,
            scale=spec.head_dim**-0.5,
            mask_type=kinds.PADDING_CAUSAL if spec.causal else kinds.PADDING,
            sliding_window_length=None if left is None else left + 1,
        )

    return Form(attend, BatchLayout(batched=True), extra=tuple(bounds))


def cudnn_padded(spec: VarlenSpec, gradient: bool) -> Form:
    """A padded batch in cuDNN, by the public function of jax.

    ALiBi is a bias, [1, N, L, S], and a window to both sides a mask, [1, 1, L, S].
    """
    _want_gpu()
    _want_top_left(spec)
    want_no_more(spec, "alibi")
    extra: dict[str, Any] = {}
    if not dense(spec):
        extra["query_seq_lengths"] = np.asarray(spec.lengths_q, np.int32)
        extra["key_value_seq_lengths"] = np.asarray(spec.lengths_k, np.int32)
    if spec.alibi:
        extra["bias"] = functools.partial(alibi_bias, spec)
    left = spec.window[0] if spec.causal else None
    window = None if left is None else (left, 0)
    if window is None and spec.window != (None, None):
        length = max(spec.lengths_q)
        one = dataclasses.replace(spec, lengths_q=(length,), lengths_k=(length,))
        extra["mask"] = padding_mask(one)

    def attend(q: Any, k: Any, v: Any, *operands: Any) -> Any:
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            is_causal=spec.causal,
            local_window_size=window,
            implementation="cudnn",
            **dict(zip(extra, operands, strict=True)),
        )

    return Form(attend, BatchLayout(padded=True), extra=tuple(extra.values()))


def alibi_bias(spec: VarlenSpec) -> jax.Array:
    """ALiBi's bias of a padded batch of self-attention: [1, N, L, L]."""
    places = jnp.arange(padded_length(spec.lengths_q))
    distance = jnp.abs(places[:, None] - places).astype(jnp.float32)
    bias = -jnp.asarray(slopes_of(spec))[:, None, None] * distance
    return bias[None].astype(jnp.bfloat16)


def padding_mask(spec: VarlenSpec) -> np.ndarray:
    """Which keys the queries of a padded batch attend to: [B, 1, L, S]."""
    len_q, len_k = (np.asarray(x) for x in (spec.lengths_q, spec.lengths_k))
    i = np.arange(padded_length(spec.lengths_q))[None, :, None]
    j = np.arange(padded_length(spec.lengths_k))[None, None, :]
    mask = (i < len_q[:, None, None]) & (j < len_k[:, None, None])
    distance = j - i - (len_k - len_q)[:, None, None]
    left, right = spec.window
    right = 0 if spec.causal else right
    mask &= True if left is None else distance >= -left
    mask &= True if right is None else distance <= right
    return mask[:, None]


def want_room(spec: VarlenSpec) -> None:
    """Refuse to store scores that take too much."""
    pairs = len(spec.lengths_q) * max(spec.lengths_q) * max(spec.lengths_k)
    if (nbytes := 4.0 * pairs * spec.num_heads) > SCORES_BYTES:
        raise NotImplementedError(f"the scores would take {nbytes / 1e9:.0f} GB")


def xla_mask(spec: VarlenSpec, gradient: bool) -> Form:
    """XLA on a padded batch with a mask, and a bias for ALiBi."""
    want_room(spec)
    want_no_more(spec, "alibi")
    bias = (functools.partial(alibi_bias, spec),) if spec.alibi else ()

    def attend(q: Any, k: Any, v: Any, mask: Any, *bias: Any) -> Any:
        return jax.nn.dot_product_attention(
            q, k, v, *bias, mask=mask, implementation="xla"
        )

    return Form(attend, BatchLayout(padded=True), extra=(padding_mask(spec), *bias))


def tokamax(spec: VarlenSpec, gradient: bool) -> Form:
    """Tokamax's Mosaic GPU attention on a padded batch, with its own heuristics."""
    want_package("tokamax", "tokamax")
    _want_gpu()
    _want_top_left(spec)
    want_no_more(spec, "softcap", "alibi")
    extra: dict[str, Any] = {}
    if not dense(spec):  # what rows beyond the queries give counts nowhere
        extra["key_value_seq_lengths"] = np.asarray(spec.lengths_k, np.int32)
    if spec.alibi:
        extra["bias"] = functools.partial(alibi_bias, spec)
    left, right = (
        padded_length(spec.lengths_k) if w is None else w for w in spec.window
    )
    window = (
        None if spec.window == (None, None) else (left, 0 if spec.causal else right)
    )

    def attend(q: Any, k: Any, v: Any, *operands: Any) -> Any:
        return importlib.import_module("tokamax").dot_product_attention(
            q,
            k,
            v,
            is_causal=spec.causal,
            local_window_size=window,
            logits_soft_cap=spec.softcap,
            implementation="mosaic",
            **dict(zip(extra, operands, strict=True)),
        )

    return Form(attend, BatchLayout(padded=True), extra=tuple(extra.values()))


def jax_sample(spec: VarlenSpec, gradient: bool) -> Form:
    """The Mosaic GPU sample of jax: sequences of one length, in fp16 as it wants it."""
    _want_gpu()
    want_no_more(spec, windows=False)
    if not dense(spec):
        raise NotImplementedError("sequences must have one length")
    if gradient and (spec.causal or spec.head_dim > 128):
        raise NotImplementedError("no gradient of causal attention or head dim 256")
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    length = spec.lengths_q[0]
    block_q, block_kv = (128 if spec.head_dim == 64 else 64), 128
    if gradient or spec.head_dim == 256:
        block_q, block_kv = 64, 64
    if length % (2 * block_q):
        raise NotImplementedError(f"lengths must be multiples of {2 * block_q}")
    names = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
    config = attention_mgpu.TuningConfig(
        block_q=block_q,
        block_kv=block_kv,
        max_concurrent_steps=2,
        causal=spec.causal,
        **(dict.fromkeys(names, 64) if gradient else {}),
    )
    scale = spec.head_dim**-0.5

    def prepare(q: Any, k: Any, v: Any) -> Any:
        # It does not scale the scores.
        q = (q.astype(jnp.float32) * scale).astype(jnp.float16)
        return q, k.astype(jnp.float16), v.astype(jnp.float16)

    def attend(q: Any, k: Any, v: Any) -> Any:
        return attention_mgpu.attention(q, k, v, config)

    return Form(attend, BatchLayout(padded=True), prepare=prepare, dq_factor=scale)


def rounded(tokens: int) -> int:
    """The budget of a packed buffer: a multiple of 64 rows."""
    return -(-tokens // 64) * 64
