"""The settings of a training run."""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax.numpy as jnp

from jaxscale.checks import check_choice, check_type
from jaxscale.keywords import explained
from jaxscale.models.config import DecoderConfig
from jaxscale.models.encoder_config import EncoderConfig
from jaxscale.models.heads import HeadConfig
from jaxscale.models.stack_layout import StackLayout, place_variants
from jaxscale.nn.lora import LoraConfig
from jaxscale.sharding.fp8 import check_fp8
from jaxscale.sharding.mesh import MESH_AXES, MeshConfig
from jaxscale.sharding.rules import AxisRules, MeshAxes, as_tuple, preset
from jaxscale.sharding.schedule import check_schedule
from jaxscale.sharding.state_rules import StateRules
from jaxscale.sharding.tensor_parallel import check_tensor_parallel
from jaxscale.training.data.packed import DataConfig
from jaxscale.training.optimizer import OptimizerConfig, make_schedule


MAX_STEPS = 2**31 - 1
"""Steps are counted on the devices, in int32."""
MAX_SEED = 2**32 - 1
"""`jax.random.key` keeps 32 bits: a larger seed would wrap around to a smaller one."""


EVAL_BATCHES_OF_TEXT = 32
"""Default maximum number of batches per evaluation, for text without labels."""


@explained
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The settings of a training run, as `fit` takes them.

    Example:
        >>> from jaxscale.models.families.llama import llama_tiny
        >>> data = DataConfig(vocab_size=256, seq_len=128, batch_size=8)
        >>> config = TrainConfig(model=llama_tiny(), data=data, microbatches=2)
        >>> dataclasses.replace(config, microbatches=3)
        Traceback (most recent call last):
        ...
        ValueError: microbatches 3 must divide data.batch_size 8
    """

    model: DecoderConfig | EncoderConfig
    """Architecture of the model."""
    head: HeadConfig | None = None
    """Head that `fit` puts on an encoder, which decides the loss: ``masked_lm``, or
    ``sequence`` or ``token`` classification."""
    source: str | None = None
    """Pretrained weights to start from: a Hugging Face directory, the name of a model
    on its hub, or the output directory of a run; None initializes new weights."""
    data: DataConfig = DataConfig()
    """Text, tokenizer and batches."""
    lora: LoraConfig = LoraConfig()
    """Low-rank adapters (LoRA), trained instead of the whole model."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer, learning-rate schedule and weight decay."""
    mesh: MeshConfig = MeshConfig()
    """Device mesh."""
    rules: str = "fsdp_tp"
    """Preset of sharding rules: replicated, dp, fsdp, fsdp_tp or megascale_3d."""
    tensor_parallel: Literal["fused", "xla"] | None = None
    """How tensor parallelism communicates: fused (overlapped matmul + collective
    kernels), xla (explicit XLA collectives), None (the compiler chooses). A run may
    change it when it resumes; the result is the same."""
    steps: int = 1000
    """Optimizer steps of the entire run, one global batch each."""
    microbatches: int = 1
    """Microbatches per batch, for gradient accumulation: more of them take less memory.
    With pipeline parallelism they are the microbatches of the pipeline."""
    chunks: int = 1
    """Model chunks per pipeline stage (virtual stages); more than one gives the
    interleaved schedule, for which microbatches must be a multiple of `mesh.pipe`."""
    zero: Literal[1, 2, 3] = 3
    """ZeRO stage of `mesh.fsdp` during a step: it shards optimizer state (1), gradients
    too (2), parameters too (3). Between steps it shards all of them."""
    replicated: bool = False
    """Keep parameters unsharded between steps too, with `zero` 1 or 2: a step
    all-gathers the updated parameters in `param_dtype`, instead of gathering in `dtype`
    what it computes with."""
    remat: Literal["none", "full", "dots", "dots_no_batch", "attention"] = "none"
    """Activation checkpointing policy, what a block keeps for the backward pass:
    everything (none), its input (full), all matmul outputs (dots), those of linear
    layers (dots_no_batch), those and fused attention's (attention)."""
    scan_layers: bool = False
    """Compile one layer and scan over the stack: deep models compile sooner, steps are
    a few per cent slower, and without `remat` all intermediate activations stay in
    memory."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of activations and matmuls (mixed precision with `param_dtype`)."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the parameters. In bfloat16 small updates are rounded away."""
    quantization: Literal["fp8", "fp8_blockwise", "fp8_tensorwise"] | None = None
    """Compute the matmuls of the blocks' linear layers in fp8 (E4M3, gradients in
    E5M2), with a scale per row (fp8), per block of 128 numbers (fp8_blockwise) or per
    tensor (fp8_tensorwise); None computes them in `dtype`. With fp8_blockwise no kernel
    communicates: `tensor_parallel` fused is xla. A run may change it when it
    resumes: parameters and updates keep their types."""
    loss_chunk: int = 1024
    """Token positions per row whose logits are computed at a time, in the loss of
    `fit`."""
    z_loss: float = 0.0
    """Coefficient of the squared log-sum-exp of the logits, in the loss of `fit`."""
    seed: int = 0
    """Random seed of the initial parameters."""
    eval_every: int = 100
    """Steps between evaluations on the held-out data; the last step always has one."""
    eval_batches: int | None = None
    """Maximum number of batches per evaluation: of more held-out data, always the same
    evenly spaced sample is used. None is all labeled data (heads ``sequence`` and
    ``token``), and 32 batches of other text."""
    checkpoint_every: int = 500
    """Steps between checkpoints; the last step always saves one."""
    keep: int = 3
    """Number of newest checkpoints to keep."""
    keep_every: int | None = None
    """Checkpoints at multiples of this step are never deleted."""
    check_replicas_every: int | None = None
    """Steps between checks that replicas on different devices are identical, by
    digests; each save checks too. A device that computes wrong values ends the run with
    an error that names it. None never checks between saves."""
    profile_every: int | None = None
    """Steps between profiles of a single step, which split its time into compute and
    waiting in collectives, and so tell a slow rank from those that wait for it. None
    never profiles."""
    max_skipped: int = 10
    """Consecutive updates skipped for a non-finite loss or gradient after which the run
    counts as diverged and stops."""
    log_every: int = 1
    """Steps between metric records."""
    output_dir: str = "runs/train"
    """Directory of this run: checkpoints and metrics."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers that also receive the metrics, configured by their own
    environment variables."""
    step: int | None = None
    """Resume from the checkpoint of this step; later checkpoints are set aside. None
    resumes from the newest readable one. Under a supervisor, only the first start goes
    back."""

    def __post_init__(self) -> None:
        models: Any = DecoderConfig | EncoderConfig
        if not isinstance(self.model, models):
            raise ValueError(
                f"model is {self.model!r}, expected a DecoderConfig or EncoderConfig, "
                "such as jaxscale.models.preset('llama_tiny')"
            )
        parts = DataConfig, OptimizerConfig, MeshConfig, LoraConfig
        names = "data", "optimizer", "mesh", "lora"
        for name, kind in zip(names, parts, strict=True):
            remedy = f"{kind.__name__}(...) makes one"
            check_type(name, getattr(self, name), kind, remedy)
        for name in (
            "steps",
            "microbatches",
            "chunks",
            "loss_chunk",
            "eval_every",
            "checkpoint_every",
            "keep",
            "max_skipped",
            "log_every",
        ):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ValueError(f"{name} {value!r}, expected an integer")
            if value < 1:
                raise ValueError(f"{name} {value} must be at least 1")
        check_choice("zero", self.zero, (1, 2, 3))
        if self.replicated and self.zero == 3:
            raise ValueError(
                "replicated True keeps parameters whole between steps, which zero 3 "
                "splits during them; set zero to 1 or 2"
            )
        if self.optimizer.kind == "muon" and self.mesh.axis_type == "explicit":
            raise ValueError(
                "optimizer.kind 'muon' multiplies matrices that mesh.axis_type "
                "'explicit' would need to be told the partition of; use 'auto'"
            )
        if self.lora.rank and (self.mesh.pipe > 1 or self.mesh.axis_type != "auto"):
            raise ValueError(
                f"lora.rank {self.lora.rank} makes adapters, which run neither in a "
                "pipeline nor on explicit meshes; set mesh.pipe to 1 and "
                "mesh.axis_type to 'auto', or lora.rank to 0"
            )
        if self.head is not None and isinstance(self.model, DecoderConfig):
            raise ValueError(
                f"head {self.head.kind!r} is for encoders, and model is a decoder; "
                "leave it out"
            )
        for name in (
            *("eval_batches", "keep_every", "check_replicas_every", "profile_every"),
            "step",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} {value} must be at least 1, or None")
        if self.steps > MAX_STEPS:
            raise ValueError(f"steps {self.steps} must be at most {MAX_STEPS}")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(
                f"z_loss {self.z_loss} must not be negative, infinite or NaN"
            )
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed {self.seed} must be from 0 to {MAX_SEED}")
        if self.data.batch_size % self.microbatches:
            raise ValueError(
                f"microbatches {self.microbatches} must divide data.batch_size "
                f"{self.data.batch_size}"
            )
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} is longer than model.max_seq_len "
                f"{self.model.max_seq_len}; lower seq_len or raise max_seq_len"
            )
        if self.data.vocab_size > self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size {self.data.vocab_size} is larger than "
                f"model.vocab_size {self.model.vocab_size}; the tokenizer would make "
                "tokens that the model lacks"
            )
        check_tensor_parallel(self.tensor_parallel, self.axis_rules)
        check_fp8(self.quantization)
        make_schedule(self.optimizer, self.steps)  # raises if it does not fit
        sizes = {axis: getattr(self.mesh, axis) for axis in MESH_AXES}
        # An axis of size -1 is known, and checked by `fit`, when the devices are.
        self.check_mesh({axis: max(size, 1) for axis, size in sizes.items()})

    @property
    def eval_limit(self) -> int | None:
        """Maximum number of batches per evaluation; None is all."""
        labeled = self.head is not None and self.head.kind in ("sequence", "token")
        default = None if labeled else EVAL_BATCHES_OF_TEXT
        return default if self.eval_batches is None else self.eval_batches

    @property
    def axis_rules(self) -> AxisRules:
        """The table that `rules` names."""
        return preset(self.rules)

    @property
    def state_rules(self) -> StateRules:
        """The tables that `rules`, `zero` and `replicated` make."""
        return StateRules.zero(self.axis_rules, self.zero, replicated=self.replicated)

    def of_model(self, model: Any) -> "TrainConfig":
        """Return these settings, with those of an existing model filled in.

        Its types, `remat`, `scan_layers`, `tensor_parallel` and `quantization` replace
        those of this config.

        Args:
            model: A `Decoder`, an `EncoderModel`, or another module with their
                attributes `config`, `dtype`, `param_dtype`, `remat`, `scan_layers`.

        Raises:
            TypeError: the model lacks one of these attributes.
            ValueError: `self.model` differs from the model's config.
        """
        names = ("config", "dtype", "param_dtype", "remat", "scan_layers")
        missing = [name for name in names if not hasattr(model, name)]
        if missing:
            raise TypeError(
                f"model is a {type(model).__name__} without {', '.join(missing)}: they "
                "decide what its checkpoints hold; give it these attributes"
            )
        ours, theirs = dataclasses.asdict(self.model), dataclasses.asdict(model.config)
        different = [
            f"{name} {theirs.get(name)!r} (model.{name} of the settings is "
            f"{ours.get(name)!r})"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise ValueError(
                f"the given model has {', '.join(different)}; set its config in "
                "the settings"
            )
        head = getattr(model, "head", None)
        return dataclasses.replace(
            self,
            head=None if head is None else head.config,
            dtype=jnp.dtype(model.dtype).name,
            param_dtype=jnp.dtype(model.param_dtype).name,
            remat=model.remat,
            scan_layers=model.scan_layers,
            tensor_parallel=getattr(model, "tensor_parallel", None),
            quantization=getattr(model, "quantization", None),
        )

    def check_rules(self, model: Any) -> None:
        """Check that a given model's sharding rules, if any, are those of this config.

        Its parameters and batches are placed by the config's rules: a model made
        without rules would compute the whole batch on every device.

        Raises:
            ValueError: the model has other rules.
        """
        ours, theirs = self.axis_rules, getattr(model, "rules", self.axis_rules)
        different = [
            f"{field.name} {getattr(theirs, field.name)!r} instead of "
            f"{getattr(ours, field.name)!r}"
            for field in dataclasses.fields(ours)
            if getattr(theirs, field.name) != getattr(ours, field.name)
        ]
        if different:
            raise ValueError(
                f"the given model has other rules than the settings, {self.rules!r}: "
                f"{', '.join(different)}; make it with rules=config.axis_rules"
            )

    def check_mesh(self, sizes: dict[str, int]) -> None:
        """Check that model and microbatches divide over the axes of a mesh.

        Raises:
            ValueError: a size is not divisible, or nothing is split over an axis; the
                message says which.
        """
        unused = [
            f"{axis}={size}"
            for axis, size in sizes.items()
            if size > 1 and axis not in self.axis_rules.mesh_axes()
        ]
        if unused:
            raise ValueError(
                f"rules {self.rules!r} split nothing over the mesh axes {unused}, "
                "whose devices would all do the same work; choose other rules or set "
                "these axes to 1"
            )
        rows, rules = self.data.batch_size // self.microbatches, self.axis_rules
        self._check_context(sizes)
        self._check_pipeline(sizes)
        if self.is_pipelined(sizes):  # layers need not divide over the stages
            rules = dataclasses.replace(rules, layers=None)
        try:
            self.model.check_mesh(
                sizes, rules, batch_size=rows, num_tokens=self.data.seq_len
            )
        except ValueError as error:
            if self.microbatches == 1 or "batch_size" not in str(error):
                raise
            raise ValueError(
                f"a microbatch has data.batch_size / microbatches = {rows} rows: "
                f"{error}"
            ) from error

    def is_pipelined(self, sizes: Mapping[str, int]) -> bool:
        """Whether a mesh of these sizes runs the layers as stages of a pipeline."""
        return sizes["pipe"] > 1 and self.axis_rules.layers == "pipe"

    def stack_layout(self, sizes: Mapping[str, int]) -> StackLayout:
        """How the layers are stored on a mesh of these sizes."""
        stages = sizes["pipe"] if self.is_pipelined(sizes) else 1
        if stages == 1 < self.chunks:
            raise self._no_stages()
        return StackLayout(
            num_layers=self.model.num_layers, stages=stages, chunks=self.chunks
        )

    def _no_stages(self) -> ValueError:
        return ValueError(
            f"chunks {self.chunks} are parts of the stages of a pipeline; set "
            "mesh.pipe above 1 with rules='megascale_3d', or chunks=1"
        )

    def _check_context(self, sizes: Mapping[str, int]) -> None:
        """Raise if the sequence cannot be split over `mesh.context`."""

        def ways(axis: MeshAxes) -> int:
            return math.prod(sizes.get(name, 1) for name in as_tuple(axis))

        rules, length = self.axis_rules, self.data.seq_len
        if (shared := ways(rules.context)) == 1:
            return
        if not isinstance(self.model, DecoderConfig):
            raise ValueError(
                f"mesh.context {shared} splits sequences of causal attention only; set "
                "it to 1 for an encoder"
            )
        step = math.lcm(2 * shared, shared * ways(rules.tokens))
        if length % step:
            fitting = (length // step * step, -(-length // step) * step)
            written = " or ".join(str(n) for n in fitting if n)
            raise ValueError(
                f"data.seq_len {length} is not divisible by {step}: each device of "
                f"mesh.context {shared} has two pieces of a row, which are split over "
                f"mesh.tensor between layers; set data.seq_len to {written}, or make "
                "mesh.context smaller"
            )

    def _check_pipeline(self, sizes: Mapping[str, int]) -> None:
        """Raise if stages, chunks, microbatches and model do not fit together."""
        if not self.is_pipelined(sizes):
            if self.chunks > 1 and self.mesh.pipe != -1:
                raise self._no_stages()
            return
        if not isinstance(self.model, DecoderConfig):
            raise ValueError(
                f"mesh.pipe {sizes['pipe']} makes a pipeline, which runs decoders "
                "only; set it to 1 for an encoder"
            )
        if self.mesh.axis_type != "auto":
            raise ValueError(
                f"mesh.pipe {sizes['pipe']} makes a pipeline, which runs on no mesh of "
                f"mesh.axis_type {self.mesh.axis_type!r}; use 'auto'"
            )
        check_schedule(sizes["pipe"], self.microbatches, self.chunks)
        place_variants(self.model, self.stack_layout(sizes))

    def identity(self) -> dict[str, Any]:
        """Return the settings that a run must keep when it resumes, as JSON.

        The data is not part of it: its iterator checks by itself what it can resume
        from. Neither are the steps of run and schedule, mesh, rules, where optimizer
        state is stored, and whatever changes only speed or reports.
        """
        fields = ("model", "optimizer", "dtype", "param_dtype", "z_loss", "seed")
        values = {name: dataclasses.asdict(self)[name] for name in fields}
        if self.lora.rank:
            values["lora"] = dataclasses.asdict(self.lora)
        del values["optimizer"]["memory_kind"]
        del values["optimizer"]["schedule_steps"]  # may be named anew
        if self.optimizer.kind == "adamw":  # as before there was a choice
            del values["optimizer"]["kind"]
        if not values["model"].get("window_pattern", True):
            del values["model"]["window_pattern"]
        return json.loads(json.dumps(values, default=str))
