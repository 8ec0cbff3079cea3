"""Every named configuration, by name."""

from collections.abc import Callable

from jaxscale.models import albert, bert, deberta, distilbert, gpt, llama, modernbert
from jaxscale.models.config import DecoderConfig
from jaxscale.models.encoder_config import EncoderConfig


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
"""Functions that make the configuration of a decoder."""

ENCODER_PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    function.__name__: function
    for function in (
        bert.bert_tiny,
        bert.bert_base,
        bert.bert_large,
        bert.minilm_l6,
        bert.roberta_tiny,
        bert.roberta_base,
        bert.roberta_large,
        albert.albert_tiny,
        albert.albert_base,
        albert.albert_large,
        distilbert.distilbert_tiny,
        distilbert.distilbert_base,
        modernbert.modernbert_tiny,
        modernbert.modernbert_base,
        modernbert.modernbert_large,
        deberta.deberta_v3_tiny,
        deberta.deberta_v3_xsmall,
        deberta.deberta_v3_small,
        deberta.deberta_v3_base,
        deberta.deberta_v3_large,
        deberta.mdeberta_v3_base,
        deberta.deberta_v2_tiny,
        deberta.deberta_v2_xlarge,
        deberta.deberta_v2_xxlarge,
    )
}
"""Functions that make the configuration of an encoder."""


def preset(name: str) -> DecoderConfig:
    """The configuration of the decoder called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> preset("llama3_8b").num_kv_heads
        8
    """
    if name not in PRESETS:
        raise ValueError(f"preset {name!r} is unknown; use one of {sorted(PRESETS)}")
    return PRESETS[name]()


def encoder_preset(name: str) -> EncoderConfig:
    """The configuration of the encoder called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> encoder_preset("bert_base").num_layers
        12
    """
    if name not in ENCODER_PRESETS:
        raise ValueError(
            f"encoder preset {name!r} is unknown; use one of {sorted(ENCODER_PRESETS)}"
        )
    return ENCODER_PRESETS[name]()
