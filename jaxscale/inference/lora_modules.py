"""Adapters (LoRA) by name, and the decoder of a directory to be served with them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.inference.run_directory import (
    is_run,
    load_adapter,
    load_run,
    read_run_model,
)
from jaxscale.models.adapters import Adapter, with_adapters
from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.families.registry import config_from_hf
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.hub import local_directory
from jaxscale.models.hf.load import load
from jaxscale.models.hf.peft import CONFIG_FILE, read_peft
from jaxscale.nn.quantized_linear import Quantization
from jaxscale.sharding.rules import REPLICATED, AxisRules


type LoraModules = Mapping[str, str | Path]
"""Directories of adapters by name: those of peft, names on the Hugging Face hub, or
output directories of runs that have trained one."""


def parse_lora_modules(words: Sequence[str]) -> dict[str, str]:
    """Adapters as the command line has them.

    Raises:
        ValueError: one is not, or two have a name.

    Example:
        >>> parse_lora_modules(["sql=runs/sql", "notes=adapters/notes"])
        {'sql': 'runs/sql', 'notes': 'adapters/notes'}
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, directory = word.partition("=")
        if not (name and equals and directory):
            raise ValueError(
                f"lora_modules has {word!r}, expected NAME=DIR; name each adapter"
            )
        if name in found:
            raise ValueError(
                f"lora_modules names {name!r} twice; give each adapter its own name"
            )
        found[name] = directory
    return found


def read_adapters(
    modules: LoraModules | None,
    base: str | Path | DecoderConfig,
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
) -> dict[str, Adapter]:
    """The adapters of directories, before the model that they are for is loaded.

    Args:
        modules: The directories; None is none.
        base: Directory of the model; or its shape alone, which is not enough for the
            adapters of runs.
        mesh: Where the model is compared with that of a run; None is the first device.
        rules: Mesh axes that split it there.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: an adapter does not belong to the model, or is of a kind that is not
            supported; the message names it.
    """
    if not modules:
        return {}
    config = base if isinstance(base, DecoderConfig) else _config_of(Path(base))
    adapters = {}
    for name, source in modules.items():
        try:
            directory = local_directory(source)
            if (directory / CONFIG_FILE).is_file():
                adapters[name] = read_peft(directory, config)
                continue
            if not is_run(directory):
                raise ValueError(f"{directory} has neither {CONFIG_FILE} nor run.json")
            if isinstance(base, DecoderConfig):
                raise ValueError(
                    f"{directory} is of a run, whose adapters are compared with the "
                    "files of the model; use LLM.from_pretrained"
                )
            if jax.process_count() > 1:
                raise ValueError(
                    f"{directory} is of a run, whose adapters one process alone can "
                    "read; merge it with `jaxscale export`"
                )
            adapters[name] = load_adapter(directory, base, mesh=mesh, rules=rules)
        except (FileNotFoundError, ValueError) as error:
            raise type(error)(f"adapter {name!r}: {error}") from error
    return adapters


def describe_decoder(
    path: Path,
    *,
    mesh: Mesh | None,
    rules: AxisRules,
    lora_modules: LoraModules | None,
    quantization: Quantization | None = None,
    dtype: DTypeLike | None = None,
) -> Decoder | None:
    """What `load_decoder` returns, with shapes instead of weights; None where only the
    weights tell.
    """
    if lora_modules or quantization is not None or is_run(path):
        return None
    options: dict[str, Any] = {"for_inference": True, "abstract": True}
    model = load(path, mesh=mesh, rules=rules, dtype=dtype, **options)
    return model if isinstance(model, Decoder) else None


def load_decoder(
    path: Path,
    *,
    mesh: Mesh | None,
    rules: AxisRules,
    lora_modules: LoraModules | None,
    **options: Any,
) -> Decoder:
    """The decoder of a directory, prepared for inference, with adapters if any.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: it is an encoder, or an adapter does not fit.
    """
    adapters = read_adapters(lora_modules, path, mesh=mesh, rules=rules)
    read: Any = load_run
    if not is_run(path):
        read = functools.partial(load, for_inference=True)
    model = read(path, mesh=mesh, rules=rules, **options)
    if not isinstance(model, Decoder):
        raise ValueError(
            f"path {path} holds an encoder, which does not generate; give it to "
            "Encoder.from_pretrained"
        )
    model = model.for_inference()  # and what was loaded is gone
    first = jax.tree.leaves(model)[0]
    if read is load_run and next(iter(first.devices())).platform != "cpu":
        model = packed_together(model)
    return with_adapters(model, adapters) if adapters else model


def packed_together[M](model: M) -> M:
    """The model with its arrays side by side in memory; the given ones are deleted.

    A run is restored as a stack, maybe pruned, and prepared: what that has freed lies
    before the arrays, and the pages of a KV cache are one piece. They go through the
    memory of the host, which holds all of them, and once what several devices hold.
    """
    leaves, tree = jax.tree.flatten(model)
    held = []
    for leaf in leaves:
        parts = {shard.index: shard.data for shard in leaf.addressable_shards}
        held.append({index: np.array(data) for index, data in parts.items()})
    shapes = [(leaf.shape, leaf.sharding) for leaf in leaves]
    for leaf in leaves:
        leaf.delete()
    made = []
    for (shape, where), parts in zip(shapes, held, strict=True):
        indices = where.addressable_devices_indices_map(shape)
        arrays = [jax.device_put(parts[i], device) for device, i in indices.items()]
        made.append(jax.make_array_from_single_device_arrays(shape, where, arrays))
    return jax.tree.unflatten(tree, made)


def _config_of(base: Path) -> DecoderConfig:
    """The shape of the decoder of a directory."""
    if is_run(base):
        config = read_run_model(base)
    else:
        config = config_from_hf(Checkpoint(base).config)
    if not isinstance(config, DecoderConfig):
        raise ValueError(
            f"lora_modules are adapters of decoders, but {base} holds an encoder; "
            "leave them out"
        )
    return config
