"""A start compiles while it reads weights, and says how far it is."""

import asyncio
import dataclasses
import gc
import sys
import threading

import httpx2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference import EngineConfig, SamplingParams
from jaxscale.inference.engine import program_table, runner
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.lora_modules import (
    describe_decoder,
    load_decoder,
    packed_together,
)
from jaxscale.inference.request import Request
from jaxscale.inference.server import ServerConfig, create_app, load
from jaxscale.inference.server.backend import Loading
from jaxscale.models import Decoder, Tokenizer, preset, save
from jaxscale.sharding import REPLICATED, fsdp_tp, make_mesh
from tests.inference.server.conftest import WAIT, Harness


SIZES = EngineConfig(
    num_slots=2, buckets=(2,), prefill_tokens=(16,), page_size=8, max_len=64, steps=1
)
FOUR = dataclasses.replace(preset("llama_tiny"), vocab_size=289, num_kv_heads=4)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    tokenizer = Tokenizer.train(["to be or not to be"], 280)
    save(Decoder(FOUR, rngs=nnx.Rngs(0)), path, tokenizer=tokenizer)
    return path


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [None, jnp.bfloat16])
def test_a_model_is_described_as_it_is_read(directory, split, dtype):
    where = {"mesh": None, "rules": REPLICATED}
    if split:  # a table of 289 tokens is padded
        where = {"mesh": make_mesh({"tensor": 4}, jax.devices()[:4])}
        where["rules"] = fsdp_tp()
    options = {**where, "lora_modules": None, "dtype": dtype}
    described = describe_decoder(directory, **options)
    made = load_decoder(directory, **options)
    assert jax.tree.structure(described) == jax.tree.structure(made)
    for shape, leaf in zip(*map(jax.tree.leaves, (described, made)), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)
        assert shape.sharding == leaf.sharding
    assert describe_decoder(directory, **options, quantization="int8") is None


def test_parameters_of_several_types_are_described(tmp_path):
    model = Decoder(FOUR, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    model.norm.scale.set_value(model.norm.scale[...].astype(jnp.float32))
    save(model, tmp_path)
    options = {"mesh": None, "rules": REPLICATED, "lora_modules": None}
    described = describe_decoder(tmp_path, **options)
    made = load_decoder(tmp_path, **options)
    found = [leaf.dtype for leaf in jax.tree.leaves(described)]
    assert found == [leaf.dtype for leaf in jax.tree.leaves(made)]
    assert len({*found}) == 2


def test_a_model_is_packed_together(directory):
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    model = load_decoder(directory, mesh=mesh, rules=fsdp_tp(), lora_modules=None)
    before = [(np.array(leaf), leaf.sharding) for leaf in jax.tree.leaves(model)]
    packed = packed_together(model)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(model))
    for (value, where), leaf in zip(before, jax.tree.leaves(packed), strict=True):
        np.testing.assert_array_equal(leaf, value)
        assert leaf.sharding == where


def answer(model):
    """Greedy tokens after a prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    request = Request(prompt=model.encode("to be"), params=params)

    async def run():
        return [t async for o in model.backend.generate(request) for t in o.tokens]

    try:
        return asyncio.run(run())
    finally:
        model.backend.close()


def test_programs_do_not_wait_for_weights(directory, monkeypatch):
    """Weights come once all first programs are compiled, and are those that count."""
    compiled, told, read = threading.Event(), [], load.load_decoder
    interval = sys.getswitchinterval()

    def late(*args, **kwargs):
        assert compiled.wait(WAIT)
        assert sys.getswitchinterval() <= interval / 5  # beside who traces
        return read(*args, **kwargs)

    def progress(count, of, there):
        told.append((count, of, there))
        if count == of:
            compiled.set()

    table, may_trace, traced_before = program_table.ProgramTable, [], []
    compile_all, reserve = table.compile, runner.reserve_small

    def compile_table(self, *args, weights, **kwargs):
        may_trace.append(weights)
        return compile_all(self, *args, weights=weights, **kwargs)

    def reserve_small(devices):
        traced_before.append(may_trace[0].is_set())
        return reserve(devices)

    monkeypatch.setattr(table, "compile", compile_table)
    monkeypatch.setattr(runner, "reserve_small", reserve_small)
    monkeypatch.setattr(load, "load_decoder", late)
    found = answer(load.served(directory, engine=SIZES, progress=progress))
    assert traced_before == [False]  # what is behind waits for all of the start
    total = told[0][1]
    assert told[0] == (0, total, False) and (total, total, False) in told
    assert told[-1] == (total, total, True)
    assert sys.getswitchinterval() == interval
    tokens = load.Tokenizer.from_file(directory).encode("to be")
    model = read(directory, mesh=None, rules=REPLICATED, lora_modules=None)
    for _ in found:
        logits = model(jnp.array([tokens]))[0, -1]
        tokens.append(int(logits[:289].argmax()))
    assert found == tokens[-6:]


def test_weights_that_cannot_be_read(directory, monkeypatch):
    """They end the start, as those that are not what was described."""
    described = load.describe_decoder

    def other(*args, **kwargs):
        return described(*args, **{**kwargs, "dtype": jnp.bfloat16})

    with monkeypatch.context() as patch:
        patch.setattr(load, "describe_decoder", other)
        with pytest.raises(ValueError, match="of another model than described"):
            load.served(directory, engine=SIZES)

    def broken(*args, **kwargs):
        raise OSError("the disk is gone")

    monkeypatch.setattr(load, "load_decoder", broken)
    with pytest.raises(OSError, match="the disk is gone"):
        load.served(directory, engine=SIZES)


def test_a_start_that_fails_late_leaves_no_thread(directory, monkeypatch):
    """What is traced behind does not wait for a start that has failed."""

    def fail(devices):
        raise MemoryError("no room")

    before = {*threading.enumerate()}
    monkeypatch.setattr(runner, "reserve_small", fail)
    with pytest.raises(MemoryError, match="no room"):
        load.served(directory, engine=SIZES)
    gc.collect()  # which ends threads of pools that are not used any more
    left = {*threading.enumerate()} - before
    for thread in left:
        thread.join(WAIT)
    assert not [thread for thread in left if thread.is_alive()]


def test_pages_are_there_before_the_weights(directory, monkeypatch):
    """They are one piece of memory, which is most of a GPU."""
    order, read, reset = [], load.load_decoder, Runner.reset

    def loading(*args, **kwargs):
        order.append("weights")
        return read(*args, **kwargs)

    def resetting(self):
        reset(self)
        order.append("pages")

    monkeypatch.setattr(load, "load_decoder", loading)
    monkeypatch.setattr(Runner, "reset", resetting)
    load.served(directory, engine=SIZES).backend.close()
    assert order == ["pages", "weights"]


def test_ready_says_how_far_a_start_is():
    seen, go_on = [], threading.Event()

    def start(progress):
        progress(1, 5, False)
        assert go_on.wait(WAIT)
        raise ValueError("there are no weights")

    async def main():
        harness = Harness()
        harness.app = create_app(ServerConfig(), Loading(start))
        async with harness.app.router.lifespan_context(harness.app):
            transport = httpx2.ASGITransport(app=harness.app)
            async with httpx2.AsyncClient(
                transport=transport, base_url="http://test"
            ) as client:
                while not seen or len(seen[-1].json()) == 1:
                    seen.append(await client.get("/ready"))
                    await asyncio.sleep(0)
                go_on.set()

    asyncio.run(main())
    state = {"compiled": 1, "programs": 5, "weights": "loading"}
    assert seen[-1].status_code == 503
    assert seen[-1].json() == {"status": "loading", **state}
