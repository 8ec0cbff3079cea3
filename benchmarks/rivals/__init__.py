"""What others do on the same problems, in PyTorch and in plain JAX."""
