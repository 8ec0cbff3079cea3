"""The reasoning of a model, separated from its answer."""

from typing import Literal

from jaxscale.checks import check_choice


type ReasoningFormat = Literal["qwen3", "deepseek_r1"]
"""Format of the reasoning in a text: Qwen3's, optional, within ``<think>`` and
``</think>``, or DeepSeek-R1's, always present, up to ``</think>``."""

_OPEN, _CLOSE = "<think>", "</think>"
TAIL = 12
"""Last tokens of a prompt, in which its template may begin or end the reasoning."""


class ReasoningParser:
    """Separates the reasoning at the beginning of a text from the rest, in a stream.

    Example:
        >>> parser = ReasoningParser("qwen3")
        >>> parser.add("<think>Is it? </th"), parser.add("ink> Yes.")
        (('Is it? ', ''), ('', ' Yes.'))
        >>> parser.flush()
        ('', '')
    """

    def __init__(self, format: ReasoningFormat, *, prompt: str = "") -> None:
        """Start without text.

        Args:
            format: How the model writes it.
            prompt: The end of the prompt; a template may begin or end the reasoning.
        """
        check_choice("reasoning format", format, ReasoningFormat)
        opened, closed = prompt.rfind(_OPEN), prompt.rfind(_CLOSE)
        self._inside = opened > closed or (format == "deepseek_r1" and closed < 0)
        # Whether reasoning may still begin: not after a word of the answer.
        self._begins = self._inside or closed < 0
        self._waiting = ""

    def add(self, text: str) -> tuple[str, str]:
        """The reasoning and the rest that are certain so far."""
        self._waiting += text
        if self._begins:
            start = self._waiting.lstrip()
            if len(start) < len(_OPEN) and _OPEN.startswith(start):
                return "", ""
            self._begins = False
            if start.startswith(_OPEN):
                self._inside = True
                self._waiting = start.removeprefix(_OPEN)
        if not self._inside:
            rest, self._waiting = self._waiting, ""
            return "", rest
        reasoning, found, rest = self._waiting.partition(_CLOSE)
        if found:
            self._inside, self._waiting = False, ""
            return reasoning, rest
        ends = range(len(_CLOSE) - 1, 0, -1)
        keep = next((k for k in ends if reasoning.endswith(_CLOSE[:k])), 0)
        end = len(reasoning) - keep
        self._waiting = reasoning[end:]
        return reasoning[:end], ""

    def flush(self) -> tuple[str, str]:
        """The rest, at the end of the text."""
        rest, self._waiting = self._waiting, ""
        return (rest, "") if self._inside else ("", rest)


def detect_reasoning(template: str) -> ReasoningFormat | None:
    """The reasoning format of a chat template, None if it has none.

    Example:
        >>> detect_reasoning("{{ content.split('</think>')[-1] }}")
        'qwen3'
    """
    if _CLOSE not in template:
        return None
    return "deepseek_r1" if "Assistant\uff5c>" in template else "qwen3"
