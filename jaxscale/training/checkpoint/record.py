"""The record of a checkpoint: digests and checksums that verify it when it is read."""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp

from jaxscale.training.checkpoint.digest import differing, digests


logger = logging.getLogger("jaxscale.training")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRecord:
    """An array as it was saved."""

    shape: tuple[int, ...]
    """Shape."""
    dtype: str
    """Type."""
    digest: str
    """Digest; see `jaxscale.training.checkpoint.digest`."""
    layers: int | None = None
    """Number of layers if it is stored [v, p, k, ...]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRecord:
    """Digests of the arrays of a checkpoint and checksums of its other items.

    Example:
        >>> record = CheckpointRecord.of({"w": jnp.ones(3)}, {}, data={"row": 12})
        >>> saved = record.to_json()
        >>> CheckpointRecord.from_json(saved) == record
        True
        >>> record.check_item("data", {"row": 13})
        Traceback (most recent call last):
        ...
        ValueError: the checksum of data differs
    """

    arrays: Mapping[str, ArrayRecord]
    """Arrays by name."""
    items: Mapping[str, str]
    """Checksums of the other items, by name."""
    base: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Digests, by name, of the base weights, which are not saved (LoRA)."""

    @classmethod
    def of(
        cls,
        arrays: Mapping[str, Any],
        layers: Mapping[str, int],
        *,
        base: Mapping[str, Any] = MappingProxyType({}),
        **items: Any,
    ) -> "CheckpointRecord":
        """The record of a state; all processes must call this together.

        Args:
            arrays: The arrays by name.
            layers: Number of layers of arrays that are stored [v, p, k, ...].
            base: Base weights, which are not saved.
            items: The other items, as JSON.
        """
        found = digests(arrays, layers)
        if (text := differing(found)) and jax.process_index() == 0:
            logger.warning("%s; the checkpoint holds the first of each", text)
        records = {}
        for name, x in arrays.items():
            stored = jax.eval_shape(_stored, x)
            records[name] = ArrayRecord(
                shape=stored.shape,
                dtype=stored.dtype.name,
                digest=found[name].value,
                layers=layers.get(name),
            )
        sums = {name: _checksum(content) for name, content in items.items()}
        values = {name: digest.value for name, digest in digests(base).items()}
        return cls(arrays=records, items=sums, base=values)

    def to_json(self) -> dict[str, Any]:
        """The record as JSON, with a checksum of its own."""
        content = {
            "arrays": {name: dataclasses.asdict(x) for name, x in self.arrays.items()},
            "items": dict(self.items),
        }
        content |= {"base": dict(self.base)} if self.base else {}
        return content | {"checksum": _checksum(content)}

    @classmethod
    def from_json(cls, content: Any) -> "CheckpointRecord":
        """Parse the record of `to_json`.

        Raises:
            ValueError: the record is damaged.
        """
        given = dict(content)
        if given.pop("checksum", None) != _checksum(given):
            raise ValueError("the checksum of the digests differs")
        arrays = {
            name: ArrayRecord(**{**x, "shape": tuple(x["shape"])})
            for name, x in given["arrays"].items()
        }
        return cls(arrays=arrays, items=given["items"], base=given.get("base", {}))

    @property
    def layers(self) -> dict[str, int]:
        """Number of layers of the arrays that are stored [v, p, k, ...]."""
        return {name: x.layers for name, x in self.arrays.items() if x.layers}

    def check_item(self, name: str, content: Any) -> None:
        """Verify an item other than the arrays.

        Raises:
            ValueError: the item differs from what was saved.
        """
        if self.items[name] != _checksum(content):
            raise ValueError(f"the checksum of {name} differs")

    def check_arrays(self, arrays: Mapping[str, Any]) -> None:
        """Verify arrays as they were read; all processes must call this together.

        Raises:
            ValueError: some differ from what was saved.
        """
        found = digests(arrays, self.layers)
        wrong = [
            name
            for name, digest in found.items()
            if digest.odd or digest.value != self.arrays[name].digest
        ]
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise ValueError(f"the digest of {wrong[0]}{more} differs")

    def differing_base(self, base: Mapping[str, Any]) -> list[str]:
        """The names of base weights that differ from those of the saved adapters.

        All processes must call this together. It is empty for checkpoints of older
        versions, which recorded no base weights.
        """
        if not self.base:
            return []
        found = {name: digest.value for name, digest in digests(base).items()}
        names = sorted({*found, *self.base})
        return [name for name in names if found.get(name) != self.base.get(name)]


def _stored(x: Any) -> Any:
    """The stored form of an array: random keys are stored as their bits."""
    x = jnp.asarray(x)
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(x) if is_key else x


def _checksum(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
