"""``jaxscale quickstart``: the main job, end to end, on real text in a few minutes."""

import contextlib
from collections.abc import Sequence

import jax

from jaxscale.cli.devices import announce_devices
from jaxscale.cli.errors import training_errors, usage_errors
from jaxscale.cli.options import parse
from jaxscale.recipes.quickstart import (
    SIMULATED_DEVICES,
    QuickstartConfig,
    make_room,
    run,
)
from jaxscale.recipes.serve_trained import check_client
from jaxscale.training.lock import locked


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: the settings cannot work; nothing has been compiled or written.
        RunFailed: one of its trainings diverged.
    """
    config = parse(
        QuickstartConfig,
        arguments,
        prog="jaxscale quickstart",
        description="Train a small model on real text, save, restore, prune, serve.",
    )
    with contextlib.ExitStack() as stack:
        with usage_errors():
            check_client()
            stack.enter_context(locked(config.output_dir))
            make_room(config.output_dir)
        # Without a GPU, four simulated devices stand in for a machine of four.
        jax.config.update("jax_num_cpu_devices", SIMULATED_DEVICES)
        announce_devices()
        with training_errors():
            run(config)
    return 0
