"""Models from output directories of training runs, for inference.

A run is read by the code that wrote it. So this is the only file of
`jaxscale.inference` that imports training and pruning, and only when a run is read:
serving other models never loads them.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jaxscale.models.adapters import Adapter, adapter_of
from jaxscale.models.config import DecoderConfig
from jaxscale.models.decoder import Decoder
from jaxscale.models.encoder import EncoderModel
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.quantization import quantize
from jaxscale.nn.quantized_linear import Quantization
from jaxscale.sharding.mesh import make_mesh
from jaxscale.sharding.parameters import place
from jaxscale.sharding.rules import REPLICATED, AxisRules
from jaxscale.sharding.tensor_parallel import TensorParallel


def is_run(directory: str | Path) -> bool:
    """Whether a directory is the output directory of a run."""
    return (Path(directory) / "run.json").is_file()


def is_encoder_run(directory: str | Path) -> bool:
    """Whether the run of a directory trained an encoder.

    Raises:
        ValueError: ``run.json`` is damaged.
    """
    return isinstance(read_run_model(directory), EncoderConfig)


def read_run_model(directory: str | Path) -> DecoderConfig | EncoderConfig:
    """The shape of the model of a run.

    Raises:
        ValueError: ``run.json`` is damaged.
    """
    from jaxscale.training.run import read_config

    return read_config(Path(directory)).model


def load_run(
    directory: str | Path,
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
    dtype: DTypeLike | None = None,
    step: int | None = None,
    sparse: bool = True,
    quantization: Quantization | None = None,
    tensor_parallel: TensorParallel = None,
) -> Decoder | EncoderModel:
    """The model of a checkpoint; a pruned decoder gets sparse layers.

    Args:
        directory: Output directory of the run.
        mesh: The devices; None is the first device only.
        rules: Sharding rules.
        dtype: Type of the computation; None is that of the run.
        step: Step of the checkpoint; None is the newest.
        sparse: Use sparse layers for a decoder that was pruned tile-wise.
        quantization: Quantize the weights of a decoder to 8 bits; None keeps them.
        tensor_parallel: Communication of the model, whatever it was during the run.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: model and mesh do not fit, a file is damaged, or an encoder would be
            quantized.
    """
    from jaxscale.pruning import TILE_WISE, Masks, sparsify
    from jaxscale.training.pretrained import load_model
    from jaxscale.training.run import MASKS_FILE

    directory = Path(directory)
    mesh = mesh or make_mesh({"fsdp": 1}, jax.devices()[:1])
    model = load_model(
        directory,
        mesh,
        rules,
        dtype=None if dtype is None else jnp.dtype(dtype).name,
        step=step,
        tensor_parallel=tensor_parallel,
    )
    if not isinstance(model, Decoder):
        if quantization is not None:
            raise ValueError(
                f"quantization {quantization!r} is for decoders, but {directory} "
                "trained an encoder; leave it out"
            )
        return model
    file = directory / MASKS_FILE
    if sparse and file.is_file():
        masks = Masks.load(file)
        pattern, tile = masks.config.pattern, masks.config.tile
        if pattern in TILE_WISE:
            compress = pattern == "tw24" and tile % 64 == 0  # as the format wants it
            pruned = sparsify(model, masks, separate=True, compress=compress)
            model = place(pruned, mesh, rules)
    return model if quantization is None else quantize(model, quantization)


def load_adapter(
    directory: str | Path,
    base: str | Path,
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = REPLICATED,
) -> Adapter:
    """The adapter that a run has trained, checked to belong to a model.

    Args:
        directory: Output directory of the run; its newest checkpoint is taken.
        base: Directory of the model that is served. It is read, since checkpoints tell
            by its digests whether it is what the adapter was trained on.
        mesh: The devices; None is the first one alone.
        rules: Mesh axes that split the model while it is compared.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the run has trained no adapter of a decoder, or `base` has other
            weights or another shape than the adapter was trained on.
    """
    from jaxscale.training.pretrained import check_source, load_adapted
    from jaxscale.training.run import read_config

    directory = Path(directory)
    config = dataclasses.replace(
        read_config(directory),
        source=str(base),
        tensor_parallel=None,
        quantization=None,
        remat="none",
    )
    if config.lora.rank == 0:
        raise ValueError(
            f"{directory} is of a run without adapters; serve it as a model of its own"
        )
    check_source(config)
    mesh = mesh or make_mesh({"fsdp": 1}, jax.devices()[:1])
    model: Any = load_adapted(directory, config, mesh, rules)
    return adapter_of(model)
