"""A fair queue: by priority, then by tokens served to each client, then by arrival."""

import heapq


_MOST_REMEMBERED = 4096


class FairQueue[T]:
    """Waiting requests, and the number of tokens served to each client.

    Within a priority the next request is of the client that was served the fewest
    tokens, which is deficit round robin with a quantum of one token: two clients that
    both wait all the time are never further apart than one request. A new or returning
    client starts at the count of the least served waiting one, so nobody accumulates
    credit by staying away. When the queue is empty, all counts are reset.

    Example:
        >>> queue = FairQueue[str]()
        >>> for client, name in [("a", "a1"), ("a", "a2"), ("b", "b1")]:
        ...     queue.push(name, priority=0, client=client)
        >>> order = []
        >>> while (name := queue.peek()) is not None:
        ...     queue.pop()
        ...     queue.charge(100, priority=0, client=name[0])
        ...     order.append(name)
        >>> order
        ['a1', 'b1', 'a2']
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level[T]] = {}
        self._order: list[int] = []  # a heap of negated priorities
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, item: T, *, priority: int, client: str) -> None:
        """Append an item after those of its client."""
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level()
            heapq.heappush(self._order, -priority)
        level.push(item, client)
        self._length += 1

    def remove(self, item: T, *, priority: int, client: str) -> None:
        """Remove a waiting item, at any position."""
        self._levels[priority].remove(item, client)
        self._length -= 1

    def peek(self) -> T | None:
        """The next item, None if nothing waits."""
        while self._order:
            item = self._levels[-self._order[0]].peek()
            if item is not None:
                return item
            del self._levels[-heapq.heappop(self._order)]
        return None

    def pop(self) -> None:
        """Remove the item that `peek` has just returned."""
        self._levels[-self._order[0]].pop()
        self._length -= 1

    def charge(self, tokens: int, *, priority: int, client: str) -> None:
        """Count tokens that a client was served."""
        level = self._levels.get(priority)
        if level is not None:
            level.charge(tokens, client)


class _Level[T]:
    """One priority."""

    def __init__(self) -> None:
        # Ordered by insertion, so that any item can be removed at once.
        self._waiting: dict[str, dict[T, None]] = {}
        self._served: dict[str, int] = {}
        self._heap: list[tuple[int, int, str]] = []  # served, turn, client
        # The valid entry of each client; others in the heap are stale.
        self._entries: dict[str, tuple[int, int, str]] = {}
        self._floor = 0
        self._turn = 0

    def push(self, item: T, client: str) -> None:
        if client not in self._waiting:
            self._waiting[client] = {}
            self._served[client] = max(self._served.get(client, 0), self._floor)
            self._enter(client)
        self._waiting[client][item] = None

    def remove(self, item: T, client: str) -> None:
        waiting = self._waiting[client]
        del waiting[item]
        if not waiting:
            del self._waiting[client], self._entries[client]

    def peek(self) -> T | None:
        while self._heap:
            entry = self._heap[0]
            served, _, client = entry
            if self._entries.get(client) != entry:
                heapq.heappop(self._heap)
            elif served != self._served[client]:
                # It was charged since, so it is further back.
                heapq.heappop(self._heap)
                self._enter(client)
            else:
                self._floor = served
                return next(iter(self._waiting[client]))
        return None

    def pop(self) -> None:
        client = self._heap[0][2]
        self.remove(next(iter(self._waiting[client])), client)

    def charge(self, tokens: int, client: str) -> None:
        self._served[client] = self._served.get(client, self._floor) + tokens
        if len(self._served) > len(self._waiting) + _MOST_REMEMBERED:
            self._served = {c: self._served[c] for c in self._waiting}

    def _enter(self, client: str) -> None:
        entry = (self._served[client], self._turn, client)
        self._turn += 1
        self._entries[client] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + 64:
            self._heap = sorted(self._entries.values())
