"""Who asks the hardware, and who decides which implementation runs."""

import ast
import pathlib

import pytest

import jaxscale
import pallas_kernels


ROOTS = [pathlib.Path(str(p.__file__)).parent for p in (pallas_kernels, jaxscale)]
QUERIES = {
    "current",  # DeviceSpec.current()
    "default_backend",
    "device_count",
    "devices",
    "local_device_count",
    "local_devices",
}
ASKED = {
    "pallas_kernels": {
        "api.py",
        "collective_matmul/scaled.py",  # public calls too, those of 8-bit operands
        "matmul/dense.py",  # and linear layers
        "tile_sparse_matmul/passes.py",  # the passes of the public call
        "varlen_attention/paged.py",  # and of keys in pages
        "mosaic/device.py",  # what the answer is
        "tunable.py",  # the tuner measures on the GPU at hand
        "tuning.py",
    }
}
"""Where the hardware may be asked, by package; a file name holds in every folder."""


def sources(package):
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        yield name, ast.parse(path.read_text(encoding="utf-8"))


def queries(tree):
    """Calls of `jax.devices` and the like."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr)
            in {("DeviceSpec" if q == "current" else "jax", q) for q in QUERIES}
        ):
            yield node.func.attr


def test_no_kernel_code_below_api_asks_the_hardware():
    allowed = ASKED["pallas_kernels"]
    found = {
        name: asked
        for name, tree in sources(ROOTS[0])
        if (asked := sorted(queries(tree)))
        and not {name, name.rsplit("/")[-1]} & allowed
    }
    assert not found


def test_layers_do_not_choose_by_hardware():
    """In `nn` and above a device is placed or counted, but never looked at."""
    for name, tree in sources(ROOTS[1]):
        names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
        assert "compute_capability" not in names, name


def test_a_refusal_is_never_swallowed():
    """But for `dispatch`, which logs it; the tuner, `declines` and `gathers_pages` tell
    it.
    """
    telling = "decode_layer/api.py", "varlen_attention/paged.py"
    for package in ROOTS:
        for name, tree in sources(package):
            if name in ("dispatch.py", "tuning.py", *telling):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.ExceptHandler) and node.type is not None:
                    assert "Unsupported" not in ast.unparse(node.type), name


def test_constants_of_the_cost_model_stand_in_one_place():
    shared = {"TENSOR_CORE", "TILE_OVERHEAD", "LEAST_BUSY", "NOISE", "HBM_BANDWIDTH"}
    for name, tree in sources(ROOTS[0]):
        if name == "cost_model.py":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                names = {ast.unparse(target).strip("_") for target in node.targets}
                assert not names & shared, (name, names)


@pytest.mark.parametrize("text", ["jax.devices()", "DeviceSpec.current()"])
def test_the_scan_sees_calls(text):
    assert list(queries(ast.parse(f"x = {text}")))
