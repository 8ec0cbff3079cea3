"""Attention over packed sequences of different length."""
