"""Parameters of a model read from, and written to, the tensors of a directory.

Each parameter is read into its shards as the file has it, and transposed and converted
where it is; the host holds a GiB, or the largest shard, never the model. Axis letters
of shapes: L layers, D model, V vocabulary.
"""

import contextlib
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jax.typing import DTypeLike

from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.names import TensorMap
from jaxscale.models.hf.reading import Place, Wanted, read_arrays
from jaxscale.models.stack import single_block
from jaxscale.models.vocabulary import vocabulary_dimensions
from jaxscale.sharding.parameters import shardings
from jaxscale.sharding.rules import AxisRules


type Converter = Callable[[Any], Any]
"""Makes the parameters of a module of what is in the file, the same for modules that
are alike."""


def read_model[M](
    checkpoint: Checkpoint,
    maps: Sequence[TensorMap],
    make: Callable[[DTypeLike, DTypeLike], M],
    *,
    mesh: Mesh | None,
    rules: AxisRules,
    dtype: DTypeLike | None,
    param_dtype: DTypeLike | None,
    ignored: Sequence[str],
    tied: Mapping[str, str],
    each_block: Callable[[Any, int, Converter], Any] | None = None,
    abstract: bool = False,
) -> M:
    """The model that `make` describes with the values of the file.

    Args:
        checkpoint: The directory.
        maps: The tensors of each parameter. The first is the table of tokens,
            whose type is that of the model. Parameters without a tensor keep the
            values that `make` gives them.
        make: Makes the model for a type of the computation and one of the parameters.
        mesh: The devices; None is the first device only.
        rules: Mesh axes that split parameters, by their logical axes.
        dtype: Type of the computation; None is that of the parameters.
        param_dtype: Type of the parameters; None keeps that of each tensor.
        ignored: Patterns of the names of tensors that no model needs.
        tied: Tensors that some files hold besides the one that they equal.
        each_block: Called with each block of the stack, all of whose parameters are in
            the file, as the file has it, with its number, and with what converts it,
            as soon as it is read; the model gets the returned blocks. None keeps the
            stack.
        abstract: Return the shapes of the parameters, and where they are to be,
            instead of reading them.

    Raises:
        ValueError: a tensor is missing, unexpected or of the wrong shape or type.
    """
    table = _require_tensor(checkpoint, maps[0].name)
    main_dtype = _dtype_of(checkpoint, [table], param_dtype)

    def init() -> M:
        return make(main_dtype if dtype is None else dtype, main_dtype)

    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        described = jax.eval_shape(init)
    shapes = {name: leaf.shape for name, leaf in parameters_of(described).items()}
    in_files = shapes_in_files(described)
    check_tensors(checkpoint, maps, in_files, ignored, tied)
    if mesh is None:
        places = dict.fromkeys(shapes, SingleDeviceSharding(jax.devices()[0]))
    else:
        places = parameters_of(shardings(described, mesh, rules))
    layouts = {
        name: _Layout.of(checkpoint, entry, name, shapes, in_files, places, param_dtype)
        for entry in maps
        for name in entry.parameters
    }
    if abstract:
        return _described(described, layouts, places)
    values = _drawn(init, [n for n in shapes if n not in layouts], places, mesh)
    apart = [n for n in shapes if each_block and n.startswith("blocks.")]
    single = [name for name in layouts if name not in apart]
    # The largest is beside what it is made of when little else is there.
    single.sort(key=lambda name: -math.prod(shapes[name]))
    numbers = range(shapes[apart[0]][0] if apart else 0)
    wanted = [layouts[name].wanted(checkpoint) for name in single]
    wanted += [layouts[name].wanted(checkpoint, i) for i in numbers for name in apart]
    blocks = []
    with contextlib.closing(read_arrays(checkpoint, wanted)) as arrays:
        before: Any = ()
        for name in single:
            jax.block_until_ready(before)  # what it was made of is gone
            values[name] = before = layouts[name].converted(next(arrays))
        if each_block is not None:
            one = jax.eval_shape(lambda m: single_block(m.blocks, 0), described)
            convert = _converter(tuple(layouts[name].conversion(0) for name in apart))
            for i in numbers:
                raw = [next(arrays) for _ in apart]
                jax.block_until_ready(before)
                before = each_block(_filled(one, raw), i, convert)
                blocks.append(before)
                del raw
    model: Any = _filled(described, [values.get(name) for name in shapes])
    if each_block is not None:  # those of the stack are none
        model.scan_layers, model.blocks = False, nnx.List(blocks)
    return model


def _described(
    model: Any, layouts: Mapping[str, "_Layout"], places: Mapping[str, Any]
) -> Any:
    """`model` with shapes that say where its parameters are to be."""
    leaves = []
    for name, leaf in parameters_of(model).items():
        dtype = layouts[name].dtype if name in layouts else leaf.dtype
        leaves.append(jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=places[name]))
    return _filled(model, leaves)


def _filled(tree: Any, leaves: Sequence[Any]) -> Any:
    """`tree` with other leaves."""
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def _drawn(
    init: Callable[[], Any],
    names: Sequence[str],
    places: Mapping[str, Any],
    mesh: Mesh | None,
) -> dict[str, jax.Array]:
    """Parameters as `init` makes them."""
    if not names:
        return {}
    draw = jax.jit(
        lambda: [parameters_of(init())[name] for name in names],
        out_shardings=[places[name] for name in names],
    )
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        return dict(zip(names, draw(), strict=True))


class _Layout(NamedTuple):
    """A parameter and where it is in the file."""

    entry: TensorMap
    shape: tuple[int, ...]
    in_files: tuple[int, ...]
    columns: np.ndarray
    place: Place
    dtype: np.dtype

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        entry: TensorMap,
        name: str,
        shapes: dict[str, tuple[int, ...]],
        in_files: dict[str, tuple[int, ...]],
        places: Mapping[str, Place],
        param_dtype: DTypeLike | None,
    ) -> "_Layout":
        """That of one parameter of a model."""
        dtype = _dtype_of(checkpoint, _names(entry, shapes), param_dtype)
        columns = columns_of(entry, name, in_files)
        return cls(entry, shapes[name], in_files[name], columns, places[name], dtype)

    def axes(self, layer: int | None) -> tuple[int, ...]:
        """The dimensions of the parameter, or of one block of it, in a file's order."""
        rank, first = len(self.shape), int(self.entry.stacked)
        if layer is not None:
            rank, first = rank - 1, 0
        if not self.entry.transpose:
            return tuple(range(rank))
        return *range(first), *range(rank - 1, first - 1, -1)

    def wanted(self, checkpoint: Checkpoint, layer: int | None = None) -> Wanted:
        """The parameter, or one block of it, as the file has it."""
        shape, limits, place = self.shape, self.in_files, self.place
        tensors = [self.entry.tensor(layer)]
        if layer is not None:
            shape, limits, place = shape[1:], limits[1:], _of_one_block(place)
        elif self.entry.stacked:
            tensors = [self.entry.tensor(i) for i in range(shape[0])]
        axes = self.axes(layer)
        if isinstance(place, NamedSharding):
            spec = (*place.spec, *[None] * (len(axes) - len(place.spec)))
            place = NamedSharding(place.mesh, PartitionSpec(*(spec[i] for i in axes)))
        types = {checkpoint.dtype(tensor) for tensor in tensors}
        return Wanted(
            entry=self.entry,
            layer=layer,
            shape=tuple(shape[i] for i in axes),
            limits=tuple(limits[i] for i in axes),
            columns=self.columns,
            dtype=self.dtype if len(types) > 1 else types.pop(),
            place=place,
        )

    def conversion(self, layer: int | None = None) -> "_Conversion":
        """What makes it of what is in the file."""
        return self.axes(layer), self.dtype

    def converted(self, array: jax.Array) -> jax.Array:
        """The whole parameter, of what is in the file."""
        axes, dtype = self.conversion()
        if axes == tuple(range(array.ndim)) and dtype == array.dtype:
            return array
        convert = _converter((self.conversion(),))
        return jax.jit(convert, out_shardings=self.place)(array)


type _Conversion = tuple[tuple[int, ...], np.dtype]
"""The dimensions of a parameter in a file's order, which is its own inverse, and the
type of the parameter."""


@functools.cache  # the same function each time: it is compiled once for what is alike
def _converter(conversions: tuple[_Conversion, ...]) -> Converter:
    def convert[M](module: M) -> M:
        leaves, tree = jax.tree.flatten(module)
        pairs = zip(leaves, conversions, strict=True)
        made = [x.transpose(axes).astype(dtype) for x, (axes, dtype) in pairs]
        return jax.tree.unflatten(tree, made)

    return convert


def _of_one_block(place: Place) -> Place:
    """The shard layout of a parameter of one block of a stack."""
    if isinstance(place, SingleDeviceSharding):
        return place
    return NamedSharding(place.mesh, PartitionSpec(*place.spec[1:]))


def parameters_of(model: Any) -> dict[str, Any]:
    """Each parameter, or what stands for it in the tree, by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {
        jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(
            ".value"
        ): leaf
        for path, leaf in leaves
    }


def shapes_in_files(model: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, without the padding of the vocabulary on a mesh."""
    shapes = {name: leaf.shape for name, leaf in parameters_of(model).items()}
    for name, dimension in vocabulary_dimensions(model).items():
        sizes = list(shapes[name])
        sizes[dimension] = model.config.vocab_size
        shapes[name] = tuple(sizes)
    return shapes


def without_absent_prefix(
    checkpoint: Checkpoint, maps: Sequence[TensorMap], prefix: str
) -> list[TensorMap]:
    """`maps` as the file names them, which may leave `prefix` out of all names."""
    if any(name.startswith(prefix) for name in checkpoint.names()):
        return list(maps)
    return [
        dataclasses.replace(entry, name=entry.name.removeprefix(prefix))
        for entry in maps
    ]


# ------------------------------------------------------------------------------------
# Names and checks


def _require_tensor(checkpoint: Checkpoint, name: str, where: str = "") -> str:
    """`name`, which the checkpoint must have."""
    if name in checkpoint:
        return name
    raise ValueError(
        f"{checkpoint.directory} lacks the tensor {name!r}{where}; the download is "
        "incomplete or config.json is of another model"
    )


def check_tensors(
    checkpoint: Checkpoint,
    maps: Sequence[TensorMap],
    shapes: dict[str, tuple[int, ...]],
    ignored: Sequence[str],
    tied: Mapping[str, str],
) -> None:
    """Raise for the first tensor that is missing, unexpected or of the wrong shape.

    Raises:
        ValueError: there is one.
    """
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
    for name, source in tied.items():
        if name in names:  # some files store what is tied twice
            _check_tied(checkpoint, source, name)
            names.remove(name)
    for name in sorted(names):
        if not any(re.search(pattern, name) for pattern in ignored):
            raise ValueError(
                f"tensor {name!r} of {checkpoint.file(name)} has no place in the "
                f"model that config.json describes; it has shape "
                f"{checkpoint.shape(name)}"
            )


def _check_tied(checkpoint: Checkpoint, source: str, copy: str) -> None:
    """Raise if the tensor `copy` of a tied model differs from `source`."""
    shape = checkpoint.shape(source)
    equal = checkpoint.shape(copy) == shape
    rows = 4096
    for start in range(0, shape[0] if equal else 0, rows):
        part = slice(start, start + rows)
        ours, theirs = (checkpoint.view(name)[part] for name in (source, copy))
        equal = equal and np.array_equal(ours, theirs)
    if not equal:
        raise ValueError(
            f"tensor {copy!r} of {checkpoint.file(copy)} differs from {source!r}, but "
            "config.json ties them; set tie_word_embeddings to false in config.json"
        )


def _names(entry: TensorMap, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    """The names of the tensors of one entry, one for each block if it is stacked."""
    if not entry.stacked:
        return [entry.name]
    num_layers = shapes[entry.parameters[0]][0]
    return [entry.tensor(layer) for layer in range(num_layers)]


def _file_shape(
    entry: TensorMap, shapes: dict[str, tuple[int, ...]]
) -> tuple[int, ...]:
    """The shape of one tensor in the file."""
    parts = [shapes[name][1 if entry.stacked else 0 :] for name in entry.parameters]
    shape = (*parts[0][:-1], sum(part[-1] for part in parts))
    return shape[::-1] if entry.transpose else shape


def columns_of(
    entry: TensorMap, name: str, shapes: dict[str, tuple[int, ...]]
) -> np.ndarray:
    """Find a parameter's last dimension in a tensor that several share."""
    widths = [shapes[other][-1] // entry.groups for other in entry.parameters]
    i = entry.parameters.index(name)
    own = sum(widths[:i]) + np.arange(widths[i])
    starts = np.arange(entry.groups) * sum(widths)
    return (starts[:, None] + own).reshape(-1)  # [G, own] to [G own]


def _assign(target: np.ndarray, source: np.ndarray, transpose: bool) -> None:
    """Copy `source`, or its transpose, into `target`, converting to its type."""
    if not transpose:
        target[...] = source
        return
    if target.dtype == source.dtype:
        # Types of ml_dtypes are copied number by number, integers twice as fast.
        bits = f"u{target.itemsize}"
        target, source = target.view(bits), source.view(bits)
    # In strips of a line of the cache: four times as fast as in one go.
    strip = 64 // target.itemsize
    for start in range(0, source.shape[0], strip):
        rows = slice(start, start + strip)
        target[..., rows] = source[rows].T  # [out, in] to [in, out]


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


def tensors_to_write(
    maps: Sequence[TensorMap], model: Any
) -> Iterator[tuple[str, int, Callable[[], np.ndarray]]]:
    """Name, bytes and content of each tensor of a model, in the order of the file."""
    parameters, shapes = parameters_of(model), shapes_in_files(model)
    stacked = [entry for entry in maps if entry.stacked]
    first = maps.index(stacked[0]) if stacked else 0
    num_layers = shapes[stacked[0].parameters[0]][0] if stacked else 0
    layered = [(entry, layer) for layer in range(num_layers) for entry in stacked]
    single = [(entry, None) for entry in maps if not entry.stacked]
    for entry, layer in single[:first] + layered + single[first:]:
        dtype = parameters[entry.parameters[0]].dtype
        size = int(np.prod(_file_shape(entry, shapes))) * dtype.itemsize

        def fetch(entry: TensorMap = entry, layer: int | None = layer) -> np.ndarray:
            parts = [
                _cut(_to_host(parameters[name], layer), shapes[name], layer)
                for name in entry.parameters
            ]
            joined = _join(parts, entry.groups)
            tensor = np.empty(_file_shape(entry, shapes), joined.dtype)
            _assign(tensor, joined, entry.transpose)
            return tensor

        yield entry.tensor(layer), size, fetch


def _cut(value: np.ndarray, shape: tuple[int, ...], layer: int | None) -> np.ndarray:
    """The part of a parameter, or of one block of it, that files have."""
    return value[tuple(map(slice, shape if layer is None else shape[1:]))]


def _join(parts: Sequence[np.ndarray], groups: int) -> np.ndarray:
    """The parameters of one tensor side by side, in each of its groups."""
    if len(parts) == 1:
        return parts[0]
    split = [p.reshape(*p.shape[:-1], groups, -1) for p in parts]  # [..., G, own]
    joined = np.concatenate(split, axis=-1)  # [..., G, all]
    return joined.reshape(*parts[0].shape[:-1], -1)  # [..., G all]


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
