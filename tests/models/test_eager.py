"""A decoder called outside of `jax.jit`, as in a notebook."""

import jax
import numpy as np
from flax import nnx

from jaxscale import sharding
from jaxscale.models import Decoder, preset


def test_an_eager_call_on_a_mesh_equals_one_on_a_device():
    # Operation by operation, a shard_map of jax 0.11.2 crashes in the rotary embedding.
    def make(rules):
        config = preset("llama_tiny")
        return Decoder(config, scan_layers=False, rules=rules, rngs=nnx.Rngs(0))

    tokens = jax.random.randint(jax.random.key(0), (4, 8), 0, 256)
    expected = jax.jit(lambda model, tokens: model(tokens))(
        make(sharding.REPLICATED), tokens
    )
    mesh, rules = sharding.make_mesh({"fsdp": 4, "tensor": 2}), sharding.fsdp_tp()
    model = sharding.create(lambda: make(rules), mesh, rules)
    with jax.set_mesh(mesh):
        actual = model(tokens)
    np.testing.assert_allclose(actual, expected, atol=1e-4)
