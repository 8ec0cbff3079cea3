"""Models whose programs are compiled once for all tests of the engine."""

import asyncio
import contextlib
import dataclasses
import functools
import threading
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.tree_util import register_dataclass

from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.page_forecast import AnswerLengths
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.inference.request import Request, SamplingParams
from jaxscale.models import Decoder, preset
from jaxscale.models.adapters import adapter_of, with_adapters
from jaxscale.nn import Whole, merge_adapters
from jaxscale.sharding import create, fsdp_tp, make_mesh


SIZES = SchedulerConfig(
    num_pages=64,
    vocab_size=288,
    max_len=64,
    page_size=4,
    num_slots=4,
    prefill_tokens=16,
    prefill_requests=3,
    prefill_keys=192,
    split=8,
    steps=2,
)


LLAMA = dataclasses.replace(preset("llama_tiny"), vocab_size=288)


@pytest.fixture
def short_answers(monkeypatch):
    """Answers are expected to end at once, so that those who run are preempted."""
    monkeypatch.setattr(AnswerLengths, "left", lambda *_: 0.0)


@typing.no_type_check
@register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized(Whole):
    """Whole rows whose keys and values are rounded to fp8."""

    scales: jax.Array = dataclasses.field(
        # Forms that carry nothing never learn which layer they are at.
        metadata={"axes": (None, None, "act_kv_heads"), "carried": True}
    )
    layer: jax.Array | int = dataclasses.field(default=0, metadata={"axes": ()})

    def at(self, layer, variant):
        return dataclasses.replace(super().at(layer, variant), layer=jnp.int32(layer))

    def attend(self, q, k, v, config, implementation=None):
        k, v = (
            jnp.clip(x / scale, -448, 448).astype(jnp.float8_e4m3fn).astype(x.dtype)
            * scale
            for x, scale in zip((k, v), self.scales[self.layer, ..., None], strict=True)
        )
        return super().attend(q, k, v, config, implementation)


def forward(model, tokens, scales=None):
    """Logits of whole rows, with keys and values in fp8 if there are scales."""
    if scales is None:
        return model(tokens)
    at = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    state = Quantized(positions=at, scales=jnp.asarray(scales))
    return model.unembed(model.run(tokens, state)[0])


GREEDY = ("update", "move", "decode", "prefill", "mixed")


class Greedy(Runner):
    """Compiles what greedy requests need, and no more."""

    def programs(self):
        for key, *rest in super().programs():
            if key[0].removesuffix("_lora") in GREEDY and key[-1] is not True:
                yield key, *rest


class Served:
    """A decoder and its compiled programs."""

    def __init__(
        self,
        config,
        *,
        mesh=None,
        sizes=SIZES,
        buckets=(4,),
        change=None,
        scales=None,
        kind=Runner,
        adapt=None,
        mixed=(),
    ):
        # It computes, which a conftest.py must not do before XLA's flags are set.
        from tests.models.test_serving import perturbed

        def make(**options):
            model = perturbed(Decoder(config, rngs=nnx.Rngs(0), **options))
            return model if change is None else change(model)

        self.model = model = make()
        if mesh is not None:
            model = create(lambda: make(rules=fsdp_tp()), mesh, fsdp_tp())
        # Whole models by the name of their adapter, with weights that are merged.
        self.whole = {None: self.model}
        if adapt is not None:
            trained = adapt(self.model)
            self.whole |= {name: merge_adapters(x) for name, x in trained.items()}
            factors = {name: adapter_of(x) for name, x in trained.items()}
            model = with_adapters(model, factors)
            sizes = dataclasses.replace(sizes, adapters=tuple(trained))
        self.sizes = sizes
        self.runner = kind(
            model,
            sizes,
            prefill_tokens=(16,),
            buckets=buckets,
            kv_scales=scales,
            mixed=mixed,
        )
        self.runner.compile()
        self._forward = jax.jit(functools.partial(forward, scales=scales))

    def run(self, **options):
        """A run with a clean state."""
        self.runner.reset()
        return Run(self, **options)

    def logits(self, tokens, lora=None):
        """Of the next token after each of `tokens`, by the whole model, fp64."""
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = self._forward(self.whole[lora], padded)[0, : len(tokens)]
        return np.asarray(logits).astype(np.float64)

    def logprobs(self, tokens, lora=None):
        """Of the next token after each of `tokens`, by the whole model."""
        logits = self.logits(tokens, lora)
        return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


class Run:
    """An engine that the test steps itself, and what its clients have been told."""

    def __init__(self, served, *, sizes=None, poison=False, **options):
        self.served, self.told = served, {}
        runner = served.runner
        if poison:
            kv = jnp.full_like(runner.pages.kv, jnp.nan)
            runner.pages = runner.pages._replace(kv=kv)
        self.engine = Engine(
            runner, Scheduler(sizes or served.sizes, seed=0), **options
        )
        self.scheduler = self.engine.scheduler

    def add(
        self,
        name,
        prompt,
        *,
        client="",
        deadline=None,
        priority=0,
        lora=None,
        **params,
    ):
        params = SamplingParams(**({"temperature": 0.0, "logprobs": 0} | params))
        request = Request(
            prompt=prompt,
            id=name,
            params=params,
            client=client,
            deadline=deadline,
            priority=priority,
            lora=lora,
        )
        told = self.told[name] = []
        admitted = self.engine.admit(request, told.append)
        self.engine.step()
        admitted.result(timeout=0)

    def finish(self, limit=400):
        """Step until nothing is left."""
        while not self.engine.idle:
            self.engine.step()
            limit -= 1
            assert limit, "the engine goes on for ever"
        pool = self.scheduler.pool
        assert pool.num_held == 0
        assert pool.num_free + pool.num_cached == pool.num_pages

    def result(self, name, index=0):
        """Tokens, log-probabilities and why it ended."""
        outputs = [o for news in self.told[name] for o in news if o.index == index]
        assert [o.finish is not None for o in outputs] == [False] * (
            len(outputs) - 1
        ) + [True]
        tokens = [t for o in outputs for t in o.tokens]
        logprobs = [x.logprob for o in outputs for x in o.logprobs]
        return tokens, logprobs, outputs[-1].finish

    def check(self, name, prompt, *, lora=None, **options):
        """Greedy tokens and their log-probabilities are those of the whole model."""
        tokens, logprobs, _ = self.result(name, **options)
        assert tokens and len(tokens) == len(logprobs)
        whole = self.served.logprobs((*prompt, *tokens), lora)
        for i, (token, logprob) in enumerate(zip(tokens, logprobs, strict=True)):
            expected = whole[len(prompt) - 1 + i]
            assert expected[token] > expected.max() - 1e-4
            np.testing.assert_allclose(logprob, expected[token], atol=1e-4)


@pytest.fixture(scope="session")
def llama():
    return Served(LLAMA)


@pytest.fixture(scope="session")
def fp8():
    """Keys and values in fp8, each layer and head with a scale of its own."""
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    scales = np.random.default_rng(0).uniform(0.003, 0.03, (2, 2, 2))
    return Served(LLAMA, mesh=mesh, scales=scales.astype(np.float32))


@pytest.fixture(scope="session")
def gpt2():
    return Served(
        dataclasses.replace(preset("gpt2_tiny"), vocab_size=288, max_seq_len=64)
    )


@pytest.fixture(scope="session")
def two_devices():
    """Query heads are split, and all of them read one key/value head."""
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    return Served(dataclasses.replace(LLAMA, num_kv_heads=1), mesh=mesh)


@pytest.fixture(scope="session")
def four_devices():
    """Each has a query head; two of them read the same key/value head."""
    mesh = make_mesh({"tensor": 4}, jax.devices()[:4])
    return Served(LLAMA, mesh=mesh)


@contextlib.contextmanager
def in_step(engine):
    """Have an engine go on only as the event loop does, which a busy host may stop."""
    loop = asyncio.get_running_loop()

    def wait():
        done = threading.Event()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(loop.call_later, 0.01, done.set)
        while not (done.wait(0.1) or loop.is_closed()):
            pass

    engine.after_tick.append(wait)
    yield
    engine.after_tick.remove(wait)
