"""A tiny packed language model with the interface of a decoder, for fast tests."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxscale.models.families.llama import llama_tiny
from jaxscale.sharding.lookup import gather
from jaxscale.sharding.operations import constrain, contract
from jaxscale.sharding.parameters import partitioned
from jaxscale.sharding.rules import REPLICATED


VOCAB, WIDTH, HIDDEN, LAYERS = 32, 16, 32, 2


class Toy(nnx.Module):
    """Embedding, stacked residual layers over (token, previous token), projection."""

    # What it says of itself to `fit`; nobody builds it again from this.
    config = llama_tiny()
    dtype, remat, scan_layers = jnp.float32, "none", False

    def __init__(self, *, rules=REPLICATED, param_dtype=jnp.float32, seed=0):
        self.rules = rules
        self.param_dtype = param_dtype
        keys = jax.random.split(jax.random.key(seed), 5)
        normal = jax.nn.initializers.normal(0.3)
        ones = jax.nn.initializers.ones

        def param(init, axes, key, shape):
            return nnx.Param(partitioned(init, *axes)(key, shape, param_dtype))

        self.embedding = param(normal, ("vocab", "embed"), keys[0], (VOCAB, WIDTH))
        self.scale = param(ones, ("layers", "norm"), keys[1], (LAYERS, WIDTH))
        self.up = param(
            normal, ("layers", "embed", "mlp"), keys[2], (LAYERS, WIDTH, HIDDEN)
        )
        self.down = param(
            normal, ("layers", "mlp", "embed"), keys[3], (LAYERS, HIDDEN, WIDTH)
        )
        self.output = param(normal, ("embed", "vocab"), keys[4], (WIDTH, VOCAB))

    def hidden(self, tokens, *, cu_seqlens=None):
        del cu_seqlens
        out = ("batch", "tokens", "act_embed")
        x = gather(self.embedding[...], tokens, ("vocab", "embed"), out, self.rules)
        x = x.astype(jnp.float32)
        for i in range(LAYERS):
            h = constrain(x, ("batch", None, None), self.rules)
            h = (h + jnp.roll(h, 1, axis=1)) * self.scale[i].astype(jnp.float32)
            h = contract(
                "btd,df->btf",
                h,
                self.up[i].astype(jnp.float32),
                ("embed", "mlp"),
                ("batch", None, "act_mlp"),
                self.rules,
            )
            x = x + contract(
                "btf,fd->btd",
                jax.nn.gelu(h),
                self.down[i].astype(jnp.float32),
                ("mlp", "embed"),
                out,
                self.rules,
            )
        return x

    logit_softcap = None

    def output_embedding(self):
        return self.output[...], None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: Any
    targets: Any
    loss_mask: Any
    cu_seqlens: Any


def batch(seed, rows=8, length=12) -> Any:
    """Sequences in which each token is the one before plus three; unequal masks."""
    rng = np.random.default_rng(seed)
    start = rng.integers(0, VOCAB, (rows, 1))
    sequence = ((start + 3 * np.arange(length + 1)) % VOCAB).astype(np.int32)
    lengths = rng.integers(1, length + 1, (rows, 1))
    return Batch(
        tokens=sequence[:, :-1],
        targets=sequence[:, 1:],
        loss_mask=np.arange(length) < lengths,
        cu_seqlens=np.broadcast_to(np.array([0, length], np.int32), (rows, 2)).copy(),
    )
