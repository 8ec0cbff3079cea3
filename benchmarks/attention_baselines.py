"""Ways of computing attention over sequences of different length: ours and others'.

Each `Form` takes packed queries, keys, values and gradients of the result, lays them
out as it wants them (outside the timing), and is timed on that. Axes: B sequences, T
packed tokens, L padded length, N query heads, K key/value heads, H head dim.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.varlen_attention import varlen_attention
from pallas_kernels.varlen_attention.specs import VarlenSpec


SCORES_BYTES = 8e9
"""Most memory for scores of an implementation that stores them."""


def padded_length(lengths: Sequence[int]) -> int:
    """What a batch is padded to; odd lengths have no gradient in cuDNN."""
    return -(-max(lengths) // 8) * 8


@dataclasses.dataclass(frozen=True)
class Layout:
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
        extra: further operands.
        torch: whether it takes tensors of torch.
        prepare: turns q, k, v into what `attend` takes, outside the timing.
        dq_factor: what the gradient of q is to be multiplied with.
    """

    attend: Callable
    layout: Layout = Layout()
    extra: tuple[np.ndarray, ...] = ()
    torch: bool = False
    prepare: Callable | None = None
    dq_factor: float = 1.0

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
        return *laid, *(jnp.asarray(x) for x in self.extra)

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


def _want_gpu() -> None:
    if jax.devices()[0].platform != "gpu":
        raise NotImplementedError("cuDNN and Hopper kernels need a GPU")


def _want_top_left(spec: VarlenSpec) -> None:
    if spec.causal and not self_attention(spec):
        raise NotImplementedError("its causal mask begins at the top left corner")


def ours(implementation: str, spec: VarlenSpec, gradient: bool) -> Form:
    """`varlen_attention`."""
    same = self_attention(spec)

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        return varlen_attention(
            q,
            k,
            v,
            cu_q,
            None if same else cu_k,
            causal=spec.causal,
            implementation=implementation,
        )

    return Form(attend, extra=spec.cu_seqlens())


def cudnn_packed(spec: VarlenSpec, gradient: bool) -> Form:
    """Packed sequences in cuDNN: a private function of jax."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    _want_gpu()
    _want_top_left(spec)
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
        )

    return Form(attend, Layout(batched=True), extra=tuple(bounds))


def cudnn_padded(spec: VarlenSpec, gradient: bool) -> Form:
    """A padded batch in cuDNN, by the public function of jax."""
    _want_gpu()
    _want_top_left(spec)
    lengths = {"query_seq_lengths": spec.lengths_q}
    lengths["key_value_seq_lengths"] = spec.lengths_k
    extra = [] if dense(spec) else [np.asarray(x, np.int32) for x in lengths.values()]

    def attend(q: Any, k: Any, v: Any, *extra: Any) -> Any:
        options = dict(zip(lengths, extra, strict=False))
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=spec.causal, implementation="cudnn", **options
        )

    return Form(attend, Layout(padded=True), extra=tuple(extra))


def padding_mask(spec: VarlenSpec) -> np.ndarray:
    """Which keys the queries of a padded batch see: [B, 1, L, S]."""
    len_q, len_k = (np.asarray(x) for x in (spec.lengths_q, spec.lengths_k))
    i = np.arange(padded_length(spec.lengths_q))[None, :, None]
    j = np.arange(padded_length(spec.lengths_k))[None, None, :]
    mask = (i < len_q[:, None, None]) & (j < len_k[:, None, None])
    if spec.causal:
        mask &= j - i <= (len_k - len_q)[:, None, None]
    return mask[:, None]


def _want_room(spec: VarlenSpec) -> None:
    pairs = len(spec.lengths_q) * max(spec.lengths_q) * max(spec.lengths_k)
    if (nbytes := 4.0 * pairs * spec.num_heads) > SCORES_BYTES:
        raise NotImplementedError(f"the scores would take {nbytes / 1e9:.0f} GB")


def xla_mask(spec: VarlenSpec, gradient: bool) -> Form:
    """XLA on a padded batch with a mask."""
    _want_room(spec)

    def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="xla")

    return Form(attend, Layout(padded=True), extra=(padding_mask(spec),))


def jax_sample(spec: VarlenSpec, gradient: bool) -> Form:
    """The Mosaic GPU sample of jax: sequences of one length, in fp16 as it wants it."""
    _want_gpu()
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

    return Form(attend, Layout(padded=True), prepare=prepare, dq_factor=scale)


def torch_varlen(spec: VarlenSpec, gradient: bool) -> Form:
    """PyTorch's FlashAttention on packed sequences."""
    window = (-1, 0) if spec.causal else (-1, -1)
    longest = max(spec.lengths_q), max(spec.lengths_k)

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu_q, cu_k, *longest, window_size=window)

    return Form(attend, extra=spec.cu_seqlens(), torch=True)


def torch_sdpa(spec: VarlenSpec, gradient: bool) -> Form:
    """PyTorch's scaled_dot_product_attention on a padded batch, its own choice."""
    grouped, masked = spec.num_heads != spec.num_kv_heads, not dense(spec)
    if masked:
        _want_room(spec)
        if grouped:
            raise NotImplementedError("it has no fused masked attention by groups")

    def attend(q: Any, k: Any, v: Any, *mask: Any) -> Any:
        import torch

        return torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask[0] if mask else None,
            is_causal=spec.causal and not mask,
            enable_gqa=grouped,
        )

    mask = (padding_mask(spec),) if masked else ()
    return Form(attend, Layout(padded=True, heads_first=True), extra=mask, torch=True)


def torch_flex(spec: VarlenSpec, gradient: bool) -> Form:
    """PyTorch's flex_attention, compiled, on packed sequences with a block mask."""
    tokens = tuple(rounded(sum(x)) for x in (spec.lengths_q, spec.lengths_k))

    @functools.cache
    def compiled() -> tuple[Any, Any]:
        import torch
        from torch.nn.attention import flex_attention as flex

        torch.compiler.reset()  # or else the ninth shape would not be compiled
        ids, places = [], []
        for lengths, total in zip(
            (spec.lengths_q, spec.lengths_k), tokens, strict=True
        ):
            own = np.repeat(np.arange(len(lengths)), lengths)
            ids.append(np.pad(own, (0, total - len(own)), constant_values=-1))
            place = np.concatenate([np.arange(n) for n in lengths])
            places.append(np.pad(place, (0, total - len(own))))
        shift = np.subtract(spec.lengths_k, spec.lengths_q)[ids[0]]
        id_q, id_k, i, j = (
            torch.tensor(x.astype(np.int32), device="cuda")
            for x in (*ids, places[0] + shift, places[1])
        )

        def visible(batch: Any, head: Any, row: Any, column: Any) -> Any:
            same = (id_q[row] == id_k[column]) & (id_q[row] >= 0)
            return same & (j[column] <= i[row]) if spec.causal else same

        mask = flex.create_block_mask(visible, None, None, *tokens, device="cuda")
        return torch.compile(flex.flex_attention, dynamic=False), mask

    def attend(q: Any, k: Any, v: Any) -> Any:
        attention, mask = compiled()
        grouped = spec.num_heads != spec.num_kv_heads
        return attention(q, k, v, block_mask=mask, enable_gqa=grouped)

    return Form(attend, Layout(batched=True, heads_first=True), torch=True)


def rounded(tokens: int) -> int:
    """The budget of a packed buffer: a multiple of 64 rows."""
    return -(-tokens // 64) * 64


FORMS: Mapping[str, Callable[[VarlenSpec, bool], Form]] = {
    "mosaic_gpu": functools.partial(ours, "mosaic_gpu"),
    "xla": functools.partial(ours, "xla"),
    "cudnn_packed": cudnn_packed,
    "cudnn_padded": cudnn_padded,
    "xla_mask": xla_mask,
    "jax_sample": jax_sample,
    "torch_varlen": torch_varlen,
    "torch_sdpa": torch_sdpa,
    "torch_flex": torch_flex,
}
"""By name: the form of a spec, with gradients or without."""
