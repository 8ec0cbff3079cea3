"""Large Transformers that train and serve faster on NVIDIA GPUs, in JAX."""

__version__ = "0.1.0"
