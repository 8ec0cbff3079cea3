"""Reasoning at the beginning of texts."""

import pytest

from jaxscale.inference.reasoning import ReasoningParser, detect_reasoning


@pytest.mark.parametrize("size", [1, 4, 1000])
@pytest.mark.parametrize(
    ("format", "prompt", "text", "reasoning", "rest"),
    [
        (
            "qwen3",
            "",
            "<think>\na < b </thin\n</think>\n\nYes",
            "\na < b </thin\n",
            "\n\nYes",
        ),
        ("qwen3", "", "\n <think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("qwen3", "", "no <think>a</think>", "", "no <think>a</think>"),
        ("qwen3", "", "<thin", "", "<thin"),
        ("qwen3", "assistant\n<think>\n", "a</think>b", "a", "b"),
        ("qwen3", "assistant\n<think>\n", "cut off </th", "cut off </th", ""),
        ("qwen3", "<think>\n\n</think>\n\n", "b <think>", "", "b <think>"),
        ("qwen3", "<think>\n\n</think>\n\n", "<think>b", "", "<think>b"),
        ("deepseek_r1", "", "a</think>b", "a", "b"),
        ("deepseek_r1", "", "<think>a</think>b", "a", "b"),
        ("deepseek_r1", "</think>", "b", "", "b"),
    ],
)
def test_reasoning(format, prompt, text, reasoning, rest, size):
    parser = ReasoningParser(format, prompt=prompt)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    found = [*map(parser.add, pieces), parser.flush()]
    assert "".join(first for first, _ in found) == reasoning
    assert "".join(second for _, second in found) == rest


def test_formats_of_templates():
    assert detect_reasoning("{{ '<think>\\n\\n</think>' }}") == "qwen3"
    assert detect_reasoning("{{ '<\uff5cAssistant\uff5c></think>' }}") == "deepseek_r1"
    assert detect_reasoning("{{ messages }}") is None
