"""A worker process that renders chat templates, so that a model's template cannot harm
the server.

`jaxscale.inference.templates` runs it as a script; it imports only jinja2 and the
standard library. Each request is a line of JSON, and so is each answer. Memory is
limited, and time by an alarm that ends the process, whatever filter runs.
"""

import datetime
import functools
import json
import os
import resource
import signal
import sys
from typing import Any


sys.path += [path for path in sys.argv[4:] if path not in sys.path]

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.filters import do_items
from jinja2.sandbox import ImmutableSandboxedEnvironment


class GenerationTag(Extension):
    """``{% generation %}`` marks answers for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  as the base class has it

    def parse(self, parser: Any) -> Any:
        """The statements between the tags."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def raise_exception(message: str) -> None:
    """Refuse a conversation, as templates do."""
    raise jinja2.TemplateError(message)


class Arguments(str):
    """Arguments of a call that are not a JSON object: rendered unchanged."""


def items(value: Any) -> Any:
    """The pairs of a mapping; malformed arguments are one pair."""
    if isinstance(value, Arguments):
        return iter([("arguments", str(value))])
    return do_items(value)


def to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """JSON as transformers writes it: jinja2's own filter escapes HTML."""
    if isinstance(value, Arguments):
        return value
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def strftime_now(form: str) -> str:
    """The time, in the form of ``strftime``."""
    return datetime.datetime.now().strftime(form)


ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[GenerationTag, "jinja2.ext.loopcontrols"],
)
ENVIRONMENT.filters |= {"tojson": to_json, "items": items}
ENVIRONMENT.globals |= {
    "raise_exception": raise_exception,
    "strftime_now": strftime_now,
}


@functools.lru_cache(maxsize=32)
def compiled(source: str) -> Any:
    """A compiled template, cached for the next request."""
    return ENVIRONMENT.from_string(source)


def rendered(source: str, context: dict[str, Any] | None, most: int) -> dict[str, str]:
    """The rendered text, or an error; without a context it only compiles."""
    try:
        template = compiled(source)
    except (jinja2.TemplateError, RecursionError) as error:
        return {"malformed": f"chat_template is no Jinja template: {error}"}
    pieces, size = [], 0
    try:
        for piece in () if context is None else template.generate(**context):
            size += len(piece)
            if size > most:
                return {"error": f"the chat template wrote more than {most} characters"}
            pieces.append(piece)
    except (jinja2.TemplateError, RecursionError) as error:
        return {"error": f"the chat template refused: {error}"}
    return {"text": "".join(pieces)}


def with_arguments(context: dict[str, Any] | None) -> dict[str, Any] | None:
    """Variables in which malformed arguments are marked."""
    for message in (context or {}).get("messages", ()):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls or ():
            function = call.get("function")
            if function and isinstance(function.get("arguments"), str):
                function["arguments"] = Arguments(function["arguments"])
    return context


def answered(request: dict[str, Any], most: int) -> dict[str, str]:
    """The answer to a request, whatever the template does."""
    try:
        context = with_arguments(request["context"])
        return rendered(request["source"], context, most)
    except MemoryError:
        return {"memory": ""}
    # Jinja raises what the values of a conversation raise: anything.
    except Exception as error:
        return {"error": f"the chat template failed: {error!r:.500}"}


def main() -> None:
    """Answer requests until the other end is closed."""
    seconds, memory, most = float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else writes among the answers
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal ends the process
        try:
            answer = answered(json.loads(line), most)
            text = json.dumps(answer)
        except MemoryError:
            text = '{"memory": ""}'
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
