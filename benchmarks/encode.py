"""A request to `Encoder.encode`: tokenized texts in, fp32 vectors on the host out.

``python -m benchmarks.encode --model bert_base --batch 16`` selects. The public call is
timed as a user makes it, one after another: planning, packing into the sizes of rows
that `Encoder` has, the copy to the device, the model, pooling and the copy back.
Tokenizing, which is the same for all, is left out: the ids are there, as arrays.
Tokens, lengths and parameters are those of `benchmarks.encoder`; the error is that of
the vectors. ``computed_tokens`` is what `Encoder` computes, padding and all.

- ``jaxscale``: `Encoder.encode`, compiled before.
- ``jax_padded``: plain JAX on the padded batch, one program with pooling; its tokens
  already are on the GPU.
- ``torch_compile``, ``torch_compile_graphs``, ``torch_cuda_graph``: transformers on the
  padded batch, which is filled in pinned memory and copied to the GPU: compiled,
  compiled with CUDA graphs (reduce-overhead), and one graph captured by hand of the
  model as it is. The mean is part of all three.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import encoder
from benchmarks.measure import command
from benchmarks.measure.harness import Benchmark, Jax, Params, Torch
from benchmarks.rivals import torch_encoder
from jaxscale.inference import Encoder
from jaxscale.inference.encoder.encode_plan import plan_rows
from jaxscale.models.tokenizer import EncodedText, Tokenizer


MODELS = ("bert_base", "albert_base", "distilbert_base", "deberta_v3_base")
BATCHES = (1, 2, 4, 8, 16, 32, 64)
LENGTHS = (64, 256, 512)
GRAPHS = ("torch_compile", "torch_compile_graphs", "torch_cuda_graph")


class Prepared(Tokenizer):
    """A tokenizer that has tokenized one list of texts before."""

    def __init__(self, rows: Sequence[Sequence[int]], vocab_size: int):
        self._vocab_size = vocab_size
        self._answers = [
            EncodedText(
                ids=list(row),
                types=[0] * len(row),
                spans=[(0, 0)] * len(row),
                control=[False] * len(row),
            )
            for row in rows
        ]

    def encode_inputs(self, texts: Any, **options: Any) -> list[EncodedText]:
        """Its answers, whatever the texts."""
        return list(self._answers)


def ids_of(tokens: Any, lengths: Any) -> list[list[int]]:
    """The tokens of each text, without padding."""
    rows = zip(np.asarray(tokens), np.asarray(lengths), strict=True)
    return [row[:n].tolist() for row, n in rows]


def encoder_of[E: Encoder](
    params: Params, leaves: Any, tokens: Any, lengths: Any, *, kind: type[E]
) -> E:
    """An encoder that has tokenized the texts of a request; nothing is compiled."""
    config = encoder.config_of(params)
    tokenizer = Prepared(ids_of(tokens, lengths), config.vocab_size)
    model = encoder.model_of(params, leaves)
    return kind(model, tokenizer, max_length=params["max_len"])


def ours(params: Params) -> Callable:
    """The public call; all is made and compiled at the first one."""
    made: list[Encoder] = []

    def run(*inputs: Any) -> np.ndarray:
        if not made:
            made.append(encoder_of(params, *inputs, kind=Encoder))
        return made[0].encode(["text"] * params["batch"], progress=False)

    return run


def pooled(hidden: Any, lengths: Any) -> Any:
    """The mean of the tokens, [B, L, D] to [B, D] in fp32; padding is zero."""
    return hidden.astype(jnp.float32).sum(1) / lengths[:, None].astype(jnp.float32)


def plain(params: Params) -> Callable:
    """The padded batch in one program, and the copy to the host."""
    forward = encoder.plain(params)
    program = jax.jit(lambda *inputs: pooled(forward(*inputs), inputs[-1]))
    return lambda *inputs: np.asarray(program(*inputs))


def reference(params: Params) -> Callable:
    """The definition: padded, scores stored."""
    forward = encoder.reference(params)
    return lambda *inputs: pooled(forward(*inputs), inputs[-1])


def transformers(name: str) -> Torch:
    """A baseline in torch, from tokenized texts to vectors on the host too."""

    def make(params: Params) -> Callable:
        model = encoder.random_model(encoder.config_of(params))
        call = torch_encoder.vectors(name, model, params["max_len"])
        texts: list[np.ndarray] = []

        def run(leaves: Any, tokens: Any, lengths: Any) -> Any:
            del leaves  # it has its own copy
            if not texts:
                rows = ids_of(tokens.cpu(), lengths.cpu())
                texts.extend(np.array(row, np.int64) for row in rows)
            return call(texts)

        return run

    return Torch(make)


def metrics(params: Params, seconds: float) -> dict[str, float]:
    """Texts per second, and what `Encoder` computes of so many tokens."""
    plan = plan_rows(encoder.lengths_of(params).tolist(), 16384)
    return {
        "texts_per_second": params["batch"] / seconds,
        "computed_tokens": float(plan.computed_tokens),
    }


def compare(params: Params, medians: Mapping[str, float]) -> Mapping[str, dict]:
    """How much faster than the better of PyTorch's forms with CUDA graphs."""
    graphs = [medians[name] for name in GRAPHS[1:] if name in medians]
    if not graphs:
        return {}
    return {name: {"vs_torch_graphs": min(graphs) / t} for name, t in medians.items()}


BENCHMARK = Benchmark(
    name="encode",
    cases=[encoder.case(m, b, n) for m in MODELS for b in BATCHES for n in LENGTHS],
    quick_cases=[
        encoder.case("bert_tiny", 1, 24),
        encoder.case("deberta_v3_tiny", 3, 24),
    ],
    kernels=(*encoder.BENCHMARK.kernels, "encode_layer", "segment_mean"),
    trains=lambda case: False,
    inputs=encoder.inputs,
    reference=reference,
    implementations={
        "jaxscale": Jax(ours, jit=False),
        "jax_padded": Jax(plain, jit=False),
        **{name: transformers(name) for name in GRAPHS},
    },
    metrics=metrics,
    compare=compare,
    time="wall",
    packages=encoder.BENCHMARK.packages,
    samples=50,
    max_rel_error=5e-2,
    selectors={"model": "model", "batch": "batch", "max_len": "max_len"},
)

if __name__ == "__main__":
    command.run(BENCHMARK)
