"""The devices that a command runs on, settled before any of them is used."""

import jax

from jaxscale.cli.errors import UsageError


def simulate_devices(count: int | None) -> None:
    """Give the process `count` simulated CPU devices instead of the real ones.

    Args:
        count: How many; None keeps the devices of the machine.

    Raises:
        UsageError: `count` is not positive.
    """
    if count is None:
        return
    if count < 1:
        raise UsageError(f"--devices {count}, expected at least 1")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)
