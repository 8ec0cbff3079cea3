"""Which device kernels are built for."""

import dataclasses
import random
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import constraints

from pallas_kernels.dispatch import Unsupported
from pallas_kernels.matmul import matmul
from pallas_kernels.mosaic import (
    H200,
    DeviceSpec,
    layout_order,
    resident_clusters,
    use_device,
)


def gpu(capability):
    return types.SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA H200",
        compute_capability=capability,
        core_count=132,
    )


def test_a_cpu_is_no_device():
    assert DeviceSpec.current() is None
    with use_device(H200):
        assert DeviceSpec.current() is H200
    assert DeviceSpec.current() is None


def test_functions_are_traced_again_for_another_device():
    x = jnp.ones((256, 256), jnp.bfloat16)
    w = jnp.ones((256, 256), jnp.bfloat16)
    f = jax.jit(lambda x, w: matmul(x, w, implementation=("mosaic_gpu", "xla")))

    def kernels():
        text = f.trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
        return text.count("mosaic_gpu_v2")

    assert f(x, w)[0, 0] == 256 and kernels() == 0
    with use_device(H200):
        assert kernels() == 1
    ampere = dataclasses.replace(H200, compute_capability=(8, 0))
    with use_device(ampere):
        assert kernels() == 0
    assert kernels() == 0 and f(x, w)[0, 0] == 256


@pytest.mark.parametrize(("capability", "expected"), [("9.0", H200), ("gfx942", None)])
def test_the_gpu_at_hand(monkeypatch, capability, expected):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu(capability)])
    assert DeviceSpec.current() == expected


@pytest.mark.parametrize("device", ["cpu", "device"])
def test_the_default_device_counts_on_a_machine_with_a_gpu(monkeypatch, device):
    devices = {None: [gpu("9.0")], "cpu": jax.devices("cpu")}
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices[backend])
    with jax.default_device("cpu" if device == "cpu" else jax.devices("cpu")[1]):
        assert DeviceSpec.current() is None
    assert DeviceSpec.current() == H200


def test_a_mesh_of_cpus_counts_on_a_machine_with_a_gpu(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: [gpu("9.0")])
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        assert DeviceSpec.current() is None
        with use_device(H200):
            assert DeviceSpec.current() is H200
    assert DeviceSpec.current() == H200


def test_a_device_without_room_for_a_cluster():
    assert resident_clusters(2, H200, "an op") == 66
    small = DeviceSpec(name="one", num_sms=1, smem_bytes=1, compute_capability=(9, 0))
    with pytest.raises(
        Unsupported, match="an op needs clusters of 2 blocks and one has"
    ):
        resident_clusters(2, small, "an op")


def test_equal_variables_are_those_of_jax():
    """Of random equations; only the order may be another."""
    rng = random.Random(0)
    for _ in range(30):
        variables = [constraints.Variable(i) for i in range(12)]
        system = constraints.ConstraintSystem(
            constraints=[
                constraints.Equals(*rng.choices(variables, k=2)) for _ in range(9)
            ]
        )
        found, expected = (
            {variable: sorted(others, key=str) for variable, others in each.items()}
            for each in (
                layout_order.equal_variables(system),
                layout_order.named(system),
            )
        )
        assert found == expected and any(found.values())
    assert constraints.compute_transitively_equal_vars is layout_order.equal_variables
