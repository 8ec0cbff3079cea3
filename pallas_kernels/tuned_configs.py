"""Kernel configs: where they come from.

A config is looked up in this order: the one given by the caller, that of an enclosing
``with override(op, config)``, the table ``tuned/<device>.json``, a heuristic. Tables
are read from the package, or from the directory in ``PALLAS_KERNELS_TUNED_DIR``;
`pallas_kernels.tuning` writes them.
"""

import contextlib
import dataclasses
import functools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array

from pallas_kernels.cost_model import NOISE
from pallas_kernels.mosaic import DeviceSpec, check_hopper
from pallas_kernels.partition import check_local


# Part of the cache key of `jax.jit`; hence hashable.
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
    """Uses `config` for every call of an op inside the block without a config of its
    own.

    Functions that `jax.jit` has compiled outside of the block are retraced in it.

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
        config: the caller's config, if any.
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


def hopper_config[C](
    op_name: str,
    problem: Any,
    device: DeviceSpec | None,
    config_type: type[C],
    *,
    arrays: Sequence[Array | None],
    check: Callable[[Any], None],
    config: C | None,
    heuristic: Callable[[Any, DeviceSpec], C],
) -> tuple[DeviceSpec, C]:
    """Finds the device and the config of an op's Hopper kernel for a call.

    The arguments are those of `lookup`, and also all operands, the problem with its
    `key`, and `check`, which raises `Unsupported` if the kernel does not support the
    problem.

    Raises:
        Unsupported: there is no Hopper GPU, the compiler may split the arrays, or the
            kernel does not support the problem.
        ValueError: as `lookup`.
    """
    device = check_hopper(device, op_name)
    check_local(op_name, *arrays)
    check(problem)
    config = lookup(
        op_name,
        problem.key,
        device,
        config_type,
        config=config,
        heuristic=functools.partial(heuristic, problem, device),
    )
    return device, config


@runtime_checkable
class Problem(Protocol):
    """Sizes of a call of an op, by which an implementation is chosen."""

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
    """Say why an op's kernel is expected to be slower than XLA, or None.

    The table of tuned problems decides: a kernel may be 2% slower, the noise of
    measurements. For problems that are not in the table the cost model decides. A
    config, given or by `override`, asks for the kernel.

    Returns:
        A reason for `pallas_kernels.dispatch.dispatch` to skip the kernel.

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
    """The table entry of a problem on a device, or None.

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
