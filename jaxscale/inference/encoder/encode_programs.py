"""The compiled programs of an encoder.

Legend: B packed rows, T tokens per row, S sequences per row, D model, C labels.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import os
import threading
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array, Float, Int

from jaxscale.inference.encoder.pinned_buffers import PinnedBuffer, PinnedBuffers
from jaxscale.inference.encoder.stacked_parameters import StackedParameters
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.heads import Pooling, pool
from jaxscale.models.tokenizer import EncodedText
from jaxscale.nn.stacked import LayerOfStack
from pallas_kernels.mosaic import keep_modules


_OPTIONS = {"xla_gpu_enable_dynamic_slice_fusion": False}  # all is one CUDA graph
_FIRST_SHARE = 2, 5
"""Of the layers so many of so many are in the first of two programs. On a slow host
five of twelve took 4% less than four (one text of 226 tokens, H200)."""


def parts_of(num_layers: int) -> list[range]:
    """The layers of each program of a GPU.

    A GPU computes the first ones for longer than the host takes to launch the others.

    Example:
        >>> parts_of(12)
        [range(0, 5), range(5, 12)]
    """
    share, of = _FIRST_SHARE
    first = -(-share * num_layers // of)
    return [range(first), range(first, num_layers)][: min(num_layers, 2)]


class ProgramShape(NamedTuple):
    """The key of a compiled program."""

    method: str
    """Name of the function."""
    size: int
    """Tokens per row."""
    room: int
    """Capacity of a row, in texts."""


@functools.lru_cache
def _counted(size: int) -> np.ndarray:
    return np.arange(size, dtype=np.int32)


class Batch(NamedTuple):
    """A batch of rows in a single array, so that it takes one transfer."""

    whole: Any
    """All of the following, concatenated: [rows, 3 * size + room + 1] int32."""
    tokens: Any
    """Part of it [rows, size]."""
    positions: Any
    """Of each token in its text; part of it [rows, size]."""
    types: Any
    """Part of it [rows, size]; None where the model has no types."""
    bounds: Any
    """Part of it [rows, room + 1]."""
    pinned: Any = None
    """The same memory, where programs read it; None on a mesh."""
    free: "list[Batch] | None" = None
    """Where it waits for the next texts, once its program is done."""

    @classmethod
    def of(cls, whole: Any, size: int, *, types: bool) -> "Batch":
        """The parts of rows of `size` tokens, with or without token types."""
        end = 3 * size if types else 2 * size
        kinds = whole[:, 2 * size : end] if types else None
        tokens, positions = whole[:, :size], whole[:, size : 2 * size]
        return cls(whole, tokens, positions, kinds, whole[:, end:])

    def fill(self, row: int, texts: Sequence[EncodedText], num_types: int) -> None:
        """Write texts into an empty row, on the host.

        Raises:
            ValueError: a token has a type that is none of `num_types`.
        """
        if not texts:
            return
        arrays = [text.array for text in texts]
        lengths = [*map(len, arrays)]
        bounds, ends = self.bounds[row], [*itertools.accumulate(lengths)]
        bounds[1 : len(ends) + 1] = ends
        bounds[len(ends) + 1 :] = end = ends[-1]
        np.concatenate(arrays, out=self.tokens[row, :end])
        starts = bounds[: len(ends)].repeat(lengths)
        counted = _counted(self.tokens.shape[1])[:end]
        np.subtract(counted, starts, out=self.positions[row, :end])
        if self.types is not None and any(text.has_types for text in texts):
            types = [np.array(text.types, np.int32) for text in texts]
            np.concatenate(types, out=self.types[row, :end])
            if not 0 <= self.types[row].min() <= self.types[row].max() < num_types:
                raise ValueError(
                    f"tokens have types up to {self.types[row].max()}, but the model "
                    f"has {num_types} types, the first of which is 0"
                )


class Written(NamedTuple):
    """A result, and the memory of the host in which the device writes it."""

    array: Array
    """[B, S, D] or [B, T, C]."""
    buffer: PinnedBuffer | None = None
    """Where it appears, NaN until then. None: it has no such place."""

    def read(self, counts: Sequence[int]) -> np.ndarray:
        """The result, fp32, once it is there; how many texts of each row are wanted.

        JAX says so 80 to 110 us after it has appeared (H200). What stays NaN is waited
        for until then.
        """
        if self.buffer is None:
            return np.asarray(self.array, np.float32)
        array: Any = self.array
        view = self.buffer.view
        wanted = [view[row, :count] for row, count in enumerate(counts)]
        while any(np.isnan(part).any() for part in wanted):
            if array.is_ready():
                array.block_until_ready()  # raises what its program has raised
                break
            os.sched_yield()  # other threads go on; `time.sleep(0)` takes 60 us
        return view


@dataclasses.dataclass(slots=True)
class Launched:
    """Rows that the device computes, for `Encoder.read`."""

    pooled: bool
    """Whether a text has one vector, or one for each token."""
    rows: Sequence[Sequence[int]]
    """Index of each text of each row."""
    texts: Sequence[EncodedText]
    """What the indices are of."""
    result: Written
    """Of the program."""
    release: Callable[[], None] | None = None
    """Called once the result is read."""
    _kept: np.ndarray | None = None

    def results(self) -> Iterator[tuple[int, np.ndarray]]:
        """Index and result of each text, fp32, once they are there."""
        if self._kept is None:
            array, buffer = self.result
            if buffer is None:
                self._kept = np.asarray(array, np.float32)
            else:  # that memory is written again
                array.block_until_ready()
                self._kept = buffer.view.copy()
            self._release()
        for row, value in zip(self.rows, self._kept, strict=False):
            place = 0
            for slot, index in enumerate(row):
                end = place + len(self.texts[index].ids)
                yield index, value[slot] if self.pooled else value[place:end]
                place = end

    def into(self, vectors: np.ndarray) -> None:
        """Write the vectors of pooled texts to [texts, D], once they are there."""
        values = self.result.read([len(row) for row in self.rows])
        for row, value in zip(self.rows, values, strict=False):
            places = row[0] if len(row) == 1 else list(row)
            vectors[places] = value[: len(row)]
        self._release()

    def _release(self) -> None:
        if self.release is not None:
            self.release()
            self.release = None


class EncodePrograms:
    """Functions of a model and a batch, each compiled once per shape.

    A call takes the leaves of the model, which costs the host much less than the model,
    flattened here once; on one device as `StackedParameters`.

    A function may be cut into several programs, each of some layers. While the device
    computes those of one, the host prepares the launches of the next, which takes as
    long as the layers of a short text.
    """

    def __init__(
        self,
        model: Any,
        functions: Mapping[str, Callable[..., Array]],
        *,
        vectors: Mapping[str, int],
        rows: int,
        types: int,
        mesh: Mesh | None,
        place: NamedSharding | None,
        parts: Sequence[range] = (),
    ) -> None:
        """Flatten the model; nothing is compiled yet.

        Args:
            model: A pytree.
            functions: Of the activations of the last layer [rows, size, D], boundaries
                [rows, room + 1] and the model, by name.
            vectors: Features of the results that are small enough for pinned memory,
                by function: [rows, room, features] fp32.
            rows: Rows per batch.
            types: Token types of the model; a batch has some if there are several.
            mesh: The devices; None is one.
            place: Sharding of a batch; None is the first device, whose programs read
                it in pinned memory of the host.
            parts: The layers of each program of a function, on one device; empty: all
                are of one.
        """
        leaves, tree = jax.tree.flatten(
            model, is_leaf=lambda x: isinstance(x, LayerOfStack)
        )
        stacked = StackedParameters(leaves) if mesh is None else None
        self._leaves = tuple(leaves) if stacked is None else stacked.arrays
        host = _pinned(self._leaves) if mesh is None else None
        self._buffers = None if host is None else PinnedBuffers(host)
        self._batches = collections.defaultdict[Any, list[Batch]](list)
        self._in_place = host is not None and self._writes_result_once(host)
        pinned = self._buffers is not None
        on_leaves = functools.partial(_on_leaves, tree, stacked, types > 1)
        self._earlier = [
            self._jit(functools.partial(on_leaves, None, part, pinned and i == 0))
            for i, part in enumerate(parts[:-1])
        ]
        """The programs of all layers but the last ones, the same for all functions."""
        last = parts[-1] if parts else None, pinned and not self._earlier
        self._jitted = {
            name: self._jit(
                functools.partial(on_leaves, function, *last),
                host if name in vectors else None,
                donates=name == "encode",
            )
            for name, function in functions.items()
        }
        # Others may end in a matmul, which may write a value more than once.
        early = {"encode"} if self._in_place else set()
        self._vectors = {name: vectors[name] for name in early & {*vectors}}
        self._rows, self._types = rows, types
        self._mesh, self._place = mesh, place
        self._begun: dict[ProgramShape, concurrent.futures.Future[None]] = {}
        self._ready = set[ProgramShape]()  # of those begun, what has been waited for
        self._lock = threading.Lock()
        self._lowering = threading.Lock()  # Python, which calls need, too

    def __call__(self, shape: ProgramShape, batch: Batch) -> Written:
        """Run a program, once it is compiled."""
        if shape not in self._ready:
            self.begin([shape])[0].result()
            self._ready.add(shape)
        if batch.pinned is not None:
            whole = batch.pinned
        elif self._place is not None:
            whole = jax.device_put(batch.whole, self._place)
        else:  # the program takes it from the host, which is the fastest way
            whole = batch.whole
        given = None
        for program in self._earlier:
            given, whole = program(self._leaves, whole, shape.size, given, None)
        buffer = self._result(shape)  # is filled while the device computes
        last, out = self._jitted[shape.method], None if buffer is None else buffer.array
        array = last(self._leaves, whole, shape.size, given, out)
        if buffer is None:
            return Written(array)
        if array.unsafe_buffer_pointer() != buffer.view.ctypes.data:
            # A CPU does not take memory of numpy; next time it is its own.
            buffer = PinnedBuffer.of(array)
        return Written(array, PinnedBuffer(array, buffer.view))

    def _writes_result_once(self, host: SingleDeviceSharding) -> bool:
        """Whether nothing but a result appears in its memory, as copies of a GPU do."""
        (device,) = host.device_set
        return device.platform != "cpu"

    def _result(self, shape: ProgramShape) -> PinnedBuffer | None:
        """Where a program writes its result."""
        width = self._vectors.get(shape.method)
        if width is None or self._buffers is None:
            return None
        return self._buffers.take((self._rows, shape.room, width))

    def _jit(
        self, function: Callable[..., Any], place: Any = None, *, donates: bool = False
    ) -> Any:
        donates = donates and place is not None and self._in_place
        return jax.jit(
            function,
            static_argnums=2,
            donate_argnums=4 if donates else (),
            keep_unused=donates,  # nothing reads what is donated
            out_shardings=place,
            compiler_options=_OPTIONS,
        )

    def batch(self, size: int, room: int) -> Batch:
        """Rows without texts, on the host."""
        free = self._batches[size, room]
        try:
            batch = free.pop()  # one thread gets it
        except IndexError:
            return self._new_batch(size, room, free)
        batch.whole.fill(0)
        return batch

    def _new_batch(self, size: int, room: int, free: list[Batch]) -> Batch:
        shape, types = (self._rows, self._width(size, room)), self._types > 1
        if self._buffers is None:
            return Batch.of(np.zeros(shape, np.int32), size, types=types)
        array, view = self._buffers.make(shape, np.int32)
        batch = Batch.of(view, size, types=types)
        return batch._replace(pinned=array, free=free)

    def done(self, batch: Batch, result: Written | None = None) -> None:
        """Say that the program of a batch is done, and its result read."""
        if batch.free is not None:
            batch.free.append(batch)
        if result is not None and result.buffer is not None and self._buffers:
            self._buffers.give_back(result.buffer)

    def _width(self, size: int, room: int) -> int:
        return size * (3 if self._types > 1 else 2) + room + 1

    def _on_device(self, results: Any) -> Any:
        """Shapes of the results of a program, as the next one takes them."""
        place = self._leaves[0].sharding
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), results
        )

    def begin(
        self, shapes: Iterable[ProgramShape]
    ) -> list[concurrent.futures.Future[None]]:
        """Compile the missing programs, in threads, in the given order."""
        shapes = list(shapes)
        with self._lock:
            new = [x for x in dict.fromkeys(shapes) if x not in self._begun]
            if new:
                workers = min(len(new), os.cpu_count() or 1)
                pool = concurrent.futures.ThreadPoolExecutor(workers)
                self._begun |= {x: pool.submit(self._compile, x) for x in new}
                pool.shutdown(wait=False)
            return [self._begun[shape] for shape in shapes]

    def stand_in(self, shape: ProgramShape, texts: int) -> ProgramShape:
        """The smallest compiled program that does what one of `shape` would do.

        That of `shape` itself, which is waited for, if none is compiled.

        Args:
            shape: What is wanted.
            texts: Most texts of a row, which may be far fewer than there is room for.
        """
        ready = self._begun.get(shape)
        if ready is not None and ready.done():
            return shape
        fit = [
            other
            for other in self._compiled()
            if other.method == shape.method
            and other.size >= shape.size
            and other.room >= texts
        ]
        return min(fit, default=shape)

    @property
    def num_compiled(self) -> int:
        """Number of programs that are ready."""
        return len(self._compiled())

    def __len__(self) -> int:
        """Number of started compilations."""
        return len(self._begun)

    def _compiled(self) -> list[ProgramShape]:
        with self._lock:
            begun = list(self._begun.items())
        return [shape for shape, future in begun if future.done()]

    def _compile(self, shape: ProgramShape) -> None:
        """Leave a program in the cache of its jitted function."""
        mesh = self._mesh
        try:
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
                with self._lowering, keep_modules():
                    # The interpreter waits for this thread, but needs no more programs.
                    if not threading.main_thread().is_alive():
                        return
                    batch = self.batch(shape.size, shape.room)
                    whole: Any = jax.ShapeDtypeStruct(
                        batch.whole.shape, jnp.int32, sharding=self._place
                    )
                    if batch.pinned is not None:  # no shape tells where it lies
                        whole = batch.pinned
                    lowered, given = [], None
                    for jitted in self._earlier:
                        arguments = self._leaves, whole, shape.size, given, None
                        lowered.append(jitted.lower(*arguments))
                        given, whole = self._on_device(lowered[-1].out_info)
                    out = self._result(shape)
                    arguments = self._leaves, whole, shape.size, given
                    jitted = self._jitted[shape.method]
                    lowered.append(jitted.lower(*arguments, out and out.array))
                    self.done(batch, out and Written(out.array, out))
                for program in lowered:
                    program.compile()
        except BaseException:
            with self._lock:  # the next call tries again
                self._begun.pop(shape, None)
            raise


def _pinned(leaves: Iterable[Any]) -> SingleDeviceSharding | None:
    """Pinned host memory of the only device of the leaves, if there is only one.

    A program reads its batch there, and its last kernel writes there directly. A
    separate copy to the host took 0.5 ms of 1.7 for one text, one from the host 0.1.
    """
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    devices = {
        device for sharding in shardings if sharding for device in sharding.device_set
    }
    if len(devices) != 1:
        return None
    return SingleDeviceSharding(devices.pop(), memory_kind="pinned_host")


def embed(
    hidden: Float[Array, "B T D"],
    bounds: Int[Array, "B seqs_plus_1"],
    model: EncoderModel,
    *,
    pooling: Pooling,
    normalize: bool,
) -> Float[Array, "B S D"]:
    """A vector of each text, fp32."""
    vectors = pool(hidden, bounds, pooling, model.rules, dtype=jnp.float32)
    if not normalize:
        return vectors
    norms = jnp.linalg.norm(vectors, axis=-1, keepdims=True)
    return vectors / jnp.maximum(norms, 1e-12)


def answer(
    hidden: Float[Array, "B T D"],
    bounds: Int[Array, "B seqs_plus_1"],
    model: EncoderModel,
) -> Float[Array, "B _ C"]:
    """What the head says of each text, or of each token."""
    return model.answer(hidden, bounds)


def _on_leaves(
    tree: Any,
    stacked: StackedParameters | None,
    types: bool,
    function: Callable[..., Array] | None,
    layers: range | None,
    pinned: bool,
    leaves: Any,
    whole: Array,
    size: int,
    given: Any,
    out: Array | None,
) -> Any:
    """A function of the activations behind some layers, or these and the boundaries.

    The latter are what the next program takes: its `given`, and its `whole`. The result
    takes the place of `out`.
    """
    del out
    if pinned:
        whole = jax.device_put(whole, jax.memory.Space.Device)
    if given is None:
        batch = Batch.of(whole, size, types=types)
        tokens, positions, kinds, bounds = batch[1:5]
    else:
        tokens, positions = jnp.zeros((whole.shape[0], size), jnp.int32), None
        kinds, bounds = None, whole
    if stacked is not None:
        leaves = stacked.leaves(leaves)
    model: EncoderModel = jax.tree.unflatten(tree, leaves)
    hidden = model.hidden(
        tokens,
        cu_seqlens=bounds,
        token_types=kinds,
        # Where padding tokens have no position, the model counts.
        positions=None if model.config.position_offset else positions,
        checked=True,
        layers=layers,
        given=given,
    )
    return (hidden, bounds) if function is None else function(hidden, bounds, model)
