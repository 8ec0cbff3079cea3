"""The compiled programs of an engine, and which of them stand in for others."""

import collections
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax

from jaxscale.inference.engine.program_cache import ProgramCache
from jaxscale.inference.engine.programs import ADAPTED
from pallas_kernels.mosaic import keep_modules


type Key = tuple[Any, ...]
"""Name and sizes of a program."""

type Program = tuple[Key, Any, tuple[Any, ...]]
"""Key, jitted function and input shapes."""

_FIRST_ROWS = 128  # of the batch whose programs are compiled first
_LOOK_SECONDS = 0.1
_log = logging.getLogger(__name__)


class ProgramTable(dict[Key, Callable[..., Any]]):
    """Compiled programs by key; a call takes the smallest that can do it.

    A program of more rows or tokens does what one of fewer does, and one with adapters
    what the same without does. So few are enough to begin with.

    Example:
        >>> table = ProgramTable([2, 8], [(16, 64)], adapted=False)
        >>> table["decode", 8, 1] = table["decode", 2, 1] = print
        >>> table.decode(4, 1, 0, adapted=False)
        ('decode', 8, 1)
    """

    def __init__(
        self,
        buckets: Sequence[int],
        prefills: Sequence[tuple[int, int]],
        *,
        adapted: bool,
    ) -> None:
        """Nothing is compiled yet.

        Args:
            buckets: Rows of the decode programs, ascending.
            prefills: Tokens and keys of the prefill programs, the smallest first.
            adapted: Whether there are programs with adapters.
        """
        super().__init__()
        self._buckets, self._prefills = buckets, prefills
        self._general = ADAPTED if adapted else ""
        self._total, self._stopped = 0, False
        self._telling = threading.Lock()

    # Which are there.

    @property
    def num_compiled(self) -> tuple[int, int]:
        """Programs that are compiled, and all that there will be."""
        return len(self), max(len(self), self._total)

    @property
    def whole(self) -> bool:
        """Whether all are compiled."""
        return len(self) >= self._total

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch that can be decoded, whatever its requests ask."""
        kind = self._general
        found = [
            bucket
            for bucket in self._buckets
            if _decode(bucket, 1, 0, kind) in self
            and ("forward" + kind, bucket) in self
            and ("sample", bucket) in self
        ]
        return max(found, default=self._buckets[-1])

    @property
    def scores_prompts(self) -> bool:
        """Whether prompts can have log-probabilities."""
        tokens, keys = self._prefills[-1]
        return ("prefill" + self._general, tokens, keys, True) in self

    # Which does a call.

    def decode(self, bucket: int, steps: int, drafts: int, *, adapted: bool) -> Key:
        """The program of decode steps."""
        return self._first(
            _decode(rows, steps, drafts, kind)
            for rows, kind in self._fitting(bucket, adapted)
        )

    def forward(self, bucket: int, *, adapted: bool) -> Key:
        """The program of logits, for as many rows as one that samples from them."""
        return self._first(
            ("forward" + kind, rows)
            for rows, kind in self._fitting(bucket, adapted)
            if ("sample", rows) in self
        )

    def prefill(self, tokens: int, keys: int, *, scored: bool, adapted: bool) -> Key:
        """The program of prompts."""
        sizes = self._prefills[-1:] if scored else self._prefills
        return self._first(
            ("prefill" + kind, t, k, scored)
            for t, k in sizes
            if tokens <= t and keys <= k
            for kind in self._kinds(adapted)
        )

    def mixes(self, tokens: int, keys: int, rows: int) -> bool:
        """Whether there is a program for such a mixed batch."""
        return self.mixed(tokens, keys, rows) is not None

    def mixed(self, tokens: int, keys: int, rows: int) -> Key | None:
        """The program of prompts and a decode step; None where none is there."""
        fitting = (
            key
            for key in tuple(self)  # to which others are added meanwhile
            if key[0] == "mixed"
            and all(n <= m for n, m in zip((tokens, keys, rows), key[1:], strict=True))
        )
        return min(fitting, key=lambda key: (key[1] + key[3], key), default=None)

    def _first(self, keys: Iterable[Key]) -> Key:
        return next(key for key in keys if key in self)

    def _fitting(self, bucket: int, adapted: bool) -> Iterator[tuple[int, str]]:
        for rows in self._buckets:
            if rows >= bucket:
                yield from ((rows, kind) for kind in self._kinds(adapted))

    def _kinds(self, adapted: bool) -> Iterable[str]:
        return dict.fromkeys((ADAPTED if adapted else "", self._general))

    # How they are made.

    def order(self, programs: Iterable[Program]) -> tuple[list[Program], list[Program]]:
        """Programs that are needed at first, and the others, the most wanted first."""
        ranked = sorted(programs, key=lambda program: self._rank(program[0]))
        first = [program for program in ranked if not self._rank(program[0])]
        return first, ranked[len(first) :]

    def compile(
        self,
        first: Sequence[Program],
        behind: Sequence[Program],
        *,
        scope: Callable[[], contextlib.AbstractContextManager[Any]],
        cache: ProgramCache | None,
        placement: str,
        progress: Callable[[], None] | None,
        weights: threading.Event | None = None,
    ) -> None:
        """Compile programs, several at a time.

        One thread traces and lowers them in their order, which is Python. Nothing of
        `behind` is traced while weights are read, which takes twice as long beside it,
        and nothing compiled before `first` is there: it would take cores,
        and the GPU, on which XLA tries matmuls, from what is waited for.

        Args:
            first: Those that are waited for.
            behind: Those that go on in the background.
            scope: In which they are traced.
            cache: Cache of compiled programs.
            placement: Names the shardings of the results.
            progress: Called after each program that is waited for, until `stop`.
            weights: Set once the weights are there; None if they are.

        Raises:
            Exception: what `progress` or a program that is waited for raises. No others
                are begun then.
        """
        self._total = len(first) + len(behind)
        python, pool = (concurrent.futures.ThreadPoolExecutor(n) for n in (1, None))
        waited_for = threading.Event()
        broken = collections.deque[tuple[Any, concurrent.futures.Future[Any]]]()

        def lower(traced: Any) -> Any:
            with scope(), keep_modules():
                return traced.lower()

        def lower_broken() -> None:
            """Lower what was not in the cache after all, before more is traced."""
            while broken:
                traced, lowered = broken.popleft()
                try:
                    lowered.set_result(lower(traced))
                except BaseException as error:  # for the thread that waits
                    lowered.set_exception(error)

        def prepare(program: Program, *, later: bool) -> tuple[str, Any, Any] | None:
            """Name, trace and module; the module only if it must be compiled."""
            lower_broken()
            while later and weights and not (weights.is_set() or self._has_ended()):
                weights.wait(_LOOK_SECONDS)
                lower_broken()
            if self._has_ended():
                return None
            key, fn, shapes = program
            # The meaning of a key is in the code, on which the cache depends.
            where = [key, placement, [x.sharding for x in jax.tree.leaves(shapes)]]
            with scope():
                traced = fn.trace(*shapes)
                name = "" if cache is None else cache.name(traced, repr(where))
            cached = cache is not None and name in cache
            return name, traced, None if cached else lower(traced)

        def finish(
            key: Key, prepared: concurrent.futures.Future[Any], *, later: bool
        ) -> None:
            parts = prepared.result()
            if later:
                waited_for.wait()
            if parts is None or self._has_ended():
                return
            name, traced, lowered = parts
            found = None
            if lowered is None and cache is not None:
                with scope():
                    found = cache.load(name)
            if found is None:
                if lowered is None:
                    again = concurrent.futures.Future[Any]()
                    broken.append((traced, again))
                    python.submit(lower_broken)
                    lowered = again.result()
                with scope():
                    found = lowered.compile()
                if cache is not None:
                    cache.store(name, found)
            self[key] = found

        futures = [
            pool.submit(
                finish,
                program[0],
                python.submit(prepare, program, later=later),
                later=later,
            )
            for later, programs in ((False, first), (True, behind))
            for program in programs
        ]
        pool.shutdown(wait=False)
        try:
            for future in concurrent.futures.as_completed(futures[: len(first)]):
                future.result()
                with self._telling:
                    if progress is not None and not self._stopped:
                        progress()
        except BaseException:  # nobody waits for the others either
            self.stop()
            raise
        finally:
            waited_for.set()
        for future in futures[len(first) :]:
            future.add_done_callback(_say_failure)

    def _has_ended(self) -> bool:
        """Whether nobody needs any more programs."""
        return self._stopped or not threading.main_thread().is_alive()

    def stop(self) -> None:
        """Begin no more programs, and tell of no more."""
        with self._telling:
            self._stopped = True

    def _rank(self, key: Key) -> int:
        """0 for what is needed at first, then the more the later."""
        name, adapted = key[0].removesuffix(ADAPTED), key[0].endswith(ADAPTED)
        general = adapted == bool(self._general)
        if name in ("decode", "forward", "sample"):
            rows = (b for b in self._buckets if b >= _FIRST_ROWS)
            first = key[1] == next(rows, self._buckets[-1])
            single = name != "decode" or key[2] == 1
            if first and single and (general or name == "sample"):
                return 0
            return 1 if name == "decode" and single else 2
        if name == "prefill":
            *sizes, scored = key[1:]
            whole = tuple(sizes) == self._prefills[-1]
            return 0 if whole and general and not scored else 1
        return 3 if name in ("speculate", "mixed") else 0


def _say_failure(future: concurrent.futures.Future[None]) -> None:
    if (error := future.exception()) is not None:
        _log.error("a program cannot be compiled; a larger one stands in: %r", error)


def _decode(bucket: int, steps: int, drafts: int, kind: str) -> Key:
    return (("speculate" if drafts else "decode") + kind, bucket, steps)
