"""A cache of compiled programs, so that a server starts without compiling.

JAX has a compilation cache (``jax_compilation_cache_dir``), but its key is the lowered
program, and lowering the kernels of a large model takes Python seconds per program.
Here the key is the traced program, which is cheap.
"""

import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.experimental import serialize_executable
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import jaxscale
import pallas_kernels
from jaxscale.checks import private_folder
from pallas_kernels.mosaic import keep_modules


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PACKAGES = ("jaxlib", "jax-cuda12-pjrt", "jax-cuda13-pjrt", "flax")


class ProgramCache:
    """A directory of compiled programs, keyed by their traces.

    The name of a file is a hash of the traced program, the sharding of its arguments,
    the code of this library, the versions and settings of JAX, and the devices. Loading
    a program can run any code: only the user may write to the directory. Old files can
    be deleted at any time.

    Example:
        >>> import tempfile
        >>> traced = jax.jit(lambda x: x + 1).trace(np.float32(1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = ProgramCache(folder, jax.devices()[:1])
        ...     first, found = cache.compile(traced)
        ...     again, found_again = cache.compile(traced)
        >>> found, found_again, float(again(np.float32(1)))
        (False, True, 2.0)
    """

    def __init__(self, folder: str | Path, devices: Sequence[Any]) -> None:
        """Create the directory.

        Raises:
            ValueError: the directory cannot be created, or others may write to it.
        """
        self.folder = private_folder(Path(folder).expanduser())
        self.devices = list(devices)

    def compile(
        self, traced: jax.stages.Traced, placement: str = ""
    ) -> tuple[jax.stages.Compiled, bool]:
        """The compiled program, and whether it was cached.

        Args:
            traced: The result of ``jax.jit(...).trace``.
            placement: Shardings of arguments and results, which are not in the trace.
        """
        name = self.name(traced, placement)
        if (program := self.load(name)) is not None:
            return program, True
        with keep_modules():
            lowered = traced.lower()
        program = lowered.compile()
        self.store(name, program)
        return program, False

    def name(self, traced: jax.stages.Traced, placement: str = "") -> str:
        """A unique file name of the program; arguments as for `compile`."""
        jaxpr = traced.jaxpr
        digest = hashlib.sha256(_surroundings().encode())
        parts = (
            placement,
            [(d.platform, d.device_kind, d.id, d.process_index) for d in self.devices],
            jax.process_index(),
            jax.tree.map(lambda info: info.donated, traced.args_info),
            _ADDRESS.sub("", str(jaxpr)),
        )
        digest.update(repr(parts).encode())
        for constant in _constants(jaxpr, set()):
            if not isinstance(constant, Tracer):  # references of a kernel are
                digest.update(np.asarray(constant).tobytes())
        return f"{digest.hexdigest()[:40]}.program"

    def __contains__(self, name: str) -> bool:
        """Whether there is a file of this name."""
        return (self.folder / name).is_file()

    def load(self, name: str) -> jax.stages.Compiled | None:
        """The program of this name, if it is there."""
        path = self.folder / name
        try:
            return serialize_executable.deserialize_and_load(
                *pickle.loads(path.read_bytes()),
                backend=self.devices[0].client,
                execution_devices=self.devices,
            )
        except FileNotFoundError:
            return None
        except Exception as e:  # any error of a damaged file
            print(
                f"jaxscale: {path} cannot be loaded and is compiled anew: {e!r}",
                file=sys.stderr,
            )
            return None

    def store(self, name: str, program: jax.stages.Compiled) -> None:
        """Keep a compiled program."""
        path = self.folder / name
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            partial.write_bytes(pickle.dumps(serialize_executable.serialize(program)))
            partial.replace(path)
        except OSError as e:  # the program is usable anyway
            print(f"jaxscale: {path} cannot be written: {e}", file=sys.stderr)
            partial.unlink(missing_ok=True)


def _constants(jaxpr: ClosedJaxpr, seen: set[int]) -> Iterator[Any]:
    """The constant arrays of a trace, whose text has only their shapes."""
    if id(jaxpr) in seen:  # shared by many layers
        return
    seen.add(id(jaxpr))
    yield from jaxpr.consts
    todo = [jaxpr.jaxpr]
    while todo:
        for equation in todo.pop().eqns:
            yield from (v.val for v in equation.invars if isinstance(v, Literal))
            inner = jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr),
            )
            for value in inner:
                if isinstance(value, ClosedJaxpr):
                    yield from _constants(value, seen)
                elif isinstance(value, Jaxpr):
                    todo.append(value)
                elif isinstance(value, np.ndarray):
                    yield value


@functools.cache
def _surroundings() -> str:
    """Other dependencies of a compiled program: code, versions, settings."""
    code = hashlib.sha256()
    for package in (jaxscale, pallas_kernels):
        for root in package.__path__:
            for path in sorted(Path(root).rglob("*")):
                if path.suffix in (".py", ".json", ".toml"):
                    code.update(path.read_bytes())
    client = jax.devices()[0].client
    versions = [jax.__version__, client.platform_version]
    installed = {d.name: d.version for d in importlib.metadata.distributions()}
    versions += [f"{name} {installed.get(name)}" for name in _PACKAGES]
    settings = sorted(
        (name, _ADDRESS.sub("", repr(value)))
        for name, value in jax.config.values.items()
    )
    processor = _processor() if client.platform == "cpu" else ""
    flags = os.environ.get("XLA_FLAGS", "")
    return repr((code.hexdigest(), versions, settings, processor, flags))


def _processor() -> str:
    """The CPU features of this machine."""
    found = Path("/proc/cpuinfo")
    lines = found.read_text().splitlines() if found.is_file() else []
    flags = next((line for line in lines if line.startswith("flags")), "")
    return f"{platform.machine()} {flags}"
