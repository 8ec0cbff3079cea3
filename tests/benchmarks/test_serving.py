"""Ways to serve: who may join when, what is reported, and the command."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from benchmarks import pruned_model, serving
from benchmarks.measure import command
from benchmarks.rivals import torch_serving
from benchmarks.workloads import (
    byte_text,
    serving_host,
    serving_http,
    serving_model,
    serving_policies,
)
from jaxscale import pruning
from jaxscale.models import Decoder, preset
from tests.inference.server.conftest import LiveServer
from tests.inference.server.fake_engine import TOKENIZER, FakeEngine
from tests.tiers import exhaustive


CASE = {"workload": "alpaca", "requests": 7, "shrink": 8, "arrivals": "poisson"}


@pytest.fixture(scope="module")
def load():
    return serving_policies.make_load(CASE | {"gap_ms": 1.0}, 256, seed=0)


@pytest.fixture(scope="module")
def engine(mixed):
    model = Decoder(preset("llama_tiny"), rngs=nnx.Rngs(0))
    with serving_policies.engine_for(model, mixed, 2, [2]) as engine:
        yield engine


def test_loads(load):
    assert load.due[0] == 0 and np.mean(np.diff(load.due)) < 3e-3
    assert len({tuple(prompt) for prompt in load.prompts}) == 7
    again = serving_policies.make_load(CASE | {"gap_ms": 1.0}, 256, seed=0)
    assert again == load
    assert load.one(3).outputs == [load.outputs[3]]
    burst = serving_policies.make_load(CASE | {"gap_ms": 0.0}, 256, seed=0)
    assert burst == dataclasses.replace(load, due=[0.0] * 7)
    assert serving_policies.moments(4, 500, "constant", 0) == [0, 0.5, 1.0, 1.5]


@pytest.fixture(scope="module")
def mixed(load):
    """A long answer first, then short ones; there are two slots."""
    outputs = [90, *load.outputs[1:]]
    return dataclasses.replace(load, outputs=outputs, due=[0.0] * 7)


def test_continuous(engine, mixed):
    """Short answers pass a long one, and nobody begins before arrival."""
    outcomes = serving_policies.continuous(engine, mixed)
    assert [o.output_tokens for o in outcomes] == list(mixed.outputs)
    assert all(o.ended < outcomes[0].ended for o in outcomes[1:])
    late = dataclasses.replace(mixed, due=[0.0] * 6 + [0.2])
    assert serving_policies.continuous(engine, late)[6].events[0] >= 0.2


def test_static_batches_do_not_overlap(engine, mixed):
    outcomes = serving_policies.static(engine, mixed, 2)
    for i in (2, 4, 6):
        before = max(o.ended for o in outcomes[i - 2 : i])
        assert all(o.events[0] > before for o in outcomes[i : i + 2])


def test_a_window_waits_for_more(engine, load):
    late = dataclasses.replace(load, due=[0.0, 0.05, *[0.3] * 5])
    outcomes = serving_policies.static(engine, late, 2, window=2.0)
    assert 0.05 <= outcomes[0].events[0] < 2  # full before the window has ended
    late = dataclasses.replace(load, due=[0.0, 1.5, *[1.6] * 5])
    outcomes = serving_policies.static(engine, late, 2, window=0.2)
    assert outcomes[0].events[0] >= 0.2
    assert outcomes[0].ended <= outcomes[1].events[0]  # the window ended without it


def test_instances_share_weights_and_nothing_else(engine, load):
    first, second = serving_policies.instances_of(engine, 2)
    assert first.runner.params is second.runner.params is engine.runner.params
    two = dataclasses.replace(
        load, prompts=load.prompts[:2], outputs=[5, 9], due=[0.0, 0.0]
    )
    with first, second:
        outcomes = serving_policies.concurrent_instances([first, second], two)
    assert [len(o.events) for o in outcomes] == [5, 9]
    assert first.scheduler.counts.drawn_tokens == 5


def test_what_is_refused_is_an_error(engine, load):
    long = dataclasses.replace(load.one(0), outputs=[10_000])
    with pytest.raises(ValueError, match="more than"):
        serving_policies.continuous(engine, long)


def test_a_load_is_cut(load):
    cut = load.cut(5)
    assert max(load.outputs) > 5
    assert cut.outputs == [min(output, 5) for output in load.outputs]
    assert (cut.prompts, cut.due) == (load.prompts, load.due)
    assert load.to_warm_up() is load
    long = dataclasses.replace(load, outputs=[300_000] * len(load.outputs))
    assert long.to_warm_up().outputs == [128] * len(load.outputs)


@pytest.mark.parametrize(
    ("attention", "warm"), [("sdpa", [3, 16]), ("flash_attention_2", [3, 40])]
)
def test_transformers_warms_up(monkeypatch, attention, warm):
    """By a batch, and its first tokens where no graphs are captured."""
    ran = []

    def run(model, load, batch):
        ran.append(load["outputs"])
        return batch

    monkeypatch.setattr(torch_serving, "build", lambda shape, seed, attention: None)
    monkeypatch.setattr(torch_serving, "fastest_attention", lambda: attention)
    monkeypatch.setattr(torch_serving, "continuous", run)
    load = {"prompts": [[1]] * 3, "outputs": [3, 40, 5], "due": [0.0] * 3}
    runs, seconds = torch_serving.measure({}, [load], 2, 0, 16)
    assert ran == [warm, [3, 40, 5]] and runs == [2] and seconds >= 0


def test_figures():
    load = serving_policies.Workload(prompts=[[1], [2]], outputs=[2, 3], due=[0.0, 1.0])
    outcomes = serving_policies.outcomes_of(load, [[0.5, 2.0], [1.5, 2.0, 2.5]])
    found = serving_policies.figures(outcomes, {0: 1.0, 1: 1.0})
    assert found["tokens_per_second"] == 2.0
    assert found["mean_latency_ms"] == 1750 and found["mean_ttft_ms"] == 500
    assert found["latency_vs_solo"] == 1.75
    with pytest.raises(RuntimeError, match="2 tokens, expected 3"):
        serving_policies.outcomes_of(load, [[0.5, 2.0], [1.5, 2.0]])


def test_time_of_a_token():
    """Of who began last, until the first ends; tokens come in groups."""
    events = [[0.0, 1, 1, 2, 2, 3, 3], [1.0, 2, 2, 3, 3, 4, 4]]
    assert serving.token_seconds(events) == 0.5
    with pytest.raises(RuntimeError, match="ended before"):
        serving.token_seconds([[0.0, 1.0], [2.0, 3.0]])


def test_the_bytes_of_a_step():
    """Weights but for the table of embeddings, keys and values: 3.36 ms on an H200."""
    case = serving.token_case("llama3_1_8b", 32, 264)
    found = serving.metrics(case.params, 1.0)
    assert found["tokens_per_second"] == 32
    assert found["read_gb_per_second"] == pytest.approx(2 * (15.01 + 1.11), rel=1e-2)
    case = serving.token_case("llama3_1_8b", 32, 264, "int8")
    assert case.name == "token_b32_c264_int8"
    found = serving.metrics(case.params, 1.0)
    assert found["read_gb_per_second"] == pytest.approx(15.01 / 2 + 2 * 1.11, rel=1e-2)
    # Eight layers of 856 million weights, the output projection, keys and values.
    case = serving.token_case("llama3_70b", 32, 264, tp=4, layers=8)
    assert case.name == "token_b32_c264_l8_tp4"
    found = serving.metrics(case.params, 1.0)
    weights, values = 8 * 0.8557 + 1.0507, 32 * 264 * 8 * 2 * 1024 / 1e9
    each = 4 * (weights + values) / 4  # fp32 here, on four devices
    assert found["read_gb_per_second"] == pytest.approx(each, rel=1e-3)


def test_the_weights_of_a_pruned_step():
    """What tiles hold, whole layers that stay dense, and the output projection."""
    dense = serving.read_metrics(serving.token_case("llama3_1_8b", 1, 264).params)
    assert set(dense) == {"weights_gb"}
    for weights, sparsity in serving.TILE_WISE.items():
        density = 1 - sparsity
        case = serving.token_case("llama3_1_8b", 1, 264, weights)
        assert case.name == f"token_b1_c264_{weights}"
        found = serving.read_metrics(case.params)
        assert found["density"] == pytest.approx(density, rel=1e-3)
        # 6.98 of 7.50 billion weights are in the blocks.
        least = 1 - 6.98 / 7.50 * (1 - density)
        assert least < found["weights_gb"] / dense["weights_gb"] < least + 0.05
        load = [c for c in serving.BENCHMARK.cases if c.name == f"saturated_{weights}"]
        assert serving.read_metrics(load[0].params) == found
        assert "tile-wise" in serving._refused(case.params, "vllm")
    one = [c for c in serving.BENCHMARK.cases if "one_size" in c.name]
    assert {c.params.get("weights") for c in one} == {None, *serving.TILE_WISE}
    runs = {
        n
        for n in serving.BENCHMARK.implementations
        if serving.BENCHMARK.offers(one[0], n)
    }
    assert runs == {"jaxscale"}


def test_a_pruned_model_is_what_a_pruned_run_serves(monkeypatch):
    """In every block the same tree, types and counts as `sparsify` gives."""
    model = Decoder(byte_text.decoder(256, 2, 64, 128), rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    scores = {
        name: size * np.exp(rng.standard_normal(size.shape) / 2)
        for name, size in pruning.magnitude_scores(model).items()
    }
    config = pruning.PruneConfig(pattern="tw", sparsity=0.75, tile=64)
    masks = pruning.make_model_masks(model, scores, config)
    want = pruning.sparsify(model, masks, separate=True)
    parts = {"tw 0.75": pruned_model.parts_of(model, masks)}
    stored = {"tile": 64, "bits_per_byte": {}, "masks": parts}
    known = pruned_model._read(stored)
    monkeypatch.setattr(pruned_model, "load", lambda name: known)
    for module in (serving, serving_model):
        monkeypatch.setattr(module, "config_of", lambda params: model.config)
    params = {"weights": "tw75", "masks": "own"}
    found = serving.model_of(params, 0)
    assert jax.tree.structure(found) == jax.tree.structure(want)
    leaves = jax.tree.leaves_with_path(found)
    for (path, leaf), other in zip(leaves, jax.tree.leaves(want), strict=True):
        assert (leaf.shape, leaf.dtype) == (other.shape, other.dtype), path
        if "counts" in str(path):
            np.testing.assert_array_equal(leaf, other)


@pytest.mark.parametrize("rivals", [["static"], *exhaustive(["torch_continuous"])])
def test_the_command_runs_anywhere(rivals, tmp_path, capfd, monkeypatch):
    """And writes nothing; its child says how far it is."""
    monkeypatch.setenv("BENCHMARK_LOCK", str(tmp_path / "lock"))  # a child takes it
    out = tmp_path / "out"
    arguments = ["--quick", "--out", str(out), "--samples", "1"]
    arguments += ["--case", "token_b2_c24_tw75"]
    arguments += ["--impl", "jaxscale", *rivals]
    assert command.main(serving.BENCHMARK, arguments) == 0
    said, far = capfd.readouterr()
    assert "all programs are there" in far and "sample 1 of 1: " in far
    assert "read_gb_per_second" in said and "the same however" in said
    assert "density 0.25" in said and "weights_gb" in said
    assert not out.exists()


def test_the_client_of_the_server():
    """More requests than streams, over connections that are used again."""
    engine = FakeEngine("to be or not")
    bodies = serving_http.make_bodies(7, prompt=5, output=4)
    for body in bodies:
        body["prompt"] = [token % 256 for token in body["prompt"]]
    with LiveServer(engine) as server:
        tokens, events, seconds = serving_http.call(server.port, bodies, streams=3)
    whole = len(TOKENIZER.encode(engine.answer))
    assert tokens == sum(min(whole, body["max_tokens"]) for body in bodies)
    assert events == tokens + len(bodies) and seconds > 0  # usage is a part, too
    assert engine.counts.finished == 7
    assert len({tuple(request.prompt) for request in engine.seen}) == 7


def test_http_is_a_row_beside_the_same_calls_without(monkeypatch):
    """Both of one measurement, and of these cases alone."""
    (case,) = (c for c in serving.BENCHMARK.cases if c.name.startswith("http_"))
    asked = []

    def compare(**sizes):
        asked.append(sizes)
        return tuple(
            [serving_http.Round(100, seconds, 0.002) for seconds in (at, 2 * at, at)]
            for at in (4.0, 2.0)
        )

    monkeypatch.setattr(serving_http, "compare", compare)
    measured = {
        name: made.measure(case.params, 0, 3)
        for name, made in serving.BENCHMARK.implementations.items()
        if serving.BENCHMARK.offers(case, name)
    }
    assert asked == [{**case.params, "rounds": 3}]
    assert {name: m.median for name, m in measured.items()} == {
        "jaxscale": 4.0,
        "llm": 2.0,
    }
    metrics = measured["jaxscale"].metrics
    assert metrics == {"tokens_per_second": 25.0, "cpu_us_per_token": 20.0}
    others = (c for c in serving.BENCHMARK.cases if c is not case)
    assert not any(serving.BENCHMARK.offers(c, "llm") for c in others)


def test_an_answer_that_fails_is_no_measurement():
    engine = FakeEngine(most=0)
    with (
        LiveServer(engine) as server,
        pytest.raises(RuntimeError, match=r"a call failed: .* 429"),
    ):
        serving_http.call(server.port, [{"prompt": "a"}], streams=1)


def test_words_have_text():
    tokenizer = serving_http.words(8)
    assert tokenizer.decode([3, 1]) == " w3 w1"


def test_host_work_is_measured_with_all_slots_taken():
    """Each step of it: those that end are replaced."""
    found = serving_host.host_seconds(slots=4, waiting=20, steps=60)
    assert len(found) == 60 and min(found) > 0
