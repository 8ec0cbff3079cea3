"""Search for the layout of a run: cost and memory models, and programs that XLA compiles."""
