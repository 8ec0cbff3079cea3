"""What the engine's programs write when they are compiled for H200s, without a GPU.

``python -m tests.inference.engine.compiled_decode`` compiles decoding for every bucket,
on one device and on four, with the products of cuBLAS and those of Triton, and says of
each what it writes; tests look at some of them. Two layers are enough: XLA gets every
layer by itself.
"""

import dataclasses
import functools
import itertools
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import SingleDeviceSharding

from jaxscale.inference.engine.program_cache import ProgramCache
from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.scheduler_config import (
    FEW_ROWS,
    SchedulerConfig,
)
from jaxscale.models import Decoder, preset
from jaxscale.models.quantization import quantized_head, replace_linear
from jaxscale.models.serving import prepared_model, serving_rules
from jaxscale.nn import QuantizedLinear
from jaxscale.sharding import REPLICATED, fsdp_tp, make_mesh, shardings
from tests.compiled import compile_for_h200


BUCKETS = (2, 4, 8, 16, 32, 64, 128)
NUM_PAGES = 512
DRAFTS = 3
MIB = 2**20


class Lowering:
    """A program that is lowered with its mesh in place."""

    def __init__(self, runner, fn):
        self.runner, self.fn = runner, fn

    def lower(self, *shapes):
        with self.runner._on_mesh(), tempfile.TemporaryDirectory() as folder:
            traced = self.fn.trace(*shapes)
            # The traces of kernels, which only GPUs have, can be named, too.
            ProgramCache(folder, self.runner.devices).name(traced, "")
            return traced.lower()


def abstract_decoder(devices, config, weights=None):
    """A decoder in bf16 as the engine has it, without arrays; `weights` of 8 bits."""
    count = len(devices)
    rules = serving_rules(fsdp_tp()) if count > 1 else REPLICATED

    def make():
        options = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rules": rules}
        return prepared_model(
            Decoder(config, rngs=nnx.Rngs(0), **options), {"tensor": count}
        )

    model = jax.eval_shape(make)
    if weights is not None:
        of_layer, of_model = (
            functools.partial(fn, weights=weights)
            for fn in (QuantizedLinear.of, quantized_head)
        )
        for block in model.blocks:
            replace_linear(block, lambda layer, _: jax.eval_shape(of_layer, layer))
        model.lm_head = nnx.data(jax.eval_shape(of_model, model))
    if count > 1:
        where = shardings(model, make_mesh({"tensor": count}, devices), rules)
    else:
        where = jax.tree.map(lambda _: SingleDeviceSharding(devices[0]), model)
    return jax.tree.map(
        lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), model, where
    )


def program(
    devices,
    name,
    num_pages,
    key,
    fp8=False,
    num_slots=32,
    weights=None,
    sums=None,
    layer=None,
):
    """One program of a model with two layers."""
    config = dataclasses.replace(preset(name), num_layers=2)
    shape = config.num_layers, 2, config.num_kv_heads
    scales = np.ones(shape) if fp8 else None
    sizes = SchedulerConfig(
        num_pages=num_pages,
        vocab_size=config.vocab_size,
        max_len=4096,
        num_slots=num_slots,
        drafts=DRAFTS * (key[0] == "speculate"),
    )
    buckets = [bucket for bucket in BUCKETS if bucket <= num_slots]
    model = abstract_decoder(devices, config, weights)
    model.decode_layer = layer
    mixed = [(key[1], key[3])] if key[0] == "mixed" else ()
    runner = Runner(
        model,
        sizes,
        buckets=buckets,
        kv_scales=scales,
        all_reduce=sums,
        mixed=mixed,
    )
    found = {k: (fn, shapes) for k, fn, shapes in runner.programs()}
    fn, shapes = found[tuple(key)]
    return Lowering(runner, fn), shapes


def pool(name, num_pages, count):
    """Bytes of the pages of one device."""
    c = preset(name)
    return 2 * num_pages * 2 * c.num_kv_heads // count * 64 * c.head_dim * 2


def check(name, bucket, count, products):
    """Compile decoding, and check that it writes neither weights nor pages.

    Returns:
        The program, and what it writes of 1 MiB or more besides logits and attention.
    """
    options = {"count": count, "products": products}
    key = ["decode", bucket, 4 if bucket <= FEW_ROWS else 1]
    found = compile_for_h200(program, name, NUM_PAGES, key, False, 128, **options)
    c = preset(name)
    assert found.aliased >= pool(name, NUM_PAGES, count)
    logits = bucket * c.vocab_size * 4
    # The smallest weight is that of the output of attention.
    smallest = c.num_heads * c.head_dim * c.d_model * 2 // count
    # The kernel's own results are parts of the attention that it adds up.
    copied = [
        w for w in found.written(MIB) if not w.operation.endswith("mosaic_gpu_v2")
    ]
    written = [w for w in copied if w.size > logits]
    assert [w for w in written if w.size >= smallest] == []
    # cuBLAS works in 32 MiB, a part of the attention has 4 rows of fp32 numbers. Logits
    # are perturbed, and before that gathered and turned around.
    splits = bucket * c.num_kv_heads // count * 4096 // 512
    parts = splits * 4 * c.head_dim * 4
    copies = 2 if count == 1 else 3
    assert found.temporaries < 36 * MIB + copies * logits + parts
    assert [kernel.name for kernel in found.kernels] == ["paged_attention"]
    assert not found.kernels[0].spilled
    # Each layer counts in zeros of its own, all made at once.
    assert f" s32[{1 + bucket * c.num_kv_heads // count}]" in found.hlo
    assert f"s32[{1 + bucket * c.num_kv_heads // count}]{{0}} copy(" not in found.hlo
    if count > 1:
        # Two in each layer, and one for the table of tokens; the logits are gathered.
        assert found.count("all-reduce") == 2 * 2 + 1
        assert found.count("all-gather") == 1
    return found, written


def main():
    cases = itertools.product(
        ("llama2_7b", "llama3_8b"),
        BUCKETS,
        (1, 4),
        ("cublas", "triton"),
    )
    failed = 0
    for name, bucket, count, products in cases:
        try:
            found, written = check(name, bucket, count, products)
        except AssertionError as error:
            failed += 1
            said = f"FAILED {error}"
        else:
            largest = max((w.size for w in written), default=0) / MIB
            said = (
                f"writes at most {largest:.1f} MiB at a time besides logits and "
                f"attention; temporaries {found.temporaries / MIB:.1f} MiB"
            )
        print(f"{name} TP{count} {bucket:3} rows {products}: {said}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    from tests.inference.engine import compiled_decode

    sys.exit(compiled_decode.main())
