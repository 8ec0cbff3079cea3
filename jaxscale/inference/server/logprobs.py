"""Log-probabilities, in the formats of chat completions and completions."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxscale.inference.output import TokenLogprobs
from jaxscale.inference.request import Request
from jaxscale.inference.server.backend import TextModel
from jaxscale.inference.server.endpoints.conversation import Conversation
from jaxscale.inference.text import Detokenizer


def chat_logprobs(
    conversation: Conversation, items: Sequence[TokenLogprobs]
) -> Mapping[str, list[dict[str, Any]]] | None:
    """Tokens with their log-probabilities, in the format of chat completions."""
    if conversation.request.params.logprobs is None:
        return None
    model = conversation.model

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": model.token_text(token),
            "logprob": logprob,
            "bytes": list(model.token_bytes(token)),
        }

    return {
        "content": [
            {
                **entry(item.token, item.logprob),
                "top_logprobs": [entry(token, value) for token, value in item.top],
            }
            for item in items
        ]
    }


class CompletionLogprobs:
    """The log-probabilities of one completion, in the format of completions."""

    def __init__(
        self, model: TextModel, request: Request, *, echo: str | None, special: bool
    ) -> None:
        """Nothing has come yet.

        Args:
            model: Knows the texts of tokens.
            request: Whose.
            echo: The prompt as it is repeated before the completion, if it is.
            special: Whether control tokens of the prompt are part of that.
        """
        self._model, self._echo = model, echo or ""
        self._prompt = Detokenizer(model.tokenizer, skip_special_tokens=not special)
        self._text = Detokenizer(
            model.tokenizer,
            request.prompt,
            skip_special_tokens=request.params.skip_special_tokens,
        )
        self._prompt_length, self._length = 0, len(self._echo)

    def listed(
        self,
        prompt: Sequence[TokenLogprobs | int],
        items: Sequence[TokenLogprobs],
        most: int,
    ) -> dict[str, Any]:
        """The next tokens.

        Args:
            prompt: Tokens of the prompt; an id where nothing is known of one.
            items: Tokens of the completion.
            most: Characters of the text, prompt included: what a stop string has cut
                off has no place in it.
        """
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        made: dict[str, Any] = {name: [] for name in names}
        for item in prompt:
            token = item if isinstance(item, int) else item.token
            offset = min(self._prompt_length, len(self._echo))
            self._add(made, token, None if isinstance(item, int) else item, offset)
            self._prompt_length += len(self._prompt.add(token))
        for item in items:
            self._add(made, item.token, item, min(self._length, most))
            self._length += len(self._text.add(item.token))
        return made

    def _add(
        self, made: dict[str, Any], token: int, item: TokenLogprobs | None, offset: int
    ) -> None:
        made["tokens"].append(self._model.token_text(token))
        made["token_logprobs"].append(None if item is None else item.logprob)
        made["top_logprobs"].append(None if item is None else self._top(item))
        made["text_offset"].append(offset)

    def _top(self, item: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens, and the one that stands there; of one text the best."""
        pairs = sorted((*item.top, (item.token, item.logprob)), key=lambda x: -x[1])
        top: dict[str, float] = {}
        for token, value in pairs:
            top.setdefault(self._model.token_text(token), value)
        return top


def prompt_logprobs(
    model: TextModel, scores: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any] | None]:
    """Of each token of the prompt: what is known of it, and of likelier ones, by id."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"logprob": logprob, "decoded_token": model.token_text(token)}

    return [
        None
        if score is None
        else {
            str(t): entry(t, v) for t, v in ((score.token, score.logprob), *score.top)
        }
        for score in scores
    ]
