"""Tolerances against an fp32 reference, by the type of the computation."""

import jax
import jax.numpy as jnp
import numpy as np


RELATIVE = {
    jnp.dtype("float32"): 1e-5,  # summation order
    jnp.dtype("float16"): 5e-3,
    jnp.dtype("bfloat16"): 2e-2,  # 8 bits of mantissa, outputs rounded once
}
"""Largest allowed ``max|x - reference| / max|reference|``."""


LARGE = 2**22
"""Elements above which a GPU compares arrays itself: fetching them takes longer."""


def relative_error(actual, reference) -> float:
    """``max|actual - reference| / max|reference|``, computed in fp32; NaN stays NaN.

    By numpy, because maxima that XLA computes on a CPU may skip NaN.
    """
    if np.size(reference) > LARGE and _on_gpu(actual) and _on_gpu(reference):
        return float(error_on_gpu(actual, reference))
    actual, reference = (np.asarray(a).astype(np.float32) for a in (actual, reference))
    with np.errstate(all="ignore"):  # inf - inf
        scale = np.max(np.abs(reference))
        error = np.max(np.abs(actual - reference))
        return float(error / (1.0 if scale == 0 else scale))


@jax.jit
def error_on_gpu(actual: jax.Array, reference: jax.Array) -> jax.Array:
    """`relative_error`, where the arrays are."""
    actual, reference = (a.astype(jnp.float32) for a in (actual, reference))
    difference = jnp.abs(actual - reference)
    scale = jnp.max(jnp.abs(reference))
    error = jnp.max(difference) / jnp.where(scale == 0, 1.0, scale)
    return jnp.where(jnp.any(jnp.isnan(difference)), jnp.nan, error)


def assert_same_gradients(actual, expected, tolerance=1e-5) -> None:
    """Within `tolerance` of the largest: some gradients are zero but for rounding."""
    scale = max(np.abs(g).max() for g in jax.tree.leaves(expected))
    leaves = jax.tree.leaves_with_path(expected)
    for (path, exact), grad in zip(leaves, jax.tree.leaves(actual), strict=True):
        error = float(np.abs(np.asarray(grad) - np.asarray(exact)).max())
        assert error <= tolerance * scale, jax.tree_util.keystr(path)


def assert_same_step(actual, expected, tolerance=1e-5) -> None:
    """A loss and its gradients."""
    np.testing.assert_allclose(actual[0], expected[0], rtol=tolerance)
    assert_same_gradients(actual[1], expected[1], tolerance)


@jax.jit
def num_different(actual: jax.Array, expected: jax.Array) -> jax.Array:
    """How many elements differ in any bit, NaN too; counted where the arrays are."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    kind = f"uint{8 * actual.dtype.itemsize}"
    return jnp.sum(actual.view(kind) != expected.view(kind))


def _on_gpu(array) -> bool:
    """Whether one GPU has it."""
    if not isinstance(array, jax.Array) or len(array.devices()) > 1:
        return False
    return next(iter(array.devices())).platform == "gpu"
