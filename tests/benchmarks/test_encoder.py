"""The benchmarks of encoders: plain models, steps, pieces and quick runs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks import encode, encoder, encoder_fusions, encoder_steps
from benchmarks.measure import command, timing
from benchmarks.measure.harness import max_rel_error
from benchmarks.rivals import plain_encoder
from benchmarks.rivals.plain_encoder import Switches
from jaxscale.models import EncoderModel
from tests.tiers import exhaustive


@pytest.mark.parametrize(
    ("name", "scans"),
    [
        ("bert_tiny", (False, True)),
        ("deberta_v3_tiny", (True,)),
        *exhaustive(("albert_tiny", (True,)), ("distilbert_tiny", (False,))),
    ],
)
def test_plain_models_compute_what_ours_do(name, scans):
    """In fp32: packed by our model, padded by the plain one."""
    case = encoder.case(name, 3, 24)
    leaves, tokens, lengths = encoder.inputs(case.params, jax.random.key(1))
    leaves = [x.astype(jnp.float32) for x in leaves]
    config = encoder.config_of(case.params)
    model = EncoderModel(config, rngs=nnx.Rngs(0)).unstacked()  # computes in fp32
    model = jax.tree.unflatten(jax.tree.structure(model), leaves)
    budget = encoder.token_budget(case.params)
    padded = jax.jit(EncoderModel.padded, static_argnames="token_budget")
    want = padded(model, tokens, lengths=lengths, token_budget=budget)
    for scan in scans:
        make = jax.jit(encoder.plain(case.params, attention="xla", scan=scan))
        found = make(leaves, tokens, lengths)
        assert 0 < max_rel_error(found, want) < 1e-5


def test_steps_compute_the_same():
    params = encoder.case("bert_tiny", 3, 24).params
    arguments = encoder.inputs(params, jax.random.key(0))
    want = encoder.reference(params)(*arguments)
    for make in encoder_steps.MAKERS.values():
        found = jax.jit(make(params))(*arguments)
        assert 0 < max_rel_error(found, np.asarray(want)) < 3e-2


def test_separate_steps_stay_separate():
    """A barrier behind each bias, activation, sum and norm."""
    params = encoder.case("bert_tiny", 3, 24).params
    arguments = encoder.inputs(params, jax.random.key(0))

    def barriers(name):
        text = jax.jit(encoder_steps.MAKERS[name](params)).lower(*arguments).as_text()
        return text.count("optimization_barrier")

    assert barriers("fusions") == 0 and barriers("padded") > 2 * 12


def test_inputs_are_padded_as_the_paper_pads_them():
    params = encoder.case("bert_base", 16, 1024).params
    lengths = encoder.lengths_of(params)
    assert params["tokens"] == lengths.sum() and lengths.max() <= 1024
    assert lengths.min() >= 204 and encoder.token_budget(params) % 256 == 0
    assert 0 <= encoder.token_budget(params) - params["tokens"] < 256
    leaves, tokens, found = encoder.inputs(
        encoder.case("bert_tiny", 3, 24).params, jax.random.key(0)
    )
    assert all(float(x.max()) > float(x.min()) for x in leaves)
    assert tokens.shape == (3, 24) and found.shape == (3,)


def test_programs_are_compiled_once():
    program = timing.Program(lambda x: x + 1)
    assert program.lower(jnp.ones(2)).compile() is program.compile()
    np.testing.assert_array_equal(program(jnp.ones(2)), [2, 2])
    assert program.lower(jnp.ones(2)).lowered is program.lowered


def test_gains():
    found = encoder_steps.compare({}, {"padded": 6.0, "fusions": 3.0, "packing": 2.0})
    assert found["packing"] == {"total": 3.0, "gain": 1.5}
    assert found["padded"] == {"total": 1.0}


def test_the_public_call_is_compared_with_the_better_graph():
    medians = {"jaxscale": 1.0, "torch_compile_graphs": 3.0, "torch_cuda_graph": 2.0}
    found = encode.compare({}, medians)
    assert found["jaxscale"] == {"vs_torch_graphs": 2.0}
    assert encode.compare({}, {"jaxscale": 1.0, "torch_compile": 9.0}) == {}


def test_cases_begin_with_the_targets():
    cases = encoder.BENCHMARK.cases
    first = [(c.params["model"], c.params["max_len"]) for c in cases[:4]]
    assert first == [
        ("bert_base", 1024),
        ("albert_base", 512),
        ("distilbert_base", 512),
        ("deberta_v3_base", 512),
    ]
    assert all(c.params["batch"] == 16 for c in cases[:4]) and len(cases) == 4 * 28


def test_unknown_attention_of_packed_deberta():
    params = encoder.case("deberta_v3_tiny", 3, 24).params
    leaves, tokens, lengths = encoder.inputs(params, jax.random.key(0))
    model = encoder.model_of(params, leaves)
    switches = Switches(attention="xla", token_budget=encoder.token_budget(params))
    with pytest.raises(NotImplementedError, match="of packed tokens"):
        plain_encoder.hidden(model, tokens, lengths, switches)


@pytest.mark.parametrize(
    ("benchmark", "case", "said"),
    [
        (encoder.BENCHMARK, "bert_tiny*", "jax_padded: not supported: cuDNN"),
        (encoder_steps.BENCHMARK, "*", "gain"),
        *exhaustive(
            (encode.BENCHMARK, "bert_tiny*", "computed_tokens 128"),
            (encoder_fusions.BENCHMARK, "*", "there is nothing to fuse"),
        ),
    ],
    ids=["encoder", "encoder_steps", "encode", "encoder_fusions"],
)
def test_the_commands_run_anywhere_and_write_nothing(
    benchmark, case, said, tmp_path, capsys
):
    arguments = ["--quick", "--out", str(tmp_path), "--case", case]
    assert command.main(benchmark, arguments) == 0
    assert said in capsys.readouterr().out
    assert not [*tmp_path.rglob("*")]
