"""The benchmark of moves: all implementations read the same page afterwards."""

import jax
import numpy as np

from benchmarks import move_pages as benchmark
from benchmarks.measure import command


def test_all_read_the_page_that_moved():
    params = benchmark.case(benchmark.QUICK[0]).params
    assert benchmark.spec_of(params).shape == benchmark.QUICK[0].shape
    arrays = benchmark.inputs(params, jax.random.key(0))
    wanted = benchmark.last_page(params)(*arrays)
    for make in (benchmark.moved("xla").make, benchmark.page_table):
        step = make(params)
        for _ in range(2):  # in pages of its own, and again
            np.testing.assert_array_equal(step(*arrays), wanted)


def test_quick_run(capsys):
    assert command.main(benchmark.BENCHMARK, ["--quick", "--skip", "mosaic_gpu"]) == 0
    said = capsys.readouterr().out
    assert "tiny_fp8" in said and "page_table" in said and "copy_share" in said
