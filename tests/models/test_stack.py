"""What a scan over layers compiles, and that it is what a loop over them computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import jaxprs_in_params

from jaxscale.models import Decoder, preset
from jaxscale.models.stack import run_stack
from jaxscale.nn import attention_state
from tests.tolerances import relative_error


def products(jaxpr) -> int:
    """How many matrix products a program holds, each loop's body counted once."""
    return sum(
        (eqn.primitive is jax.lax.dot_general_p)
        + sum(products(sub) for sub in jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


@pytest.mark.parametrize(
    ("windows", "lengths", "blocks"),
    [
        ((None,) * 5, [5], 1),
        ((2, None, 2, None, 2), [2], 3),  # a pair in the loop, and the last alone
        ((2, 2, 2, None, 2), [1], 5),  # the pattern is as long as what is left of it
    ],
)
def test_a_scan_compiles_the_shortest_pattern(windows, lengths, blocks):
    config = dataclasses.replace(preset("llama_tiny"), num_layers=5)
    model = Decoder(config, rngs=nnx.Rngs(0))
    state = attention_state((2, 8))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 8, config.d_model)), "f")
    variants = [
        dataclasses.replace(config.attention(0), window=window) for window in windows
    ]

    def run(x, scan):
        options = {"variants": variants, "remat": "none", "scan": scan}
        return run_stack(model.blocks, x, state, **options)[0]

    scanned, looped = (
        jax.make_jaxpr(run, static_argnums=1)(x, s) for s in (True, False)
    )
    loops = [eqn for eqn in scanned.eqns if eqn.primitive is jax.lax.scan_p]
    assert [eqn.params["length"] for eqn in loops] == lengths
    assert products(scanned) * 5 == products(looped) * blocks
    actual, expected = (jax.jit(run, static_argnums=1)(x, s) for s in (True, False))
    assert relative_error(actual, expected) < 1e-5
