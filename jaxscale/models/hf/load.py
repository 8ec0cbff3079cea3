"""Load models from Hugging Face directories, without transformers."""

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.checks import check_choice
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.registry import FAMILIES, config_from_hf, head_from_hf
from jaxscale.models.heads import HeadConfig
from jaxscale.models.hf.family import Family
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.hf.names import TensorMap
from jaxscale.models.hf.tensors import (
    check_tensors,
    parameters_of,
    read_model,
    without_absent_prefix,
)
from jaxscale.models.quantization import quantize_read, quantize_rest
from jaxscale.models.serving import (
    prepare_read,
    prepare_rest,
    serving_config,
    serving_mesh,
    serving_rules,
)
from jaxscale.nn.quantized_linear import Quantization
from jaxscale.sharding.rules import REPLICATED, AxisRules


@overload
def load(
    path: str | Path, *, quantization: Quantization, **options: Any
) -> Decoder: ...


@overload
def load(
    path: str | Path, *, head: HeadConfig | None, **options: Any
) -> EncoderModel: ...


# Which of the two it is, config.json says: `from_pretrained` of either knows it.
@overload
def load(path: str | Path, **options: Any) -> Decoder | EncoderModel: ...


def load(
    path: str | Path,
    *,
    head: HeadConfig | Literal["file"] | None = "file",
    seed: int = 0,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike | None = None,
    quantization: Quantization | None = None,
    for_inference: bool = False,
    abstract: bool = False,
    **options: Any,
) -> Decoder | EncoderModel:
    """The model of a Hugging Face directory, on the devices of `mesh`.

    Args:
        path: A directory with ``config.json`` and ``model.safetensors``, or with shards
            and their index; or the name of a model on the Hugging Face hub, as
            `jaxscale.models.hf.hub.local_directory` takes it.
        head: Head of an encoder. ``"file"``: the one that ``architectures`` in
            ``config.json`` names. None: no head. A configuration: a new head instead of
            the file's, for fine-tuning.
        seed: Random seed of a new head's parameters.
        mesh: The devices; None is the first device only.
        rules: Mesh axes that split parameters, by their logical axes.
        dtype: Type of the computation; None is that of the parameters.
        param_dtype: Type of the parameters; None keeps that of each tensor in the file.
        quantization: Type of the weights of a decoder for inference, as
            `jaxscale.models.quantize` makes them; each block is quantized as soon as it
            is read, so that at most one is on the device unquantized.
        for_inference: Return what `Decoder.for_inference` makes of a decoder; each
            block is prepared as soon as it is read, so that at most one is on the
            device twice. `quantization` implies it.
        abstract: Read no weights: the parameters are shapes that say where they are to
            be. Without `quantization`.
        **options: Further arguments of `Decoder` or `EncoderModel`, for example
            ``remat="full"``.

    Returns:
        A `Decoder` or an `EncoderModel`, as ``model_type`` in ``config.json`` says; its
        parameters have the shardings of `rules` on `mesh`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the model or its head is of a kind that is not supported, `head` is
            given for a decoder or `quantization` for an encoder, a file is damaged or
            not what ``checksums.sha256`` beside it says, or a tensor is missing,
            unexpected, of the wrong shape or, with `quantization`, not finite.

    Example:
        >>> import jax
        >>> tokens = jax.numpy.zeros((1, 5), jax.numpy.int32)
        >>> load("tests/fixtures/models/llama3_gqa")(tokens).shape
        (1, 5, 128)
        >>> load("tests/fixtures/encoders/bert").hidden(tokens).shape
        (1, 5, 32)
    """
    path = local_directory(path)
    files = _opened(path, head)
    is_encoder = files.family.heads is not None
    if is_encoder:
        options["head"] = files.own_head if head == "file" else head
    if quantization is not None:
        _check_quantization(quantization, files, abstract=abstract)
    prepares = not is_encoder and (for_inference or quantization is not None)
    each_block: Any = prepare_read
    if quantization is not None:
        each_block = functools.partial(quantize_read, weights=quantization)
    if prepares:
        rules = serving_rules(rules)
        mesh = None if mesh is None else serving_mesh(mesh)
    if not abstract:
        files.checkpoint.check_weights()

    def make(dtype: DTypeLike, param_dtype: DTypeLike) -> Any:
        types = {"dtype": dtype, "param_dtype": param_dtype}
        return files.make(rules=rules, rngs=nnx.Rngs(seed), **types, **options)

    model = read_model(
        files.checkpoint,
        files.maps,
        make,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        param_dtype=param_dtype,
        ignored=files.ignored,
        tied=files.tied,
        each_block=functools.partial(each_block, mesh=mesh, rules=rules)
        if prepares
        else None,
        abstract=abstract,
    )
    if not prepares:
        return model
    if abstract:
        return model.for_inference()
    sizes = {} if mesh is None else dict(mesh.shape)
    model.config = serving_config(model.config, rules, sizes)
    if quantization is None:
        return prepare_rest(model, sizes)
    return quantize_rest(model, quantization, mesh)


def _check_quantization(
    quantization: Quantization, files: "_Files", *, abstract: bool
) -> None:
    """Raise where a model cannot be quantized as it is read."""
    check_choice("quantization", quantization, Quantization)
    if files.family.heads is not None:
        raise ValueError(
            f"quantization {quantization!r} is for decoders, but "
            f"{str(files.checkpoint.directory)!r} holds an encoder of model_type "
            f"{files.family.model_type!r}; leave it out"
        )
    if abstract:
        raise ValueError(f"abstract models have no quantization, got {quantization!r}")


def check_files(path: str | Path) -> None:
    """Check that a directory holds the model that its ``config.json`` describes.

    Only the headers of the files are read, and copies of tied tensors.

    Args:
        path: As for `load`.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: as `load`, for the parameters without a head.
    """
    files = _opened(local_directory(path), "without")
    options = {} if files.family.heads is None else {"head": None}
    model = jax.eval_shape(lambda: files.make(rngs=nnx.Rngs(0), **options))
    shapes = {name: leaf.shape for name, leaf in parameters_of(model).items()}
    check_tensors(files.checkpoint, files.maps, shapes, files.ignored, files.tied)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Files:
    """What to read from a directory."""

    checkpoint: Checkpoint
    family: Family
    maps: list[TensorMap]
    """The tensors to read, under the names of the files."""
    make: Callable[..., Any]
    """Makes the model, given all arguments but its configuration."""
    own_head: HeadConfig | None
    """The head to read."""
    ignored: list[str]
    """Patterns of the names of tensors that are left."""
    tied: dict[str, str]
    """Tensors that equal others, where they are in the files."""


def _opened(path: Path, head: Any) -> _Files:
    """The files of a directory, with their own head if `head` is ``"file"``."""
    checkpoint = Checkpoint(path)
    config = config_from_hf(checkpoint.config)
    is_encoder = isinstance(config, EncoderConfig)
    num_blocks = config.num_blocks if is_encoder else config.num_layers
    if num_blocks > len(checkpoint.names()):
        # Before a model of so many layers is described.
        raise ValueError(
            f"config.json has {num_blocks} layers, but {str(path)!r} holds only "
            f"{len(checkpoint.names())} tensors; config.json is of another model"
        )
    family = FAMILIES[checkpoint.config["model_type"]]
    maps, ignored, own = family.tensors(config), list(family.buffers), None
    tied, model_type = config.tie_embeddings, Decoder
    if family.heads is None:
        if head not in ("file", "without"):
            raise ValueError(
                f"head {head!r} is for encoders, but {str(path)!r} holds a decoder of "
                f"model_type {family.model_type!r}; leave it out"
            )
    else:
        own, model_type = own_head(checkpoint) if head == "file" else None, EncoderModel
        tied = tied and own is not None and own.kind == "masked_lm"
        maps += [] if own is None else family.heads.tensors(config, own)
        names = (*family.heads.names, *family.unread)
        ignored += ["^" + re.escape(name) for name in names]
    maps = without_absent_prefix(checkpoint, maps, family.prefix)
    maps = [_as_named(checkpoint, family, entry) for entry in maps]
    return _Files(
        checkpoint=checkpoint,
        family=family,
        maps=maps,
        make=functools.partial(model_type, config),
        own_head=own,
        ignored=ignored,
        tied=_tied(family, maps) if tied else {},
    )


def own_head(checkpoint: Checkpoint) -> HeadConfig | None:
    """The head of an encoder that its files hold."""
    pooler = any("pooler." in name for name in checkpoint.names())
    return head_from_hf(checkpoint.config, has_pooler=pooler)


def _tied(family: Family, maps: Sequence[TensorMap]) -> dict[str, str]:
    """The tensors that `family` ties, under their names in the file."""
    names = {entry.name for entry in maps}
    return {
        copy: source if source in names else source.removeprefix(family.prefix)
        for copy, source in family.tied.items()
    }


def _as_named(checkpoint: Checkpoint, family: Family, entry: TensorMap) -> TensorMap:
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
