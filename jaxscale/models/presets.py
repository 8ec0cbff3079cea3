"""Every named configuration, by name."""

import difflib
import re
from collections.abc import Callable, Collection

from jaxscale.models.config import DecoderConfig
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.families.registry import DECODERS, ENCODERS


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
    _check(name, "preset", PRESETS, ENCODER_PRESETS)
    return PRESETS[name]()


def encoder_preset(name: str) -> EncoderConfig:
    """The configuration of the encoder called `name`.

    Raises:
        ValueError: no preset has this name.

    Example:
        >>> encoder_preset("bert_base").num_layers
        12
    """
    _check(name, "encoder_preset", ENCODER_PRESETS, PRESETS)
    return ENCODER_PRESETS[name]()


def _check(
    name: str, function: str, known: Collection[str], others: Collection[str]
) -> None:
    """Raise for an unknown name, with those that are meant by it."""
    if name in known:
        return
    written = re.sub(r"[^a-z0-9]+", "_", name.lower().rpartition("/")[2])
    if found := [other for other in others if written.startswith(other)]:
        raise ValueError(
            f"{function} {name!r} is unknown, but the other kind of model has it: use "
            f"{'preset' if function != 'preset' else 'encoder_preset'}({found[-1]!r})"
        )
    close = [x for x in known if x.startswith(f"{written}_")]
    close += difflib.get_close_matches(written, known, n=3, cutoff=0.5)
    close = [*dict.fromkeys(close)][:3]
    table = "PRESETS" if function == "preset" else "ENCODER_PRESETS"
    guess = f"did you mean {', '.join(close)}? " if close else ""
    raise ValueError(
        f"{function} {name!r} is unknown; {guess}jaxscale.models.{table} has all"
    )
