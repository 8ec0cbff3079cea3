"""Options under the names that other programs give them: which one is meant here."""

import dataclasses
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from jaxscale.cli.errors import UsageError


_MEANT = {
    # What users of transformers and peft, of Megatron and of vLLM would type.
    "learning-rate": "lr max-lr",
    "weight-decay": "wd",
    "clip-norm": "max-grad-norm clip-grad grad-clip gradient-clip-val",
    "warmup-steps": "lr-warmup-iters lr-warmup-steps warmup-iters warmup warmup-ratio",
    "schedule": "lr-scheduler-type lr-decay-style lr-scheduler",
    "b1": "adam-beta1 beta1",
    "b2": "adam-beta2 beta2",
    "eps": "adam-epsilon adam-eps",
    "optimizer.kind": "optim optimizer",
    "memory-kind": "optimizer-cpu-offload cpu-offload offload-optimizer",
    "steps": "max-steps num-steps train-iters max-iters num-train-steps epochs "
    "num-epochs num-train-epochs",
    "microbatches": "gradient-accumulation-steps grad-accum num-microbatches "
    "micro-batch-size accumulate-grad-batches",
    "batch-size": "bs per-device-train-batch-size global-batch-size train-batch-size "
    "batch",
    "seq-len": "max-seq-length max-length block-size seq-length max-seq-len "
    "sequence-length context-length cutoff-len",
    "data.paths": "data dataset dataset-name data-path train-file train-data",
    "data.tokenizer": "tokenizer tokenizer-model tokenizer-name tokenizer-name-or-path",
    "data.vocab-size": "vocab-size",
    "held-out-fraction": "validation-split eval-split split",
    "data.prefetch": "num-workers dataloader-num-workers",
    "lora.rank": "lora lora-r lora-rank use-lora peft",
    "lora.alpha": "lora-alpha",
    "lora.layers": "lora-target-modules target-modules",
    "mesh.tensor tensor stages": "tp tp-size tensor-parallel-size "
    "tensor-model-parallel-size",
    "mesh.pipe pipe stages": "pp pp-size pipeline-parallel-size num-stages "
    "pipeline-model-parallel-size",
    "mesh.context context": "cp context-parallel-size sequence-parallel-size",
    "mesh.fsdp fsdp": "fsdp use-fsdp fsdp-size num-shards",
    "mesh.data data": "dp dp-size data-parallel-size",
    "chunks": "num-layers-per-virtual-pipeline-stage virtual-stages",
    "zero": "zero-stage use-distributed-optimizer deepspeed",
    "mesh.tensor mesh.fsdp": "mesh",
    "remat": "gradient-checkpointing recompute-activations recompute-granularity "
    "activation-checkpointing checkpoint-activations",
    "dtype": "bf16 fp16 precision mixed-precision torch-dtype",
    "quantization": "load-in-8bit load-in-4bit fp8",
    "checkpoint-every": "save-steps save-interval save-every",
    "keep": "save-total-limit",
    "eval-every": "eval-steps eval-interval",
    "eval-batches": "eval-iters max-eval-samples",
    "log-every": "logging-steps log-interval",
    "trackers": "report-to wandb tensorboard wandb-project",
    "output-dir target output": "output out out-dir save-dir save output-path outdir",
    "resume": "resume-from-checkpoint continue load resume-from",
    "devices": "num-devices nproc-per-node simulate",
    "gpus devices processes": "num-gpus n-gpus gpu-count ngpus",
    "supervise.processes processes": "nproc num-processes",
    "max-new-tokens": "max-tokens max-length n-predict",
    "temperature": "temp",
    "sparsity": "ratio amount pruning-ratio",
    "tile": "tile-size",
    "pattern": "sparsity-pattern",
    "score": "method criterion pruning-method",
    "engine.max-len": "max-model-len max-context-len",
    "engine.num-slots": "max-num-seqs max-batch-size max-running-requests",
    "engine.memory-fraction": "gpu-memory-utilization mem-fraction-static",
    "engine.prefill-tokens": "max-num-batched-tokens chunked-prefill-size "
    "enable-chunked-prefill",
    "engine.num-pages": "num-gpu-blocks-override num-blocks",
    "engine.page-size": "block-size page-size",
    "engine.kv-dtype": "kv-cache-dtype kv-cache",
    "engine.prefix-cache": "enable-prefix-caching no-enable-prefix-caching "
    "disable-radix-cache",
    "engine.drafts": "speculative-config num-speculative-tokens speculative-model",
    "engine.program-cache": "compilation-config compile-cache",
    "name": "served-model-name model-name",
    "aliases": "served-model-names",
    "api-keys-file": "api-key api-keys",
    "lora-modules": "enable-lora lora-paths adapters",
    "tls-certificate": "ssl-certfile tls-cert",
    "tls-key": "ssl-keyfile",
    "tool-format": "tool-call-parser enable-auto-tool-choice",
    "reasoning-format": "reasoning-parser enable-reasoning",
    "sampling-defaults": "generation-config",
    "isolate-clients": "cache-salt",
    "allow-priority": "scheduling-policy",
    "access-log": "enable-log-requests disable-log-requests",
    "log-level": "uvicorn-log-level verbose",
    "max-body-mib": "max-body-size",
    "url": "base-url host port server",
    "requests": "num-prompts num-requests",
    "rate": "request-rate qps",
    "workload": "dataset-name dataset dataset-path backend",
    "param-dtype": "dtype torch-dtype",
    "max-shard-gb": "max-shard-size",
    "num-layers": "layers",
    "driver": "address master-addr rdzv-endpoint",
}
"""Options here, the first that a command has, and other names of them, as words."""

_ADVICE = {
    "trust-remote-code": "code that comes with a model is never run",
    "enforce-eager": "the engine always runs compiled programs",
    "do-sample": "--temperature 0 is greedy, a higher one samples",
    "num-beams": "there is no beam search; --temperature 0 is greedy",
    "num-return-sequences": "each call continues the prompt once; change --seed",
    "swap-space": "a preempted request is computed again, so nothing is swapped",
}
"""What to do in place of options that nothing here stands for."""

_SOURCE = "model model-name-or-path model-path pretrained checkpoint ckpt source run"
"""Other names of SOURCE."""


def check_names(kind: type[Any], arguments: Sequence[str]) -> None:
    """Raise for an option that is known here by a longer or by another name.

    Args:
        kind: The dataclass whose fields are the options.
        arguments: The words of the command.

    Raises:
        UsageError: there is such an option; the message has the names of today.
    """
    known = dict.fromkeys(_names(kind))
    for word in arguments:
        if word == "--":
            return
        name = word.partition("=")[0].replace("_", "-").lstrip("-")
        if not word.startswith("-") or not name[:1].isalpha() or name in known:
            continue
        if told := _meant(name, list(known)):
            raise UsageError(f"{word.partition('=')[0]} is no option here {told}")


def _meant(name: str, known: Sequence[str]) -> str:
    """What to say of an option that is none of the known ones; nothing if unclear."""
    last = name.rpartition(".")[2]
    if "source" in known and name in _SOURCE.split():
        return "(did you mean --from? The model may also be the first word)"
    meant = [x for x in known if x.rpartition(".")[2] == last]
    for ours, theirs in _MEANT.items():
        if {name, last} & {*theirs.split()}:
            found = ([x for x in known if _ends(x, each)] for each in ours.split())
            meant += next(filter(None, found), [])
    if meant:
        options = " or ".join(f"--{x}" for x in dict.fromkeys(meant))
        return f"(did you mean {options}?)"
    return f"({_ADVICE[last]})" if last in _ADVICE else ""


def _ends(option: str, last: str) -> bool:
    """Whether the last parts of an option are `last`."""
    return f".{option}".endswith(f".{last}")


def _names(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The options of a dataclass, without their dashes; no groups of options."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], field.name.replace("_", "-")
        for note in getattr(hint, "__metadata__", ()):
            given = getattr(note, "name", None)
            name = name if given is None else given
        inner = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
        parts = typing.get_args(inner) or (inner,)
        nested = [part for part in parts if dataclasses.is_dataclass(part)]
        if not nested or type(None) in parts:
            yield f"{prefix}{name}"
        for part in nested:
            yield from _names(
                typing.cast(Any, part), f"{prefix}{name}." if name else prefix
            )
