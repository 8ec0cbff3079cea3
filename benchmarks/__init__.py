"""Benchmarks: ``python -m benchmarks.<name>`` runs ours and every baseline at once."""

import os


# Before jax starts: torch baselines run in this process and need memory of their own.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
