"""Sparse models lower for CUDA, kernels included, on a machine without a GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale import sharding
from jaxscale.models import Decoder
from jaxscale.pruning import (
    PruneConfig,
    magnitude_scores,
    make_model_masks,
    sparsify,
)
from pallas_kernels.mosaic import H200, use_device
from tests.lowering import cuda_mesh, lower_for_cuda
from tests.pruning.conftest import CONFIG


WIDE = dataclasses.replace(
    CONFIG, d_model=128, d_ff=512, num_heads=2, num_kv_heads=2, head_dim=64
)


@pytest.fixture(scope="module")
def sparse():
    rules = sharding.preset("fsdp_tp")
    model = Decoder(
        WIDE,
        dtype=jnp.bfloat16,
        rules=rules,
        attention_implementation="xla",  # cuDNN is asked for its version
        rngs=nnx.Rngs(0),
    )
    config = PruneConfig(sparsity=0.75, tile=64, shards=2)
    masks = make_model_masks(model, magnitude_scores(model), config)
    return sparsify(model, masks, implementation="mosaic_gpu")


def loss(model, tokens):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def mean(params):
        return nnx.merge(graph, params, rest).hidden(tokens).astype(jnp.float32).mean()

    return jax.value_and_grad(mean)(params)


TOKENS = jax.ShapeDtypeStruct((4, 512), jnp.int32)


def test_forward_and_gradient(sparse):
    with use_device(H200):
        text = lower_for_cuda(loss, jax.eval_shape(lambda: sparse), TOKENS)
    assert "tile_sparse_matmul" in text and "tile_sparse_grad_values" in text


def test_tensor_parallel(sparse):
    mesh = cuda_mesh({"data": 1, "fsdp": 1, "pipe": 1, "tensor": 2})
    with jax.sharding.use_abstract_mesh(mesh), use_device(H200):
        text = lower_for_cuda(loss, jax.eval_shape(lambda: sparse), TOKENS)
    assert "tile_sparse_matmul" in text and "tile_sparse_grad_values" in text
