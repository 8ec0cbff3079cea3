"""A step of the quickstart: serve trained models over HTTP and plot their batches.

The server is the one of ``jaxscale serve``, the client is OpenAI's; both run in this
process, over the loopback interface.
"""

import concurrent.futures
import dataclasses
import html
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxscale.checks import pip_install
from jaxscale.inference import EngineConfig
from jaxscale.models import Decoder, Tokenizer
from jaxscale.observability.html_report import Report


REQUESTS = 16
"""Concurrent requests."""

_SLOTS = 8
_TOKENS = (64, 24, 40, 56, 32)  # of the answers, in turns
_GAP = 0.03  # seconds between requests
_SIZES = EngineConfig(
    num_slots=_SLOTS, buckets=(_SLOTS,), max_len=128, prefill_tokens=(64,), steps=1
)
_WIDTH, _ROW, _LEFT = 860, 22, 60  # pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """An answer, as its client saw it; times in seconds."""

    text: str
    """The text."""
    tokens: int
    """Its tokens, as the server counts them."""
    first: float
    """From the request to the first part."""
    latency: float
    """From the request to the end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """Answers of a model to concurrent requests."""

    alone: Answer
    """The answer to the first request, when there was no other."""
    answers: Sequence[Answer]
    """All answers."""
    seconds: float
    """From the first request to the last answer."""
    segments: Sequence[Sequence[float]]
    """Segments of the batch: slot, color, 0 for prefill or 1 for decode, start, end."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(answer.tokens for answer in self.answers) / self.seconds


def check_client() -> None:
    """Check that the server and its client can be imported.

    Raises:
        ImportError: they are not installed.
    """
    try:
        import openai  # noqa: F401

        import jaxscale.inference.server  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"the quickstart needs {error.name}, which is not installed; "
            + pip_install("quickstart")
        ) from error


def serve_trained(
    models: Mapping[str, Decoder],
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    report: Report,
    *,
    seed: int = 0,
) -> dict[str, Served]:
    """Serve each model to concurrent requests, and report on it.

    Args:
        models: Models by name.
        tokenizer: Their tokenizer.
        prompts: Prompts, which the requests take in turns.
        report: Gets latency, throughput and the drawings.
        seed: Random seed of sampling.

    Raises:
        RuntimeError: an answer depends on who shared the batch.
    """
    found = {
        name: _serve(model, name, tokenizer, prompts, seed)
        for name, model in models.items()
    }
    report.heading("Served over HTTP")
    report.text(
        f"{REQUESTS} requests of the openai client, {1e3 * _GAP:.0f} ms apart, on "
        f"{_SLOTS} slots, sampled at temperature 0.7 from the 40 likeliest tokens. "
        "The first request is also sent when there is no other: its text is the same."
    )
    report.table(
        [
            *("model", "tokens/s", "median to the first token (ms)"),
            *(
                "mean latency (ms)",
                "first request (ms)",
                "first request, unloaded (ms)",
            ),
        ],
        [
            [
                name,
                served.rate,
                1e3 * statistics.median(a.first for a in served.answers),
                1e3 * statistics.mean(a.latency for a in served.answers),
                1e3 * served.answers[0].latency,
                1e3 * served.alone.latency,
            ]
            for name, served in found.items()
        ],
    )
    if jax.default_backend() == "cpu" and len(found) > 1:
        report.text(
            "On a CPU the pruned model is no faster, and under load it can be slower: "
            "XLA gathers the kept inputs of each tile before it multiplies, or unpacks "
            "the weight and multiplies it whole, which costs more than pruning saves "
            "in layers this small. The GPU kernels gather while they multiply."
        )
    for name, served in found.items():
        report.text(
            f"The batch of the {name} model: each row is a slot, each color a request, "
            "pale while its prompt is computed. A request joins as soon as a slot is "
            "free, while the others go on."
        )
        report.drawing(draw_slots(served.segments, title=f"slots of the {name} model"))
    return found


def draw_slots(segments: Sequence[Sequence[float]], *, title: str) -> str:
    """Slots against time, as an SVG element.

    Args:
        segments: Segments as in `Served`; their times have any origin.
        title: Name of the picture.
    """
    start = min((s[3] for s in segments), default=0.0)
    end = max((s[4] for s in segments), default=0.0)
    rows = 1 + int(max((s[0] for s in segments), default=0))
    scale = (_WIDTH - _LEFT) / max(end - start, 1e-9)
    parts = [
        f"<text x='0' y='{(row + 0.7) * _ROW:.0f}'>slot {row}</text>"
        for row in range(rows)
    ]
    # Neighboring numbers of requests are far apart on the circle of colors.
    hues = {color: 137 * i % 360 for i, color in enumerate({s[1]: 0 for s in segments})}
    for slot, color, kind, begun, ended in segments:
        left, width = _LEFT + (begun - start) * scale, max(1.0, (ended - begun) * scale)
        parts.append(
            f"<rect x='{left:.1f}' y='{slot * _ROW + 2:.0f}' width='{width:.1f}' "
            f"height='{_ROW - 4}' fill='hsl({hues[color]} 65% 50%)' "
            f"fill-opacity='{1 if kind else 0.35}' stroke='#fff' stroke-width='0.5'/>"
        )
    for i in range(6):
        moment = (end - start) * i / 5
        parts.append(
            f"<text x='{_LEFT + moment * scale:.0f}' y='{(rows + 0.7) * _ROW:.0f}' "
            f"text-anchor='{'end' if i == 5 else 'middle'}'>{moment:.2f} s</text>"
        )
    return (
        f"<svg viewBox='0 0 {_WIDTH} {(rows + 1) * _ROW}' width='{_WIDTH}' "
        "font-size='12' font-family='sans-serif' role='img'>"
        f"<title>{html.escape(title)}</title>{''.join(parts)}</svg>"
    )


def _serve(
    model: Decoder, name: str, tokenizer: Tokenizer, prompts: Sequence[str], seed: int
) -> Served:
    import openai

    from jaxscale.inference.server import background
    from jaxscale.inference.server.live import Recorder
    from jaxscale.inference.server.load import text_model

    made = text_model(model, tokenizer, name=name, engine=_SIZES)
    recorder = Recorder(made.backend.load, num_slots=_SLOTS)

    def ask(i: int) -> Answer:
        tokens = _TOKENS[i % len(_TOKENS)]
        return _ask(client, name, prompts[i % len(prompts)], tokens, seed + i)

    def later(i: int) -> Answer:
        time.sleep(i * _GAP)
        return ask(i)

    with (
        background(lambda: made) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        concurrent.futures.ThreadPoolExecutor(REQUESTS) as pool,
    ):
        ask(1)  # opens the connection
        alone = ask(0)
        made.backend.observe(recorder.observe, recorder.tick)
        start = time.perf_counter()
        answers = list(pool.map(later, range(REQUESTS)))
        seconds = time.perf_counter() - start
    if answers[0].text != alone.text:
        raise RuntimeError(
            f"the first request got {answers[0].text!r} beside others, and "
            f"{alone.text!r} alone: an answer depends on who shares the batch"
        )
    segments = recorder.frame()["segments"]
    return Served(alone=alone, answers=answers, seconds=seconds, segments=segments)


def _ask(client: Any, name: str, prompt: str, most: int, seed: int) -> Answer:
    start = time.perf_counter()
    first, texts, tokens = None, [], 0
    stream = client.completions.create(
        model=name,
        prompt=prompt,
        max_tokens=most,
        temperature=0.7,
        seed=seed,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"top_k": 40},
    )
    for part in stream:
        if first is None:
            first = time.perf_counter() - start
        texts += [choice.text for choice in part.choices]
        tokens = part.usage.completion_tokens if part.usage else tokens
    latency = time.perf_counter() - start
    return Answer(
        text="".join(texts), tokens=tokens, first=first or latency, latency=latency
    )
