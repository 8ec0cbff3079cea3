"""Recipes that compose training, pruning and inference, for notebooks and commands.

These three packages do not import each other. The functions here are what `jaxscale
prune` and `jaxscale quickstart` run.
"""

from jaxscale.public import listing
from jaxscale.recipes.classify import train_classifier
from jaxscale.recipes.export import export
from jaxscale.recipes.prune import (
    Pruned,
    TuneConfig,
    bytes_per_token,
    make_stages,
    mean_loss,
    prune_and_tune,
    tuning_config,
)
from jaxscale.recipes.runs import check_machine, from_preset, from_source
from jaxscale.recipes.tasks import Task, prepare


__all__ = [
    "Pruned",
    "Task",
    "TuneConfig",
    "bytes_per_token",
    "check_machine",
    "export",
    "from_preset",
    "from_source",
    "make_stages",
    "mean_loss",
    "prepare",
    "prune_and_tune",
    "train_classifier",
    "tuning_config",
]

__dir__ = listing(__all__)
