"""PyTorch's ways of computing attention over sequences of different length.

Forms as those of `benchmarks.rivals.attention_baselines`, on tensors of torch. Their
times are those of replays of a CUDA graph.
"""

import functools
import importlib
import importlib.metadata
import os
import pathlib
import sys
import sysconfig
from typing import Any

import numpy as np

from benchmarks.rivals.attention_baselines import (
    DESCALES,
    BatchLayout,
    Form,
    dense,
    padded_length,
    padding_mask,
    quantized,
    rounded,
    sinks_of,
    slopes_of,
    want_no_more,
    want_package,
    want_room,
)
from benchmarks.rivals.vllm_serving import PLACE
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


def _whole(spec: VarlenSpec) -> bool:
    """Whether sequences have one length, and padding adds nothing to it."""
    return all({padded_length(x)} == set(x) for x in (spec.lengths_q, spec.lengths_k))


def flash_attn_4(spec: VarlenSpec, gradient: bool, deterministic: bool = False) -> Form:
    """FlashAttention-4, in CuTe's DSL; it has Hopper kernels.

    Sequences of one length are a batch for its dense function, others are packed.
    """
    want_package("flash_attn.cute", "flash-attn-4")
    want_no_more(spec, "softcap", "sinks", "value_dim")
    if deterministic and not gradient:
        raise NotImplementedError("without gradients it is flash_attn_4")
    sinks, whole = sinks_of(spec), _whole(spec)
    left, right = spec.window
    options: dict[str, Any] = {
        "causal": spec.causal,
        "window_size": (left, 0 if spec.causal else right),
        "softcap": spec.softcap or 0.0,
        "deterministic": deterministic,
    }
    packing = () if whole else spec.cu_seqlens()
    if not whole:
        options["max_seqlen_q"] = max(spec.lengths_q)
        options["max_seqlen_k"] = max(spec.lengths_k)

    def attend(q: Any, k: Any, v: Any, *operands: Any) -> Any:
        cute = importlib.import_module("flash_attn.cute")
        names = *(("cu_seqlens_q", "cu_seqlens_k")[: len(packing)]), "learnable_sink"
        function = cute.flash_attn_func if whole else cute.flash_attn_varlen_func
        more = dict(zip(names, operands, strict=False))  # there may be no sinks
        found = function(q, k, v, **more, **options)
        return found[0] if isinstance(found, tuple) else found

    more = () if sinks is None else (sinks,)
    return Form(attend, BatchLayout(padded=whole), extra=(*packing, *more), torch=True)


def flash_attn_3(spec: VarlenSpec, gradient: bool, fp8: bool = False) -> Form:
    """FlashAttention-3 from vLLM's wheel, which has no gradients.

    The environment variable that `vllm_serving` names says where that is. The operator
    beneath vLLM's function is called; vLLM's build takes packed sequences alone, also
    where they have one length.
    """
    if gradient:
        raise NotImplementedError("vLLM's FlashAttention-3 has no gradients")
    want_no_more(spec, "softcap", "sinks", "value_dim")
    version = _load_flash_attn_3()
    sinks = sinks_of(spec)
    left, right = (-1 if w is None else w for w in spec.window)
    options: dict[str, Any] = {
        "max_seqlen_q": max(spec.lengths_q),
        "max_seqlen_k": max(spec.lengths_k),
        "softmax_scale": spec.head_dim**-0.5,
        "is_causal": spec.causal,
        "window_size_left": left,
        "window_size_right": 0 if spec.causal else right,
        "softcap": spec.softcap or 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 1,
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }

    def attend(q: Any, k: Any, v: Any, *operands: Any) -> Any:
        import torch

        function = torch.ops._vllm_fa3_C.fwd.default
        scales = DESCALES if fp8 else ()
        names = *scales, "cu_seqlens_q", "cu_seqlens_k", "s_aux"
        more = dict(zip(names, operands, strict=False))  # there may be no sinks
        if "s_aux" in more:
            more["s_aux"] = more["s_aux"].to(torch.bfloat16)
        if fp8:
            q, k, v = (x.view(torch.float8_e4m3fn) for x in (q, k, v))
        rest = dict.fromkeys(x.name for x in function._schema.arguments)
        return function(**{**rest, **options, **more, "q": q, "k": k, "v": v})[0]

    more = () if sinks is None else (sinks,)
    return Form(
        attend,
        extra=(*spec.cu_seqlens(), *more),
        torch=True,
        prepare=functools.partial(_quantized_bytes, spec) if fp8 else None,
        versions={"vllm": version},
    )


def _quantized_bytes(spec: VarlenSpec, *arrays: Any) -> tuple[Any, ...]:
    """As `quantized`, 8-bit numbers as bytes: DLPack has no E4M3 everywhere."""
    q, k, v, *scales = quantized(spec, *arrays)
    return *(x.view("uint8") for x in (q, k, v)), *scales


@functools.cache
def _load_flash_attn_3() -> str:
    """Load the extension alone, not vLLM, which changes PyTorch; vLLM's version.

    Raises:
        NotImplementedError: it is not there.
    """
    place = os.environ.get(PLACE)
    found = sysconfig.get_path("purelib") if place is None else place
    within = f"lib/python3.{sys.version_info.minor}/site-packages"
    for site in (pathlib.Path(found), pathlib.Path(found, within)):
        here = site / "vllm" / "vllm_flash_attn" / "_vllm_fa3_C.abi3.so"
        if here.is_file():
            import torch

            torch.ops.load_library(here)
            wheels = importlib.metadata.distributions(name="vllm", path=[str(site)])
            return next((wheel.version for wheel in wheels), "unknown")
    raise NotImplementedError(
        f"vllm is not installed; {PLACE} may name a folder that has it"
    )


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
    return Form(
        attend, BatchLayout(padded=True, heads_first=True), extra=mask, torch=True
    )


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
    layout = BatchLayout(batched=True, heads_first=True)
    return Form(attend, layout, extra=more, torch=True)
