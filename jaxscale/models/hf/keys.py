"""The settings of a ``config.json`` that families have in common.

Read are the keys of every version of transformers: version 5 renamed ``torch_dtype`` to
``dtype`` and joined ``rope_theta`` and ``rope_scaling`` in ``rope_parameters``. Written
are those of version 5 and, of rotary embeddings, those of version 4 beside them. Where
a file has both, what version 5 takes counts. A setting that would change the result and
that our models do not have is an error, never dropped.
"""

import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxscale.models.config import DecoderConfig
from jaxscale.nn.embeddings import RopeScaling


_RANGES = {
    # Positions and ids of tokens are integers of 32 bits.
    "size": (1, 2**31 - 1),
    "count": (0, 2**31 - 1),
    "layers": (1, 10_000),
    # -1 stands for the default of transformers.
    "size or default": (-1, 2**31 - 1),
}
"""The least and the largest value of each kind of integer."""

_NUMBERS = 1e-37, 1e38
"""The least and the largest number that is not an integer, both of fp32."""

_TYPES = {
    "flag": (bool, "true or false"),
    "name": (str, "a string"),
    "object": (dict, "an object"),
    "list": (list, "a list of strings"),
    "names": ((list, str), "a string or a list of strings"),
}
"""The type of each kind of value that is no number."""

_KEYS = {
    "size": """
        vocab_size hidden_size dim n_embd embedding_size intermediate_size hidden_dim
        n_inner num_attention_heads n_heads n_head num_key_value_heads head_dim
        attention_head_size rotary_dim max_position_embeddings n_positions
        original_max_position_embeddings local_attention global_attn_every_n_layers
        num_hidden_groups inner_group_num conv_groups sliding_window
        sliding_window_pattern query_pre_attn_scalar
    """,
    "layers": "num_hidden_layers n_layers n_layer",
    "count": """
        type_vocab_size pad_token_id conv_kernel_size num_labels max_window_layers
    """,
    "size or default": "max_relative_positions position_buckets",
    "number": """
        rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps rope_theta factor
        low_freq_factor high_freq_factor partial_rotary_factor global_rope_theta
        local_rope_theta rotary_pct rotary_emb_base attention_factor
        rope_local_base_freq attn_logit_softcapping final_logit_softcapping
    """,
    # Zero stands for the default of transformers.
    "number or zero": "mscale mscale_all_dim beta_fast beta_slow",
    "flag": """
        attention_bias mlp_bias norm_bias tie_word_embeddings classifier_bias
        decoder_bias position_biased_input legacy relative_attention share_att_key
        is_decoder add_cross_attention rotary scale_attn_weights
        scale_attn_by_inverse_layer_idx use_sliding_window use_parallel_residual
        truncate talking_head use_bidirectional_attention
    """,
    "name": """
        model_type hidden_act activation activation_function hidden_activation
        pooler_hidden_act classifier_activation classifier_pooling conv_act
        norm_rel_ebd position_embedding_type rope_type type
    """,
    "object": """
        rope_scaling rope_parameters full_attention sliding_attention id2label
    """,
    "list": "layer_types architectures",
    "names": "pos_att_type",
}
_KIND_OF = {key: kind for kind, keys in _KEYS.items() for key in keys.split()}
"""The kind of each key that a family reads."""


class Keys(dict[str, Any]):
    """A ``config.json`` whose missing and mistyped keys are errors that name them.

    A null is a missing key, but for `nulls`. A value is checked when a family reads
    it: what is never read may be anything.
    """

    nulls: frozenset[str]
    """The keys that the file sets to null, which need not be their default."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: v for k, v in values.items() if v is not None})
        self.nulls = frozenset(k for k, v in values.items() if v is None)

    def __getitem__(self, key: str) -> Any:
        return _checked(key, super().__getitem__(key))

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, or `default` where the file lacks it."""
        return _checked(key, super().get(key, default)) if key in self else default

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"config.json of model_type {self['model_type']!r} lacks the key {key!r}"
        )


def _checked(key: str, value: Any) -> Any:
    """Return the value of a key, which must be of the key's kind.

    Raises:
        ValueError: it is not.
    """
    kind = _KIND_OF.get(key)
    if kind is None:
        return value
    if kind in _RANGES:
        low, high = _RANGES[kind]
        fits = type(value) is int and low <= value <= high
        expected = f"an integer from {low} to {high}"
    elif kind in ("number", "number or zero"):
        # An integer may exceed every float; a float may vanish in fp32.
        low, high = _NUMBERS
        fits = type(value) in (int, float) and low <= value <= high
        expected = f"a number from {low} to {high}"
        if kind == "number or zero":
            fits = fits or (type(value) in (int, float) and value == 0)
            expected += ", or 0"
    else:
        types, expected = _TYPES[kind]
        items = value if isinstance(value, list) else ()
        fits = isinstance(value, types) and all(isinstance(x, str) for x in items)
    if not fits:
        raise ValueError(f"{key} {value!r:.80} of config.json must be {expected}")
    return value


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
        ValueError: the heads do not divide the width.
    """
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
        key: The key to read.
        default: Meaning of a missing key; None makes it an error.

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
    `jaxscale.models.families.registry.config_to_hf` reports.
    """
    return _NAMES.get(activation, "gelu_new")


def check_finite(values: Any, name: str = "the value") -> None:
    """Stop at a number of a ``config.json`` that is infinite or no number.

    JSON has no such numbers, but Python reads them.

    Raises:
        ValueError: there is one.
    """
    if isinstance(values, float) and not math.isfinite(values):
        raise ValueError(f"{name} {values!r} of config.json must be a finite number")
    pairs = values.items() if isinstance(values, dict) else ()
    items = [(name, item) for item in values] if isinstance(values, list) else pairs
    for key, value in items:
        check_finite(value, key)


def read_rope(values: Keys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies, from the keys of any version.

    As in transformers 5 all of ``rope_parameters`` yields to ``rope_scaling``, and the
    ``original_max_position_embeddings`` of either to that of the file.

    Raises:
        ValueError: the kind of scaling is not supported, or one of its keys is missing.
    """
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    rope = Keys(
        {"rope_theta": 10_000.0}
        | _of(values)
        | given
        | {"model_type": values["model_type"]}
    )
    for key in (FULL, SLIDING):
        require(rope, key, None)
    theta = float(rope["rope_theta"])
    # "type" is what versions before 4.43 wrote.
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {rope['partial_rotary_factor']} is not supported "
            f"for model_type {values['model_type']!r}; expected 1.0"
        )
    if kind == "default":
        return theta, None
    longest = values["max_position_embeddings"]
    original = values.get(_ORIGINAL, rope.get(_ORIGINAL, longest))
    match kind:
        case "linear":
            return theta, RopeScaling(kind="linear", factor=float(rope["factor"]))
        case "dynamic":
            return theta, RopeScaling(
                kind="dynamic",
                factor=float(rope["factor"]),
                original_max_position_embeddings=longest,
            )
        case "llama3":
            return theta, RopeScaling(
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position_embeddings=original,
            )
        case "yarn":
            stretch = longest / original if "factor" in rope.nulls else rope["factor"]
            return theta, _read_yarn(rope, float(stretch), original)
    raise ValueError(
        f"rope_type {kind!r} is not supported; use 'default', 'linear', 'llama3', "
        "'yarn' or 'dynamic'"
    )


def beside(values: Keys, rope: Mapping[str, Any]) -> Keys:
    """What `read_rope` reads, for the layers of a kind with settings of their own."""
    same = "model_type", "max_position_embeddings", "partial_rotary_factor"
    kept = {key: values[key] for key in same if key in values}
    return Keys(kept | {"rope_parameters": rope})


_ORIGINAL = "original_max_position_embeddings"


def _of(values: Keys) -> dict[str, Any]:
    """The settings of rotary embeddings outside of their object."""
    keys = "rope_theta", "partial_rotary_factor"
    return {key: values[key] for key in keys if key in values}


def _read_yarn(rope: Keys, factor: float, original: int) -> RopeScaling:
    attention_factor = rope.get("attention_factor")
    over, under = rope.get("mscale"), rope.get("mscale_all_dim")
    if attention_factor is None and over and under and factor > 1:
        growth = 0.1 * math.log(factor)
        attention_factor = (growth * over + 1) / (growth * under + 1)
    return RopeScaling(
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=float(rope.get("beta_fast") or 32.0),
        beta_slow=float(rope.get("beta_slow") or 1.0),
        truncate=rope.get("truncate", True),
        attention_factor=None if attention_factor is None else float(attention_factor),
    )


FULL, SLIDING = "full_attention", "sliding_attention"


def full_layers(values: Keys, window: int | None) -> tuple[int, ...]:
    """The layers that see the whole sequence, by ``layer_types``.

    Raises:
        ValueError: there is another kind, or not one for each layer.
    """
    count, types = values["num_hidden_layers"], values["layer_types"]
    allowed = {FULL} if window is None else {FULL, SLIDING}
    if len(types) != count or not allowed.issuperset(types):
        raise ValueError(
            f"layer_types {types} of config.json is not supported; expected one of "
            f"{sorted(allowed)} for each of {count} layers"
            + (" without a sliding window" if window is None else "")
        )
    return tuple(i for i, kind in enumerate(types) if kind == FULL)


def layer_types(config: DecoderConfig) -> list[str]:
    """The value that `full_layers` reads."""
    windows = [config.attention(i).window for i in range(config.num_layers)]
    return [FULL if window is None else SLIDING for window in windows]


def write_rope_keys(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    """The keys that `read_rope` reads, of transformers 4 and 5."""
    rope = write_rope(theta, scaling)
    return {
        "rope_theta": theta,
        "rope_scaling": None if scaling is None else without_theta(rope),
        "rope_parameters": rope,
    }


def without_theta(rope: dict[str, Any]) -> dict[str, Any]:
    """The value of ``rope_scaling`` in transformers 4, whose base is another key."""
    return {key: value for key, value in rope.items() if key != "rope_theta"}


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
