"""Kernels that may not spill, at shapes of real models, compiled for an H200.

What is compiled follows from the code of an op alone, so `python -m tests.manifest
--write` compiles these cases before it writes the digest of another code, and the tests
take a case of each op while the digest is the code's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from tests import manifest
from tests.compiled import compile_for_h200


ATTENTION = ("varlen_attention", "varlen_attention_backward")
SPARSE = ("tile_sparse_matmul", "tile_sparse_grad_values")
CASES: dict[str, dict[str, tuple[str, ...]]] = {
    "varlen_attention": {
        "dense_d128_l4096_causal": ATTENTION,
        "deepseek_v2_lite": ATTENTION,
        "fp8_128_causal": ("varlen_attention", "transpose"),
        "fp8_256_causal": ("varlen_attention", "transpose"),
        "chunks_d128_page64": ("varlen_attention",),
        "chunks_d64_page16": ("varlen_attention",),
        "chunks_d256_page256": ("varlen_attention",),
        "phi_3_mini": ATTENTION,
        "bert_base_b16_l128": ATTENTION,
        "relative_deberta": ATTENTION,
    },
    "matmul": {
        "cube_4096": ("matmul",),
        "dense_m9984_k768_n768_768_768": ("dense", "matmul"),
        "dense_norm_m4096_k1024_n1024": ("dense_norm",),
    },
    "layer_norm": {"bert_base_4939": ("layer_norm",)},
    "tile_sparse_matmul": {
        "square_4096_m4096_s75": SPARSE,
        "square_4096_m4096_s75_uneven": SPARSE,
    },
}
"""Cases of `tests.manifest` by op, with the kernels that each holds."""


def on_one(devices: Sequence[Any], tree: Any) -> Any:
    """The shapes of arrays on the first device."""
    where = SingleDeviceSharding(devices[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree
    )


def kernels(
    devices: Sequence[Any], op: str, name: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A case of the manifest, for `compile_for_h200`."""
    case = next(case for case in manifest.OPS[op]() if case.name == name)
    return jax.jit(case.fn), on_one(devices, case.arguments)


def check(op: str, name: str) -> None:
    """Compiles a case.

    Raises:
        AssertionError: a kernel is missing, or spills.
    """
    found = compile_for_h200(kernels, op, name).kernels
    assert {kernel.name for kernel in found} >= set(CASES[op][name]), found
    assert [kernel for kernel in found if kernel.spilled] == []
    assert all(24 <= kernel.registers <= 255 for kernel in found), found
