"""``jaxscale serve SOURCE``: an OpenAI-compatible HTTP server for a model."""

import contextlib
import dataclasses
import gc
import importlib
import logging
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import Mesh

from jaxscale import sharding
from jaxscale.checks import check_range
from jaxscale.cli.devices import announce_devices, simulate_devices
from jaxscale.cli.errors import UsageError, usage_errors
from jaxscale.cli.notices import notice
from jaxscale.cli.options import parse
from jaxscale.cli.sources import source_first
from jaxscale.inference import EngineConfig, HostLost, follow
from jaxscale.inference.engine.device_share import reserve_for_serving
from jaxscale.inference.lora_modules import load_decoder, parse_lora_modules
from jaxscale.models.hf.hub import local_directory
from jaxscale.sharding import AxisRules, MeshConfig
from jaxscale.supervision import leave


_KEYS = "JAXSCALE_API_KEYS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The model of ``jaxscale serve``, its address, and limits on requests."""

    source: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """Decoder or encoder to serve: a Hugging Face directory with config.json,
    safetensors and tokenizer.json; the name of a model on the Hugging Face hub; or the
    output directory of a run. Also --from SOURCE."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 accepts connections from other machines."""
    port: int = 8000
    """Port to listen on; 0 picks a free port."""
    name: str | None = None
    """Model name in requests; by default the name of the directory."""
    aliases: tuple[str, ...] = ()
    """Other model names that requests may use."""
    lora_modules: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME=DIR ...")] = ()
    """LoRA adapters of a decoder; a request chooses one by NAME as its model. DIR is a
    peft adapter, or the output directory of a run that has trained one."""
    api_keys_file: str | None = None
    """File with one API key per line; requests must send one of them. Lines that begin
    with # are comments."""
    allowed_hosts: tuple[str, ...] | None = None
    """Accepted values of the `Host` header, "*" for any; by default the names of this
    machine if --host is loopback, otherwise any."""
    allowed_origins: tuple[str, ...] = ()
    """Origins that may send requests from a browser (CORS), "*" for any."""
    isolate_clients: bool = False
    """Share the prefix cache only among requests with the same API key."""
    allow_priority: bool = False
    """Let requests choose their priority."""
    allow_trace: bool = False
    """Let clients record what the engine does in each step, as `jaxscale bench-serve
    --trace` does."""
    chat_template: str | None = None
    """File with a Jinja chat template that replaces the model's."""
    tool_format: Literal["auto", "hermes", "llama", "mistral", "qwen3_coder"] = "auto"
    """Format of tool calls in the model's output; auto detects it from the chat
    template."""
    reasoning_format: Literal["auto", "none", "deepseek_r1", "qwen3"] = "auto"
    """Format of the reasoning in the model's output, which is returned separately; auto
    detects it from the chat template, none leaves it in the text."""
    sampling_defaults: bool = True
    """Take sampling parameters that a request leaves out from the model's
    generation_config.json."""
    strict_schemas: bool = False
    """Reject JSON schemas that cannot be enforced in full, instead of ignoring the
    rest."""
    tls_certificate: str | None = None
    """File with the certificate chain (PEM); the server then speaks HTTPS."""
    tls_key: str | None = None
    """File with the private key of the certificate; by default the certificate file."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of the log lines that are written."""
    drain_seconds: float = 60.0
    """Seconds that running requests have to finish after SIGTERM."""
    max_body_mib: int = 16
    """Maximum size of a request body, in MiB."""
    access_log: bool = False
    """Log one line per request."""
    engine: EngineConfig = EngineConfig(program_cache="~/.cache/jaxscale/programs")
    """Engine settings of a decoder."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the computation; by default that of the run or of the file."""
    quantization: Literal["int8", "fp8", "fp8_dynamic"] | None = None
    """Quantize the weights of a decoder to 8 bits, one scale per output feature;
    fp8_dynamic also rounds the activations of 64 tokens and more."""
    mesh: MeshConfig = MeshConfig()
    """Device mesh, for a model that is too large for one device; with several processes
    it must span all their devices."""
    rules: str = "fsdp_tp"
    """Name of a preset of sharding rules, used on several devices."""
    devices: int | None = None
    """Simulate this many CPU devices instead of using those of the machine."""

    def __post_init__(self) -> None:
        """Check what needs no files."""
        check_range(self, 0, 65535, "port")


def main(arguments: Sequence[str]) -> int:
    """Run the command.

    Raises:
        UsageError: there is no model.
    """
    config = parse(
        ServeConfig,
        source_first(arguments),
        prog="jaxscale serve",
        description="Serve a model with an OpenAI-compatible HTTP API. API keys are "
        f"also read from the environment variable {_KEYS}, separated by commas.",
    )
    # What was imported stays: no pass over half a million objects while programs are
    # traced. What is garbage already does not.
    gc.collect()
    gc.freeze()
    simulate_devices(config.devices)
    reserve_for_serving()
    with usage_errors():
        sharding.initialize()
    waking = threading.Thread(target=_wake_devices, daemon=True)
    waking.start()
    try:
        with contextlib.suppress(ImportError):  # it is raised where this is used
            importlib.import_module("jaxscale.inference.server")
        with usage_errors():
            announce_devices()
        notice(f"reading {config.source}")
        run(config)
    except UsageError:
        waking.join()  # it would abort the end of the interpreter
        raise
    return 0


def _wake_devices() -> None:
    """Start devices, reserve their memory and compile a first program.

    That takes seconds, of which Python has few: it goes on beside what is imported and
    read at first. An error is raised where devices are used.
    """
    with contextlib.suppress(Exception):
        jax.block_until_ready(jnp.zeros(()) + 1)


def run(config: ServeConfig) -> None:
    """Serve until SIGTERM or Ctrl-C; processes other than 0 follow process 0.

    Raises:
        UsageError: there is no model.
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
            allow_trace=config.allow_trace,
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
        load, generates = _loader(config)
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

        code = 0
        try:
            loaded = serve(
                load,
                settings,
                host=config.host,
                port=config.port,
                access_log=config.access_log,
                on_bound=bound,
                own_process=generates,
            )
        except Exception as error:
            loaded, code = False, _say(error)
            leave(code, error)
    if not loaded:
        # What compiles cannot be stopped, and would abort the end of the interpreter.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _say(error: Exception) -> int:
    """Say why there is no server, in the last line, and return the exit code."""
    from jaxscale.inference.server.front import ServerLost

    code, text = 1, str(error)
    if isinstance(error, ValueError | OSError | ImportError):
        code, text = 2, f"error: {error}"
    elif isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXH" in text:
        text = (
            f"the model does not fit: {text.splitlines()[0]}; lower "
            "--engine.memory-fraction, or end what else uses the GPU"
        )
    elif not isinstance(error, ServerLost):
        traceback.print_exception(error)
        text = f"no server: {text}"
    print(f"jaxscale: {text}", file=sys.stderr)
    return code


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
    """Execute the plans of process 0, until it ends."""
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


def _loader(config: ServeConfig) -> tuple[Callable[[], Any], bool]:
    """Check what needs no weights, and return the function that loads the model, and
    whether it is a decoder.
    """
    from jaxscale.inference.server.backend import EngineBackend, Loading, TextModel
    from jaxscale.inference.server.load import ChatOptions, is_encoder, served
    from jaxscale.inference.server.served_encoder import ServedEncoder

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

    def load(progress: Any) -> Any:
        model = served(
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
            progress=progress,
            on_texts=lambda fields: loading.on_texts(fields),
        )
        backend = model.backend if isinstance(model, TextModel) else model
        if isinstance(backend, EngineBackend | ServedEncoder):
            backend.freeze_gc_heap()
        return model

    loading = Loading(load)
    return loading, not is_encoder(source)


def _model(config: ServeConfig) -> tuple[Path, Mesh | None, AxisRules, Any]:
    """Path, mesh, sharding rules and data type of the model."""
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
    """The mesh on exactly the devices that it needs; None for one device."""
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
