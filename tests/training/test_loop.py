"""`fit` from end to end: exact resumption, other meshes, signals, hooks."""

import dataclasses
import json
import math
import os
import resource
import shutil
import signal
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxscale
from jaxscale.models import Decoder, DecoderConfig, save
from jaxscale.models.families.llama import llama_tiny
from jaxscale.models.tokenizer import Tokenizer
from jaxscale.observability import find_layout, read_run
from jaxscale.sharding import MeshConfig
from jaxscale.sharding.parameters import logical_axes
from jaxscale.supervision import EventLog, read_events
from jaxscale.training import loop
from jaxscale.training import run as run_directory
from jaxscale.training.checkpoint.digest import ReplicasDiffer
from jaxscale.training.checkpoint.steps import (
    CheckpointNotWritten,
    DamagedCheckpoint,
    complete_steps,
)
from jaxscale.training.checkpoint.store import Checkpointer, named_leaves
from jaxscale.training.config import TrainConfig
from jaxscale.training.data.corpus import TokenCorpus
from jaxscale.training.data.packed import (
    DataConfig,
    PackedBatches,
    TextData,
    _LocalBatches,
)
from jaxscale.training.loop import fit, packed_batches
from jaxscale.training.monitoring.divergence import Diverged
from jaxscale.training.monitoring.monitor import Writer
from jaxscale.training.optimizer import OptimizerConfig
from jaxscale.training.run import from_dict
from jaxscale.training.step import next_token_loss
from tests.tiers import exhaustive
from tests.training.checkpoint.damage import READS_GO_ON
from tests.training.checkpoint.test_digest import broken_on


MODEL = dataclasses.replace(
    llama_tiny(),
    vocab_size=32,
    d_model=32,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
DATA = DataConfig(vocab_size=32, seq_len=16, batch_size=8, max_sequences=4, prefetch=0)
CONFIG = TrainConfig(
    model=MODEL,
    data=DATA,
    optimizer=OptimizerConfig(learning_rate=0.02, warmup_steps=2, weight_decay=0.0),
    mesh=MeshConfig(data=2, fsdp=2),
    dtype="float32",
    scan_layers=True,  # less to compile
    steps=6,
    loss_chunk=8,
    eval_every=100,
    checkpoint_every=3,
)
DEVICES = jax.devices()[:4]


def corpus(seed, documents=40):
    """Documents that repeat a random pair: a copy task."""
    rng = np.random.default_rng(seed)
    return TokenCorpus.from_ids(
        [
            np.tile(rng.integers(1, 32, 2), int(rng.integers(2, 8)))
            for _ in range(documents)
        ]
    )


TEXT = TextData(
    tokenizer=Tokenizer.train(["abc"], 300), train=corpus(0), held_out=corpus(1, 10)
)


pytestmark = [pytest.mark.usefixtures("compile_once"), READS_GO_ON]


class Losses(Writer):
    """Collects the records by step."""

    def __init__(self):
        self.steps, self.evaluations = {}, {}

    def write(self, record):
        target = self.steps if "loss" in record else self.evaluations
        target[record["step"]] = record

    def rates(self):
        return [record["lr"] for record in self.steps.values()]

    def losses(self):
        return {step: record["loss"] for step, record in self.steps.items()}


def run(config, *, evaluate=False, **options):
    """Evaluations are compiled apart: only for tests that look at them."""
    writer = Losses()
    train, held_out = packed_batches(config, TEXT, DEVICES)
    result = fit(
        config,
        train_data=train,
        eval_data=held_out if evaluate else None,
        writers=[writer],
        devices=DEVICES,
        **options,
    )
    return result, writer


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """A run of six steps on a 2 x 2 mesh, with checkpoints at three and six."""
    directory = str(tmp_path_factory.mktemp("unbroken"))
    config = dataclasses.replace(CONFIG, output_dir=directory)
    return config, *run(config, evaluate=True)


def test_a_supervisor_has_checkpoints_and_batches_left_out(
    unbroken, tmp_path, monkeypatch
):
    config, _, whole = unbroken
    shutil.copytree(config.output_dir, tmp_path / "run")
    events = EventLog(resume_before=5, skips={5: 2, 9: 1})
    monkeypatch.setattr(loop, "current", lambda: events)
    config = dataclasses.replace(config, output_dir=str(tmp_path / "run"))
    _, continued = run(config)
    assert list(continued.losses()) == [4, 5, 6]  # after 3: 6 is aside
    assert (tmp_path / "run" / "checkpoints" / "6.aside").is_dir()
    losses, before = continued.losses(), whole.losses()
    assert losses[4] == before[4]
    assert losses[5] != before[5] and losses[6] != before[6]
    file = tmp_path / "run" / "checkpoints" / "6" / "data" / "metadata"
    assert json.loads(file.read_text())["row"] == (6 + 2) * DATA.batch_size


def test_a_step_is_gone_back_to_or_it_is_an_error(unbroken, tmp_path, monkeypatch):
    """Never another one in its place; a supervisor's next start goes on from there."""
    config, _, writer = unbroken
    config = dataclasses.replace(config, output_dir=str(tmp_path), step=3)
    saved = tmp_path / "checkpoints"
    shutil.copytree(f"{unbroken[0].output_dir}/checkpoints", saved)
    _, again = run(config)
    assert again.losses() == {s: writer.losses()[s] for s in (4, 5, 6)}
    assert {path.name for path in saved.iterdir()} == {"3", "6", "6.aside"}
    monkeypatch.setattr(loop, "current", lambda: EventLog(is_first=False))
    assert run(config)[1].losses() == {}  # of the newest, there is nothing left to do
    monkeypatch.undo()

    with pytest.raises(FileNotFoundError, match="no checkpoint of step 4"):
        run(dataclasses.replace(config, step=4))
    for path in (saved / "6" / "state").rglob("d/*"):
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(DamagedCheckpoint, match=r"checkpoint 6 .* is damaged"):
        run(dataclasses.replace(config, step=6))
    assert {path.name for path in saved.iterdir()} == {"3", "6", "6.aside"}


def test_a_save_that_fails_ends_the_run_at_the_next_step(tmp_path):
    config = dataclasses.replace(
        CONFIG, output_dir=str(tmp_path), steps=50, checkpoint_every=10
    )
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    reached = []

    def hook(step, state, metrics):
        reached.append(step)
        if step == 20:  # no file may be longer, as on a full disk
            resource.setrlimit(resource.RLIMIT_FSIZE, (4000, most))
        if step > 20:  # it is written meanwhile, on a busy host for longer
            time.sleep(0.2 if step < 25 else 20)

    try:
        with pytest.raises(CheckpointNotWritten, match="could not be written"):
            run(config, hooks=[hook])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert 20 <= reached[-1] < 30


def interrupt_after(step):
    def hook(current, state, metrics):
        if current == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return hook


def test_loss_falls_and_records_are_complete(unbroken):
    _, result, writer = unbroken
    assert not result.interrupted
    assert int(result.state.step) == 6
    losses = writer.losses()
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert losses[6] < losses[1] - 0.2
    assert result.evaluation.loss < np.log(32) - 0.2
    assert writer.evaluations[6]["eval_loss"] == result.evaluation.loss
    record = writer.steps[6]
    assert record["mfu_causal"] is None  # no peak is known for a CPU
    assert record["tokens_per_second_per_device"] > 0
    assert record["data_seconds"] > 0  # of this run, which prefetches nothing
    assert 0.5 < record["epochs"] < 20
    assert record["lr"] == pytest.approx(0.002 + 0.009 * (1 + np.cos(np.pi * 3 / 4)))


def test_the_next_batch_is_placed_while_a_step_is_held(tmp_path, monkeypatch):
    placed = threading.Semaphore(0)
    make = _LocalBatches.__getitem__

    def watched(self, step):
        batch = jax.block_until_ready(make(self, step))
        placed.release()
        return batch

    monkeypatch.setattr(_LocalBatches, "__getitem__", watched)

    def hold(step, state, metrics):
        # Batches up to this step were placed, and one more without being asked for.
        expected = 2 if step == 1 else 1
        for _ in range(expected):
            assert placed.acquire(timeout=120)

    data = dataclasses.replace(DATA, prefetch=1)
    config = dataclasses.replace(
        CONFIG, data=data, steps=3, output_dir=str(tmp_path / "run")
    )
    train, _ = packed_batches(config, TEXT, DEVICES)
    fit(config, train_data=train, writers=[], devices=DEVICES, hooks=[hold])


@pytest.mark.parametrize(("compared", "saved"), [(2, 5), (5, 2)])
def test_a_device_that_computes_wrong_values_is_named(tmp_path, compared, saved):
    """By a comparison or before a save; no checkpoint has what is wrong."""
    config = dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(data=4),
        rules="dp",
        check_replicas_every=compared,
        checkpoint_every=saved,
        output_dir=str(tmp_path),
    )
    passed = []

    def spoil(step, state, metrics):
        passed.append(step)
        leaves, structure = jax.tree.flatten(state)
        if step == 3:
            i = list(named_leaves(state)).index("model.blocks.mlp.up.kernel")
            leaves[i] = broken_on(leaves[i], 2)
        return jax.tree.unflatten(structure, leaves)

    with pytest.raises(
        ReplicasDiffer, match=r"mlp.* differ on \S*2 \(process 0\) from"
    ):
        run(config, hooks=[spoil])
    assert passed == [1, 2, 3] if compared == 2 else [1, 2, 3, 4]
    assert complete_steps(tmp_path / "checkpoints") == ([2] if saved == 2 else [])
    (told,) = (
        event
        for event in read_events(tmp_path / "events-0.jsonl")
        if event["name"] == "wrong_values"
    )
    assert (told["step"], told["kind"]) == (4, "fault")
    assert (told["args"]["suspects"], told["args"]["sure"]) == ([0], True)


def test_a_run_may_change_who_communicates(unbroken, tmp_path):
    """Tensor parallelism written out, then by the compiler: the numbers of no mesh."""
    _, _, writer = unbroken
    config = dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(fsdp=2, tensor=2),
        tensor_parallel="xla",
        remat="attention",
        profile_every=2,
        output_dir=str(tmp_path),
    )
    _, before = run(config, hooks=[interrupt_after(3)])
    resumed = dataclasses.replace(config, tensor_parallel=None)
    result, after = run(resumed)
    events = read_events(tmp_path / "events-0.jsonl")
    profiles = [event["args"] for event in events if event["name"] == "profile"]
    assert profiles and all(p["computing"] > 0 < p["waiting"] for p in profiles)
    assert result.state.model.tensor_parallel is None
    assert list(before.losses()) == [1, 2, 3] and list(after.losses()) == [4, 5, 6]
    found = before.losses() | after.losses()
    assert found == pytest.approx(writer.losses(), rel=1e-4)


def test_resumes_bit_for_bit_after_a_signal(unbroken, tmp_path):
    config, result, writer = unbroken
    config = dataclasses.replace(config, output_dir=str(tmp_path))
    usual = signal.getsignal(signal.SIGTERM)
    stopped, before = run(config, hooks=[interrupt_after(4)])
    assert stopped.interrupted
    assert signal.getsignal(signal.SIGTERM) == usual
    resumed, after = run(config, evaluate=True)
    assert list(before.steps) == [1, 2, 3, 4]
    assert list(after.steps) == [5, 6]
    assert before.losses() | after.losses() == writer.losses()
    for name in ("grad_norm", "param_norm", "lr"):
        assert after.steps[6][name] == writer.steps[6][name]
    assert resumed.evaluation == result.evaluation
    for x, y in zip(
        jax.tree.leaves(resumed.state), jax.tree.leaves(result.state), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_a_signal_at_the_end_waits_for_the_last_checkpoint(tmp_path, monkeypatch):
    """And a second one does not."""
    as_usual, close = [], Checkpointer.close
    before = signal.signal(signal.SIGTERM, lambda *_: as_usual.append(True))

    def closing(self):
        os.kill(os.getpid(), signal.SIGTERM)
        assert not as_usual
        os.kill(os.getpid(), signal.SIGTERM)
        assert as_usual
        close(self)

    monkeypatch.setattr(Checkpointer, "close", closing)
    try:
        result, _ = run(dataclasses.replace(CONFIG, output_dir=str(tmp_path)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not result.interrupted


def test_no_evaluation_is_lost_to_a_signal(tmp_path):
    config = dataclasses.replace(
        CONFIG, eval_every=2, output_dir=str(tmp_path / "stopped")
    )
    _, before = run(config, evaluate=True, hooks=[interrupt_after(4)])
    _, after = run(config, evaluate=True)
    config = dataclasses.replace(config, output_dir=str(tmp_path / "whole"))
    _, whole = run(config, evaluate=True)
    assert list(before.evaluations) == [2, 4] and list(after.evaluations) == [6]
    assert before.evaluations | after.evaluations == whole.evaluations


@pytest.mark.parametrize(
    ("rules", "mesh"),
    [
        ("fsdp_tp", MeshConfig(fsdp=2, tensor=2)),
        *exhaustive(("fsdp", MeshConfig(fsdp=4))),
    ],
)
def test_restores_on_another_mesh_with_the_same_loss(unbroken, rules, mesh):
    config, result, _ = unbroken
    config = dataclasses.replace(config, rules=rules, mesh=mesh)
    # The run is finished: it evaluates alone.
    restored, writer = run(config, evaluate=True)
    assert not writer.steps and restored.evaluation and result.evaluation
    assert restored.evaluation.loss == pytest.approx(result.evaluation.loss, rel=1e-5)
    assert restored.evaluation.tokens == result.evaluation.tokens
    placed = restored.state.step.sharding
    assert isinstance(placed, jax.NamedSharding) and placed.mesh.shape["data"] == 1


def test_an_explicit_mesh_and_microbatches_give_the_same_trace(unbroken, tmp_path):
    config, _, writer = unbroken
    config = dataclasses.replace(
        config,
        output_dir=str(tmp_path),
        mesh=MeshConfig(data=2, fsdp=2, axis_type="explicit"),
        microbatches=2,
    )
    _, explicit = run(config)
    for step, loss in writer.losses().items():
        assert explicit.losses()[step] == pytest.approx(loss, rel=1e-5)


STACK = {"mesh": MeshConfig(data=2, fsdp=2), "zero": 1, "replicated": True}
CHUNKS = {
    "mesh": MeshConfig(pipe=2, fsdp=2),
    "chunks": 2,
    "zero": 1,
    "replicated": True,
}
STAGES = {"mesh": MeshConfig(pipe=2, context=2), "remat": "full"}
TENSOR = {"mesh": MeshConfig(fsdp=2, tensor=2), "zero": 2}
SHARED = {"mesh": MeshConfig(fsdp=2, context=2), "zero": 2}


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        (
            "adamw",
            [(2, "pinned_host", CHUNKS), (3, "device", TENSOR)],
        ),
        *exhaustive(
            (
                "adamw",
                [
                    (2, "device", STACK),
                    (4, "pinned_host", CHUNKS),
                    (5, "device", STAGES),
                    (6, "pinned_host", SHARED),
                ],
            ),
            ("lamb", [(2, "device", CHUNKS), (4, "device", TENSOR)]),
            ("muon", [(2, "pinned_host", TENSOR), (4, "device", CHUNKS)]),
        ),
    ],
)
def test_a_run_goes_on_with_any_layout_of_its_layers(kind, layouts, tmp_path):
    """Five layers, 33 tokens: two chunks of two stages, stacks, padded tables; moments
    anywhere; the weekly cases share rows, too.
    """
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(MODEL, num_layers=5, vocab_size=33),
        optimizer=dataclasses.replace(CONFIG.optimizer, kind=kind, weight_decay=0.1),
        steps=layouts[-1][0],
    )
    plain = dataclasses.replace(config, output_dir=str(tmp_path / "whole"))
    _, whole = run(plain, evaluate=True)
    found = {}
    for last, memory_kind, options in layouts:
        pipelined = options["mesh"].pipe > 1
        layout = dataclasses.replace(
            config,
            optimizer=dataclasses.replace(config.optimizer, memory_kind=memory_kind),
            rules="megascale_3d" if pipelined else "fsdp_tp",
            microbatches=2,
            output_dir=str(tmp_path / "parts"),
            **options,
        )
        result, part = run(
            layout, evaluate=last == config.steps, hooks=[interrupt_after(last)]
        )
        found |= part.losses()
        # Whatever ran, what comes out is a stack that other programs take.
        up = result.state.model.blocks.mlp.up.kernel
        assert up.shape == (5, 32, 64) and logical_axes(up)[0] == "layers"
        (moment,) = (
            x
            for name, x in named_leaves(result.state.opt_state).items()
            if name.endswith("mu.blocks.mlp.up.kernel")
        )
        assert moment.shape == up.shape and moment.sharding.memory_kind == memory_kind
        assert "fsdp" in str(moment.sharding.spec)
        assert ("fsdp" in str(up.sharding.spec)) != layout.replicated
        rows = 128 if pipelined or layout.mesh.tensor > 1 else 33
        for name, x in named_leaves(result.state).items():
            if name.endswith("embed.table"):
                assert x.shape == (rows, 32) and not np.asarray(x)[33:].any()
    assert found == pytest.approx(whole.losses(), rel=1e-5)
    assert result.evaluation.loss == pytest.approx(
        whole.evaluations[config.steps]["eval_loss"], rel=1e-5
    )


def test_a_given_model_goes_through_a_pipeline(tmp_path):
    """Three layers in two stages leave a place without one."""
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(MODEL, num_layers=3, vocab_size=33),
        mesh=MeshConfig(pipe=2, tensor=2),
        rules="megascale_3d",
        output_dir=str(tmp_path),
        microbatches=2,
        steps=2,
    )
    model = Decoder(config.model, rules=config.axis_rules, rngs=nnx.Rngs(0))
    before = model.norm.scale[...].copy()
    trained, writer = run(config, model=model)
    assert 0 < writer.losses()[1] < 2 * np.log(32)
    assert (trained.state.model.norm.scale[...] != before).all()
    assert trained.state.model.blocks.mlp.up.kernel.shape[0] == 3
    assert trained.state.model.embed.table.shape[0] == 128  # 33 rows are padded
    # It has told where its devices stand, for the pages of the run.
    told = find_layout(read_run(tmp_path))
    assert told.axes == {"pipe": 2, "data": 1, "fsdp": 1, "context": 1, "tensor": 2}
    assert (told.ranks, told.stages, told.microbatches) == ((0,) * 4, 2, 2)


@pytest.mark.exhaustive  # a given model goes through one on every push
@pytest.mark.parametrize("kind", ["run", "hugging_face"])
def test_saved_weights_begin_a_pipeline_with_a_free_place(tmp_path, kind):
    """Three layers do not divide over two stages, and are read all the same."""
    source = tmp_path / "source"
    config = dataclasses.replace(
        CONFIG,
        model=dataclasses.replace(MODEL, num_layers=3),
        source=str(source),
        output_dir=str(tmp_path / "pipeline"),
        steps=2,
    )
    model = Decoder(config.model, rngs=nnx.Rngs(7), rules=config.axis_rules)
    if kind == "hugging_face":
        save(model, source)
    else:
        run_directory.write(source, config, TEXT)
        with Checkpointer(source / "checkpoints") as checkpoints:
            checkpoints.save(1, {"model": model}, {})
    _, piped = run(
        dataclasses.replace(
            config,
            mesh=MeshConfig(pipe=2, fsdp=2),
            rules="megascale_3d",
            microbatches=2,
        )
    )
    flat = dataclasses.replace(config, output_dir=str(tmp_path / "flat"))
    _, plain = run(flat, model=model)
    assert piped.losses() == pytest.approx(plain.losses(), rel=1e-5)


def test_default_writers(tmp_path, capfd):
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path), log_every=3)
    train, held_out = packed_batches(config, TEXT, DEVICES)
    result = fit(config, train_data=train, eval_data=held_out, devices=DEVICES)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["step"] for r in records] == [3, 6, 6] and result.evaluation
    assert records[2]["eval_loss"] == result.evaluation.loss
    assert list((tmp_path / "tensorboard").iterdir())
    checkpoints = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {"3", "6"} <= checkpoints
    # A file, not a terminal: a line for each thing that happens, in its order.
    printed = capfd.readouterr().out.splitlines()
    lines = iter([line.split(maxsplit=2)[2] for line in printed])
    for expected in (
        f"versions: jaxscale {jaxscale.__version__}, jax {jax.__version__}, ",
        f"devices: {len(DEVICES)} x cpu in 1 process(es)",
        "mesh: ",
        f"model: {sum(x.size for x in _parameters(result)):,} parameters; ",
        "settings of model: vocab_size=32 ",
        "settings of optimizer: kind=adamw learning_rate=",
        "settings of the run: head=None source=None ",
        "start after step 0 of 6",
        "compile the step",
        "step 3 of 6: loss ",
        "step 3: save",
        "step 6 of 6: loss ",
        "step 6: save",
        f"step 6 of 6: held-out loss {result.evaluation.loss:.4f}",
        "end after step 6 of 6",
    ):
        assert any(line.startswith(expected) for line in lines), (expected, printed)


def _parameters(result):
    return jax.tree.leaves(nnx.state(result.state.model, nnx.Param))


def test_hooks_may_replace_the_state_and_a_given_model_is_used(unbroken, tmp_path):
    config, result, _ = unbroken
    config = dataclasses.replace(config, output_dir=str(tmp_path))
    seen = []

    def hook(step, state, metrics):
        seen.append((step, float(metrics["loss"])))
        return dataclasses.replace(state, skipped=state.skipped + 10)

    model = jax.tree.map(lambda x: x.copy(), result.state.model)
    second, writer = run(config, model=model, hooks=[hook])
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    assert int(second.state.skipped) == 60
    assert writer.losses()[1] < np.log(32) - 0.2  # trained before


def test_a_given_model_says_what_is_recorded(tmp_path):
    rules = CONFIG.axis_rules
    model = Decoder(
        MODEL,
        dtype=jnp.bfloat16,
        remat="full",
        scan_layers=True,
        rules=rules,
        rngs=nnx.Rngs(0),
    )
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path), steps=2)
    other = dataclasses.replace(config, model=dataclasses.replace(MODEL, num_layers=3))
    with pytest.raises(ValueError, match=r"has num_layers 2 \(model.num_layers .* 3\)"):
        run(other, model=model)
    with pytest.raises(TypeError, match="is a Linear without config, remat, scan_lay"):
        run(config, model=nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    # Placed by the rules of the settings, it would compute all rows on every device.
    plain = jax.eval_shape(lambda: Decoder(MODEL, rngs=nnx.Rngs(0)))
    with pytest.raises(
        ValueError, match=r"rules than the settings, 'fsdp_tp': .*batch None instead of"
    ):
        run(config, model=plain)
    with pytest.raises(ValueError, match=r"z_loss 0.1 is that of the loss that fit"):
        run(dataclasses.replace(config, z_loss=0.1), loss=next_token_loss())
    assert config.of_model(model).remat == "full" and config.of_model(model).scan_layers
    assert config.of_model(model).model.flops_per_token(
        16, causal=True
    ) == MODEL.flops_per_token(16, causal=True)
    result, _ = run(config, model=model)
    assert result.state.model.remat == "full"
    with Checkpointer(tmp_path / "checkpoints", read_only=True) as checkpoints:
        recorded = checkpoints.config()
    assert recorded["dtype"] == "bfloat16"  # and float32 in `config`
    assert from_dict(DecoderConfig, recorded["model"]) == MODEL


@pytest.mark.parametrize(("value", "kept"), [(5.0, ["3", "4"]), (math.nan, ["2", "3"])])
def test_a_run_that_diverges_stops_and_keeps_what_was_good(tmp_path, value, kept):
    """A parameter that turns the loss into NaN, finite itself or not."""

    def loss(model, batch):
        total, sums = next_token_loss(chunk_size=8)(model, batch)
        bad = ~(model.norm.scale[...][0] < 4)
        return jnp.where(bad, jnp.nan, total), sums._replace(
            nll=jnp.where(bad, jnp.nan, sums.nll)
        )

    def hook(step, state, metrics):
        if step == 4:
            scale = state.model.norm.scale
            scale[...] = scale[...].at[0].set(value)

    config = dataclasses.replace(
        CONFIG,
        output_dir=str(tmp_path),
        steps=60,
        checkpoint_every=1,
        keep=2,
        max_skipped=5,
    )
    with pytest.raises(Diverged, match=rf"at step 9 of 60, 5 .* step {kept[1]};"):
        run(config, loss=loss, hooks=[hook])
    checkpoints = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert {name for name in checkpoints if name.isdecimal()} == set(kept)


def test_data_that_ends_too_early(tmp_path):
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path))
    data = PackedBatches(corpus(3, 4), config.data, epochs=1)
    with pytest.raises(ValueError, match=r"train_data ended before step \d of 6"):
        fit(config, train_data=data, writers=[], devices=DEVICES)


def test_data_that_cannot_be_saved_or_repeated(tmp_path):
    config = dataclasses.replace(CONFIG, output_dir=str(tmp_path))
    data = PackedBatches(corpus(3), config.data)
    with pytest.raises(TypeError, match="gives a list_iterator without get_state"):
        fit(config, train_data=[], writers=[], devices=DEVICES)
    with pytest.raises(TypeError, match="eval_data is a generator, which ends after"):
        fit(config, train_data=data, eval_data=(x for x in data), devices=DEVICES)
    with pytest.raises(ValueError, match=r"eval_data is a PackedBatches without end"):
        fit(config, train_data=data, eval_data=data, devices=DEVICES)
    assert list(tmp_path.iterdir()) == []


def test_a_longer_run_asks_for_its_schedule_by_name(tmp_path):
    """The learning rate makes no jump that nobody has asked for."""
    optimizer = dataclasses.replace(CONFIG.optimizer, warmup_steps=0)
    short = dataclasses.replace(
        CONFIG, optimizer=optimizer, output_dir=str(tmp_path), steps=2
    )
    run(short)
    longer = dataclasses.replace(short, steps=4)
    with pytest.raises(
        ValueError, match=r"steps 4, but .* made for 2, .* from 2.00e-03 to 1.10e-02; s"
    ):
        run(longer)
    kept = dataclasses.replace(optimizer, schedule_steps=2)
    _, writer = run(dataclasses.replace(short, optimizer=kept, steps=3))
    assert writer.rates() == pytest.approx([2e-3])
    stretched = dataclasses.replace(optimizer, schedule_steps=4)
    _, writer = run(dataclasses.replace(longer, optimizer=stretched))
    assert writer.rates() == pytest.approx([4.636e-3], rel=1e-3)
    run(longer)  # the checkpoint now has the new schedule


def test_a_run_that_is_beyond_its_end(unbroken):
    config, _, _ = unbroken
    with pytest.raises(ValueError, match=r"steps 4, but .* has done 6 already"):
        run(dataclasses.replace(config, steps=4))


def test_another_run_in_the_directory(unbroken):
    config, _, _ = unbroken
    config = dataclasses.replace(config, seed=1)
    with pytest.raises(
        ValueError, match=r"belongs to another run, with seed 0 \(now 1"
    ):
        run(config)
