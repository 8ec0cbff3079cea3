"""The page pool of the KV cache: reference counts, and the prefix cache in free pages.

A page (block) holds the keys and values of `page_size` consecutive tokens of a
sequence. A full page has a name, the hash of all tokens up to its end, by which
sequences with the same prefix find it; so only full pages are ever shared, and none is
ever copied. A page that nobody holds keeps its contents until it is needed, least
recently used first.
"""

import array
import collections
import hashlib
from collections.abc import Iterable, Sequence

from jaxscale.checks import check_integers


ROOT = b""
"""The parent of the first page of a sequence."""


def root_of(adapter: str | None) -> bytes:
    """The parent of the first page of a sequence that an adapter computes.

    So pages of different adapters, or of one and of the model itself, have different
    names, whatever their tokens and salts.

    Example:
        >>> root_of(None) == ROOT, len(root_of("sql"))
        (True, 32)
    """
    if adapter is None:
        return ROOT
    return hashlib.blake2b(adapter.encode(), digest_size=32, person=b"adapter").digest()


def page_hash(
    parent: bytes, tokens: Sequence[int], salt: str, *, decoded: int | None = None
) -> bytes:
    """The name of a full page: blake2b of its parent's, its tokens and a salt.

    Equal names mean equal tokens from the beginning of the sequence, computed in the
    same way, and one salt.

    Args:
        parent: The name of the page before it, or `root_of` the adapter.
        tokens: The tokens of the page.
        salt: Requests with another salt cannot find the page.
        decoded: The position from which decode has computed the sequence, if it is in
            this page or before: prefill rounds differently.

    Example:
        >>> page_hash(ROOT, [1, 2], "a") == page_hash(ROOT, [1, 2], "b")
        False
    """
    name = hashlib.blake2b(parent, digest_size=32)
    start = -1 if decoded is None else decoded
    name.update(array.array("q", [start, *tokens]).tobytes())
    name.update(salt.encode("utf-8", "surrogatepass"))
    return name.digest()


class BlockPool:
    """The pages of the KV cache, by number.

    Every page is in one of three states: held by at least one sequence, cached (held by
    none, but can be found by its name) or free.

    Example:
        >>> pool = BlockPool(num_pages=4, page_size=2)
        >>> pages = pool.allocate(2)
        >>> pool.name(pages[0], page_hash(ROOT, [5, 6], ""))
        >>> pool.release(pages)
        >>> pool.num_free, pool.num_cached, pool.num_held
        (3, 1, 0)
        >>> pool.find([page_hash(ROOT, [5, 6], "")]) == pages[:1]
        True
    """

    def __init__(self, *, num_pages: int, page_size: int) -> None:
        """Start with all pages free.

        Raises:
            ValueError: one of them is not positive.
        """
        self.num_pages = num_pages
        self.page_size = page_size
        check_integers(self, 1, "num_pages", "page_size")
        # The lowest numbers first: pages in use stay together.
        self._free = list(range(num_pages - 1, -1, -1))
        self._cached: collections.OrderedDict[int, None] = collections.OrderedDict()
        self._holders = [0] * num_pages
        self._names: list[bytes | None] = [None] * num_pages
        self._pages: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Number of free pages."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Number of cached pages."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Number of held pages."""
        return self.num_pages - self.num_available

    @property
    def num_available(self) -> int:
        """Number of pages that can be allocated: free and cached ones."""
        return len(self._free) + len(self._cached)

    def holders(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._holders[page]

    def pages_for(self, tokens: int) -> int:
        """Number of pages for this many tokens."""
        return -(-tokens // self.page_size)

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of the longest cached prefix of `names`.

        The next `allocate` may evict them, unless `hold` is called.
        """
        found = []
        for name in names:
            page = self._pages.get(name)
            if page is None:
                break
            found.append(page)
        return found

    def num_unheld(self, pages: Iterable[int]) -> int:
        """Number of `pages` that nobody holds, so that `hold` makes fewer available."""
        return sum(self._holders[page] == 0 for page in pages)

    def hold(self, pages: Iterable[int]) -> None:
        """Count one more holder of each of these found pages."""
        for page in pages:
            if self._holders[page] == 0:
                del self._cached[page]
            self._holders[page] += 1

    def allocate(self, count: int) -> list[int]:
        """Allocate pages with undefined contents, each with one holder.

        Free ones first; then cached ones are evicted, least recently used first.

        Raises:
            ValueError: fewer are available. Nothing has been changed then.
        """
        if count > self.num_available:
            raise ValueError(
                f"{count} pages were asked for, {self.num_available} are available"
            )
        pages = []
        for _ in range(count):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._cached.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            pages.append(page)
        return pages

    def name(self, page: int, name: bytes) -> None:
        """Make a full, held page findable; of pages with equal contents, the first one.

        Raises:
            ValueError: nobody holds the page, or it has another name.
        """
        if not self._holders[page] or self._names[page] not in (None, name):
            raise ValueError(f"page {page} is free, or has another name")
        if self._pages.setdefault(name, page) == page:
            self._names[page] = name

    def release(self, pages: Sequence[int], *, keep: bool = True) -> None:
        """Count one holder less of each page.

        Args:
            pages: The pages in the order of their tokens: the last are evicted first.
            keep: True: pages that nobody else holds stay cached.

        Raises:
            ValueError: nobody holds one of them.
        """
        for page in reversed(pages):
            if self._holders[page] == 0:
                raise ValueError(f"page {page} is released, but nobody holds it")
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if self._names[page] is not None and keep:
                self._cached[page] = None
            else:
                self._forget(page)
                self._free.append(page)

    def clear(self) -> None:
        """Clear the prefix cache, for example when the weights have changed.

        Held pages cannot be found any more either.
        """
        for page in [page for page, name in enumerate(self._names) if name is not None]:
            self._forget(page)
        self._free.extend(self._cached)
        self._cached.clear()

    def _forget(self, page: int) -> None:
        name = self._names[page]
        if name is not None:
            del self._pages[name]
            self._names[page] = None
