"""PyTorch's ways of computing attention over sequences of different length.

Forms as those of `benchmarks.rivals.attention_baselines`, on tensors of torch. Their
times are those of replays of a CUDA graph.
"""

import functools
import importlib
from typing import Any

import numpy as np

from benchmarks.rivals.attention_baselines import (
    Form,
    Layout,
    dense,
    padding_mask,
    rounded,
    sinks_of,
    slopes_of,
    want_no_more,
    want_package,
    want_room,
)
from pallas_kernels.varlen_attention.specs import VarlenSpec


def torch_varlen(spec: VarlenSpec, gradient: bool) -> Form:
    """PyTorch's FlashAttention on packed sequences."""
    want_no_more(spec)
    left, right = (-1 if w is None else w for w in spec.window)
    window = (left, 0) if spec.causal else (left, right)
    longest = max(spec.lengths_q), max(spec.lengths_k)

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any) -> Any:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(q, k, v, cu_q, cu_k, *longest, window_size=window)

    return Form(attend, extra=spec.cu_seqlens(), torch=True)


def flash_attn_2(spec: VarlenSpec, gradient: bool) -> Form:
    """FlashAttention-2 by its own package, on packed sequences."""
    # FlashAttention-4 lies in the same package.
    want_package("flash_attn.flash_attn_interface", "flash-attn")
    want_no_more(spec, "softcap", "alibi")
    left, right = (-1 if w is None else w for w in spec.window)
    longest = max(spec.lengths_q), max(spec.lengths_k)
    slopes = slopes_of(spec)

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *slopes: Any) -> Any:
        module = importlib.import_module("flash_attn.flash_attn_interface")
        return module.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_q,
            cu_k,
            *longest,
            causal=spec.causal,
            window_size=(left, 0 if spec.causal else right),
            softcap=spec.softcap or 0.0,
            alibi_slopes=slopes[0] if slopes else None,
        )

    more = () if slopes is None else (slopes,)
    return Form(attend, extra=(*spec.cu_seqlens(), *more), torch=True)


def flash_attn_4(spec: VarlenSpec, gradient: bool) -> Form:
    """FlashAttention-4, in CuTe's DSL, on packed sequences; it has Hopper kernels."""
    want_package("flash_attn.cute", "flash-attn-4")
    want_no_more(spec, "softcap", "sinks")
    left, right = spec.window
    longest = {"max_seqlen_q": max(spec.lengths_q), "max_seqlen_k": max(spec.lengths_k)}
    sinks = sinks_of(spec)

    def attend(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *sinks: Any) -> Any:
        found = importlib.import_module("flash_attn.cute").flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_q,
            cu_seqlens_k=cu_k,
            causal=spec.causal,
            window_size=(left, 0 if spec.causal else right),
            softcap=spec.softcap or 0.0,
            learnable_sink=sinks[0] if sinks else None,
            **longest,
        )
        return found[0] if isinstance(found, tuple) else found

    more = () if sinks is None else (sinks,)
    return Form(attend, extra=(*spec.cu_seqlens(), *more), torch=True)


def torch_sdpa(spec: VarlenSpec, gradient: bool) -> Form:
    """PyTorch's scaled_dot_product_attention on a padded batch, its own choice."""
    want_no_more(spec)
    grouped = spec.num_heads != spec.num_kv_heads
    masked = not dense(spec) or spec.window != (None, None)
    if masked:
        want_room(spec)
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
    def compiled() -> Any:
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

        left, right = spec.window
        right = 0 if spec.causal else right

        def visible(batch: Any, head: Any, row: Any, column: Any) -> Any:
            seen = (id_q[row] == id_k[column]) & (id_q[row] >= 0)
            seen = seen if left is None else seen & (j[column] >= i[row] - left)
            return seen if right is None else seen & (j[column] <= i[row] + right)

        def changed(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
            if spec.softcap is not None:
                score = spec.softcap * torch.tanh(score / spec.softcap)
            return score - slopes[head] * (j[column] - i[row]).abs()

        found = slopes_of(spec)
        found = np.zeros(spec.num_heads, np.float32) if found is None else found
        slopes = torch.tensor(found, device="cuda")
        mask = flex.create_block_mask(visible, None, None, *tokens, device="cuda")
        options: dict[str, Any] = {"block_mask": mask}
        if spec.softcap is not None or spec.alibi:
            options["score_mod"] = changed
        if spec.sinks:
            options["return_aux"] = flex.AuxRequest(lse=True)
        run = functools.partial(flex.flex_attention, **options)
        return torch.compile(run, dynamic=False)

    def attend(q: Any, k: Any, v: Any, *sinks: Any) -> Any:
        grouped = spec.num_heads != spec.num_kv_heads
        found = compiled()(q, k, v, enable_gqa=grouped)
        if not sinks:
            return found
        out, aux = found
        # The sink takes its share of what the weights sum up to.
        return (out * (aux.lse - sinks[0][:, None]).sigmoid()[..., None]).to(out.dtype)

    sinks = sinks_of(spec)
    more = () if sinks is None else (sinks,)
    layout = Layout(batched=True, heads_first=True)
    return Form(attend, layout, extra=more, torch=True)
