"""Train, prune and serve a small model in a few minutes: ``jaxscale quickstart``.

The quickstart is a sequence of steps. Each is a function that takes the `Session`, does
its part, adds it to the report and returns a line on its result; a new feature adds a
function to `STEPS`.
"""

import dataclasses
import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from jaxscale import sharding
from jaxscale.checks import check_range
from jaxscale.models import Decoder, DecoderConfig
from jaxscale.observability.html_report import Report, add_steps
from jaxscale.pruning import PruneConfig, sparsify
from jaxscale.recipes.prune import (
    TuneConfig,
    bytes_per_token,
    prune_and_tune,
    tuning_config,
)
from jaxscale.recipes.prune_report import add_settings, add_to_report
from jaxscale.recipes.serve_trained import REQUESTS, serve_trained
from jaxscale.sharding import MeshConfig
from jaxscale.training import (
    DataConfig,
    OptimizerConfig,
    TextData,
    TrainConfig,
    TrainState,
    fit,
    load_text,
    packed_batches,
)
from jaxscale.training import run as run_directory
from jaxscale.training.compilation_cache import programs_in
from jaxscale.training.config import MAX_SEED, MAX_STEPS
from jaxscale.training.lock import LOCK_FILE


SIMULATED_DEVICES = 4
PROMPTS = ("def read_lines(path):", "class ", "The with statement")


@dataclasses.dataclass(frozen=True, kw_only=True)
class QuickstartConfig:
    """Length and output directory of the quickstart."""

    steps: int = 160
    """Training steps of 1,024 tokens, or more on more than four devices."""
    seed: int = 0
    """Random seed of the initial parameters, the data order and sampling."""
    output_dir: Path = Path("runs/quickstart")
    """Output directory: checkpoints, metrics and report.html; an earlier quickstart in
    it is replaced."""

    def __post_init__(self) -> None:
        """Check what needs no devices."""
        check_range(self, 1, MAX_STEPS, "steps")
        check_range(self, 0, MAX_SEED, "seed")


class Session:
    """State that the steps of one quickstart share."""

    def __init__(self, config: QuickstartConfig) -> None:
        """Choose a model and a mesh that suit the devices of this machine."""
        from rich.console import Console

        self.config = config
        self.console = Console(highlight=False)
        self.report = Report("jaxscale quickstart")
        self.headlines: dict[str, str] = {}
        """The figures that the report opens with, by what they are."""
        devices = jax.devices()
        self.on_gpu = devices[0].platform == "gpu"
        self.train_config = _train_config(config, len(devices), on_gpu=self.on_gpu)
        self.text: TextData
        """Set by `read_text`."""
        self.state: TrainState
        """Set by `train`: the trained model, on the mesh."""
        self.held_out_loss: float
        """Set by `train`: in nats/token."""
        self.sparse_model: Decoder
        """Set by `prune`: the pruned model, which computes only what it keeps."""

    @property
    def bytes_per_token(self) -> float:
        """The bytes per token of the held-out text."""
        return bytes_per_token(self.text)


def read_text(session: Session) -> str:
    """Find the corpus, train a tokenizer on it and turn it into tokens."""
    session.text = load_text(session.train_config.data)
    train, held_out = session.text.train, session.text.held_out
    assert held_out is not None  # the settings hold out five per cent
    session.report.heading("Text")
    session.report.text(
        "Documentation and library source of the running CPython, split by file. It is "
        "real text, but small and of one kind: losses here compare runs with each "
        "other, not models with those trained on the web."
    )
    session.report.facts(
        {
            "training documents": len(train),
            "training tokens": train.num_tokens,
            "held-out documents": len(held_out),
            "held-out tokens": len(held_out.tokens),
            "vocabulary": session.text.tokenizer.vocab_size,
            "bytes per token": session.bytes_per_token,
        }
    )
    return f"{train.num_tokens / 1e6:.1f} M tokens in {len(train)} documents"


def train(session: Session) -> str:
    """Train from scratch; the last step saves a checkpoint."""
    config = session.train_config
    run_directory.write(Path(config.output_dir), config, session.text)
    train_data, eval_data = packed_batches(config, session.text)
    result = fit(config, train_data=train_data, eval_data=eval_data)
    if result.interrupted or result.evaluation is None:
        raise KeyboardInterrupt
    session.state = result.state
    session.held_out_loss = result.evaluation.loss

    records = _metrics(config)
    steps = [r for r in records if "loss" in r]
    # An untrained model starts at the loss of a uniform guess.
    uniform = math.log(config.model.vocab_size)
    if session.held_out_loss >= uniform:
        raise RuntimeError(
            f"the held-out loss {session.held_out_loss:.3f} is no better than a "
            f"guess ({uniform:.3f}): training did not work"
        )
    bits = session.held_out_loss / math.log(2) / session.bytes_per_token
    rates = [r["tokens_per_second_per_device"] for r in steps[1:]]
    rate = sum(rates) / len(rates) if rates else float("nan")
    _report_training(session, records, rate, bits)
    session.headlines[
        f"held-out loss in nats/token after {config.steps} steps; a guess has "
        f"{uniform:.2f}"
    ] = f"{session.held_out_loss:.2f}"
    return (
        f"held-out loss {uniform:.2f} (a guess) to {session.held_out_loss:.2f}, "
        f"{bits:.2f} bits/byte, {rate:,.0f} tokens/s per device"
    )


def restore(session: Session) -> str:
    """Read the checkpoint onto another mesh: the held-out loss must not change."""
    before = session.train_config
    count = math.prod(before.mesh.sizes(jax.device_count()).values())
    after = dataclasses.replace(before, mesh=MeshConfig(fsdp=count))
    train_data, eval_data = packed_batches(after, session.text)
    # A finished run has no steps left: `fit` restores it and evaluates.
    result = fit(after, train_data=train_data, eval_data=eval_data, writers=())
    assert result.evaluation is not None  # `eval_data` is there
    difference = abs(result.evaluation.loss - session.held_out_loss)
    tolerance = 1e-5 if before.dtype == "float32" else 1e-2
    if difference > tolerance:
        raise RuntimeError(
            f"the restored model has a held-out loss of {result.evaluation.loss:.6f}, "
            f"{session.held_out_loss:.6f} was saved"
        )
    old, new = _shape(before.mesh), _shape(after.mesh)
    session.report.heading("Save and restore")
    session.report.table(
        ["mesh", "held-out loss"],
        [
            [f"trained on {old}", f"{session.held_out_loss:.6f}"],
            [f"restored on {new}", f"{result.evaluation.loss:.6f}"],
        ],
    )
    return f"mesh {old} to {new}, held-out loss differs by {difference:.1e}"


def prune(session: Session) -> str:
    """Prune tile-wise to 75%, train on under the masks, compute only what is kept."""
    dense, directory = session.train_config, session.config.output_dir / "pruned"
    config = tuning_config(
        dense,
        steps=max(1, session.config.steps // 4),
        # That of the last steps: a higher one harms the dense model, too.
        learning_rate=dense.optimizer.learning_rate / 10,
        mesh=dense.mesh,
        output_dir=directory,
    )
    config = dataclasses.replace(config, eval_every=config.steps)
    tensor = dense.mesh.sizes(jax.device_count())["tensor"]
    model = cast(DecoderConfig, dense.model)
    narrowest = model.num_kv_heads * model.head_dim
    # The kernels want tiles of at least 64 columns; this model is small.
    settings = PruneConfig(
        sparsity=0.75, tile=min(64, narrowest // tensor), shards=tensor
    )
    run_directory.write(directory, config, session.text)
    pruned = prune_and_tune(
        config,
        session.state.model,
        session.text,
        settings,
        TuneConfig(control=True),
        say=lambda line: session.console.print(f"     {line}"),
    )
    pruned.masks.save(directory / run_directory.MASKS_FILE)
    masked = pruned.result.state.model
    mesh = masked.embed.table[...].sharding.mesh
    session.sparse_model = sharding.place(
        sparsify(masked, pruned.masks), mesh, dense.axis_rules
    )
    difference = abs(pruned.measure(session.sparse_model).loss - pruned.tuned.loss)
    if difference > (1e-4 if config.dtype == "float32" else 2e-2):
        raise RuntimeError(
            f"the sparse form of the pruned model has another held-out loss, by "
            f"{difference:.1e}"
        )
    add_to_report(session.report, pruned, session.bytes_per_token)
    session.report.text(
        "The sparse form, which stores and computes only what is kept, has the same "
        f"held-out loss{f' up to {difference:.1e}' if difference else ''}."
    )
    session.headlines[
        f"of the weights pruned; held-out loss {pruned.before.loss:.2f} dense, "
        f"{pruned.after.loss:.2f} pruned, {pruned.tuned.loss:.2f} trained on"
    ] = f"{pruned.masks.sparsity:.0%}"
    speed = _speed(session, masked, session.sparse_model) if session.on_gpu else ""
    assert pruned.control is not None  # asked for
    return (
        f"{pruned.masks.sparsity:.0%} of the weights of the layers gone: held-out loss "
        f"{pruned.before.loss:.2f}, pruned {pruned.after.loss:.2f}, after "
        f"{config.steps} steps {pruned.tuned.loss:.2f}, dense after as many more "
        f"{pruned.control.loss:.2f}{speed}"
    )


def _speed(session: Session, dense: Decoder, sparse: Decoder) -> str:
    """Time both forms of the pruned model on the GPUs; returns a summary."""
    data = session.train_config.data
    mesh = dense.embed.table[...].sharding.mesh
    times = {}
    with jax.set_mesh(mesh):
        rows = jax.numpy.zeros((data.batch_size, data.seq_len), jax.numpy.int32)
        for name, model in (("dense with zeros", dense), ("sparse", sparse)):
            forward = jax.jit(lambda model, rows: model.hidden(rows))
            jax.block_until_ready(forward(model, rows))
            start = time.perf_counter()
            for _ in range(20):
                out = forward(model, rows)
            jax.block_until_ready(out)
            times[name] = (time.perf_counter() - start) / 20
    session.report.facts(
        {f"forward pass, {name} (ms)": 1e3 * seconds for name, seconds in times.items()}
    )
    session.report.text(
        "A model this small is bound by launches, not by its products: "
        "benchmarks/results has the times of layers of real size."
    )
    faster = times["dense with zeros"] / times["sparse"]
    return f"; forward pass {faster:.2f} times as fast"


def serve(session: Session) -> str:
    """Serve the trained model, dense and pruned, to requests that overlap."""
    models = {"dense": session.state.model, "pruned": session.sparse_model}
    found = serve_trained(
        models,
        session.text.tokenizer,
        PROMPTS,
        session.report,
        seed=session.config.seed,
    )
    for prompt, answer in zip(PROMPTS, found["dense"].answers, strict=False):
        text = prompt + answer.text
        session.report.sample(text)
        session.console.print(text, style="dim", markup=False, soft_wrap=True)
        session.console.print()
    session.headlines[
        f"tokens/s of the dense model over HTTP, {REQUESTS} requests at once"
    ] = f"{found['dense'].rate:,.0f}"
    rates = ", ".join(f"{name} {each.rate:,.0f}" for name, each in found.items())
    return f"{REQUESTS} requests over HTTP, the same texts as alone; tokens/s: {rates}"


type Step = tuple[str, Callable[[Session], str]]

STEPS: tuple[Step, ...] = (
    ("Read text, train tokenizer", read_text),
    ("Train", train),
    ("Restore on another mesh", restore),
    ("Prune to tiles, train on", prune),
    ("Serve over HTTP", serve),
)
"""The steps of the quickstart, in order."""


def run(config: QuickstartConfig, steps: Sequence[Step] = STEPS) -> Path:
    """Run the steps, print what each cost and gained, and write the report.

    Returns:
        The path of the report.
    """
    from rich.table import Table

    # A line for each file that is saved would bury the progress bar.
    logging.getLogger("absl").setLevel(logging.WARNING)
    session = Session(config)
    device = jax.devices()[0].device_kind
    where = f"{jax.device_count()} x {device}" + (
        "" if session.on_gpu else " (simulated)"
    )
    session.console.print(f"[bold]jaxscale quickstart[/bold] on {where}")
    rows = []
    with (
        tempfile.TemporaryDirectory(prefix="jaxscale-") as programs,
        programs_in(Path(programs)),  # of which steps share some
    ):
        for i, (name, step) in enumerate(steps, 1):
            session.console.print(f"[bold]{i}/{len(steps)}  {name}[/bold]")
            start = time.perf_counter()
            gained = step(session)
            rows.append([name, f"{time.perf_counter() - start:.1f} s", gained])
            session.console.print(f"     {gained}", soft_wrap=True)

    page = Report("jaxscale quickstart")
    page.headlines(session.headlines)
    page.heading("What each step cost and gained")
    page.text(f"Device: {where}.")
    page.table(["step", "time", "result"], rows)
    page.extend(session.report)
    add_settings(page, session.train_config)
    path = page.write(config.output_dir / "report.html")
    table = Table("step", "time", "result", title="jaxscale quickstart")
    for row in rows:
        table.add_row(*row)
    session.console.print(table)
    session.console.print(f"report: {path}")
    session.console.print(
        f"next:   jaxscale generate --from {config.output_dir} --prompt 'import '",
        markup=False,
    )
    return path


def _train_config(
    config: QuickstartConfig, num_devices: int, *, on_gpu: bool
) -> TrainConfig:
    """A small LLaMA on a 2 x 2 mesh of simulated devices, or on the GPUs there are."""
    tensor = 2 if num_devices >= 4 and num_devices % 2 == 0 else 1
    vocab_size = 2048
    # A multiple of all devices, over which `restore` splits it.
    batch_size = num_devices * math.ceil(4 / num_devices)
    return TrainConfig(
        model=DecoderConfig(
            vocab_size=vocab_size,
            d_model=128,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=32,
            d_ff=384,
            max_seq_len=1024,
        ),
        data=DataConfig(
            vocab_size=vocab_size, seq_len=256, batch_size=batch_size, seed=config.seed
        ),
        # A third of the tokens that AdamW needs for the same loss.
        optimizer=OptimizerConfig(
            kind="muon", learning_rate=0.015, warmup_steps=min(20, config.steps // 2)
        ),
        mesh=MeshConfig(fsdp=num_devices // tensor, tensor=tensor),
        rules="fsdp_tp",
        scan_layers=True,  # compiles in a third of the time
        steps=config.steps,
        dtype="bfloat16" if on_gpu else "float32",
        eval_every=max(1, config.steps // 4),
        eval_batches=8,
        checkpoint_every=config.steps,
        seed=config.seed,
        output_dir=str(config.output_dir),
    )


def make_room(directory: Path) -> None:
    """Remove an earlier quickstart; other files are not ours to remove.

    Raises:
        ValueError: `directory` is or holds something else.
    """
    if not directory.exists():
        return
    there = [directory]
    if directory.is_dir():  # but for the lock, which may be ours
        there = [path for path in directory.iterdir() if path.name != LOCK_FILE]
    if there and not run_directory.is_run(directory):
        raise ValueError(
            f"output_dir {directory} is or holds what is no run of jaxscale; choose "
            "another directory"
        )
    for path in there:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _report_training(
    session: Session, records: Sequence[dict[str, Any]], rate: float, bits: float
) -> None:
    """Size, loss and throughput of the run."""
    config, report = session.train_config, session.report
    report.heading("Training")
    report.facts(
        {
            "parameters": config.model.num_parameters(),
            "mesh": _shape(config.mesh),
            "tokens a step": config.data.tokens_per_batch,
            "steps": config.steps,
            "held-out loss (nats/token)": session.held_out_loss,
            "held-out bits/byte": bits,
            "tokens/s per device": rate,
        }
    )
    add_steps(report, records)


def _metrics(config: TrainConfig) -> list[dict[str, Any]]:
    lines = (Path(config.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def _shape(mesh: MeshConfig) -> str:
    """The axes of a mesh that are longer than one, for people."""
    sizes = mesh.sizes(jax.device_count())
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return " x ".join(split) or "one device"
