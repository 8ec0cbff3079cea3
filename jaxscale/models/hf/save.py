"""Save models as Hugging Face directories, without transformers."""

import dataclasses
from pathlib import Path
from typing import Any

from flax import nnx

from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.families.registry import config_to_hf, family_of
from jaxscale.models.generation import GenerationConfig
from jaxscale.models.hf.files import write_checkpoint
from jaxscale.models.hf.names import TensorMap
from jaxscale.models.hf.tensors import parameters_of, tensors_to_write
from jaxscale.models.tokenizer import Tokenizer


def save(
    model: Decoder | EncoderModel,
    path: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Tokenizer | None = None,
    generation: GenerationConfig | None = None,
) -> None:
    """Write `model` as a directory that transformers and `load` read.

    Parameters keep their type. transformers from 4.57 on reads the configuration.

    Args:
        model: The model; its parameters may be sharded over devices of this process.
        path: The directory; made if needed. Weights in it are replaced.
        max_shard_bytes: Maximum size of a file.
        tokenizer: Saved with the weights, with its control tokens in the configuration.
        generation: Saved as ``generation_config.json``; its end-of-sequence tokens
            replace the tokenizer's.

    Raises:
        ValueError: transformers has no counterpart of the model, it is unstacked, this
            process does not hold all of it, or the tokenizer has more tokens than the
            model.

    Example:
        >>> import tempfile
        >>> from jaxscale.models import load
        >>> model = load("tests/fixtures/models/gpt2")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(model, directory)
        ...     again = load(directory)
        >>> bool((again.embed.table[...] == model.embed.table[...]).all())
        True
    """
    if isinstance(model, EncoderModel) and isinstance(model.blocks, nnx.List):
        raise ValueError(
            "model is unstacked, for inference; save the model that it was made of"
        )
    values, maps = _described(model)
    parameters = parameters_of(model)
    for name, value in parameters.items():
        if not value.is_fully_addressable:
            raise ValueError(
                f"parameter {name} is spread over several processes; write an Orbax "
                "checkpoint, restore it in one process and save from there"
            )
    values["dtype"] = str(parameters["embed.table"].dtype)
    if tokenizer is not None:
        if tokenizer.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"tokenizer has {tokenizer.vocab_size} tokens, but vocab_size of the "
                f"model is {model.config.vocab_size}; they do not belong together"
            )
        values["bos_token_id"] = tokenizer.bos_id
        values["eos_token_id"] = tokenizer.eos_id
        _set_pad_id(values, tokenizer)
    if generation is not None:
        values["eos_token_id"] = generation.eos_token_id
    write_checkpoint(path, values, tensors_to_write(maps, model), max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save(path)
    if generation is not None:
        generation.save(path)


def _described(
    model: Decoder | EncoderModel,
) -> tuple[dict[str, Any], list[TensorMap]]:
    """The configuration and the tensors of the files of `model`."""
    family = family_of(model.config)
    maps = family.tensors(model.config)
    if isinstance(model, Decoder):
        return config_to_hf(model.config), maps
    head = None if model.head is None else model.head.config
    if head is not None and family.heads is not None:
        maps += family.heads.tensors(model.config, head)
        # Where the table is not tied, transformers has this bias under both names.
        biases = {copy: of for copy, of in family.tied.items() if ".bias" in copy}
        maps += [
            dataclasses.replace(m, name=biases[m.name])
            for m in maps
            if m.name in biases
        ]
    if head is None or head.kind == "pooler":  # the class of the encoder alone
        maps = [
            dataclasses.replace(m, name=m.name.removeprefix(family.prefix))
            for m in maps
        ]
    return config_to_hf(model.config, head), maps


def _set_pad_id(values: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Name the padding token of `tokenizer`, unless positions depend on another."""
    if (
        values["model_type"] in ("roberta", "xlm-roberta", "camembert")
        and tokenizer.pad_id != values["pad_token_id"]
    ):
        raise ValueError(
            f"tokenizer pads with {tokenizer.pad_id}, but positions of the model are "
            f"counted from pad_token_id {values['pad_token_id']}; they do not belong "
            "together"
        )
    values["pad_token_id"] = tokenizer.pad_id
