"""The rows that are missing or stale, and the commands that measure them.

    python -m benchmarks.publish.suite                # lists what is due, in order
    python -m benchmarks.publish.suite attention encoder --commands

`benchmarks.publish.due` says what is due. What the README shows comes first, then what
the docs show, then the rest; among these the order is that of `COMMANDS`, and ours
stand before their rivals. Each case's rows are written when it ends, so a command that
is cut off loses the case in progress alone. A machine that measures need have no git:
give its commands ``--commit``.
"""

import argparse
import shlex
from collections.abc import Sequence

from benchmarks.measure import records
from benchmarks.publish import due, tables
from benchmarks.publish.due import Due


_ATTENTION = (
    "--impl mosaic_gpu mosaic_gpu_any_order cudnn_packed cudnn_padded torch_varlen "
    "tokamax flash_attn_3 flash_attn_4 flash_attn_4_deterministic"
)
_TRAINING = "--skip jaxscale_scan jaxscale_fp8* --samples 10"

COMMANDS: tuple[tuple[str, str], ...] = (
    (
        "attention",
        "varlen_attention --case dense_* --impl mosaic_gpu mosaic_gpu_any_order "
        "mosaic_gpu_static cudnn_packed cudnn_padded jax_sample torch_varlen "
        "torch_sdpa flash_attn_3 flash_attn_4 flash_attn_4_deterministic tokamax",
    ),
    ("attention", f"varlen_attention --case bert_base_* {_ATTENTION}"),
    (
        "attention",
        f"varlen_attention --case llama_* prefill_* falcon_* deepseek_* {_ATTENTION}",
    ),
    (
        "attention",
        f"varlen_attention --case modernbert_* gpt_oss_* gemma2_* mpt_* {_ATTENTION} "
        "xla_mask torch_sdpa torch_flex",
    ),
    (
        "attention",
        f"varlen_attention --case whole_* {_ATTENTION} mosaic_gpu_static xla_mask",
    ),
    *(
        (
            "encoder",
            f"encoder --model {model} --batch 16 --skip torch_eager --samples 10",
        )
        for model in ("bert_base", "deberta_v3_base", "albert_base", "distilbert_base")
    ),
    ("encoder", "encode"),
    ("encoder", "encode_timeline"),
    ("encoder", "encoder_service"),
    ("training", "fine_tuning"),
    ("training", "training_loop"),
    ("attention", "disentangled_attention"),
    ("encoder", "layer_norm"),
    ("encoder", "encoder_steps --samples 10"),
    ("encoder", "encoder_fusions --samples 10"),
    *(
        ("sparse", line)
        for mask in ("tw --sparsity 0.5", "tw", "tew", "tw24 --sparsity 0.5", "tw24")
        for baselines in (" cusparselt_2_4 int8" if "0.5" in mask else "",)
        for line in (
            f"tile_sparse_layers --case swiglu block --pass fwd --mask {mask} "
            f"--samples 15 --impl auto dense matmul_only{baselines}",
            "tile_sparse_matmul --case llama3_8b_up llama3_8b_down --rows 4096 32 1 "
            f"--mask {mask} --samples 15 --impl auto dense torch_dense{baselines}",
        )
    ),
    (
        "sparse",
        "tile_sparse_matmul --case llama3_8b_query llama3_8b_out --rows 4096 "
        "--samples 15 --impl auto dense torch_dense",
    ),
    (
        "sparse",
        "tile_sparse_layers --case swiglu --pass fwd_bwd --mask tw "
        "--impl auto dense --samples 15",
    ),
    ("matmul", "matmul"),
    ("matmul", "scaled_matmul"),
    ("matmul", "quantized_matmul"),
    ("attention", "paged_attention"),
    ("serving", "decode_layer"),
    (
        "serving",
        "serving --case token_* --impl jaxscale torch_continuous vllm",
    ),
    ("serving", "serving --case token_*_tp2 --impl jaxscale low_latency xla_nccl"),
    (
        "serving",
        "serving --case constant_* poisson_* saturated --impl jaxscale "
        "concurrent static torch_continuous --samples 1",
    ),
    (
        "serving",
        "serving --case poisson_20ms saturated* half_load all_at_once_* --impl "
        "jaxscale vllm",
    ),
    (
        "attention",
        f"varlen_attention --case wide_* long_tail_* bimodal_* {_ATTENTION}",
    ),
    (
        "attention",
        "varlen_attention --case uniform_* skewed_* zero_length_* constant_* "
        f"{_ATTENTION}",
    ),
    *(
        ("collective", f"{line} --tp {gpus}")
        for gpus in (4, 2)
        for line in (
            "collective_matmul --rows 8192 2048 --skip auto",
            "collective_matmul --rows 16 64 512 --impl mosaic_gpu auto xla_nccl "
            "xla_lhs xla_ring xla_windowed xla_one_shot low_latency torch_nccl",
            "tensor_parallel_block",
        )
    ),
    ("training", f"training --case llama_1b_2k llama_1b_4k* {_TRAINING}"),
    (
        "training",
        "training --case llama_1b_2k llama_1b_4k llama3_8b_bf16_moments "
        "--impl jaxscale jaxscale_fp8 jaxscale_fp8_blockwise jaxscale_fp8_tensorwise "
        "--samples 10",
    ),
    ("training", f"training --case llama3_8b_*4* {_TRAINING}"),
    ("training", "training --case ablation_* --impl jaxscale --samples 10"),
    ("training", f"training --case llama_1b_*p4* {_TRAINING}"),
    ("training", f"training --case *p2 *p2_interleaved {_TRAINING}"),
    ("training", "convergence --case bytes_34m"),
    ("training", "convergence --case fp8_10m"),
)
"""Topic, and module of `benchmarks` with its arguments, the most important first."""


def gpus_of(count: int) -> str:
    """How a list says it."""
    return f"{count} GPU{'s' * (count > 1)}"


def show(found: Sequence[Due]) -> None:
    """Print the cases that are due, and what they need together."""
    left = [one for one in found if one.rows]
    for one in left:
        cited = ("README", "docs", "-")[one.cited]
        print(f"{one.seconds / 60:5.1f} min  {gpus_of(one.gpus):6}  {cited:6}  {one}")
    states = [one.states[name] for one in left for name in one.rows]
    missing = states.count(due.MISSING)
    started = [cases for _, cases in due.processes(left)]
    for size in sorted({cases[0].gpus for cases in started}):
        seconds = sum(_seconds(cases) for cases in started if cases[0].gpus == size)
        print(f"{seconds / 60:.0f} minutes on {gpus_of(size)}")
    guesses = [f"{name} {seconds:g} s" for name, seconds in due.SECONDS.items()]
    print(
        f"{len(left)} of {len(found)} cases: {missing} rows are missing, "
        f"{len(states) - missing} stale. Minutes are those of earlier rows, or else "
        f"{due.OTHER_SECONDS:g} s a row ({', '.join(guesses)})"
    )


def show_commands(found: Sequence[Due]) -> None:
    """Print the commands that measure what is due, what each takes behind it."""
    for arguments, cases in due.processes([one for one in found if one.rows]):
        line = shlex.join(["python", "-m", f"benchmarks.{cases[0].benchmark.name}"])
        minutes = _seconds(cases) / 60
        gpus = gpus_of(cases[0].gpus)
        print(f"{line} {shlex.join(arguments)}  # {minutes:.1f} min on {gpus}")


def _seconds(cases: Sequence[Due]) -> float:
    """Estimate for a process."""
    return due.START + sum(case.seconds for case in cases)


def plans(lines: Sequence[tuple[str, str]]) -> dict[str, list[Due]]:
    """What is due of the device of the docs, and of others whose rows are stored."""
    default = records.RESULTS / tables.DEFAULT_DEVICE
    others = {*records.RESULTS.glob("nvidia_*")} - {default}
    return {
        folder.name: due.plan(
            lines, [folder], due.History(), stored_only=folder != default
        )
        for folder in (default, *sorted(others))
    }


def main(argv: Sequence[str] | None = None) -> None:
    """List what is due."""
    topics = records.ordered(topic for topic, _ in COMMANDS)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish.suite")
    add = parser.add_argument
    add("topics", nargs="*", help=f"some of {topics}; all by default")
    add("--commands", action="store_true", help="as commands that measure it")
    args = parser.parse_args(argv)
    if unknown := sorted({*args.topics} - {*topics}):
        parser.error(f"unknown topics {unknown}; there are: {topics}")
    lines = [one for one in COMMANDS if not args.topics or one[0] in args.topics]
    for device, found in plans(lines).items():
        print(f"# {device}")
        (show_commands if args.commands else show)(found)


if __name__ == "__main__":
    main()
