"""Decoding whose sums over devices are a kernel: interpreted, and when it is taken."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.inference.engine.runner import Runner
from jaxscale.inference.engine.scheduling.batch_rows import Column, OutFlag, RowFlag
from jaxscale.models import Decoder
from jaxscale.sharding import REPLICATED, create, decode_all_reduce, fsdp_tp, make_mesh
from jaxscale.sharding.decode_all_reduce import Sums
from pallas_kernels.collective_matmul import all_reduce
from pallas_kernels.dispatch import Unsupported
from pallas_kernels.mosaic import H200, use_device
from tests.inference.conftest import LLAMA, SIZES
from tests.interpreter import interpret_mosaic_gpu
from tests.models.test_serving import perturbed
from tests.pallas_kernels.collective_matmul.test_low_latency import SMALL
from tests.tolerances import RELATIVE, relative_error


BF16 = jnp.dtype(jnp.bfloat16)
H100 = dataclasses.replace(H200, name="nvidia_h100_80gb_hbm3")


def on_devices(count, name):
    """A runner that has compiled what decodes two rows, two tokens in a call."""
    rules, mesh = fsdp_tp(), make_mesh({"tensor": count}, jax.devices()[:count])

    config = dataclasses.replace(LLAMA, num_kv_heads=count)

    def make():
        return Decoder(config, dtype=BF16, rules=rules, rngs=nnx.Rngs(0))

    model = perturbed(create(make, mesh, rules))
    runner = Runner(model, SIZES, buckets=[2, 4], all_reduce=name)
    for key, fn, shapes in runner.programs():
        if key in (("decode", 2, 2), ("update",)):
            with runner._on_mesh():
                # XLA's own pass for equal expressions aborts on the constants of
                # callbacks, which the interpreter makes of a kernel, in a loop.
                on_cpu = jax.default_backend() == "cpu"
                options = {"xla_disable_hlo_passes": "cse"} if on_cpu else None
                lowered = fn.trace(*shapes).lower()
                runner.table[key] = lowered.compile(compiler_options=options)
    return runner


def row(number, token):
    """A request that begins with `token` and has pages of its own."""
    cells = {Column.FLAGS: RowFlag.LIVE, Column.TOKEN: token}
    cells |= {Column.LENGTH: 0, Column.LIMIT: 60}
    cells |= {Column.STOPS + i: -1 for i in range(8)}
    cells |= {Column.TABLE + i: 16 * number + i for i in range(16)}
    return [(number, int(column), int(value)) for column, value in cells.items()]


def decoded(runner):
    """Tokens and log-probabilities of calls between which requests come and go."""
    runner.reset()
    outs = []
    for changes in (
        row(0, 7),
        row(1, 11),  # one joins
        [(0, Column.FLAGS, 0)],  # one is aborted
        row(0, 23),  # and another takes its place
    ):
        runner.update(None, changes)
        outs.append(np.asarray(runner.decode(bucket=2, steps=2))[:, :, 0])
    out = np.stack(outs)  # [calls, steps, B, 3]
    return out[..., :2], out[..., 2].view(np.float32)


@pytest.mark.slow
def test_sums_of_the_kernel_give_the_tokens_of_xla(monkeypatch):
    tokens, logprobs = decoded(on_devices(2, "xla"))
    monkeypatch.setattr(decode_all_reduce, "check_hopper", lambda *_: SMALL)
    with interpret_mosaic_gpu(detect_races=True) as found:
        runner = on_devices(2, "low_latency")
        tokens_here, logprobs_here = decoded(runner)
        # One begins the line of a call; then two in each layer and step.
        assert found.kernels == 4 * (1 + 2 * 2 * LLAMA.num_layers)
    live = tokens[..., 0] >= 0
    assert live.sum() == 2 * (1 + 2 + 1 + 2)
    assert not (tokens[..., 1] & int(OutFlag.NOT_FINITE)).any()
    np.testing.assert_array_equal(tokens_here, tokens)
    assert relative_error(logprobs_here[live], logprobs[live]) < RELATIVE[BF16]


def choose(name, *, devices=2, elements=4096, dtype=BF16, rules=None, ids=None, **more):
    there = jax.devices()[:devices] if ids is None else [jax.devices()[i] for i in ids]
    mesh = make_mesh({"tensor": len(there)}, there)
    rules = fsdp_tp() if rules is None else rules
    return Sums.choose(name, mesh, rules, elements=elements, dtype=dtype, **more)


def test_who_sums_what(monkeypatch):
    monkeypatch.setattr(all_reduce, "_FASTER", {(H100.name, 2): 64 * 8192})
    with use_device(H100):
        sums = choose(None)
        assert sums is not None and (sums.axis, sums.device) == ("tensor", H100)
        assert choose("xla") is None
        assert choose(None, elements=128 * 8192) is None
        assert choose("low_latency", elements=128 * 8192) is not None
        assert choose(None, ids=[1, 0]) is None
    with use_device(H200):
        assert choose(None) is None  # not measured
        in_layers = choose(None, needed=lambda sums: sums.elements == 4096)
        assert in_layers is not None and in_layers.axis == "tensor"
        assert choose("low_latency") is not None
    assert choose(None) is None


@pytest.mark.parametrize(("devices", "most"), [(2, 64 * 4096), (4, 32 * 8192)])
def test_h100s_sum_by_the_kernel(devices, most):
    with use_device(H100):
        assert choose(None, devices=devices, elements=most) is not None
        assert choose(None, devices=devices, elements=most + 1) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ids": [1, 0]}, r"devices 0, 1, ... in this order, got \[1, 0\]"),
        ({"dtype": jnp.float32}, "bfloat16 or float16, got float32"),
        ({"devices": 1}, "split over several devices"),
        ({"rules": REPLICATED}, "split over several devices"),
        (
            {"rules": dataclasses.replace(fsdp_tp(), mlp="fsdp")},
            r"one mesh axis, got \['fsdp', 'tensor'\]",
        ),
    ],
)
def test_devices_that_cannot(options, message):
    with use_device(H100), pytest.raises(Unsupported, match=message):
        choose("low_latency", **options)
