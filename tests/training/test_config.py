"""Settings that cannot work fail when they are written down."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from jaxscale.models import encoder_preset
from jaxscale.models.families.llama import llama_tiny
from jaxscale.sharding import MeshConfig
from jaxscale.training.config import TrainConfig
from jaxscale.training.data.packed import DataConfig
from jaxscale.training.losses import chunked_cross_entropy
from jaxscale.training.optimizer import OptimizerConfig
from jaxscale.training.run import from_dict, to_dict


DATA = DataConfig(vocab_size=256, seq_len=64, batch_size=8)
CONFIG = TrainConfig(model=llama_tiny(), data=DATA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps 0 must be at least 1"),
        ({"max_skipped": 0}, "max_skipped 0 must be at least 1"),
        ({"check_replicas_every": 0}, "check_replicas_every 0 must be at least 1, or"),
        ({"keep_every": 0}, "keep_every 0 must be at least 1, or None"),
        ({"z_loss": -1.0}, "z_loss -1.0 must not be negative"),
        ({"z_loss": float("nan")}, "z_loss nan must not be negative, infinite or NaN"),
        ({"steps": 2**31}, "steps 2147483648 must be at most 2147483647"),
        ({"seed": 2**32}, "seed 4294967296 must be from 0 to 4294967295"),
        ({"microbatches": 3}, "microbatches 3 must divide data.batch_size 8"),
        (
            {"data": dataclasses.replace(DATA, seq_len=100_000)},
            "data.seq_len 100000 is longer than model.max_seq_len",
        ),
        (
            {"data": dataclasses.replace(DATA, vocab_size=50_000)},
            "data.vocab_size 50000 is larger than model.vocab_size 256",
        ),
        (
            {"steps": 10, "optimizer": OptimizerConfig(warmup_steps=20)},
            "warmup_steps 20 and the decay do not fit in 10 steps",
        ),
        ({"rules": "zero3"}, "rules 'zero3' is no preset"),
        (
            {
                "optimizer": OptimizerConfig(kind="muon"),
                "mesh": MeshConfig(axis_type="explicit"),
            },
            "optimizer.kind 'muon' .* 'explicit' .* use 'auto'",
        ),
        (
            {
                "rules": "megascale_3d",
                "mesh": MeshConfig(pipe=2, axis_type="explicit"),
            },
            "mesh.pipe 2 makes a pipeline, .* mesh.axis_type 'explicit'; use 'auto'",
        ),
        ({"replicated": True}, "replicated True keeps .* zero 3 splits .* 1 or 2"),
        (
            {"rules": "fsdp_tp", "mesh": MeshConfig(tensor=3)},
            "num_heads . is not divisible by 3",
        ),
        (
            {"rules": "fsdp", "mesh": MeshConfig(tensor=2)},
            r"rules 'fsdp' split nothing over the mesh axes \['tensor=2'\], whose dev",
        ),
        (
            {"rules": "fsdp", "tensor_parallel": "fused"},
            "tensor_parallel 'fused' needs rules that split heads and mlp over one",
        ),
        (
            {"mesh": MeshConfig(data=4), "microbatches": 4},
            "a microbatch has .* = 2 rows: batch_size 2 is not divisible by 4",
        ),
    ],
)
def test_impossible_settings(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rates_that_are_not_finite(value, no_shape_hook):
    for name in ("learning_rate", "eps", "weight_decay"):
        with pytest.raises(ValueError, match=f"{name} {value} must be >"):
            OptimizerConfig(**{name: value})
    x = jnp.ones((2, 4))
    with pytest.raises(ValueError, match=f"z_loss {value} must not be negative"):
        mask = jnp.ones(2, bool)
        chunked_cross_entropy(x, x.T, jnp.zeros(2, int), mask, z_loss=value)


def test_unknown_axis_size_is_checked_when_the_devices_are_known():
    config = dataclasses.replace(CONFIG, rules="fsdp_tp", mesh=MeshConfig(tensor=-1))
    with pytest.raises(ValueError, match="not divisible by 3"):
        config.check_mesh({"data": 1, "fsdp": 1, "pipe": 1, "tensor": 3})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"data": {"seq_len": 36}},
            r"seq_len 36 .* by 8: .* mesh.context 2.* 32 or 40",
        ),
        (
            {"data": {"seq_len": 4}},
            r"set data.seq_len to 8, or make mesh.context small",
        ),
        ({"model": encoder_preset("bert_tiny")}, r"mesh.context 2 .* 1 for an encoder"),
        ({"rules": "replicated"}, r"'replicated' split nothing .*'context=2'"),
    ],
)
def test_rows_that_devices_cannot_share_are_refused(options, message, no_shape_hook):
    model = dataclasses.replace(llama_tiny(), num_kv_heads=4, vocab_size=512)
    data = dataclasses.replace(CONFIG.data, **options.pop("data", {}))
    tensor = 1 if "rules" in options else 4
    options = {"model": model, "rules": "fsdp_tp"} | options
    mesh = MeshConfig(context=2, tensor=tensor)
    with pytest.raises(ValueError, match=message):
        TrainConfig(data=data, mesh=mesh, **options)


def test_identity_is_json_and_leaves_out_what_may_change():
    identity = CONFIG.identity()
    assert json.loads(json.dumps(identity)) == identity
    # Checkpoints from before there was a choice know no kind and no pattern.
    assert "kind" not in identity["optimizer"]
    assert "window_pattern" not in identity["model"]
    windows = dataclasses.replace(CONFIG.model, window_pattern=(4, None))
    windows = dataclasses.replace(CONFIG, model=windows)
    assert windows.identity()["model"]["window_pattern"] == [4, None]
    assert from_dict(TrainConfig, to_dict(windows)) == windows
    lamb = dataclasses.replace(CONFIG.optimizer, kind="lamb")
    assert dataclasses.replace(CONFIG, optimizer=lamb).identity() != identity
    longer = dataclasses.replace(
        CONFIG, steps=5000, rules="dp", mesh=MeshConfig(data=2), remat="full"
    )
    assert longer.identity() == identity
    host = dataclasses.replace(CONFIG.optimizer, memory_kind="pinned_host")
    moved = dataclasses.replace(CONFIG, optimizer=host, zero=1, replicated=True)
    assert moved.identity() == identity
    smaller = dataclasses.replace(CONFIG.optimizer, mu_dtype="bfloat16")
    assert dataclasses.replace(CONFIG, optimizer=smaller).identity() != identity
    assert dataclasses.replace(CONFIG, seed=1).identity() != identity
    wider = dataclasses.replace(CONFIG.model, d_ff=2 * CONFIG.model.d_ff)
    assert dataclasses.replace(CONFIG, model=wider).identity() != identity
