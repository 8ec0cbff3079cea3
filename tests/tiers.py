"""Cases that every run of the tests takes, and cases that only a whole run takes.

A case is *exhaustive* where it is one more form of what a quicker case shows already: a
fault that it alone would find is possible but rare. `pytest --exhaustive` runs all; a
change to a kernel is tested that way, and so is the whole project every week.
"""

from collections.abc import Iterable
from typing import Any

import pytest


def exhaustive(*cases: Any) -> list[Any]:
    """Cases of `pytest.mark.parametrize` that only ``--exhaustive`` runs."""
    mark = pytest.mark.exhaustive
    values = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*value, marks=mark) for value in values]


def first(cases: Iterable[Any], *quick: Any) -> list[Any]:
    """All of the cases; those that are not among `quick` are exhaustive.

    Raises:
        ValueError: one of `quick` is no case.
    """
    cases = list(cases)
    if unknown := [case for case in quick if case not in cases]:
        raise ValueError(f"{unknown} is not among the cases {cases}")
    return [c if c in quick else exhaustive(c)[0] for c in cases]
