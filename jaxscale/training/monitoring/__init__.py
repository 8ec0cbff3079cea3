"""Monitoring of a run: progress, metrics, device events and divergence."""
