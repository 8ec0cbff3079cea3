"""Pretrain a LLaMA on text files, with the GPUs of one host or in a multi-node job.

Every process runs this file: one per host, which uses all GPUs there. The tensor axis
of the mesh stays inside a host, the others span all of them. Every host must see the
same text, tokenizer and output directory.

    python pretrain_llama.py --mesh.tensor 8 --data.paths web/ code/ \
        --data.weights 7 3 --data.tokenizer tokenizer.json --output-dir runs/llama

The recipes beside this file start it on many hosts: slurm.sbatch, jobset.yaml,
open_mpi.sh and ssh.sh. To try it on a laptop, with eight simulated devices, on Python's
own documentation and source:

    JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 python pretrain_llama.py \
        --preset llama_tiny --data.vocab-size 512 --data.seq-len 128 \
        --data.batch-size 16 --optimizer.warmup-steps 10 --steps 100

The same command starts a run and continues it from its newest checkpoint, on as many
hosts as there are now. A SIGTERM to any process saves one and ends all with code 1.
``jaxscale train`` does this and more; here are the parts.
"""

import dataclasses
import sys
from typing import Literal

import jax
import tyro

from jaxscale.models import preset
from jaxscale.sharding import (
    MeshConfig,
    initialize,
    launch_in_order,
    use_xla_flags,
)
from jaxscale.training import (
    DataConfig,
    OptimizerConfig,
    TrainConfig,
    fit,
    load_text,
    packed_batches,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    preset: str = "llama_1b"
    data: DataConfig = DataConfig(vocab_size=32000, seq_len=4096, batch_size=64)
    optimizer: OptimizerConfig = OptimizerConfig(warmup_steps=500)
    mesh: MeshConfig = MeshConfig(fsdp=-1)
    tensor_parallel: Literal["fused", "xla"] | None = None
    microbatches: int = 1
    steps: int = 10_000
    output_dir: str = "runs/llama"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    if options.tensor_parallel == "fused":
        launch_in_order()
        use_xla_flags("host_kernels")  # kernels name the GPUs of their process
    cluster = initialize()  # before any other use of JAX
    model = preset(options.preset)
    config = TrainConfig(
        model=dataclasses.replace(model, vocab_size=options.data.vocab_size),
        data=options.data,
        optimizer=options.optimizer,
        mesh=options.mesh,
        rules="fsdp_tp",  # parameters over fsdp, heads and hidden features over tensor
        tensor_parallel=options.tensor_parallel,
        microbatches=options.microbatches,
        remat="attention",
        steps=options.steps,
        output_dir=options.output_dir,
    )
    train_data, eval_data = packed_batches(config, load_text(config.data))
    result = fit(config, train_data=train_data, eval_data=eval_data)
    if cluster.process_id == 0:
        print(
            f"step {int(result.state.step)} of {config.steps}, "
            f"{cluster.num_processes} processes ({cluster.launcher}), "
            f"{jax.device_count()} devices"
        )
    sys.exit(result.interrupted)


if __name__ == "__main__":
    main()
