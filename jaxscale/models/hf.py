"""Models from and to Hugging Face directories, with transformers not needed.

Decoders are those of transformers' GPT2LMHeadModel, GPTJForCausalLM and
LlamaForCausalLM; encoders those of `jaxscale.models.families`.
"""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.families import (
    FAMILIES,
    encoder_config_from_hf,
    encoder_config_to_hf,
    family_of,
    head_from_hf,
)
from jaxscale.models.heads import HeadConfig
from jaxscale.models.hf_config import config_from_hf, config_to_hf, model_type
from jaxscale.models.hf_encoder import EncoderFamily
from jaxscale.models.hf_files import Checkpoint, write_checkpoint
from jaxscale.models.hf_names import IGNORED, PREFIXES, TensorMap, tensor_maps
from jaxscale.models.hf_tensors import (
    parameters_of,
    read_model,
    tensors_to_write,
    without_absent_prefix,
)
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.sharding.rules import REPLICATED, AxisRules


def load(
    path: str | Path,
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    **options: Any,
) -> Decoder:
    """The decoder of a Hugging Face directory, on the devices of `mesh`.

    Args:
        path: A directory with ``config.json`` and ``model.safetensors``, or with shards
            and their index.
        mesh: The devices; None is the first one alone.
        rules: Which mesh axes split which parameters.
        dtype: Type of the computation; None is that of the parameters.
        param_dtype: Type of the parameters; None keeps that of each tensor in the file.
        **options: Further arguments of `Decoder`, for example ``remat="full"``.

    Returns:
        The model; its parameters have the shardings of `rules` on `mesh`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model is of a kind that `Decoder` does not compute, a file is
            damaged, or a tensor is missing, unexpected or of the wrong shape.

    Example:
        >>> import jax
        >>> model = load("tests/fixtures/models/llama3_gqa")
        >>> model(jax.numpy.zeros((1, 5), jax.numpy.int32)).shape
        (1, 5, 128)
    """
    checkpoint = Checkpoint(path)
    if checkpoint.config.get("model_type") in FAMILIES:
        raise ValueError(
            f"model_type {checkpoint.config['model_type']!r} is not supported by "
            "Decoder: it is an encoder; use EncoderModel.from_pretrained"
        )
    config = config_from_hf(checkpoint.config)
    prefix = PREFIXES[model_type(config)]
    maps = without_absent_prefix(checkpoint, tensor_maps(config), prefix)

    def make(dtype: DTypeLike, param_dtype: DTypeLike) -> Decoder:
        return Decoder(
            config,
            dtype=dtype,
            param_dtype=param_dtype,
            rules=rules,
            rngs=nnx.Rngs(0),
            **options,
        )

    return read_model(
        checkpoint,
        maps,
        make,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        param_dtype=param_dtype,
        ignored=IGNORED,
        tied={"lm_head.weight": maps[0].name} if config.tie_embeddings else {},
    )


def load_encoder(
    path: str | Path,
    *,
    head: HeadConfig | Literal["file"] | None = "file",
    seed: int = 0,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    **options: Any,
) -> EncoderModel:
    """The encoder of a Hugging Face directory, on the devices of `mesh`.

    Args:
        path: As for `load`.
        head: ``"file"``: the one that ``architectures`` in ``config.json`` names. None:
            none, whatever the file has. A configuration: a new one in the place of the
            file's, for fine-tuning.
        seed: Decides the parameters of a new head.
        mesh: The devices; None is the first one alone.
        rules: Which mesh axes split which parameters.
        dtype: Type of the computation; None is that of the parameters.
        param_dtype: Type of the parameters; None keeps that of each tensor in the file.
        **options: Further arguments of `EncoderModel`, for example ``remat="full"``.

    Returns:
        The model; its parameters have the shardings of `rules` on `mesh`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model or its head is of a kind that `EncoderModel` does not
            compute, a file is damaged, or a tensor is missing, unexpected or of the
            wrong shape.

    Example:
        >>> import jax
        >>> model = load_encoder("tests/fixtures/encoders/bert")
        >>> model.hidden(jax.numpy.zeros((1, 5), jax.numpy.int32)).shape
        (1, 5, 32)
    """
    checkpoint = Checkpoint(path)
    config = encoder_config_from_hf(checkpoint.config)
    family = family_of(config)
    pooler = any("pooler." in name for name in checkpoint.names())
    own = head_from_hf(checkpoint.config, has_pooler=pooler) if head == "file" else None
    layers = own if head == "file" else head
    maps = family.tensors(config)
    if own is not None:
        maps += family.head_tensors(config, own)
    maps = without_absent_prefix(checkpoint, maps, family.prefix)
    maps = [_as_named(checkpoint, family, entry) for entry in maps]

    def make(dtype: DTypeLike, param_dtype: DTypeLike) -> EncoderModel:
        return EncoderModel(
            config,
            head=layers,
            dtype=dtype,
            param_dtype=param_dtype,
            rules=rules,
            rngs=nnx.Rngs(seed),
            **options,
        )

    masked_lm = own is not None and own.kind == "masked_lm"
    return read_model(
        checkpoint,
        maps,
        make,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        param_dtype=param_dtype,
        ignored=(
            *_ENCODER_BUFFERS,
            *("^" + re.escape(n) for n in (*family.head_names, *family.unread)),
        ),
        tied=family.tied if masked_lm and config.tie_embeddings else {},
    )


def save(
    model: Decoder | EncoderModel,
    path: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write `model` as a directory that transformers and `load` read.

    Parameters keep their type. The configuration has the keys of transformers 5.

    Args:
        model: Its parameters may be sharded, over devices of this process.
        path: The directory; made if needed. Weights in it are replaced.
        max_shard_bytes: Size at which another file is begun.
        tokenizer: Saved beside the weights, its control tokens named in the
            configuration.

    Raises:
        ValueError: transformers has no counterpart of the model, it is unstacked, this
            process does not hold all of it, or the tokenizer has more tokens than the
            model.

    Example:
        >>> import tempfile
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
    write_checkpoint(path, values, tensors_to_write(maps, parameters), max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save(path)


def _described(
    model: Decoder | EncoderModel,
) -> tuple[dict[str, Any], list[TensorMap]]:
    """The configuration and the tensors of the files of `model`."""
    if isinstance(model, Decoder):
        return config_to_hf(model.config), tensor_maps(model.config)
    head = None if model.head is None else model.head.config
    values = encoder_config_to_hf(model.config, head)
    family = family_of(model.config)
    maps = family.tensors(model.config)
    if head is not None:
        maps += family.head_tensors(model.config, head)
    if head is None or head.kind == "pooler":  # the class of the encoder alone
        maps = [
            dataclasses.replace(m, name=m.name.removeprefix(family.prefix))
            for m in maps
        ]
    return values, maps


def _set_pad_id(values: dict[str, Any], tokenizer: Tokenizer) -> None:
    """Name the padding token of `tokenizer`, unless positions depend on another."""
    if values["model_type"] == "roberta" and tokenizer.pad_id != values["pad_token_id"]:
        raise ValueError(
            f"tokenizer pads with {tokenizer.pad_id}, but positions of the model are "
            f"counted from pad_token_id {values['pad_token_id']}; they do not belong "
            "together"
        )
    values["pad_token_id"] = tokenizer.pad_id


_ENCODER_BUFFERS = (
    r"(^|\.)embeddings\.(position_ids|token_type_ids)$",
    r"(^|\.)inv_freq$",
)
"""Buffers of old files, recomputed from the configuration."""


def _as_named(
    checkpoint: Checkpoint, family: EncoderFamily, entry: TensorMap
) -> TensorMap:
    """`entry` under the name that the file gives it.

    Files converted from TensorFlow call the parts of norms otherwise; versions before 5
    stored the bias of a projection that is not tied under one of its two names.
    """
    names = [
        other + entry.name.removeprefix(start)
        for start, other in family.other_names.items()
        if entry.name.startswith(start)
    ]
    for new, old in ((".weight", ".gamma"), (".bias", ".beta")):
        if entry.name.endswith(f"LayerNorm{new}"):
            names.append(entry.name.removesuffix(new) + old)
    if entry.name.endswith(".bias") and entry.name in family.tied:
        names.append(family.tied[entry.name])
    for name in (entry.name, *names):
        renamed = dataclasses.replace(entry, name=name)
        if renamed.tensor(0 if entry.stacked else None) in checkpoint:
            return renamed
    return entry
