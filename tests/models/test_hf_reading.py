"""Weights go from files to devices as they are, in few steps and in little memory."""

import dataclasses
import itertools
import os
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import save_file

from jaxscale.models import Decoder, load, preset, save
from jaxscale.models.hf import reading, tensors
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.names import TensorMap
from jaxscale.sharding import fsdp_tp, make_mesh


BLOCKS = 5
FIXTURES = "tests/fixtures/models/"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A model in fp32 with an odd vocabulary, which meshes pad."""
    path = tmp_path_factory.mktemp("llama")
    config = dataclasses.replace(
        preset("llama_tiny"),
        vocab_size=289,
        num_layers=BLOCKS,
        num_kv_heads=4,
        tie_embeddings=False,
    )
    save(Decoder(config, rngs=nnx.Rngs(0)), path)
    return path


def same(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.fixture
def small(monkeypatch):
    """Sizes at which a tiny model has many pieces and groups."""
    monkeypatch.setattr(reading, "_PIECE", 1000)
    monkeypatch.setattr(reading, "_GROUP", 20_000)
    monkeypatch.setattr(reading, "_AHEAD", 40_000)


@pytest.fixture
def ring(monkeypatch):
    """The memory that is used over and over, as for a GPU, poisoned; arrays of the CPU,
    which may be that memory, are copied."""
    original, put = reading._Memory, reading._put

    class Ring(original):
        def __init__(self, groups):
            super().__init__(groups)
            self._bytes = np.empty(self._end, np.uint8)

        def take(self, group):
            parts = super().take(group)
            for part in parts or ():
                part.view(np.uint8).fill(255)  # NaN
            return parts

    def copied(group, parts):
        return put(group, [part.copy() for part in parts])

    monkeypatch.setattr(reading, "_Memory", Ring)
    monkeypatch.setattr(reading, "_put", copied)


@pytest.mark.parametrize("split", [False, True])
def test_small_groups_in_a_ring_of_memory(directory, split, small, request):
    options = {}
    if split:
        mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
        options = {"mesh": mesh, "rules": fsdp_tp()}
    expected = load(directory, **options).for_inference()
    request.getfixturevalue("ring")
    found = load(directory, **options, for_inference=True)
    same(found, expected)
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)


@pytest.mark.parametrize("name", ["gpt2", "neox"])
def test_shared_tensors_in_a_ring_of_memory(name, small, ring):
    """Features of a parameter are apart in the tensor."""
    model: Any = load(FIXTURES + name)
    for entry in jax.tree.leaves(model):
        assert np.isfinite(np.asarray(entry, np.float32)).all()
    found = load(FIXTURES + name, for_inference=True)
    same(found, model.for_inference())


def test_the_ring_of_memory_holds_no_two_groups_at_a_place(monkeypatch, ring):
    limit, rng = 10_000, random.Random(0)
    monkeypatch.setattr(reading, "_AHEAD", limit)

    def shard(size):
        wanted = reading.Wanted(
            entry=TensorMap(name="w", parameters=("w",)),
            layer=None,
            shape=(size, 1),
            limits=(size, 1),
            columns=np.arange(1),
            dtype=jnp.dtype(jnp.bfloat16),
            place=SingleDeviceSharding(jax.devices()[0]),
        )
        return wanted.shards[0]

    shards = [shard(size) for size in (0, 1, 40, 333, 1500)]
    groups = [rng.choices(shards, k=rng.randint(1, 3)) for _ in range(300)]
    memory, held, waiting, most = reading._Memory(groups), [], list(groups), 0
    assert memory._bytes is not None
    begin = memory._bytes.ctypes.data
    while waiting or held:
        while waiting and (parts := memory.take(waiting[0])) is not None:
            group = waiting.pop(0)
            assert [list(part.shape) for part in parts] == [x.shape for x in group]
            held.append([(p.ctypes.data, p.nbytes) for p in parts if p.size])
        places = sorted(itertools.chain(*held))
        most = max(most, len(held))
        for (at, size), (after, _) in itertools.pairwise(places):
            assert at + size <= after
        if places:
            assert begin <= places[0][0] and sum(places[-1]) <= begin + limit
        memory.give_back()
        held.pop(0)
    assert most > 2


def test_the_host_neither_transposes_nor_converts(directory, monkeypatch):
    """What is read is contiguous in the file and in memory, and of the file's type."""
    reads, original = set(), Checkpoint.read

    def read(self, name, index, target):
        assert target.flags.c_contiguous and self.view(name)[index].flags.c_contiguous
        assert target.dtype == self.dtype(name)
        reads.add(name)
        original(self, name, index, target)

    monkeypatch.setattr(Checkpoint, "read", read)
    for serving in (True, False):
        reads.clear()
        load(directory, param_dtype=jnp.bfloat16, for_inference=serving)
        assert reads == {*Checkpoint(directory).names()}


def test_blocks_that_are_alike_are_one_program_and_one_transfer(directory, monkeypatch):
    traces, puts, original = [], [], reading._put

    def put(group, parts):
        puts.append({shard.wanted.layer for shard in group})
        return original(group, parts)

    def converter(conversions, made=tensors._converter):
        def convert(module):
            traces.append(len(conversions))
            return made(conversions)(module)

        return convert

    monkeypatch.setattr(reading, "_put", put)
    monkeypatch.setattr(tensors, "_converter", converter)
    load(directory, for_inference=True)
    assert puts == [{None}] + [{i} for i in range(BLOCKS)]
    assert sorted(traces) == [1, 9]  # the output projection, and a block


def test_a_file_that_becomes_shorter(directory, tmp_path):
    model = load(directory)
    save(model, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "model.safetensors", 5000)
    name = "lm_head.weight"
    target = np.empty(checkpoint.shape(name), checkpoint.dtype(name))
    with pytest.raises(ValueError, match="has become shorter while it was read"):
        checkpoint.read(name, (), target)


def test_a_reader_that_fails_ends_the_load(directory, monkeypatch, small):
    def read(self, name, index, target):
        raise OSError(5, f"no {name}")

    monkeypatch.setattr(Checkpoint, "read", read)
    with pytest.raises(OSError, match="no model"):
        load(directory)


def test_an_error_of_the_system_names_the_file(directory, monkeypatch):
    def preadv(descriptor, buffers, at):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match=r"Input/output error.*model\.safetensors"):
        load(directory)


def test_without_the_call_of_the_system_and_of_a_scalar(tmp_path, monkeypatch):
    arrays = {"a": np.array(3.5, np.float32), "b": np.arange(6.0, dtype=np.float32)}
    save_file(arrays, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = Checkpoint(tmp_path)
    for name in (*arrays, *arrays):
        target = np.full(arrays[name].shape, np.nan, np.float32)
        checkpoint.read(name, (), target)
        np.testing.assert_array_equal(target, arrays[name])
        if name == "b":
            monkeypatch.delattr(os, "preadv", raising=False)


def test_the_largest_stack_is_read_first(directory, monkeypatch):
    """It is beside what it is made of, when little else is on the device."""
    sizes = []

    def read(checkpoint, wanted):
        sizes.extend(int(np.prod(each.shape)) for each in wanted)
        return found(checkpoint, wanted)

    found = tensors.read_arrays
    monkeypatch.setattr(tensors, "read_arrays", read)
    load(directory)
    assert len(set(sizes)) > 3 and sizes == sorted(sizes, reverse=True)
