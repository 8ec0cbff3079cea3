"""Presets of XLA's flags: known to this jaxlib, and what is not is named."""

import os

import pytest

from jaxscale.sharding import XLA_PRESETS, use_xla_flags
from jaxscale.sharding.xla_flags import check_xla_flags


def test_presets_are_known_and_the_environment_wins(monkeypatch):
    kept = "--xla_gpu_experimental_parallel_collective_overlap_limit=2"
    monkeypatch.setenv("XLA_FLAGS", f"--xla_gpu_autotune_level=2 {kept}")
    use_xla_flags(*XLA_PRESETS)
    flags = os.environ["XLA_FLAGS"].split()
    limit = "--xla_gpu_experimental_parallel_collective_overlap_limit=16"
    every = [flag for preset in XLA_PRESETS.values() for flag in preset]
    assert limit in every
    every.remove(limit)
    assert flags == ["--xla_gpu_autotune_level=2", kept, *every]
    assert all(reason for preset in XLA_PRESETS.values() for reason in preset.values())


def test_what_this_jaxlib_refuses_is_named(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gone=1")
    with pytest.raises(ValueError, match=r"refuses the XLA flags \['--xla_gone=1'\]"):
        use_xla_flags("overlap")
    wrong = "--xla_gpu_enable_pipelined_all_gather=perhaps"
    with pytest.raises(ValueError, match=rf"flags \['{wrong}'\]: it does not know"):
        check_xla_flags(["--xla_gpu_autotune_level=0", wrong])
