"""Which implementation runs where, and the table of docs/install.md."""

import dataclasses
from pathlib import Path

import pytest

from pallas_kernels.implementations import implementations
from tests.pallas_kernels.triton_compiled import DEVICES
from tests.pallas_kernels.triton_interpreter import installed


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
    installed(monkeypatch)


def test_on_a_cpu_and_on_old_gpus_all_is_xla(with_triton):
    assert set(implementations().values()) == {"xla"}
    assert set(implementations(V100).values()) <= {"xla", "cudnn"}


def test_without_triton_only_hopper_has_kernels():
    found = implementations(DEVICES[80])
    assert found["varlen_attention"] == found["layer_norm"] == "xla"
    assert implementations(DEVICES[90])["varlen_attention"] == "mosaic_gpu"


def test_the_table_of_the_docs(with_triton):
    found = {name: implementations(device) for name, device in COLUMNS.items()}
    assert found["A100"]["attention"] == "triton"  # cuDNN's where that is
    ops = [op for op in found["A100"] if op != "attention"]
    lines = [
        "| Op | " + " | ".join(COLUMNS) + " |",
        "|---|" + "---|" * len(COLUMNS),
    ]
    for op in ops:
        cells = [f"`{found[name][op]}`" for name in COLUMNS]
        lines.append(f"| `{op}` | " + " | ".join(cells) + " |")
    assert "\n".join(lines) in ROOT.joinpath("docs", "install.md").read_text()
