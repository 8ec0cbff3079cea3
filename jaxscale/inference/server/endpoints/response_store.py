"""Conversations of ``/v1/responses``, so that later requests can continue them."""

import collections
import json
from collections.abc import Sequence
from typing import Any


class ResponseStore:
    """The last conversations, bounded in bytes; who fills it makes room for the others.

    Example:
        >>> store = ResponseStore(100)
        >>> for name in ("a", "b"):
        ...     store.put(name, "ann", [{"role": "user", "content": "x" * 40}])
        >>> store.get("a", "ann"), store.get("b", "bob"), len(store.get("b", "ann"))
        (None, None, 1)
    """

    def __init__(self, most_bytes: int = 2**26) -> None:
        """Empty.

        Args:
            most_bytes: Of all conversations, as JSON.
        """
        self._most = most_bytes
        self._kept: collections.OrderedDict[str, tuple[str, list[Any], int]]
        self._kept = collections.OrderedDict()
        self._sizes: collections.Counter[str] = collections.Counter()

    def get(self, name: str, owner: str) -> list[dict[str, Any]] | None:
        """The messages of a response, None where its owner has none of that name."""
        found = self._kept.get(name)
        if found is None or found[0] != owner:
            return None
        self._kept.move_to_end(name)
        return found[1]

    def put(self, name: str, owner: str, messages: Sequence[dict[str, Any]]) -> None:
        """Keep the messages of a response; the oldest of who has most make room."""
        size = len(json.dumps(messages))
        if size > self._most:
            return
        self._kept[name] = (owner, list(messages), size)
        self._sizes[owner] += size
        while self._sizes.total() > self._most:
            ((largest, _),) = self._sizes.most_common(1)
            oldest = next(n for n, (o, *_) in self._kept.items() if o == largest)
            self._sizes[largest] -= self._kept.pop(oldest)[2]
        self._sizes += collections.Counter()  # without those that have none
