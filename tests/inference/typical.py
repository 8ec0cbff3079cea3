"""Requests of many kinds that begin alike, and what each gets by itself."""

import numpy as np

from jaxscale.inference import Guide


_RNG = np.random.default_rng(0)


def prompt(length):
    return _RNG.integers(0, 256, length).tolist()


STEM = prompt(21)
"""How many prompts begin."""

REQUESTS = [
    (tokens, {"max_tokens": most, **more})
    for tokens, most, more in (
        (STEM[:9], 12, {}),
        (STEM[:16], 9, {"temperature": 0.8, "seed": 5}),
        (STEM[:17], 14, {"repetition_penalty": 1.5, "frequency_penalty": 0.3}),
        (STEM, 7, {"temperature": 1.2, "seed": 6, "top_p": 0.8, "top_k": 40}),
        (prompt(1), 20, {"presence_penalty": 1.0}),
        (prompt(3), 24, {"temperature": 1.0, "seed": 2**63 - 1}),
        (STEM[:8], 16, {"min_tokens": 5, "stop_token_ids": [*range(0, 200, 3)]}),
        (STEM[:12], 3, {"prompt_logprobs": 0}),
        (
            STEM[:20],
            10,
            {"logit_bias": {7: 3.0}, "n": 2, "temperature": 1.0, "seed": 1},
        ),
    )
]
"""Prompts and settings."""

_GUIDE = Guide(kind="regex", text="[a-f]{3}(1|2)x*y")

TEXT_REQUESTS = [
    (STEM[:10], {"max_tokens": 9, "guided": _GUIDE, "temperature": 3.0, "seed": 2}),
    (STEM[:13], {"max_tokens": 12, "stop": ["e", "t"], "temperature": 2.0, "seed": 3}),
]
"""Those that an engine with a tokenizer and a compiler of grammars takes."""


def alone(served, requests, **options):
    """The results of each continuation, by requests."""
    results = []
    for tokens, wanted in requests:
        run = served.run(**options)
        run.add("a", tokens, **wanted)
        run.finish()
        results.append([run.result("a", i) for i in range(wanted.get("n", 1))])
    return results
