"""The search of the built documentation, scored as by Sphinx's ``searchtools.js``."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sphinx.search.en import SearchEnglish


TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
OBJECT, PARTIAL_OBJECT, PRIORITY = 11, 6, {0: 15, 1: 5, 2: -5}


class Search:
    """The index of a build, and what a query finds in it."""

    def __init__(self, html: Path):
        text = (html / "searchindex.js").read_text()
        self.index = json.loads(text.removeprefix("Search.setIndex(").rstrip(")\n"))
        self.language = SearchEnglish({})

    def pages(self, query: str) -> list[str]:
        """Names of the pages, best first; equal scores are in the order of titles."""
        query = query.lower().strip()
        words = re.findall(r"\w+", query)
        best: dict[int, float] = {}
        for page, score in (
            *self._titles(query),
            *self._entries(query),
            *self._objects(words),
            *self._terms(words),
        ):
            best[page] = max(score, best.get(page, score))
        titles = self.index["titles"]
        order = sorted(best, key=lambda page: (-best[page], titles[page].lower()))
        return [self.index["docnames"][page] for page in order]

    def _titles(self, query: str) -> Iterator[tuple[int, float]]:
        for title, found in self.index["alltitles"].items():
            if query in title.lower() and len(query) >= len(title) / 2:
                for page, _ in found:
                    whole = self.index["titles"][page] == title
                    yield page, round(TITLE * len(query) / len(title)) + whole

    def _entries(self, query: str) -> Iterator[tuple[int, float]]:
        """Only main entries: the others come after all else."""
        for entry, found in self.index["indexentries"].items():
            if query in entry and len(query) >= len(entry) / 2:
                for page, _, is_main in found:
                    if is_main:
                        yield page, round(100 * len(query) / len(entry))

    def _objects(self, words: list[str]) -> Iterator[tuple[int, float]]:
        for prefix, found in self.index["objects"].items():
            for page, kind, priority, _, name in found:
                full = f"{prefix}.{name}".strip(".").lower()
                last = full.rpartition(".")[2]
                title = self.index["titles"][page]
                kind_name = self.index["objnames"][str(kind)][2]
                around = f"{prefix} {name} {kind_name} {title}".lower()
                for word in words:
                    others = [other for other in words if other != word]
                    if word in full and all(other in around for other in others):
                        score = PARTIAL_OBJECT if word in last else 0
                        score = OBJECT if word in (full, last) else score
                        yield page, score + PRIORITY.get(priority, 0)

    def _terms(self, words: list[str]) -> Iterator[tuple[int, float]]:
        stems = {
            self.language.stem(word)
            for word in words
            if word not in self.language.stopwords and not word.isdecimal()
        }
        scores = {stem: self._scores(stem) for stem in stems}
        scores = {stem: found for stem, found in scores.items() if found}
        needed = (len(stems), sum(len(stem) > 2 for stem in stems))
        for page in {page for found in scores.values() for page in found}:
            here = [found[page] for found in scores.values() if page in found]
            if len(here) in needed:
                yield page, max(here)

    def _scores(self, stem: str) -> dict[int, float]:
        """By page; a later match takes the place of an earlier one, as there."""
        tables: list[tuple[dict[str, Any], int, int]] = [
            (self.index["terms"], TERM, PARTIAL_TERM),
            (self.index["titleterms"], TITLE, PARTIAL_TITLE),
        ]
        found: dict[int, float] = {}
        for terms, exact, _ in tables:
            found |= dict.fromkeys(_pages(terms.get(stem, [])), exact)
        for terms, _, partial in tables:
            if len(stem) > 2 and stem not in terms:
                for term in terms:
                    if stem in term:
                        found |= dict.fromkeys(_pages(terms[term]), partial)
        return found


def _pages(found: int | list[int]) -> list[int]:
    return [found] if isinstance(found, int) else found
