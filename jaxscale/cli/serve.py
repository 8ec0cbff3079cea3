"""``jaxscale serve DIR``: a model behind an HTTP server in the form of OpenAI's API."""

import dataclasses
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from jaxscale import sharding
from jaxscale.cli.devices import simulate_devices
from jaxscale.cli.errors import UsageError, usage_errors
from jaxscale.cli.options import parse
from jaxscale.inference import EngineConfig, HostLost, follow
from jaxscale.inference.lora_modules import parse_lora_modules
from jaxscale.models.hf.hub import local_directory
from jaxscale.sharding import AxisRules, MeshConfig


_KEYS = "JAXSCALE_API_KEYS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The model of ``jaxscale serve``, its address, and what calls may ask for."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="DIR")]
    """A Hugging Face directory with config.json, safetensors and tokenizer.json, of a
    decoder or of an encoder; the name of a model on the Hugging Face hub; or the output
    directory of a run."""
    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 is reached from other machines."""
    port: int = 8000
    """Port to listen at; 0 takes a free one."""
    name: str | None = None
    """Name of the model in calls; by default that of the directory."""
    aliases: tuple[str, ...] = ()
    """Other names that calls may give it."""
    lora_modules: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=DIR ...")] = ()
    """Adapters (LoRA) of a decoder, which calls choose as their model by NAME, each a
    directory that peft has written, or that of a run which has trained one."""
    api_keys_file: str | None = None
    """A file with a key in each line, of which a call must show one; lines that begin
    with # are comments."""
    allowed_hosts: tuple[str, ...] | None = None
    """Names by which calls may ask for the server in `Host`, "*" for any; by default
    those of this machine where --host is loopback, otherwise any."""
    allowed_origins: tuple[str, ...] = ()
    """Sites whose pages may call from a browser (CORS), "*" for any."""
    isolate_clients: bool = False
    """Share cached prompts among calls with the same key only."""
    allow_priority: bool = False
    """Let calls choose their priority."""
    chat_template: str | None = None
    """A file with a Jinja template, instead of the model's."""
    tool_format: Literal["auto", "hermes", "llama", "mistral", "qwen3_coder"] = "auto"
    """Format of the calls of tools in answers; auto takes that of the template."""
    reasoning_format: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"
    """Format of the reasoning in answers, which is told from the rest; auto takes that
    of the template, none leaves it in the text."""
    sampling_defaults: bool = True
    """Where a call says nothing, draw as the generation_config.json of the model
    advises."""
    strict_schemas: bool = False
    """Refuse JSON schemas of which something cannot be enforced, instead of leaving
    that aside."""
    tls_certificate: str | None = None
    """A file with a certificate, and those that vouch for it (PEM): calls come by
    https."""
    tls_key: str | None = None
    """A file with the key of the certificate; by default it is in the same file."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lines of the log that are written: these and graver ones."""
    drain_seconds: float = 60.0
    """Time that running calls have to end after SIGTERM."""
    max_body_mib: int = 16
    """Longest body of a call, in MiB."""
    access_log: bool = False
    """Write a line for each call."""
    engine: EngineConfig = EngineConfig(program_cache="~/.cache/jaxscale/programs")
    """Sizes of the engine of a decoder."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the computation; by default that of the run or of the file."""
    quantization: Literal["int8", "fp8"] | None = None
    """Weights of 8 bits with a scale for each output feature, of a decoder."""
    mesh: MeshConfig = MeshConfig()
    """Mesh of devices for a model that is too large for one; of all devices where there
    are several processes."""
    rules: str = "fsdp_tp"
    """Sharding rules, by the name of a preset, where there are several devices."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no model, it does not fit, or the address is taken.
    """
    config = parse(
        ServeConfig,
        arguments,
        prog="jaxscale serve",
        description="Serve a model over HTTP, in the form of OpenAI's API. Keys are "
        f"also taken from the environment, as {_KEYS}, with commas between them.",
    )
    simulate_devices(config.devices)
    with usage_errors():
        sharding.initialize()
    run(config)
    return 0


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or Ctrl-C; other processes than the first follow it.

    Raises:
        UsageError: there is no model, it does not fit, or the address is taken.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("jaxscale").setLevel(config.log_level.upper())
    with usage_errors():
        from jaxscale.inference.server import ServerConfig, serve
        from jaxscale.inference.server.run import LOOPBACK

        keys = _keys(config)
        settings = ServerConfig(
            api_keys=keys,
            allowed_hosts=config.allowed_hosts,
            allowed_origins=config.allowed_origins,
            isolate_clients=config.isolate_clients,
            allow_priority=config.allow_priority,
            drain_seconds=config.drain_seconds,
            max_body_bytes=config.max_body_mib * 2**20,
            strict_schemas=config.strict_schemas,
            tls_certificate=config.tls_certificate,
            tls_key=config.tls_key,
        )
        if jax.process_index():
            _follow(config)
            return
        # Until the server takes signals itself: nothing runs yet that has to end.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        load = _loader(config)
        if not keys and config.host not in LOOPBACK:
            print(
                f"jaxscale: --host {config.host} lets other machines in, and there are "
                "no keys: anyone who reaches this port can use the model",
                file=sys.stderr,
            )
        host = f"[{config.host}]" if ":" in config.host else config.host

        def bound(port: int) -> None:
            scheme = "http" if config.tls_certificate is None else "https"
            print(
                f"jaxscale: serving at {scheme}://{host}:{port}, the batch at /live; "
                "ready when /ready says so",
                file=sys.stderr,
                flush=True,
            )

        loaded = serve(
            load,
            settings,
            host=config.host,
            port=config.port,
            access_log=config.access_log,
            on_bound=bound,
        )
    if not loaded:
        # What compiles cannot be stopped, and would abort the end of the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _keys(config: ServeConfig) -> tuple[str, ...]:
    keys = os.environ.get(_KEYS, "").split(",")
    if config.api_keys_file is not None:
        lines = Path(config.api_keys_file).read_text().splitlines()
        lines = [line for line in lines if not line.lstrip().startswith("#")]
        if not any(line.strip() for line in lines):
            raise ValueError(f"--api-keys-file {config.api_keys_file} holds no key")
        keys += lines
    return tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))


def _follow(config: ServeConfig) -> None:
    """Run what process 0 plans, until it ends."""
    from jaxscale.inference.server.load import load_decoder

    # Launchers send these to all; process 0 drains, and ends the others.
    for sent in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sent, signal.SIG_IGN)
    source, mesh, rules, dtype = _model(config)
    me, count = jax.process_index(), jax.process_count()
    print(f"jaxscale: process {me} of {count} follows process 0", file=sys.stderr)
    model = load_decoder(
        source,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        quantization=config.quantization,
        lora_modules=parse_lora_modules(config.lora_modules),
    )
    try:
        follow(model, config=config.engine)
    except HostLost:  # which has been logged
        os._exit(1)  # otherwise JAX would wait for all processes


def _loader(config: ServeConfig) -> Callable[[], Any]:
    """What loads the model; what can be checked at once is."""
    from jaxscale.inference.server.load import ChatOptions, served

    template = None
    if config.chat_template is not None:
        template = Path(config.chat_template).read_text()
    chat = ChatOptions(
        template=template,
        tool_format=config.tool_format,
        reasoning_format=config.reasoning_format,
    )
    lora_modules = parse_lora_modules(config.lora_modules)
    source, mesh, rules, dtype = _model(config)
    return lambda: served(
        source,
        name=config.name,
        engine=config.engine,
        chat=chat,
        aliases=config.aliases,
        sampling_defaults=config.sampling_defaults,
        mesh=mesh,
        rules=rules,
        dtype=dtype,
        quantization=config.quantization,
        lora_modules=lora_modules,
    )


def _model(config: ServeConfig) -> tuple[Path, Mesh | None, AxisRules, Any]:
    """Where the model lies, where to put it, and its type."""
    source = local_directory(config.source)
    names = ("config.json", "modules.json", "run.json")
    if not any((source / name).is_file() for name in names):
        raise UsageError(f"{source} holds no model: none of {', '.join(names)}")
    mesh = _mesh(config.mesh)
    rules = sharding.preset(config.rules) if mesh else sharding.REPLICATED
    return (
        source,
        mesh,
        rules,
        None if config.dtype is None else jnp.dtype(config.dtype),
    )


def _mesh(config: MeshConfig) -> Mesh | None:
    """The mesh on just as many devices as it needs; None where that is one."""
    sizes = [getattr(config, axis) for axis in sharding.MESH_AXES]
    there = len(jax.devices())
    needed = there if -1 in sizes else math.prod(sizes)
    if jax.process_count() > 1 and needed != there:
        raise UsageError(
            f"the {jax.process_count()} processes have {there} devices, but the mesh "
            f"takes {needed}; split the model over all, as with --mesh.tensor {there}"
        )
    if needed == 1:
        return None
    return sharding.make_mesh(config, jax.devices()[:needed])
