"""The engine's programs compiled for H200s without a GPU: nothing large is copied."""

import re

import pytest

from jaxscale.inference.engine.memory import computation_size
from jaxscale.inference.engine.scheduling.scheduler_config import SchedulerConfig
from jaxscale.models import preset
from tests.compiled import compile_for_h200
from tests.inference.engine.compiled_decode import DRAFTS, MIB, check, pool, program
from tests.tiers import exhaustive


@pytest.mark.parametrize(
    ("name", "bucket", "count", "products"),
    [
        ("llama3_8b", 32, 1, "triton"),
        *exhaustive(
            ("llama3_8b", 128, 4, "cublas"),
            ("llama2_7b", 2, 1, "cublas"),
            ("llama2_7b", 2, 1, "triton"),
            ("llama3_8b", 2, 4, "cublas"),
            ("llama3_8b", 2, 4, "triton"),
            ("llama3_8b", 32, 1, "cublas"),
            ("llama3_8b", 128, 4, "triton"),
        ),
    ],
)
def test_decoding_copies_neither_weights_nor_pages(name, bucket, count, products):
    """Some cases of ``python -m tests.inference.engine.compiled_decode``."""
    found, written = check(name, bucket, count, products)
    assert [w for w in written if w.size >= 6 * MIB] == []
    if bucket <= 32:  # parts of the attention are small, too
        logits = bucket * preset(name).vocab_size * 4
        assert [w for w in found.written(6 * MIB) if w.size > logits] == []
        assert found.temporaries < 36 * MIB + 2 * logits


def test_pages_in_most_of_the_memory_change_no_program():
    """XLA, which counts them twice, would compute 50 results again to make room."""
    key, size = ["decode", 128, 1], 108 * 2**30
    pages = size // pool("llama3_8b", 1, 1)
    found = compile_for_h200(program, "llama3_8b", pages, key, False, 128)
    assert found.aliased >= size - MIB * 256 and ".remat" not in found.hlo


@pytest.mark.parametrize(
    "key", [["decode", 32, 4], *exhaustive(["prefill", 2048, 18432, False])]
)
def test_pages_in_fp8_stay_where_they_are(key):
    found = compile_for_h200(program, "llama3_8b", 1024, key, True)
    size = pool("llama3_8b", 512, 1)  # of twice as many
    assert found.aliased >= size
    assert [w for w in found.written(size // 2) if "[2,1024," in w.shape] == []
    if key[0] == "decode":
        logits = 32 * preset("llama3_8b").vocab_size * 4
        assert [w for w in found.written(6 * MIB) if w.size > logits] == []
        assert [kernel.name for kernel in found.kernels] == ["paged_attention"]
        assert not found.kernels[0].spilled


@pytest.mark.parametrize(("rows", "steps", "triton"), [(32, 4, True), (64, 1, False)])
def test_products_of_many_rows_are_cublas(rows, steps, triton):
    arguments = "llama3_8b", 512, ["decode", rows, steps], False, 128
    found = compile_for_h200(program, *arguments, products="triton")
    assert ("gemm_fusion" in found.hlo) is triton
    assert ("__cublas" in found.hlo) is not triton


@pytest.mark.parametrize(
    ("rows", "weights", "layer"),
    [
        (8, None, "auto"),
        (8, None, "mosaic_gpu"),
        *exhaustive((32, "int8", "auto"), (32, "int8", "mosaic_gpu")),
    ],
)
def test_a_layer_is_one_launch(rows, weights, layer):
    """Few others clear counters of all, and nothing is copied. By name the launch has
    the attention of the layer; by itself that is a launch before it."""
    key = ["decode", rows, 4]
    arguments = "llama3_8b", 512, key, False, 32, weights, None, layer
    found = compile_for_h200(program, *arguments, products="triton")
    kernels = {kernel.name: kernel.spilled for kernel in found.kernels}
    apart = {"paged_attention": 0} if layer == "auto" else {}
    head = {"quantized_matmul": 0} if weights else {}
    assert kernels == {"decode_layer": 0} | apart | head
    assert found.aliased >= pool("llama3_8b", 512, 1)
    starts = [thunk.split()[0] for thunk in found.thunks]
    assert starts.count("kCommandBuffer") == 1
    assert not re.search(r"s32\[\d+\]\S* copy\(", found.hlo)
    # Here each of the two layers clears counters of its own. The angles of the rotary
    # embedding are computed once, between the first launches.
    calls = [i for i, start in enumerate(starts) if start == "kCustomCall"]
    calls = calls[1:-1] if weights else calls  # the first projection, and the head
    assert len(calls) == (4 if apart else 2)
    assert calls[-1] - calls[0] <= (6 if apart else 2)
    logits = rows * preset("llama3_8b").vocab_size * 4
    copied = (w for w in found.written(6 * MIB) if "mosaic_gpu" not in w.operation)
    assert [w for w in copied if w.size > logits] == []
    # Where no row has a temperature no logits are copied.
    branch = [x.split()[0] for x in found.thunks]
    branch = branch[branch.index("true_branch:") + 1 :][:1]
    assert branch == ["kCustomKernel"]


@pytest.mark.parametrize("count", [1, *exhaustive(4)])
def test_mixed_batches_copy_neither_weights_nor_pages(count):
    key = ["mixed", 128, 18432, 64]
    found = compile_for_h200(program, "llama3_8b", 1024, key, False, 128, count=count)
    size = pool("llama3_8b", 1024, count)
    assert found.aliased >= size
    c, logits = preset("llama3_8b"), (64 + 16) * preset("llama3_8b").vocab_size * 4
    smallest = c.num_heads * c.head_dim * c.d_model * 2 // count
    assert [w for w in found.written(smallest) if w.size > logits] == []
    kernels = {kernel.name: kernel.spilled for kernel in found.kernels}
    assert "paged_attention" in kernels and not any(kernels.values()), kernels
    # All launches of both layers are one CUDA graph.
    if count == 1:
        assert [x for x in found.thunks if not x.startswith(" ")] == ["kCommandBuffer"]


@pytest.mark.parametrize("count", [4, *exhaustive(1)])
def test_drafts_copy_nothing_either(count):
    found = compile_for_h200(
        program, "llama3_8b", 512, ["speculate", 8, 4], count=count
    )
    history = 32 * 4096 * 4
    assert found.aliased >= pool("llama3_8b", 512, count) + history
    logits = 8 * (1 + DRAFTS) * preset("llama3_8b").vocab_size * 4
    assert [w for w in found.written(6 * MIB) if w.size > logits] == []
    assert found.temporaries < 36 * MIB + 4 * logits
    assert [kernel.name for kernel in found.kernels] == ["paged_attention"]
    assert not found.kernels[0].spilled
    if count > 1:
        assert found.count("all-reduce") == 2 * 2 + 1
        assert found.count("all-gather") == 1


@pytest.mark.parametrize(
    ("weights", "key", "count", "sums"),
    [
        ("fp8", ["decode", 2, 4], 2, "low_latency"),
        *exhaustive(
            ("fp8", ["decode", 2, 4], 4, None),
            ("int8", ["decode", 2, 4], 1, None),
            ("fp8", ["decode", 32, 4], 1, None),
            ("int8", ["decode", 128, 1], 1, None),
            ("int8", ["prefill", 2048, 18432, False], 1, None),
            ("fp8_dynamic", ["decode", 128, 1], 1, None),
            ("fp8_dynamic", ["prefill", 2048, 18432, False], 1, None),
        ),
    ],
)
def test_weights_of_8_bits_are_read_as_they_are(weights, key, count, sums):
    """The first one is compiled for sums without a barrier, too."""
    slots = 128 if key[1] == 128 else 32
    arguments = "llama3_8b", 512, key, False, slots, weights, sums
    found = compile_for_h200(program, *arguments, count=count)
    kernels = {kernel.name for kernel in found.kernels}
    assert kernels >= {"quantized_matmul"}
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    # No product of two types is left to XLA, which may write a weight in the other one
    # first; two operands in 8 bits are multiplied by our kernel or by cuBLASLt.
    assert ("scaled_matmul" in kernels) is (weights == "fp8_dynamic")
    rounding = {"quantize_rows", "quantize_rms_norm", "quantize_gated"}
    assert kernels & rounding == (rounding if weights == "fp8_dynamic" else set())
    mixed = found.hlo.replace("__cublas$lt$matmul$f8", "")
    assert "__cublas" not in mixed and "gemm_fusion" not in mixed
    sizes = (6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)
    written = found.written(MIB)
    for a, b in sizes:
        split = {(a // count, b), (a, b // count)}
        shapes = {f"[{x},{y}]" for pair in split for x, y in (pair, pair[::-1])}
        assert not [w for w in written if any(w.shape.endswith(s) for s in shapes)]
    if key[0] == "decode":
        # Parts of sums, of products and of attention; all of them are activations.
        largest = max(key[1] * 128256 * 4, 16 * MIB) // count
        assert [w for w in written if w.size > largest] == []
    if count > 1 and sums is None:
        assert found.count("all-reduce") == 2 * 2 + 1
        assert found.count("all-gather") == 1


@pytest.mark.exhaustive
def test_memory_does_not_grow_with_the_pool():
    sizes = [
        compile_for_h200(program, "llama3_8b", pages, ["decode", 32, 4]).temporaries
        for pages in (512, 1024)
    ]
    assert abs(sizes[1] - sizes[0]) < MIB


PROMPTS = ["prefill", 2048, 18432, True]


@pytest.mark.parametrize("key", [PROMPTS, *exhaustive(["forward", 32])])
def test_prompts_and_logits(key):
    found = compile_for_h200(program, "llama3_8b", 512, key, False, 128)
    assert found.aliased >= pool("llama3_8b", 512, 1)
    shapes = {w.shape for w in found.written(MIB)}
    assert not any("4096,6144" in s or "4096,28672" in s for s in shapes), shapes
    # Keys and values that a prefill reads are nowhere but in their pages.
    assert not any("18432" in s for s in shapes), shapes
    assert [kernel for kernel in found.kernels if kernel.spilled] == []
    # Pages are written where tokens are, and in no other place.
    pages = [w for w in found.written(MIB) if w.shape.startswith("bf16[2,512,")]
    assert all(w.size <= 8 * MIB for w in pages), pages


def test_the_estimate_of_memory_is_above_what_programs_need():
    """Not by so much that it would cost pages."""
    keys = ["sample", 128], PROMPTS
    needed = [
        compile_for_h200(program, "llama3_8b", 512, key, False, 128) for key in keys
    ]
    config = preset("llama3_8b")
    logits = 128 * config.vocab_size * 4  # the argument of the full sampler
    most = max(p.temporaries + p.outputs - p.aliased for p in needed) + logits
    sizes = SchedulerConfig(
        num_pages=512, vocab_size=config.vocab_size, max_len=4096, num_slots=128
    )
    size = computation_size(config, sizes, itemsize=2, gathers=False)
    assert most < size < 2 * most


@pytest.mark.parametrize(
    ("key", "weights"),
    [
        (["decode", 2, 4], "fp8"),
        *exhaustive((["speculate", 8, 4], None)),
    ],
)
def test_sums_without_a_barrier_stay_in_their_memory(key, weights):
    """What a peer writes to is never copied, whoever multiplies."""
    arguments = "llama3_8b", 512, key, False, 32, weights, "low_latency"
    found = compile_for_h200(program, *arguments, count=2)
    assert found.aliased >= pool("llama3_8b", 512, 2)
    sums = [k for k in found.kernels if k.name == "low_latency_all_reduce"]
    assert len(sums) == 3 and not any(k.spilled for k in sums)  # equal ones count once
    # The first of a call, which begins with a barrier, and two in each layer.
    in_place = "output_to_operand_aliasing={{1}: (1, {}), {2}: (2, {})}"
    assert found.hlo.count(in_place) == 1 + 2 * 2
    rows = key[1] * (1 + DRAFTS * (key[0] == "speculate"))
    assert max(found.sizes("copy")) < rows * 4096  # an eighth of the cells
    # The table of tokens is left to XLA.
    assert found.count("all-reduce") == found.count("all-gather") == 1
    if key[0] == "decode":
        assert graphs_of(found) == 2  # the layers, and sampling


@pytest.mark.exhaustive  # sums of ours in every run, with weights of 8 bits
@pytest.mark.parametrize(("sums", "graphs"), [("low_latency", 2), ("xla", 2 * 2 + 1)])
def test_sums_of_ours_do_not_end_a_graph(sums, graphs):
    """XLA's do: a step is started by the host in pieces, two for each layer."""
    found = compile_for_h200(
        program, "llama3_8b", 512, ["decode", 2, 4], False, 128, None, sums, count=4
    )
    assert graphs_of(found) == graphs


@pytest.mark.exhaustive  # kernels that add over devices have a test of their own
@pytest.mark.parametrize(("rows", "weights"), [(2, None), (32, "int8")])
def test_a_layer_is_one_launch_on_each_of_two_devices(rows, weights):
    """By itself, and with the sums of both: XLA sums only what the table gives."""
    arguments = "llama3_8b", 512, ["decode", rows, 4], False, 32, weights, None, "auto"
    found = compile_for_h200(program, *arguments, count=2)
    assert found.aliased >= pool("llama3_8b", 512, 2)
    layers = [k for k in found.kernels if k.name == "decode_layer"]
    assert len(layers) == 2 and not any(k.spilled for k in layers)
    assert [k.name for k in found.kernels].count("low_latency_all_reduce") == 1
    assert max(found.sizes("copy")) < 4096 * 8  # a small part of the cells
    assert found.count("all-reduce") == found.count("all-gather") == 1
    assert graphs_of(found) == 2  # the layers, and sampling


def graphs_of(found):
    """How many CUDA graphs the host starts in a step, from its loop on."""
    starts = [thunk.strip().split()[0] for thunk in found.thunks]
    return starts[starts.index("kWhile") :].count("kCommandBuffer")
