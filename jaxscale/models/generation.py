"""Generation settings that a model is published with: ``generation_config.json``."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.models.hf.files import read_config, read_json_object, write_json


_FILE = "generation_config.json"
_CONFIG = "config.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """End-of-sequence tokens, and the sampling parameters that its authors recommend.

    Example:
        >>> GenerationConfig(eos_ids=(2, 7), temperature=0.6).eos_ids
        (2, 7)
    """

    eos_ids: tuple[int, ...] = ()
    """Any of these tokens ends a continuation; `jaxscale.inference.generate` takes
    them as ``eos_id``."""
    do_sample: bool = False
    """Sample tokens; otherwise decoding is greedy."""
    temperature: float | None = None
    """Sampling temperature; None if the file has none."""
    top_k: int | None = None
    """Sample from the k most likely tokens; None if the file has none."""
    top_p: float | None = None
    """Nucleus sampling: sample from the fewest most likely tokens whose probabilities
    reach it; None if the file has none."""
    other: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Further settings of the file, kept for `save`."""

    def __post_init__(self) -> None:
        for token in self.eos_ids:
            if not _is_integer(token) or token < 0:
                raise ValueError(f"eos_ids {self.eos_ids} must be token ids")
        if not isinstance(self.do_sample, bool):
            raise ValueError(f"do_sample {self.do_sample!r} must be True or False")
        if self.top_k is not None and (not _is_integer(self.top_k) or self.top_k < 0):
            raise ValueError(f"top_k {self.top_k!r} must be an integer of at least 0")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and 0 <= value < math.inf):
                raise ValueError(f"{name} {value!r} must be finite and not negative")

    @classmethod
    def from_file(cls, path: str | Path) -> "GenerationConfig":
        """The settings of a Hugging Face directory.

        Args:
            path: The directory. Without ``generation_config.json``, the end-of-sequence
                tokens are those of ``config.json``.

        Raises:
            FileNotFoundError: both files are missing.
            ValueError: a file is damaged, or a setting is invalid.

        Example:
            >>> GenerationConfig.from_file("tests/fixtures/models/llama3_gqa").eos_ids
            (2,)
        """
        file = Path(path) / _FILE
        if not file.is_file():
            ids = read_config(Path(path)).get("eos_token_id")
            return cls(eos_ids=_ids(ids, Path(path) / _CONFIG))
        values = read_json_object(file)
        ids = _ids(values.pop("eos_token_id", None), file)
        names = ("do_sample", "temperature", "top_k", "top_p")
        said = {n: values.pop(n) for n in names if values.get(n) is not None}
        try:
            return cls(eos_ids=ids, **said, other=values)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write ``generation_config.json`` into the directory `path`."""
        values = dict(self.other) | {"do_sample": self.do_sample}
        for name in ("temperature", "top_k", "top_p"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        write_json(Path(path) / _FILE, values | {"eos_token_id": self.eos_token_id})

    @property
    def eos_token_id(self) -> int | list[int] | None:
        """`eos_ids` as files have them: one number, a list, or null."""
        if len(self.eos_ids) == 1:
            return self.eos_ids[0]
        return list(self.eos_ids) or None


def _ids(value: Any, file: Path) -> tuple[int, ...]:
    """The token ids of a setting that is a number, a list or null."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(_is_integer(token) and token >= 0 for token in ids):
        raise ValueError(
            f"eos_token_id {json.dumps(value)} of {file} must be a token id or a list "
            "of them"
        )
    return tuple(dict.fromkeys(ids))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
