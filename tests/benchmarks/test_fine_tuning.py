"""The benchmark of fine-tuning: batches, steps and what the losses are checked by."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import encoder
from benchmarks import fine_tuning as benchmark
from benchmarks.rivals.plain_encoder import Switches


PARAMS = benchmark.case("bert_tiny", 3, 12).params


def test_steps_go_on_and_give_their_first_losses():
    """In fp32 those of the definition, and another one after an update."""
    operands = benchmark.inputs(PARAMS, jax.random.key(0))
    loss = benchmark.padded_loss(Switches(attention="xla"), jnp.float32)
    steps = benchmark.Steps(PARAMS, loss, benchmark.padded_batch)
    found = [np.asarray(steps(*operands)) for _ in range(4)]
    wanted = np.asarray(jax.jit(benchmark.reference(PARAMS))(*operands))
    np.testing.assert_allclose(found[1], wanted, rtol=1e-5)
    assert abs(wanted[1] / wanted[0] - 1) > 1e-3  # the update is seen
    np.testing.assert_array_equal(found[3], found[1])
    assert int(steps.state.step) == 4
    # Two moments of fp32 for each parameter, and what the step makes.
    parameters = sum(x.nbytes for x in operands[0])
    assert 2 * parameters < steps.memory(*operands) < 20 * parameters


def test_packed_rows_hold_the_texts_of_padded_ones():
    _, tokens, labels = benchmark.inputs(PARAMS, jax.random.key(0))
    packed = benchmark.packed_batch(PARAMS, tokens[0], labels[0])
    padded = benchmark.padded_batch(PARAMS, tokens[0], labels[0])
    bounds, lengths = packed.cu_seqlens[0], encoder.lengths_of(PARAMS)
    assert len({*lengths.tolist()}) > 1
    for i, length in enumerate(lengths):
        row = packed.tokens[0, bounds[i] : bounds[i + 1]]
        np.testing.assert_array_equal(row, padded.tokens[i, :length])
        assert int(padded.cu_seqlens[i, 1]) == length
    np.testing.assert_array_equal(packed.labels[0], padded.labels[:, 0])
    assert packed.tokens.shape == (1, 256) and not packed.tokens[0, bounds[-1] :].any()


def test_what_is_not_there_is_said():
    with pytest.raises(NotImplementedError, match="cuDNN needs a GPU"):
        benchmark.jax_padded(PARAMS)
