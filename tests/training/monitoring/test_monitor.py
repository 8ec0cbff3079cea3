"""Records, their arithmetic with a clock of ours, and the writers."""

import errno
import json
import math
import re
import resource
import sys
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxscale.models.families.llama import llama3_8b
from jaxscale.observability import bar as bar_module
from jaxscale.supervision import EventLog, read_events
from jaxscale.training.hardware import mfu, peak_flops
from jaxscale.training.monitoring import monitor
from jaxscale.training.monitoring.console import LineWriter, console_writer
from jaxscale.training.monitoring.monitor import (
    JsonlWriter,
    Monitor,
    ProgressBar,
    TensorBoardWriter,
    Writer,
)


class Memory(Writer):
    def __init__(self):
        self.records = []
        self.notes = []
        self.closed = False

    def note(self, text):
        self.notes.append(text)

    def write(self, record):
        self.records.append(record)

    def close(self):
        self.closed = True


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def metrics(loss=1.0, tokens=600):
    return {"loss": jnp.float32(loss), "tokens": jnp.int32(tokens)}


def test_rates_of_each_step():
    memory, clock = Memory(), Clock()
    with Monitor(
        [memory],
        num_devices=4,
        total_steps=3,
        flops_per_token={"causal": 1e9, "full": 2e9},
        peak_flops=1e12,
        clock=clock,
    ) as monitor:
        monitor.start(0)
        for step, seconds, loss in [(1, 9.0, 5.0), (2, 0.5, 4.0), (3, 0.5, np.nan)]:
            clock.now += seconds  # the first step compiles
            monitor.log(step, metrics(loss))
            monitor.flush()
        with monitor.pause("eval", 1):
            clock.now += 77.0
            monitor.log_evaluation(3, loss=3.5, tokens=10)
    first, second, third, evaluation = memory.records
    assert first["step_seconds"] == 9.0
    assert first["tokens_per_second_per_device"] is None
    assert first["mfu_full"] is None
    assert (second["step"], second["loss"], second["step_seconds"]) == (2, 4.0, 0.5)
    assert second["tokens_per_second_per_device"] == 600 / 0.5 / 4
    assert second["mfu_causal"] == pytest.approx(300 * 1e9 / 1e12)
    assert second["mfu_full"] == pytest.approx(0.6)
    assert third["loss"] is None  # NaN is no JSON
    assert evaluation == {"step": 3, "eval_loss": 3.5, "eval_tokens": 10}
    assert memory.closed


def test_rates_are_means_between_records_without_compilation_and_pauses():
    memory, clock = Memory(), Clock()
    with Monitor(
        [memory], num_devices=1, total_steps=10, log_every=4, clock=clock
    ) as monitor:
        monitor.start(0)
        for step in range(1, 11):
            clock.now += 50.0 if step == 1 else 2.0
            monitor.log(step, metrics(step))
            monitor.flush()
            if step in (6, 8):
                with monitor.pause("eval", 1):
                    clock.now += 1000.0
    assert [r["step"] for r in memory.records] == [4, 8, 10]
    assert [r["step_seconds"] for r in memory.records] == [2.0, 2.0, 2.0]
    assert {r["tokens_per_second_per_device"] for r in memory.records} == {300.0}


def test_the_wait_for_data_is_a_mean_over_the_steps_of_a_record():
    memory, clock = Memory(), Clock()
    with Monitor(
        [memory], num_devices=1, total_steps=4, log_every=2, clock=clock
    ) as monitor:
        monitor.start(0)
        for step in range(1, 5):
            with monitor.data_wait():
                clock.now += {1: 70.0, 2: 10.0}.get(step, 0.25 * step)
            clock.now += 2.0
            monitor.log(step, metrics(), {"epochs": step / 4})
            monitor.flush()
    first, second = memory.records
    # The first step compiles: neither its time nor its wait is counted.
    assert (first["data_seconds"], first["step_seconds"]) == (10.0, 12.0)
    assert second["data_seconds"] == pytest.approx((0.75 + 1.0) / 2)
    assert second["epochs"] == 1.0


@pytest.mark.parametrize("synchronous", [True, False])
def test_the_clock_sees_steps_whether_or_not_dispatch_waits(synchronous):
    """Each step takes 100 ms, also the first and the last before a pause."""

    clock, lock = Clock(), threading.Lock()

    def wait(until):
        with lock:  # two threads wait
            clock.now = max(clock.now, until)

    class Device:  # one step after the other; `item` waits for its own
        busy_until = 0.0

        def dispatch(self):
            self.busy_until = max(self.busy_until, clock.now) + 0.1
            if synchronous:
                monitor.flush()  # what has ended is recorded meanwhile
                wait(self.busy_until)
            return Scalar(self.busy_until)

    class Scalar:
        def __init__(self, ready):
            self.ready = ready

        def copy_to_host_async(self):
            pass

        def __array__(self, dtype=None, copy=None):
            wait(self.ready)
            return np.float32(1.0)

        def item(self):
            return float(np.asarray(self))

    memory, device = Memory(), Device()
    with Monitor([memory], num_devices=1, total_steps=6, clock=clock) as monitor:
        monitor.start(0)
        for step in range(1, 7):
            monitor.log(step, {"loss": device.dispatch()})
            if step == 3:
                with monitor.pause("eval", 1):
                    wait(clock.now + 0.2)
    seconds = [record["step_seconds"] for record in memory.records]
    assert seconds == pytest.approx([0.1] * 6)


def test_an_error_of_a_writer_reaches_the_loop():
    class Full(Memory):
        def write(self, record):
            raise OSError("disk full")

    broken, healthy = Full(), Memory()
    monitor = Monitor([broken, healthy], num_devices=1, total_steps=9)
    with pytest.raises(OSError, match="disk full"), monitor:
        monitor.start(0)
        for step in range(1, 10):
            monitor.log(step, metrics())
    assert broken.closed
    assert healthy.closed
    assert not [t for t in threading.enumerate() if t.name == "jaxscale-monitor"]


def test_jsonl_lines_and_resumption(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"

    def train(first, last):
        clock = Clock()
        monitor = Monitor(
            [JsonlWriter(path)], num_devices=1, total_steps=last, clock=clock
        )
        with monitor:
            monitor.start(first)
            for step in range(first + 1, last + 1):
                clock.now += 1
                monitor.log(step, metrics(loss=step))

    train(0, 5)
    with path.open("a") as file:
        file.write('5\n{"step": null}\n{"step": 6, "lo')  # killed while it wrote
    with path.open("ab") as file:
        file.write(b"\xff\x00\n")
    train(3, 7)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert [r["loss"] for r in records] == [1, 2, 3, 4, 5, 6, 7]
    assert set(records[-1]) == {
        "step",
        "loss",
        "tokens",
        "step_seconds",
        "data_seconds",
        "tokens_per_second_per_device",
    }


def test_tensorboard_gets_the_finite_numbers(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.start(0, 2)
    writer.write({"step": 1, "loss": 2.5, "mfu_full": None})
    writer.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"loss" in content
    assert b"mfu_full" not in content


@pytest.mark.parametrize("kind", [TensorBoardWriter, JsonlWriter])
def test_a_full_disk_is_an_error_and_no_wait(tmp_path, kind):
    """The limit of a file's size stands for that of the disk."""
    writer, raised = kind(tmp_path / "records"), []
    writer.start(0, 100)

    def write():
        for step in range(1, 101):
            try:
                writer.write({"step": step, "loss": 1.0, "rate": 2.0})
            except OSError as error:
                raised.append(error)

    thread = threading.Thread(target=write, daemon=True)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, most))
    try:
        thread.start()
        thread.join(120)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    assert not thread.is_alive() and raised
    writer.close()


def test_a_full_disk_at_the_end_does_not_hide_what_went_wrong_before():
    class Full(Memory):
        def close(self):
            super().close()
            raise OSError(errno.ENOSPC, "No space left on device")

    def run(error):
        first, last = Full(), Full()
        try:
            with Monitor([first, last], num_devices=1, total_steps=1) as monitor:
                monitor.start(0)
                if error is not None:
                    raise error
        finally:
            assert first.closed and last.closed

    with pytest.raises(ZeroDivisionError):
        run(ZeroDivisionError())
    with pytest.raises(OSError, match="No space left"):
        run(None)


def test_progress_bar_shows_the_main_numbers(capsys):
    bar = ProgressBar("pretrain")
    bar.start(0, 2)
    bar.write({"step": 1, "loss": 2.5, "tokens_per_second_per_device": 1234.0})
    bar.write({"step": 2, "eval_loss": 2.25})
    bar.close()
    shown = capsys.readouterr().out
    assert "pretrain" in shown
    assert "2/2" in shown
    assert "loss 2.500" in shown
    assert "held out 2.250" in shown


def test_a_bar_says_what_goes_on_before_the_first_numbers(monkeypatch):
    shown = []
    made = SimpleNamespace(update=lambda done, text: shown.append((done, text)))
    monkeypatch.setattr(monitor, "Bar", lambda *_, **__: made)
    bar = ProgressBar()
    bar.note("devices: 8 x cpu")  # there is no bar yet
    bar.start(3, 5)
    bar.note("compile the step")
    bar.write({"step": 4, "loss": 2.5})
    bar.note("step 4: save")
    assert shown == [(3, "compile the step"), (4, "loss 2.500")]


def test_a_notebook_keeps_the_last_state_of_a_bar_as_one_line(monkeypatch):
    from IPython import display

    outputs = []

    def show(line, *, display_id):
        outputs.append([line._repr_html_()])
        return SimpleNamespace(update=lambda x: outputs[-1].append(x._repr_html_()))

    monkeypatch.setattr(bar_module, "in_jupyter", lambda: True)
    monkeypatch.setattr(display, "display", show)
    bar = ProgressBar()
    bar.start(0, 500)
    for step in range(1, 501):
        bar.write({"step": step, "loss": 3.0 - step / 500})
    bar.close()
    (versions,) = outputs
    assert 2 <= len(versions) < 100, "drawn rarely, and at the end"
    assert "value='0' max='500'" in versions[0]
    assert "value='500' max='500'" in versions[-1]
    assert "500/500  loss 2.000" in versions[-1]


def test_lines_show_the_main_numbers_at_once(tmp_path):
    with (tmp_path / "job.out").open("w") as file:
        lines = LineWriter(file)
        lines.start(0, 20)
        lines.write({"step": 10, "loss": 2.5, "lr": 1e-3, "mfu_causal": 0.4, "x": 1})
        lines.write({"step": 11, "loss": None, "eval_loss": None, "skipped": 2})
        lines.write({"step": 20, "eval_loss": 2.25, "eval_accuracy": 0.5})
        # Read while the file is open, as `tail -f` does.
        written = (tmp_path / "job.out").read_text().splitlines()
    assert all(re.match(r"[\d-]{10} [\d:]{8} ", line) for line in written)
    assert [line.split(maxsplit=2)[2] for line in written] == [
        "start after step 0 of 20",
        "step 10 of 20: loss 2.5000, learning rate 0.001, MFU 40.0%",
        "step 11 of 20: loss is not finite, eval loss is not finite, 2 updates skipped",
        "step 20 of 20: held-out loss 2.2500, held-out accuracy 50.0%",
    ]


@pytest.mark.parametrize(
    ("terminal", "kind"), [(True, ProgressBar), (False, LineWriter)]
)
def test_a_bar_is_for_terminals(monkeypatch, terminal, kind):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    assert type(console_writer()) is kind


def test_writers_are_told_and_closed_after_an_error():
    memory = Memory()
    monitor = Monitor([memory], num_devices=1, total_steps=1)
    with pytest.raises(KeyError), monitor:
        monitor.start(0)
        raise KeyError("absent")
    assert memory.closed
    assert memory.notes == ["ended by KeyError: 'absent'"]


def test_mfu_of_a_known_run():
    """KempnerForge's LLaMA-3 8B on one H200: 10,471 tok/s are 51.1% causal.

    Its own 57.8% counts full attention and the embedding table as a product.
    """
    model, peak = llama3_8b(), 989e12
    assert peak_flops("NVIDIA H200") == peak
    assert mfu(10_471, model.flops_per_token(4096, causal=True), peak) == pytest.approx(
        0.511, abs=0.001
    )


def test_peaks():
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("cpu") is None


def test_the_events_of_a_step_are_reported(tmp_path):
    """What the host does, and by the thread what the device has done, good or not."""
    events, path = EventLog(), tmp_path / "events-0.jsonl"
    monitor = Monitor([], num_devices=1, total_steps=2, events=events)
    with events.written_to(path), monitor:
        monitor.start(0)
        for step, loss in ((1, 3.5), (2, math.nan)):
            with monitor.data_wait(step):
                pass
            monitor.log(step, {"loss": jnp.float32(loss), "grad_norm": jnp.ones(())})
            monitor.flush()
        with monitor.pause("save", 2):
            pass
    found = [(e["name"], e["step"], e["kind"]) for e in read_events(path)]
    step = [("begin", "host"), ("data", "host"), ("dispatched", "host")]
    step += [("done", "device")]
    assert found == [
        *((name, number, kind) for number in (1, 2) for name, kind in step),
        ("not_finite", 2, "fault"),
        ("save", 2, "host"),
        ("saved", 2, "host"),
        ("bye", 2, "host"),
    ]
    losses = [e["args"] for e in read_events(path) if e["name"] == "done"]
    assert losses == [{"loss": 3.5}, {"loss": None}]
