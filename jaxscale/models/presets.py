"""Every named configuration, by name."""

from collections.abc import Callable

from jaxscale.checks import check_choice
from jaxscale.models.config import DecoderConfig
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families import DECODERS, ENCODERS


PRESETS: dict[str, Callable[[], DecoderConfig]] = {
    preset.__name__: preset for family in DECODERS for preset in family.presets
}
"""Functions that make the configuration of a decoder, by name."""

ENCODER_PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    preset.__name__: preset for family in ENCODERS for preset in family.presets
}
"""Functions that make the configuration of an encoder, by name."""


def preset(name: str) -> DecoderConfig:
    """The configuration of the decoder called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> preset("llama3_8b").num_kv_heads
        8
    """
    check_choice("preset", name, sorted(PRESETS))
    return PRESETS[name]()


def encoder_preset(name: str) -> EncoderConfig:
    """The configuration of the encoder called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> encoder_preset("bert_base").num_layers
        12
    """
    check_choice("encoder preset", name, sorted(ENCODER_PRESETS))
    return ENCODER_PRESETS[name]()
