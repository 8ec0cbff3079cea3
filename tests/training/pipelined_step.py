"""Gradients through a pipeline of a real shape, to compile for GPUs not there.

``python -m tests.training.pipelined_step`` compiles LLaMA's block with fused products
for 8 and for 32 H200s, in minutes, and prints kernels, spills and what is hidden.
"""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.models import Decoder, preset
from jaxscale.models.stack_layout import StackLayout
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import make_mesh, megascale_3d, shardings
from jaxscale.training import next_token_loss, pipelined
from jaxscale.training.planning.hlo import transfers
from tests.compiled import compile_for_h200


def gradients(
    devices: list[Any],
    model: str,
    sizes: dict[str, int],
    layers: int,
    microbatches: int,
    options: dict[str, Any],
    change: dict[str, Any],
) -> tuple[Any, tuple[Any, ...]]:
    """What `pipelined` makes of packed rows of 4,096 tokens, as `tests.compiled` takes.

    Args:
        devices: The devices of the mesh.
        model: A preset, with `layers` layers and what `change` says.
        sizes: Of the mesh axes.
        layers: Number of layers.
        microbatches: Of one row of each device that sees other rows.
        options: Of `Decoder`, and ``chunks`` and ``zero`` of `pipelined`.
        change: Fields of the config.
    """
    mesh, rules = make_mesh(sizes, devices), megascale_3d()
    config = dataclasses.replace(preset(model), num_layers=layers, **change)
    settings = {
        "chunks": options.pop("chunks", 1),
        "microbatches": microbatches,
        "zero": options.pop("zero", 3),
    }
    stack = StackLayout(
        num_layers=layers, stages=mesh.shape["pipe"], chunks=settings["chunks"]
    )

    def init():
        decoder = Decoder(
            config, dtype=jnp.bfloat16, rules=rules, rngs=nnx.Rngs(0), **options
        )
        return stack.arrange(decoder)

    decoder = jax.eval_shape(init)
    decoder = jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        decoder,
        shardings(decoder, mesh, rules),
    )
    rows = microbatches * mesh.shape["data"] * mesh.shape["fsdp"]

    def of(kind: Any, *inner: int) -> Any:
        where = NamedSharding(mesh, rules.spec("batch", *[None] * len(inner)))
        return jax.ShapeDtypeStruct((rows, *inner), kind, sharding=where)

    length = min(4096, config.max_seq_len)
    batch = PackedBatch(
        tokens=of(np.int32, length),
        targets=of(np.int32, length),
        loss_mask=of(np.bool_, length),
        cu_seqlens=of(np.int32, 9),
    )
    run = pipelined(next_token_loss(chunk_size=1024), rules=rules, **settings)

    def under_mesh(decoder, batch):
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return run(decoder, batch)

    return jax.jit(under_mesh), (decoder, batch)


def _report(sizes: dict[str, int], count: int) -> None:
    options = {"tensor_parallel": "fused", "remat": "attention"}
    found = compile_for_h200(
        gradients, "llama3_8b", sizes, 2 * sizes["pipe"], 2, options, {}, count=count
    )
    print(f"{count} H200s, {sizes}: {found.temporaries / 2**30:.2f} GiB of temporaries")
    print("  kernels", dict(Counter(kernel.name for kernel in found.kernels)))
    print("  spills", [kernel for kernel in found.kernels if kernel.spilled])
    for at in transfers(found.hlo):
        if at.loops and at.size > 2**20:
            behind = "waited for" if at.behind is None else dict(Counter(at.behind))
            size = f"{at.size / 2**20:.0f} MiB"
            print(f"  {at.loops} {at.operation} {sorted(at.axes)} {size}: {behind}")


if __name__ == "__main__":
    # As a module of its name, which the process that compiles imports.
    from tests.training import pipelined_step

    pipelined_step._report({"pipe": 2, "tensor": 4}, 8)
    pipelined_step._report({"pipe": 4, "fsdp": 2, "tensor": 4}, 32)
