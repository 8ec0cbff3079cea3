"""Texts, models and loads that benchmarks run."""
