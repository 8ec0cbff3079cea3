"""The suite runs each command once, in lanes, and ends what takes too long."""

import importlib
import itertools
import json
import sys
import time

import pytest

from benchmarks import command, records, suite


def fake(tmp_path, monkeypatch, body):
    """Puts a script in the place of python; it gets the arguments of python."""
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def test_lanes_share_gpus_and_what_needs_several_runs_alone(
    tmp_path, monkeypatch, capsys
):
    calls = tmp_path / "calls"
    calls.mkdir()
    body = f"""
names = "CUDA_VISIBLE_DEVICES", "BENCHMARK_LOCK"
what = {{name: os.environ.get(name) for name in names}}
start = time.time()
time.sleep(0.2)
what |= {{"line": sys.argv[1:], "start": start, "stop": time.time()}}
json.dump(what, open({str(calls)!r} + f"/{{os.getpid()}}", "w"))
print("case mosaic_gpu 1.0 us  tflops 1")
"""
    fake(tmp_path, monkeypatch, body)
    monkeypatch.setattr(suite, "SHARING", (("other",), ("one",)))
    commands = [suite.Command("a", f"one --case '{i}_*'") for i in range(8)]
    commands += [suite.Command("a", f"own {i}") for i in range(4)]
    commands += [suite.Command("a", "other")]
    commands += [suite.Command("b", "two", 2), suite.Command("b", "four", 4)]
    suite.Suite(tmp_path / "out", "abc", 60).run_all(commands, gpus=2)
    found = [json.loads(path.read_text()) for path in calls.iterdir()]
    single = [call for call in found if call["line"][1] == "benchmarks.one"]
    (pair,) = (call for call in found if call["line"][1] == "benchmarks.two")
    assert len(found) == 14  # there are no four GPUs
    assert sorted(call["line"][3] for call in single) == [f"{i}_*" for i in range(8)]
    assert {call["CUDA_VISIBLE_DEVICES"] for call in single} == {"0", "1"}
    for call in single:
        assert call["BENCHMARK_LOCK"].endswith(f"{call['CUDA_VISIBLE_DEVICES']}.lock")
        assert call["stop"] <= pair["start"]
    own = [call for call in found if call["line"][1] == "benchmarks.own"]
    (other,) = (c for c in found if c["line"][1] == "benchmarks.other")
    assert other["BENCHMARK_LOCK"] is not None
    assert max(c["stop"] for c in own) <= other["start"]
    assert other["stop"] <= min(c["start"] for c in single)
    for gpu in "01":
        lane = [c for c in own if c["CUDA_VISIBLE_DEVICES"] == gpu]
        lane.sort(key=lambda c: c["start"])
        assert all(c["BENCHMARK_LOCK"] is None for c in lane)
        assert all(a["stop"] <= b["start"] for a, b in itertools.pairwise(lane))
    assert pair["CUDA_VISIBLE_DEVICES"] == "0,1" and pair["BENCHMARK_LOCK"] is None
    assert all(call["line"][-2:] == ["--commit", "abc"] for call in found)
    assert capsys.readouterr().out.count("done, 1 rows") == 14


def test_what_takes_too_long_is_ended(tmp_path, monkeypatch, capsys):
    fake(tmp_path, monkeypatch, "time.sleep(60)")
    start = time.monotonic()
    commands = [suite.Command("a", "slow"), suite.Command("a", "slow", 2)]
    suite.Suite(tmp_path / "out", None, 0.5).run_all(commands, gpus=2)
    assert time.monotonic() - start < 20
    out = capsys.readouterr().out
    assert "out of time, 0 rows: slow" in out and "no time for: slow" in out


@pytest.mark.parametrize("line", [c.line for c in suite.COMMANDS])
def test_commands_select_something(line):
    name, *arguments = suite.shlex.split(line)
    benchmark = importlib.import_module(f"benchmarks.{name}").BENCHMARK
    args = command._parser(benchmark).parse_args(arguments)
    assert command._chosen_cases(benchmark, args)
    for patterns in (args.impl, args.skip):
        names = list(benchmark.implementations)
        assert command._selected(names, patterns, "implementation")


def test_mistakes(capsys):
    for arguments, message in (
        (["attentoin"], "unknown topics"),
        (["--minutes", "0"], "above 0"),
    ):
        with pytest.raises(SystemExit):
            suite.main(arguments)
        assert message in capsys.readouterr().err


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(suite, "number_of_gpus", lambda: 0)
    assert suite.main(["--out", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_results_are_merged(monkeypatch, tmp_path):
    record = records.load(records.RESULTS / "nvidia_h200" / "matmul.json")

    def run_all(self, commands, gpus):
        records.dump(record, self.folder / "00_matmul/nvidia_h200/matmul.json")

    monkeypatch.setattr(suite, "number_of_gpus", lambda: 1)
    monkeypatch.setattr(suite.Suite, "run_all", run_all)
    assert suite.main(["matmul", "--out", str(tmp_path)]) == 0
    assert records.load(tmp_path / "nvidia_h200/matmul.json") == record
