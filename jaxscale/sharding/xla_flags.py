"""Presets of XLA flags, each with its reason, set before jax starts.

XLA reads ``XLA_FLAGS`` once, when the first backend starts, and aborts at an unknown
flag. Here that is an exception, and flags that the user has set in the environment
override a preset.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from jaxscale.checks import check_choice


type XlaPreset = Literal["overlap", "host_kernels"]
"""The name of a set of flags."""

XLA_PRESETS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "overlap": MappingProxyType(
            {
                "--xla_gpu_enable_pipelined_all_gather=true": (
                    "in a loop over layers the parameters of the next layer are "
                    "gathered while this one computes (ZeRO-3)"
                ),
                "--xla_gpu_enable_pipelined_reduce_scatter=true": (
                    "the gradients of a layer are scattered while the next one computes"
                ),
                "--xla_gpu_experimental_parallel_collective_overlap_limit=16": (
                    "as many collectives as a layer has are under way at once: with "
                    "one, which is the default, the others have nothing beside them"
                ),
            }
        ),
        "host_kernels": MappingProxyType(
            {
                "--xla_gpu_shard_autotuning=false": (
                    "with one process a host, kernels that communicate name the GPUs "
                    "of their process, so that the programs differ, and XLA would wait "
                    "for ever for what the others tuned"
                ),
            }
        ),
    }
)
"""Flags of each `XlaPreset`, and why they are there."""

_PARSE = "from jaxlib.xla_client import CompileOptions; CompileOptions()"


def use_xla_flags(*presets: str) -> None:
    """Add the flags of presets to the environment variable ``XLA_FLAGS``.

    Call it before jax uses a device. A flag that the variable sets already keeps its
    value. All flags are then tried in another process, which takes half a second, so
    that a flag unknown to this jaxlib raises here instead of aborting the process
    later.

    Args:
        presets: Names of `XLA_PRESETS`; without any, nothing changes.

    Raises:
        ValueError: a preset is unknown, or this jaxlib rejects flags, which the message
            names.

    Example:
        >>> use_xla_flags("overlapp")
        Traceback (most recent call last):
        ...
        ValueError: XLA preset 'overlapp' is unknown; use one of ('overlap',
        'host_kernels')
    """
    for preset in presets:
        check_choice("XLA preset", preset, tuple(XLA_PRESETS))
    if not presets:
        return
    given = os.environ.get("XLA_FLAGS", "").split()
    names = {_name(flag) for flag in given}
    added = [f for p in presets for f in XLA_PRESETS[p] if _name(f) not in names]
    flags = [*given, *dict.fromkeys(added)]
    check_xla_flags(flags)
    os.environ["XLA_FLAGS"] = " ".join(flags)


def check_xla_flags(flags: Sequence[str]) -> None:
    """Raise if this jaxlib rejects one of `flags`, as in ``XLA_FLAGS``.

    Raises:
        ValueError: it rejects flags, which the message names.
    """
    refused = _refused(flags)
    if refused is None:
        return
    if not refused:  # XLA did not say which
        refused = [flag for flag in flags if _refused([flag]) is not None]
    raise ValueError(
        f"this jaxlib refuses the XLA flags {refused}: it does not know them, or not "
        "these values; correct XLA_FLAGS, or leave out the preset that holds them"
    )


def _refused(flags: Sequence[str]) -> list[str] | None:
    """The flags that a new process rejects; None if it accepts all."""
    child = subprocess.run(
        [sys.executable, "-c", _PARSE],
        env=os.environ | {"XLA_FLAGS": " ".join(flags)},
        capture_output=True,
        text=True,
    )
    if child.returncode == 0:
        return None
    if not re.search("XLA_FLAGS|Flag parsing failed", child.stderr):
        raise RuntimeError(f"jaxlib cannot be loaded:\n{child.stderr}")
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", child.stderr)
    return unknown[1].split() if unknown else []


def _name(flag: str) -> str:
    return flag.partition("=")[0]
