"""The model of a run as a Hugging Face directory: what ``jaxscale export`` does."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxscale.models import Decoder, GenerationConfig, Tokenizer, load, save
from jaxscale.models.hf.checksums import write_checksums
from jaxscale.models.hf.hub import local_directory
from jaxscale.sharding import REPLICATED, make_mesh
from jaxscale.training import run as run_directory
from jaxscale.training.checkpoint.array_names import named_leaves
from jaxscale.training.pretrained import load_model


def export(
    source: Path,
    target: Path,
    *,
    step: int | None = None,
    param_dtype: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
    checksums: bool = True,
) -> str:
    """Write the model of a run, and compare what is read back with what was written.

    The tokenizer is exported too, and so is ``generation_config.json`` of the model
    that the run started from.

    Args:
        source: The output directory of a run.
        target: The new directory, which must be free.
        step: Step of the checkpoint; None is the newest.
        param_dtype: Type of the parameters in the files; None is that of the run.
        max_shard_bytes: Size at which another file is begun.
        checksums: Write ``checksums.sha256`` too, with which `load` and
            `Tokenizer.from_file` compare what they read.

    Returns:
        What was written, in words.

    Raises:
        ValueError: there is no run, the target is in use, or transformers has no
            counterpart of the model.
        FileNotFoundError: there is no such checkpoint.
        OSError: the files cannot be written, or are not what was written.
    """
    if not run_directory.is_run(source):
        raise ValueError(
            f"{source} is no directory of a run; give the output directory of jaxscale "
            "train or prune"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is in use; choose a new directory")
    mesh = make_mesh({"data": 1}, jax.local_devices()[:1])
    with jax.set_mesh(mesh):
        model = load_model(source, mesh, REPLICATED, step=step)
        if param_dtype is not None:
            model = _cast(model, jnp.dtype(param_dtype))
    tokenizer = Tokenizer.from_file(source)
    save(
        model,
        target,
        tokenizer=tokenizer,
        generation=_generation(source) if isinstance(model, Decoder) else None,
        max_shard_bytes=max_shard_bytes,
    )
    if checksums:
        write_checksums(target)
    _compare(model, load(target), target)
    count = sum(x.size for x in jax.tree.leaves(model))
    return f"{type(model.config).__name__} of {count:,} parameters"


def _generation(directory: Path) -> GenerationConfig | None:
    """The generation config of the model that a run started from, if its files are
    there.
    """
    while run_directory.is_run(directory):
        source = run_directory.read_config(directory).source
        if source is None:
            return None
        try:
            directory = local_directory(source)
        except (FileNotFoundError, ImportError):
            return None
    return GenerationConfig.from_file(directory)


def _cast(model: Any, dtype: np.dtype) -> Any:
    def cast(x: jax.Array) -> jax.Array:
        return x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(cast, model)


def _compare(written: Any, found: Any, target: Path) -> None:
    mine, theirs = named_leaves(written), named_leaves(found)
    different = sorted(mine.keys() ^ theirs.keys()) or [
        name
        for name, x in mine.items()
        if not np.array_equal(np.asarray(x), np.asarray(theirs[name]), equal_nan=True)
    ]
    if different:
        raise OSError(
            f"{target}: {different[0]} is not what was written; look at the disk, and "
            "write it again"
        )
