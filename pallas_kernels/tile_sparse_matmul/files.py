"""Files of tile-sparse weights: safetensors with a version and a checksum.

Axes: K input features, N output features, P row capacity of a tile.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import check_floating
from pallas_kernels.tile_sparse_matmul.format import TileSparse


FORMAT_VERSION = 2
"""Version of the files that `save_tile_sparse` writes; 2 added the checksum."""

_LEAVES = ("values", "rows", "counts", "columns")

_MOST_ROWS = 65_536
"""Rows K of a weight for each that its tiles have room for. No real weight has as many,
and a file that declares more would fill the memory once its weight is unpacked."""


def save_tile_sparse(path: str | Path, weights: Mapping[str, TileSparse]) -> None:
    """Writes weights into a safetensors file.

    Tensors are called ``<name>.values`` and so on; what is static lies in the header,
    with the version of the format and a SHA-256 of all else.

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
        for leaf in _LEAVES:
            if (array := getattr(w, leaf)) is not None:
                tensors[f"{name}.{leaf}"] = np.ascontiguousarray(array)
        static[name] = {"shape": w.shape, "granularity": w.granularity}
    described = json.dumps(static)
    header = {
        "format": "tile_sparse",
        "version": str(FORMAT_VERSION),
        "weights": described,
        "sha256": _digest(tensors, described),
    }
    # `save_file` would make a file that only its owner can read.
    Path(path).write_bytes(safetensors.numpy.save(tensors, metadata=header))


def load_tile_sparse(path: str | Path) -> dict[str, TileSparse]:
    """Reads what `save_tile_sparse` wrote, and validates it.

    Args:
        path: the file.

    Returns:
        Name to weight.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is none of ours, of another version, or damaged.
    """
    import safetensors

    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, TypeError, ValueError, KeyError) as error:
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
        if _digest(tensors, header["weights"]) != header["sha256"]:
            raise ValueError("its contents do not have its checksum; copy it again")
        return _read_weights(tensors, json.loads(header["weights"]))
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _digest(tensors: Mapping[str, np.ndarray], described: str) -> str:
    """SHA-256 of all tensors with their names, types and shapes, and of the rest."""
    digest = hashlib.sha256(described.encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _read_weights(
    tensors: Mapping[str, np.ndarray], described: Any
) -> dict[str, TileSparse]:
    """The weights of a file, validated."""
    if not isinstance(described, dict):
        raise TypeError(f"weights {described!r:.80}, expected an object")
    known = {f"{name}.{leaf}" for name in described for leaf in _LEAVES}
    if unknown := sorted(tensors.keys() - known):
        raise ValueError(f"it holds unknown tensors {unknown}")
    return {
        name: _read_weight(name, tensors, static) for name, static in described.items()
    }


def _read_weight(
    name: str, tensors: Mapping[str, np.ndarray], static: Any
) -> TileSparse:
    if not isinstance(static, dict) or static.keys() != {"shape", "granularity"}:
        raise ValueError(f"{name} is {static!r:.80}, expected 'shape', 'granularity'")
    parts = {leaf: tensors.get(f"{name}.{leaf}") for leaf in _LEAVES}
    columns = parts.pop("columns")
    if missing := [leaf for leaf, array in parts.items() if array is None]:
        raise ValueError(f"{name} lacks {missing}")
    check_floating(**{f"{name}.values": tensors[f"{name}.values"].dtype})
    w = TileSparse(
        **{leaf: jnp.asarray(array) for leaf, array in parts.items()},
        columns=None if columns is None else jnp.asarray(columns),
        shape=tuple(static["shape"]),
        granularity=static["granularity"],
    )
    if w.shape[0] > _MOST_ROWS * max(w.room, 1):
        raise ValueError(
            f"{name} has shape {w.shape} and room for {w.room} rows in a tile, expected"
            f" at most {_MOST_ROWS} times as many rows"
        )
    return w
