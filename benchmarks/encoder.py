"""Encoders end to end: ours packed, a plain padded one in JAX, and transformers.

``python -m benchmarks.encoder --model bert_base --max_len 1024 --batch 16`` selects.
Tokens and lengths, uniform in [0.2 L, L] as in ByteTransformer's paper, come padded,
and activations go padded, so packing and unpacking are within the time: the wall time
of a call among ten that are dispatched one after another. Parameters are random, the
same for all, in bf16, those of each layer in arrays of their own; errors are those of
the activations against a padded model in fp32.

- ``jaxscale``: `EncoderModel.padded`, on a buffer of the tokens of the batch, rounded
  up to a multiple of 256.
- ``jax_padded``: the same model in plain JAX with cuDNN's attention. For DeBERTa,
  whose scores cuDNN takes as a bias, [B, N, L, L].
- ``torch_eager``, ``torch_sdpa``: transformers with stored and with fused scores.
- ``torch_compile``, ``torch_compile_graphs``: by `torch.compile` and fused scores
  where the model has them; with its default mode and with CUDA graphs.

- ``flash_deberta``: FlashDeBERTa's model, where it is installed.

Programs of JAX of several cases are compiled at once, in threads.
"""

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.measure import command, timing
from benchmarks.measure.harness import (
    Benchmark,
    Case,
    Jax,
    Params,
    Results,
    Torch,
    run_case,
)
from benchmarks.rivals import plain_encoder, torch_encoder
from benchmarks.rivals.plain_encoder import Switches
from jaxscale import models
from pallas_kernels.varlen_attention.specs import bytetransformer


MODELS = ("bert_base", "albert_base", "distilbert_base", "deberta_v3_base")
LENGTHS = (64, 128, 256, 384, 512, 768, 1024)
BATCHES = (1, 8, 16, 64)
BATCH = 4
"""Cases whose programs are compiled at once."""


def lengths_of(params: Params) -> np.ndarray:
    """Tokens of each sequence of a case."""
    return bytetransformer(params["batch"], params["max_len"]).astype(np.int32)


def case(model: str, batch: int, max_len: int) -> Case:
    """One batch of one model."""
    params = {"model": model, "batch": batch, "max_len": max_len}
    params["tokens"] = int(lengths_of(params).sum())
    return Case(f"{model}_b{batch}_l{max_len}", params)


def importance(case: Case) -> int:
    """Lower comes first: the targets name these cases."""
    model, batch, length = (case.params[x] for x in ("model", "batch", "max_len"))
    if batch == 16 and length == (1024 if model == "bert_base" else 512):
        return 0
    return 1 if batch == 16 and model == "bert_base" else 2 if batch == 16 else 3


def token_budget(params: Params) -> int:
    """Size of the packed buffer."""
    return -(-params["tokens"] // 256) * 256


def config_of(params: Params) -> models.EncoderConfig:
    """The model, with as many positions as the batch needs."""
    config = models.encoder_preset(params["model"])
    longest = max(config.max_seq_len, params["max_len"])
    return dataclasses.replace(config, max_seq_len=longest)


@functools.lru_cache(maxsize=BATCH)
def random_model(
    config: models.EncoderConfig,
    head: models.HeadConfig | None = None,
    param_dtype: Any = jnp.bfloat16,
) -> models.EncoderModel:
    """A model with random parameters, that computes in bf16.

    Biases and norms, which begin as zeros and ones, are random too.
    """

    def make(key: jax.Array) -> models.EncoderModel:
        rngs = nnx.Rngs(key)
        model = models.EncoderModel(config, head=head, dtype=jnp.bfloat16, rngs=rngs)
        leaves, tree = jax.tree.flatten(model)
        keys = jax.random.split(jax.random.fold_in(key, 1), len(leaves))
        noisy = [
            (x + 0.02 * jax.random.normal(k, x.shape)).astype(param_dtype)
            for x, k in zip(leaves, keys, strict=True)
        ]
        return jax.tree.unflatten(tree, noisy)

    return jax.jit(make)(jax.random.key(0))


@functools.lru_cache(maxsize=BATCH)
def _parameters(config: models.EncoderConfig) -> tuple[tuple[jax.Array, ...], Any]:
    """The parameters of the model, unstacked, and the tree that they are leaves of."""
    leaves, tree = jax.tree.flatten(random_model(config).unstacked())
    return tuple(leaves), tree


def leaves_of(params: Params) -> tuple[jax.Array, ...]:
    """The parameters of the model of a case."""
    return _parameters(config_of(params))[0]


def inputs(params: Params, key: jax.Array) -> tuple:
    """Parameters, random tokens and lengths."""
    config = config_of(params)
    shape = params["batch"], params["max_len"]
    tokens = jax.random.randint(key, shape, 5, config.vocab_size, jnp.int32)
    return leaves_of(params), tokens, jnp.asarray(lengths_of(params))


def model_of(params: Params, leaves: Sequence[jax.Array]) -> models.EncoderModel:
    """The model, unstacked, that has these parameters."""
    return jax.tree.unflatten(_parameters(config_of(params))[1], leaves)


def ours(params: Params) -> Callable:
    """Packed before the embedding, unpacked after the last layer."""

    def run(leaves: Any, tokens: Any, lengths: Any) -> jax.Array:
        model = model_of(params, leaves)
        return model.padded(tokens, lengths=lengths, token_budget=token_budget(params))

    return run


def plain(params: Params, **switches: Any) -> Callable:
    """A plain encoder."""

    def run(leaves: Any, tokens: Any, lengths: Any) -> jax.Array:
        # Positions are integers of another type than tokens.
        with jax.numpy_dtype_promotion("standard"):
            return plain_encoder.hidden(
                model_of(params, leaves), tokens, lengths, Switches(**switches)
            )

    return run


def reference(params: Params) -> Callable:
    """The definition: padded, scores stored."""
    return plain(params, attention="xla", scan=True)


def transformers(name: str) -> Torch:
    """A baseline in torch."""

    def make(params: Params) -> Callable:
        return torch_encoder.forward(name, random_model(config_of(params)))

    return Torch(make)


Makers = Mapping[str, Callable[[Params], Callable]]


def measure_with(makers: Makers, benchmark: Benchmark) -> Callable:
    """What times the cases of a benchmark, whose JAX functions `makers` make."""

    def prepare(
        case: Case, names: Sequence[str], pool: ThreadPoolExecutor
    ) -> tuple[dict[str, timing.Program], list[Future]]:
        programs = {
            n: timing.Program(makers[n](case.params)) for n in names if n in makers
        }
        arguments = inputs(case.params, jax.random.key(0))
        futures = []
        for program in programs.values():
            try:
                futures.append(pool.submit(program.lower(*arguments).compile))
            except NotImplementedError:
                continue  # said when it is prepared
        return programs, futures

    def measure(
        cases: Sequence[Case], names: Sequence[str], samples: int
    ) -> Iterator[tuple[Case, Results]]:
        for i in range(0, len(cases), BATCH):
            start = time.monotonic()
            batch = cases[i : i + BATCH]
            with (
                timing.preparing(),
                ThreadPoolExecutor(os.cpu_count() or 1) as pool,
            ):
                ready = [prepare(case, names, pool) for case in batch]
                for _, futures in ready:
                    for future in futures:
                        future.exception()
            print(f"-- compiled in {time.monotonic() - start:.0f} s", flush=True)
            for case, (programs, _) in zip(batch, ready, strict=True):
                found = {
                    name: Jax(lambda params, p=programs[name]: p)
                    if name in programs
                    else benchmark.implementations[name]
                    for name in names
                }
                ours = dataclasses.replace(
                    benchmark, implementations=found, measure=None
                )
                yield case, run_case(ours, case, names, samples)
            jax.clear_caches()

    return measure


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Tokens per second, padding not counted."""
    return {"tokens_per_second": params["tokens"] / seconds}


MAKERS: Makers = {"jaxscale": ours, "jax_padded": plain}

BENCHMARK = Benchmark(
    name="encoder",
    cases=sorted(
        (case(m, b, n) for m in MODELS for b in BATCHES for n in LENGTHS),
        key=importance,
    ),
    quick_cases=[
        case(f"{name}_tiny", 3, 24) for name in ("bert", "albert", "deberta_v3")
    ],
    kernels=("varlen_attention", "matmul", "layer_norm"),
    trains=lambda case: False,
    offers=lambda case, name: (
        name != ("torch_sdpa" if config_of(case.params).relative else "flash_deberta")
    ),
    inputs=inputs,
    reference=reference,
    implementations={
        **{name: Jax(make) for name, make in MAKERS.items()},
        **{
            name: transformers(name)
            for name in torch_encoder.MODES
            if name != "torch_cuda_graph"
        },
    },
    metrics=metrics,
    time="wall",
    burst=10,
    samples=20,
    max_rel_error=5e-2,
    count_kernels=True,
    packages={"torch*": ("torch", "transformers")},
    selectors={"model": "model", "batch": "batch", "max_len": "max_len"},
)
BENCHMARK.measure = measure_with(MAKERS, BENCHMARK)

if __name__ == "__main__":
    command.run(BENCHMARK)
