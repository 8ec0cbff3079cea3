"""The settings of a ``config.json`` that families have in common.

Read are the keys of every version of transformers: version 5 renamed ``torch_dtype`` to
``dtype`` and joined ``rope_theta`` and ``rope_scaling`` in ``rope_parameters``. Written
are those of version 5. A setting that would change the result and that our models do
not have is an error, never dropped.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.nn.embeddings import RopeScaling


class Keys(dict[str, Any]):
    """A ``config.json`` whose missing keys are errors that name them.

    A null is a missing key, but for `nulls`.
    """

    nulls: frozenset[str]
    """The keys that the file sets to null, which need not be their default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: v for k, v in values.items() if v is not None})
        self.nulls = frozenset(k for k, v in values.items() if v is None)

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"config.json of model_type {self['model_type']!r} lacks the key {key!r}"
        )


def require(values: Mapping[str, Any], key: str, expected: Any) -> None:
    """Raise where a setting has another value than the only one that is supported."""
    found = values.get(key, expected)
    if found != expected:
        raise ValueError(
            f"{key} {found!r} of config.json is not supported for model_type "
            f"{values['model_type']!r}; expected {expected!r}"
        )


def divided_width(width_key: str, width: int, heads_key: str, heads: int) -> int:
    """The part of a width that each head has.

    Raises:
        ValueError: one is no positive integer, or the heads do not divide the width.
    """
    for key, value in ((width_key, width), (heads_key, heads)):
        if not isinstance(value, int) or value < 1:
            raise ValueError(
                f"{key} {value!r} of config.json must be a positive integer"
            )
    if width % heads:
        raise ValueError(
            f"{width_key} {width} of config.json must be a multiple of {heads_key} "
            f"{heads}"
        )
    return width // heads


type PlainActivation = Literal["gelu", "gelu_tanh", "relu"]

# The first two are exact, the next three the same approximation by tanh.
ACTIVATIONS: dict[str, PlainActivation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Our activations by the names of transformers."""
_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "tanh": "tanh"}


def read_activation(
    values: Keys, key: str, default: str | None = "gelu"
) -> PlainActivation:
    """Our name of the activation that a key of ``config.json`` names.

    Args:
        values: The parsed file.
        key: Which of its keys.
        default: What a missing key means; None makes it an error.

    Raises:
        ValueError: we do not have the activation, or the key is missing.
    """
    name = values[key] if default is None else values.get(key, default)
    if name not in ACTIVATIONS:
        raise ValueError(
            f"{key} {name!r} of config.json is not supported; use one of "
            f"{sorted(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def activation_name(activation: str) -> str:
    """The name that transformers gives to an activation of ours.

    One without a name becomes the closest; it is read back as what it is not, which
    `jaxscale.models.families.config_to_hf` reports.
    """
    return _NAMES.get(activation, "gelu_new")


def read_rope(values: Keys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies, from the keys of any version.

    Raises:
        ValueError: the kind of scaling is not supported, or one of its keys is missing.
    """
    old = values.get("rope_scaling") or {}
    rope = Keys(
        {"rope_theta": values.get("rope_theta", 10_000.0)}
        | old
        | (values.get("rope_parameters") or {})
        | {"model_type": values["model_type"]}
    )
    theta = float(rope["rope_theta"])
    # "type" is what versions before 4.43 wrote.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported "
            f"for model_type {values['model_type']!r}; expected 1.0"
        )
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling(kind="linear", factor=float(rope["factor"]))
        case "llama3":
            return theta, RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=rope.get(
                    "original_max_position_embeddings",
                    values["max_position_embeddings"],
                ),
            )
        case "yarn":
            return theta, _read_yarn(rope, values["max_position_embeddings"])
    raise ValueError(
        f"rope_type {kind!r} is not supported; use 'default', 'linear', 'llama3' or "
        "'yarn'"
    )


def _read_yarn(rope: Keys, max_positions: int) -> RopeScaling:
    factor = float(rope["factor"])
    attention_factor = rope.get("attention_factor")
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention_factor is None and over and under and factor > 1:
        growth = 0.1 * math.log(factor)
        attention_factor = (growth * over + 1) / (growth * under + 1)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=rope.get(
            "original_max_position_embeddings", max_positions
        ),
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=rope.get("truncate", True),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )


def write_rope(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The value of ``rope_parameters`` that `read_rope` reads."""
    rope = {"rope_theta": theta, "rope_type": "default"}
    if scaling is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling is not None and scaling.kind == "llama3":
        rope |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": (
                scaling.original_max_position_embeddings
            ),
        }
    if scaling is not None and scaling.kind == "yarn":
        rope |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "original_max_position_embeddings": (
                scaling.original_max_position_embeddings
            ),
        }
        if scaling.attention_factor is not None:
            rope["attention_factor"] = scaling.attention_factor
    return rope
