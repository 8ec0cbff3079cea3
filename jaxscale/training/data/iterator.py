"""Iterators over prefetched batches, with positions that can be saved and restored."""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any, Protocol, runtime_checkable

from jaxscale.checks import pip_install


MAX_PREFETCH = 1000
"""Maximum number of prefetched batches."""


@runtime_checkable
class Source[B](Protocol):
    """Batches from a position on, as Grain reads them."""

    def __len__(self) -> int: ...

    def __getitem__(self, step: int) -> B: ...

    def place(self, step: int) -> dict[str, int]:
        """The position before a batch."""
        ...


@runtime_checkable
class Batches[B](Protocol):
    """The batches that a `BatchIterator` iterates over."""

    start: Mapping[str, int]
    """The position before the first batch, as it is saved."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity of the data, for which alone a saved position is valid."""
        ...

    @property
    def prefetch(self) -> int:
        """Number of prefetched batches."""
        ...

    def source(self, position: Mapping[str, int]) -> Source[B]:
        """The batches from a position on."""
        ...

    def progress(self, position: Mapping[str, int]) -> dict[str, float]:
        """Epochs of the text until a position, for the metrics."""
        ...


class BatchIterator[B](Iterator[B]):
    """An iterator over batches, whose position can be saved and restored."""

    def __init__(self, batches: Batches[B]) -> None:
        """Begin with the first batch."""
        self._batches = batches
        self._open(batches.start)

    def __next__(self) -> B:
        return next(self._prefetched)

    def progress(self) -> dict[str, float]:
        """Epochs of the text so far, for the metrics."""
        return self._batches.progress(self._place())

    def get_state(self) -> dict[str, Any]:
        """The position, as a small JSON-serializable dictionary."""
        return {**self._place(), **self._batches.identity}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue where `get_state` was called, with exactly the same batches.

        Prefetching and the number of processes may differ.

        Raises:
            ValueError: the state is invalid, or comes from other data, packing or
                masking.
        """
        for name, mine in self._batches.identity.items():
            if state.get(name) != mine:
                raise ValueError(
                    f"the saved position was made with {name} {state.get(name)!r}, "
                    f"this data has {mine!r}; resume with the same data settings and "
                    "text, or start a new run"
                )
        place = {name: _saved_number(state, name) for name in self._batches.start}
        self.close()
        self._open(place)

    def close(self) -> None:
        """Stop the prefetching thread."""
        self._prefetched.close()

    def _open(self, position: Mapping[str, int]) -> None:
        self._source = self._batches.source(position)
        self._prefetched = _prefetched(self._source, self._batches.prefetch)

    def _place(self) -> dict[str, int]:
        """The position before the next batch."""
        return self._source.place(self._prefetched.get_state()["next_index"])


def _saved_number(state: Mapping[str, Any], name: str) -> int:
    value = state.get(name)
    if type(value) is not int or value < 0:
        raise ValueError(
            f"the saved position has {name} {value!r:.80}, expected a number from 0 "
            "on; resume from another checkpoint"
        )
    return value


def _prefetched(source: Any, count: int) -> Any:
    """An iterator of Grain over `source`, which has a length and items.

    One thread prefetches `count` items; 0 uses no thread. Packing and the transfer to
    the devices then overlap with the computation of an earlier step.
    """
    grain = _require_grain()
    options = grain.ReadOptions(num_threads=min(count, 1), prefetch_buffer_size=count)
    return iter(grain.MapDataset.source(source).to_iter_dataset(options))


def _require_grain() -> ModuleType:
    """The Grain library, or an error that says how to install it."""
    try:
        import grain
    except ImportError as error:
        raise ImportError(f"batches need Grain: {pip_install('train')}") from error
    return grain
