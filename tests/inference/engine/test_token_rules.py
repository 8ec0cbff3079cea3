"""Tokens that requests allow or bar, drawn by the engine."""

import pytest

from tests.inference.engine.test_engine import PROMPTS


def test_allowed_tokens_alone_are_drawn(llama):
    run = llama.run()
    run.add("beside", PROMPTS["page"], max_tokens=12)
    run.add("few", PROMPTS["short"], max_tokens=12, allowed_token_ids=[7, 40, 280])
    run.finish()
    run.check("beside", PROMPTS["page"])
    tokens, _, finish = run.result("few")
    assert set(tokens) <= {7, 40, 280} and finish == "length"
    assert len(tokens) == 12
    prompt = [*PROMPTS["short"]]
    for token in tokens:
        logits = llama.logits(prompt)[-1]
        assert logits[token] > logits[[7, 40, 280]].max() - 1e-4
        prompt.append(token)


def test_barred_sequences_are_never_completed(llama):
    """Of one token and of several; what is likeliest then is drawn."""
    run = llama.run()
    run.add("free", PROMPTS["short"], max_tokens=12)
    run.finish()
    free = run.result("free")[0]
    bad = [(free[0],), tuple(free[1:3]), (5, 6)]
    run.add("barred", PROMPTS["short"], max_tokens=20, n=2, bad_token_ids=bad)
    run.finish()
    for index in (0, 1):
        tokens, _, _ = run.result("barred", index)
        assert len(tokens) == 20
        for sequence in bad:
            found = [tuple(tokens[i : i + len(sequence)]) for i in range(len(tokens))]
            assert sequence not in found


@pytest.mark.parametrize(
    "settings",
    [
        {"stop_token_ids": range(288)},
        {"stop_token_ids": [7, 40], "allowed_token_ids": [7, 40]},
    ],
)
def test_nothing_is_left_to_be_drawn(llama, settings):
    """That is the fault of the request; the others go on."""
    run = llama.run()
    run.add("beside", PROMPTS["page"], max_tokens=12)
    run.add("none", PROMPTS["short"], max_tokens=9, min_tokens=3, **settings)
    run.finish()
    run.check("beside", PROMPTS["page"])
    (output,) = [o for news in run.told["none"] for o in news if o.finish]
    assert output.finish == "error" and output.blames_request
    assert "leaves no token" in output.error
