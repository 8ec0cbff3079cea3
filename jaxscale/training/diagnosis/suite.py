"""Self-checks of a host's or a job's devices: which is slow, wrong or stuck.

A separate process measures (`jaxscale.training.diagnosis.device_checks`), since a
broken device may hang or crash it. This module watches that process, restarts it
without the check that it did not survive, and judges its measurements.
"""

import collections
import dataclasses
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxscale.checks import check_integers, check_positive, check_range
from jaxscale.supervision import self_check
from jaxscale.training.hardware import hardware_of


_MODULE = "jaxscale.training.diagnosis.device_checks"
_DEVIATIONS = 5.0  # of the others from their median, which are usual
_LINKS = ("from the host", "to the host", "pairs", "neighbors")
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0"}  # it may take down a host's links
# Matmuls are cuBLAS's, whose candidates are few and compiled. And a process tunes its
# own, or one that hangs would hold up the others.
_FLAGS = ("--xla_gpu_enable_triton_gemm=false", "--xla_gpu_shard_autotuning=false")
_EXPECTED = {
    "matmul bfloat16": "matmul",
    "matmul float32": "fp32",
    "memory": "hbm",
    "from the host": "host",
    "to the host": "host",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseConfig:
    """What is checked, and which results count as slow.

    Example:
        >>> DiagnoseConfig(least_share=1.5)
        Traceback (most recent call last):
        ...
        ValueError: least_share 1.5, expected 0 to 1
    """

    least_share: float = 0.7
    """A device is slow below this fraction of the rate that its GPU model should
    reach."""
    slack: float = 0.15
    """A device is slow if it is this fraction below the median of the others of its
    model, and an outlier among them; a link, since links differ in length, at twice the
    fraction. CPUs are not compared: simulated devices share cores."""
    seconds: float = 300.0
    """Time limit of all measurements, in seconds."""
    measure_seconds: float = 60.0
    """Seconds after which one measurement, compilation included, counts as hung."""
    gpus: int = 0
    """Expected number of GPUs; fewer are a fault."""
    together: bool = False
    """Measure together with the other processes of the job, as started by Slurm, Open
    MPI or `jaxscale supervise`."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""

    def __post_init__(self) -> None:
        check_range(self, 0, 1, "least_share")
        check_range(self, 0, 0.5, "slack")
        check_positive(self, "seconds", "measure_seconds")
        check_integers(self, 0, "gpus")
        if self.devices is not None:
            check_integers(self, 1, "devices")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckRequest:
    """What the measuring process is asked for."""

    together: bool = False
    """Whether the process is one of several."""
    simulated: int | None = None
    """Simulated CPU devices; None for those of the machine."""
    skip: Sequence[Any] = ()
    """Measurements to skip: name and devices."""
    without: Sequence[int] = ()
    """Devices to leave out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """One measurement of one or more devices."""

    name: str
    """What was measured."""
    devices: tuple[int, ...]
    """The numbers of the devices."""
    value: float | None = None
    """The measured rate; None if there is none."""
    unit: str = ""
    """FLOP/s or B/s."""
    size: int = 0
    """Bytes per device, if several sizes were measured."""
    bits: str = ""
    """Digest of the computed values, equal on all healthy devices of a model."""
    problem: str = ""
    """A fault, independent of the rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """A fault that was found."""

    devices: tuple[int, ...]
    """The numbers of the devices at fault; empty if the host is, or if unknown."""
    text: str
    """Description in one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The result of `diagnose`."""

    devices: tuple[Mapping[str, Any], ...]
    """Number, kind, platform, process and host of each device."""
    measurements: tuple[Measurement, ...]
    """All measurements."""
    findings: tuple[Finding, ...]
    """The faults; empty if there are none."""
    notes: tuple[str, ...]
    """What was not checked."""
    first: bool = True
    """Whether this is the first of the processes that check together."""

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as JSON."""
        return dataclasses.asdict(self) | {"ok": not self.findings}


def diagnose(
    config: DiagnoseConfig | None = None,
    *,
    directory: str | None = None,
    command: Sequence[str] = (),
) -> Diagnosis:
    """Check the devices of this machine, each alone and then together.

    It measures matmuls (bf16 and float32), memory bandwidth, the link to the host, the
    links between devices, and collectives of several sizes. Results are checked, and
    values computed twice or on several devices must be bitwise equal.

    Args:
        config: The settings.
        directory: Directory of the disk check, which reads back what it wrote; None
            skips this check of the host.
        command: Command of the measuring process, which gets a `CheckRequest` as JSON;
            by default ``jaxscale.training.diagnosis.device_checks``.

    Returns:
        The measurements and faults; a device that hangs is named too.

    Example:
        >>> found = diagnose(DiagnoseConfig(devices=2))
        >>> found.findings, len(found.devices)
        ((), 2)
    """
    config = DiagnoseConfig() if config is None else config
    findings = []
    if directory is not None and (problem := self_check.check(directory)):
        findings.append(Finding(devices=(), text=problem))
    watched = _Watched(config, command or (sys.executable, "-m", _MODULE))
    watched.run()
    devices = tuple(watched.devices.values())
    gpus = sum(device["platform"] == "gpu" for device in devices)
    if gpus < config.gpus and not watched.findings:
        text = f"JAX finds {gpus} GPUs, expected {config.gpus}"
        findings.append(Finding(devices=(), text=text))
    measurements, notes = tuple(watched.measurements), list(watched.notes)
    findings += [*watched.findings, *judge(measurements, devices, config)]
    kinds = {device["kind"] for device in devices if device["platform"] == "gpu"}
    for kind in sorted(kinds):
        if hardware_of(kind) is None:
            notes.append(f"no rates are known of {kind}: compared with each other only")
    return Diagnosis(
        devices=devices,
        measurements=measurements,
        findings=tuple(dict.fromkeys(findings)),
        notes=tuple(notes),
        first=watched.process == 0,
    )


class _Watched:
    """The measuring process, restarted while it does not survive."""

    def __init__(self, config: DiagnoseConfig, command: Sequence[str]) -> None:
        self._config, self._command = config, list(command)
        self._until = time.monotonic() + config.seconds
        self._skip: list[Any] = []
        self._without: list[int] = []
        self.process = 0
        self.devices: dict[int, dict[str, Any]] = {}
        self.measurements: list[Measurement] = []
        self.findings: list[Finding] = []
        self.notes: list[str] = []

    def run(self) -> None:
        """Measure until everything is done or time is up."""
        while (failed := self._once()) is not None:
            (name, ids), why = failed
            if not why:
                self.notes.append(f"time was up in {name}: raise seconds")
                return
            # Which device holds up the others is unknown.
            who = tuple(ids) if len(ids) <= 2 else ()
            self.findings.append(Finding(devices=who, text=f"{name} {why}"))
            # With several processes all would have to restart.
            if self._config.together or not ids:
                return
            self._without += ids if len(ids) == 1 else []
            if set(self.devices) <= set(self._without):
                return

    def _once(self) -> tuple[tuple[str, list[int]], str] | None:
        """The check that did not end, and how; None if all ended."""
        request = CheckRequest(
            together=self._config.together,
            simulated=self._config.devices,
            skip=self._skip,
            without=self._without,
        )
        words = [*self._command, json.dumps(dataclasses.asdict(request))]
        with tempfile.TemporaryFile() as errors:
            child = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ
                | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
                | {"XLA_FLAGS": " ".join([*_FLAGS, os.environ.get("XLA_FLAGS", "")])}
                | _WITHOUT_MULTICAST,
            )
            lines: queue.Queue[str | None] = queue.Queue()
            assert child.stdout is not None
            reader = threading.Thread(
                target=_read, args=(child.stdout, lines), daemon=True
            )
            reader.start()
            try:
                failed = self._follow(lines)
                if failed is not None and failed[1] == "died":
                    code = child.wait()
                    failed = failed[0], f"ended the process: {_last(errors, code)}"
                return failed
            finally:
                child.kill()
                if _survives(child):
                    self.notes.append("the process that measures cannot be killed")
                else:
                    reader.join()

    def _follow(
        self, lines: "queue.Queue[str | None]"
    ) -> tuple[tuple[str, list[int]], str] | None:
        now: tuple[str, list[int]] = ("start", [])
        while True:
            left = self._until - time.monotonic()
            limit = min(left, self._config.measure_seconds)
            try:
                line = lines.get(timeout=max(limit, 0.001))
            except queue.Empty:
                hangs = limit == self._config.measure_seconds
                return now, f"did not end within {limit:g} s" if hangs else ""
            if line is None:
                return now, "died"
            said = _said(line)
            if "devices" in said:
                self.devices |= {device["id"]: device for device in said["devices"]}
            elif "begin" in said:
                now = said["begin"], said["ids"]
                self._skip.append(list(now))
            elif "measured" in said:
                found = said["measured"] | {
                    "devices": tuple(said["measured"]["devices"])
                }
                self.measurements.append(Measurement(**found))
            elif "end" in said:
                self.process = said["end"]
                return None


def _survives(child: "subprocess.Popen[str]") -> bool:
    """Whether a killed process still exists, as with a hanging GPU driver."""
    try:
        child.wait(5.0)
    except subprocess.TimeoutExpired:
        return True
    return False


def judge(
    measurements: Iterable[Measurement],
    devices: Sequence[Mapping[str, Any]],
    config: DiagnoseConfig,
) -> list[Finding]:
    """The faults that the measurements show.

    Example:
        >>> devices = [{"id": i, "kind": "NVIDIA H200", "platform": "gpu", "host": "a"}
        ...            for i in range(3)]
        >>> rates = {0: 4.0e12, 1: 3.1e12, 2: 4.0e12}
        >>> found = judge([Measurement(name="memory", devices=(i,), value=rate)
        ...                for i, rate in rates.items()], devices, DiagnoseConfig())
        >>> found[0].devices, found[0].text
        ((1,), 'memory: 3100 GB/s, 22% below the median of the others, 4000 GB/s')
    """
    measured = list(measurements)
    findings = [
        Finding(devices=m.devices, text=f"{m.name}: {m.problem}")
        for m in measured
        if m.problem
    ]
    by_id = {device["id"]: device for device in devices}
    rates: dict[tuple[str, str], dict[tuple[int, ...], float]] = {}
    for m in measured:
        kinds = {by_id[i]["kind"] for i in m.devices if i in by_id}
        on_gpus = all(by_id[i]["platform"] == "gpu" for i in m.devices if i in by_id)
        if m.value is not None and len(kinds) == 1 and on_gpus:
            name = f"{m.name} of {m.size} bytes" if m.size else m.name
            group = rates.setdefault((kinds.pop(), name), {})
            # Several processes measured the same: keep the slowest.
            group[m.devices] = min(m.value, group.get(m.devices, m.value))
    for (kind, name), values in rates.items():
        if name == "pairs":
            findings += _slow_pairs(values, config)
        else:
            findings += _slow(name, values, _expected(name, kind), config)
    if len({device.get("host") for device in devices}) == 1:
        findings += _slow_collectives(measured, devices, config)
    return findings + _other_bits(measured, by_id)


def shown(name: str, value: float) -> str:
    """A rate with its unit.

    Example:
        >>> shown("matmul bfloat16", 7.5e14), shown("memory", 4.0e12)
        ('750 TFLOP/s', '4000 GB/s')
    """
    if name.startswith("matmul"):
        return f"{value / 1e12:.3g} TFLOP/s"
    return f"{value / 1e9:.4g} GB/s"


def _expected(name: str, kind: str) -> float | None:
    """The rate that a device model should reach; None if unknown."""
    hardware = hardware_of(kind)
    return (
        getattr(hardware, _EXPECTED[name]) if hardware and name in _EXPECTED else None
    )


def _slow(
    name: str,
    values: Mapping[tuple[int, ...], float],
    expected: float | None,
    config: DiagnoseConfig,
) -> list[Finding]:
    findings = []
    for ids, value in values.items():
        others = [other for key, other in values.items() if key != ids]
        usual = statistics.median(others) if others else 0.0
        spread = statistics.median(abs(x - usual) for x in others) if others else 0.0
        slack = 2 * config.slack if name in _LINKS else config.slack
        least = usual - max(slack * usual, _DEVIATIONS * spread)
        text = ""
        if expected is not None and value < config.least_share * expected:
            share = value / expected
            text = (
                f"{name}: {shown(name, value)}, {share:.0%} of what its model should "
            )
            text += f"do, {shown(name, expected)}"
        elif value < least:
            below = 1 - value / usual
            text = f"{name}: {shown(name, value)}, {below:.0%} below the median of the "
            text += f"others, {shown(name, usual)}"
        if text:
            findings.append(Finding(devices=ids, text=text))
    return findings


def _slow_pairs(
    values: Mapping[tuple[int, ...], float], config: DiagnoseConfig
) -> list[Finding]:
    """Devices whose pairs are slow with most others, and slow pairs of others."""
    of_device = collections.defaultdict[int, list[float]](list)
    for ids, value in values.items():
        for device in ids:
            of_device[device].append(value)
    found: list[Finding] = []
    if len(of_device) > 3:  # of three, one that is slow leaves the others one good pair
        medians = {(i,): statistics.median(rates) for i, rates in of_device.items()}
        found = _slow("pairs", medians, None, config)
    named = {finding.devices[0] for finding in found}
    rest = {ids: value for ids, value in values.items() if not named & set(ids)}
    return found + _slow("pairs", rest, None, config)


def _slow_collectives(
    measured: Iterable[Measurement],
    devices: Sequence[Mapping[str, Any]],
    config: DiagnoseConfig,
) -> list[Finding]:
    """Collectives within a host that are slow at their largest size."""
    hardware = hardware_of(devices[0]["kind"])
    largest: dict[str, Measurement] = {}
    for m in measured:
        if m.size > largest.get(m.name, Measurement(name="", devices=())).size:
            largest[m.name] = m
    return [
        Finding(devices=(), text=finding.text)
        for name, m in largest.items()
        if hardware is not None and m.value is not None
        for finding in _slow(name, {m.devices: m.value}, hardware.link, config)
    ]


def _other_bits(
    measured: Iterable[Measurement], by_id: Mapping[int, Mapping[str, Any]]
) -> list[Finding]:
    """Devices whose results differ bitwise from most others of their model."""
    by_kind = collections.defaultdict[str, dict[int, str]](dict)
    for m in measured:
        if m.bits and m.devices[0] in by_id:
            by_kind[by_id[m.devices[0]]["kind"]][m.devices[0]] = m.bits
    findings = []
    for bits in by_kind.values():
        (usual, count), *_ = collections.Counter(bits.values()).most_common()
        if 2 * count > len(bits):
            text = (
                "bits: a product of whole numbers has other bits than on most devices"
            )
            findings += [
                Finding(devices=(device,), text=text)
                for device, found in bits.items()
                if found != usual
            ]
        else:
            text = "bits: products of whole numbers differ, and none is that of most"
            findings.append(Finding(devices=tuple(bits), text=text))
    return findings


def _read(stream: Any, lines: "queue.Queue[str | None]") -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _said(line: str) -> dict[str, Any]:
    """Parse a line of the measuring process; output of libraries is ignored."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


def _last(errors: Any, code: int) -> str:
    """The last line of an error, or the code."""
    errors.seek(0)
    lines = errors.read()[-4096:].decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:300] if lines else f"code {code}"
