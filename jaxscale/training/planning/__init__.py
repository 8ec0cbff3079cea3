"""The search for a layout of a run: models of cost and memory, checks by compiling."""
