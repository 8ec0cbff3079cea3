"""Pallas GPU kernels of jaxscale, usable without the rest of it."""
