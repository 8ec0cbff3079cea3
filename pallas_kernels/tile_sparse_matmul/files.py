"""Files of tile-sparse weights: safetensors with a version of the format."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.tile_sparse_matmul.format import TileSparse


__all__ = ["FORMAT_VERSION", "load_tile_sparse", "save_tile_sparse"]

FORMAT_VERSION = 1
"""Version of the files that `save_tile_sparse` writes."""


def save_tile_sparse(path: str | Path, weights: Mapping[str, TileSparse]) -> None:
    """Writes weights into a safetensors file.

    Tensors are called ``<name>.values`` and so on; what is static lies in the header,
    with the version of the format.

    Args:
        path: file to write.
        weights: name to weight.

    Example:
        >>> import jax.numpy as jnp, tempfile, pathlib
        >>> w = TileSparse.from_dense(jnp.ones((8, 8)), jnp.ones((8, 8), bool), tile=8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder, "w.safetensors")
        ...     save_tile_sparse(file, {"mlp": w})
        ...     load_tile_sparse(file)["mlp"].shape
        (8, 8)
    """
    import safetensors.numpy

    tensors, static = {}, {}
    for name, w in weights.items():
        for leaf in ("values", "rows", "counts", "columns"):
            if (array := getattr(w, leaf)) is not None:
                tensors[f"{name}.{leaf}"] = np.ascontiguousarray(array)
        static[name] = {"shape": w.shape, "granularity": w.granularity}
    header = {
        "format": "tile_sparse",
        "version": str(FORMAT_VERSION),
        "weights": json.dumps(static),
    }
    safetensors.numpy.save_file(tensors, path, metadata=header)


def load_tile_sparse(path: str | Path) -> dict[str, TileSparse]:
    """Reads what `save_tile_sparse` wrote, and validates it.

    Args:
        path: the file.

    Returns:
        Name to weight.

    Raises:
        ValueError: the file is none of ours, of another version, or damaged.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error
    if header.get("format") != "tile_sparse":
        raise ValueError(
            f"{path} holds no tile-sparse weights (format {header.get('format')!r});"
            " write them with save_tile_sparse"
        )
    if header.get("version") != str(FORMAT_VERSION):
        raise ValueError(
            f"{path} has version {header.get('version')} of the format, expected"
            f" {FORMAT_VERSION}; pack the dense weight again"
        )
    try:
        return _read_weights(tensors, json.loads(header["weights"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _read_weights(
    tensors: Mapping[str, np.ndarray], described: Mapping[str, Any]
) -> dict[str, TileSparse]:
    """The weights of a file, validated."""
    weights = {}
    for name, static in described.items():
        parts = {n: tensors.get(f"{name}.{n}") for n in ("values", "rows", "counts")}
        if missing := [n for n, array in parts.items() if array is None]:
            raise ValueError(f"{name} lacks {missing}")
        columns = tensors.get(f"{name}.columns")
        weights[name] = TileSparse(
            **{n: jnp.asarray(array) for n, array in parts.items()},
            columns=None if columns is None else jnp.asarray(columns),
            shape=tuple(static["shape"]),
            granularity=static["granularity"],
        )
    return weights
