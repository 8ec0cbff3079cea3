"""What TensorBoard is given is what the events say."""

import random
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxscale.observability import goodput, read_run
from jaxscale.observability.tensorboard import write_tensorboard
from tests.observability.histories import history


def points(directory):
    """Values and texts by tag and step, from the records of the files."""
    found = {}
    for path in directory.glob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                text = [x.decode() for x in value.tensor.string_val]
                found[value.tag, event.step] = text or value.simple_value
    return found


def test_scalars_and_texts(tmp_path):
    made = history(tmp_path / "run", 0, ["compute", "compute", "save", "compute"])
    for rank, computing in [(0, 0.25), (1, 0.5)]:
        where = {"rank": rank, "kind": "device"}
        made.write("profile", computing=computing, waiting=0.75 - computing, **where)
    made.write("memory", kind="memory", bytes_in_use=3, bytes_limit=4)
    step = made.step
    made.die(random.Random(0))
    run = read_run(made.out)
    write_tensorboard(run, tmp_path / "board")
    found = points(tmp_path / "board")
    assert found["computing/least", step] == 0.25
    assert found["computing/median", step] == 0.375
    assert found["computing/most", step] == 0.5
    assert found["computing/slowest_rank", step] == 1
    assert found["waiting/most", step] == 0.5
    assert found["memory/most", step] == 0.75
    done = run.ranks[0].steps.done
    assert found["step/seconds", 2] == pytest.approx(done[1] - done[0], rel=1e-6)
    assert ("step/seconds", 4) not in found  # it saved before
    shares = goodput(run).shares
    newest = max(run.ranks[0].steps.step)
    assert found["goodput/lost", newest] == pytest.approx(shares["lost"], rel=1e-6)
    assert [v for (tag, _), v in found.items() if tag.startswith("exit")] == [
        ["a test"]
    ]


def test_a_directory_in_use_is_refused(tmp_path):
    made = history(tmp_path / "run", 0, ["compute"])
    write_tensorboard(read_run(made.out), tmp_path / "board")
    with pytest.raises(ValueError, match="holds events of TensorBoard already"):
        write_tensorboard(read_run(made.out), tmp_path / "board")
