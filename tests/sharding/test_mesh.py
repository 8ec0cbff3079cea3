"""Meshes: sizes, order of the axes, and errors that say what to do."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxscale.sharding import MESH_AXES, MeshConfig, make_mesh


def test_axes_in_order_with_tensor_over_neighbors():
    mesh = make_mesh(MeshConfig(data=2, context=2, tensor=2))
    assert mesh.axis_names == MESH_AXES == ("pipe", "data", "fsdp", "context", "tensor")
    ids = np.vectorize(lambda d: d.id)(mesh.devices)
    np.testing.assert_array_equal(ids, np.arange(8).reshape(1, 2, 1, 2, 2))


@pytest.mark.parametrize("axis", MESH_AXES)
def test_minus_one_takes_the_rest(axis):
    other = "tensor" if axis != "tensor" else "data"
    sizes = dict(make_mesh({axis: -1, other: 2}).shape)
    assert sizes == dict.fromkeys(MESH_AXES, 1) | {axis: 4, other: 2}


def test_axis_type():
    kinds = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    for name, kind in kinds.items():
        mesh = make_mesh(MeshConfig(data=8, axis_type=name))
        assert mesh.axis_types == (kind,) * len(MESH_AXES)


def test_subset_of_devices():
    devices = jax.devices()[4:6]
    assert list(make_mesh({"tensor": 2}, devices).devices.flat) == devices


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"data": 16},
            r"data=16.* needs 16 devices, but there are 8; .*JAX_NUM_CPU_DEVICES=16",
        ),
        ({"data": 2}, r"uses 2 of 8 devices; set one axis to -1 .*devices\(\)\[:2\]"),
        ({"data": 3, "fsdp": -1}, r"for fsdp: 8 devices are not divisible by 3"),
        ({"data": 0}, r"mesh axis data has size 0, expected at least 1, or -1"),
        ({"tensor": -2}, r"mesh axis tensor has size -2"),
        ({"data": -1, "pipe": -1}, r"pipe and data are both -1.*give all but one"),
        ({"model": 2}, r"mesh axis 'model' is unknown; use some of \('pipe'"),
        ({"axis_type": "manual"}, r"axis_type 'manual' is unknown"),
    ],
)
def test_errors_say_what_to_do(sizes, message, no_shape_hook):
    with pytest.raises(ValueError, match=message):
        make_mesh(sizes)
