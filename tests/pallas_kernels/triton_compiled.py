"""Triton's kernels compiled for a GPU that is not there."""

import re
import subprocess
import tempfile
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.mosaic import H200, DeviceSpec
from tests.tiers import first


def _device(capability, smem_bytes):
    return DeviceSpec(
        name=f"sm_{capability}",
        num_sms=108,
        smem_bytes=smem_bytes,
        compute_capability=divmod(capability, 10),
    )


DEVICES = {
    80: _device(80, 166_912),
    89: _device(89, 101_376),
    90: H200,
    100: _device(100, 232_448),
    120: _device(120, 101_376),
}
"""A100, L40S (and RTX 40), H200, B200, RTX 50, by compute capability."""

CAPABILITIES = first(DEVICES, 80, 100, 120)
"""For `pytest.mark.parametrize`. What 89 has is in 80 (instructions) and 120 (memory);
an H200 has kernels of its own. See `reads_late` for what 90 alone can show."""

CHIPS = DEVICES | {86: _device(86, 101_376)}
"""And the RTX 30."""

TENSOR_CORES = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
"""Their instructions where they are not ``mma.sync``."""

_NAMES = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "float32": "fp32",
    "int32": "i32",
    "int8": "i8",
    "float8_e4m3fn": "fp8e4nv",
}


def compile_for(capability, kernel, dtypes, constants, *, num_warps, num_stages):
    """``(compiled, registers, spilled bytes)`` of a kernel.

    Args:
        capability: a key of `DEVICES`.
        kernel: a function of `triton.jit`.
        dtypes: of the arrays and outputs, in the order of its arguments.
        constants: the other arguments, by name.
        num_warps: warps of a program.
        num_stages: depth of the pipeline.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names[: len(dtypes)]
    assert set(kernel.arg_names) == {*names, *constants}
    types = {
        name: "*" + _NAMES[jnp.dtype(dtype).name]
        for name, dtype in zip(names, dtypes, strict=True)
    }
    types |= dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(names))}
    found = triton.compile(
        ASTSource(kernel, {n: types[n] for n in kernel.arg_names}, constants, aligned),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": num_warps, "num_stages": num_stages},
    )
    assert not reads_late(found.asm["ptx"]), "the next step overwrites registers"
    return found, *_registers(found.asm["cubin"])


def reads_late(ptx):
    """Whether a loop fills registers that ``wgmma`` of the step before may still read.

    Triton 3.6 builds such loops where it pipelines a product whose first operand was
    widened in registers: on an H200 some results are wrong, another few each time.
    """
    for _, body in re.findall(r"\n(\$L__BB\w+):(.*?)bra[.\w]*\s+\1;", ptx, re.DOTALL):
        steps = re.findall(
            r"wgmma\.(?:(mma_async)[^;]*?\},\s*(\{)?|(commit)|wait_group\S*\s+(\d+))",
            body,
        )
        group, flying = set(), []  # steps whose registers a group of products reads
        for step in range(2):
            for multiplies, reads_registers, commits, left in steps:
                if multiplies and reads_registers:
                    if any(step - 1 in earlier for earlier in flying):
                        return True
                    group.add(step)
                elif commits:
                    flying, group = [*flying, group], set()
                elif left:
                    flying = flying[max(0, len(flying) - int(left)) :]
    return False


def _registers(cubin):
    """Registers of a thread and bytes of its stack, where spills go."""
    import triton.backends.nvidia as nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    said = said.stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", said)
    return int(found[1]), int(found[2])
