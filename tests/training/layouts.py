"""Loss and gradients of a tiny decoder on a layout of devices, and on one device."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.models import Decoder, preset
from jaxscale.models.stack_layout import StackLayout
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import (
    MESH_AXES,
    MeshConfig,
    StateRules,
    fsdp_tp,
    make_mesh,
    megascale_3d,
    shardings,
)
from jaxscale.training.gradients import accumulated
from jaxscale.training.pipelined import pipelined
from jaxscale.training.step import next_token_loss


LOSS = next_token_loss(chunk_size=3, z_loss=1e-3)
ROWS, TOKENS = 16, 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How 8 devices, or fewer, share a step."""

    model: str = "llama_tiny"
    layers: int = 4
    vocab: int = 64
    packed: bool = True
    pipe: int = 1
    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1
    windows: tuple[int | None, ...] = ()
    zero: Any = 3
    replicated: bool = False
    moments_over_data: bool = False
    chunks: int = 1
    microbatches: int = 2
    tensor_parallel: str | None = None
    remat: str = "none"
    scan_layers: bool = True
    kind: str = "1f1b"

    @property
    def mesh(self):
        sizes = {n: getattr(self, n) for n in MESH_AXES}
        count = int(np.prod(list(sizes.values())))
        return make_mesh(MeshConfig(**sizes), jax.devices()[:count])

    @property
    def rules(self):
        return megascale_3d() if self.pipe > 1 else fsdp_tp()

    @property
    def tables(self):
        tables = StateRules.zero(self.rules, self.zero, replicated=self.replicated)
        if not self.moments_over_data:
            return tables
        moments = dataclasses.replace(self.rules, embed=("fsdp", "data"))
        return dataclasses.replace(tables, moments=moments)

    @property
    def stack(self):
        return StackLayout(num_layers=self.layers, stages=self.pipe, chunks=self.chunks)

    @property
    def gradients(self):
        options: Any = {
            "microbatches": self.microbatches,
            "rules": self.rules,
            "state_rules": self.tables,
        }
        if self.pipe == 1:
            return accumulated(LOSS, **options)
        return pipelined(LOSS, chunks=self.chunks, kind=self.kind, **options)

    @property
    def shape(self):
        return dataclasses.replace(
            shape(self.model, self.layers),
            window_pattern=self.windows,
            vocab_size=self.vocab,
        )

    def decoder(self, **options):
        return Decoder(self.shape, rngs=nnx.Rngs(0), **options)

    def stored(self):
        """The model, in the order of the stages."""
        model = self.decoder(
            rules=self.rules,
            remat=self.remat,
            scan_layers=self.scan_layers,
            tensor_parallel=self.tensor_parallel,
        )
        return self.stack.arrange(enlarged(model))

    def _places(self, model, batch):
        rows = NamedSharding(self.mesh, self.rules.spec("batch"))
        places = shardings(model, self.mesh, self.tables.parameters)
        return places, jax.tree.map(lambda _: rows, batch)

    def arguments(self):
        """Model and batch on the mesh."""
        with jax.set_mesh(self.mesh):
            model = self.stored()
        batch = rows_of(self.packed)
        return jax.device_put((model, batch), self._places(model, batch))

    def shapes(self, rows=ROWS):
        """Those of `arguments`, for what is only traced or lowered: nothing is drawn.

        The batch has its first `rows`.
        """
        batch = jax.tree.map(lambda x: x[:rows], rows_of(self.packed))
        whole = jax.eval_shape(self.stored), batch
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            whole,
            self._places(*whole),
        )


def shape(name, layers):
    return dataclasses.replace(preset(name), num_layers=layers, vocab_size=64)


def enlarged(model):
    """Larger weights, so that attention and gates matter."""
    model.blocks = jax.tree.map(lambda w: 8 * w if w.ndim == 3 else w, model.blocks)
    return model


def rows_of(packed):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (ROWS, TOKENS + 1), np.int32)
    first = rng.integers(1, TOKENS - 2, ROWS, np.int32)
    ends = np.full(ROWS, TOKENS - 1, np.int32)  # the last token is padding
    bounds = np.stack([np.zeros_like(first), first, ends], 1)
    return PackedBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=rng.random((ROWS, TOKENS)) < 0.8,
        cu_seqlens=bounds if packed else None,
    )


@functools.cache
def one_device(model, layers, packed, windows=(), vocab=64):
    """The sums and the gradients of one device."""
    layout = Layout(
        model=model, layers=layers, packed=packed, windows=windows, vocab=vocab
    )
    decoder, batch = enlarged(layout.decoder()), rows_of(packed)
    sums, grads = jax.jit(accumulated(LOSS))(decoder, batch)
    return jax.device_get(sums), nnx.to_pure_dict(jax.device_get(grads))


def errors(layout):
    """Relative errors of the sums, and of the gradient of each parameter."""
    sums, grads = one_device(
        layout.model, layout.layers, layout.packed, layout.windows, layout.vocab
    )
    with jax.set_mesh(layout.mesh):
        got_sums, got = jax.jit(layout.gradients)(*layout.arguments())
    wanted = shardings(got, layout.mesh, layout.tables.moments)
    for x, place in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim), (x.sharding, place)
    got = nnx.to_pure_dict(jax.device_get(layout.stack.flatten(got)))
    # Some gradients are zero but for rounding: that of the bias of keys.
    least = 1e-3 * max(np.abs(g).max() for g in jax.tree.leaves(grads))

    def error(x, y):
        padding, inside = x.copy(), tuple(map(slice, y.shape))
        padding[inside] = 0
        assert not padding.any()  # that of a vocabulary which does not divide
        x = x[inside]
        return float(np.abs(x - y).max() / max(np.abs(y).max(), least))

    found = {
        jax.tree_util.keystr(path): error(x, y)
        for (path, x), y in zip(
            jax.tree.leaves_with_path(got), jax.tree.leaves(grads), strict=True
        )
    }
    for name in ("nll", "z_loss", "tokens", "correct"):
        x, y = (float(getattr(s, name)) for s in (got_sums, sums))
        found[name] = abs(x - y) / max(abs(y), 1e-9)
    return found
