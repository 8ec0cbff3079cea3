"""Decoders from and to Hugging Face directories, with transformers not needed.

`load` reads each parameter straight into its place: every device gets its own shard,
filled from the memory-mapped files block by block. The host holds one shard of one
parameter at a time (the stacked parameter of all blocks counts as one), never the
model. `save` holds the tensors of one file at a time.

The files are those of transformers' GPT2LMHeadModel, GPTJForCausalLM and
LlamaForCausalLM. Axis letters of shapes: L layers, D model, V vocabulary.
"""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxscale.models.decoder import Decoder
from jaxscale.models.hf_config import config_from_hf, config_to_hf, model_type
from jaxscale.models.hf_files import Checkpoint, write_checkpoint
from jaxscale.models.hf_names import IGNORED, PREFIXES, TensorMap, tensor_maps
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.sharding.parameters import shardings
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
        >>> model = load("tests/fixtures/models/llama3_gqa")
        >>> model(jax.numpy.zeros((1, 5), jax.numpy.int32)).shape
        (1, 5, 128)
    """
    checkpoint = Checkpoint(path)
    config = config_from_hf(checkpoint.config)
    maps = tensor_maps(config)
    prefix = _absent_prefix(checkpoint, PREFIXES[model_type(config)])
    maps = [_strip_prefix(entry, prefix) for entry in maps]

    table = _require_tensor(checkpoint, maps[0].name)
    main_dtype = _dtype_of(checkpoint, [table], param_dtype)
    abstract = jax.eval_shape(
        lambda: Decoder(
            config,
            dtype=main_dtype if dtype is None else dtype,
            param_dtype=main_dtype,
            rules=rules,
            rngs=nnx.Rngs(0),
            **options,
        )
    )
    shapes = {name: leaf.shape for name, leaf in _parameters(abstract).items()}
    _check_tensors(checkpoint, maps, shapes, config.tie_embeddings)
    if mesh is None:
        places = dict.fromkeys(shapes, SingleDeviceSharding(jax.devices()[0]))
    else:
        places = _parameters(shardings(abstract, mesh, rules))
    sources = {name: entry for entry in maps for name in entry.parameters}
    values = [
        _read_parameter(
            checkpoint, sources[name], name, shapes, places[name], param_dtype
        )
        for name in shapes
    ]
    return jax.tree.unflatten(jax.tree.structure(abstract), values)


def save(
    model: Decoder,
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
        ValueError: transformers has no counterpart of the model, this process does
            not hold all of it, or the tokenizer has more tokens than the model.

    Example:
        >>> import tempfile
        >>> model = load("tests/fixtures/models/gpt2")
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     save(model, directory)
        ...     again = load(directory)
        >>> bool((again.embed.table[...] == model.embed.table[...]).all())
        True
    """
    values = config_to_hf(model.config)
    parameters = _parameters(model)
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
        values["pad_token_id"] = tokenizer.pad_id
    tensors = _tensors_to_write(tensor_maps(model.config), parameters)
    write_checkpoint(path, values, tensors, max_shard_bytes)
    if tokenizer is not None:
        tokenizer.save(path)


# ------------------------------------------------------------------------------------
# Names and checks


def _parameters(model: Any) -> dict[str, Any]:
    """Each parameter, or what stands for it in the tree, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(
            ".value"
        ): leaf
        for path, leaf in leaves
    }


def _absent_prefix(checkpoint: Checkpoint, prefix: str) -> str:
    """`prefix` if the file leaves it out, else the empty string."""
    return "" if any(n.startswith(prefix) for n in checkpoint.names()) else prefix


def _strip_prefix(entry: TensorMap, prefix: str) -> TensorMap:
    return TensorMap(
        name=entry.name.removeprefix(prefix),
        parameters=entry.parameters,
        transpose=entry.transpose,
    )


def _require_tensor(checkpoint: Checkpoint, name: str, where: str = "") -> str:
    """`name`, which the checkpoint must have."""
    if name in checkpoint:
        return name
    raise ValueError(
        f"{checkpoint.directory} lacks the tensor {name!r}{where}; the download is "
        "incomplete or config.json is of another model"
    )


def _check_tensors(
    checkpoint: Checkpoint,
    maps: list[TensorMap],
    shapes: dict[str, tuple[int, ...]],
    tied: bool,
) -> None:
    """Stops at the first tensor that is missing, misshapen or unexpected."""
    names = set(checkpoint.names())
    for entry in maps:
        expected = _file_shape(entry, shapes)
        for name in _names(entry, shapes):
            where = f"shape {expected} for {' and '.join(entry.parameters)}"
            _require_tensor(checkpoint, name, f", expected with {where}")
            names.remove(name)
            if checkpoint.shape(name) != expected:
                raise ValueError(
                    f"tensor {name!r} of {checkpoint.file(name)} has the shape "
                    f"{checkpoint.shape(name)}, expected {where}; config.json is of "
                    "another model"
                )
    if tied and "lm_head.weight" in names:
        # Some files store the tied table twice.
        _check_tied(checkpoint, maps[0].name)
        names.remove("lm_head.weight")
    for name in sorted(names):
        if not any(re.search(pattern, name) for pattern in IGNORED):
            raise ValueError(
                f"tensor {name!r} of {checkpoint.file(name)} has no place in the "
                f"model that config.json describes; it has shape "
                f"{checkpoint.shape(name)}"
            )


def _check_tied(checkpoint: Checkpoint, table: str) -> None:
    """Stops if the output projection of a tied model is not the embedding table."""
    shape = checkpoint.shape(table)
    equal = checkpoint.shape("lm_head.weight") == shape
    rows = 4096
    for start in range(0, shape[0] if equal else 0, rows):
        index = (slice(start, min(start + rows, shape[0])), slice(0, shape[1]))
        ours, theirs = (checkpoint.read(n, index) for n in (table, "lm_head.weight"))
        equal = equal and np.array_equal(ours, theirs)
    if not equal:
        raise ValueError(
            f"tensor 'lm_head.weight' of {checkpoint.file('lm_head.weight')} differs "
            f"from {table!r}, but config.json ties them; set tie_word_embeddings to "
            "false in config.json"
        )


def _names(entry: TensorMap, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The names of the tensors of one entry, one for each block if it is stacked."""
    if not entry.stacked:
        return [entry.name]
    num_layers = shapes[entry.parameters[0]][0]
    return [entry.name.format(layer=layer) for layer in range(num_layers)]


def _file_shape(
    entry: TensorMap, shapes: dict[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of one tensor in the file."""
    parts = [shapes[name][1 if entry.stacked else 0 :] for name in entry.parameters]
    shape = (*parts[0][:-1], sum(part[-1] for part in parts))
    return shape[::-1] if entry.transpose else shape


# ------------------------------------------------------------------------------------
# Reading


def _read_parameter(
    checkpoint: Checkpoint,
    entry: TensorMap,
    name: str,
    shapes: dict[str, tuple[int, ...]],
    sharding: NamedSharding | SingleDeviceSharding,
    param_dtype: DTypeLike | None,
) -> jax.Array:
    """One parameter on its devices, each given only its own shard."""
    shape = shapes[name]
    dtype = _dtype_of(checkpoint, _names(entry, shapes), param_dtype)
    # The parameter's place in a tensor that several share.
    before = entry.parameters[: entry.parameters.index(name)]
    offset = sum(shapes[other][-1] for other in before)

    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        # The index is None only for devices of other processes, which are left out.
        parts = zip(index or (), shape, strict=True)
        bounds = tuple(part.indices(size)[:2] for part, size in parts)
        devices.setdefault(bounds, []).append(device)
    arrays = []
    for bounds, copies in devices.items():
        shard = _read_shard(checkpoint, entry, bounds, offset, dtype)
        arrays += [jax.device_put(shard, device) for device in copies]
        # The host memory of this shard is free before the next one is read.
        jax.block_until_ready(arrays)
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays)


def _read_shard(
    checkpoint: Checkpoint,
    entry: TensorMap,
    bounds: tuple[tuple[int, int], ...],
    offset: int,
    dtype: np.dtype,
) -> np.ndarray:
    """A box of a parameter, `bounds` being its start and end in each dimension."""
    layers = range(*bounds[0]) if entry.stacked else (None,)
    inner = [slice(*b) for b in (bounds[1:] if entry.stacked else bounds)]
    inner[-1] = slice(inner[-1].start + offset, inner[-1].stop + offset)
    index = tuple(inner[::-1] if entry.transpose else inner)
    shard = np.empty([stop - start for start, stop in bounds], dtype)
    for i, layer in enumerate(layers):
        tensor = checkpoint.read(entry.name.format(layer=layer), index)
        _assign(shard[i] if entry.stacked else shard, tensor, entry.transpose)
    return shard


def _assign(target: np.ndarray, source: np.ndarray, transpose: bool) -> None:
    """Copy `source`, or its transpose, into `target`, converting to its type."""
    if not transpose:
        target[...] = source
        return
    # In strips of rows that fit in the cache: four times as fast as in one go.
    for start in range(0, source.shape[0], 64):
        rows = slice(start, start + 64)
        target[:, rows] = source[rows].T


def _dtype_of(
    checkpoint: Checkpoint, names: list[str], wanted: DTypeLike | None
) -> np.dtype:
    """The type of the parameter that is read from the tensors `names`."""
    found = [checkpoint.dtype(name) for name in names]
    if wanted is not None:
        return jnp.dtype(wanted)
    for name, dtype in zip(names, found, strict=True):
        if dtype != found[0]:
            raise ValueError(
                f"tensor {name!r} is {dtype}, but {names[0]!r} is {found[0]}, and both "
                "belong to one stacked parameter; give param_dtype to convert them"
            )
    return found[0]


# ------------------------------------------------------------------------------------
# Writing


def _tensors_to_write(
    maps: list[TensorMap], parameters: dict[str, jax.Array]
) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """Name, bytes and content of each tensor, in the order of the file."""
    shapes = {name: value.shape for name, value in parameters.items()}
    stacked = [entry for entry in maps if entry.stacked]
    first = maps.index(stacked[0])
    num_layers = shapes[stacked[0].parameters[0]][0]
    layered = [(entry, layer) for layer in range(num_layers) for entry in stacked]
    single = [(entry, None) for entry in maps if not entry.stacked]
    for entry, layer in single[:first] + layered + single[first:]:
        dtype = parameters[entry.parameters[0]].dtype
        size = int(np.prod(_file_shape(entry, shapes))) * dtype.itemsize

        def fetch(entry: TensorMap = entry, layer: int | None = layer) -> np.ndarray:
            parts = [_to_host(parameters[name], layer) for name in entry.parameters]
            joined = np.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
            tensor = np.empty(_file_shape(entry, shapes), joined.dtype)
            _assign(tensor, joined, entry.transpose)
            return tensor

        yield entry.name.format(layer=layer), size, fetch


def _to_host(value: jax.Array, layer: int | None) -> np.ndarray:
    """`value`, or one block of it, gathered from the shards without a collective."""
    start = 0 if layer is None else 1
    host = np.empty(value.shape[start:], value.dtype)
    for shard in value.addressable_shards:
        if shard.replica_id != 0:
            continue
        data = shard.data
        if layer is not None:
            low, high, _ = shard.index[0].indices(value.shape[0])
            if not low <= layer < high:
                continue
            data = jax.lax.dynamic_index_in_dim(data, layer - low, 0, keepdims=False)
        host[shard.index[start:]] = np.asarray(data)
    return host
