"""Checkpoints: what is written when, checked by digests, read back on other meshes."""
