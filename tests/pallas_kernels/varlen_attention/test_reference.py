"""The definition against loops that do one query, one head at a time."""

import math

import numpy as np
import pytest

from tests.pallas_kernels.varlen_attention import cases


def one_query(q, keys, values, i, len_q, *, options, sink, slope):
    """Attention of query `i` to the keys of its sequence, in float64."""
    left, right = options.get("window", (None, None))
    scale = options.get("scale", 1 / math.sqrt(len(q)))
    weights, seen = [], []
    for j, key in enumerate(keys):
        distance = j - (i + len(keys) - len_q)  # 0 for the last query and key
        if options.get("causal") and distance > 0:
            continue
        if left is not None and distance < -left:
            continue
        if right is not None and distance > right:
            continue
        score = scale * float(np.dot(q, key))
        if "softcap" in options:
            score = options["softcap"] * math.tanh(score / options["softcap"])
        weights.append(math.exp(score - slope * abs(distance)))
        seen.append(values[j])
    total = sum(weights) + (0.0 if sink is None else math.exp(sink))
    if total == 0.0:
        return np.zeros(values.shape[-1]), -math.inf
    out = sum((w * value for w, value in zip(weights, seen, strict=True)), 0.0) / total
    return out + np.zeros(values.shape[-1]), math.log(total)


def loops(tensors, options, cu_q, cu_k):
    t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
    tokens, heads, _ = t["q"].shape
    groups = heads // t["k"].shape[1]
    out = np.zeros((tokens, heads, t["v"].shape[2]))
    lse = np.full((tokens, heads), -np.inf)
    for b in range(len(cu_q) - 1):
        keys = slice(cu_k[b], cu_k[b + 1])
        for row in range(cu_q[b], cu_q[b + 1]):
            for n in range(heads):
                out[row, n], lse[row, n] = one_query(
                    t["q"][row, n],
                    t["k"][keys, n // groups],
                    t["v"][keys, n // groups],
                    row - cu_q[b],
                    cu_q[b + 1] - cu_q[b],
                    options=options,
                    sink=t["sinks"][n] if "sinks" in t else None,
                    slope=t["alibi_slopes"][n] if "alibi_slopes" in t else 0.0,
                )
    return out, lse


@pytest.mark.parametrize("feature", cases.FEATURES)
def test_reference_is_what_loops_compute(feature):
    tensors, options = cases.arrays(feature, tokens=31)
    if "window" in options:  # so that it matters at this size
        options["window"] = tuple(w and w % 4 + 1 for w in options["window"])
    cu_q = np.array([0, 9, 10, 10, 16, 20, 27], np.int32)
    cu_k = np.array([0, 9, 15, 18, 20, 20, 30], np.int32)
    zeros = np.zeros((31, cases.HEADS, cases.VALUE_DIM), np.float32)
    out, lse, _ = cases.reference(options)(tensors, zeros, zeros[..., 0], cu_q, cu_k)
    expected_out, expected_lse = loops(tensors, options, cu_q, cu_k)
    np.testing.assert_allclose(out, expected_out, atol=2e-6)
    np.testing.assert_allclose(lse, expected_lse, atol=2e-6)
