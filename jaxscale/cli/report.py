"""``jaxscale report SOURCE``: what a run did, as one page, a trace, or live."""

import dataclasses
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxscale.cli.errors import UsageError, usage_errors
from jaxscale.cli.options import parse
from jaxscale.cli.sources import source_first
from jaxscale.observability.layout import find_layout
from jaxscale.observability.live import ReportServer
from jaxscale.observability.page import write_page
from jaxscale.observability.run import read_run
from jaxscale.observability.tensorboard import write_tensorboard
from jaxscale.observability.timeline import chrome_trace
from jaxscale.supervision.protocol import split_address


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportCommand:
    """The options of ``jaxscale report``."""

    run: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """Output directory of the run, which may still be running; also --from SOURCE."""
    output: Path | None = None
    """HTML file to write; by default report.html in SOURCE."""
    chrome_trace: Path | None = None
    """JSON file for the timeline; open it in https://ui.perfetto.dev."""
    tensorboard: Path | None = None
    """New directory for TensorBoard scalars."""
    serve: bool = False
    """Serve the page live, until Ctrl-C or SIGTERM."""
    address: str = "127.0.0.1:0"
    """Listen address of --serve; port 0 picks a free port. On any address but
    127.0.0.1, everyone who can reach it sees the run."""

    def __post_init__(self) -> None:
        split_address(self.address)
        if self.serve and (self.output or self.chrome_trace or self.tensorboard):
            raise ValueError(
                "serve writes no files; give it without the options of any"
            )


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no run, or a file cannot be written.
    """
    command = parse(
        ReportCommand,
        source_first(arguments),
        prog="jaxscale report",
        description="Show what a run did: loss, where the time went, faults, who waits "
        "for whom in the mesh, slow ranks, a timeline, memory and compilation.",
    )
    if not command.run.is_dir():
        raise UsageError(f"{command.run} is no directory; give that of a run")
    if command.serve:
        return _serve(command)
    with usage_errors():
        run = read_run(command.run)
        path = write_page(run, command.output or command.run / "report.html")
        print(f"report: {path}")
        if command.chrome_trace is not None:
            found = chrome_trace(run, find_layout(run), command.chrome_trace)
            print(
                f"trace: {command.chrome_trace}, {found[1]:,} events from step "
                f"{found[0]} on; open it in https://ui.perfetto.dev"
            )
        if command.tensorboard is not None:
            write_tensorboard(run, command.tensorboard)
            print(f"scalars: tensorboard --logdir {command.tensorboard}")
    return 0


def _serve(command: ReportCommand) -> int:
    with usage_errors():
        server = ReportServer(split_address(command.address), command.run)
    before = {  # a shell's background ignores one
        number: signal.signal(number, signal.default_int_handler)
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        )  # a shell's background ignores one
    }
    with server:
        print(f"live: {server.url} (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended")
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    return 0
