"""The device side of the inference engine: its state, and the programs that update it.

Legend: S slots, B bucket, W pages of a request, L layers, P pages, K key/value heads, G
tokens of a page, H head dim, V vocabulary, T tokens per prefill.
"""

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jaxtyping import Array

from jaxscale.inference.engine.config import check_drafts, check_max_len
from jaxscale.inference.engine.kv_scales import FP8, check_scales
from jaxscale.inference.engine.prefill_batch import (
    PrefillBatch,
    prefill_programs,
)
from jaxscale.inference.engine.program_cache import ProgramCache
from jaxscale.inference.engine.program_table import Key, Program, ProgramTable
from jaxscale.inference.engine.programs import (
    ADAPTED,
    STATE,
    DecodePrograms,
    Pages,
)
from jaxscale.inference.engine.reserve import reserve_small
from jaxscale.inference.engine.sample_inputs import SampleInputs, neutral_arrays
from jaxscale.inference.engine.scheduling.batch_rows import Column
from jaxscale.inference.engine.scheduling.scheduler_config import (
    FEW_ROWS,
    SchedulerConfig,
    bucket_sizes,
    decode_sizes,
    is_power,
)
from jaxscale.inference.engine.scheduling.scheduler_output import Chunk, whole_blocks
from jaxscale.inference.engine.timeline import Timeline
from jaxscale.inference.request import MAX_BIASES
from jaxscale.inference.switch_interval import short_switch_interval
from jaxscale.models.adapters import adapter_names, with_adapters
from jaxscale.models.decoder import Decoder
from jaxscale.nn.cache import PAGES_AXES, SCALES_AXES
from jaxscale.sharding.decode_all_reduce import AllReduce, Sums
from pallas_kernels.decode_layer.config import padded_rows
from pallas_kernels.varlen_attention.paged import gathers_pages


NUM_CHANGES = 512
"""Cells of the slots that one call of `DecodePrograms.update` changes."""

NUM_COUNTED = 512
"""Tokens that one call of `DecodePrograms.count` counts."""

_ONE_GRAPH = {"xla_gpu_enable_dynamic_slice_fusion": False}
# XLA launches a kernel that reads a slice of an array in place outside of any CUDA
# graph: three launches and a graph a layer instead of one graph for all layers.

_NOTHING_TWICE = {"xla_disable_hlo_passes": "rematerialization"}
# XLA counts pages once more for each kernel that writes to them in place: with pages in
# most of the memory it would compute 50 results of two layers again to make room.

_MANY_ROWS = {"xla_gpu_enable_triton_gemm": False}
# XLA's autotuner picks Triton's products there, and cuBLAS's are faster in a step: with
# 8 layers on an H200 by 5% for 64 rows and 6% for 128. For 2 and 32 Triton's are.


type Weights = tuple[Decoder, np.ndarray | None]
"""A model that was abstract, and the scales of its cache."""


class Runner:
    """The state of the engine on the device, and the programs that update it.

    Programs are compiled before the first request, or behind: larger ones then stand in
    for those that are not there yet. Nothing is compiled after that.
    Calls return at once, with arrays that are being copied to the host.

    Example:
        >>> from flax import nnx
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> model = Decoder(llama_tiny(), rngs=nnx.Rngs(0))
        >>> config = SchedulerConfig(
        ...     num_pages=8, vocab_size=256, max_len=64, page_size=16, num_slots=2,
        ...     prefill_tokens=16, split=16, prefill_requests=2, steps=1,
        ... )
        >>> runner = Runner(model, config)
        >>> runner.compile()
        >>> runner.decode(bucket=2, steps=1).shape
        (1, 2, 1, 3)
    """

    def __init__(
        self,
        model: Decoder,
        config: SchedulerConfig,
        *,
        prefill_tokens: Sequence[int] | None = None,
        buckets: Sequence[int] | None = None,
        kv_scales: np.ndarray | None = None,
        all_reduce: AllReduce = None,
        mixed: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Prepare the model; `compile` makes the state.

        Args:
            model: A decoder; `Decoder.for_inference` is applied. It may be abstract
                until `compile` reads its weights.
            config: The sizes.
            prefill_tokens: T of the prefill programs, the largest
                ``config.prefill_tokens``; by default that, a quarter of it, and a
                sixteenth.
            buckets: B of the decode programs, of `SchedulerConfig.batches`, the largest
                S; by default 2, 8, 32, all from 64 on, and S: a step reads all weights,
                so a few more rows cost little. With a single bucket, results of a
                request do not depend on the number of others.
            kv_scales: [L, 2, K], fp32, scales of keys and values: the KV cache is then
                fp8 (E4M3). None keeps it in the type of the computation.
            all_reduce: All-reduce of a decode step: ``"xla"``, our ``"low_latency"``
                kernel, or None: ours where steps were measured to be faster with it,
                and where layers of one launch add in its workspace.
            mixed: T and B of the programs that do both.

        Raises:
            ValueError: ``config.longest`` exceeds the limit of the model,
                `prefill_tokens` or `buckets` do not fit `config`, `kv_scales` do not
                fit the model, there are more draft tokens than attention takes, or
                `all_reduce` is unknown.
            Unsupported: `all_reduce` is ``"low_latency"``, which needs a model in 16
                bits on Hopper GPUs of one process.
        """
        check_max_len(model.config, config.longest)
        check_drafts(model.config, config.drafts)
        self.config = config
        self.buckets = bucket_sizes(config, buckets)
        self._mixed = mixed
        model = model.for_inference()
        self.model_config, self.rules, self.dtype = (
            model.config,
            model.rules,
            model.dtype,
        )
        self._all_reduce: AllReduce = all_reduce
        self._kv_scales = check_scales(model.config, kv_scales)
        if adapter_names(model) != tuple(config.adapters):
            raise ValueError(
                f"adapters of config are {list(config.adapters)}, but the model has "
                f"{list(adapter_names(model))}; name the same"
            )
        where = jax.tree.leaves(model)[0].sharding
        mesh: Any = where.mesh if isinstance(where, NamedSharding) else None
        self.mesh: Mesh | None = mesh
        self.devices = list(where.device_set if mesh is None else mesh.devices.flat)
        self._sums(self.buckets[0], model)  # raises
        ngrams = config.shortest_ngram, config.longest_ngram
        gathers = self._gathers()

        def flat(model: Decoder) -> tuple[tuple[Any, ...], DecodePrograms]:
            leaves, tree = jax.tree.flatten(model)
            programs = DecodePrograms(
                tree, config.prefill_requests, ngrams, gathers=gathers
            )
            return tuple(leaves), programs

        self.params, self._programs = flat(with_adapters(model, {}))
        self.adapted_params, self._adapted = flat(model)
        self._prefills = prefill_programs(config, prefill_tokens, gathers=gathers)
        adapted = bool(config.adapters)
        self.table = ProgramTable(self.buckets, self._prefills, adapted=adapted)
        """The compiled programs."""
        self.on_dispatch: Callable[[Key, Sequence[np.ndarray | None]], None] | None
        self.on_dispatch = None
        """Called before each program with the arguments of `dispatch`."""
        self.timeline: Timeline | None = None
        """Learns when programs are launched, while it is there."""
        self.pages: Pages
        self.slots: Array
        self.counts: Array
        self.logits: Array
        self.history: Array | None = None

    # What there is to compile.

    def programs(self) -> Iterator[Program]:
        """All programs: key, jitted function, and input shapes."""
        config, programs = self.config, self._programs
        _, slots, counts, history = self._state()
        vocab, num_slots = self.model_config.vocab_size, config.num_slots

        def integers(*shape: int) -> Any:
            return self._shape(shape, jnp.int32)

        jit = self._jit
        changes = integers(num_slots), integers(NUM_CHANGES, 3)
        yield ("update",), jit(programs.update, (0,), "s"), (slots, *changes)
        counted = integers(NUM_COUNTED), integers(3)
        yield ("count",), jit(programs.count, (0,), "s"), (counts, *counted)
        if history is not None:
            kept = integers(config.longest), integers(1)
            yield ("remember",), jit(programs.remember, (0,), "s"), (history, *kept)
            source = integers(num_slots)
            yield ("reorder",), jit(programs.reorder, (0,), "s"), (history, source)
        for bucket in filter(is_power, self.buckets):
            words = -(-vocab // 32)
            shapes = (
                self._shape((bucket, vocab), jnp.float32),
                slots,
                counts,
                integers(bucket + 1),
                self._shape((bucket, words), jnp.uint32),
                integers(bucket, MAX_BIASES, 2),
            )
            yield ("sample", bucket), jit(programs.sample, (1, 2), "sss"), shapes
        yield from self._model_programs(programs, self.params, "")
        if config.adapters:
            yield from self._model_programs(self._adapted, self.adapted_params, ADAPTED)

    def _model_programs(
        self, programs: DecodePrograms, params: tuple[Any, ...], kind: str
    ) -> Iterator[Program]:
        """Those of `programs` that compute the model, whose names end with `kind`."""
        config, jit = self.config, self._jit
        pages, slots, _, history = self._state()
        shapes = jax.tree.map(_shape_of, params)
        state = shapes, pages, slots, history
        model: Any = jax.tree.unflatten(programs.tree, shapes)
        for bucket, steps, drafts in decode_sizes(config, self.buckets):
            sizes = {"bucket": bucket, "steps": steps, "drafts": drafts}
            rows = bucket * (1 + drafts)
            sums = self._sums(rows, model)
            fn = functools.partial(programs.decode, **sizes, sums=sums)
            key = _decode_key(**sizes, kind=kind)
            yield key, jit(fn, (1, 2, 3), "psss", rows), state
        for bucket in filter(is_power, self.buckets):
            sums = self._sums(bucket, model)
            fn = functools.partial(programs.forward, bucket=bucket, sums=sums)
            yield ("forward" + kind, bucket), jit(fn, (1, 3), "pss", bucket), state
        for tokens, bucket in () if kind else self._mixed:
            keys = self._prefills[0][1]
            sizes = {"num_tokens": tokens, "num_keys": keys, "bucket": bucket}
            fn = functools.partial(programs.mixed, **sizes)
            packed = self._shape((sum(self._prefill_sizes(tokens, "")),), "i4")
            shapes = *state[:3], packed
            made = jit(fn, (1, 2), "psss", tokens + bucket)
            yield ("mixed", tokens, keys, bucket), made, shapes
        plain = [(*sizes, False) for sizes in self._prefills]
        for tokens, keys, scored in (*plain, (*self._prefills[-1], True)):
            sizes = {"num_tokens": tokens, "num_keys": keys, "scored": scored}
            fn = functools.partial(programs.prefill, **sizes)
            total = sum(self._prefill_sizes(tokens, kind))
            yield (
                ("prefill" + kind, tokens, keys, scored),
                jit(fn, (1, 2), "psss" if scored else "pss", tokens),
                (*state[:3], self._shape((total,), jnp.int32)),
            )

    def inputs(self) -> dict[Key, tuple[jax.ShapeDtypeStruct, ...]]:
        """Shapes of the inputs of `dispatch`, by key."""
        return {
            key: shapes[len(STATE[key[0]][0]) :] for key, _, shapes in self.programs()
        }

    def compile(
        self,
        progress: Callable[[], None] | None = None,
        cache: ProgramCache | None = None,
        *,
        behind: bool = False,
        weights: Callable[[], Weights] | None = None,
    ) -> None:
        """Make the state and compile all programs, several at a time.

        The pages are one piece of memory, which is most of a GPU: they have to be there
        before the weights, which would lie among what reading them has freed.

        Args:
            progress: Called after each program that is waited for.
            cache: Cache of compiled programs.
            behind: Wait for the few that can do everything, and go on with the rest in
                the background.
            weights: Reads the weights of an abstract model, meanwhile.

        Raises:
            ValueError: the weights are of another model.
        """
        self.reset()
        first, later = list(self.programs()), []
        if behind:
            first, later = self.table.order(first)
        compiled: concurrent.futures.Future[None] = concurrent.futures.Future()
        read = threading.Event()

        def compile_all() -> None:
            try:
                self.table.compile(
                    first,
                    later,
                    scope=self._on_mesh,
                    cache=cache,
                    placement=repr((self._sharding(PAGES_AXES), self._sharding())),
                    progress=progress,
                    weights=None if weights is None else read,
                )
            except BaseException as error:  # it comes out where it is awaited
                compiled.set_exception(error)
            else:
                compiled.set_result(None)

        try:
            if weights is None:
                compile_all()
            else:
                threading.Thread(
                    target=compile_all, name="compile", daemon=True
                ).start()
                # Who reads needs Python for a moment after each piece, and would wait
                # 5 ms for who traces: 30 times a layer.
                with short_switch_interval():
                    self._take(*weights())
            compiled.result()
            self._separators = reserve_small(self.devices)
        except BaseException:  # what is behind would wait for ever
            self.table.stop()
            raise
        read.set()  # what is behind takes Python from all that

    def _take(self, model: Decoder, kv_scales: np.ndarray | None) -> None:
        """Use the weights of a model that was abstract until now."""
        plain, adapted = (
            jax.tree.flatten(each) for each in (with_adapters(model, {}), model)
        )
        for (leaves, tree), shapes, programs in (
            (plain, self.params, self._programs),
            (adapted, self.adapted_params, self._adapted),
        ):
            if tree != programs.tree or [*map(_shape_of, leaves)] != [
                *map(_shape_of, shapes)
            ]:
                raise ValueError("the weights are of another model than described")
        self.params, self.adapted_params = tuple(plain[0]), tuple(adapted[0])
        self._kv_scales = check_scales(model.config, kv_scales)
        self._scale_pages()

    def reset(self) -> None:
        """An empty state."""
        shapes = self._state()

        def zeros() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

        where = jax.tree.map(lambda x: x.sharding, shapes)
        with self._on_mesh():
            # One program, since a server waits for it at its start. Out of memory shows
            # here, not at the first request.
            state = jax.jit(zeros, out_shardings=where)()
            jax.block_until_ready(state)
            self.pages, self.slots, self.counts, self.history = state
        self._scale_pages()
        vocab, where = self.model_config.vocab_size, self._sharding()
        self._neutral = {
            ("sample", bucket): (
                None,
                *jax.device_put(neutral_arrays(bucket, vocab), where),
            )
            for bucket in filter(is_power, self.buckets)
        }

    def _scale_pages(self) -> None:
        """Give the pages of an fp8 cache their scales."""
        if self._kv_scales is None:
            return
        with self._on_mesh():
            zeros = jnp.zeros_like(self.pages.scales)
            scales = zeros + self._kv_scales[:, None]  # [L, P, 2, K]
            scales = jax.device_put(scales, self._sharding(SCALES_AXES))
        self.pages = self.pages._replace(scales=scales)

    # What the engine calls.

    def update(
        self,
        source: Sequence[int] | None,
        changes: Sequence[tuple[int, int, int]],
    ) -> None:
        """Move rows of the slots, then change cells of them.

        Args:
            source: The source row of each row; None if none move.
            changes: (row, column, value), no cell twice.
        """
        count = self.config.num_slots
        if source is not None and self.history is not None:
            self.dispatch(("reorder",), np.asarray(source, np.int32))
        for start in range(0, max(len(changes), 1), NUM_CHANGES):
            part = changes[start : start + NUM_CHANGES]
            if not part and source is None:
                return
            cells = np.full((NUM_CHANGES, 3), count, np.int32)
            if part:
                cells[: len(part)] = part
            order = np.arange(count) if source is None else np.asarray(source)
            self.dispatch(("update",), order.astype("i4"), cells)
            source = None

    def remember(self, row: int, tokens: Sequence[int]) -> None:
        """Use `tokens` of a row, and those that it samples, for draft lookup."""
        if self.history is not None:
            padded = np.zeros(self.config.longest, np.int32)
            padded[: len(tokens)] = tokens
            self.dispatch(("remember",), padded, np.array([row], np.int32))

    def decode(
        self, *, bucket: int, steps: int, drafts: int = 0, adapted: bool = False
    ) -> Array:
        """Sample tokens for each live row of the bucket, [steps, B, 1 + drafts, 3].

        Args:
            bucket: Rows that may be live.
            steps: Maximum tokens per row, without draft tokens.
            drafts: The number that `SchedulerConfig.drafts_of` returns, or 0 in one
                step.
            adapted: Rows may use adapters; otherwise none are read.
        """
        key = self.table.decode(bucket, steps, drafts, adapted=adapted)
        (out,) = self.dispatch(key)
        return out

    def forward(self, *, bucket: int, adapted: bool = False) -> Array:
        """The logits of each live row of the bucket, for `sample`."""
        self.dispatch(self.table.forward(bucket, adapted=adapted))
        return self.logits

    def sample(self, logits: Array, inputs: SampleInputs) -> Array:
        """Sample a token for each live row by all of its settings, [1, B, 1, 43]."""
        bucket, vocab = len(logits), self.model_config.vocab_size
        arrays = inputs.arrays(bucket, vocab, self.config.num_slots)
        self.logits = logits
        (out,) = self.dispatch(("sample", bucket), *arrays)
        return out

    def prefill(
        self, chunks: Sequence[Chunk], targets: Sequence[Sequence[int]] | None = None
    ) -> tuple[Array, Array | None]:
        """Prefill chunks of prompts; rows that get a token must have been set before.

        Args:
            chunks: The chunks, at most `SchedulerConfig.prefill_requests`.
            targets: For prompt log-probabilities, the next token of each token of each
                chunk, -1 for none.

        Returns:
            The sampled token after each chunk, [1, N, 1, 3], and the log-probabilities,
            [T, 41].
        """
        packed, key = self._pack(chunks, targets)
        outs = self.dispatch(key, packed)
        return outs[0], outs[1] if targets is not None else None

    def mixed(self, chunks: Sequence[Chunk], bucket: int) -> tuple[Array, Array]:
        """`prefill` and one step of `decode` in one pass, if `ProgramTable.mixes`.

        Args:
            chunks: The chunks; none with an adapter.
            bucket: Rows that may be live.

        Returns:
            The sampled token after each chunk, [1, N, 1, 3], and of each row,
            [1, B, 1, 3].
        """
        needed = sum(len(chunk.tokens) for chunk in chunks)
        keys = sum(whole_blocks(chunk.end) for chunk in chunks)
        key = self.table.mixed(needed, keys, bucket)
        assert key is not None
        sizes = self._prefill_sizes(key[1], "")
        begun, decoded = self.dispatch(key, sizes.pack(chunks, None, self.config))
        return begun, decoded

    def count(self, row: int, tokens: Sequence[int], num_prompt: int) -> None:
        """Recount the tokens of a request, the first `num_prompt` as its prompt."""
        none = self.model_config.vocab_size
        for start in range(0, max(len(tokens), 1), NUM_COUNTED):
            part = tokens[start : start + NUM_COUNTED]
            padded = np.full(NUM_COUNTED, none, np.int32)
            padded[: len(part)] = part
            before = min(max(num_prompt - start, 0), NUM_COUNTED)
            head = np.array([row, before, start == 0], np.int32)
            self.dispatch(("count",), padded, head)

    def dispatch(self, key: Key, *inputs: np.ndarray | None) -> list[Array]:
        """Run a program on the state; all hosts do so in the same order.

        Args:
            key: Key of the program.
            inputs: Its inputs besides the state; None for a default.

        Returns:
            Its results besides the state, being copied to the host.
        """
        if self.on_dispatch is not None:
            self.on_dispatch(key, inputs)
        taken, given = STATE[key[0]]
        neutral = self._neutral.get(key, inputs)
        whole = [n if x is None else x for x, n in zip(inputs, neutral, strict=True)]
        outs: list[Array] = []
        timeline = self.timeline
        launch = contextlib.nullcontext()
        if timeline is not None:
            launch = timeline.launch(key, outs)
        with launch, self._on_mesh():
            state = (getattr(self, name) for name in taken)
            found = self.table[key](*state, *whole)
            outs += found[len(given) :]
        for name, value in zip(given, found, strict=False):
            setattr(self, name, value)
        for out in outs:
            out.copy_to_host_async()
        return outs

    # How.

    def _pack(
        self, chunks: Sequence[Chunk], targets: Sequence[Sequence[int]] | None
    ) -> tuple[np.ndarray, Key]:
        """The input of `DecodePrograms.prefill`, and the key of its program."""
        config = self.config
        needed = sum(len(chunk.tokens) for chunk in chunks)
        keys = sum(whole_blocks(chunk.end) for chunk in chunks)
        adapted = any(chunk.sequence.adapter for chunk in chunks)
        scored = targets is not None
        key = self.table.prefill(needed, keys, scored=scored, adapted=adapted)
        sizes = self._prefill_sizes(key[1], key[0].removeprefix("prefill"))
        return sizes.pack(chunks, targets, config), key

    def _gathers(self) -> bool:
        """Whether prefill gathers the keys and values that it attends to."""
        dtype = self.dtype if self._kv_scales is None else FP8
        with self._on_mesh():
            return gathers_pages(
                self.dtype, dtype, self.model_config.head_dim, self.config.page_size
            )

    def _prefill_sizes(self, tokens: int, kind: str) -> PrefillBatch:
        chunks, width = self.config.prefill_requests, self.config.table_width
        return PrefillBatch.sizes(tokens, chunks, width, adapted=kind == ADAPTED)

    def _state(self) -> tuple[Pages, Any, Any, Any]:
        """Shapes of pages, slots and counts, and of the history if there is one."""
        model, config = self.model_config, self.config
        shape = (model.num_layers, config.num_pages, 2, model.num_kv_heads)
        dtype, scales = self.dtype, None
        if self._kv_scales is not None:
            dtype, scales = FP8, self._shape(shape, jnp.float32, SCALES_AXES)
        rows = (*shape, config.page_size, model.head_dim)
        pages = Pages(self._shape(rows, dtype, PAGES_AXES), scales)
        width = Column.TABLE + config.table_width
        count = config.num_slots
        slots = self._shape((count, width), jnp.int32)
        counts = self._shape((count, model.vocab_size), jnp.int16)
        history = None
        if config.drafts:
            history = self._shape((count, config.longest), jnp.int32)
        return pages, slots, counts, history

    def _sums(self, rows: int, model: Decoder) -> Sums | None:
        """The all-reduce for this many tokens of a step; None is XLA's."""
        with self._on_mesh():
            return Sums.choose(
                self._all_reduce,
                self.mesh,
                self.rules,
                elements=padded_rows(rows) * self.model_config.d_model,
                dtype=self.dtype,
                needed=lambda sums: model.adds_in_layers(rows, sums.begin),
            )

    def _sharding(self, axes: tuple[str | None, ...] = ()) -> Any:
        if self.mesh is None:
            return SingleDeviceSharding(self.devices[0])
        return NamedSharding(self.mesh, self.rules.spec(*axes))

    def _shape(
        self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...] = ()
    ) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._sharding(axes))

    def _jit(
        self,
        fn: Callable[..., Any],
        donated: tuple[int, ...],
        outs: str,
        rows: int = 0,
    ) -> Any:
        """Compile `fn`, a program of so many rows of the model; `outs` names the
        results, p for pages and s for small ones.
        """
        pages = jax.tree.map(lambda shape: shape.sharding, self._state()[0])
        where = {"p": pages, "s": self._sharding()}
        shardings = [where[kind] for kind in outs]
        return jax.jit(
            fn,
            donate_argnums=donated,
            out_shardings=tuple(shardings),
            compiler_options=_ONE_GRAPH
            | _NOTHING_TWICE
            | (_MANY_ROWS if rows > FEW_ROWS else {}),
        )

    def _on_mesh(self) -> contextlib.AbstractContextManager[Any]:
        return (
            contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)
        )


def _decode_key(bucket: int, steps: int, drafts: int, kind: str) -> Key:
    return (("speculate" if drafts else "decode") + kind, bucket, steps)


def _shape_of(x: Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
