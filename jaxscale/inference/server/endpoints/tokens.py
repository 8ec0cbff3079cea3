"""``/tokenize`` and ``/detokenize``: the tokens of texts and conversations."""

from starlette.responses import JSONResponse, Response
from starlette.types import Receive

from jaxscale.inference.request import InvalidRequest
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.calls import Caller, check_length, prepared
from jaxscale.inference.server.endpoints.conversation import dumped, template
from jaxscale.inference.server.schema.chat import Detokenize, Tokenize
from jaxscale.inference.server.stream import attended


_COUNTED = 2**20
"""Characters, or tokens, that are taken at least."""
_SHARE = 8  # times the tokens of the model, if that is more


async def tokenize(
    body: Tokenize, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer ``/tokenize``.

    Raises:
        InvalidRequest: there is neither prompt nor messages, both, or too much.
    """

    def answer() -> Response:
        ids = _tokenized(body, model)
        return JSONResponse(
            {"tokens": ids, "count": len(ids), "max_model_len": model.longest}
        )

    return await attended(receive, prepared(caller, answer))


async def detokenize(
    body: Detokenize, model: TextModel, caller: Caller, receive: Receive
) -> Response:
    """Answer ``/detokenize``.

    Raises:
        InvalidRequest: there are too many tokens, or some that there are not.
    """

    def answer() -> Response:
        check_length(len(body.tokens), max(_COUNTED, model.longest))
        size = model.backend.config.vocab_size
        if any(not 0 <= token < size for token in body.tokens):
            raise InvalidRequest(f"tokens holds ids outside the vocabulary of {size}")
        return JSONResponse({"prompt": model.tokenizer.decode(body.tokens)})

    return await attended(receive, prepared(caller, answer))


def _tokenized(body: Tokenize, model: TextModel) -> list[int]:
    """The token ids of a prompt or of messages.

    Raises:
        InvalidRequest: there is neither, both, or too much.
    """
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages")
    most = max(_COUNTED, _SHARE * model.longest)

    def check(text: str) -> None:
        """Texts that do not fit are counted too, within limits."""
        if len(text) > most:
            raise InvalidRequest(
                f"a text of {len(text)} characters is too long to be counted: at most "
                f"{most} are; send it in parts"
            )

    if body.prompt is not None:
        check(body.prompt)
        special = body.add_special_tokens is not False
        return model.encode(body.prompt, add_special_tokens=special)
    goes_on = bool(body.continue_final_message)
    return template(model).encode(
        dumped(body.messages or []),
        tools=body.tools or (),
        add_generation_prompt=body.add_generation_prompt is not False and not goes_on,
        continue_final_message=goes_on,
        variables=body.chat_template_kwargs,
        check=check,
    )
