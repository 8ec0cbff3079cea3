"""Tables of parameters, gradients and moments."""

import dataclasses

import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.sharding import REPLICATED, StateRules, dp, fsdp, fsdp_tp
from jaxscale.sharding.state_rules import beyond


@pytest.mark.parametrize(
    ("stage", "replicated", "split"),
    [
        (1, False, "parameters moments"),
        (2, False, "parameters gradients moments"),
        (3, False, "parameters computed gradients moments"),
        (1, True, "moments"),
        (2, True, "gradients moments"),
    ],
)
def test_what_each_stage_of_zero_splits(stage, replicated, split):
    tables = StateRules.zero(fsdp_tp(), stage, replicated=replicated)
    for field in dataclasses.fields(tables):
        table = getattr(tables, field.name)
        spec = table.spec("embed", "mlp")
        over = "fsdp" if field.name in split.split() else None
        assert spec == P(over, "tensor"), field.name
        assert table.batch == ("data", "fsdp") and table.tokens == "tensor"
    assert tables.is_uniform == (stage == 3)


def test_rules_that_split_no_parameter_leave_nothing_to_zero():
    assert StateRules.zero(dp(), 1).is_uniform
    assert StateRules.zero(REPLICATED, 2, replicated=True).is_uniform


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"computed": fsdp_tp()}, r"vocab of parameters is None, .*begin with .*compu"),
        ({"moments": dp()}, r"embed of moments is None, .* that of gradients, \('fsdp"),
        (
            {"moments": dataclasses.replace(fsdp(), embed=("data", "fsdp"))},
            r"embed of moments is \('data', 'fsdp'\), expected it to begin with",
        ),
    ],
)
def test_tables_that_do_not_contain_each_other(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(StateRules.zero(fsdp(), 3), **change)


def test_stages_that_do_not_exist(no_shape_hook):
    with pytest.raises(ValueError, match=r"zero 4 is unknown; use one of \(1, 2, 3\)"):
        StateRules.zero(fsdp(), 4)
    with pytest.raises(ValueError, match=r"zero 3 splits .* use zero 1 or 2"):
        StateRules.zero(fsdp(), 3, replicated=True)


def test_what_a_partition_splits_more():
    assert beyond(P(("fsdp", "data"), "tensor"), P("fsdp")) == P("data", "tensor")
    assert beyond(P("fsdp"), P("fsdp", None)) == P(None, None)
    assert beyond(P(), P()) == P()
