"""What is stale, what is missing, and in which order it is measured."""

import json
import random
import subprocess
import sys
import types

import jax
import pytest

from benchmarks.measure import command, records
from benchmarks.measure.harness import Benchmark, Case, Custom
from benchmarks.publish import due, headlines, kernel_code, stale, suite
from pallas_kernels.mosaic import H200
from tests import manifest


KERNELS = {"op": {"a": "k 1", "b": "k 2"}, "other": {"x": "k 3"}}


def git(root, *arguments):
    done = subprocess.run(
        ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Commits files and kernels, and returns the commit."""
    package = tmp_path / "pallas_kernels"
    monkeypatch.setattr(kernel_code, "PACKAGE", package)
    git(tmp_path, "init", "-q")

    def commit(code, kernels, version="1", other="o = 1"):
        for name, text in (("op", code), ("other", other), ("mosaic", "m = 1")):
            (package / name).mkdir(parents=True, exist_ok=True)
            (package / name / "__init__.py").write_text(text)
        (package / "tuned").mkdir(exist_ok=True)
        (package / "tuned" / f"{H200.name}.json").write_text("{}")
        if kernels is not None:
            (tmp_path / "tests").mkdir(exist_ok=True)
            text = json.dumps({"jax": version, "code": {}, "kernels": kernels})
            (tmp_path / "tests" / "manifest.json").write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-q", "-m", "c", "--allow-empty")
        return git(tmp_path, "rev-parse", "--short", "HEAD")

    return tmp_path, commit


def benchmark(*kernels, cases=("a", "b"), names=("mosaic_gpu", "dense"), **more):
    def measure(params, seed, samples):
        raise AssertionError("nothing is measured")

    return Benchmark(
        name="fake",
        cases=[Case(name, {"M": i}) for i, name in enumerate(cases)],
        quick_cases=[],
        inputs=lambda params, key: (),
        implementations={name: Custom(measure) for name in names},
        kernels=kernels,
        time="wall",
        **more,
    )


def test_stale_is_what_cannot_be_shown_to_be_the_same(repository):
    root, commit = repository
    before = commit("v = 0", None)
    first = commit("v = 1", KERNELS)
    comment = commit("v = 1  # one", KERNELS)
    changed = {"op": {"a": "k 1", "b": "k 9", "c": "k 4"}, "other": KERNELS["other"]}
    last = commit("v = 2", changed)
    history = due.History(root)
    one = benchmark("op", cases=("a", "b", "unknown"))
    a, b, unknown = one.cases
    for old in (first, comment):
        assert history.stale(one, a, "mosaic_gpu", old) is None
        assert (
            history.stale(one, b, "mosaic_gpu", old)
            == f"kernels of op changed since {old}"
        )
        # Where its case is not written down, all of the op's must agree.
        assert "kernels of op" in (history.stale(one, unknown, "mosaic_gpu", old) or "")
    assert history.stale(one, b, "mosaic_gpu", last) is None
    assert "has no manifest" in (history.stale(one, a, "mosaic_gpu", before) or "")
    assert "has no manifest" in (history.stale(one, a, "mosaic_gpu", "0123456") or "")
    # A model runs kernels of both at shapes of its own.
    both = benchmark("other", "op", cases=("a",))
    assert "kernels of op" in (
        history.stale(both, both.cases[0], "mosaic_gpu", first) or ""
    )
    # The files of the other are the same since before there was a manifest.
    other = benchmark("other")
    assert history.stale(other, other.cases[0], "mosaic_gpu", before) is None
    assert due.History(root).stale(benchmark(), a, "mosaic_gpu", "0123456") is None


def test_kernels_that_a_row_does_not_run_make_it_no_older(repository):
    root, commit = repository
    old = commit("v = 1", KERNELS)
    commit("v = 2", {"op": {"a": "k 9"}, "other": KERNELS["other"]})
    runs = lambda case, name, op: op == "other" or case.params["M"] == 1  # noqa: E731
    one = benchmark("other", "op", runs=runs)
    history = due.History(root)
    a, b = (history.stale(one, case, "mosaic_gpu", old) for case in one.cases)
    assert a is None and b == f"kernels of op changed since {old}"


def test_gradients_that_a_row_does_not_run_make_it_no_older(repository):
    root, commit = repository
    forward = "k 1, k 2"
    old = commit("v = 1", {"op": {"a": f"{forward}, k_backward 3"}, "other": {}})
    commit("v = 2", {"op": {"a": f"{forward}, k_backward 4"}, "other": {}})
    history = due.History(root)
    one = benchmark("op", cases=("a",))
    trains, serves = (Case("a", {"pass": p}) for p in ("fwd_bwd", "fwd"))
    assert history.stale(one, trains, "mosaic_gpu", old)
    assert history.stale(one, serves, "mosaic_gpu", old) is None
    whole = due.load_benchmark("encoder")
    assert not whole.trains(whole.cases[0])


def test_training_runs_collective_kernels_where_tensors_are_split():
    one = due.load_benchmark("training")
    by_name = {case.name: case for case in one.cases}
    alone, split = by_name["llama_1b_4k"], by_name["llama3_8b_tp4"]
    assert not one.runs(alone, "jaxscale", "collective_matmul")
    assert one.runs(split, "jaxscale", "collective_matmul")
    assert one.runs(alone, "jaxscale", "varlen_attention")
    assert not one.runs(alone, "jaxscale", "scaled_matmul")
    assert one.runs(alone, "jaxscale_fp8", "scaled_matmul")


def test_rows_of_changed_kernels_are_marked(repository, monkeypatch):
    root, commit = repository
    old = commit("v = 1", KERNELS)
    new = commit("v = 2", {"op": {"a": "k 9"}, "other": KERNELS["other"]})
    one = benchmark("op", names=("mosaic_gpu", "torch_x"))
    module = types.SimpleNamespace(BENCHMARK=one)
    monkeypatch.setitem(sys.modules, "benchmarks.fake", module)
    rows = [("a", 0, name, 0, {"commit": old}) for name in ("mosaic_gpu", "torch_x")]
    rows += [("a", 0, "mosaic_gpu", 0, {"commit": new})]
    rows += [("a", 0, "mosaic_gpu", 0, {"commit": new, "jax": "0.1"})]
    history = stale.history(root)
    assert history is not None
    found = history.mark(record(rows))
    assert [row["stale"] for row in found["rows"]] == [True, False, False, True]
    assert stale.history(root / "pallas_kernels") is None  # no clone


def test_changes_that_are_not_committed_count(repository):
    root, commit = repository
    head = commit("v = 1", None)
    commit("v = 1", KERNELS)
    one = benchmark("op")
    assert due.History(root).stale(one, one.cases[0], "mosaic_gpu", head) is None
    (root / "pallas_kernels" / "op" / "__init__.py").write_text("v = 3")
    assert "changed since" in (
        due.History(root).stale(one, one.cases[0], "mosaic_gpu", head) or ""
    )


def test_another_jax_makes_other_kernels(repository):
    root, commit = repository
    old = commit("v = 1", KERNELS)
    commit("v = 2", KERNELS, version="2")
    one = benchmark("op")
    assert "JAX did" in (
        due.History(root).stale(one, one.cases[0], "mosaic_gpu", old) or ""
    )


def record(rows):
    return {
        "benchmark": "fake",
        "device": "cpu",
        "num_devices": 1,
        "jax": jax.__version__,
        "commit": "abc",
        "date": "2026-11-24",
        "command": "",
        "timing": "wall time",
        "rows": [
            {
                "case": case,
                "params": {"M": m},
                "implementation": name,
                "time_us": 1.0,
                "metrics": {"run_seconds": seconds} if seconds else {},
                "max_rel_error": None,
            }
            | more
            for case, m, name, seconds, more in rows
        ],
    }


class Never:
    """Nothing changed but what is said."""

    def stale(self, benchmark, case, name, commit):
        return "changed" if commit == "old" else None


def plan(monkeypatch, tmp_path, one, rows, lines=(("t", "fake"),), **options):
    monkeypatch.setitem(
        sys.modules, "benchmarks.fake", types.SimpleNamespace(BENCHMARK=one)
    )
    records.dump(record(rows), tmp_path / "cpu" / "fake.json")
    history: due.History = Never()  # type: ignore[assignment]
    return due.plan(lines, [tmp_path / "cpu"], history, **options)


def test_states(monkeypatch, tmp_path):
    one = benchmark("op", cases=("a", "b", "c"))
    rows = [
        ("a", 0, "mosaic_gpu", 4.0, {}),
        ("a", 0, "dense", None, {"commit": "old"}),  # XLA's is none of our kernels
        ("b", 1, "mosaic_gpu", 8.0, {"commit": "old"}),
        ("b", 1, "dense", None, {"jax": "0.1"}),
        ("gone", 7, "dense", None, {}),
    ]
    found = plan(monkeypatch, tmp_path, one, rows)
    assert [dict(one.states) for one in found] == [
        {"mosaic_gpu": "fresh", "dense": "fresh"},
        {"mosaic_gpu": "changed", "dense": "of JAX 0.1"},
        {"mosaic_gpu": "missing", "dense": "missing"},
    ]
    assert [one.rows for one in found] == [
        [],
        ["mosaic_gpu", "dense"],
        ["mosaic_gpu", "dense"],
    ]
    # Its own seconds, or the median of its implementation's, or else of any.
    assert [one.seconds for one in found] == [4.0 + 6.0, 8.0 + 6.0, 12.0]
    # A rival of another version than the installed one, if one is installed.
    monkeypatch.setattr(due, "installed_version", {"rival": "2"}.get)
    for version, want in (("1", "of rival 1"), ("2", "fresh")):
        versions = {"absent": "1", "rival": version}
        rows = [("a", 0, "dense", None, {"versions": versions})]
        (found, *_) = plan(monkeypatch, tmp_path, one, rows)
        assert found.states["dense"] == want
    # A rival that is slower than at more work is a result: it is not measured again.
    one = benchmark("op", cases=("a", "b"), names=("mosaic_gpu", "torch_x"))
    times = [("a", 0, 1.1), ("b", 1, 1.0)]
    rows = [
        (case, m, name, None, {"time_us": t, "commit": "c"})
        for case, m, t in times
        for name in one.implementations
    ]
    (a, b) = plan(monkeypatch, tmp_path, one, rows)
    assert not a.rows and not b.rows
    # Where no name is ours, all may be.
    steps = benchmark("op", cases=("a",), names=("one", "two"))
    rows = [("a", 0, "one", None, {"commit": "old"}), ("a", 0, "two", None, {})]
    (found,) = plan(monkeypatch, tmp_path, steps, rows)
    assert found.states == {"one": "changed", "two": "fresh"}
    assert found.seconds == 2 * due.OTHER_SECONDS


def test_order_is_that_of_worth(monkeypatch, tmp_path):
    (tmp_path / "docs").mkdir()
    marker = "<!-- table:fake {} -->\n<!-- /table -->"
    (tmp_path / "README.md").write_text(marker.format("cases=d* M=3,4"))
    (tmp_path / "docs" / "a.md").write_text(marker.format("M=1"))
    cited = due.citations("nvidia_h200", tmp_path)
    monkeypatch.setattr(due, "citations", lambda device: cited)
    one = benchmark("op", cases=("a", "b", "c", "d1", "d2", "d3"))
    lines = (("t", "fake --case c d* --samples 3"), ("t", "fake --case b"))
    found = plan(monkeypatch, tmp_path, one, [("a", 0, "dense", None, {})], lines)
    assert [(one.case.name, one.cited) for one in found] == [
        ("d1", 0),
        ("d2", 0),
        ("b", 1),
        ("c", 2),
        ("d3", 2),
        ("a", 2),
    ]
    assert [one.samples for one in found] == [3, 3, None, 3, 3, None]
    assert [*found[-1].states] == ["dense"]  # no line asks for it, but it is stored


def test_the_table_of_the_readme_cites_its_cases(tmp_path, monkeypatch):
    (tmp_path / "README.md").write_text("<!-- table:headlines -->\n<!-- /table -->")
    one = headlines.Headline(
        task="s", what="w", page="p", file="fake", cases=("a", "b"), params={"M": 1}
    )
    monkeypatch.setattr(headlines, "HEADLINES", (one,))
    ((rank, shows),) = due.citations("nvidia_h200", tmp_path)
    fake = benchmark("op", cases=("a", "b", "c"))
    assert rank == 0 and [shows(fake, case) for case in fake.cases] == [0, 1, 0]


@pytest.fixture(scope="module")
def everything():
    return due.plan(suite.COMMANDS, [], due.History())


def test_what_no_case_can_give_is_not_due(everything):
    """Gradients of forms that have none, sums by kernels of gathers, ..."""
    wanted = {}
    for one in everything:
        params = one.case.params
        kind = params.get("pass") or params.get("kind") or params.get("model")
        wanted.setdefault((one.benchmark.name, kind), set()).update(one.states)
    attention, gathers, sums, bert, deberta = (
        wanted[key]
        for key in (
            ("varlen_attention", "fwd"),
            ("collective_matmul", "all_gather"),
            ("collective_matmul", "all_reduce"),
            ("encoder", "bert_base"),
            ("encoder", "deberta_v3_base"),
        )
    )
    assert "mosaic_gpu_any_order" not in attention and "flash_attn_4" in attention
    assert "xla_one_shot" not in gathers and "order_of_k" in gathers
    assert "low_latency" in sums and "order_of_k" not in sums
    assert "flash_deberta" not in bert and "torch_sdpa" in bert
    assert "flash_deberta" in deberta and "torch_sdpa" not in deberta


def test_commands_ask_for_rows(everything):
    """Each line of the suite selects something, and what a table shows comes first."""
    for topic, line in suite.COMMANDS:
        name, *arguments = suite.due.shlex.split(line)
        cases, names, _ = command.selected(due.load_benchmark(name), arguments)
        assert topic and cases and names
    assert [one.cited for one in everything] == sorted(one.cited for one in everything)
    assert {one.cited for one in everything} == {0, 1, 2}
    assert {one.gpus for one in everything} == {1, 2, 4}


def test_kernels_are_those_of_the_manifest():
    """What a benchmark says of its kernels is written down under these names."""
    written = manifest.read()["kernels"]
    for name in {line.split()[0] for _, line in suite.COMMANDS}:
        one = due.load_benchmark(name)
        assert {*one.kernels} <= {*written}
        if name in written and name != "tile_sparse_matmul":
            cases = {one.spec(case) for case in one.cases}
            assert cases <= {*written[name]}, name


def test_processes_measure_each_case_once(everything):
    chosen = random.Random(0).sample(everything, 150)
    order = {id(one): i for i, one in enumerate(everything)}
    chosen.sort(key=lambda one: order[id(one)])
    wanted = {
        (one.benchmark.name, one.case.name, str(one.case.params)) for one in chosen
    }
    seen = []
    for arguments, cases in due.processes(chosen):
        one = cases[0].benchmark
        selected, names, samples = command.selected(one, arguments)
        assert names == [*cases[0].states] and samples == cases[0].samples
        alone = due.selection(one, [cases[0].case])
        least, *_ = command.selected(one, alone)
        brought = [(one.name, c.name, str(c.params)) for c in selected]
        if len(selected) > len(least):  # joined
            assert sum(c.seconds for c in cases) <= due.LONGEST
            assert sorted(brought) == sorted(
                (one.name, c.case.name, str(c.case.params)) for c in cases
            )
        seen += [(one.name, c.case.name, str(c.case.params)) for c in cases]
    assert len(seen) == len(wanted) and {*seen} == wanted


def test_processes_join_what_a_command_line_selects(monkeypatch, tmp_path):
    cases = [Case(name, {"M": m}) for name in "ab" for m in (1, 2)]
    one = benchmark("op", selectors={"rows": "M"})
    one.cases = cases
    found = plan(monkeypatch, tmp_path, one, [])
    ((arguments, joined),) = due.processes(found)
    assert [c.case for c in joined] == cases
    assert arguments[:6] == ["--case", "a", "b", "--rows", "1", "2"]
    # Three of the four are no product.
    parts = [[c.case for c in each] for _, each in due.processes(found[:3])]
    assert parts == [cases[:2], [cases[2]]]


def test_what_no_command_line_tells_apart_runs_once(monkeypatch, tmp_path):
    """As the seeds of an experiment: one line measures all, however long they take."""
    one = benchmark("op", offers=lambda case, name: (case.name, name) != ("b", "dense"))
    one.cases = [Case(name, {"seed": i}) for name in "ab" for i in range(3)]
    found = plan(monkeypatch, tmp_path, one, [])
    assert [one.rows for one in found] == [["mosaic_gpu", "dense"]] * 3 + [
        ["mosaic_gpu"]
    ] * 3
    monkeypatch.setattr(due, "LONGEST", 1.0)
    made = [(line, [c.case for c in each]) for line, each in due.processes(found)]
    assert made == [
        (["--case", "a", "--impl", "mosaic_gpu", "dense"], one.cases[:3]),
        (["--case", "b", "--impl", "mosaic_gpu"], one.cases[3:]),
    ]
    # Where only some are due the line measures the others too, but once.
    ((_, some),) = due.processes([found[0], found[2]])
    assert [c.case for c in some] == [one.cases[0], one.cases[2]]


def test_of_another_gpu_stored_rows_alone_are_wanted(monkeypatch, tmp_path):
    one = benchmark("op", cases=("a", "b"))
    rows = [("a", 0, "mosaic_gpu", None, {"commit": "old"})]
    found = plan(monkeypatch, tmp_path, one, rows, stored_only=True)
    assert [(each.case.name, each.states) for each in found] == [
        ("a", {"mosaic_gpu": "changed"})
    ]


def test_a_plan_lists_every_gpu_that_has_rows(monkeypatch):
    found = suite.plans([("training", "training")])
    default, other = found
    assert default == "nvidia_h200" and found[default]
    assert other.startswith("nvidia_h100") and found[other]


def test_the_list_and_its_commands(monkeypatch, tmp_path, capsys):
    one = benchmark("op")
    rows = [("a", 0, name, 4.0, {}) for name in ("mosaic_gpu", "dense")]
    rows += [("b", 1, "mosaic_gpu", 8.0, {"commit": "old"})]
    found = plan(monkeypatch, tmp_path, one, rows)
    monkeypatch.setattr(suite, "plans", lambda lines: {"cpu": found})
    suite.main([])
    listed = capsys.readouterr().out
    assert "fake b  changed: mosaic_gpu; missing: dense" in listed
    assert "1 of 2 cases: 1 rows are missing, 1 stale" in listed
    suite.main(["--commands"])
    command = "python -m benchmarks.fake --case b --impl mosaic_gpu dense"
    assert f"# cpu\n{command}  # 0.5 min on 1 GPU\n" == capsys.readouterr().out
    with pytest.raises(SystemExit):
        suite.main(["attentoin"])
    assert "unknown topics" in capsys.readouterr().err
