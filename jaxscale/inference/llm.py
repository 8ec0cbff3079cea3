"""Text generation for scripts and notebooks."""

import collections
import dataclasses
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.inference.chat import ChatTemplate, Message
from jaxscale.inference.engine.config import EngineConfig
from jaxscale.inference.engine.device_share import reserve_for_serving
from jaxscale.inference.engine.make import make_engine
from jaxscale.inference.engine.output_processor import Sink
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.inference.lora_modules import LoraModules, load_decoder, read_adapters
from jaxscale.inference.output import Output, joined
from jaxscale.inference.request import EngineDead, Overloaded, Request, SamplingParams
from jaxscale.inference.run_directory import is_run
from jaxscale.keywords import explain_keywords
from jaxscale.models.adapters import checkpoint_config, with_adapters
from jaxscale.models.decoder import Decoder
from jaxscale.models.generation import GenerationConfig
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.quantized_linear import Quantization
from jaxscale.observability.bar import progress_bar
from jaxscale.sharding.rules import REPLICATED, AxisRules, fsdp_tp


GREEDY = SamplingParams(temperature=0.0)
"""Greedy decoding."""

_RETRY_SECONDS = 0.01


class LLM:
    """A decoder with an engine, for scripts and notebooks.

    With continuous batching requests join and leave the batch at every token, so
    prompts and completions of any lengths run together.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> config = EngineConfig(num_slots=2, prefill_tokens=(64,))
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> with LLM(model, config=config, quiet=True) as llm:
        ...     params = SamplingParams(temperature=0.0, max_tokens=5)
        ...     results = llm.generate([[1, 2, 3], [4]], params)
        >>> [len(result.tokens) for result in results]
        [5, 5]
    """

    @explain_keywords
    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        lora_modules: LoraModules | None = None,
        config: EngineConfig | None = None,
        eos_ids: Sequence[int] = (),
        compiler: GrammarCompiler | None = None,
        kv_scales: np.ndarray | None = None,
        quiet: bool = False,
    ) -> None:
        """Compile the model's programs and start the engine.

        Args:
            model: A decoder, on one device or split over the mesh axis `tensor`.
            tokenizer: Tokenizer, for prompts and results as text.
            lora_modules: Directories of peft adapters, by the name that `generate`
                takes.
            config: Engine settings.
            eos_ids: End-of-sequence tokens, besides the tokenizer's.
            compiler: Compiler of guides, for guided requests.
            kv_scales: As for `make_engine`.
            quiet: Do not print memory and compilation.
        """
        self.tokenizer = tokenizer
        if lora_modules:
            adapters = read_adapters(lora_modules, checkpoint_config(model))
            model = with_adapters(model, adapters)
        self.engine = make_engine(
            model,
            tokenizer,
            config=config,
            eos_ids=eos_ids,
            compiler=compiler,
            kv_scales=kv_scales,
            quiet=quiet,
        ).start()

    @classmethod
    @explain_keywords
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        mesh: Mesh | None = None,
        rules: AxisRules | None = None,
        dtype: DTypeLike | None = None,
        quantization: Quantization | None = None,
        lora_modules: LoraModules | None = None,
        config: EngineConfig | None = None,
        compiler: GrammarCompiler | None = None,
        kv_scales: np.ndarray | None = None,
        quiet: bool = False,
    ) -> "LLM":
        """Load model, tokenizer and end-of-sequence tokens from a directory.

        Args:
            path: A Hugging Face directory, the name of a model on the Hugging Face hub,
                or the output directory of a run, whose newest checkpoint is taken.
            mesh: Devices to split the model over, with `rules`.
            rules: Sharding rules; None is `fsdp_tp` on a mesh.
            dtype: Type of the computation; by default that of the file.
            quantization: Quantize the weights to ``"int8"`` or ``"fp8"``, or weights
                and activations to ``"fp8_dynamic"``, with `jaxscale.models.quantize`;
                None keeps those of the file.
            lora_modules: Directories of adapters, by the name that `generate` takes:
                those of peft, or output directories of runs that trained one.
            config: Engine settings.
            compiler: Compiler of guides, for guided requests.
            kv_scales: As for `make_engine`.
            quiet: Do not print memory and compilation.
        """
        reserve_for_serving()
        if rules is None:
            rules = REPLICATED if mesh is None else fsdp_tp()
        path = local_directory(path)
        model = load_decoder(
            path,
            mesh=mesh,
            rules=rules,
            dtype=dtype,
            quantization=quantization,
            lora_modules=lora_modules,
        )
        ends = () if is_run(path) else GenerationConfig.from_file(path).eos_ids
        return cls(
            model,
            Tokenizer.from_file(path),
            config=config,
            eos_ids=ends,
            compiler=compiler,
            kv_scales=kv_scales,
            quiet=quiet,
        )

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        lora: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
    ) -> list["Generation"]:
        """Completions of `prompts`, in their order.

        Args:
            prompts: Texts, with the beginning-of-sequence token prepended if the
                model's files say so; or token ids, at least one each.
            params: Sampling parameters for all, or one for each.
            lora: Name of the adapter for all, or one for each; None is the base model.
            progress: Show a progress bar; None shows one in a terminal or notebook.

        Raises:
            InvalidRequest: a prompt cannot be served; nothing is generated then.
            TypeError: a prompt is a single number.
            ValueError: prompts are texts without a tokenizer, or `params` or `lora`
                differ in number from prompts.
        """
        ids = self._ids(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(ids)
        if lora is None or isinstance(lora, str):
            lora = [lora] * len(ids)
        for name, values in (("params", params), ("lora", lora)):
            if len(values) != len(ids):
                raise ValueError(f"{len(values)} {name} for {len(ids)} prompts")
        requests = [
            Request(prompt=prompt, params=each, lora=adapter)
            for prompt, each, adapter in zip(ids, params, lora, strict=True)
        ]
        config = self.engine.scheduler.config
        for request in requests:
            request.check(vocab_size=config.vocab_size, max_len=config.longest)
        with progress_bar("generate", progress, len(requests)) as advance:
            found = self._run(requests, lambda: advance(1))
        return [found[request.id] for request in requests]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        lora: str | Sequence[str | None] | None = None,
        progress: bool | None = None,
        **options: Any,
    ) -> list["Generation"]:
        """Answers to conversations, in their order; tool calls are in their texts.

        Args:
            conversations: One list of messages in OpenAI's format, or a list of them.
            params: As for `generate`.
            chat_template: Jinja template to use instead of the model's.
            lora: As for `generate`.
            progress: As for `generate`.
            **options: ``tools``, ``continue_final_message``, and ``variables`` of the
                template, such as ``{"enable_thinking": False}``.

        Raises:
            ValueError: as `generate`; also if there is no tokenizer or no template.
        """
        if self.tokenizer is None:
            raise ValueError("conversations need a tokenizer; give one to LLM")
        lay = ChatTemplate(self.tokenizer, chat_template)
        single = bool(conversations) and isinstance(conversations[0], Mapping)
        listed: Any = [conversations] if single else conversations
        prompts = [lay.encode(each, **options) for each in listed]
        return self.generate(prompts, params, lora=lora, progress=progress)

    def close(self) -> None:
        """Stop the engine."""
        self.engine.close(timeout=0)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ids(self, prompts: Any) -> list[tuple[int, ...]]:
        if isinstance(prompts, str):
            prompts = [prompts]
        _check_sequences(prompts)
        if any(isinstance(prompt, str) for prompt in prompts) and not self.tokenizer:
            raise ValueError("prompts are texts, but there is no tokenizer; give ids")
        return [tuple(self._encode(p) if isinstance(p, str) else p) for p in prompts]

    def _encode(self, text: str) -> list[int]:
        assert self.tokenizer is not None  # `_ids` refuses texts without one
        return self.tokenizer.encode(text, add_bos=self.tokenizer.adds_bos)

    def _run(
        self, requests: Sequence[Request], advance: Callable[[], None]
    ) -> dict[str, "Generation"]:
        """Run all requests, some at a time so that the queue never overflows."""
        config = self.engine.scheduler.config
        outputs: queue.SimpleQueue[list[Output] | EngineDead] = queue.SimpleQueue()
        waiting = collections.deque(requests)
        made: dict[str, list[Output]] = {request.id: [] for request in requests}
        running: dict[str, int] = {}
        refused: list[Request] = []
        try:
            while waiting or running:
                free = min(2 * config.num_slots - len(running), len(waiting))
                # After a rejection one by one, until there is room again.
                chosen = [waiting.popleft() for _ in range(1 if refused else free)]
                running |= {request.id: request.params.n for request in chosen}
                refused = self._submit(chosen, outputs.put)
                for request in reversed(refused):
                    del running[request.id]
                    waiting.appendleft(request)
                if not running:  # others fill the queue
                    time.sleep(_RETRY_SECONDS)
                    continue
                news = outputs.get()
                if isinstance(news, EngineDead):
                    raise news
                for output in news:
                    made[output.request].append(output)
                    running[output.request] -= output.finish is not None
                    if not running[output.request]:
                        del running[output.request]
                        advance()
        finally:
            for request_id in running:
                self.engine.abort(request_id)
        return {
            r.id: Generation(
                prompt=r.prompt,
                params=r.params,
                continuations={o.index: o for o in joined(made[r.id])},
            )
            for r in requests
        }

    def _submit(self, requests: Sequence[Request], sink: Sink) -> list[Request]:
        """Submit requests for one step; returns those that the queue rejects."""
        refused = []
        admitted = [self.engine.admit(request, sink) for request in requests]
        for request, future in zip(requests, admitted, strict=True):
            try:
                future.result()
            except Overloaded:
                refused.append(request)
        return refused


@dataclasses.dataclass(kw_only=True)
class Generation:
    """A prompt and its completions."""

    prompt: Sequence[int]
    """Token ids."""
    params: SamplingParams
    """Its completions."""
    continuations: dict[int, Output] = dataclasses.field(default_factory=dict)
    """Completions by index, 0 to n - 1, each with all of its tokens and text."""

    @property
    def text(self) -> str:
        """The text of the first completion."""
        return self.continuations[0].text

    @property
    def tokens(self) -> tuple[int, ...]:
        """The tokens of the first completion, including the one that stopped it."""
        return self.continuations[0].tokens


def generate(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: SamplingParams = GREEDY,
    eos_id: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """Completions of `prompts`, by an engine made for this call.

    Every call compiles; keep an `LLM` for more than one.

    Args:
        model: A decoder, on one device or on a mesh.
        prompts: Token ids, at least one per prompt.
        max_new_tokens: Maximum number of tokens to generate per prompt.
        sampling: Sampling parameters; a seed is incremented by one for each further
            prompt.
        eos_id: End-of-sequence token, or several.

    Returns:
        The generated tokens of each prompt, without the prompt and the end-of-sequence
        token.

    Raises:
        TypeError: a prompt is a number or a text, and not a sequence of token ids.
        ValueError: a prompt is empty or has an id outside the vocabulary, or prompt and
            completion exceed the model's limit.
        FloatingPointError: logits were not finite.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> [len(tokens) for tokens in generate(
        ...     model, [[1, 2, 3], [4]], max_new_tokens=5)]
        [5, 5]
    """
    _check_ids(prompts)
    if not len(prompts):
        return []
    params = [
        dataclasses.replace(
            sampling,
            max_tokens=max_new_tokens,
            seed=None if sampling.seed is None else sampling.seed + i,
        )
        for i in range(len(prompts))
    ]
    lengths = [len(Request(prompt=tuple(prompt)).prompt) for prompt in prompts]
    config = EngineConfig.for_prompts(lengths, max_new_tokens)
    ends = [] if eos_id is None else np.atleast_1d(eos_id).tolist()
    with LLM(model, config=config, eos_ids=ends, quiet=True) as llm:
        results = llm.generate(prompts, params, progress=False)
    firsts = [result.continuations[0] for result in results]
    for first in firsts:
        if first.finish == "error":
            raise FloatingPointError(first.error)
    return [
        list(first.tokens[:-1] if first.finish == "stop" else first.tokens)
        for first in firsts
    ]


_IDS = "pass a list of lists of token ids, as in generate(model, [[1, 2, 3]])"


def _check_ids(prompts: Any) -> None:
    """Raise if `prompts` are not a sequence of sequences of ids."""
    if isinstance(prompts, str) or any(isinstance(prompt, str) for prompt in prompts):
        raise TypeError(
            f"prompts are texts, expected token ids; {_IDS}, or use "
            "LLM.from_pretrained, which has a tokenizer"
        )
    _check_sequences(prompts)


def _check_sequences(prompts: Any) -> None:
    """Raise if a prompt is a single number."""
    for i, prompt in enumerate(prompts):
        if not isinstance(prompt, str) and np.ndim(prompt) == 0:
            raise TypeError(
                f"prompts[{i}] is {prompt!r}, expected a sequence of token ids; {_IDS}"
            )
