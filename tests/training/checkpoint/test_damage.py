"""A damaged file is never a traceback and never other parameters; full disks."""

import gc
import json
import random
import resource
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxscale.models.stack_layout import StackLayout
from jaxscale.sharding.parameters import partitioned
from jaxscale.training import Checkpointer, CheckpointNotWritten, DamagedCheckpoint
from jaxscale.training.checkpoint import record
from tests.changed_files import replaced
from tests.training.checkpoint.damage import READS_GO_ON


pytestmark = READS_GO_ON
CONFIG = {"model": {"num_layers": 2}, "seed": 0}


def state(step):
    a, b, c = jax.random.split(jax.random.key(step), 3)
    model = {"w": jax.random.normal(a, (32, 64)), "zeros": jnp.zeros((64, 4))}
    moments = jax.random.normal(b, (32, 64)).astype(jnp.bfloat16)
    return {"model": model, "moments": moments, "key_data": jax.random.key_data(c)}


def data(step):
    return {"row": step, "rates": [0.5, step]}


def same(found, step, part=None):
    want = state(step)[part] if part else state(step)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True)
    return all(np.array_equal(a.view(np.uint8), b.view(np.uint8)) for a, b in pairs)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of the steps 1 and 2."""
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory, config=CONFIG) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), data(step))
    return directory


@pytest.fixture
def two(saved, tmp_path):
    """A copy of them."""
    return shutil.copytree(saved, tmp_path / "two")


def lines(caplog):
    found = [r.getMessage() for r in caplog.records if r.name == "jaxscale.training"]
    caplog.clear()
    return found


def damaged(raw, how, rng):
    """The bytes of a file after an accident; None if it is gone."""
    if how == "flipped" and raw:
        place = rng.randrange(len(raw))
        return (
            raw[:place] + bytes([raw[place] ^ 1 << rng.randrange(8)]) + raw[place + 1 :]
        )
    return {"gone": None, "empty": b""}.get(how, raw[: len(raw) // 2])


def test_any_file_in_turn(two, caplog):
    """What is read is what was saved in that step, or the step before with a line.

    A bit flips in every other file; the rest are gone, empty or cut off.
    """
    rng, others = random.Random(0), ["gone", "empty", "cut off"]
    target, found = state(0), []
    files = sorted(file for file in (two / "2").rglob("*") if file.is_file())
    assert any(file.parent.name == "digests" for file in files)
    for i, file in enumerate(files):
        raw = file.read_bytes()
        for how in ("flipped",) if i % 2 else (others[i // 2 % 3],):
            content = damaged(raw, how, rng)
            file.unlink()
            if content is not None:
                file.write_bytes(content)
            with Checkpointer(two, config=CONFIG, read_only=True) as checkpointer:
                restored, position = checkpointer.restore(target)
                said = lines(caplog)
                model = checkpointer.restore_model(target["model"])
            caplog.clear()
            step = position["row"]
            assert same(restored, step) and position == data(step), (file, how)
            assert same(model, 1, "model") or same(model, 2, "model"), (file, how)
            assert len(said) == (step == 1), (file, how)
            assert all(
                line.startswith(f"checkpoint 2 in {two} is damaged and not used (")
                and "\n" not in line
                for line in said
            )
            found.append(step)
        file.write_bytes(raw)
    assert set(found) == {1, 2} and found.count(1) > len(found) / 4


def places(value, path=()):
    """The way to each field of what a JSON file holds, and to those within."""
    yield path
    inner = value.items() if isinstance(value, dict) else []
    inner = enumerate(value) if isinstance(value, list) else inner
    for key, x in inner:
        yield from places(x, (*path, key))


WRONG = [None, [], "x", -1, 10**40, {"a": {"b": [1]}}]


def json_files(step):
    for file in sorted(file for file in step.rglob("*") if file.is_file()):
        try:
            yield file, json.loads(file.read_bytes())
        except ValueError:  # not of JSON
            continue


@pytest.mark.filterwarnings(
    "ignore:(?s)Exception ignored in. <coroutine object"
    ":pytest.PytestUnraisableExceptionWarning"
)
def test_fields_of_other_types(two, caplog):
    """Valid JSON that says nonsense: the step before is taken, with a line."""
    rng, told, names = random.Random(0), 0, set()
    for file, content in json_files(two / "2"):
        names.add(file.name)
        raw, ways = file.read_bytes(), [*places(content)]
        if file.name == "_CHECKPOINT_METADATA":  # Orbax reads it before all others
            cases = [(way, rng.choice(WRONG)) for way in ways]
            cases += [((name,), "x") for name in content]
        else:
            cases = [(rng.choice(ways), rng.choice(WRONG)) for _ in range(3)]
            cases += [((), None)]
        for way, other in cases:
            file.write_text(json.dumps(replaced(content, way, other)))
            with Checkpointer(two, config=CONFIG, read_only=True) as checkpointer:
                restored, position = checkpointer.restore(state(0))
            said = lines(caplog)
            step = position["row"]
            assert same(restored, step) and len(said) == (step == 1), (file, way, other)
            assert all("checkpoint 2 in" in x and "\n" not in x for x in said)
            told += len(said)
        file.write_bytes(raw)
    assert {"_CHECKPOINT_METADATA", "_METADATA", "_sharding", "metadata"} <= names
    assert told > 20
    gc.collect()  # what Orbax has begun and not ended, with its warnings


def test_nonsense_in_an_older_step_does_not_keep_a_run_from_going_on(two):
    file = two / "1" / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"init_timestamp_nsecs": "x"}))
    with Checkpointer(two, keep=2, config=CONFIG) as checkpointer:
        assert same(checkpointer.restore(state(0))[0], 2)
        checkpointer.set_aside_after(2)
        checkpointer.save(3, state(3), data(3))
        checkpointer.wait()
        assert checkpointer.steps == [2, 3]
        assert same(checkpointer.restore(state(0))[0], 3)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("state", r"the digest of model\.w differs"),
        ("data", "the checksum of data differs"),
        ("config", "the checksum of config differs"),
    ],
)
def test_what_only_the_digests_see(saved, tmp_path, monkeypatch, part, message):
    """Files that are whole, of other content than the state had on the device."""
    of = record.CheckpointRecord.of

    def of_others(arrays, layers, **items):
        if part == "state":
            w = arrays["model.w"]
            arrays = arrays | {"model.w": w.at[3, 5].set(-w[3, 5])}
        return of(arrays, layers, **{**items, **({part: {}} if part in items else {})})

    directory = shutil.copytree(saved, tmp_path / "copy")
    monkeypatch.setattr(record.CheckpointRecord, "of", of_others)
    with Checkpointer(directory, config=CONFIG) as checkpointer:
        checkpointer.save(3, state(3), data(3))
        with pytest.raises(DamagedCheckpoint, match=f"checkpoint 3 in .*{message}"):
            checkpointer.restore(state(0), 3)
        restored, position = checkpointer.restore(state(0))
    assert same(restored, 2) and position == data(2)


@pytest.mark.parametrize("what", ["digests", "and what names them"])
def test_digests_that_are_lost_are_not_taken_for_an_older_version(two, caplog, what):
    shutil.rmtree(two / "2" / "digests")
    if what != "digests":
        (two / "2" / "_CHECKPOINT_METADATA").unlink()
    with Checkpointer(two, config=CONFIG, read_only=True) as checkpointer:
        restored, position = checkpointer.restore(state(0))
        (line,) = lines(caplog)
        with pytest.raises(DamagedCheckpoint, match=r"checkpoint 2 .*digests are gone"):
            checkpointer.restore(state(0), 2)
        with pytest.raises(DamagedCheckpoint, match=r"checkpoint 2 .*digests are gone"):
            checkpointer.restore_model(state(0)["model"], 2)
    assert same(restored, 1) and position == data(1)
    assert line == (
        f"checkpoint 2 in {two} is damaged and not used (ValueError: its digests are "
        "gone)"
    )


def test_a_checkpoint_of_a_version_without_digests_is_taken_with_a_line(two, caplog):
    shutil.rmtree(two / "2" / "digests")
    file = two / "2" / "_CHECKPOINT_METADATA"
    content = json.loads(file.read_text())
    del content["item_handlers"]["digests"]
    file.write_text(json.dumps(content))
    with Checkpointer(two, config=CONFIG, read_only=True) as checkpointer:
        assert checkpointer.config() == CONFIG and not lines(caplog)
        restored, position = checkpointer.restore(state(0))
    assert same(restored, 2) and position == data(2)
    (line,) = lines(caplog)
    assert line == f"checkpoint 2 in {two} is of a version without digests: not checked"


def test_another_type_is_wanted(two):
    """It is checked as it was saved, and then converted."""
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jnp.bfloat16, sharding=x.sharding),
        state(0)["model"],
    )
    with Checkpointer(two, read_only=True) as checkpointer:
        model = checkpointer.restore_model(target)
    want = np.asarray(state(2)["model"]["w"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(model["w"]), want)


class Layers(nnx.Module):
    """Five layers of a weight."""

    def __init__(self, seed):
        init = partitioned(nnx.initializers.normal(), "layers", "embed", "mlp")
        self.w = nnx.Param(init(jax.random.key(seed), (5, 3, 4), jnp.float32))


def test_stages_of_a_pipeline_have_the_digests_of_the_plain_stack(tmp_path):
    """Places without a layer among them; and they are read back into either layout."""
    layout = StackLayout(num_layers=5, stages=2, chunks=2)
    plain, staged = Layers(1), layout.arrange(Layers(1))
    assert staged.w.shape == (2, 2, 2, 3, 4)
    config, digests = {"model": {"num_layers": 5}}, []
    for name, model in (("plain", plain), ("staged", staged)):
        with Checkpointer(tmp_path / name, config=config) as checkpointer:
            checkpointer.save(1, {"model": model}, {})
        saved = json.loads((tmp_path / name / "1" / "digests" / "metadata").read_text())
        digests.append(saved["arrays"]["model.w"]["digest"])
        for target in (Layers(2), layout.arrange(Layers(2))):
            with Checkpointer(tmp_path / name, config=config) as checkpointer:
                restored, _ = checkpointer.restore({"model": target})
            want = plain if target.w.ndim == 3 else staged
            np.testing.assert_array_equal(restored["model"].w[...], want.w[...])
    assert digests[0] == digests[1]


def test_a_full_disk_leaves_older_checkpoints_alone(two):
    """The limit of a file's size stands for that of the disk: writes fail half-way."""
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(two, keep=2, config=CONFIG) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, most))
        try:
            with pytest.raises(CheckpointNotWritten) as error:
                checkpointer.save(3, state(3), data(3))
                checkpointer.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        assert str(error.value) == (
            f"a checkpoint could not be written to {two} (File too large); those of "
            "the steps [1, 2] are as they were; make room, or choose another output_dir"
        )
        restored, _ = checkpointer.restore(state(0))
        assert same(restored, 2)
        checkpointer.save(4, state(4), data(4))  # there is room again
        restored, _ = checkpointer.restore(state(0))
        assert same(restored, 4) and checkpointer.steps == [2, 4]


def test_a_save_that_fails_in_the_background_is_told_without_waiting(two):
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(two, keep=2, config=CONFIG) as checkpointer:
        checkpointer.check()
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, most))
        until = time.monotonic() + 120
        try:
            checkpointer.save(3, state(3), data(3))
            with pytest.raises(CheckpointNotWritten, match=r"steps \[1, 2\] are as"):
                while time.monotonic() < until:
                    checkpointer.check()
                    time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        checkpointer.save(4, state(4), data(4))
        while checkpointer.steps != [2, 4]:
            checkpointer.check()
            assert time.monotonic() < until
        restored, _ = checkpointer.restore(state(0))
    assert same(restored, 4)


def test_a_directory_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "checkpoints"):
        with pytest.raises(
            CheckpointNotWritten, match=rf"cannot be written to {path}: .*; choose"
        ):
            Checkpointer(path)
