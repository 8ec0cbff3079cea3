"""vLLM gets the requests of the others in a process that has it, or is left out.

What stands in for it answers each request with the tokens asked for, in two parts.
"""

import dataclasses
import textwrap

import pytest

from benchmarks import serving
from benchmarks.measure import command
from benchmarks.rivals import vllm_serving
from benchmarks.workloads.serving_cases import DEFAULTS


STAND_IN = {
    "__init__": """
        __version__ = "9.9"
        class SamplingParams:
            def __init__(self, **given):
                self.given = given
    """,
    "sampling_params": """
        class RequestOutputKind:
            DELTA = "delta"
    """,
    "usage.usage_lib": """
        class UsageContext:
            OPENAI_API_SERVER = "server"
    """,
    "engine.arg_utils": """
        class AsyncEngineArgs:
            def __init__(self, **given):
                self.given = given
    """,
    "v1.engine.async_llm": """
        import json, os, pathlib, sys
        from types import SimpleNamespace as Of

        class AsyncLLM:
            def from_engine_args(args, usage_context):
                assert os.environ["VLLM_USE_NCCL_SYMM_MEM"] == "0"
                assert "jax" not in sys.modules and usage_context == "server"
                folder = pathlib.Path(args.given["model"])
                config = json.loads(folder.joinpath("config.json").read_text())
                assert config["architectures"] == ["LlamaForCausalLM"]
                if config["vocab_size"] == 1:
                    raise ValueError("no such model")
                engine = AsyncLLM()
                slots = args.given.get("max_num_seqs", 1024)
                sizes = Of(max_num_seqs=slots, max_num_batched_tokens=8192)
                engine.vllm_config = Of(scheduler_config=sizes)
                return engine

            async def generate(self, prompt, params, name):
                assert params.given["ignore_eos"] and prompt["prompt_token_ids"]
                count = params.given["max_tokens"]
                for part in (count // 2, count - count // 2):
                    yield Of(outputs=[Of(token_ids=[0] * part)])

            def shutdown(self):
                print("a line at the end")
    """,
}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A folder of packages that has vLLM."""
    for name, code in STAND_IN.items():
        path = tmp_path.joinpath("vllm", *name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(code))
    monkeypatch.setenv(vllm_serving.PLACE, str(tmp_path))


@pytest.fixture
def case():
    (found,) = (c for c in serving.BENCHMARK.quick_cases if c.name == "poisson")
    return found


def measured(params):
    """The result of a case, on its real requests."""
    return serving.BENCHMARK.implementations["vllm"].measure(params, 0, 2)


def test_the_same_requests_at_both_sizes(stand_in, case):
    load = serving.load_of(dict(case.params), 0)
    equal, default = measured(case.params), measured(case.params | DEFAULTS)
    assert equal.metrics["slots"] == case.params["slots"] != 1024
    assert default.metrics["slots"] == 1024
    for result in (equal, default):
        assert result.versions == {"vllm": "9.9"} and len(result.seconds) == 2
        assert min(result.seconds) >= load.due[-1]  # none was sent early
        rate = sum(load.outputs) / result.median
        assert result.metrics["tokens_per_second"] == pytest.approx(rate, rel=0.5)
    other = dataclasses.replace(load, outputs=[n + 1 for n in load.outputs])
    names = {vllm_serving.digest(dataclasses.asdict(each)) for each in (load, other)}
    assert len(names) == 2


def test_stored_loads_are_what_they_were():
    """Rows of other days compare with these."""
    cases = {case.name: case for case in serving.BENCHMARK.cases}
    for name, digest in (
        ("saturated", "bc4f018f2b26cd87"),
        ("half_load", "8aa2f81953c4addc"),
        ("poisson_20ms", "8d97a466d6c5f682"),
    ):
        load = serving.load_of(dict(cases[name].params), 0)
        assert vllm_serving.digest(dataclasses.asdict(load)) == digest


def test_what_cannot_run_says_so(tmp_path, case, monkeypatch, stand_in):
    token = serving.token_case("llama_tiny", 2, 24, "int8")
    with pytest.raises(NotImplementedError, match="no weights to int8"):
        measured(token.params)
    bad = {"architectures": ["LlamaForCausalLM"], "vocab_size": 1}
    load = dataclasses.asdict(serving.load_of(dict(case.params), 0))
    with pytest.raises(RuntimeError, match=r"vLLM failed:(.|\n)*no such model"):
        vllm_serving.run(bad, load, 1, {})
    monkeypatch.setenv(vllm_serving.PLACE, str(tmp_path / "nothing"))
    monkeypatch.setenv("BENCHMARK_LOCK", str(tmp_path / "lock"))
    with pytest.raises(NotImplementedError, match="vLLM cannot be imported"):
        measured(case.params)


def test_a_command_goes_on_without_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(vllm_serving.PLACE, str(tmp_path))
    arguments = ["--quick", "--samples", "1", "--impl", "vllm"]
    assert command.main(serving.BENCHMARK, arguments) == 0
    said = capsys.readouterr().out
    assert said.count("not supported: vLLM cannot be imported") > 1
