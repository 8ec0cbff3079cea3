"""One of two processes of four devices each: which kernels reach their peers."""

import functools
import json
import logging
import os
import re
import sys

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from pallas_kernels.collective_matmul import all_gather_matmul
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from tests.lowering import MULTICAST_MARK
from tests.training.layouts import Layout


def lowered(sizes, implementation=None):
    """The places that kernels name in a gather over `tensor`, lowered for GPUs."""
    mesh = jax.make_mesh(
        sizes, ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    fn = jax.shard_map(
        functools.partial(
            all_gather_matmul, axis_name="tensor", implementation=implementation
        ),
        mesh=mesh,
        in_specs=(P(("data", "tensor")), P()),
        out_specs=P(("data", "tensor")),
        check_vma=False,
    )
    x, w = (
        jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((16384, 1024), (1024, 1024))
    )
    with use_device(H200):
        text = jax.jit(fn).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    assert MULTICAST_MARK not in text
    return re.findall('xla_replica_ids = "(.*?)"', text)


def refusal(sizes):
    """What the kernel says where it is named and reaches no peer."""
    try:
        lowered(sizes, "mosaic_gpu")
    except Unsupported as error:
        return str(error)
    return ""


def loss(pipe, tensor):
    """The loss of a step with fused products, which run in XLA's form here."""
    layout = Layout(pipe=pipe, tensor=tensor, tensor_parallel="fused", packed=False)
    with jax.set_mesh(layout.mesh):
        sums, _ = jax.jit(layout.gradients)(*layout.arguments())
    return float(sums.nll)


def main(coordinator: str, rank: str) -> None:
    """Print what was found."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(coordinator, 2, int(rank))
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger = logging.getLogger("pallas_kernels")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    untuned = [lowered((2, 4)), lowered((2, 4))]
    os.environ["XLA_FLAGS"] = "--xla_gpu_shard_autotuning=false"
    inside, across = lowered((2, 4)), lowered((1, 8))
    logger.removeHandler(handler)
    refused = refusal((1, 8))
    found = {
        "untuned": untuned,
        "inside": inside,
        "across": across,
        "refused": refused,
        "said": said,
        "loss": loss(2, 4),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
