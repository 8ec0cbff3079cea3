"""Directories of safetensors files: lazy reading, sharded writing, precise errors."""

import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jaxscale.models.hf.checksums import check_files, checked_bytes, remove_checksums


_FILE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"
_RUN = "run.json"  # of `jaxscale.training`

# Names of the format; anything else is a quantized or foreign checkpoint.
_DTYPES = {"F32": jnp.float32, "F16": jnp.float16, "BF16": jnp.bfloat16}


class _OpenFile(NamedTuple):
    """A safetensors file."""

    descriptor: int
    content: np.ndarray
    """All bytes, memory-mapped."""
    tensors: dict[str, Any]
    """What the header says of each tensor."""
    start: int
    """Bytes before the first tensor."""


class Checkpoint:
    """The tensors of a Hugging Face directory, read piece by piece.

    Only the headers are read at first.
    """

    def __init__(self, path: str | Path) -> None:
        """Open the directory.

        Args:
            path: Holds ``config.json`` and ``model.safetensors``, or shards and
                ``model.safetensors.index.json``.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is damaged.
        """
        self.directory = Path(path)
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"path {str(path)!r} is not a directory; download the model first, for "
                "example with `hf download MODEL --local-dir DIRECTORY`"
            )
        self.config = read_config(self.directory)
        self._files: dict[str, Path] = {}
        self._open: dict[Path, _OpenFile] = {}
        index = self.directory / _INDEX
        if index.is_file():
            self._read_index(index)
        else:
            file = self._require_file(self.directory / _FILE)
            self._files = dict.fromkeys(self._opened(file).tensors, file)

    def names(self) -> list[str]:
        """Every tensor of the directory."""
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def file(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self._files[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        return tuple(self._about(name)["shape"])

    def dtype(self, name: str) -> np.dtype:
        """The type of a tensor, from the header.

        Raises:
            ValueError: it is not a floating-point type of 16 or 32 bits.
        """
        found = self._about(name)["dtype"]
        if found not in _DTYPES:
            raise ValueError(
                f"tensor {name!r} of {self.file(name)} has the type {found}; expected "
                f"one of {sorted(_DTYPES)} (quantized checkpoints are not supported)"
            )
        return jnp.dtype(_DTYPES[found])

    def view(self, name: str) -> np.ndarray:
        """A tensor in the memory-mapped file: what is used of it is read then."""
        opened = self._opened(self._files[name])
        begin, end = (opened.start + at for at in self._about(name)["data_offsets"])
        return (
            opened.content[begin:end].view(self.dtype(name)).reshape(self.shape(name))
        )

    def read(self, name: str, index: tuple[slice, ...], target: np.ndarray) -> None:
        """Copy a slice of a tensor into `target`, converting to its type.

        What is contiguous is read in one call of the system, without Python's lock: a
        memory-mapped file would be read page by page.

        Raises:
            ValueError: the file ends before the slice does.
        """
        part = self.view(name)[(*index, ...)]
        contiguous = part.flags.c_contiguous and target.flags.c_contiguous
        # Not all platforms have the call.
        if not (contiguous and part.dtype == target.dtype and hasattr(os, "preadv")):
            target[...] = part
            return
        file = self._files[name]
        opened = self._opened(file)
        at = _address(part) - _address(opened.content)
        left = memoryview(target.reshape(-1).view(np.uint8))
        while left:
            try:
                count = os.preadv(opened.descriptor, [left], at)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(file)) from error
            if not count:
                raise ValueError(f"{file} has become shorter while it was read")
            left, at = left[count:], at + count

    def check_weights(self) -> None:
        """Verify the files of the tensors against their checksums, if there are any.

        Raises:
            ValueError: a file is not what was written.
        """
        check_files(sorted(set(self._files.values())))

    def _read_index(self, index: Path) -> None:
        """Map each tensor to its shard, and check that the shards hold them."""
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(shard, str) for shard in weight_map.values()
        ):
            raise ValueError(
                f"{index} has no 'weight_map' of file names; download it again"
            )
        for shard in sorted(set(weight_map.values())):
            file = inside(self.directory, shard, index)
            if not file.is_file():
                raise FileNotFoundError(
                    f"{index} names the shard {shard!r}, which does not exist; "
                    "download it"
                )
            held = set(self._opened(file).tensors)
            for name in sorted(n for n, s in weight_map.items() if s == shard):
                if name not in held:
                    raise ValueError(f"{file} lacks {name!r}, which {index} puts there")
            for name in sorted(held):
                # One that the index forgot is still there: it must not go unnoticed.
                if weight_map.get(name, shard) != shard or name in self._files:
                    other = weight_map.get(name, self._files.get(name))
                    raise ValueError(
                        f"{file} holds {name!r}, and so does {other}; remove the "
                        "files of an earlier download and download it again"
                    )
                self._files[name] = file

    def _require_file(self, file: Path) -> Path:
        if file.is_file():
            return file
        other = sorted(p.name for p in self.directory.glob("*.bin"))
        hint = f"; convert {other} to safetensors first" if other else ""
        raise FileNotFoundError(
            f"{self.directory} has neither {_FILE} nor {_INDEX}{hint}"
        )

    def _opened(self, file: Path) -> _OpenFile:
        if file not in self._open:
            try:
                with safetensors.safe_open(file, framework="numpy"):
                    pass  # the header is right, and the file as long as it says
            except safetensors.SafetensorError as error:
                raise ValueError(
                    f"{file} is not a complete safetensors file ({error}); download it "
                    "again"
                ) from error
            # One file, also if its name is given to another one meanwhile.
            descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            weakref.finalize(self, os.close, descriptor)
            with os.fdopen(descriptor, "rb", closefd=False) as opened:
                content = np.memmap(opened, np.uint8, "r").view(np.ndarray)
            start = 8 + int.from_bytes(content[:8], "little")
            tensors = json.loads(content[8:start].tobytes())
            tensors.pop("__metadata__", None)
            self._open[file] = _OpenFile(descriptor, content, tensors, start)
        return self._open[file]

    def _about(self, name: str) -> dict[str, Any]:
        return self._opened(self._files[name]).tensors[name]


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def write_checkpoint(
    path: str | Path,
    config: Mapping[str, Any],
    tensors: Iterable[tuple[str, int, Callable[[], np.ndarray]]],
    max_shard_bytes: int,
) -> None:
    """Write a Hugging Face directory, with one file's tensors in memory at a time.

    Earlier weights in the directory are replaced once the new ones are complete.

    Args:
        path: The directory; made if needed.
        config: The contents of ``config.json``.
        tensors: Name, bytes and a function that fetches the array, contiguous, for each
            tensor.
        max_shard_bytes: Maximum size of a file; a tensor is never split.
    """
    directory = Path(path)
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"path {str(path)!r} must be a directory, not a file")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes {max_shard_bytes} must be positive")
    directory.mkdir(parents=True, exist_ok=True)
    shards = _split(tensors, max_shard_bytes)
    names = [_FILE]
    if len(shards) > 1:
        count = len(shards)
        names = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]

    written: list[Path] = []
    try:
        for name, shard in zip(names, shards, strict=True):
            arrays = {tensor: fetch() for tensor, _, fetch in shard}
            written.append(directory / f"{name}.partial")
            # transformers refuses files that do not say which framework wrote them.
            safetensors.numpy.save_file(arrays, written[-1], metadata={"format": "pt"})
    except BaseException:
        for file in written:
            file.unlink(missing_ok=True)
        raise

    remove_checksums(directory)
    for old in (directory / _INDEX, *directory.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    for file in written:
        file.rename(file.with_suffix(""))
    if len(shards) > 1:
        weight_map = {
            tensor: name
            for name, shard in zip(names, shards, strict=True)
            for tensor, _, _ in shard
        }
        total = sum(size for shard in shards for _, size, _ in shard)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_json(directory / _INDEX, index)
    write_json(directory / _CONFIG, config)
    for name in names:
        # The library makes files that only their owner may read.
        shutil.copymode(directory / _CONFIG, directory / name)


def _split[T](
    tensors: Iterable[tuple[str, int, T]], max_bytes: int
) -> list[list[tuple[str, int, T]]]:
    """`tensors` in groups of at most `max_bytes`, in their order."""
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor[1] > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor[1]
    return shards


def read_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` of a directory.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object.
    """
    file = directory / _CONFIG
    if file.is_file():
        return read_json_object(file)
    todo = "give a directory that transformers or `jaxscale export` wrote"
    if (directory / _RUN).is_file():
        todo = (
            f"{directory} is of a run: write its model as a Hugging Face directory "
            f"with `jaxscale export {directory} DIR`, and give DIR"
        )
    raise FileNotFoundError(f"{file} does not exist; {todo}")


def read_json(file: Path) -> Any:
    """The value of a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON in UTF-8, nested too deep, or not what its checksum
            says.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    content = checked_bytes(file)
    try:
        return json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{file} is not valid JSON ({error}); download it again"
        ) from error


def read_json_object(file: Path) -> dict[str, Any]:
    """The object of a JSON file; errors as `read_json`, and for any other value."""
    values = read_json(file)
    if not isinstance(values, dict):
        raise ValueError(
            f"{file} holds {values!r:.80}, expected a JSON object; download it again"
        )
    return values


def inside(directory: Path, name: Any, source: Path) -> Path:
    """The file or folder of `directory` that a downloaded file names.

    Args:
        directory: The model's.
        name: The path in it; an empty one is `directory` itself.
        source: The file that names it, for errors.

    Raises:
        ValueError: `name` is no relative path, or leaves `directory`.
    """
    if (
        not isinstance(name, str)
        or "\0" in name
        or PurePosixPath(name).is_absolute()
        or ".." in PurePosixPath(name.replace("\\", "/")).parts
    ):
        raise ValueError(
            f"{source} names {name!r:.80}, which is not a path inside {directory}; "
            "do not trust this download"
        )
    return directory / name


def write_json(file: Path, values: Mapping[str, Any]) -> None:
    """Write the object of a JSON file."""
    remove_checksums(file.parent)
    file.write_text(json.dumps(values, indent=2) + "\n")
