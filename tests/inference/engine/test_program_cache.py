"""Compiled programs are found again, and only where they are the same."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference.engine.program_cache import ProgramCache
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.models import Decoder
from jaxscale.models.families.llama import llama_tiny


SIZES = SchedulerConfig(
    num_pages=4,
    vocab_size=256,
    max_len=32,
    page_size=16,
    num_slots=2,
    prefill_tokens=16,
    split=16,
    prefill_requests=2,
    steps=1,
)


@pytest.fixture
def cache(tmp_path):
    return ProgramCache(tmp_path / "programs", jax.devices()[:1])


def found(cache, traced, placement=""):
    return cache.compile(traced, placement)[1]


def add(amount, donated=False):
    return jax.jit(lambda x: x + amount, donate_argnums=(0,) if donated else ())


def test_a_program_is_found_by_what_it_does(cache):
    x = np.arange(3.0, dtype=np.float32)
    assert not found(cache, add(1).trace(x))
    program, known = cache.compile(add(1).trace(x))
    assert known
    np.testing.assert_array_equal(program(x), x + 1)
    table = jnp.arange(3.0)
    others = [
        (add(2).trace(x), ""),
        (add(1).trace(x[:2]), ""),
        (add(1, donated=True).trace(x), ""),
        (add(1).trace(x), "elsewhere"),
        (add(table).trace(x), ""),
        (add(table + 1).trace(x), ""),
        (jax.jit(lambda x: add(table)(x) + 1).trace(x), ""),
        (jax.jit(lambda x: add(table + 1)(x) + 1).trace(x), ""),
    ]
    assert [found(cache, *other) for other in others] == [False] * len(others)


def test_settings_of_jax_are_part_of_the_name(cache, monkeypatch):
    from jaxscale.inference.engine import program_cache

    traced = add(1).trace(np.float32(1))
    first = cache.name(traced)
    with jax.debug_nans(True):
        program_cache._surroundings.cache_clear()
        second = cache.name(traced)
    program_cache._surroundings.cache_clear()
    assert first != second
    assert first == cache.name(traced)


@pytest.mark.parametrize("damage", [lambda b: b"", lambda b: b[:-100], lambda b: b"x"])
def test_a_damaged_file_is_said_and_replaced(cache, damage, capfd):
    traced = add(1).trace(np.float32(1))
    cache.compile(traced)
    (path,) = cache.folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    program, known = cache.compile(traced)
    assert not known and program(np.float32(1)) == 2
    assert f"{path} cannot be loaded" in capfd.readouterr().err
    assert found(cache, traced)


def test_a_folder_that_others_write_to_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(ValueError, match="only you may write to"):
        ProgramCache(tmp_path, jax.devices()[:1])
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot keep programs"):
        ProgramCache(tmp_path / "file", jax.devices()[:1])


def test_an_engine_finds_all_of_its_programs_and_no_others(cache, monkeypatch):
    compiled = []
    load = ProgramCache.load

    def counting(self, name):
        program = load(self, name)
        compiled.append(program is not None)
        return program

    monkeypatch.setattr(ProgramCache, "load", counting)

    def drawn(config):
        model = Decoder(config, rngs=nnx.Rngs(0)).for_inference()
        runner = Runner(model, SIZES, prefill_tokens=[16])
        compiled.clear()
        runner.compile(cache=cache)
        out = runner.decode(bucket=2, steps=1)
        return np.asarray(out), list(compiled)

    config = llama_tiny()
    first, known = drawn(config)
    assert not any(known)
    again, known = drawn(config)
    assert all(known)
    np.testing.assert_array_equal(first, again)
    # The shapes are the same; what is computed from them is not.
    _, known = drawn(dataclasses.replace(config, rope_theta=2.0))
    assert sum(known) == 3  # update, count and sample know nothing of rotations
