"""Drafts: fewer steps, and the same tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.batch_rows import Column, float_bits
from jaxscale.inference.engine.speculation import look_up, verify
from jaxscale.sharding import make_mesh
from tests.inference.conftest import LLAMA, SIZES, Greedy, Served


RNG = np.random.default_rng(0)


def expected_drafts(tokens, *, drafts, shortest, longest):
    """One place after the other."""
    for size in range(longest, shortest - 1, -1):
        ngram = tokens[-size:]
        for end in range(len(tokens) - 1, size - 1, -1):
            if len(ngram) == size and tokens[end - size : end] == ngram:
                known = list(tokens)
                for _ in range(drafts):
                    known.append(known[len(known) - len(tokens) + end])
                return known[len(tokens) :]
    return None


@pytest.mark.parametrize("sizes", [(3, 1, 1), (1, 1, 4), (7, 2, 3), (4, 3, 9)])
def test_drafts_follow_what_followed_before(sizes):
    """Few different tokens; behind the newest lies anything."""
    options = dict(zip(("drafts", "shortest", "longest"), sizes, strict=True))
    history = RNG.integers(0, 3, (60, 24)).astype(np.int32)
    last = RNG.integers(0, 24, 60).astype(np.int32)
    last[:3] = 0, 1, 23
    guess_all = jax.jit(functools.partial(look_up, **options))
    guesses, found = map(np.asarray, guess_all(history, last))
    seen = 0
    for row, end, guess, any_found in zip(history, last, guesses, found, strict=True):
        expected = expected_drafts(row[: end + 1].tolist(), **options)
        assert any_found == (expected is not None)
        assert guess.tolist() == (expected or [0] * options["drafts"])
        seen += any_found
    assert 0 < seen < 60


def test_draws_keep_their_distribution():
    """Of both tokens of a step, whether the draft is likely or not: chi-squared."""
    count, vocab, draft = 4000, 5, 2
    logits = RNG.standard_normal((2, vocab)).astype(np.float32)
    rows = np.zeros((count, 40), np.int32)
    rows[:, Column.SEED], rows[:, Column.LENGTH] = np.arange(count), 7
    rows[:, Column.TEMPERATURE] = float_bits(0.7)
    tokens = np.tile(np.array([[0, draft]], np.int32), (count, 1))
    repeated = np.tile(logits, (count, 1))
    check = jax.jit(verify)
    drawn, hits = check(repeated, rows, tokens, np.full(count, 2))
    drawn, hits = np.asarray(drawn), np.asarray(hits)[:, 0]
    p = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum(-1, keepdims=True)
    for place, which in ((0, slice(None)), (1, hits)):
        found = np.bincount(drawn[which, place], minlength=vocab)
        expected = found.sum() * p[place]
        assert expected.min() > 5
        statistic = ((found - expected) ** 2 / expected).sum()
        assert statistic < 18.47  # one in a thousand exceeds it, 4 degrees
    assert (hits == (drawn[:, 0] == draft)).all()
    # Nothing was drafted for a row of one token.
    assert not np.asarray(check(repeated, rows, tokens, np.ones(count, int))[1]).any()


DRAFTS = dataclasses.replace(
    SIZES, drafts=3, draft_bucket=2, shortest_ngram=1, longest_ngram=3
)
"""Two rows draft, and four where the scheduler is told so."""


def repeating(model):
    """Little but the newest token decides what follows: texts repeat themselves."""
    shrink = lambda p: p / 100 if p.ndim == 3 else p  # noqa: E731
    model.blocks = jax.tree.map(shrink, model.blocks)
    return model


@pytest.fixture(scope="module")
def served():
    return Served(LLAMA, sizes=DRAFTS, change=repeating)


PROMPTS = {
    "loop": [7, 8, 9] * 6,
    "short": [3, 14, 15],
    "long": RNG.integers(0, 256, 21).tolist(),
    "one": [5],
}
SETTINGS = {
    "loop": {},
    "short": {"temperature": 0.01, "seed": 3},
    "long": {"temperature": 0.03, "seed": 4},
    "one": {},
}


def drafting(served, draft_bucket=4, **changes):
    """A run in which the whole batch drafts, by default; without changes of sizes."""
    sizes = dataclasses.replace(DRAFTS, draft_bucket=draft_bucket, **changes)
    return served.run(sizes=sizes, poison=True)


def finish(run):
    """How many steps it takes until nothing is left."""
    runner, steps = run.engine.runner, []
    decode, forward = runner.decode, runner.forward
    runner.decode = lambda **x: steps.append(x["steps"]) or decode(**x)
    runner.forward = lambda **x: steps.append(1) or forward(**x)
    try:
        run.finish()
    finally:
        del runner.decode, runner.forward
    return sum(steps)


@pytest.fixture(scope="module")
def plain(served):
    """Each request by itself, without drafts, and the steps that it takes."""
    results = {}
    for name, settings in SETTINGS.items():
        run = drafting(served, drafts=0)
        run.add(name, PROMPTS[name], max_tokens=40, **settings)
        results[name] = finish(run), run.result(name)
        assert run.scheduler.counts.drafted_tokens == 0
    return results


def same(found, expected):
    """Drafts round differently, as another size of batch does."""
    assert (found[0], found[2]) == (expected[0], expected[2])
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)


@pytest.mark.parametrize("name", SETTINGS)
def test_same_tokens_in_fewer_steps(served, plain, name):
    run = drafting(served)
    run.add(name, PROMPTS[name], max_tokens=40, **SETTINGS[name])
    steps, counts = finish(run), run.scheduler.counts
    plain_steps, expected = plain[name]
    same(run.result(name), expected)
    assert 0 < counts.accepted_tokens <= counts.drafted_tokens
    # The first two tokens come with the prompt; some steps may follow the end.
    assert 40 <= 2 + steps + counts.accepted_tokens <= 44
    if "temperature" not in SETTINGS[name]:
        run.check(name, PROMPTS[name])
        assert steps < 0.7 * plain_steps


@pytest.mark.parametrize("draft_bucket", [2, 4])
def test_neighbors_change_nothing(served, plain, draft_bucket):
    """Rows join, leave, are aborted and move; one needs the full sampler for a while.

    With 2 the whole batch takes one token a step, until half of it has left.
    """
    run = drafting(served, draft_bucket)
    for name, settings in SETTINGS.items():
        length = 12 if name == "short" else 40
        run.add(name, PROMPTS[name], max_tokens=length, **settings)
    run.add("full", PROMPTS["loop"], max_tokens=5, top_k=3, temperature=1.0)
    run.add("late", PROMPTS["one"], max_tokens=6)
    for _ in range(3):
        run.engine.step()
    run.engine.abort("loop")
    finish(run)
    for name in SETTINGS:
        (tokens, logprobs, _), found = plain[name][1], run.result(name)
        length = len(found[0])
        assert length == 40 or name in ("short", "loop")
        end = "aborted" if name == "loop" else "length"
        same(found, (tokens[:length], logprobs[:length], end))
    counts = run.scheduler.counts
    assert counts.compactions and counts.accepted_tokens
    run.check("late", PROMPTS["one"])


def test_the_preempted_go_on(served, plain, short_answers):
    """Without enough pages there are no drafts. Those of drafted texts are found again.

    So only tokens that were right have given pages their names.
    """
    run, found = drafting(served, num_pages=18), []
    run.engine.observers.append(
        lambda e: found.append(e.cached_tokens - len(e.sequence.request.prompt))
    )
    for name, settings in SETTINGS.items():
        run.add(name, PROMPTS[name], max_tokens=40, **settings)
    finish(run)
    assert run.scheduler.counts.preempted and run.scheduler.counts.accepted_tokens
    assert max(found) > 0
    for name in SETTINGS:
        same(run.result(name), plain[name][1])


def test_a_text_may_end_within_a_run(served, plain):
    """Nothing comes behind a token that stops, or behind the last that was wanted."""
    first = plain["loop"][1][0][:8]
    # The end of the first prompt once more: what followed it is guessed, and right.
    prompt = [*PROMPTS["loop"], *first, 100, 101, *PROMPTS["loop"][-3:]]
    run = drafting(served, drafts=0)
    run.add("plain", prompt, max_tokens=8)
    run.finish()
    expected = run.result("plain")
    assert expected[0] == first and len(set(first)) == 8
    many = [t for t in range(90) if t not in first][:12]  # more than a row has room for
    for count in range(1, 7):
        for ending in (
            {"stop_token_ids": [first[count - 1]]},
            {"stop_token_ids": [first[count - 1], *many]},
            {"max_tokens": count},
        ):
            run = drafting(served, prefix_cache=False)
            run.add("a", prompt, **{"max_tokens": 20, **ending})
            run.finish()
            tokens, _, end = run.result("a")
            assert tokens == first[:count]
            assert end == ("stop" if "stop_token_ids" in ending else "length")
            # The first token comes from the prompt, the next four from one step.
            accepted = max(count - 2, 0) - (count > 5)
            if ending.get("stop_token_ids", [])[1:] == []:
                assert run.scheduler.counts.accepted_tokens == accepted
    early = {"max_tokens": 12, "min_tokens": 4, "stop_token_ids": [first[1]]}
    results = []
    for drafts in (0, 3):
        run = drafting(served, drafts=drafts)
        run.add("early", prompt, **early)
        run.finish()
        results.append(run.result("early"))
    same(results[1], results[0])
    assert first[1] not in results[0][0][:4]


def test_up_to_the_longest(served):
    """The last token of the longest request has no key, nor have drafts behind it."""
    for length in (56, 62, 63):
        prompt = ([7, 8, 9] * 21)[:length]
        for drafts in (0, 3):
            run = drafting(served, drafts=drafts)
            run.add(str(drafts), prompt)
            run.finish()
            run.check(str(drafts), prompt)
            tokens, _, end = run.result(str(drafts))
            assert (len(tokens), end) == (64 - length, "length")


def test_logits_that_are_not_finite_end_their_request_alone(served, plain):
    run = drafting(served)
    run.add("one", PROMPTS["one"], max_tokens=40)
    run.add("bad", PROMPTS["loop"], max_tokens=40)
    for _ in range(3):
        run.engine.step()
    rows = {c.request.id: c for c in run.scheduler._slots.owners()}
    pages = served.runner.pages
    bad = pages.kv.at[1, rows["bad"].pages[0]].set(np.nan)
    served.runner.pages = pages._replace(kv=bad)
    run.finish()
    assert run.result("bad")[2] == "error"
    same(run.result("one"), plain["one"][1])


class Drafting(Greedy):
    """Compiles the steps with drafts too."""

    def programs(self):
        yield from super().programs()
        needed = ("speculate", "remember")
        yield from (p for p in Runner.programs(self) if p[0][0] in needed)


def test_padding_of_a_vocabulary_is_never_drawn():
    """Over two devices a third of the columns are padding, of which no logit is made.

    Were it drawn, it would be by requests of which all tokens are equally likely.
    """
    config = dataclasses.replace(LLAMA, vocab_size=257, num_layers=1)
    sizes = dataclasses.replace(DRAFTS, vocab_size=257, draft_bucket=4)
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2])
    served = Served(config, mesh=mesh, sizes=sizes, change=repeating, kind=Drafting)
    run = served.run(poison=True)
    run.add("loop", PROMPTS["loop"], max_tokens=30)
    for seed in range(3):
        hot = {"temperature": 100.0, "seed": seed, "max_tokens": 30}
        run.add(str(seed), PROMPTS["loop"], **hot)
    run.finish()
    assert run.scheduler.counts.accepted_tokens
    run.check("loop", PROMPTS["loop"])
    drawn = [token for seed in range(3) for token in run.result(str(seed))[0]]
    assert len(drawn) == 90 and max(drawn) < 257


def test_sizes(served):
    keys = [key for key, _, _ in served.runner.programs()]
    assert len(keys) == len(set(keys)) and set(keys) == set(served.runner.table)
    decodes = sorted(key for key in keys if key[0] in ("decode", "speculate"))
    # The only batch has four rows, of which two or four may be in use.
    assert decodes == [
        ("decode", 4, 1),
        ("decode", 4, 2),
        ("speculate", 4, 1),
        ("speculate", 4, 2),
    ]
    with pytest.raises(ValueError, match="use at most 31"):
        Runner(served.model, dataclasses.replace(DRAFTS, drafts=32))
