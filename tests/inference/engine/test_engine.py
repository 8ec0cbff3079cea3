"""The engine against the whole model, and its requests against each other."""

import asyncio
import contextlib
import queue
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.inference import Guide, InvalidRequest, Output, Request, SamplingParams
from jaxscale.inference.engine import async_engine
from jaxscale.inference.engine.async_engine import AsyncEngine
from jaxscale.inference.engine.engine import Engine
from jaxscale.inference.engine.scheduling.scheduler import Scheduler
from jaxscale.inference.grammar import GrammarCompiler
from jaxscale.inference.output import joined
from jaxscale.inference.request import EngineDead
from jaxscale.models import Tokenizer
from jaxscale.sharding import make_mesh
from tests.inference.conftest import LLAMA, SIZES, Greedy, Served, in_step
from tests.tiers import exhaustive


RNG = np.random.default_rng(0)


def prompt(length):
    return RNG.integers(0, 256, length).tolist()


PROMPTS = {"short": prompt(3), "page": prompt(8), "long": prompt(37), "one": prompt(1)}


@pytest.mark.parametrize(
    "name", ["llama", "fp8", "four_devices", *exhaustive("gpt2", "two_devices")]
)
def test_tokens_are_those_of_the_whole_model(name, request):
    """Prompts in chunks and together, in pages that hold NaN until they are written."""
    run = request.getfixturevalue(name).run(poison=True)
    for each, tokens in PROMPTS.items():
        run.add(each, tokens, max_tokens=9)
    run.finish()
    for each, tokens in PROMPTS.items():
        run.check(each, tokens)
        assert run.result(each)[2] == "length"
        assert len(run.result(each)[0]) == 9
    counts = run.scheduler.counts
    assert counts.finished == counts.received == len(PROMPTS)


@pytest.mark.parametrize("devices", [1, *exhaustive(2)])
def test_prompts_and_decoding_in_one_pass(devices):
    """A mixed batch gives everyone the tokens of the whole model."""
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2]) if devices == 2 else None
    served = Served(LLAMA, mesh=mesh, kind=Greedy, mixed=((16, 4),))
    run, keys = served.run(poison=True), []
    served.runner.on_dispatch = lambda key, inputs: keys.append(key[0])
    # Of one token, of several chunks, that end at once, and that share pages.
    lengths = {"before": 30, "ends": 1, "long": 9, "again": 5, "short": 4}
    names = ("page", "short", "long", "long", "one")
    prompts = {name: PROMPTS[p] for name, p in zip(lengths, names, strict=True)}
    for name, tokens in prompts.items():
        run.add(name, tokens, max_tokens=lengths[name])
    run.finish()
    assert keys.count("mixed") > 3 and keys.count("prefill") == 1
    for name, tokens in prompts.items():
        run.check(name, tokens)
        assert len(run.result(name)[0]) == lengths[name]


SETTINGS = {
    "greedy": {},
    "warm": {"temperature": 0.8, "seed": 5},
    "filtered": {"temperature": 1.2, "seed": 6, "top_p": 0.8, "top_k": 40},
    "penalized": {"repetition_penalty": 1.5, "frequency_penalty": 0.3},
}


@pytest.fixture(scope="module")
def alone(llama):
    """Each request by itself."""
    results = {}
    for name, settings in SETTINGS.items():
        run = llama.run()
        run.add(name, PROMPTS["long"], max_tokens=12, **settings)
        run.finish()
        results[name] = run.result(name)
    return results


@pytest.mark.parametrize("name", SETTINGS)
def test_neighbors_change_nothing(llama, alone, name):
    """Bit for bit, whoever joins, leaves, is aborted, or shares the prompt."""
    run = llama.run(poison=True)
    run.add("before", PROMPTS["page"], max_tokens=30, temperature=1.0, seed=1)
    run.add("aborted", prompt(20), max_tokens=30)
    run.add(name, PROMPTS["long"], max_tokens=12, **SETTINGS[name])
    for _ in range(4):
        run.engine.step()
    run.engine.abort("aborted")
    run.add("sharing", PROMPTS["long"], max_tokens=3, top_k=3, temperature=1.0)
    run.add("last", prompt(5), max_tokens=2, presence_penalty=1.0)
    run.finish()
    assert run.result(name) == alone[name]
    assert run.result("aborted")[2] == "aborted"
    # Once more, with the pages of the prompt found in the cache.
    run.add("again", PROMPTS["long"], max_tokens=12, **SETTINGS[name])
    run.finish()
    assert run.told["again"][0][0].cached_tokens == 36
    assert run.result("again") == alone[name]


def test_fp8_depends_neither_on_chunks_nor_on_the_prefix_cache(fp8):
    """A prompt attends to itself as the pages hold it."""
    results = []
    for neighbor in (None, "before", "same"):
        run = fp8.run(poison=True)
        if neighbor is not None:
            shared = PROMPTS["long"] if neighbor == "same" else PROMPTS["page"]
            run.add(neighbor, shared, max_tokens=20)
            run.engine.step()
        run.add("a", PROMPTS["long"], max_tokens=12)
        run.finish()
        results.append(run.result("a"))
        run.add("again", PROMPTS["long"], max_tokens=12)
        run.finish()
        assert run.told["again"][0][0].cached_tokens == 36
        results.append(run.result("again"))
    assert results == results[:1] * 6
    assert fp8.runner.pages.kv.dtype == jnp.float8_e4m3fn
    assert fp8.runner.pages.scales.addressable_shards[0].data.shape[3] == 1


def test_samples_of_one_request(llama):
    """They share the pages of the prompt, and each is what its seed says."""
    run = llama.run()
    run.add("n", PROMPTS["page"], n=3, seed=9, temperature=1.0, max_tokens=6)
    run.finish()
    found = [run.result("n", index=i)[0] for i in range(3)]
    assert len({tuple(tokens) for tokens in found}) == 3
    again = llama.run()
    again.add("n", PROMPTS["page"], n=2, seed=9, temperature=1.0, max_tokens=6)
    again.finish()
    assert [again.result("n", index=i)[0] for i in range(2)] == found[:2]


def test_the_ends_of_the_range(llama):
    run = llama.run()
    whole = prompt(63)
    run.add("full", whole, max_tokens=1)
    run.add("most", whole)  # as many as there is room for
    run.add("nothing", PROMPTS["short"], max_tokens=0)
    run.add("single", PROMPTS["short"], max_tokens=1)
    with pytest.raises(InvalidRequest, match="more than the 64"):
        run.add("over", prompt(64), max_tokens=1)
    run.finish()
    run.check("full", whole)
    assert run.result("full") == run.result("most")
    assert run.result("nothing") == ([], [], "length")
    run.check("single", PROMPTS["short"])
    assert len(run.result("single")[0]) == 1


def test_stop_tokens(llama):
    run = llama.run()
    run.add("free", PROMPTS["short"], max_tokens=12)
    run.finish()
    tokens = run.result("free")[0]
    end = tokens[4]
    first = tokens.index(end)
    many = [t for t in range(256) if t not in tokens][:20]
    run.add("stopped", PROMPTS["short"], max_tokens=12, stop_token_ids=[end])
    # More than a row has room for.
    run.add("many", PROMPTS["short"], max_tokens=12, stop_token_ids=[*many, end])
    run.finish()
    for name in ("stopped", "many"):
        assert run.result(name)[0] == tokens[: first + 1]
        assert run.result(name)[2] == "stop"
        assert run.told[name][-1][0].stop == end
    # Before so many tokens none is drawn that stops.
    for name, stops in (("early", [end]), ("early many", [*range(100), end])):
        run.add(name, PROMPTS["short"], max_tokens=12, min_tokens=8,
                stop_token_ids=stops)  # fmt: skip
        run.finish()
        assert not set(run.result(name)[0][:8]) & set(stops)
    # But then at once, though a token is still on its way when that is decided.
    for name, stops in (("then", [end]), ("then many", [*many, end])):
        run.add(name, PROMPTS["short"], max_tokens=12, min_tokens=first,
                stop_token_ids=stops)  # fmt: skip
        run.finish()
        assert first and run.result(name)[0] == tokens[: first + 1]


def test_penalties_count_prompt_and_continuation(llama):
    settings = {"repetition_penalty": 1.7, "presence_penalty": 0.5}
    run = llama.run()
    run.add("a", PROMPTS["page"], max_tokens=10, frequency_penalty=0.9, **settings)
    run.finish()
    sequence, drawn = list(PROMPTS["page"]), []
    for token in run.result("a")[0]:
        x = llama.logits(sequence)[-1]
        for seen in set(sequence):
            x[seen] = x[seen] / 1.7 if x[seen] > 0 else x[seen] * 1.7
        for seen in drawn:
            x[seen] -= 0.9
        for seen in set(drawn):
            x[seen] -= 0.5
        assert x[token] > x.max() - 1e-4
        sequence.append(token)
        drawn.append(token)


def test_log_probabilities(llama):
    """Of drawn tokens and of a prompt that takes several chunks, with the likeliest."""
    run = llama.run()
    run.add("beside", PROMPTS["page"], max_tokens=20)
    run.add("a", PROMPTS["long"], max_tokens=4, logprobs=5, prompt_logprobs=3)
    run.add("score", PROMPTS["long"], max_tokens=0, prompt_logprobs=0)
    run.finish()
    outputs = [o for news in run.told["a"] for o in news]
    (scores,) = [o.prompt_logprobs for o in outputs if o.prompt_logprobs]
    tokens = run.result("a")[0]
    whole = llama.logprobs((*PROMPTS["long"], *tokens))
    assert scores[0] is None and len(scores) == 37
    drawn = [x for o in outputs for x in o.logprobs]
    found = [*scores[1:], *drawn]
    for i, x in enumerate(found):
        most = 3 if i < 36 else 5
        assert x.token == [*PROMPTS["long"], *tokens][i + 1]
        np.testing.assert_allclose(x.logprob, whole[i, x.token], atol=1e-4)
        assert len(x.top) == most
        best = np.sort(whole[i])[::-1][:most]
        np.testing.assert_allclose([v for _, v in x.top], best, atol=1e-4)
        np.testing.assert_allclose([whole[i, t] for t, _ in x.top], best, atol=1e-4)
    (only,) = [o.prompt_logprobs for n in run.told["score"] for o in n]
    assert [x and x.logprob for x in only] == [x and x.logprob for x in scores]
    assert run.result("score")[2] == "length"
    run.add("one", PROMPTS["one"], max_tokens=2, prompt_logprobs=1)
    run.finish()
    assert run.told["one"][0][0].prompt_logprobs == (None,)


def test_grammars(llama):
    tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
    compiler = GrammarCompiler(tokenizer, vocab_size=288, eos_ids=[tokenizer.eos_id])
    run = llama.run(compiler=compiler, tokenizer=tokenizer)
    guided = Guide(kind="regex", text="[a-f]{3}(1|2)x*y")
    run.add("beside", PROMPTS["page"], max_tokens=20)
    settings = {"guided": guided, "temperature": 3.0, "n": 2}
    run.add("a", PROMPTS["short"], max_tokens=40, seed=1, **settings)
    run.add("b", PROMPTS["page"], max_tokens=4, seed=2, **settings)
    run.finish()
    for name, pattern, finish in (
        ("a", "[a-f]{3}(1|2)x*y", "stop"),
        ("b", "[a-f]{3}(1|2)", "length"),
    ):
        for i in range(2):
            text = "".join(o.text for n in run.told[name] for o in n if o.index == i)
            assert re.fullmatch(pattern, text), text
            assert run.result(name, i)[2] == finish
    run.check("beside", PROMPTS["page"])
    with pytest.raises(InvalidRequest, match="guided 'regex' is not supported"):
        llama.run().add("b", [1], guided=guided)
    compiler.close()


def test_logits_that_are_not_finite_end_their_request_alone(llama):
    run = llama.run()
    run.add("good", PROMPTS["page"], max_tokens=12)
    run.add("bad", PROMPTS["long"], max_tokens=12)
    run.add("worse", PROMPTS["short"], max_tokens=12, top_k=5)
    for _ in range(5):
        run.engine.step()
    rows = {c.request.id: c for c in run.scheduler._slots.owners()}
    pages = [rows["bad"].pages[0], rows["worse"].pages[0]]
    runner = llama.runner
    kv = runner.pages.kv.at[1, np.array(pages)].set(np.nan)
    runner.pages = runner.pages._replace(kv=kv)
    run.finish()
    for name in ("bad", "worse"):
        assert run.result(name)[2] == "error"
        assert "not finite" in run.told[name][-1][0].error
    run.check("good", PROMPTS["page"])
    assert len(run.result("good")[0]) == 12
    # The pages are used again, and nobody finds what was in them.
    for name, tokens in (("long", PROMPTS["long"]), ("short", PROMPTS["short"])):
        run.add(name, tokens, max_tokens=12)
        run.finish()
        run.check(name, tokens)


def test_settings_that_fp32_cannot_hold(llama):
    """They are as good as the nearest; the others go on."""
    run = llama.run()
    run.add("beside", PROMPTS["page"], max_tokens=20)
    for name, setting in {
        "hot": {"temperature": 1e300},
        "cold": {"temperature": 1e-300},
        "narrow": {"temperature": 1.0, "top_p": 1e-300},
        "large": {"repetition_penalty": 1e300},
        "small": {"repetition_penalty": 1e-300},
    }.items():
        run.add(name, PROMPTS["short"], max_tokens=4, seed=2**63 - 1, **setting)
    run.finish()
    run.check("beside", PROMPTS["page"])
    for name in ("cold", "narrow"):
        run.check(name, PROMPTS["short"])
    for name in ("hot", "large", "small"):
        assert len(run.result(name)[0]) == 4


@pytest.mark.parametrize("steps", range(0, 9, 2))
def test_abort_in_any_state(llama, steps):
    run = llama.run()
    for i in range(6):  # more than there are slots
        run.add(str(i), PROMPTS["long"], max_tokens=10)
    for _ in range(steps):
        run.engine.step()
    for name in ("0", "5", "3", "3", "unknown"):
        run.engine.abort(name)
    run.finish()
    for name in ("0", "5", "3"):
        assert run.result(name)[2] in ("aborted", "length")
    for name in ("1", "2", "4"):
        run.check(name, PROMPTS["long"])
    assert not run.engine._processors and not run.engine._counted


def test_the_id_of_an_aborted_request_is_free_at_once(llama):
    """What is under way for the old one does not go to the new one."""
    run, old = llama.run(), PROMPTS["long"]
    new = old[::-1]
    run.add("a", old, max_tokens=10, prompt_logprobs=0)
    told = run.told["a"]
    run.engine.abort("a")
    run.add("a", new, max_tokens=3, prompt_logprobs=0)
    assert [o.finish for news in told for o in news] == ["aborted"]
    refused = run.engine.admit(Request(prompt=old, id="a"), told.append)
    run.finish()
    assert "in use" in str(refused.exception(timeout=0))
    run.check("a", new)
    assert run.result("a")[2] == "length"
    (scores,) = [
        o.prompt_logprobs for n in run.told["a"] for o in n if o.prompt_logprobs
    ]
    whole = llama.logprobs(new)
    for i, score in enumerate(scores[1:]):
        np.testing.assert_allclose(score.logprob, whole[i, new[i + 1]], atol=1e-4)


def test_deadlines(llama):
    time = [0.0]
    run = llama.run(clock=lambda: time[0])
    run.add("late", PROMPTS["long"], max_tokens=20, deadline=5.0)
    run.add("other", PROMPTS["long"], max_tokens=20)
    run.engine.step()
    time[0] = 6.0
    run.finish()
    assert run.result("late")[2] == "timeout"
    run.check("other", PROMPTS["long"])


def test_nothing_is_compiled_after_the_start(llama):
    compiled = []

    def listen(event, duration, **_):
        if "backend_compile" in event:
            compiled.append(event)

    run = llama.run(poison=True)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for i, settings in enumerate(SETTINGS.values()):
            run.add(str(i), PROMPTS["long"], max_tokens=6, **settings)
        run.add("score", PROMPTS["page"], max_tokens=2, prompt_logprobs=1, logprobs=2)
        run.finish()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []
    keys = {key for key, _, _ in llama.runner.programs()}
    assert keys == set(llama.runner.table)


def test_text_and_stop_strings(llama):
    tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=257)
    run = llama.run(tokenizer=tokenizer)
    run.add("free", PROMPTS["page"], max_tokens=20)
    run.finish()
    text = "".join(o.text for news in run.told["free"] for o in news)
    tokens = run.result("free")[0]
    known = [token for token in tokens if token < 257]  # the model has a few more
    assert text == tokenizer.continuation(PROMPTS["page"], known)
    stop = next(c for c in text[5:] if c != "\N{REPLACEMENT CHARACTER}")
    run.add("stopped", PROMPTS["page"], max_tokens=20, stop=[stop])
    run.finish()
    outputs = [o for news in run.told["stopped"] for o in news]
    assert "".join(o.text for o in outputs) == text[: text.index(stop)]
    assert outputs[-1].finish == "stop" and outputs[-1].stop == stop
    # The text ends first, even if its last token is the last that was wanted.
    most = len(run.result("stopped")[0])
    for name, limit in (("last", most), ("next", most + 1)):
        run.add(name, PROMPTS["page"], max_tokens=limit, stop=[stop])
        run.finish()
        assert run.result(name)[0] == tokens[:most]
        assert run.result(name)[2] == "stop"
        assert run.told[name][-1][0].stop == stop
    assert run.result("stopped")[0] == tokens[: len(run.result("stopped")[0])]
    with pytest.raises(InvalidRequest, match="has no tokenizer"):
        llama.run().add("b", [1], stop=["x"])


def test_an_engine_that_fails_tells_everyone(llama):
    llama.runner.reset()
    engine = Engine(llama.runner, Scheduler(SIZES))
    said = queue.SimpleQueue()
    begun = threading.Event()

    def fail(*_, **__):
        begun.wait(120)
        raise OSError("the device is gone")

    engine.runner.update, update = fail, engine.runner.update
    try:
        engine.start()
        params = SamplingParams(max_tokens=5)
        for _ in range(3):
            engine.submit(Request(prompt=[1, 2], params=params), said.put)
            begun.set() if said.empty() else None
    except EngineDead:
        pass
    finally:
        begun.set()
        engine._thread.join(120)
        engine.runner.update = update
    assert isinstance(said.get(timeout=120), EngineDead)
    with pytest.raises(EngineDead, match="the device is gone"):
        engine.submit(Request(prompt=[1]), said.put)
    engine.abort("unknown")
    engine.close()


def test_asyncio(llama):
    """Streams side by side; who stops reading gives the request up."""
    llama.runner.reset()

    async def tokens_of(engine, params, name):
        request = Request(prompt=PROMPTS["page"], params=params, id=name)
        return [t async for o in engine.generate(request) for t in o.tokens]

    async def main(engine):
        params = SamplingParams(temperature=0.0, max_tokens=8)
        both = await asyncio.gather(
            *(tokens_of(engine, params, name) for name in ("a", "b"))
        )
        long = SamplingParams(max_tokens=50)
        stream = engine.generate(Request(prompt=[1, 2], params=long, id="left"))
        async with contextlib.aclosing(stream):
            async for _ in stream:
                with pytest.raises(InvalidRequest, match="is in use"):
                    await tokens_of(engine, long, "left")
                break
        canceled = asyncio.ensure_future(tokens_of(engine, long, "canceled"))
        await asyncio.sleep(0)
        canceled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await canceled
        return both

    async def in_its_time(engine):
        with in_step(engine):
            return await main(AsyncEngine(engine))

    with Engine(llama.runner, Scheduler(SIZES)) as engine:
        first, second = asyncio.run(in_its_time(engine))
    assert first == second and len(first) == 8
    counts = engine.scheduler.counts
    assert counts.received == counts.finished + counts.aborted + counts.rejected
    assert counts.finished == 2 and counts.rejected == 1


def test_a_slow_reader(llama, monkeypatch):
    """It finds what it has missed in one output, and holds nobody back."""
    monkeypatch.setattr(async_engine, "_KEPT", 2)
    llama.runner.reset()
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0, n=2)

    async def main(engine):
        stream = engine.generate(Request(prompt=PROMPTS["short"], params=params))
        found = [await anext(stream)]
        while not engine.engine.idle:
            await asyncio.sleep(0.01)
        found += [output async for output in stream]
        whole = engine.generate(Request(prompt=PROMPTS["short"], params=params))
        return found, [output async for output in whole]

    with Engine(llama.runner, Scheduler(SIZES)) as engine:
        found, whole = asyncio.run(main(AsyncEngine(engine)))
    # For each of both: the first, what waited, and that of the last tick, in which the
    # engine becomes idle before it tells of it.
    assert len(found) <= 6
    for index in range(2):
        (slow,), (fast,) = (
            joined(o for o in outputs if o.index == index) for outputs in (found, whole)
        )
        assert (slow.tokens, slow.finish) == (fast.tokens, "length")
        assert slow.logprobs == fast.logprobs and len(slow.logprobs) == 40


def test_what_waits_for_a_reader_is_joined():
    request = Request(prompt=[1], params=SamplingParams(n=3))
    mailbox = async_engine._Mailbox(request)
    for i in range(9_000):
        mailbox.put([Output(request="a", index=i % 3, tokens=(i,), text=f"{i} ")])
        assert len(mailbox._outputs) <= 35
    found = asyncio.run(mailbox.get())
    assert [output.index for output in found] == [0, 1, 2]
    for output in found:
        assert output.tokens == tuple(range(output.index, 9_000, 3))
        assert output.text == "".join(f"{i} " for i in output.tokens)
