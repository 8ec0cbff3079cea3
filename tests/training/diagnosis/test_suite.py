"""Slow, wrong and stuck devices are named; sound ones never."""

import contextlib
import dataclasses
import itertools
import json
import os
import queue
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jaxscale.training import DiagnoseConfig, Measurement, diagnose
from jaxscale.training.diagnosis import device_checks as checks
from jaxscale.training.diagnosis import suite
from jaxscale.training.diagnosis.suite import CheckRequest, judge
from jaxscale.training.hardware import H200
from tests.ports import free_port


CONFIG = DiagnoseConfig()


def gpus(count, kind="NVIDIA H200", host="a"):
    kinds = {"kind": kind, "platform": "gpu", "host": host, "process": 0}
    return [{"id": i, **kinds} for i in range(count)]


def rates(name, values, **more):
    return [
        Measurement(name=name, devices=(i,), value=value, **more)
        for i, value in enumerate(values)
    ]


def named(measurements, devices):
    return [finding.devices for finding in judge(measurements, devices, CONFIG)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("matmul bfloat16", H200.matmul),
        ("matmul float32", H200.fp32),
        ("memory", H200.hbm),
        ("from the host", H200.host),
        ("to the host", H200.host),
    ],
)
def test_a_device_is_slow_by_what_its_model_should_do(name, expected):
    devices = gpus(2)
    assert named(rates(name, [0.71 * expected] * 2), devices) == []
    slow = judge(rates(name, [0.69 * expected] * 2), devices, CONFIG)
    assert [finding.devices for finding in slow] == [(0,), (1,)]
    assert (
        f"{name}: " in slow[0].text and "69% of what its model should" in slow[0].text
    )
    # Of another model nothing is known, and CPUs are never slow.
    assert named(rates(name, [1.0, 1.0]), gpus(2, "NVIDIA H100 PCIe")) == []
    cpus = [device | {"platform": "cpu", "kind": "cpu"} for device in devices]
    assert named(rates(name, [1.0, 9.0]), cpus) == []


def test_a_device_is_slow_beside_the_others():
    devices = gpus(8, "NVIDIA something new")
    rng = np.random.default_rng(0)
    for _ in range(50):  # noise of 3% accuses nobody, one that is 20% slower is found
        values = 1e12 * (1 + rng.uniform(-0.03, 0.03, 8))
        assert named(rates("memory", values), devices) == []
        slow = int(rng.integers(8))
        values[slow] *= 0.8
        assert named(rates("memory", values), devices) == [(slow,)]
    # Rates that differ anyhow, and hosts with two kinds of links, accuse nobody.
    assert named(rates("memory", np.linspace(0.6, 1, 8)), devices) == []
    assert named(rates("from the host", [5.0] * 4 + [4.0] * 4), devices) == []
    mixed = gpus(4) + [d | {"id": 4 + d["id"]} for d in gpus(4, "NVIDIA L4")]
    assert named(rates("bits", [1.0] * 4 + [0.1] * 4), mixed) == []


def pairs(count, slow):
    return [
        Measurement(name="pairs", devices=ids, value=slow(*ids) * 380e9)
        for ids in itertools.combinations(range(count), 2)
    ]


def test_slow_links_are_laid_to_a_device_or_to_a_pair():
    devices = gpus(8)
    assert named(pairs(8, lambda a, b: 1.0), devices) == []
    assert named(pairs(8, lambda a, b: 0.5 if 3 in (a, b) else 1.0), devices) == [(3,)]
    found = pairs(8, lambda a, b: 0.5 if (a, b) == (2, 5) else 1.0)
    assert named(found, devices) == [(2, 5)]
    # Where all are alike it is for the collectives to say that they are slow.
    assert named(pairs(8, lambda a, b: 0.3), devices) == []


def test_collectives_are_judged_by_their_largest_size_inside_a_host():
    everyone = tuple(range(4))
    measured = [
        Measurement(name="all-reduce", devices=everyone, value=value, size=size)
        for size, value in ((2**20, 20e9), (2**28, 200e9))
    ]
    (finding,) = judge(measured, gpus(4), CONFIG)
    assert finding.devices == () and "67% of what its model" in finding.text
    two_hosts = gpus(2) + [d | {"id": 2 + d["id"]} for d in gpus(2, host="b")]
    assert judge(measured, two_hosts, CONFIG) == []
    fast = dataclasses.replace(measured[1], value=310e9)
    assert judge([measured[0], fast], gpus(4), CONFIG) == []


def test_other_bits_than_most():
    def computed(text):
        return [
            Measurement(name="bits", devices=(i,), bits=bits)
            for i, bits in enumerate(text)
        ]

    assert named(computed("aaaa"), gpus(4)) == []
    assert named(computed("aaba"), gpus(4)) == [(2,)]
    (tie,) = judge(computed("ab"), gpus(2), CONFIG)
    assert tie.devices == (0, 1) and "none is that of most" in tie.text
    one = [dataclasses.replace(computed("a")[0], problem="other when repeated")]
    assert named(one, gpus(1)) == [(0,)]


def broken_on(device, compute):
    """`compute`, one element of whose result is a little wrong on a device."""

    def spoiled(devices, sizes):
        with pytest.MonkeyPatch.context() as patch:
            if devices[0].id == device:
                matmul, total = checks.jnp.matmul, checks.jnp.sum
                patch.setattr(
                    checks.jnp, "matmul", lambda *a, **k: one_off(matmul(*a, **k))
                )
                patch.setattr(checks.jnp, "sum", lambda x: total(x) + 1)
            yield from compute(devices, sizes)

    return spoiled


def one_off(x):
    return x.at[(1,) * x.ndim].add(1)


@pytest.fixture(scope="module")
def measured():
    """What four simulated devices measure, of which one computes wrong values."""
    said = []
    alone = {name: broken_on(2, probe) for name, probe in checks.ALONE.items()}
    others = [device.id for device in jax.devices()[4:]]
    checks.measure(CheckRequest(without=others), said.append, alone)
    assert said[-1] == {"end": 0}
    found = [line["measured"] for line in said if "measured" in line]
    found = [Measurement(**m | {"devices": tuple(m["devices"])}) for m in found]
    return next(line["devices"] for line in said if "devices" in line), found


def test_a_device_that_computes_wrong_values_is_named(measured):
    devices, found = measured
    findings = judge(found, devices, CONFIG)
    assert {finding.devices for finding in findings} == {(2,)}
    texts = " | ".join(finding.text for finding in findings)
    assert "matmul bfloat16: a product of whole numbers is wrong in 1 of 64" in texts
    assert "matmul float32: a product of whole numbers is wrong" in texts
    assert "bits: a sum of whole numbers is wrong" in texts
    assert "bits: a product of whole numbers has other bits than on most" in texts


def test_a_device_that_is_slow_is_named(measured):
    """The figures of simulated devices as if they were those of GPUs."""
    devices, found = measured
    devices = [d | {"platform": "gpu", "kind": "NVIDIA new"} for d in devices]
    slow = [
        dataclasses.replace(m, value=0.5 if m.devices == (1,) else 1.0, problem="")
        for m in found
        if len(m.devices) == 1 and m.value is not None
    ]
    findings = judge(slow, devices, CONFIG)
    assert {finding.devices for finding in findings} == {(1,)} and len(findings) == 5


def test_everything_is_measured(measured):
    devices, found = measured
    assert [device["id"] for device in devices] == [0, 1, 2, 3]
    alone = {(m.name, m.devices) for m in found if m.value and len(m.devices) == 1}
    names = ("matmul bfloat16", "matmul float32", "memory")
    names += ("from the host", "to the host")
    assert alone == {(name, (i,)) for name in names for i in range(4)}
    between = {m.devices for m in found if m.name == "pairs" and m.value > 0}
    assert between == set(itertools.combinations(range(4), 2))
    sizes = checks.CPU_SIZES.collectives
    together = {(m.name, m.size) for m in found if m.devices == (0, 1, 2, 3)}
    assert together == set(itertools.product(("all-reduce", "all-gather"), sizes))


def test_what_arrives_wrong_is_seen():
    devices = jax.devices()[:4]
    x = checks._spread(devices, 8)
    assert checks._wrong(x, lambda i: checks._content(i, 8)) == []
    wanted = checks._content(1, 8)
    assert checks._wrong(x, lambda i: wanted) == [devices[i] for i in (0, 2, 3)]


def child(tmp_path, body):
    """A command in place of the process that measures; it knows its number of start."""
    file = tmp_path / "child.py"
    head = """
        import json, os, sys, time
        request = json.loads(sys.argv[1])
        def say(**said): print(json.dumps(said), flush=True)
        place = {"kind": "cpu", "platform": "cpu", "process": 0, "host": "a"}
        devices = [{"id": i, **place} for i in range(3)]
        say(begin="start", ids=[])
    """
    file.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return [sys.executable, str(file)]


ONE_BY_ONE = """
    say(devices=devices)
    print("a library has something to say")
    for name in ("memory", "bits"):
        for i in range(3):
            if i in request["without"] or [name, [i]] in request["skip"]:
                continue
            say(begin=name, ids=[i])
            if i == 1 and name == "memory":
                BREAK
            say(measured={"name": name, "devices": [i], "value": 1.0})
    say(end=0)
"""


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("open(HANGS, 'w'); time.sleep(3600)", "memory did not end within 600 s"),
        ("os._exit(7)", "memory ended the process: code 7"),
        (
            "raise SystemExit('CUDA_ERROR_ECC')",
            "memory ended the process: CUDA_ERROR_E",
        ),
    ],
)
def test_a_device_that_hangs_or_kills_is_named_and_the_others_go_on(
    tmp_path, monkeypatch, how, text
):
    hangs = tmp_path / "hangs"

    class Lines(queue.Queue):
        """Time is up where the child hangs, however late it comes to that."""

        def get(self, timeout):
            while True:
                at_rest = hangs.exists()
                with contextlib.suppress(queue.Empty):
                    return super().get(timeout=0.05)
                if at_rest:
                    hangs.unlink()
                    raise queue.Empty

    monkeypatch.setattr(suite, "queue", SimpleNamespace(Queue=Lines, Empty=queue.Empty))
    config = DiagnoseConfig(measure_seconds=600, seconds=3600)
    how = how.replace("HANGS", repr(str(hangs)))
    command = child(tmp_path, ONE_BY_ONE.replace("BREAK", how))
    found = diagnose(config, command=command)
    (finding,) = found.findings
    assert finding.devices == (1,) and finding.text.startswith(text)
    assert [(m.name, m.devices) for m in found.measurements] == [
        *(("memory", (0,)), ("memory", (2,)), ("bits", (0,)), ("bits", (2,)))
    ]


def test_what_cannot_begin_or_end(tmp_path):
    hangs = child(tmp_path, "time.sleep(3600)")
    found = diagnose(DiagnoseConfig(measure_seconds=0.5), command=hangs)
    assert [f.text for f in found.findings] == ["start did not end within 0.5 s"]
    assert found.findings[0].devices == () and not found.to_json()["ok"]
    # That time was up is no fault of anybody.
    found = diagnose(DiagnoseConfig(seconds=0.5), command=hangs)
    assert not found.findings and "time was up in start" in found.notes[0]
    sound = child(tmp_path, ONE_BY_ONE.replace("BREAK", "pass"))
    found = diagnose(DiagnoseConfig(gpus=2), command=sound)
    assert [f.text for f in found.findings] == ["JAX finds 0 GPUs, expected 2"]
    nowhere = str(tmp_path / "nowhere")
    found = diagnose(DiagnoseConfig(), command=sound, directory=nowhere)
    assert "cannot be written" in found.findings[0].text
    assert json.loads(json.dumps(found.to_json()))["measurements"][0]["value"] == 1.0


def test_little_is_tuned_and_flags_of_the_user_count(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    said = """
    say(measured={"name": os.environ["XLA_FLAGS"], "devices": []})
    say(end=0)
"""
    (found,) = diagnose(command=child(tmp_path, said)).measurements
    *flags, last = found.name.split()
    assert "--xla_gpu_enable_triton_gemm=false" in flags and last == "--mine"


@pytest.mark.slow
def test_two_processes_check_together():
    coordinator = f"127.0.0.1:{free_port()}"
    words = [sys.executable, "-m", "jaxscale", "diagnose", "--together", "--no-host"]
    processes = [
        subprocess.Popen(
            [*words, "--devices", "2", "--json", "-"],
            stdout=subprocess.PIPE,
            env=os.environ
            | {"JAX_COORDINATOR_ADDRESS": coordinator, "JAX_NUM_PROCESSES": "2"}
            | {"JAX_PROCESS_ID": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        printed = [process.communicate(timeout=600)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0]
    assert printed[1] == b""
    found = json.loads(printed[0])
    ids = [device["id"] for device in found["devices"]]
    assert [device["process"] for device in found["devices"]] == [0, 0, 1, 1]
    measured = {(m["name"], *m["devices"]) for m in found["measurements"]}
    assert {("bits", i) for i in ids} <= measured
    assert {("pairs", *ids[:2]), ("pairs", *ids[2:])} <= measured
    assert {("neighbors", ids[0], ids[2]), ("all-reduce", *ids)} <= measured


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"least_share": float("nan")}, "least_share nan, expected 0 to 1"),
        ({"slack": 1.0}, "slack 1.0, expected 0 to 0.5"),
        ({"seconds": 0}, "seconds 0 must be positive"),
        ({"devices": 0}, "devices 0 must be an integer of at least 1"),
    ],
)
def test_settings_that_cannot_work(given, message):
    with pytest.raises(ValueError, match=message):
        DiagnoseConfig(**given)
