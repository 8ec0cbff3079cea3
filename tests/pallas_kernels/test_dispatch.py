"""The fallback loop: order, the two kinds of failure, and what it says."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch as dispatch_module
from pallas_kernels.dispatch import (
    Unsupported,
    as_hashable,
    check_floating,
    dispatch,
    no_config,
    no_derivative,
    recorded,
)


def refuses(reason):
    def implementation(x, *, scale=1):
        raise Unsupported(reason)

    return implementation


def works(x, *, scale=1):
    return ("works", x * scale)


def other(x, *, scale=1):
    return ("other", x * scale)


def broken(x, *, scale=1):
    raise ValueError("x must be positive")


def test_none_takes_the_first_that_supports_the_arguments():
    table = {"fast": refuses("no GPU"), "works": works, "other": other}
    assert dispatch("op", table, None, 3, scale=2) == ("works", 6)


def test_a_name_runs_that_one_only():
    table = {"works": works, "other": other}
    assert dispatch("op", table, "other", 3, scale=2) == ("other", 6)


def test_a_sequence_is_tried_in_its_own_order():
    table = {"works": works, "fast": refuses("no GPU"), "other": other}
    assert dispatch("op", table, ("fast", "other", "works"), 3) == ("other", 3)


def test_a_named_implementation_raises_its_own_unsupported():
    with pytest.raises(NotImplementedError, match=r"^no GPU$") as caught:
        dispatch("op", {"fast": refuses("no GPU"), "works": works}, "fast", 3)
    assert caught.type is Unsupported


def test_a_mistake_of_the_caller_is_not_retried():
    with pytest.raises(ValueError, match="x must be positive"):
        dispatch("op", {"broken": broken, "works": works}, None, 3)


def test_all_failed_names_each_reason():
    table = {"fast": refuses("no GPU"), "slow": refuses("too slow")}
    with pytest.raises(ExceptionGroup) as caught:
        dispatch("my_op", table, None, 3)
    assert "my_op" in caught.value.message
    assert "fast: no GPU; slow: too slow" in caught.value.message
    assert [str(e) for e in caught.value.exceptions] == ["no GPU", "too slow"]
    assert caught.value.exceptions[0].__notes__ == ["implementation: 'fast'"]


def test_a_sequence_of_one_that_fails_is_still_a_group():
    with pytest.raises(ExceptionGroup, match="fast: no GPU"):
        dispatch("op", {"fast": refuses("no GPU")}, ["fast"], 3)


@pytest.mark.parametrize("name", ["cuda", ["works", "cuda"]])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ValueError, match=r"'cuda' of op .* \['works', 'other'\]"):
        dispatch("op", {"works": works, "other": other}, name, 3)


@pytest.mark.parametrize("name", [3, {"works"}])
@pytest.mark.usefixtures("no_shape_hook")
def test_what_is_neither_a_name_nor_a_sequence_is_a_mistake(name):
    with pytest.raises(ValueError, match=rf"{name} of op: expected .* \['works'\]"):
        dispatch("op", {"works": works}, name, 3)


def test_an_empty_sequence_is_a_mistake():
    with pytest.raises(ValueError, match="expected at least one name"):
        dispatch("op", {"works": works}, [], 3)


def test_numbers_that_have_no_gradient_are_refused():
    check_floating(a=jnp.bfloat16, b=jnp.float16, c=jnp.float32, d=np.dtype(np.float64))
    for dtype in (jnp.int32, jnp.bool_, jnp.float8_e4m3fn):
        with pytest.raises(ValueError, match=r"x has type \w+, expected one of .*cast"):
            check_floating(w=jnp.float32, x=dtype)


def test_none_passes_over_what_is_expected_to_lose(caplog, monkeypatch):
    monkeypatch.setattr(dispatch_module, "_logged", set())
    table = {"works": works, "other": other}
    declines = {"works": lambda: "too few rows", "other": lambda: None}
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        assert dispatch("op", table, None, 3, declines=declines) == ("other", 3)
        assert dispatch("op", table, "works", 3, declines=declines) == ("works", 3)
        names = ("works", "other")
        assert dispatch("op", table, names, 3, declines=declines) == ("works", 3)
    assert caplog.records[0].getMessage() == (
        "op runs implementation 'other' (works: op: too few rows;"
        " implementation='works' runs it)"
    )
    with pytest.raises(ExceptionGroup, match=r"too few rows.*no GPU"):
        table = {"works": works, "fast": refuses("no GPU")}
        dispatch("op", table, None, 3, declines=declines)


def test_another_reason_is_logged_another_number_is_not(caplog, monkeypatch):
    monkeypatch.setattr(dispatch_module, "_logged", set())
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for reason in ("3 rows", "15 rows", "type f32", "3 rows"):
            dispatch("op", {"fast": refuses(reason), "works": works}, None, 3)
    assert [r.getMessage() for r in caplog.records] == [
        "op runs implementation 'works' (fast: 3 rows)",
        "op runs implementation 'works' (fast: type f32)",
    ]


def test_the_choice_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch_module, "_logged", set())
    table = {"fast": refuses("no GPU"), "works": works, "other": other}
    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(3):
            dispatch("op", table, None, 3)
        for op, name in [("op", "other"), ("op", "works"), ("another", "works")]:
            dispatch(op, table, name, 3)
    assert [r.getMessage() for r in caplog.records] == [
        "op runs implementation 'works' (fast: no GPU)",
        "op runs implementation 'other'",
        "op runs implementation 'works'",
        "another runs implementation 'works'",
    ]


def test_choices_are_recorded_inside_alone():
    with recorded() as outer:
        dispatch("first", {"works": works}, None, 1)
        with recorded() as inner:
            dispatch("second", {"works": works}, "works", 1)
        dispatch("third", {"works": works}, None, 1)
    dispatch("fourth", {"works": works}, None, 1)
    assert inner == [("second", "works")]
    assert outer == [("first", "works"), ("third", "works")]


def test_a_name_stays_a_name_where_a_sequence_becomes_hashable():
    assert as_hashable("xla") == "xla" and as_hashable(None) is None
    assert as_hashable(["fast", "xla"]) == ("fast", "xla")


def test_a_config_is_declined_where_there_is_none_to_take():
    no_config("op", None)
    with pytest.raises(Unsupported, match="op: XLA takes no config, got 3"):
        no_config("op", 3)


def test_a_derivative_raises_the_error_that_is_given():
    assert no_derivative(2.0, "why", OSError) == 2.0
    with pytest.raises(OSError, match=r"^why\b"):
        jax.grad(lambda x: no_derivative(x, "why", OSError))(2.0)
