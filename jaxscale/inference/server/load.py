"""The model of a directory, ready to be served."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.inference.chat import ChatTemplate
from jaxscale.inference.encoder.encoder import Encoder
from jaxscale.inference.engine.config import EngineConfig
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.inference.llm import make_engine
from jaxscale.inference.server.backend import EngineBackend, TextModel
from jaxscale.inference.server.served_encoder import ServedEncoder
from jaxscale.inference.server.service import Served
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families import config_from_hf
from jaxscale.models.generation import GenerationConfig
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.load import load
from jaxscale.models.hf.sentence_transformers import sentence_settings
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.nn.quantized_linear import Quantization
from jaxscale.sharding.rules import REPLICATED, AxisRules


def served(
    path: str | Path,
    *,
    name: str | None = None,
    engine: EngineConfig | None = None,
    chat_template: str | None = None,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
    dtype: DTypeLike | None = None,
    quantization: Quantization | None = None,
) -> Served:
    """The model of a Hugging Face directory, compiled, its engine started.

    Args:
        path: A decoder's directory, or an encoder's, which embeds and scores texts.
        name: Name that calls give; None is that of the directory.
        engine: Sizes of the engine.
        chat_template: Jinja template to use instead of the directory's.
        mesh: Devices to split the model over, with `rules`.
        rules: Mesh axes that split it.
        dtype: Type of the computation; by default that of the file.
        quantization: Weights of 8 bits of a decoder; None keeps those of the file.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: sizes do not fit, the template is malformed, or an encoder would be
            quantized.
    """
    path = Path(path)
    name = name or path.resolve().name
    options: dict[str, Any] = {"mesh": mesh, "rules": rules, "dtype": dtype}
    if _is_encoder(path) and jax.process_count() == 1:
        if quantization is not None:
            raise ValueError(
                f"quantization {quantization!r} is for decoders, but {path} holds an "
                "encoder; leave it out"
            )
        return ServedEncoder(Encoder.from_pretrained(path, **options), name)
    return text_model(
        load_decoder(path, quantization=quantization, **options),
        Tokenizer.from_file(path),
        name=name,
        engine=engine,
        chat_template=chat_template,
        eos_ids=GenerationConfig.from_file(path).eos_ids,
    )


def load_decoder(path: str | Path, **options: Any) -> Decoder:
    """The decoder of a Hugging Face directory, as engines read it.

    Args:
        path: The directory.
        **options: Mesh, rules, dtype and quantization, as for `served`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is an encoder.
    """
    if _is_encoder(path):
        raise ValueError(
            f"{path} holds an encoder, which one process serves: start it alone"
        )
    model: Any = load(path, **options)
    return model.for_inference()  # and what was loaded is gone


def _is_encoder(path: str | Path) -> bool:
    settings = sentence_settings(Path(path))
    config = config_from_hf(Checkpoint(settings["path"]).config)
    return isinstance(config, EncoderConfig)


def text_model(
    model: Decoder,
    tokenizer: Tokenizer,
    *,
    name: str,
    engine: EngineConfig | None = None,
    chat_template: str | None = None,
    eos_ids: Sequence[int] = (),
) -> TextModel:
    """A decoder, compiled, its engine started.

    Args:
        model: The decoder.
        tokenizer: Of the model.
        name: Name that calls give.
        engine: Sizes of the engine.
        chat_template: Jinja template to use instead of the tokenizer's.
        eos_ids: Tokens that end a text, besides the tokenizer's.

    Raises:
        ValueError: sizes do not fit, or the template is malformed.
    """
    longest, limit = (engine or EngineConfig()).max_len, model.config.max_seq_len
    if longest is not None and longest > limit:
        raise ValueError(
            f"max_len is {longest}, expected at most {limit}, for which the model was "
            "made; lower it"
        )
    chat = None
    if chat_template or tokenizer.chat_template:
        chat = ChatTemplate(tokenizer, chat_template)
    ends = {*eos_ids, *([] if tokenizer.eos_id is None else [tokenizer.eos_id])}
    size = model.config.vocab_size
    compiler = None
    if ends:
        compiler = GrammarCompiler(tokenizer, vocab_size=size, eos_ids=sorted(ends))
    else:
        print("no token ends a text: guided texts are refused", file=sys.stderr)
    made = make_engine(
        model, tokenizer, config=engine, eos_ids=sorted(ends), compiler=compiler
    )
    return TextModel(
        name=name,
        backend=EngineBackend(made.start()),
        tokenizer=tokenizer,
        chat=chat,
    )
