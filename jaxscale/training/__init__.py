"""Training: losses, optimizers, the training step and loop, checkpoints, metrics."""

from jaxscale.public import listing
from jaxscale.training.checkpoint.digest import ReplicasDiffer, check_replicas
from jaxscale.training.checkpoint.steps import CheckpointNotWritten, DamagedCheckpoint
from jaxscale.training.checkpoint.store import Checkpointer
from jaxscale.training.config import TrainConfig
from jaxscale.training.data.corpus import (
    Document,
    TokenCorpus,
    python_corpus,
    read_documents,
    split,
    tokenize,
)
from jaxscale.training.data.labeled import LabeledBatch, LabeledBatches
from jaxscale.training.data.masked import MaskedBatches, MaskingConfig
from jaxscale.training.data.mixture import Mixture
from jaxscale.training.data.packed import (
    DataConfig,
    PackedBatches,
    PackedBatchIterator,
    TextData,
    load_text,
    load_tokenizer,
)
from jaxscale.training.data.row_packing import PackedRows
from jaxscale.training.diagnosis.suite import (
    DiagnoseConfig,
    Diagnosis,
    Finding,
    Measurement,
    diagnose,
)
from jaxscale.training.distillation import (
    DistillationLoss,
    TaughtBatch,
    TaughtBatches,
    taught,
)
from jaxscale.training.encoder_losses import classification_loss, masked_lm_loss
from jaxscale.training.evaluation import Evaluation, evaluate
from jaxscale.training.gradients import accumulated
from jaxscale.training.hardware import mfu, peak_flops
from jaxscale.training.loop import FitResult, fit, packed_batches
from jaxscale.training.losses import LossSums, chunked_cross_entropy
from jaxscale.training.monitoring.console import LineWriter
from jaxscale.training.monitoring.divergence import Diverged
from jaxscale.training.monitoring.monitor import (
    JsonlWriter,
    Monitor,
    ProgressBar,
    TensorBoardWriter,
    Writer,
)
from jaxscale.training.monitoring.trackers import MlflowWriter, WandbWriter
from jaxscale.training.optimizer import (
    OptimizerConfig,
    decays,
    make_optimizer,
    make_schedule,
)
from jaxscale.training.pipelined import pipelined, pipelined_sums
from jaxscale.training.planning.config import PlanConfig
from jaxscale.training.planning.cost_model import Layout
from jaxscale.training.planning.search import Estimate, Plan, plan_layouts
from jaxscale.training.step import (
    NextTokenLoss,
    TrainState,
    make_eval_step,
    make_train_step,
    next_token_loss,
    state_shardings,
)


__all__ = [
    "CheckpointNotWritten",
    "Checkpointer",
    "DamagedCheckpoint",
    "DataConfig",
    "DiagnoseConfig",
    "Diagnosis",
    "DistillationLoss",
    "Diverged",
    "Document",
    "Estimate",
    "Evaluation",
    "Finding",
    "FitResult",
    "JsonlWriter",
    "LabeledBatch",
    "LabeledBatches",
    "Layout",
    "LineWriter",
    "LossSums",
    "MaskedBatches",
    "MaskingConfig",
    "Measurement",
    "Mixture",
    "MlflowWriter",
    "Monitor",
    "NextTokenLoss",
    "OptimizerConfig",
    "PackedBatchIterator",
    "PackedBatches",
    "PackedRows",
    "Plan",
    "PlanConfig",
    "ProgressBar",
    "ReplicasDiffer",
    "TaughtBatch",
    "TaughtBatches",
    "TensorBoardWriter",
    "TextData",
    "TokenCorpus",
    "TrainConfig",
    "TrainState",
    "WandbWriter",
    "Writer",
    "accumulated",
    "check_replicas",
    "chunked_cross_entropy",
    "classification_loss",
    "decays",
    "diagnose",
    "evaluate",
    "fit",
    "load_text",
    "load_tokenizer",
    "make_eval_step",
    "make_optimizer",
    "make_schedule",
    "make_train_step",
    "masked_lm_loss",
    "mfu",
    "next_token_loss",
    "packed_batches",
    "peak_flops",
    "pipelined",
    "pipelined_sums",
    "plan_layouts",
    "python_corpus",
    "read_documents",
    "split",
    "state_shardings",
    "taught",
    "tokenize",
]

__dir__ = listing(__all__)
