"""The tuner: it times kernel configs and writes the table of a device.

Run it on that device:

    python -m pallas_kernels.tuning matmul
    python -m pallas_kernels.tuning collective_matmul --only llama70b_qkv tp=4

and `pallas_kernels.tuned_configs` reads it. Several tuners can share GPUs and a table:
if ``PALLAS_KERNELS_TUNING_LOCK`` names a file, they lower in parallel and measure one
after another.
"""

import argparse
import contextlib
import dataclasses
import datetime
import importlib
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec
from pallas_kernels.tuned_configs import TunedEntry, save_table, table_path


OPS = (
    "matmul",
    "collective_matmul",
    "quantized_matmul",
    "scaled_matmul",
    "tile_sparse_matmul",
)
"""Ops that the tuner knows: each has a module ``pallas_kernels.<op>.tunable``."""

_L2_BYTES = 60e6
"""L2 of the H200; the H100 has 50 MB."""

_MOST_SETS = 64
_FINALISTS = 4  # candidates that are timed again

IDLE_SHARE: float = 6
"""Pause after a measurement, relative to the time that the GPU was busy, which keeps it
cool and its clock high."""


@runtime_checkable
class Tunable(Protocol):
    """Interface of a module ``pallas_kernels.<op>.tunable``, for the tuner.

    It may have an `IDLE_SHARE` of its own, and a ``time_us`` instead of
    `device_time_us`.
    """

    def problems(self) -> Mapping[str, Any]:
        """Problems by name; their `key` is that of the table."""
        ...

    def candidates(self, problem: Any, device: DeviceSpec) -> Sequence[Any]:
        """Configs worth timing."""
        ...

    def arguments(self, problem: Any) -> tuple[Any, ...]:
        """Random operands."""
        ...

    def kernel(
        self, problem: Any, config: Any, device: DeviceSpec
    ) -> Callable[..., jax.Array]:
        """The kernel with a config."""
        ...

    def baseline(self, problem: Any) -> Callable[..., jax.Array]:
        """The XLA implementation, which is also the reference for the values."""
        ...


def _rotation(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The operands and copies of them, together twice the size of the L2.

    A decode step reads each weight once: a kernel that finds it in the L2 because it
    ran on the same operands before is timed wrongly.
    """
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    wanted = 1 if nbytes >= 2 * _L2_BYTES else int(2 * _L2_BYTES // max(nbytes, 1)) + 1
    count = min(wanted, _MOST_SETS)
    return [args, *(jax.tree.map(jnp.copy, args) for _ in range(count - 1))]


class _Rotating:
    """Calls a function on the next set of operands; looks jitted to `Cupti`."""

    def __init__(self, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        self.fn, self.sets = fn, itertools.cycle(sets)

    def __call__(self) -> Any:
        return self.fn(*next(self.sets))

    def trace(self) -> Any:
        raise NotImplementedError("only called")

    def lower(self) -> Any:
        raise NotImplementedError("only called")


def device_time_us(fn: Callable[..., Any], *args: Any, iterations: int) -> list[float]:
    """Device times of several calls of a jitted function, in microseconds.

    Args:
        fn: the function to time; jitted or compiled.
        *args: its operands. The calls use them and copies of them in turn, so that each
            reads its own from memory, not from the L2.
        iterations: calls; at least one for each set of operands is made.
    """
    from jax.experimental.mosaic.gpu import profiler

    sets = _rotation(args)
    jax.block_until_ready(sets)
    measured = profiler.Cupti(finalize=False).measure(
        _Rotating(fn, sets), iterations=max(iterations, len(sets))
    )
    _, times = measured()
    if times is None:
        raise RuntimeError("no GPU kernel ran; the tuner needs an NVIDIA GPU")
    return [1e3 * t for t in (times if isinstance(times, list) else [times])]


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextlib.contextmanager
def _turn(*, alone: bool) -> Iterator[None]:
    """Waits for other tuners: preparation is shared, measurement exclusive."""
    path = os.environ.get("PALLAS_KERNELS_TUNING_LOCK")
    if not path:
        yield
        return
    import fcntl  # which not all platforms have

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Prepared:
    """A problem whose candidates are being compiled."""

    tunable: Tunable
    args: tuple[Any, ...]
    """Operands of the case."""
    baseline: Any
    """The compiled baseline."""
    candidates: Mapping[Any, Future]
    """Compiled program of each config."""
    skipped: Sequence[str]
    """Messages on the candidates that do not lower."""


def prepare(
    tunable: Tunable, problem: Any, device: DeviceSpec, pool: ThreadPoolExecutor
) -> _Prepared:
    """Makes operands, lowers all programs and starts to compile the candidates.

    When this returns, only compilers of candidates run, in the threads of `pool`, so
    that another problem can be timed at the same time. Lowering would disturb it: a
    program of 30 ms seems to take 5 ms longer if its caller waits for the GIL. So would
    the baseline, whose matmuls XLA autotunes on the GPU.
    """
    args = tunable.arguments(problem)
    baseline = pool.submit(jax.jit(tunable.baseline(problem)).lower(*args).compile)
    candidates, skipped = {}, []
    for config in tunable.candidates(problem, device):
        try:
            lowered = jax.jit(tunable.kernel(problem, config, device)).lower(*args)
        except Exception as error:  # one that does not lower must not end the run
            skipped.append(f"  skipped {config}: {_line(error)}")
        else:
            candidates[config] = pool.submit(lowered.compile)
    return _Prepared(
        tunable=tunable,
        args=jax.block_until_ready(args),
        baseline=baseline.result(),
        candidates=candidates,
        skipped=skipped,
    )


def _working(
    prepared: _Prepared, report: Callable[[str], None]
) -> dict[Any, Callable[..., jax.Array]]:
    """The candidates that run and give the right values."""
    want = prepared.baseline(*prepared.args).astype(jnp.float32)
    scale = jnp.max(jnp.abs(want))
    for line in prepared.skipped:
        report(line)
    good = {}
    for config, future in prepared.candidates.items():
        try:
            got = future.result()(*prepared.args).astype(jnp.float32)
        except Exception as error:  # nor one that does not compile or run
            report(f"  skipped {config}: {_line(error)}")
            continue
        worst = float(jnp.max(jnp.abs(got - want)) / scale)
        if worst < 2e-2:
            good[config] = future.result()
        else:
            report(f"  rejected {config}: error {worst:.1e} against XLA")
    return good


def measure(
    prepared: _Prepared, *, rounds: int = 6, report: Callable[[str], None] = print
) -> TunedEntry | None:
    """Times the candidates of a problem, alone on the GPU, and returns the fastest.

    All candidates are timed once, the best ones again, interleaved with XLA in random
    order, with pauses: the clock of a busy GPU drops within a tenth of a second, and
    without pauses whatever runs first would win.

    Args:
        prepared: the problem.
        rounds: repetitions of the second phase.
        report: called with each line to show.

    Returns:
        The entry, or None if no candidate works.
    """
    tunable, baseline = prepared.tunable, prepared.baseline
    time_us = getattr(tunable, "time_us", device_time_us)
    pause = getattr(tunable, "IDLE_SHARE", IDLE_SHARE)
    good = _working(prepared, report)
    if not good:
        return None

    def timed(fn: Callable[..., jax.Array]) -> list[float]:
        taken = time_us(fn, *prepared.args, iterations=10)
        time.sleep(pause * sum(taken) * 1e-6)
        return taken

    first = {c: statistics.median(timed(fn)) for c, fn in good.items()}
    best = sorted(first, key=first.__getitem__)[:_FINALISTS]
    times: dict[Any, list[float]] = {None: [], **{c: [] for c in best}}
    order = list(times)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for c in order:
            times[c] += timed(baseline if c is None else good[c])
    median = {c: round(statistics.median(t), 2) for c, t in times.items()}
    xla_us = median.pop(None)
    winner = min(median, key=median.__getitem__)
    report(f"  {median[winner]:.1f} us, XLA {xla_us:.1f} us: {winner}")
    return TunedEntry(
        config=dataclasses.asdict(winner),
        time_us=median[winner],
        xla_us=xla_us,
        jax=jax.__version__,
        date=datetime.date.today().isoformat(),
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Tunes an op on the GPU at hand and writes the table of the device."""
    parser = argparse.ArgumentParser(
        prog="python -m pallas_kernels.tuning", description=main.__doc__
    )
    parser.add_argument("op", choices=OPS)
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="problems whose name holds each of these: llama70b_qkv tp=4 'm=16 '",
    )
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="begin no problem after these"
    )
    options = parser.parse_args(argv)
    device = DeviceSpec.current()
    if device is None:
        parser.error(f"no NVIDIA GPU: the backend is {jax.default_backend()!r}")
    tunable: Any = importlib.import_module(f"pallas_kernels.{options.op}.tunable")
    wanted = {
        name: problem
        for name, problem in tunable.problems().items()
        if all(text in f"{name} " for text in options.only)
    }
    path = table_path(device)
    end = time.monotonic() + options.seconds
    # Compilers leave cores to the thread that measures.
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2)) as pool:
        following = None
        for name, later in itertools.pairwise([None, *wanted, None]):
            # Releases the previous one: at most two problems hold operands.
            prepared = following
            following = None
            if later is not None and time.monotonic() <= end:
                following = _attempt(tunable, wanted[later], device, pool)
            if name is None:
                continue
            if prepared is None or time.monotonic() > end:
                print(f"stopped before {name}")
                break
            print(name, flush=True)
            if isinstance(prepared, str):
                print(f"  skipped: {prepared}")
                continue
            with _turn(alone=True):
                entry = measure(prepared)
                if entry is not None:  # saved at once: a later failure loses nothing
                    save_table(path, options.op, {wanted[name].key: entry})
                    print(f"  wrote {path}", flush=True)


def _attempt(
    tunable: Tunable, problem: Any, device: DeviceSpec, pool: ThreadPoolExecutor
) -> _Prepared | str:
    """The prepared problem, or the reason of a failure, which must not end the run."""
    try:
        with _turn(alone=False):
            return prepare(tunable, problem, device, pool)
    except Unsupported as error:
        return str(error)
    except Exception as error:
        return _line(error)


if __name__ == "__main__":
    main()
