"""The model of a directory, ready to be served."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.checks import check_choice
from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.encoder.encoder import Encoder
from jaxscale.inference.engine.config import EngineConfig
from jaxscale.inference.engine.make import Progress, make_engine
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.inference.lora_modules import (
    LoraModules,
    describe_decoder,
    load_decoder,
)
from jaxscale.inference.reasoning import ReasoningFormat
from jaxscale.inference.request import SamplingParams
from jaxscale.inference.run_directory import is_encoder_run, is_run
from jaxscale.inference.server.backend import EngineBackend, TextModel
from jaxscale.inference.server.served_encoder import ServedEncoder
from jaxscale.inference.server.service import Served
from jaxscale.inference.tools import ToolFormat
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.registry import config_from_hf
from jaxscale.models.generation import GenerationConfig
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.sentence_transformers import sentence_settings
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.quantized_linear import Quantization
from jaxscale.sharding.rules import REPLICATED, AxisRules


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations are laid out and answered."""

    template: str | None = None
    """Jinja template to use instead of the model's."""
    tool_format: ToolFormat | Literal["auto"] = "auto"
    """Format of tool calls in the output; ``"auto"`` detects it from the template."""
    reasoning_format: ReasoningFormat | Literal["auto", "none"] = "auto"
    """Format of the reasoning in the output; ``"auto"`` detects it from the template,
    ``"none"`` leaves it in the text."""

    def __post_init__(self) -> None:
        if self.tool_format != "auto":
            check_choice("tool_format", self.tool_format, ToolFormat)
        if self.reasoning_format not in ("auto", "none"):
            check_choice("reasoning_format", self.reasoning_format, ReasoningFormat)

    def tools(self, template: ChatTemplate | None) -> ToolFormat | None:
        """The format of tool calls, None where the template shows none."""
        if self.tool_format != "auto":
            return self.tool_format
        return None if template is None else template.tool_format

    def thoughts(self, template: ChatTemplate | None) -> ReasoningFormat | None:
        """The format of reasoning, None where it is not parsed."""
        if self.reasoning_format == "auto":
            return None if template is None else template.reasoning_format
        return None if self.reasoning_format == "none" else self.reasoning_format


def defaults_of(config: GenerationConfig) -> dict[str, Any]:
    """Settings of `SamplingParams` that the authors of a model recommend.

    They are those that vLLM takes: none if the file does not mention sampling.

    Example:
        >>> defaults_of(GenerationConfig(temperature=0.6, other={"max_new_tokens": 9}))
        {'temperature': 0.6, 'max_tokens': 9}
    """
    names = ("temperature", "top_k", "top_p")
    found = {name: getattr(config, name) for name in names}
    found |= {name: config.other.get(name) for name in ("min_p", "repetition_penalty")}
    found["max_tokens"] = config.other.get("max_new_tokens")
    if found["top_k"] == 0:
        found["top_k"] = None
    if found["top_p"] == 0:
        found |= {"temperature": 0.0, "top_p": None}
    return {name: value for name, value in found.items() if value is not None}


def served(
    path: str | Path,
    *,
    name: str | None = None,
    engine: EngineConfig | None = None,
    chat: ChatOptions = ChatOptions(),
    aliases: Sequence[str] = (),
    sampling_defaults: bool = True,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
    dtype: DTypeLike | None = None,
    quantization: Quantization | None = None,
    lora_modules: LoraModules | None = None,
    progress: Progress | None = None,
    on_texts: Callable[[dict[str, Any]], None] | None = None,
) -> Served:
    """The model of a directory, compiled, its engine started.

    Args:
        path: A Hugging Face directory or that of a run, of a decoder or of an encoder,
            which embeds and scores texts.
        name: Model name in requests; None is that of the directory.
        engine: Sizes of the engine.
        chat: How conversations are laid out and answered.
        aliases: Other model names that requests may use.
        sampling_defaults: Take settings that a request leaves out from
            ``generation_config.json``.
        mesh: Devices to split the model over, with `rules`.
        rules: Mesh axes that split it.
        dtype: Type of the computation; by default that of the file.
        quantization: Weights of 8 bits of a decoder; None keeps those of the file.
        lora_modules: Directories of a decoder's adapters, by model name in requests.
        progress: As for `make_engine`.
        on_texts: As of `Loading`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: sizes do not fit, the template is malformed, an encoder would be
            quantized, or an adapter does not fit or has a name of the model.
    """
    path = Path(path)
    name = name or path.resolve().name
    options: dict[str, Any] = {"mesh": mesh, "rules": rules, "dtype": dtype}
    if is_encoder(path):
        if jax.process_count() > 1:
            raise ValueError(
                f"{path} holds an encoder, which one process serves: start it alone"
            )
        if quantization is not None:
            raise ValueError(
                f"quantization {quantization!r} is for decoders, but {path} holds an "
                "encoder; leave it out"
            )
        if lora_modules:
            raise ValueError(
                f"lora_modules are adapters of decoders, but {path} holds an encoder; "
                "leave them out"
            )
        encoder = Encoder.from_pretrained(path, **options)
        return ServedEncoder(encoder, name, aliases=aliases)
    if is_run(path):
        generation = GenerationConfig()
    else:
        generation = GenerationConfig.from_file(path)
    adapters = {name: str(source) for name, source in (lora_modules or {}).items()}
    if taken := {name, *aliases} & {*adapters}:
        raise ValueError(
            f"lora_modules has the name {min(taken)!r}, which is the model's; choose "
            "another"
        )
    options |= {"quantization": quantization, "lora_modules": lora_modules}
    model, weights = None, None
    if jax.process_count() == 1:
        model = describe_decoder(path, **options)
    if model is None:
        model = load_decoder(path, **options)
    else:
        weights = functools.partial(load_decoder, path, **options)
    return text_model(
        model,
        Tokenizer.from_file(path),
        name=name,
        engine=engine,
        chat=chat,
        aliases=aliases,
        adapters=adapters,
        eos_ids=generation.eos_ids,
        defaults=defaults_of(generation) if sampling_defaults else {},
        weights=weights,
        progress=progress,
        on_texts=on_texts,
    )


def is_encoder(path: str | Path) -> bool:
    """Whether a directory holds an encoder."""
    if is_run(path):
        return is_encoder_run(path)
    settings = sentence_settings(Path(path))
    config = config_from_hf(Checkpoint(settings["path"]).config)
    return isinstance(config, EncoderConfig)


def text_model(
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    name: str,
    engine: EngineConfig | None = None,
    chat: ChatOptions = ChatOptions(),
    aliases: Sequence[str] = (),
    adapters: Mapping[str, str] | None = None,
    eos_ids: Sequence[int] = (),
    defaults: Mapping[str, Any] | None = None,
    weights: Callable[[], Decoder] | None = None,
    progress: Progress | None = None,
    on_texts: Callable[[dict[str, Any]], None] | None = None,
) -> TextModel:
    """A decoder, compiled, its engine started.

    Args:
        model: The decoder.
        tokenizer: Of the model.
        name: Model name in requests.
        engine: Sizes of the engine.
        chat: How conversations are laid out and answered.
        aliases: Other model names that requests may use.
        adapters: Directories of the adapters that `model` has, by name.
        eos_ids: EOS tokens besides the tokenizer's.
        defaults: Settings of `SamplingParams` for what a request leaves out; logged at
            the start.
        weights: As for `make_engine`.
        progress: As for `make_engine`.
        on_texts: As of `Loading`.

    Raises:
        ValueError: sizes do not fit, or the template is malformed.
    """
    longest, limit = (engine or EngineConfig()).max_len, model.config.max_seq_len
    if longest is not None and longest > limit:
        raise ValueError(
            f"max_len is {longest}, expected at most {limit}, for which the model was "
            "made; lower it"
        )
    lay = None
    if chat.template or tokenizer.chat_template:
        lay = ChatTemplate(tokenizer, chat.template)
    if defaults:
        SamplingParams(**defaults)
        said = ", ".join(f"{name} {value}" for name, value in defaults.items())
        print(
            f"jaxscale: where a call says nothing, {said} (generation_config.json; "
            "--no-sampling-defaults turns it off)",
            file=sys.stderr,
        )
    ends = {*eos_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])}
    size = model.config.vocab_size
    compiler = None
    if ends:
        compiler = GrammarCompiler(tokenizer, vocab_size=size, eos_ids=sorted(ends))
    else:
        print("no token ends a text: guided texts are refused", file=sys.stderr)
    fields: dict[str, Any] = {
        "name": name,
        "tokenizer": tokenizer,
        "chat": lay,
        "aliases": tuple(aliases),
        "adapters": adapters or {},
        "tool_format": chat.tools(lay),
        "reasoning_format": chat.thoughts(lay),
        "defaults": defaults or {},
    }
    if on_texts is not None:
        on_texts(fields)
    made = make_engine(
        model,
        tokenizer,
        config=engine,
        eos_ids=sorted(ends),
        compiler=compiler,
        wait=False,
        weights=weights,
        progress=progress,
    )
    return TextModel(backend=EngineBackend(made.start()), **fields)
