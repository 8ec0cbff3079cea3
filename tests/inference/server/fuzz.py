"""Calls that nobody would write, over all endpoints at once, by a few keys.

``python -m tests.inference.server.fuzz --calls 5000 --seed 0`` makes more of them than
the suite does. Whatever is sent: no answer is a 500, each belongs to its own call, and
in the end all counters are back at rest.
"""

import argparse
import asyncio
import collections
import contextlib
import copy
import gzip
import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

from jaxscale.inference.server import ServedEncoder, ServerConfig, create_app
from tests.inference.server.endpoints.test_encoders import TEXTS, served
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine, text_model
from tests.inference.test_chat import CHATML, TOOL


KEYS = ("a", "b", "c")
TAG = re.compile(r"n\d+x")
TOGETHER = 12
JUNK = (
    *(None, True, -1, 0, 3, 2**31, 2**70, 0.5, -1e308, 1e308, "", "x", "n", "\ud800"),
    *([], [[]], [None], [1, "a"], {}, {"a": {"b": []}}, [{"type": "text"}], "9" * 400),
    *([{"role": "user"}], {"type": "json_schema"}, {"schema": 5}, [0] * 3000, "{"),
)
USER = {"role": "user", "content": "TAG"}
TOOLS = [TOOL]
OUTPUT = {"type": "function_call_output", "call_id": "a", "output": "TAG"}
BLOCKS = [
    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "Bern"}},
    {"type": "thinking", "thinking": "so"},
]
SAID = [{"type": "text", "text": "so"}]
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": SAID}
FUNCTION = {"name": "weather", "arguments": "{}"}
TURN = {"tool_calls": [{"id": "a", "type": "function", "function": FUNCTION}]}
ITEMS = (
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}]},
    {"type": "function_call", "call_id": "a", **FUNCTION},
)
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "null"}}}
DRAWN = {"temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3, "min_p": 0.1}
RULES = {"logit_bias": {"5": 1}, "bad_words": ["or"], "stop": ["zz"], "n": 2}
DECODER = (
    ("/v1/completions", {"prompt": "TAG"}),
    ("/v1/completions", {"prompt": ["TAG", "be TAG"], **DRAWN, "logprobs": 2}),
    ("/v1/completions", {"prompt": "TAG", "echo": True, "logprobs": 1, **RULES}),
    ("/v1/completions", {"prompt": "TAG", "guided_regex": "a+", "max_tokens": 60}),
    ("/v1/completions/render", {"prompt": "TAG", "truncate_prompt_tokens": 4}),
    ("/v1/chat/completions", {"messages": [USER], "reasoning_effort": "low"}),
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "tools": TOOLS}),
    ("/v1/chat/completions", {"messages": [USER], "response_format": FORM, **RULES}),
    ("/v1/chat/completions/render", {"messages": [USER], "tools": TOOLS}),
    ("/v1/responses", {"input": "TAG", "instructions": "be", "reasoning": {}}),
    ("/v1/responses", {"input": [{**USER, "type": "message"}, *ITEMS, OUTPUT]}),
    ("/v1/chat/completions", {"messages": [{"role": "assistant", **TURN}, USER]}),
    ("/v1/messages", {"messages": [USER], "max_tokens": 60, "system": "be"}),
    (
        "/v1/messages",
        {
            "max_tokens": 60,
            "tools": [{"name": "weather", "input_schema": {"type": "object"}}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "TAG"}]},
                {"role": "assistant", "content": BLOCKS},
                {"role": "user", "content": [RESULT]},
                {"role": "user", "content": "TAG"},
            ],
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [USER]}),
    ("/tokenize", {"prompt": "TAG"}),
    ("/tokenize", {"messages": [USER], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [5, 6, 7]}),
    ("/v1/embeddings", {"input": "TAG"}),
)
ENCODER = (
    ("/v1/embeddings", {"input": TEXTS[0]}),
    ("/v1/embeddings", {"input": [TEXTS[1]], "dimensions": 4, "truncate": True}),
    ("/v1/embeddings", {"input": [5, 6, 7], "encoding_format": "float"}),
    ("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]}),
    ("/v1/rerank", {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}),
    ("/v1/completions", {"prompt": "a"}),
)
OTHERS = ("/health", "/ready", "/metrics", "/version", "/live", "/v1/models", "/no")
GENERATES = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


class Echo(FakeEngine):
    """Says the tags of its prompt, and little else."""

    def text_of(self, request, index):
        tags = TAG.findall(TOKENIZER.decode(request.prompt))
        return f" {tags[-1] if tags else ''} to be or not"


class Call:
    """A call as a server hands it to the application, and what comes back."""

    def __init__(self, number, path, body, *, method="POST", valid=True):
        self.number, self.path, self.body = number, path, body
        self.method, self.valid = method, valid
        self.status, self.data, self.leaves = None, b"", None
        self.key, self.coding = KEYS[number % len(KEYS)], False
        self.raw: bytes | None = None

    async def run(self, app):
        raw = self.raw
        if raw is None:
            raw = b"" if self.body is None else json.dumps(self.body).encode()
        headers = {"content-type": "application/json", "authorization": self.key}
        headers["authorization"] = f"Bearer {self.key}"
        if self.coding:
            raw, headers["content-encoding"] = gzip.compress(raw), "gzip"
        left, parts = asyncio.Event(), [{"type": "http.request", "body": raw}]

        async def receive():
            if parts:
                return parts.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            self.status = message.get("status", self.status)
            self.data += message.get("body", b"")

        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": b"",
            "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
            "client": ("1.2.3.4", 5),
        }
        task = asyncio.ensure_future(app(scope, receive, send))
        for _ in range(self.leaves or 0):
            await asyncio.sleep(0)
        if self.leaves is not None:
            left.set()
        await task

    @property
    def text(self):
        """What a client shows of an answer."""
        data = self.data.decode()
        if not (self.path in GENERATES and self.body.get("stream")):
            return data
        shown = collections.defaultdict(str)  # by number of the choice
        for line in data.splitlines():
            if line.startswith("data: {"):
                part = json.loads(line.removeprefix("data: "))
                for choice in part.get("choices", ()):
                    found = choice.get("delta", choice)
                    text = found.get("content") or found.get("text") or ""
                    shown[choice["index"]] += text
                delta = part.get("delta", "")
                shown[0] += delta if isinstance(delta, str) else delta.get("text", "")
        return " ".join(shown.values())

    def check(self):
        """It was answered as it should."""
        about = (self.number, self.method, self.path, self.body, self.raw, self.status)
        assert self.status is not None or self.leaves is not None, about
        if self.status is None:
            return
        assert self.status < 500, (*about, self.data)
        assert set(TAG.findall(self.text)) <= {f"n{self.number}x"}, (*about, self.data)
        if self.status >= 400 and self.method == "POST":
            found = json.loads(self.data)
            assert found["error"]["message"], about
        if self.valid and self.leaves is None:
            assert self.status == 200, (*about, self.data)
            if self.path in GENERATES and "TAG" not in str(self.body):
                assert f"n{self.number}x" in self.text, (*about, self.data)


def tagged(value: Any, tag: str) -> Any:
    """A body with the tag of its call."""
    if isinstance(value, str):
        return value.replace("TAG", f"to be {tag}")
    if isinstance(value, list):
        return [tagged(each, tag) for each in value]
    if isinstance(value, dict):
        return {key: tagged(each, tag) for key, each in value.items()}
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a body, with a key of it."""
    if isinstance(value, dict | list):
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield value, key
            yield from places(value[key])


def mutated(body, draw):
    """A body in which a few things are other than they were."""
    body = copy.deepcopy(body)
    for _ in range(draw.choice((1, 1, 2, 4))):
        found = list(places(body))
        if not found:
            break
        holder, key = draw.choice(found)
        match draw.randrange(4):
            case 0 if isinstance(holder, dict):
                del holder[key]
            case 1 if isinstance(holder, dict):
                names = [*KNOWN, "unknown"]
                holder[draw.choice(names)] = copy.deepcopy(draw.choice(JUNK))
            case 2 if isinstance(holder, list):
                holder.append(copy.deepcopy(draw.choice(JUNK)))
            case _:
                holder[key] = copy.deepcopy(draw.choice(JUNK))
    return body


KNOWN = sorted(
    {key for _, body in (*DECODER, *ENCODER) for key in body}
    | {"stream", "stream_options", "tool_choice", "max_tokens", "min_tokens", "text"}
    | {"add_generation_prompt", "continue_final_message", "structured_outputs"}
    | {"previous_response_id", "truncation", "prompt_logprobs", "best_of", "timeout"}
    | {"return_token_ids", "allowed_token_ids", "cache_salt", "priority", "tools"}
)


def made(number, draw):
    """A call, and whether it is one to the encoder."""
    if draw.random() < 0.05:
        return Call(number, draw.choice(OTHERS), None, method="GET", valid=False), False
    of_encoder = draw.random() < 0.15
    path, body = draw.choice(ENCODER if of_encoder else DECODER)
    call = Call(number, path, tagged(body, f"n{number}x"))
    call.valid = of_encoder == (path in ("/v1/embeddings", "/v1/score", "/v1/rerank"))
    if path in GENERATES and draw.random() < 0.4:
        call.body["stream"] = True
    if draw.random() < 0.6:
        call.body, call.valid = mutated(call.body, draw), False
    if draw.random() < 0.05:
        whole = json.dumps(call.body).encode()
        call.raw, call.valid = whole[: draw.randrange(len(whole))], False
        call.raw = draw.choice((call.raw, b"\xff" + whole, whole.replace(b'"', b"NaN")))
    call.coding = draw.random() < 0.1
    if draw.random() < 0.15:
        call.leaves = draw.randrange(40)
    return call, of_encoder


def check_rest(service):
    """Nothing is left of any call."""
    assert service.active == 0
    assert not service.texts._bytes and not service.texts._turns
    model = service.model
    load = model.load() if isinstance(model, ServedEncoder) else model.backend.load()
    assert (load.running, load.waiting) == (0, 0)
    counts = load.counts
    ended = counts.finished + counts.aborted + counts.failed + counts.rejected
    assert counts.received == ended


def drawn(calls, seed):
    """Calls of all kinds, and whether each is one to the encoder."""
    draw = random.Random(seed)
    return (made(number, draw) for number in range(calls))


def everywhere():
    """Each value of each body in turn, and each that may not be there instead."""
    number = 0
    for of_encoder, cases in ((False, DECODER), (True, ENCODER)):
        for path, body in cases:
            for place, junk in itertools.product(range(len([*places(body)])), JUNK):
                number += 1
                given = tagged(body, f"n{number}x")
                holder, key = list(places(given))[place]
                holder[key] = copy.deepcopy(junk)
                yield Call(number, path, given, valid=False), of_encoder


async def fuzz(calls, encoder):
    """Make the calls; returns how often each status was the answer."""
    engine, statuses = Echo(), collections.Counter()
    # What a template makes of a strange conversation is the model's own affair.
    model = text_model(engine, template=CHATML)
    config = ServerConfig(api_keys=KEYS)
    apps = [create_app(config, lambda m=m: m) for m in (model, encoder)]
    async with contextlib.AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(app.router.lifespan_context(app))
            while app.state.service.state == "loading":
                await asyncio.sleep(0)
        for batch in itertools.batched(calls, TOGETHER):
            await asyncio.gather(*(c.run(apps[other]) for c, other in batch))
            for call, _ in batch:
                call.check()
                statuses[call.status] += 1
        for app in apps:
            check_rest(app.state.service)
        assert not engine.live
    return statuses


def main():
    """Make calls as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--everywhere", action="store_true", help=everywhere.__doc__)
    options = parser.parse_args()
    calls = drawn(options.calls, options.seed)
    if options.everywhere:
        calls = itertools.chain(calls, everywhere())
    statuses = asyncio.run(fuzz(calls, served()))
    print(
        ", ".join(f"{status}: {n}" for status, n in sorted(statuses.items(), key=str))
    )


if __name__ == "__main__":
    main()
