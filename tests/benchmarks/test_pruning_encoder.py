"""The pruned encoder at a tiny size: pairs of texts, and what becomes of the dense."""

import numpy as np

from benchmarks import pruning_encoder
from benchmarks.measure.harness import Case, Measurement, NoMeasurement
from jaxscale.training import Document


def test_docstrings_are_first_sentences_and_the_rest():
    text = '''
def f():
    """Say what the function does in a sentence.

    And explain at some length how it does so.
    """

def g():
    """Too short.

    And explain at some length how it does so.
    """
'''
    documents = [Document(name=name, text=text) for name in ("a.py", "a.rst")]
    assert pruning_encoder.docstrings(documents) == [
        (
            "Say what the function does in a sentence.",
            "And explain at some length how it does so.",
        )
    ]


def test_the_dense_model_is_the_measure_of_all():
    name = "tile_wise_permuted_sparsegpt"
    case = Case("tiny", {"sparsity": 0.75, "seed": 0})
    names = ["dense", name, "two_four"]
    ((_, found),) = pruning_encoder.measure([case], names, 1)
    dense, pruned = found["dense"], found[name]
    assert isinstance(dense, Measurement) and isinstance(pruned, Measurement)
    assert isinstance(found["two_four"], NoMeasurement)
    # Of eight pairs of real sentences the real model finds nearly all.
    assert dense.metrics["recall"] >= 0.75
    for metric in ("cosine", "spearman"):
        np.testing.assert_allclose(dense.metrics[metric], 1, rtol=1e-5)
        assert pruned.metrics[metric] < 0.95
    assert pruned.metrics["sparsity"] == 0.75


def test_without_the_encoder_every_name_says_why(monkeypatch):
    monkeypatch.setattr(pruning_encoder, "PACKAGE", "no_such_encoder")
    case = Case("tiny", {"sparsity": 0.5, "seed": 0})
    ((_, found),) = pruning_encoder.measure([case], ["dense", "tew"], 1)
    for result in found.values():
        assert isinstance(result, NoMeasurement) and not result.failed
        assert "no_such_encoder is missing" in result.reason
