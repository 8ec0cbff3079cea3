"""``jaxscale generate SOURCE --prompt TEXT``: continue a prompt."""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from jaxscale import sharding
from jaxscale.checks import check_least, check_range
from jaxscale.cli.devices import announce_devices, simulate_devices
from jaxscale.cli.errors import UsageError, usage_errors
from jaxscale.cli.notices import notice
from jaxscale.cli.options import parse
from jaxscale.cli.sources import source_first
from jaxscale.inference import LLM, EngineConfig, SamplingParams
from jaxscale.inference.engine.device_share import reserve_for_serving
from jaxscale.inference.run_directory import is_run, load_run
from jaxscale.models import (
    Decoder,
    EncoderConfig,
    GenerationConfig,
    Tokenizer,
    config_from_hf,
)
from jaxscale.models.hf.files import Checkpoint
from jaxscale.models.hf.hub import local_directory
from jaxscale.sharding import MeshConfig
from jaxscale.training.config import MAX_SEED


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """The model of ``jaxscale generate``, its prompt, and how tokens are sampled."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """The output directory of a run, a Hugging Face directory with config.json,
    safetensors and tokenizer.json, or the name of a model on the Hugging Face hub; also
    --from SOURCE."""
    prompt: str
    """The text to continue."""
    max_new_tokens: int = 64
    """Maximum number of tokens to generate; the model may stop earlier."""
    temperature: float = 0.8
    """Sampling temperature: 0 is greedy, 1 samples from the model's distribution."""
    top_k: int | None = None
    """Sample from the k most likely tokens only."""
    top_p: float | None = None
    """Sample from the most likely tokens whose total probability is top_p (nucleus)."""
    seed: int = 0
    """Random seed of the sampling."""
    step: int | None = None
    """Step of the checkpoint of a run; the newest by default."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the computation; by default that of the run or of the file."""
    quantization: Literal["int8", "fp8", "fp8_dynamic"] | None = None
    """Quantize the weights to 8 bits, one scale per output feature; fp8_dynamic also
    rounds the activations of many tokens."""
    mesh: MeshConfig = MeshConfig()
    """Device mesh, for a model that is too large for one device."""
    rules: str = "fsdp_tp"
    """Name of a preset of sharding rules."""
    sparse: bool = True
    """Run a tile-wise pruned model with sparse kernels; otherwise dense, zeros
    included."""
    tensor_parallel: Literal["fused", "xla"] | None = None
    """How tensor parallelism communicates: fused (overlapped matmul + collective
    kernels), xla (explicit XLA collectives), None (the compiler chooses)."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""

    def __post_init__(self) -> None:
        """Check what needs no files."""
        if not self.prompt:
            raise ValueError("prompt is empty; give the model something to continue")
        check_least(self, 1, "max_new_tokens")
        check_range(self, 0, MAX_SEED, "seed")


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no model, or it cannot do what is asked.
    """
    config = parse(
        GenerateConfig,
        source_first(arguments),
        prog="jaxscale generate",
        description="Continue a prompt with a trained or a downloaded model.",
    )
    simulate_devices(config.devices)
    reserve_for_serving()
    if config.tensor_parallel == "fused":
        sharding.launch_in_order()
    with usage_errors():
        announce_devices()
    print(config.prompt + complete(config))
    return 0


def complete(config: GenerateConfig) -> str:
    """The model's continuation of the prompt.

    Raises:
        UsageError: there is no model, or it cannot do what is asked.
    """
    with usage_errors():
        params = SamplingParams(
            temperature=config.temperature,
            top_k=config.top_k,
            top_p=1.0 if config.top_p is None else config.top_p,
            seed=config.seed,
            max_tokens=config.max_new_tokens,
        )
        source = local_directory(config.source)
        config = dataclasses.replace(config, source=str(source))
        notice(f"reading {source}")
        tokenizer = Tokenizer.from_file(source)
        mesh = _mesh(config.mesh)
        with jax.set_mesh(mesh):
            if is_run(source):
                model = load_run(
                    source,
                    mesh=mesh,
                    rules=sharding.preset(config.rules),
                    dtype=config.dtype,
                    step=config.step,
                    sparse=config.sparse,
                    quantization=config.quantization,
                    tensor_parallel=config.tensor_parallel,
                )
                if not isinstance(model, Decoder):
                    raise ValueError(
                        f"{source} trained an encoder, which does not generate; give "
                        "it to Encoder.from_pretrained"
                    )
            else:
                model = _load_hugging_face(config, mesh)
        prompt = tokenizer.encode(config.prompt, add_bos=tokenizer.adds_bos)
        model.config.check_mesh(dict(mesh.shape), model.rules)
        _check(config, model, tokenizer, prompt)
        ends = _ends(config, tokenizer, model)
        notice(
            f"model: {model.config.num_parameters():,} parameters; compiling for a "
            f"prompt of {len(prompt)} tokens and {config.max_new_tokens} more"
        )
        llm = LLM(
            model,
            tokenizer,
            config=EngineConfig.for_prompts([len(prompt)], config.max_new_tokens),
            eos_ids=ends,
            quiet=True,
        )
    with llm:
        (result,) = llm.generate([prompt], params, progress=False)
    (continuation,) = result.continuations.values()
    if continuation.finish == "error":
        raise UsageError(f"{config.source}: {continuation.error}")
    return result.text


def _ends(config: GenerateConfig, tokenizer: Tokenizer, model: Decoder) -> list[int]:
    """The tokens that end the text: the tokenizer's, and those of a published model."""
    ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if not is_run(Path(config.source)):
        ends += GenerationConfig.from_file(config.source).eos_ids
    if ends and max(ends) >= model.config.vocab_size:
        raise ValueError(
            f"eos_token_id {max(ends)} of the files in {config.source} is outside the "
            f"vocabulary of {model.config.vocab_size}; they do not belong together"
        )
    return ends


def _mesh(config: MeshConfig) -> Mesh:
    """The mesh on exactly the devices that it needs."""
    sizes = [getattr(config, axis) for axis in sharding.MESH_AXES]
    needed = None if -1 in sizes else math.prod(sizes)
    return sharding.make_mesh(config, jax.devices()[:needed])


def _load_hugging_face(config: GenerateConfig, mesh: Mesh) -> Decoder:
    if config.step is not None:
        raise ValueError(
            f"step {config.step} chooses a checkpoint of a run, but {config.source} is "
            "a Hugging Face directory; leave it out"
        )
    rules = sharding.preset(config.rules)
    dtype = None if config.dtype is None else jnp.dtype(config.dtype)
    if isinstance(config_from_hf(Checkpoint(config.source).config), EncoderConfig):
        raise ValueError(
            f"source {config.source} holds an encoder, which does not generate; give "
            "the directory of a decoder"
        )
    return Decoder.from_pretrained(
        config.source,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        quantization=config.quantization,
        tensor_parallel=config.tensor_parallel,
    )


def _check(
    config: GenerateConfig, model: Decoder, tokenizer: Tokenizer, prompt: Sequence[int]
) -> None:
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"the tokenizer in {config.source} has {tokenizer.vocab_size} tokens, the "
            f"model knows {model.config.vocab_size}; they do not belong together"
        )
    if config.top_k is not None and config.top_k > model.config.vocab_size:
        raise ValueError(
            f"top_k {config.top_k} exceeds the vocabulary of {model.config.vocab_size};"
            " lower it, or leave it out to draw from all tokens"
        )
    length, limit = len(prompt) + config.max_new_tokens, model.config.max_seq_len
    if length > limit:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, which with max_new_tokens "
            f"{config.max_new_tokens} makes {length}, more than the {limit} that the "
            "model was made for; shorten the prompt or lower max_new_tokens"
        )
