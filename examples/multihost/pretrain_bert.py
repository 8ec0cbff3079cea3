"""Pretrain a BERT by masked language modeling, with the GPUs of one host or of many.

As pretrain_llama.py, which says how it is started and continued. What is different: the
model has a head and a loss of its own, it is made by hand on the mesh, and LAMB takes
batches that are too large for AdamW.

    python pretrain_bert.py --data.paths books/ wiki/ --data.weights 2 3 \
        --data.tokenizer tokenizer/ --output-dir runs/bert

The tokenizer must have a mask token. One that is trained on your text, once:

    names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    Tokenizer.train(texts, 30522, special_tokens=names).save("tokenizer")
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from jaxscale.models import EncoderModel, encoder_head, encoder_preset
from jaxscale.sharding import MeshConfig, create, initialize, make_mesh
from jaxscale.training import (
    DataConfig,
    MaskedBatches,
    OptimizerConfig,
    TrainConfig,
    fit,
    load_text,
    masked_lm_loss,
    packed_batches,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    preset: str = "bert_large"
    data: DataConfig = DataConfig(
        vocab_size=30522, seq_len=512, max_sequences=16, batch_size=4096
    )
    optimizer: OptimizerConfig = OptimizerConfig(
        kind="lamb", learning_rate=2e-3, weight_decay=0.01, warmup_steps=1000
    )
    mesh: MeshConfig = MeshConfig(data=-1)
    microbatches: int = 1
    steps: int = 10_000
    output_dir: str = "runs/bert"


def main() -> None:
    options = tyro.cli(Options, description=__doc__)
    cluster = initialize()  # before any other use of JAX
    shape = encoder_preset(options.preset)
    shape = dataclasses.replace(shape, vocab_size=options.data.vocab_size)
    config = TrainConfig(
        model=shape,
        data=options.data,
        optimizer=options.optimizer,
        mesh=options.mesh,
        rules="fsdp_tp",
        microbatches=options.microbatches,
        steps=options.steps,
        output_dir=options.output_dir,
    )
    text = load_text(config.data)
    train_data, eval_data = packed_batches(config, text)
    rules = config.axis_rules

    def new_model() -> EncoderModel:
        return EncoderModel(
            shape,
            head=encoder_head(shape, "masked_lm"),
            dtype=jnp.bfloat16,
            rules=rules,
            rngs=nnx.Rngs(0),
        )

    result = fit(
        config,
        train_data=MaskedBatches(train_data, text.tokenizer),
        eval_data=eval_data and MaskedBatches(eval_data, text.tokenizer),
        model=create(new_model, make_mesh(config.mesh), rules),
        loss=masked_lm_loss(),
    )
    if cluster.process_id == 0:
        print(
            f"step {int(result.state.step)} of {config.steps}, "
            f"{cluster.num_processes} processes ({cluster.launcher}), "
            f"{jax.device_count()} devices"
        )
    sys.exit(result.interrupted)


if __name__ == "__main__":
    main()
