"""The table of OpenAI's parameters in the documentation, made from the schema.

``python -m tests.inference.server.test_parameters`` writes it.
"""

import importlib
from pathlib import Path

import pytest

from jaxscale.inference.server.schema.chat import Chat
from jaxscale.inference.server.schema.completions import Completion
from jaxscale.inference.server.schema.encoders import Embedding
from jaxscale.inference.server.schema.responses import Responses


PAGE = Path(__file__).parents[3] / "docs" / "serving-parameters.md"
BEGIN, END = "<!-- parameters -->\n", "<!-- end -->\n"
CALLS = {
    "/v1/chat/completions": (
        Chat,
        "chat.completion_create_params",
        "CompletionCreateParamsBase",
    ),
    "/v1/completions": (
        Completion,
        "completion_create_params",
        "CompletionCreateParamsBase",
    ),
    "/v1/embeddings": (Embedding, "embedding_create_params", "EmbeddingCreateParams"),
    "/v1/responses": (
        Responses,
        "responses.response_create_params",
        "ResponseCreateParamsBase",
    ),
}
PARTLY = {
    "best_of": "served if it equals `n`",
    "messages": "served: text, tool calls and their results",
    "input": "served: text and token ids, or items of text, tool calls and reasoning",
    "suffix": "rejected unless empty",
    "tools": "served: functions",
    "background": "rejected unless false",
    "previous_response_id": "served from memory",
}


def outcome(body, name):
    """What happens with a parameter."""
    if name in body.IGNORED:
        return "ignored, with a notice"
    if name in body.TAKEN:
        return "ignored"
    if name not in body.model_fields:
        return "rejected"
    return PARTLY.get(name, "served")


def table():
    """A row for each parameter of OpenAI's client."""
    columns, names = [], set()
    for body, module, name in CALLS.values():
        library = importlib.import_module(f"openai.types.{module}")
        given = {*getattr(library, name).__annotations__, "stream"}
        given -= {"stream"} if body is Embedding else set()
        columns.append({each: outcome(body, each) for each in given})
        names |= given
    lines = [" | ".join(["parameter", *(f"`{path}`" for path in CALLS)])]
    lines.append(" | ".join(["---"] * (1 + len(CALLS))))
    for name in sorted(names):
        lines.append(" | ".join([f"`{name}`", *(c.get(name, "") for c in columns)]))
    return "".join(f"| {line} |\n" for line in lines)


def test_the_table_is_that_of_the_schema():
    pytest.importorskip("openai")
    _, _, rest = PAGE.read_text().partition(BEGIN)
    written = rest.partition(END)[0].strip().splitlines()
    made = table().strip().splitlines()
    # Another version of the client may know fewer, or more that are refused.
    ours = {line.split("|")[1].strip(): line for line in written}
    for line in made:
        name = line.split("|")[1].strip()
        if name in ours:
            assert ours[name] == line
        else:
            assert "served" not in line and "ignored" not in line


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{rest.partition(END)[2]}")
