"""The body of ``/v1/messages``, and the conversation that it is."""

import json
from typing import Any, ClassVar, Literal

from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.schema.body import Body, Items, Part
from jaxscale.inference.server.schema.chat import Chat


class MessagesMessage(Part):
    """A message."""

    role: Literal["user", "assistant", "system"]
    content: str | Items[dict[str, Any]]


class MessagesToolChoice(Part):
    """Which tool the model may, or must, call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Messages(Body):
    """The body of ``/v1/messages`` and ``/v1/messages/count_tokens``."""

    TAKEN: ClassVar[frozenset[str]] = Body.TAKEN | {"metadata", "service_tier"}
    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {
            *("betas", "cache_control", "container", "context_management"),
            *("inference_geo", "mcp_servers", "output_config", "thinking"),
        }
    )

    messages: Items[MessagesMessage]
    max_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    stop_sequences: Items[str] | None = None
    stream: bool | None = None
    system: str | Items[dict[str, Any]] | None = None
    temperature: float | None = None
    tool_choice: MessagesToolChoice | None = None
    tools: Items[dict[str, Any]] | None = None
    top_k: int | None = None
    top_p: float | None = None
    # Not of Anthropic's API.
    chat_template_kwargs: dict[str, Any] | None = None
    timeout: float | None = None

    def chat(self) -> Chat:
        """The same request in OpenAI's format.

        Raises:
            InvalidRequest: the request is invalid.
        """
        messages: list[dict[str, Any]] = []
        if self.system is not None:
            text = _text("system", self.system)
            messages.append({"role": "system", "content": text})
        for i, message in enumerate(self.messages):
            messages += _messages(f"messages[{i}]", message)
        tools = [_tool(i, tool) for i, tool in enumerate(self.tools or ())]
        choice: Any = None
        chosen = self.tool_choice
        if chosen is not None and tools:
            choice = {"auto": "auto", "any": "required", "none": "none"}.get(
                chosen.type, {"type": "function", "function": {"name": chosen.name}}
            )
        last = self.messages[-1] if self.messages else None
        single = chosen is not None and chosen.disable_parallel_tool_use
        fields = {
            "max_completion_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "chat_template_kwargs": self.chat_template_kwargs,
            "timeout": self.timeout,
            "parallel_tool_calls": False if single else None,
            # A last message of the assistant is the beginning of its answer.
            "continue_final_message": last is not None and last.role == "assistant",
        }
        return Chat.model_validate(
            {
                "messages": messages,
                "tools": tools or None,
                "tool_choice": choice,
                **{k: v for k, v in fields.items() if v is not None},
            }
        )


def _messages(where: str, message: MessagesMessage) -> list[dict[str, Any]]:
    """A message of blocks as messages in OpenAI's format."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    made: list[dict[str, Any]] = []
    texts: list[str] = []
    turn: dict[str, Any] = {"role": message.role}
    for i, block in enumerate(message.content):
        match block.get("type"):
            case "text" if isinstance(block.get("text"), str):
                texts.append(block["text"])
            case "thinking":
                turn["reasoning_content"] = str(block.get("thinking") or "")
            case "redacted_thinking":
                pass  # nobody here can read it
            case "tool_use":
                function = {
                    "name": block.get("name"),
                    "arguments": json.dumps(block.get("input") or {}),
                }
                call = {"id": block.get("id"), "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)
            case "tool_result":
                text = _text(f"{where}.content[{i}]", block.get("content") or "")
                answer = {"role": "tool", "content": text}
                made.append({**answer, "tool_call_id": block.get("tool_use_id")})
            case kind:
                raise InvalidRequest(
                    f"{where}.content[{i}] is of type {kind!r}, expected text, "
                    "thinking, tool_use or tool_result: only text is understood"
                )
    if texts or len(turn) > 1 or not made:
        made.append({**turn, "content": "".join(texts)})
    return made


def _text(where: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    blocks = content if isinstance(content, list) else [content]
    texts = [b.get("text") if isinstance(b, dict) else None for b in blocks]
    if not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{where} has a block that is no text; only text is")
    return "".join(map(str, texts))


def _tool(index: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("name"), str):
        raise InvalidRequest(
            f"tools[{index}] is of type {tool.get('type')!r}, expected a tool with a "
            "name and an input_schema: this server runs no tools of its own"
        )
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description") is not None:
        function["description"] = tool["description"]
    return {"type": "function", "function": function}
