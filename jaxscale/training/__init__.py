"""Training: losses, optimizers, the step, checkpoints, metrics and the loop."""

from jaxscale.training.losses import LossSums, chunked_cross_entropy


__all__ = [
    "LossSums",
    "chunked_cross_entropy",
]
