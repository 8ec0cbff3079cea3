"""Checks of settings."""

import math
import types
from typing import Literal

import pytest

from jaxscale.checks import (
    check_choice,
    check_integers,
    check_least,
    check_positive,
    check_range,
)


type Color = Literal["red", "green"]


def settings(value):
    return types.SimpleNamespace(x=value)


@pytest.mark.parametrize("choices", [("red", "green"), Color])
def test_choices(choices):
    check_choice("color", "green", choices)
    with pytest.raises(
        ValueError, match=r"^color 'blue' is unknown; use one of \('red', 'green'\)$"
    ):
        check_choice("color", "blue", choices)


@pytest.mark.parametrize("value", [0, -1, math.inf, math.nan])
def test_positive(value):
    check_positive(settings(1e-30), "x")
    with pytest.raises(ValueError, match=f"^x {value} must be positive and finite$"):
        check_positive(settings(value), "x")


@pytest.mark.parametrize("value", [1, -1, math.nan])
def test_least(value):
    check_least(settings(2), 2, "x")
    with pytest.raises(ValueError, match=f"^x {value}, expected at least 2$"):
        check_least(settings(value), 2, "x")


@pytest.mark.parametrize("value", [1, 5, math.nan, math.inf])
def test_range(value):
    for inside in (2, 4):
        check_range(settings(inside), 2, 4, "x")
    with pytest.raises(ValueError, match=f"^x {value}, expected 2 to 4$"):
        check_range(settings(value), 2, 4, "x")


@pytest.mark.parametrize("value", [1, 2.5, math.nan, "3"])
def test_integers(value):
    check_integers(settings(2), 2, "x")
    with pytest.raises(ValueError, match=f"^x {value!r} must be an integer of at le"):
        check_integers(settings(value), 2, "x")
