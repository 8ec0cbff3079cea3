"""Whether the host held back the clocks of its GPUs while something was timed.

The driver counts for each GPU how long heat, or the power supply of the host, has
lowered its clock. Times taken meanwhile say nothing of another host. The GPU's own
power cap is not among these: under load every user meets it.
"""

import os
import subprocess
import time

from benchmarks.measure import timing


REASONS = ("hw_thermal_slowdown", "hw_power_brake_slowdown", "sw_thermal_slowdown")
"""As `nvidia-smi --help-query-gpu` names them."""

HELD_BACK = 0.01
"""Share of the time from which rows are not kept."""


class Clocks:
    """The GPUs of this process, from when it is made."""

    def __init__(self) -> None:
        self._seconds, self._since = _counted(), time.monotonic()

    def held_back(self) -> float:
        """Share of the time since the last call, of the GPU that was held back most.

        It is 0 where the driver does not count.
        """
        seconds, now = _counted(), time.monotonic()
        grown = (new - old for old, new in zip(self._seconds, seconds, strict=False))
        share = max(grown, default=0.0) / max(now - self._since, 1e-3)
        self._seconds, self._since = seconds, now
        return share


def _counted() -> list[float]:
    """Seconds of each GPU, for all reasons together."""
    if not timing.on_gpu():
        return []
    names = ",".join(f"clocks_event_reasons_counters.{name}" for name in REASONS)
    command = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    if chosen := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", chosen]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=60
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        sum(1e-6 * int(x) for x in line.split(", ") if x.isdigit())
        for line in done.stdout.splitlines()
    ]
