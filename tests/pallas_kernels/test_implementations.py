"""Which implementation runs where, and the table of docs/install.md."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import pytest

from pallas_kernels import triton_call
from pallas_kernels.implementations import implementations
from pallas_kernels.layer_norm import triton as layer_norm
from pallas_kernels.paged_attention import triton as paged_attention
from pallas_kernels.quantized_matmul import triton as quantized_matmul
from pallas_kernels.tile_sparse_matmul import triton as tile_sparse_matmul
from pallas_kernels.varlen_attention import triton as varlen_attention
from tests.pallas_kernels.triton_compiled import DEVICES


ROOT = Path(__file__).parents[2]
V100 = dataclasses.replace(
    DEVICES[80], name="v100", compute_capability=(7, 0), smem_bytes=98_304
)
COLUMNS = {
    "A100": DEVICES[80],
    "L40S, RTX 40": DEVICES[89],
    "H100, H200": DEVICES[90],
    "B200": DEVICES[100],
    "RTX 50": DEVICES[120],
}


@pytest.fixture
def with_triton(monkeypatch):
    """As where jax-triton is installed; no kernel is made."""
    monkeypatch.setattr(triton_call.importlib.util, "find_spec", lambda name: name)
    for module in (
        layer_norm,
        paged_attention,
        quantized_matmul,
        tile_sparse_matmul,
        varlen_attention,
    ):
        monkeypatch.setattr(
            module,
            "triton_call",
            lambda kernel, arrays, out_shape, **_: tuple(
                jnp.zeros(x.shape, x.dtype) for x in out_shape
            ),
        )


def test_on_a_cpu_and_on_old_gpus_all_is_xla(with_triton):
    assert set(implementations().values()) == {"xla"}
    assert set(implementations(V100).values()) <= {"xla", "cudnn"}


def test_without_triton_only_hopper_has_kernels():
    found = implementations(DEVICES[80])
    assert found["varlen_attention"] == found["layer_norm"] == "xla"
    assert implementations(DEVICES[90])["varlen_attention"] == "mosaic_gpu"


def test_the_table_of_the_docs(with_triton):
    found = {name: implementations(device) for name, device in COLUMNS.items()}
    ops = [op for op in found["A100"] if op != "attention"]  # cuDNN is not here
    lines = [
        "| Op | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for op in ops:
        cells = [f"`{found[name][op]}`" for name in COLUMNS]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    assert "\n".join(lines) in ROOT.joinpath("docs", "install.md").read_text()
