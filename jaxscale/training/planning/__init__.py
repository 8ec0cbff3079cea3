"""The search for the parallelism layout of a run: time, memory, compiled checks."""
