"""Which device kernels are built for."""

import types

import jax
import pytest

from pallas_kernels.mosaic import H200, DeviceSpec, use_device


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
