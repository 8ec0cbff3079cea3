"""The state of one use of the interpreter, known to all its parts."""

import dataclasses
from typing import Any

import jax


class RaceError(AssertionError):
    """The race detector found unordered accesses; it printed them."""


@dataclasses.dataclass
class Run:
    """What happened while :func:`interpret_mosaic_gpu` was active."""

    timeout: float
    concurrent_blocks: bool
    failure: Exception | None = None
    """The first exception inside a kernel; jax itself reports only its text."""
    race_states: list[Any] = dataclasses.field(default_factory=list)
    global_buffers: dict[Any, int] = dataclasses.field(default_factory=dict)

    @property
    def kernels(self) -> int:
        """How many kernels have been interpreted."""
        return len(self.race_states)

    @property
    def races_found(self) -> bool:
        """Whether any kernel so far had a race (they are printed as found)."""
        jax.effects_barrier()
        return any(state.races_found for state in self.race_states)


_run: Run | None = None


def set_current_run(run: Run | None) -> None:
    """Begin or end a run; runs do not nest."""
    global _run
    if run is not None and _run is not None:
        raise RuntimeError("interpret_mosaic_gpu is already active")
    _run = run


def current_run() -> Run:
    """The run that kernels belong to; callbacks come from threads of XLA."""
    if _run is None:
        raise RuntimeError(
            "a kernel is interpreted outside interpret_mosaic_gpu; wait for its "
            "results (np.asarray) inside the with block"
        )
    return _run
