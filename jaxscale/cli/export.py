"""``jaxscale export SOURCE DIR``: a run's model as a Hugging Face directory."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from jaxscale.cli.errors import usage_errors
from jaxscale.cli.notices import notice
from jaxscale.cli.options import parse
from jaxscale.cli.sources import source_first
from jaxscale.recipes.export import export


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """The options of ``jaxscale export``."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="SOURCE")]
    """The output directory of a run; also --from SOURCE."""
    target: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR")]
    """The new directory: config.json, safetensors and tokenizer, for transformers and
    for this library."""
    step: int | None = None
    """Step of the checkpoint; the newest by default."""
    param_dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the parameters in the files; by default that of the run."""
    max_shard_gb: float = 5.0
    """Maximum size of a safetensors file, in GB."""
    checksums: bool = True
    """Also write checksums.sha256, against which this library verifies all bytes of the
    weights at each start."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no run, or its model cannot be written.
    """
    command = parse(
        ExportCommand,
        source_first(arguments, others=1),
        prog="jaxscale export",
        description="Write the model of a run as a Hugging Face directory, and check "
        "it by reading it back. Adapters are merged; pruned weights are zero.",
    )
    notice(f"reading {command.source}")
    with usage_errors():
        written = export(
            command.source,
            command.target,
            step=command.step,
            param_dtype=command.param_dtype,
            max_shard_bytes=int(command.max_shard_gb * 1e9),
            checksums=command.checksums,
        )
    print(f"{command.target}: {written}, read back and compared")
    return 0
