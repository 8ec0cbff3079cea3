"""The ``config.json`` of Hugging Face transformers, to and from `DecoderConfig`.

Read are the keys of every version: version 5 renamed ``torch_dtype`` to ``dtype`` and
joined ``rope_theta`` and ``rope_scaling`` in ``rope_parameters``. Written are those of
version 5. A setting that would change the result and that `Decoder` does not have is
an error, never dropped.
"""

from collections.abc import Mapping
from typing import Any

from jaxscale.models.config import DecoderConfig
from jaxscale.nn.embeddings import RopeScaling


ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "llama": "LlamaForCausalLM",
}
"""The classes of transformers whose files are read and written, by ``model_type``."""

# All but "gelu" are the same approximation by tanh under different implementations.
_ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_ACTIVATION_NAMES = {"gelu": "gelu", "gelu_tanh": "gelu_new"}

# What a `DecoderConfig` must be for a family to express it, where it has no choice.
_FIXED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "norm": "layernorm",
        "position": "learned",
        "parallel_block": False,
        "attention_bias": True,
        "attention_out_bias": True,
        "mlp_bias": True,
        "lm_head_bias": False,
    },
    "gptj": {
        "norm": "layernorm",
        "position": "rope",
        "rope_interleaved": True,
        "rope_theta": 10_000.0,
        "rope_scaling": None,
        "parallel_block": True,
        "attention_bias": False,
        "attention_out_bias": False,
        "mlp_bias": True,
        "lm_head_bias": True,
        "tie_embeddings": False,
    },
    "llama": {
        "norm": "rmsnorm",
        "activation": "swiglu",
        "position": "rope",
        "rope_interleaved": False,
        "parallel_block": False,
        "lm_head_bias": False,
    },
}


def model_type(config: DecoderConfig) -> str:
    """The family of transformers that computes what `config` describes.

    Raises:
        ValueError: no family does; the message says what the closest one lacks.

    Example:
        >>> from jaxscale.models.llama import llama3_8b
        >>> model_type(llama3_8b())
        'llama'
    """
    differences = {family: _differences(config, family) for family in _FIXED}
    closest = min(differences, key=lambda family: len(differences[family]))
    if differences[closest]:
        raise ValueError(
            "config has no counterpart in transformers; the closest, "
            f"{ARCHITECTURES[closest]}, needs " + ", ".join(differences[closest])
        )
    return closest


def config_from_hf(values: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a ``config.json`` describes.

    Args:
        values: The parsed file.

    Raises:
        ValueError: the model type, or a setting that matters, is not supported, or a
            key is missing.

    Example:
        >>> config = config_from_hf({
        ...     "model_type": "llama", "vocab_size": 128, "hidden_size": 64,
        ...     "intermediate_size": 96, "num_hidden_layers": 2,
        ...     "num_attention_heads": 4, "max_position_embeddings": 256,
        ...     "rms_norm_eps": 1e-6, "rope_theta": 5e5,
        ... })
        >>> config.num_kv_heads, config.head_dim, config.rope_theta
        (4, 16, 500000.0)
    """
    family = values.get("model_type")
    readers = {"gpt2": _from_gpt2, "gptj": _from_gptj, "llama": _from_llama}
    if family not in readers:
        raise ValueError(
            f"model_type {family!r} is not supported; use one of {sorted(readers)}"
        )
    require(values, "quantization_config", None)
    return readers[family](Keys(values))


def config_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` of `config`, in the keys of transformers 5.

    The ids of control tokens are null: they belong to a tokenizer.

    Raises:
        ValueError: no model of transformers computes what `config` describes.

    Example:
        >>> from jaxscale.models.gpt import gpt2_small
        >>> values = config_to_hf(gpt2_small())
        >>> values["architectures"], values["n_embd"]
        (['GPT2LMHeadModel'], 768)
        >>> config_from_hf(values) == gpt2_small()
        True
    """
    family = model_type(config)
    values = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if family == "llama":
        return values | _to_llama(config)
    values |= {
        "n_positions": config.max_seq_len,
        "n_embd": config.d_model,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.d_ff,
        "activation_function": _ACTIVATION_NAMES[config.activation],
        "layer_norm_epsilon": config.norm_eps,
    }
    if family == "gptj":
        values["rotary_dim"] = config.rotary_dim or config.head_dim
    return values


# ------------------------------------------------------------------------------------
# Families


class Keys(dict[str, Any]):
    """A ``config.json`` whose missing keys are errors that name them.

    A null is a missing key.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({k: v for k, v in values.items() if v is not None})

    def __missing__(self, key: str) -> Any:
        raise ValueError(
            f"config.json of model_type {self['model_type']!r} lacks the key {key!r}"
        )


def _from_gpt2(values: Keys) -> DecoderConfig:
    require(values, "add_cross_attention", False)
    require(values, "scale_attn_weights", True)
    require(values, "scale_attn_by_inverse_layer_idx", False)
    return DecoderConfig(
        **_gpt_sizes(values),
        **_FIXED["gpt2"],
        tie_embeddings=values.get("tie_word_embeddings", True),
    )


def _from_gptj(values: Keys) -> DecoderConfig:
    # Keys of the published file that transformers itself no longer reads.
    require(values, "rotary", True)
    require(values, "scale_attn_weights", True)
    require(values, "tie_word_embeddings", False)
    sizes = _gpt_sizes(values)
    return DecoderConfig(**sizes, **_FIXED["gptj"], rotary_dim=values["rotary_dim"])


def _gpt_sizes(values: Keys) -> dict[str, Any]:
    """What GPT-2 and GPT-J call by the same names."""
    width, heads = values["n_embd"], values["n_head"]
    activation = values["activation_function"]
    if activation not in _ACTIVATIONS:
        raise ValueError(
            f"activation_function {activation!r} is not supported; use one of "
            f"{sorted(_ACTIVATIONS)}"
        )
    return {
        "vocab_size": values["vocab_size"],
        "d_model": width,
        "num_layers": values["n_layer"],
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": divided_width("n_embd", width, "n_head", heads),
        "d_ff": values.get("n_inner") or 4 * width,
        "max_seq_len": values["n_positions"],
        "norm_eps": float(values["layer_norm_epsilon"]),
        "activation": _ACTIVATIONS[activation],
    }


def _from_llama(values: Keys) -> DecoderConfig:
    require(values, "hidden_act", "silu")
    require(values, "sliding_window", None)
    width, heads = values["hidden_size"], values["num_attention_heads"]
    theta, scaling = _rope(values)
    return DecoderConfig(
        **_FIXED["llama"],
        vocab_size=values["vocab_size"],
        d_model=width,
        num_layers=values["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim")
        or divided_width("hidden_size", width, "num_attention_heads", heads),
        d_ff=values["intermediate_size"],
        max_seq_len=values["max_position_embeddings"],
        norm_eps=float(values["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        attention_bias=values.get("attention_bias", False),
        attention_out_bias=values.get("attention_bias", False),
        mlp_bias=values.get("mlp_bias", False),
        tie_embeddings=values.get("tie_word_embeddings", False),
    )


def _to_llama(config: DecoderConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
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
    return {
        "hidden_size": config.d_model,
        "intermediate_size": config.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_parameters": rope,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }


def _rope(values: Keys) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary frequencies, from the keys of any version."""
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
            "for model_type 'llama'; expected 1.0"
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
    raise ValueError(
        f"rope_type {kind!r} is not supported; use 'default', 'linear' or 'llama3'"
    )


# ------------------------------------------------------------------------------------
# Checks


def require(values: Mapping[str, Any], key: str, expected: Any) -> None:
    """Stops at a setting that `Decoder` does not have."""
    found = values.get(key, expected)
    if found != expected:
        raise ValueError(
            f"{key} {found!r} of config.json is not supported for model_type "
            f"{values['model_type']!r}; expected {expected!r}"
        )


def divided_width(width_key: str, width: int, heads_key: str, heads: int) -> int:
    """The part of a width that each head has; stops where it does not divide."""
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


def _differences(config: DecoderConfig, family: str) -> list[str]:
    """What would have to change for `family` to express `config`."""
    wanted = dict(_FIXED[family])
    wanted |= {"window": None, "attention_softcap": None}
    if family == "llama":
        wanted["attention_out_bias"] = config.attention_bias
        if config.rotary_dim not in (None, config.head_dim):
            wanted["rotary_dim"] = None
    else:
        wanted["num_kv_heads"] = config.num_heads
        if config.head_dim * config.num_heads != config.d_model:
            wanted["head_dim"] = config.d_model / config.num_heads
        if config.activation not in _ACTIVATION_NAMES:
            wanted["activation"] = "gelu_tanh"
    return [
        f"{name}={value!r} instead of {getattr(config, name)!r}"
        for name, value in wanted.items()
        if getattr(config, name) != value
    ]
