"""Running a schedule: what it takes in memory, without a model."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxscale.sharding import make_mesh, pipeline_schedule
from jaxscale.sharding.pipeline import PipelineProgram, run_forward, run_schedule
from tests.tiers import exhaustive


STAGES, LAYERS, ROWS, WIDTH = 2, 2, 64, 256


def program():
    """Layers of one product each; the loss is a sum of squares."""
    return PipelineProgram(
        embed=lambda ends, mb: jnp.broadcast_to(ends, (ROWS, WIDTH)),
        layer=lambda layer, x, mb, c, i: jnp.tanh(x @ layer),
        loss=lambda ends, y, mb: ((y @ ends).sum(), y.sum()),
        activation=lambda leading: jnp.zeros((*leading, ROWS, WIDTH)),
    )


def temporaries(microbatches, kind, chunks):
    schedule = pipeline_schedule(STAGES, microbatches, chunks, kind)

    def local(weights, ends):
        if kind == "forward":  # GPipe
            run = functools.partial(run_forward, schedule, program())
            return jax.grad(run, argnums=(0, 1), has_aux=True)(weights, ends)[0]
        return run_schedule(schedule, program(), weights, ends)[1:]

    mesh = make_mesh({"pipe": STAGES}, jax.devices()[:STAGES])
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P(None, None, "pipe"), P()),
        out_specs=(P(None, None, "pipe"), P()),
        check_vma=False,
    )
    shapes = (chunks, LAYERS, STAGES * WIDTH, WIDTH), (WIDTH,)
    arguments = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    compiled = jax.jit(mapped).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("chunks", [2, *exhaustive(1)])
def test_memory_does_not_grow_with_microbatches(chunks):
    sizes = [temporaries(m, "1f1b", chunks) for m in (8, 32)]
    assert max(sizes) < 1.01 * min(sizes), sizes
    grown = [temporaries(m, "forward", chunks) for m in (8, 32)]
    assert grown[1] > 1.2 * grown[0]  # the check sees what grows
