"""Checkpoints: saved in the background, verified by digests, restored on any mesh."""
