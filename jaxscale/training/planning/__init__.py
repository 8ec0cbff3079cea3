"""The search for a layout of a run: time, least memory, checks by compiling."""
