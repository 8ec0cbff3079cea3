"""The block computes what it says, in every form, and its loops lower for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tensor_parallel_block as benchmark
from benchmarks.measure import command, loop_programs
from benchmarks.tensor_parallel_block import SHAPES, WEIGHTS


TINY = SHAPES["tiny"]
P = jax.sharding.PartitionSpec


def params(kind, batch=2, seq_len=16):
    return {
        "model": "tiny",
        "tp": 4,
        "pass": kind,
        "batch": batch,
        "seq_len": seq_len,
    }


def drawn(kind):
    """Random operands in fp32."""
    problem = benchmark.problem(params(kind), ["xla_nccl"])
    keys = jax.random.split(jax.random.key(0), len(problem.operands))
    return problem, {
        name: o.scale * jax.random.normal(key, o.shape, jnp.float32)
        for key, (name, o) in zip(keys, problem.operands.items(), strict=True)
    }


def by_hand(x, w_qkv, w_out, w_gate_up, w_down, cache=None):
    """The block on one device, in numpy; weights hold the parts of devices in turn."""

    def norm(x):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)

    def rotate(x, positions):
        rates = 5e5 ** (-np.arange(0, 64, 2) / 64)
        angle = (positions[:, None] * rates)[:, None]
        turned = (x[..., :32] + 1j * x[..., 32:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    def heads_of(device, qkv):
        part = qkv[..., device * 256 : (device + 1) * 256]
        return np.split(part.reshape(*part.shape[:2], 4, 64), (2, 3), axis=2)

    def attend(qkv):
        out = []
        for device in range(4):
            q, k, v = heads_of(device, qkv)
            start = 0 if cache is None else cache[0].shape[1] - 1
            positions = start + np.arange(q.shape[1])
            q, k = rotate(q, positions), rotate(k, positions)
            if cache is not None:
                mine = slice(device, device + 1)
                k = np.concatenate([cache[0][:, :-1, mine], k], 1)
                v = np.concatenate([cache[1][:, :-1, mine], v], 1)
            logits = np.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) / 8
            if cache is None:
                logits += np.where(np.tri(q.shape[1]), 0, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            y = np.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])
            out.append(y.reshape(*y.shape[:2], -1))
        return np.concatenate(out, -1)

    def gated(gate_up):
        out = []
        for device in range(4):
            part = gate_up[..., device * 256 : (device + 1) * 256]
            gate, up = np.split(part, 2, -1)
            out.append(gate / (1 + np.exp(-gate)) * up)
        return np.concatenate(out, -1)

    x = x + attend(norm(x) @ w_qkv) @ w_out
    return x + gated(norm(x) @ w_gate_up) @ w_down


def run(kind, function, implementation, out_spec):
    problem, arrays = drawn(kind)
    device = functools.partial(
        function, shape=TINY, size=4, implementation=implementation
    )
    mapped = loop_programs.on_devices(
        problem.mesh,
        device,
        tuple(operand.spec for operand in problem.operands.values()),
        out_spec,
    )
    with jax.default_matmul_precision("highest"):
        result = mapped(*arrays.values())
    return jax.tree.map(np.asarray, result), {
        name: np.asarray(a, np.float64) for name, a in arrays.items()
    }


@pytest.mark.parametrize("implementation", [None, "xla", "xla_ring"])
def test_training_block(implementation):
    y, a = run("fwd", benchmark.training_block, implementation, P(None, "tensor"))
    want = by_hand(a["x"], *(a[name] for name in WEIGHTS))
    np.testing.assert_allclose(y, want, atol=2e-4)


@pytest.mark.parametrize("implementation", [None, "xla", "xla_ring"])
def test_decoding_block(implementation):
    problem, arrays = drawn("decode")
    arrays = {**arrays, "x": jnp.tile(arrays["x"], (2, 1))}  # the ring needs 4 rows
    arrays["k_cache"] = jnp.tile(arrays["k_cache"], (2, 1, 1, 1))
    arrays["v_cache"] = jnp.tile(arrays["v_cache"], (2, 1, 1, 1))
    device = functools.partial(
        benchmark.decoding_block, shape=TINY, size=4, implementation=implementation
    )
    specs = tuple(operand.spec for operand in problem.operands.values())
    mapped = loop_programs.on_devices(problem.mesh, device, specs, P())
    with jax.default_matmul_precision("highest"):
        y = mapped(*arrays.values())
    a = {name: np.asarray(value, np.float64) for name, value in arrays.items()}
    cache = a["k_cache"], a["v_cache"]
    want = by_hand(a["x"][:, None], *(a[name] for name in WEIGHTS), cache=cache)
    np.testing.assert_allclose(y, want[:, 0], atol=2e-4)


def test_gradients():
    """A step along a direction changes the loss as the gradients say."""
    problem, _ = drawn("fwd_bwd")
    out = (P(None, "tensor"),) * 2 + tuple(problem.operands[n].spec for n in WEIGHTS)
    found, a = run("fwd_bwd", benchmark.training_step, "xla", out)
    y, *grads = found
    names = ["x", *WEIGHTS]
    np.testing.assert_allclose(y, by_hand(*(a[n] for n in names)), atol=2e-4)
    random = np.random.default_rng(0)
    for name, gradient in zip(names, grads, strict=True):
        direction = random.normal(size=a[name].shape)
        direction /= np.linalg.norm(direction)

        def loss(step, name=name, direction=direction):
            moved = {**a, name: a[name] + step * direction}
            return np.sum(by_hand(*(moved[n] for n in names)) * a["dy"])

        slope = (loss(1e-5) - loss(-1e-5)) / 2e-5
        np.testing.assert_allclose(np.sum(gradient * direction), slope, rtol=2e-3)


def test_operations_of_a_device():
    """About 2 tokens parameters for the products of a forward pass."""
    llama = SHAPES["llama70b"]
    assert llama.parameters == 8192 * (10240 + 8192 + 3 * 28672)
    case = {"model": "llama70b", "tp": 4, "pass": "fwd", "batch": 1, "seq_len": 8192}
    products = 2 * 8192 * llama.parameters / 4
    attention = 2 * 2 * 8192 * 8192 * 8192 / 2 / 4
    assert benchmark.flops(case) == products + attention
    assert benchmark.flops(case | {"pass": "fwd_bwd"}) == 3 * benchmark.flops(case)
    decode = case | {"pass": "decode", "batch": 4, "seq_len": 1024}
    assert benchmark.flops(decode) == 4 * (2 * llama.parameters + 4 * 8192 * 1024) / 4


def test_speed_ups():
    seconds = {"auto": 2.0, "xla_nccl": 3.0, "xla_ring": 2.5}
    assert benchmark.compare({}, seconds) == {
        "auto": {"speedup": 1.5, "speedup_best_xla": 1.25},
        "xla_nccl": {"speedup": 1.0},
        "xla_ring": {"speedup": 1.2},
    }


def test_the_command_runs_anywhere(tmp_path, capsys):
    arguments = ["--quick", "--out", str(tmp_path), "--impl", "auto", "--samples", "1"]
    assert command.main(benchmark.BENCHMARK, arguments) == 0
    out = capsys.readouterr().out
    for kind in ("fwd", "fwd_bwd", "decode"):
        assert f"pass={kind} tp=4" in out
    assert not [*tmp_path.rglob("*")]
