"""Arguments that other libraries have, answered with the way that leads there here."""

import dataclasses
import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from typing import Any


_PACKED = (
    "sequences are packed instead of masked: `jaxscale.nn.pack_sequences` makes rows "
    "and their cu_seqlens"
)
_STATE = "give state=jaxscale.nn.attention_state(x.shape[:2], cu_seqlens=cu_seqlens)"
_CONFIG = "the shape of attention is config=jaxscale.nn.AttentionConfig(...)"
_ADVICE = {
    "attention_mask": f"{_PACKED}, and an encoder takes padded rows by "
    "model.padded(tokens, mask=attention_mask)",
    "mask": _PACKED,
    "padding_mask": _PACKED,
    "segment_ids": f"{_PACKED}, the bounds of the segments of each row",
    "input_ids": "token ids are the first argument, tokens",
    "position_ids": "it is called positions",
    "token_type_ids": "it is called token_types, of encoders",
    "labels": "a model gives logits, and `jaxscale.training` has the losses",
    "use_cache": "`jaxscale.inference.LLM` keeps the keys and values",
    "past_key_values": "`jaxscale.inference.LLM` keeps the keys and values",
    "cu_seqlens": _STATE,
    "positions": _STATE.replace("cu_seqlens=cu_seqlens", "positions=positions"),
    "num_heads": _CONFIG,
    "head_dim": _CONFIG,
    "tensor_parallel_size": "give a mesh, `jaxscale.sharding.make_mesh({'tensor': n})`",
    "device_map": "give a mesh, `jaxscale.sharding.make_mesh({'tensor': n})`",
    "device": "JAX computes on its default device; jax.default_device changes it",
    "trust_remote_code": "code that comes with a model is never run",
    "use_beam_search": "there is no beam search; temperature=0 is greedy",
    "mesh": "`jaxscale.sharding.create` makes a model on a mesh",
}
"""What to do in place of arguments, by their names."""
_ADVICE |= dict.fromkeys(
    ("pipe", "data", "fsdp", "context", "tensor"),
    "sizes of axes come together, such as {'fsdp': 2, 'tensor': 2}",
)
_ADVICE |= dict.fromkeys(
    ("max_model_len", "max_num_seqs", "gpu_memory_utilization", "max_len", "num_slots"),
    "sizes are in config=jaxscale.inference.EngineConfig(max_len=..., num_slots=..., "
    "memory_fraction=...)",
)
_OTHER_NAMES = {
    "learning_rate": "lr",
    "weight_decay": "wd",
    "clip_norm": "max_grad_norm grad_clip",
    "b1": "beta1 betas adam_beta1",
    "b2": "beta2 adam_beta2",
    "kind": "name optimizer type",
    "steps": "max_steps num_steps epochs num_train_epochs train_iters",
    "microbatches": "gradient_accumulation_steps num_microbatches",
    "batch_size": "per_device_train_batch_size global_batch_size",
    "seq_len": "max_length max_seq_length block_size sequence_length",
    "paths": "path files dataset data_path",
    "remat": "gradient_checkpointing activation_checkpointing",
    "dtype": "torch_dtype bf16 fp16 precision",
    "checkpoint_every": "save_steps save_interval",
    "eval_every": "eval_steps eval_interval",
    "log_every": "logging_steps",
    "output_dir": "out_dir save_dir",
    "rank": "r lora_rank",
    "alpha": "lora_alpha",
    "layers": "target_modules",
    "d_model": "hidden_size n_embd embed_dim dim hidden_dim",
    "num_layers": "num_hidden_layers n_layer n_layers depth",
    "num_heads": "num_attention_heads n_head n_heads",
    "num_kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "d_ff": "intermediate_size ffn_hidden_size mlp_dim n_inner",
    "max_seq_len": "max_position_embeddings n_positions context_length",
    "norm_eps": "rms_norm_eps layer_norm_eps",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
    "window": "sliding_window window_size",
    "use_bias": "bias",
    "in_features": "in_dim input_dim",
    "out_features": "out_dim output_dim",
    "max_tokens": "max_new_tokens max_length num_tokens",
    "temperature": "temp",
    "stop": "stop_sequences stop_strings",
    "max_len": "max_model_len max_context_len",
    "num_slots": "max_num_seqs max_batch_size",
    "memory_fraction": "gpu_memory_utilization",
    "num_pages": "num_gpu_blocks num_blocks",
    "page_size": "block_size",
    "kv_dtype": "kv_cache_dtype",
    "prefix_cache": "enable_prefix_caching",
    "prefill_tokens": "max_num_batched_tokens",
    "sparsity": "amount ratio",
    "tile": "tile_size",
    "tensor": "tp tensor_parallel_size",
    "pipe": "pp pipeline_parallel_size stage",
    "data": "dp data_parallel_size replica",
    "context": "cp sp context_parallel_size",
}
"""Arguments here, and other names of them, as words."""


def explain_keywords[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """A function that says of an unknown keyword which one is meant.

    Example:
        >>> @explain_keywords
        ... def call(*, config=None): ...
        >>> call(confg=3)
        Traceback (most recent call last):
        ...
        TypeError: call() takes no 'confg' (did you mean config?); it takes config
    """
    parameters = [
        parameter
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in ("self", "cls")
    ]
    known = [parameter.name for parameter in parameters]
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    # First those that must be given.
    named = [p.name for p in sorted(by_name, key=lambda p: p.default is not p.empty)]
    bound = len(inspect.signature(function).parameters) - len(parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        name = function.__qualname__
        for keyword in kwargs:
            if keyword not in known:
                nested = _nested(args[0], keyword) if bound and args else ""
                raise TypeError(f"{name}() {nested or _answer(keyword, known)}")
        if len(args) - bound > len(known) - len(named) and named:
            raise TypeError(
                f"{name}() takes {len(known) - len(named)} by position, got "
                f"{len(args) - bound}; write the others as {named[0]}=..."
            )
        return function(*args, **kwargs)

    return call


def explained[C](kind: type[C]) -> type[C]:
    """A dataclass whose constructor says of an unknown field which one is meant.

    Example:
        >>> @explained
        ... @dataclasses.dataclass(kw_only=True)
        ... class Sizes:
        ...     d_model: int
        >>> Sizes(hidden_size=3)
        Traceback (most recent call last):
        ...
        TypeError: Sizes.__init__() takes no 'hidden_size' (did you mean d_model?); ...
    """
    typing.cast(Any, kind).__init__ = explain_keywords(kind.__init__)
    return kind


def meant(name: str, known: Sequence[str]) -> str:
    """`` (did you mean ...?)`` if one of `known` has another name or spelling so.

    Example:
        >>> meant("tp", ["data", "tensor"])
        ' (did you mean tensor?)'
    """
    close = [x for x in known if name in _OTHER_NAMES.get(x, "").split()]
    close = close or difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _nested(instance: Any, name: str) -> str:
    """The answer where a field of a dataclass is settings that have this keyword."""
    if not dataclasses.is_dataclass(instance):
        return ""
    for field in dataclasses.fields(instance):
        settings: Any = field.default
        if not dataclasses.is_dataclass(settings):
            continue
        for inner in dataclasses.fields(settings):
            if name in (inner.name, *_OTHER_NAMES.get(inner.name, "").split()):
                return (
                    f"takes no {name!r}: it is in {field.name}="
                    f"{type(settings).__name__}({inner.name}=...)"
                )
    return ""


def _answer(name: str, known: list[str]) -> str:
    guess = meant(name, known)
    if name in _ADVICE and not guess:
        return f"takes no {name!r}: {_ADVICE[name]}"
    return f"takes no {name!r}{guess}; it takes {', '.join(known)}"
