"""The suite measures what is due, in lanes and in order, and loses no finished row."""

import importlib.util
import itertools
import json
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from benchmarks.measure import records
from benchmarks.publish import due, suite


ROOT = Path(__file__).parents[3]

BENCHMARK = """
import os, pathlib, time
from benchmarks.measure.harness import Benchmark, Case, Custom, Measurement

FOLDER = pathlib.Path({folder!r})

def measure(params, seed, samples):
    with open(FOLDER / "log", "a") as file:
        file.write(f"{{params['M']}}\\n")
    told = FOLDER / f"{{params['M']}}"
    if told.exists():
        exec(told.read_text())
    return Measurement([1e-3], None)

def never(params, seed, samples):
    raise NotImplementedError("no such thing")

BENCHMARK = Benchmark(
    name="fake",
    cases=[Case(f"case{{m}}", {{"M": m}}) for m in range(4)],
    quick_cases=[],
    inputs=lambda params, key: (),
    implementations={{
        "mosaic_gpu": Custom(measure),
        "rival": Custom(measure),
        "never": Custom(never),
    }},
    time="wall",
    samples=1,
    anywhere=True,
    selectors={{"rows": "M"}},
)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A benchmark of four cases, whose processes are real; its folder tells them what
    to do, and `log` holds what they did."""
    path = tmp_path / "fake.py"
    path.write_text(BENCHMARK.format(folder=str(tmp_path)))
    spec = importlib.util.spec_from_file_location("benchmarks.fake", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, "benchmarks.fake", module)
    python(
        tmp_path,
        monkeypatch,
        f"""
        sys.path.insert(0, {str(ROOT)!r})
        space = {{"__name__": "fake"}}
        exec(open({str(path)!r}).read(), space)
        from benchmarks.measure import command
        command.run(space["BENCHMARK"], sys.argv[3:])
        """,
    )
    monkeypatch.setattr(suite, "COMMANDS", (("fakes", "fake"),))
    monkeypatch.setattr(suite, "gpu_names", lambda: ["cpu"])
    monkeypatch.setattr(due, "START", 0.0)
    monkeypatch.setattr(due, "OTHER_SECONDS", 0.1)
    return tmp_path


def python(folder, monkeypatch, body):
    """Puts a script in the place of python; it gets the arguments of python."""
    script = folder / "python"
    body = textwrap.dedent(body)
    script.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def run(fake, *more):
    return suite.main(["--out", str(fake / "out"), "--commit", "abc", *more])


def rows(fake):
    path = fake / "out" / "cpu" / "fake.json"
    return [(row["case"], row["implementation"]) for row in records.load(path)["rows"]]


def log(fake):
    return (fake / "log").read_text().split()


def both(*cases):
    names = ("mosaic_gpu", "rival")
    return list(itertools.product((f"case{m}" for m in cases), names))


def test_what_is_due_is_measured_once(fake, capsys):
    assert run(fake) == 0
    assert rows(fake) == both(0, 1, 2, 3) and len(log(fake)) == 8
    out = capsys.readouterr().out
    assert "4 cases on 1 GPUs" in out and "done, 8 rows: fake --case case0" in out
    record = records.load(fake / "out/cpu/fake.json")
    assert all(row["metrics"]["run_seconds"] > 0 for row in record["rows"])
    # What is not supported is not tried again, and nothing is due.
    assert run(fake) == 0 and len(log(fake)) == 8
    assert "0 cases on 1 GPUs" in capsys.readouterr().out
    assert run(fake, "--plan") == 0
    assert "0 of 4 cases: 0 rows are missing, 0 stale" in capsys.readouterr().out


def time_is_over(monkeypatch, when, then=lambda: None):
    """Have the time for a process be over once something is, however long it takes."""

    class Child(subprocess.Popen):
        def wait(self, timeout=None):
            if timeout is not None:
                while not when():
                    time.sleep(0.01)
                then()
                raise subprocess.TimeoutExpired(self.args, timeout)
            return super().wait()

    monkeypatch.setattr(subprocess, "Popen", Child)


def test_a_run_that_is_cut_off_loses_the_case_in_progress_alone(fake, monkeypatch):
    (fake / "2").write_text("time.sleep(600)")
    with monkeypatch.context() as patch:
        time_is_over(patch, lambda: (fake / "log").exists() and "2" in log(fake))
        assert run(fake, "--minutes", "1.5") == 0
    assert rows(fake) == both(0, 1)
    assert not [*(fake / "out/cpu").glob("*.new")]
    (fake / "2").unlink()
    (fake / "log").unlink()
    assert run(fake) == 0
    assert rows(fake) == both(0, 1, 2, 3) and {*log(fake)} == {"2", "3"}


def test_a_case_that_takes_its_process_with_it_is_not_run_again(fake, capsys):
    (fake / "1").write_text("os.kill(os.getpid(), 9)")
    assert run(fake) == 0
    assert rows(fake) == both(0)
    assert run(fake) == 0
    assert rows(fake) == both(0, 2, 3) and log(fake).count("1") == 1
    assert "exit status -9, 2 rows" in capsys.readouterr().out


def test_damaged_files(fake, capsys):
    assert run(fake) == 0
    attempts = fake / "out" / suite.ATTEMPTS
    text = attempts.read_text()
    attempts.write_text(text + '{"commit": "abc", "bench')  # cut while it was written
    records.note_attempt(attempts, "abc", "fake", due.Case("new", {}), ["x"])
    found = records.attempts(attempts, "abc")
    assert len(found) == 5 and ("fake", "new", "{}", "x") in found
    assert "a damaged line is left out" in capsys.readouterr().err
    path = fake / "out/cpu/fake.json"
    path.write_text(path.read_text()[:-40])
    assert run(fake) == 1 and len(log(fake)) == 8
    assert f"{path}: " in (err := capsys.readouterr().err) and "nothing was" in err


def test_a_file_that_is_damaged_meanwhile_is_set_aside(tmp_path, capsys):
    record = records.load(records.RESULTS / "nvidia_h200" / "matmul.json")
    path = tmp_path / "matmul.json"
    path.write_text("{")
    records.add(record, path, None)
    assert records.load(path) == record
    assert (tmp_path / "matmul.json.damaged").read_text() == "{"
    assert "set aside" in capsys.readouterr().err


def test_processes_write_into_one_file(tmp_path):
    record = records.load(records.RESULTS / "nvidia_h200" / "matmul.json")
    path = tmp_path / "matmul.json"
    parts = [record | {"rows": [row]} for row in record["rows"]]
    threads = [
        threading.Thread(target=records.add, args=(part, path, ["none"]))
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records.load(path)["rows"]) == len(record["rows"])


def test_what_is_written_while_it_is_cut_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    records.replace(path, "old")

    def cut(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            records.replace(path, "new")
    assert path.read_text() == "old"


def test_a_plan_goes_to_a_machine_without_git(fake, capsys, monkeypatch):
    plan = fake / "plan.json"
    assert run(fake, "--plan", "--save", str(plan)) == 0
    monkeypatch.setattr(due, "History", None)  # nobody asks git
    assert run(fake, "--load", str(plan)) == 0
    assert rows(fake) == both(0, 1, 2, 3)
    assert run(fake, "--load", str(plan)) == 0 and len(log(fake)) == 8
    for text in ("[", "{}", '[{"benchmark": "fake"}]', plan.read_text()[:-9], "[3]"):
        plan.write_text(text)
        assert run(fake, "--load", str(plan)) == 1
        assert "is no plan" in capsys.readouterr().err


# --- Lanes ----------------------------------------------------------------------------


def process(number, name, gpus=1, seconds=0.0):
    benchmark = due.Benchmark(
        name=name,
        cases=[],
        quick_cases=[],
        inputs=lambda params, key: (),
        implementations={},
        devices=lambda params: gpus,
    )
    one = due.Due(
        benchmark=benchmark,
        case=due.Case(f"{number}", {}),
        states={},
        samples=None,
        topic="",
        seconds=seconds,
        cited=2,
    )
    return suite.Process(number, ["--case", f"{number}_*"], [one])


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
    python(tmp_path, monkeypatch, body)
    monkeypatch.setattr(due, "START", 0.0)
    monkeypatch.setattr(suite, "SHARING", (("one",), ("other",)))
    names = [*["own"] * 4, "other", *["one"] * 8]
    made = [process(i, name) for i, name in enumerate(names)]
    made += [process(20, "two", 2), process(21, "own")]
    suite.Suite(tmp_path / "out", "abc", 600, tmp_path).run_all(made, gpus=2)
    found = [json.loads(path.read_text()) for path in calls.iterdir()]
    by_name = {
        name: [call for call in found if call["line"][1] == f"benchmarks.{name}"]
        for name in ("own", "other", "one", "two")
    }
    assert {name: len(each) for name, each in by_name.items()} == {
        "own": 5,
        "other": 1,
        "one": 8,
        "two": 1,
    }
    (pair,), (other,), one = by_name["two"], by_name["other"], by_name["one"]
    *own, last = sorted(by_name["own"], key=lambda call: call["start"])
    # In the order of the plan: a group begins when the one before has ended.
    for before, after in itertools.pairwise([own, [other], one, [pair], [last]]):
        assert max(c["stop"] for c in before) <= min(c["start"] for c in after)
    assert {call["CUDA_VISIBLE_DEVICES"] for call in one} == {"0", "1"}
    for call in [*one, other]:
        assert call["BENCHMARK_LOCK"].endswith(f"{call['CUDA_VISIBLE_DEVICES']}.lock")
    for gpu in "01":
        lane = [c for c in own if c["CUDA_VISIBLE_DEVICES"] == gpu]
        assert all(c["BENCHMARK_LOCK"] is None for c in lane)
        assert all(a["stop"] <= b["start"] for a, b in itertools.pairwise(lane))
    assert pair["CUDA_VISIBLE_DEVICES"] == "0,1" and pair["BENCHMARK_LOCK"] is None
    assert capsys.readouterr().out.count("done, 1 rows") == 15


def test_time_is_over(tmp_path, monkeypatch, capsys):
    """What does not fit is not begun; what takes longer is ended with its children."""
    body = f"""
import subprocess
child = subprocess.Popen(["sleep", "600"])
with open({str(tmp_path / "draft")!r}, "w") as file:
    file.write(str(child.pid))
os.rename({str(tmp_path / "draft")!r}, {str(tmp_path / "child")!r})
time.sleep(600)
"""
    python(tmp_path, monkeypatch, body)
    monkeypatch.setattr(due, "START", 0.0)
    made = [process(0, "long", seconds=99.0), process(1, "slow"), process(2, "after")]
    measuring = suite.Suite(tmp_path / "out", "abc", 90.0, tmp_path)

    def end():
        measuring.end = time.monotonic()

    with monkeypatch.context() as patch:
        time_is_over(patch, (tmp_path / "child").exists, end)
        measuring.run_all(made, gpus=1)
    out = capsys.readouterr().out
    assert "out of time, 0 rows: slow" in out
    assert "no time for: long" in out and "no time for: after" in out
    child = Path("/proc") / (tmp_path / "child").read_text() / "stat"
    end = time.monotonic() + 120
    while is_running(child):  # it dies a moment after it was told to
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_suite_that_is_killed_leaves_nothing_on_a_gpu(tmp_path):
    child = tmp_path / "child"
    body = f"""
    import os, sys, time
    from pathlib import Path
    from benchmarks.publish import due, suite
    from tests.benchmarks.publish.test_suite import process
    if sys.argv[1:2] == ["-m"]:
        Path({str(child)!r}).write_text(str(os.getpid()))
        time.sleep(600)
    due.START = 0.0
    sys.executable = {str(tmp_path / "python")!r}
    one = process(0, "slow")
    folder = Path({str(tmp_path)!r})
    suite.Suite(folder / "out", "abc", 600.0, folder).run_all([one], gpus=1)
    """
    script = tmp_path / "python"
    head = f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    script.write_text(head + textwrap.dedent(body))
    script.chmod(0o755)
    with subprocess.Popen([script]) as killed:
        end = time.monotonic() + 120
        while not (child.exists() and child.read_text()):
            assert time.monotonic() < end and killed.poll() is None
            time.sleep(0.05)
        killed.kill()
    stat = Path("/proc") / child.read_text() / "stat"
    end = time.monotonic() + 120
    while is_running(stat):
        assert time.monotonic() < end
        time.sleep(0.05)


def is_running(stat):
    try:
        return stat.read_text().split(")")[-1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_what_hangs_leaves_time_for_others(tmp_path, monkeypatch, capsys):
    python(tmp_path, monkeypatch, "time.sleep(600 * ('benchmarks.hung' in sys.argv))")
    monkeypatch.setattr(due, "START", 0.0)
    monkeypatch.setattr(suite, "PATIENCE", 0.5)
    monkeypatch.setattr(suite.Suite, "_note_the_broken", lambda *arguments: None)
    made = [process(0, "hung"), process(1, "next", seconds=40.0)]
    suite.Suite(tmp_path / "out", "abc", 600, tmp_path).run_all(made, gpus=1)
    out = capsys.readouterr().out
    assert "it hangs, 0 rows: hung" in out and "done, 0 rows: next" in out


# --- The command line -----------------------------------------------------------------


def test_mistakes(capsys):
    for arguments, message in (
        (["attentoin"], "unknown topics"),
        (["--minutes", "0"], "above 0"),
        (["--minutes", "nan"], "above 0"),
        (["--save", "plan.json"], "give --plan too"),
    ):
        with pytest.raises(SystemExit):
            suite.main(arguments)
        assert message in capsys.readouterr().err


def test_without_a_gpu_nothing_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(suite, "gpu_names", list)
    assert suite.main(["--out", str(tmp_path)]) == 1
    assert "no GPU" in capsys.readouterr().err and not [*tmp_path.iterdir()]


def test_the_suite_touches_no_gpu():
    """Its children need them whole."""
    code = """
import sys
from benchmarks.publish import suite
assert suite.main(["matmul", "--plan", "--commit", "abc"]) == 0
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
