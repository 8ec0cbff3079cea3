"""Adapters (LoRA) from directories that peft has written, with peft not needed.

Legend: L layers, D input features, F output features.

References:
    https://huggingface.co/docs/peft/developer_guides/checkpoint describes the files.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors
from flax import nnx

from jaxscale.models.adapters import Adapter, Factors
from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.families.registry import family_of
from jaxscale.models.hf.checksums import check_files
from jaxscale.models.hf.files import read_json_object
from jaxscale.models.hf.names import TensorMap
from jaxscale.models.hf.tensors import columns_of, parameters_of


CONFIG_FILE = "adapter_config.json"
"""The settings of an adapter, by which its directory is known."""
_WEIGHTS = "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

_READ = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
_WITHOUT_EFFECT = (
    *("auto_mapping", "base_model_name_or_path", "revision", "peft_version"),
    *("task_type", "inference_mode", "lora_dropout", "fan_in_fan_out"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("megatron_core", "megatron_config", "eva_config", "loftq_config"),
    *("runtime_config", "qalora_group_size", "ensure_weight_tying"),
)
"""Settings that say how an adapter was made, or which layers it has: its tensors do."""
_ALLOWED = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # The others change the weights of the model too.
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
}


def read_peft(directory: Path, config: DecoderConfig) -> Adapter:
    """The adapter of a directory.

    Args:
        directory: Holds ``adapter_config.json`` and ``adapter_model.safetensors``.
        config: Shape of the model that it is for.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is damaged, a tensor is missing or has no place in the
            blocks of the model, or the adapter is of a kind that is not supported:
            DoRA, biases, whole modules, embeddings, the output projection.
    """
    settings = read_json_object(file := directory / CONFIG_FILE)
    _check_settings(settings, file)
    places = _places(config)
    found = _read_tensors(directory / _WEIGHTS, places)
    for module in _wanted(settings, places):
        if module not in found:
            raise ValueError(
                f"{directory / _WEIGHTS} lacks the factors of {module}, which "
                f"target_modules of {file.name} names; the download is incomplete, or "
                "the adapter is of another model"
            )
    # A model of which every parameter is described, and none made.
    model = jax.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0)))
    shapes = {name: leaf.shape for name, leaf in parameters_of(model).items()}
    layers: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
    for module, (a, b) in found.items():
        layer, entry = places[module]
        rank = _of_module(settings, "rank_pattern", module, settings["r"])
        features = shapes[entry.parameters[0]][-2]
        widths = [shapes[name][-1] for name in entry.parameters]
        expected = (rank, features), (sum(widths), rank)
        if (a.shape, b.shape) != expected:
            raise ValueError(
                f"{module} of {directory} has factors of the shapes {a.shape} and "
                f"{b.shape}, expected {expected[0]} and {expected[1]}; the adapter was "
                "trained on another model"
            )
        scaled = b.T * np.float32(_scale(settings, module, rank))
        for name in entry.parameters:
            # Several of ours that are one of theirs have its A in common.
            own = scaled[:, columns_of(entry, name, shapes)]
            ours = name.removeprefix("blocks.").removesuffix(".kernel")
            layers.setdefault(ours, {})[layer] = a.T, own
    return Adapter(
        factors={
            name: _stacked(blocks, config.num_layers) for name, blocks in layers.items()
        }
    )


def _check_settings(settings: Mapping[str, Any], file: Path) -> None:
    """Raise where an adapter does anything else than add products to linear layers."""
    for name, value in settings.items():
        if name in _ALLOWED:
            fits = value in _ALLOWED[name]
        else:
            fits = not value or name in (*_READ, *_WITHOUT_EFFECT)
        if not fits:
            raise ValueError(
                f"{file} has {name} {value!r:.80}, which is not supported: adapters "
                "are low-rank products (LoRA) of linear layers of the blocks alone; "
                "train it without, or merge it into the model with peft"
            )
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"{file} names no peft_type; download it again")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, int | float):
        raise ValueError(
            f"{file} has r {rank!r} and lora_alpha {alpha!r}, expected numbers; "
            "download it again"
        )


def _places(config: DecoderConfig) -> dict[str, tuple[int, TensorMap]]:
    """The block and parameters of each linear layer, by its name in transformers."""
    return {
        entry.tensor(layer).removesuffix(".weight"): (layer, entry)
        for entry in family_of(config).tensors(config)
        if entry.stacked and entry.parameters[0].endswith(".kernel")
        for layer in range(config.num_layers)
    }


def _wanted(settings: Mapping[str, Any], places: Mapping[str, Any]) -> Iterator[str]:
    """The modules that must be there, as far as names tell, and no pattern."""
    targets = settings.get("target_modules")
    chosen = ("exclude_modules", "layers_to_transform")
    if not isinstance(targets, list) or any(settings.get(name) for name in chosen):
        return
    for module in places:
        if any(f".{module}".endswith(f".{target}") for target in targets):
            yield module


def _read_tensors(
    file: Path, places: Mapping[str, Any]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A [rank, D] and B [F, rank] of each module, in fp32."""
    if not file.is_file():
        raise FileNotFoundError(
            f"{file} does not exist; save the adapter with safe_serialization=True"
        )
    check_files([file])
    found: dict[str, dict[str, np.ndarray]] = {}
    try:
        with safetensors.safe_open(file, framework="numpy") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no dict
                match = _TENSOR.fullmatch(name)
                module = _known(match[1], places) if match else None
                if match is None or module is None:
                    raise ValueError(
                        f"{file} has the tensor {name!r}, which is no factor of a "
                        "linear layer of the blocks; train the adapter without it, or "
                        "merge it into the model with peft"
                    )
                array = np.asarray(tensors.get_slice(name)[...]).astype(np.float32)
                if array.ndim != 2:
                    raise ValueError(f"{name!r} of {file} is {array.ndim}-dimensional")
                found.setdefault(module, {})[match[2]] = array
    except safetensors.SafetensorError as error:
        raise ValueError(
            f"{file} is not a complete safetensors file ({error}); download it again"
        ) from error
    for module, factors in found.items():
        if len(factors) < 2:
            raise ValueError(
                f"{file} has one factor of {module}, expected two; download it again"
            )
    return {module: (x["A"], x["B"]) for module, x in found.items()}


def _known(module: str, places: Mapping[str, Any]) -> str | None:
    """The name of a module; that of a model without a head lacks the beginning."""
    if module in places:
        return module
    ends = [name for name in places if name.endswith(f".{module}")]
    return ends[0] if len(ends) == 1 else None


def _of_module(
    settings: Mapping[str, Any], name: str, module: str, default: Any
) -> Any:
    """What a pattern says of a module, as peft finds it."""
    for pattern, value in (settings.get(name) or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            return value
    return default


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    alpha = _of_module(settings, "alpha_pattern", module, settings["lora_alpha"])
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _stacked(
    blocks: Mapping[int, tuple[np.ndarray, np.ndarray]], num_layers: int
) -> Factors:
    """Factors with an axis of layers, padded to the largest rank."""
    rank = max(a.shape[-1] for a, _ in blocks.values())
    first, second = next(iter(blocks.values()))
    a = np.zeros((num_layers, len(first), rank), np.float32)
    b = np.zeros((num_layers, rank, second.shape[1]), np.float32)
    for layer, (down, up) in blocks.items():
        a[layer, :, : down.shape[1]], b[layer, : len(up)] = down, up
    return a, b
