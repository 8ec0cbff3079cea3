"""Every named configuration, by name."""

from collections.abc import Callable

from jaxscale.models import gpt, llama
from jaxscale.models.config import DecoderConfig


PRESETS: dict[str, Callable[[], DecoderConfig]] = {
    function.__name__: function
    for function in (
        gpt.gpt2_tiny,
        gpt.gpt2_small,
        gpt.gpt2_medium,
        gpt.gpt2_large,
        gpt.gpt2_xl,
        gpt.gptj_tiny,
        gpt.gptj_6b,
        llama.llama_tiny,
        llama.llama_1b,
        llama.llama1_7b,
        llama.llama1_13b,
        llama.llama1_33b,
        llama.llama1_65b,
        llama.llama2_7b,
        llama.llama2_13b,
        llama.llama2_70b,
        llama.llama3_8b,
        llama.llama3_70b,
        llama.llama3_1_8b,
        llama.llama3_1_70b,
        llama.llama3_1_405b,
        llama.llama3_2_1b,
        llama.llama3_2_3b,
    )
}
"""Functions that make a configuration."""


def preset(name: str) -> DecoderConfig:
    """The configuration called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> preset("llama3_8b").num_kv_heads
        8
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; use one of {sorted(PRESETS)}")
    return PRESETS[name]()
