"""The devices that a command runs on, settled before any of them is used."""

import jax

from jaxscale.cli.errors import UsageError


_MOST_DEVICES = 4096  # more take minutes to start


def simulate_devices(count: int | None) -> None:
    """Give the process `count` simulated CPU devices instead of the real ones.

    Args:
        count: Number of devices; None keeps those of the machine.

    Raises:
        UsageError: `count` is not positive, or larger than any machine.
    """
    if count is None:
        return
    if not 1 <= count <= _MOST_DEVICES:
        raise UsageError(f"--devices {count}, expected 1 to {_MOST_DEVICES}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
