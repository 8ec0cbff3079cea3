"""``jaxscale diagnose``: find slow or faulty devices of this host or of a job."""

import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxscale.cli.devices import announce_devices
from jaxscale.cli.errors import usage_errors
from jaxscale.cli.options import parse
from jaxscale.training.diagnosis.suite import (
    DiagnoseConfig,
    Diagnosis,
    Finding,
    diagnose,
    shown,
)


_COLUMNS = ("matmul bfloat16", "matmul float32", "memory")
_COLUMNS += ("from the host", "to the host", "pairs", "neighbors")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiagnoseCommand(DiagnoseConfig):
    """The options of ``jaxscale diagnose``."""

    host: bool = True
    """Also check the disk and the CPU arithmetic of this host."""
    directory: Path = Path(tempfile.gettempdir())
    """Directory for the disk check."""
    json: str = ""
    """JSON file for all measurements, or - for standard output instead of the table."""


def main(arguments: Sequence[str]) -> int:
    """Run the command: 1 if something is slow, wrong or stuck.

    Raises:
        UsageError: the settings cannot work.
    """
    command = parse(
        DiagnoseCommand,
        arguments,
        prog="jaxscale diagnose",
        description="Measure matmuls, memory and links of the devices, check what "
        "they compute, and name the one that is slow, wrong or stuck. Exits with 1 if "
        "there is one.",
    )
    announce_devices()
    found = diagnose(
        command, directory=str(command.directory) if command.host else None
    )
    if not found.first:  # of those that check together the first one reports
        return 1 if found.findings else 0
    if command.json == "-":
        print(json.dumps(found.to_json(), indent=2))
    else:
        if jax.devices()[0].platform == "gpu":
            print(f"{_kernels()}\n")
        print(table(found))
    if command.json not in ("", "-"):
        with usage_errors():
            Path(command.json).write_text(json.dumps(found.to_json(), indent=2) + "\n")
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    if found.findings:
        text = "; ".join(_text(finding) for finding in found.findings)
        # The last line: a supervisor keeps it.
        print(text, file=sys.stderr if command.json == "-" else sys.stdout)
    return 1 if found.findings else 0


def table(found: Diagnosis) -> str:
    """The measurements: a row per device, then a line per collective."""
    rows = [["device", *_COLUMNS, "results"]]
    wrong = {i for finding in found.findings for i in finding.devices}
    for device in found.devices:
        number = device["id"]
        cells = [f"{device['platform']} {number} ({device['kind']}, {device['host']})"]
        for name in _COLUMNS:
            values = [
                m.value
                for m in found.measurements
                if m.name == name and number in m.devices and m.value is not None
            ]
            cells.append(shown(name, statistics.median(values)) if values else "-")
        rows.append([*cells, "FAULT" if number in wrong else "ok"])
    kept = [i for i in range(len(rows[0])) if {row[i] for row in rows[1:]} != {"-"}]
    widths = {i: max(len(row[i]) for row in rows) for i in kept}
    lines = ["  ".join(row[i].ljust(widths[i]) for i in kept).rstrip() for row in rows]
    for m in found.measurements:
        if m.size and m.value is not None:
            rate, count = shown(m.name, m.value), len(m.devices)
            lines.append(f"{m.name} of {m.size:,} bytes over {count} devices: {rate}")
    lines += [f"fault: {_text(finding)}" for finding in found.findings]
    return "\n".join(lines if found.findings else [*lines, "nothing is wrong"])


def _kernels() -> str:
    """Which implementation each op takes on the device, in bfloat16."""
    # Here, because it imports every op.
    from pallas_kernels import implementations

    return implementations.table(implementations.implementations())


def _text(finding: Finding) -> str:
    if not finding.devices:
        return finding.text
    numbers = ", ".join(map(str, finding.devices))
    noun = "device" if len(finding.devices) == 1 else "devices"
    return f"{noun} {numbers}: {finding.text}"
