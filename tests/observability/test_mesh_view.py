"""Who holds up a job and who waits, from events with known answers."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxscale.observability.layout import MeshLayout, find_layout, layout_args
from jaxscale.observability.mesh_view import mesh_view, standings, step_seconds
from jaxscale.observability.run import read_run
from tests.observability.runs import AXES, CUBE, event, hanging_cube, layout, write


@pytest.fixture
def written(tmp_path):
    """Events of ranks through the files of a run."""
    return lambda ranks: read_run(write(tmp_path, ranks))


@pytest.fixture
def view(written):
    def view(ranks, *, now=150.0, **options):
        run = written(ranks)
        found = find_layout(run)
        stand = standings(run, sorted(set(found.ranks)), cycle=1)
        options = {"usual": step_seconds(run), **options}
        return mesh_view(stand, found, now=now, **options)

    return view


@pytest.mark.parametrize("silent", range(8))
def test_a_silent_rank_is_named_and_all_others_wait_for_it(view, silent):
    found = view(hanging_cube(silent))
    assert found["silent"] == [silent]
    assert found["states"] == ["step 4, begin", "step 4, dispatched"]
    assert found["counts"] == [1, 7]
    pipe, data, tensor = (int(i[0]) for i in np.where(silent == CUBE))
    where = f"pipe {pipe}, data {data}, tensor {tensor} on node-{silent // 4}"
    assert f"rank {silent} ({where.replace(' on', ', on')})" in found["text"]
    assert "7 ranks wait for it, the farthest in step 4, dispatched" in found["text"]
    assert "for 44.8 s" in found["text"]  # 150 - 105.2
    # Three neighbors wait directly, three over one, and one over two others.
    direct = {(end, axis) for end, to, axis, is_direct in found["edges"] if is_direct}
    assert direct == {
        (int(CUBE[1 - pipe, data, tensor]), "pipe"),
        (int(CUBE[pipe, 1 - data, tensor]), "data"),
        (int(CUBE[pipe, data, 1 - tensor]), "tensor"),
    }
    assert all((to == silent) == is_direct for _, to, _, is_direct in found["edges"])
    assert {end for end, *_ in found["edges"]} == {*range(8)} - {silent}
    x, y, z, rank, state = found["points"][silent]
    assert (x, y, z, rank, state) == (data, pipe, tensor, silent, 0)


def test_a_rank_without_a_file_is_the_silent_one(view):
    ranks = hanging_cube()
    ranks[5] = ranks[3]  # does what all others do
    del ranks[6]
    ranks[5] = [layout(5), *ranks[5][1:]]
    found = view(ranks)
    assert found["silent"] == [6] and found["states"][0] == "nothing heard"
    assert found["points"][6][:4] == [1, 1, 0, 6]


def test_a_job_at_work_has_no_culprit(view):
    found = view(hanging_cube(), now=106.0)
    assert found["silent"] == [] and found["edges"] == []
    assert found["text"] == "The ranks are at work."
    # A step that usually takes long may be quiet for long.
    assert view(hanging_cube(), usual=20.0)["silent"] == []


def test_all_in_one_place_and_all_done(view):
    ranks = hanging_cube(silent=-1)
    assert "nobody stands out" in view(ranks)["text"]
    for known in ranks.values():
        known.append(event("bye", 4, 107.0))
    found = view(ranks, now=1e6)
    assert found["text"] == "All ranks have finished." and not found["silent"]


def test_the_first_error_is_the_culprit_and_suspects_come_first(view):
    ranks = hanging_cube()
    broken = {"kind": "fault", "args": {"error": "ValueError: <b>no</b>"}}
    ranks[2].append(event("error", 4, 106.0, **broken))
    ranks[3].append(event("error", 4, 106.9, **broken))
    found = view(ranks, hangs=True)
    assert found["silent"] == [2]
    assert "step 4, failed in dispatched" in found["states"]
    assert "ValueError: <b>no</b>" in found["text"]
    assert view(ranks, suspects=[7])["silent"] == [7]


def test_standings_are_those_of_a_cycle_and_a_time(written):
    ranks = hanging_cube()
    for rank in range(8):
        again = [layout(rank, cycle=2), event("restore", 0, 120.0, cycle=2)]
        ranks[rank] += again
    run = written(ranks)
    late = standings(run, range(8), cycle=2)
    assert {s.text for s in late.values()} == {"step 0, restore"}
    early = standings(run, range(8), cycle=1, until=103.15)
    assert {(s.step, s.phase) for s in early.values()} == {(2, "data")}


def test_without_a_supervisor_the_last_life_counts(written):
    def life(t, end):
        names = [("layout", 0, t), ("restore", 0, t + 1), (*end, t + 9)]
        return [event(*name, cycle=0) for name in names]

    ranks = {
        0: [*life(0.0, ("begin", 9)), *life(50.0, ("begin", 3))],
        1: life(0.0, ("begin", 9)),
    }
    stand = standings(written(ranks), [0, 1], cycle=0)
    assert [stand[n].text for n in (0, 1)] == ["step 3, begin", "nothing heard"]


def test_layout_args_come_back(written):
    devices = np.array([SimpleNamespace(process_index=i // 2) for i in range(8)])
    mesh = SimpleNamespace(
        devices=devices.reshape(2, 2, 1, 1, 2), shape=dict.fromkeys(AXES, 1) | AXES
    )
    config = SimpleNamespace(microbatches=4, chunks=2)
    # Process 2 has told nothing: its places are those that are left.
    ranks = {
        n: [event("layout", 0, 1.0, args=layout_args(mesh, n, config))]
        for n in (0, 1, 3)
    }
    found = find_layout(written(ranks))
    assert found.ranks == (0, 0, 1, 1, 2, 2, 3, 3)
    assert (found.microbatches, found.chunks, found.stages) == (4, 2, 2)
    assert found.name(1).startswith("rank 1 (pipe 0, data 1, tensor 0-1, on ")


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"axes": {}, "places": []},
        {"axes": {"a": "2"}, "places": [0]},
        {"axes": {"a": 2**40}, "places": [0]},
        {"axes": {"a": 2}, "places": ["0"]},
        {"axes": [2], "places": [0]},
    ],
)
def test_damaged_layouts_are_passed_over(written, args):
    ranks = {n: [event("layout", 0, 1.0, args=args)] for n in (0, 4)}
    found = find_layout(written(ranks))
    assert (found.axes, found.ranks) == ({"rank": 2}, (0, 4))


def test_lines_are_the_neighbors_along_each_axis():
    cube = MeshLayout(axes={"a": 2, "b": 3}, ranks=tuple(range(6)))
    assert cube.lines(4) == {"a": [1], "b": [3, 5]}
