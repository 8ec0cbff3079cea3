"""Pipelines for GPUs: fused products inside, and what XLA hides, as compiled."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from jaxscale.models import Decoder, preset
from jaxscale.nn.packing import PackedBatch
from jaxscale.sharding import (
    XLA_PRESETS,
    make_mesh,
    megascale_3d,
    shardings,
    tensor_parallel,
)
from jaxscale.training.pipelined import pipelined
from jaxscale.training.planning.hlo import transfers
from jaxscale.training.step import next_token_loss
from pallas_kernels import tuned_configs
from pallas_kernels.collective_matmul import CollectiveConfig
from pallas_kernels.mosaic import H200, use_device
from tests.compiled import compile_for_h200
from tests.interpreter import interpret_mosaic_gpu
from tests.pallas_kernels.varlen_attention import stand_ins  # noqa: F401
from tests.tolerances import RELATIVE, relative_error
from tests.training import pipelined_step


ROWS, TOKENS = 2, 256  # 128 of a device: a tile
SMALL = CollectiveConfig(tile_m=128, tile_n=64, stages=2)


def loss_and_gradients(form):
    """Of a tiny decoder in bf16, by two stages of two devices each."""
    mesh, rules = make_mesh({"pipe": 2, "tensor": 2}, jax.devices()[:4]), megascale_3d()
    config = dataclasses.replace(
        preset("llama_tiny"),
        vocab_size=64,
        d_model=64,
        d_ff=128,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        max_seq_len=TOKENS,
    )
    model = Decoder(
        config,
        dtype=jnp.bfloat16,
        rules=rules,
        tensor_parallel=form,
        rngs=nnx.Rngs(0),
    )
    model = jax.device_put(model, shardings(model, mesh, rules))
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, TOKENS + 1), np.int32)
    batch = PackedBatch(
        tokens=tokens[:, :-1],
        targets=tokens[:, 1:],
        loss_mask=np.ones((ROWS, TOKENS), bool),
        cu_seqlens=None,
    )
    batch = jax.device_put(batch, NamedSharding(mesh, rules.spec("batch")))
    run = pipelined(next_token_loss(), microbatches=ROWS, rules=rules)
    with jax.set_mesh(mesh):
        sums, grads = jax.jit(run)(model, batch)
    return float(sums.nll) / int(sums.tokens), jax.device_get(nnx.to_pure_dict(grads))


# A layout of `test_pipelined` has the same region on every push, and the test below its
# kernels, as compiled.
@pytest.mark.exhaustive
def test_kernels_inside_a_pipeline_give_what_collectives_give(monkeypatch):
    want_loss, want = loss_and_gradients("xla")
    monkeypatch.setitem(tensor_parallel._IMPLEMENTATIONS, "fused", "mosaic_gpu")
    with (
        use_device(dataclasses.replace(H200, num_sms=1)),
        tuned_configs.override("collective_matmul", SMALL),
        interpret_mosaic_gpu() as interpreted,
    ):
        loss, grads = loss_and_gradients("fused")
    assert interpreted.kernels > 4 * 4  # of two layers, forward and backward
    assert abs(loss - want_loss) < 1e-3 * want_loss
    tolerance = RELATIVE[jnp.dtype("bfloat16")]
    for (path, got), expected in zip(
        jax.tree.leaves_with_path(grads), jax.tree.leaves(want), strict=True
    ):
        assert relative_error(got, expected) < tolerance, jax.tree_util.keystr(path)


def test_kernels_inside_a_pipeline_compile_for_eight_gpus():
    """Real widths and a parallel block: a gather and a scatter, and back.

    `tests.training.pipelined_step` compiles LLaMA's block, also for 32 GPUs.
    """
    change = {"num_heads": 32, "num_kv_heads": 32, "head_dim": 128}
    sizes, options = {"pipe": 2, "tensor": 4}, {"tensor_parallel": "fused"}
    found = compile_for_h200(
        pipelined_step.gradients, "gptj_6b", sizes, 4, 1, options, change, count=8
    )
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    count = Counter(kernel.name for kernel in found.kernels)
    assert count["all_gather_matmul"] == count["matmul_reduce_scatter"] == 2
    assert count["varlen_attention"] == count["varlen_attention_backward"] == 1
    inside = [t for t in transfers(found.hlo) if t.loops == 2 and "tensor" in t.axes]
    # Activations are sent by the kernels. What is left are gradients of vectors: of
    # biases of 4 x 4,096 and of the norm.
    assert sorted(t.size for t in inside) == [2 * 4096, 2 * 4 * 4096]
    assert {t.operation for t in inside} == {"all-reduce"}


WIDTH, HIDDEN, SEQUENCE = 4096, 14336, 4096
VOCABULARY = str(128256 // 2)  # the output projection is no layer


def larger_than_of_a_layer(found):
    """What is written: the largest of a layer are a gradient in fp32 and an activation
    of the MLP.
    """
    largest = max(4 * WIDTH * HIDDEN, 2 * SEQUENCE * HIDDEN)
    return found.written(largest + 1)


@pytest.mark.exhaustive  # as with several chunks
def test_a_layer_writes_into_the_stash_and_the_sums_of_gradients():
    """No array of all layers of a chunk is made, selected from or copied in a tick."""
    found = compile_for_h200(
        pipelined_step.gradients, "llama3_8b", {"pipe": 2}, 8, 8, {}, {}, count=2
    )
    large = larger_than_of_a_layer(found)
    assert [w for w in large if w.looped and VOCABULARY not in w.shape] == []
    of_chunks = [w for w in large if "[1,4," in w.shape]
    assert len(of_chunks) == 5
    assert all(w.operation.startswith("fusion broadcast") for w in of_chunks)  # zeros


def test_each_pass_cuts_its_layer_out_of_several_chunks():
    """Which `jaxscale plan` counts; and writes into the stash and sums of gradients."""
    found = compile_for_h200(
        pipelined_step.gradients,
        *("llama3_8b", {"pipe": 2}, 8, 4, {"chunks": 2}, {}),
        count=2,
    )
    large = larger_than_of_a_layer(found)
    assert [w for w in large if w.looped and VOCABULARY not in w.shape] == []
    sums = [w for w in large if w.shape.startswith("f32[2,2,1,")]
    assert len(sums) == 5  # queries and output, and three of the MLP
    assert all(w.operation.startswith("fusion broadcast") for w in sums)  # zeros
    shape = "bf16[1,1,1,14336,4096]"  # the second product of the MLP
    cut = [
        w
        for w in found.written(2 * HIDDEN * WIDTH)
        if w.looped and w.shape == shape and "dynamic-slice" in w.operation
    ]
    assert len(cut) == 4  # forward and backward alone, and both in one tick


def test_what_is_sent_is_hidden():
    """By the flags for overlap: activations, and with ZeRO-3 the weights."""
    found = transfers(
        compile_for_h200(
            pipelined_step.gradients,
            *("llama3_8b", {"pipe": 2, "fsdp": 4}, 8, 4, {"zero": 3}, {}),
            count=8,
            flags=tuple(XLA_PRESETS["overlap"]),
        ).hlo
    )
    sends = [x for x in found if x.operation == "collective-permute"]
    loops = [x.loop for x in sends]
    # The loop over the ticks with both passes: an activation, then a gradient, each of
    # which travels while the other pass runs.
    activation, gradient = (x for x in sends if loops.count(x.loop) == 2)
    assert activation.behind is not None and gradient.behind is not None
    assert "varlen_attention_backward" in activation.behind
    assert "varlen_attention" in gradient.behind
    assert all(x.behind is not None for x in sends)
    # In the loops over layers nothing but these waits for `fsdp`: the next layer is
    # gathered while one computes.
    layers = [x for x in found if x.loops == 2 and x.axes == {"fsdp"}]
    gathers = [x for x in layers if x.operation == "all-gather"]
    assert len(gathers) >= 24  # forward and backward, alone and in one tick
    assert all(x.ahead for x in gathers)
    assert {x.operation for x in layers} == {"all-gather", "reduce-scatter"}
    # One is under way beside the gradient of a norm, and no product: the weights of
    # keys and values, in bf16, for the next layer of each backward pass.
    late = [(x.operation, x.size, x.behind) for x in layers if not x.hidden]
    assert late == [("all-gather", 2 * 2 * 4096 * 1024, ())] * 2
