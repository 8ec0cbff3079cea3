"""Configs of kernels: where they come from, and the tuner that measures them.

A config is looked up in this order: the one given by the caller, that of an enclosing
``with override(op, config)``, the table ``tuned/<device>.json``, a heuristic. The table
of a device is written on that device by

    python -m pallas_kernels.tuning matmul
    python -m pallas_kernels.tuning collective_matmul --only llama70b_qkv tp=4

and read from the package, or from the directory in ``PALLAS_KERNELS_TUNED_DIR``.
Several tuners can share GPUs and a table: where ``PALLAS_KERNELS_TUNING_LOCK`` names a
file, they lower side by side and measure one after another.
"""

import argparse
import contextlib
import dataclasses
import datetime
import fcntl
import functools
import importlib
import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.cost_model import NOISE
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import DeviceSpec


__all__ = [
    "Tunable",
    "TunedEntry",
    "check_config",
    "declines",
    "device_time_us",
    "load_table",
    "lookup",
    "override",
    "overriding",
    "save_table",
    "table_path",
    "tune",
    "tuned_entry",
]

OPS = ("matmul", "collective_matmul", "tile_sparse_matmul")
"""Ops that the tuner knows: each has a module ``pallas_kernels.<op>.tunable``."""

_L2_BYTES = 60e6
"""L2 of the H200; the H100 has 50 MB."""

_MOST_SETS = 64

# Part of the key under which `jax.jit` finds what it has compiled; hence hashable.
_overrides: Any = jax.make_user_context(())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TunedEntry:
    """One row of a table: the fastest config of a problem, and how it was found."""

    config: Mapping[str, Any]
    """Fields of the config."""
    time_us: float
    """Median device time, in microseconds."""
    xla_us: float
    """Median device time of the XLA implementation in the same run."""
    jax: str
    """Version of jax."""
    date: str
    """Day of the measurement, as in 2026-11-20."""

    def __post_init__(self) -> None:
        for name in ("time_us", "xla_us"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{name} {value!r}, expected a positive number")
        if not isinstance(self.config, Mapping):
            raise ValueError(f"config {self.config!r}, expected an object")


@contextlib.contextmanager
def override(op_name: str, config: Any) -> Iterator[None]:
    """Uses `config` for every call of an op inside the block that names none itself.

    A function that `jax.jit` has compiled outside of the block is traced again in it.

    Args:
        op_name: name of the op, for example "matmul".
        config: a config of that op; hashable.

    Example:
        >>> from pallas_kernels.matmul import MatmulConfig
        >>> with override("matmul", MatmulConfig(tile_n=128)):
        ...     lookup("matmul", "m=8 n=8 k=8 bf16", None, MatmulConfig,
        ...            heuristic=MatmulConfig).tile_n
        128
    """
    with _overrides(((op_name, config), *_overrides.value)):
        yield


def overriding(op_name: str) -> Any | None:
    """The config that an enclosing ``with override(op_name, config)`` asks for."""
    return next((c for name, c in _overrides.value if name == op_name), None)


def check_config(
    op_name: str, config: Any, config_type: type, source: str = "config"
) -> None:
    """Refuses a config that is another op's.

    Raises:
        ValueError: `config` is neither None nor of type `config_type`.
    """
    if config is not None and not isinstance(config, config_type):
        raise ValueError(
            f"{source} {config!r} for {op_name}, expected a {config_type.__name__}"
        )


def lookup[C](
    op_name: str,
    key: str,
    device: DeviceSpec | None,
    config_type: type[C],
    *,
    config: C | None = None,
    heuristic: Callable[[], C],
) -> C:
    """Finds the config of a problem: explicit, override, table, heuristic.

    Args:
        op_name: name of the op.
        key: the problem as in the table, for example ``m=4096 n=8192 k=4096 bf16``.
        device: whose table to read; None reads none.
        config_type: the op's config class.
        config: what the caller asked for, if anything.
        heuristic: called when nothing else is known.

    Returns:
        A config of type `config_type`.

    Raises:
        ValueError: a config of another type was given, or the table is malformed.
    """
    given = {"config": config, "override": overriding(op_name)}
    for source, value in given.items():
        check_config(op_name, value, config_type, source)
        if value is not None:
            return value
    if device is not None and (entry := tuned_entry(op_name, key, device)) is not None:
        return _parse_config(op_name, key, device, config_type, entry)
    return heuristic()


@runtime_checkable
class Problem(Protocol):
    """Sizes of a call of an op, as the choice of an implementation sees them."""

    @property
    def key(self) -> str:
        """The key of the problem in the tables of tuned configs."""
        ...

    def declines(self, device: DeviceSpec) -> str | None:
        """Say why XLA is expected to be faster, by the cost model, or None."""
        ...


def declines(
    op_name: str, problem: Problem, device: DeviceSpec | None, config: Any = None
) -> str | None:
    """Say why the kernel of an op is expected to lose to XLA, or None: the one choice.

    What was measured on the device decides: a kernel may lose by the noise of
    measurements, 2%. For problems that are not in the table the cost model does. A
    config, given or by `override`, asks for the kernel.

    Args:
        op_name: name of the op in the tables.
        problem: what to compute.
        device: where; without one the kernel says itself that it needs one.
        config: what the caller gave.

    Returns:
        A reason for `pallas_kernels.dispatch.dispatch` to pass over the kernel.

    Raises:
        ValueError: the table is malformed.
    """
    if device is None or config is not None or overriding(op_name) is not None:
        return None
    entry = tuned_entry(op_name, problem.key, device)
    if entry is None:
        return problem.declines(device)
    if entry.xla_us >= (1 - NOISE) * entry.time_us:
        return None
    return (
        f"XLA took {entry.xla_us:.1f} us and the kernel {entry.time_us:.1f} us when"
        f" {problem.key} was tuned on {device.name}"
    )


def tuned_entry(op_name: str, key: str, device: DeviceSpec) -> TunedEntry | None:
    """The row of a problem in the table of a device, or None.

    Raises:
        ValueError: the table is malformed.
    """
    return load_table(table_path(device)).get(op_name, {}).get(key)


def _parse_config[C](
    op_name: str, key: str, device: DeviceSpec, config_type: type[C], entry: TunedEntry
) -> C:
    where = f"{table_path(device)}: {op_name}[{key!r}].config"
    known = {f.name for f in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    if unknown := sorted(entry.config.keys() - known):
        raise ValueError(
            f"{where} has unknown fields {unknown}, expected some of {sorted(known)};"
            f" {_retune(op_name)}"
        )
    try:
        return config_type(**entry.config)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}; {_retune(op_name)}") from error


def _retune(op_name: str) -> str:
    return f"delete the entry or run `python -m pallas_kernels.tuning {op_name}`"


def table_path(device: DeviceSpec) -> Path:
    """The path of the table of a device; the file need not exist."""
    directory = os.environ.get("PALLAS_KERNELS_TUNED_DIR")
    base = Path(directory) if directory else Path(__file__).parent / "tuned"
    return base / f"{device.name}.json"


def load_table(path: Path) -> dict[str, dict[str, TunedEntry]]:
    """Reads a table; one that does not exist is empty.

    Args:
        path: a JSON file ``{"<op>": {"<problem>": {"config": {...}, ...}}}``.

    Returns:
        Op and problem to entry.

    Raises:
        ValueError: the file is no such table; the message says where.
    """
    if not path.exists():
        return {}
    return _load_cached(path, path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=16)
def _load_cached(path: Path, _mtime: int) -> dict[str, dict[str, TunedEntry]]:
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no JSON: {error}; repair or delete it") from error
    if not isinstance(table, dict):
        raise ValueError(f"{path}: expected an object of ops, got {table!r:.80}")
    parsed: dict[str, dict[str, TunedEntry]] = {}
    for op_name, rows in table.items():
        if not isinstance(rows, dict):
            raise ValueError(f"{path}: {op_name}: expected an object of problems")
        for key, row in rows.items():
            try:
                parsed.setdefault(op_name, {})[key] = TunedEntry(**row)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{path}: {op_name}[{key!r}]: {error}; {_retune(op_name)}"
                ) from error
    return parsed


def save_table(path: Path, op_name: str, entries: Mapping[str, TunedEntry]) -> None:
    """Adds entries of one op to a table, replacing those of the same problems."""
    table = {
        op: {key: dataclasses.asdict(entry) for key, entry in rows.items()}
        for op, rows in load_table(path).items()
    }
    rows = table.setdefault(op_name, {})
    rows.update({key: dataclasses.asdict(entry) for key, entry in entries.items()})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@runtime_checkable
class Tunable(Protocol):
    """Interface of a module ``pallas_kernels.<op>.tunable``, for the tuner."""

    IDLE_SHARE: float
    """Pause after a measurement, as a multiple of the time that the GPU was busy."""

    def problems(self) -> Mapping[str, Any]:
        """Problems, whose `key` is that of the table, by what they are called."""
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
        """The XLA implementation, which also says what is right."""
        ...

    def time_us(
        self, fn: Callable[..., Any], *args: Any, iterations: int
    ) -> list[float]:
        """Time of each of several calls of a compiled function, in microseconds."""
        ...


def _rotation(args: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """The operands and copies of them, which together pass through the L2 twice.

    A step of decoding reads each weight once: a kernel that finds it in the L2 because
    it ran before on the same operands is timed wrongly.
    """
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(args))
    wanted = 1 if nbytes >= 2 * _L2_BYTES else int(2 * _L2_BYTES // max(nbytes, 1)) + 1
    count = min(wanted, _MOST_SETS)
    return [args, *(jax.tree.map(jnp.copy, args) for _ in range(count - 1))]


class _Rotating:
    """Calls a function on the next set of operands; `Cupti` takes it for jitted."""

    def __init__(self, fn: Callable[..., Any], sets: Sequence[tuple[Any, ...]]) -> None:
        self.fn, self.sets = fn, itertools.cycle(sets)

    def __call__(self) -> Any:
        return self.fn(*next(self.sets))

    def trace(self) -> Any:
        raise NotImplementedError("only called")

    def lower(self) -> Any:
        raise NotImplementedError("only called")


def device_time_us(fn: Callable[..., Any], *args: Any, iterations: int) -> list[float]:
    """Device time of each of several calls of a jitted function, in microseconds.

    Args:
        fn: what is timed; jitted or compiled.
        *args: its operands. The calls take them and copies of them in turn, so that
            each finds its own in memory, not in the L2.
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
def _shared(kind: int) -> Iterator[None]:
    """Waits for other tuners: ``fcntl.LOCK_SH`` to prepare, ``LOCK_EX`` to measure."""
    path = os.environ.get("PALLAS_KERNELS_TUNING_LOCK")
    if not path:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, kind)
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


def _prepare(
    tunable: Tunable, problem: Any, device: DeviceSpec, pool: ThreadPoolExecutor
) -> _Prepared:
    """Draws operands, lowers all programs and begins to compile the candidates.

    Only compilers of candidates are at work when this returns, in the threads of
    `pool`, so that another problem can be timed meanwhile. Lowering would disturb it: a
    program of 30 ms seems to take 5 ms longer where its caller has to wait for the
    interpreter's lock. So would the baseline, whose products XLA tries out on the GPU.
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
    """The candidates, run once, that work and give the right values."""
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


def tune(
    tunable: Tunable,
    problem: Any,
    device: DeviceSpec,
    *,
    finalists: int = 4,
    rounds: int = 6,
    iterations: int = 10,
    report: Callable[[str], None] = print,
) -> TunedEntry | None:
    """Times the candidates of a problem on the GPU and returns the fastest.

    All candidates are timed once, the best ones again, interleaved with XLA in a random
    order, with pauses: the clock of a busy GPU falls within a tenth of a second, and
    without them what runs first would win.

    Args:
        tunable: the op.
        problem: one of its problems.
        device: the GPU at hand.
        finalists: candidates that reach the second part.
        rounds: repetitions of the second part.
        iterations: calls in each repetition.
        report: called with each line to show.

    Returns:
        The entry, or None where no candidate works.
    """
    with _compilers() as pool:
        prepared = _prepare(tunable, problem, device, pool)
    return _measure(
        prepared,
        finalists=finalists,
        rounds=rounds,
        iterations=iterations,
        report=report,
    )


def _compilers() -> ThreadPoolExecutor:
    """Threads that leave cores to the one that measures."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2))


def _measure(
    prepared: _Prepared,
    *,
    finalists: int = 4,
    rounds: int = 6,
    iterations: int = 10,
    report: Callable[[str], None] = print,
) -> TunedEntry | None:
    """The part of `tune` that needs the GPU for itself."""
    tunable, baseline = prepared.tunable, prepared.baseline
    good = _working(prepared, report)
    if not good:
        return None

    def measure(fn: Callable[..., jax.Array]) -> list[float]:
        taken = tunable.time_us(fn, *prepared.args, iterations=iterations)
        time.sleep(tunable.IDLE_SHARE * sum(taken) * 1e-6)
        return taken

    first = {c: statistics.median(measure(fn)) for c, fn in good.items()}
    best = sorted(first, key=first.__getitem__)[:finalists]
    times: dict[Any, list[float]] = {None: [], **{c: [] for c in best}}
    order = list(times)
    shuffle = random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)
        for c in order:
            times[c] += measure(baseline if c is None else good[c])
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
    with _compilers() as pool:
        following = None
        for name, later in itertools.pairwise([None, *wanted, None]):
            # Lets go of the one before: at most two problems have operands.
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
            with _shared(fcntl.LOCK_EX):
                entry = _measure(prepared)
                if entry is not None:  # saved at once: a later failure loses nothing
                    save_table(path, options.op, {wanted[name].key: entry})
                    print(f"  wrote {path}", flush=True)


def _attempt(
    tunable: Tunable, problem: Any, device: DeviceSpec, pool: ThreadPoolExecutor
) -> _Prepared | str:
    """The prepared problem, or why there is none, which must not end the run."""
    try:
        with _shared(fcntl.LOCK_SH):
            return _prepare(tunable, problem, device, pool)
    except Unsupported as error:
        return str(error)
    except Exception as error:
        return _line(error)


if __name__ == "__main__":
    main()
