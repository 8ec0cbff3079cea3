"""Serving from the command line: a process that answers until it is told to end."""

import asyncio
import dataclasses
import functools
import gc
import os
import re
import signal
import subprocess
import sys
import threading
import time

import httpx2
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from jaxscale.cli import serve
from jaxscale.cli.errors import UsageError
from jaxscale.inference import EngineConfig, Request, SamplingParams
from jaxscale.inference.server import ServedEncoder
from jaxscale.inference.server.front import ServerLost
from jaxscale.models import (
    Decoder,
    EncoderModel,
    Tokenizer,
    encoder_preset,
    load,
    preset,
    save,
)
from jaxscale.sharding import MeshConfig
from tests.ports import free_port
from tests.tiers import exhaustive


@pytest.fixture(autouse=True)
def unfrozen(monkeypatch):
    """The heap of this process is not that of a server."""
    monkeypatch.setattr(gc, "freeze", lambda: None)


@pytest.fixture
def call(command, monkeypatch):
    monkeypatch.setattr(os, "_exit", sys.exit)
    return functools.partial(command, "serve")


def directory(path, kind, config):
    tokenizer = Tokenizer.train(["to be or not to be"], 280)
    config = dataclasses.replace(config, vocab_size=288)
    save(kind(config, rngs=nnx.Rngs(0)), path, tokenizer=tokenizer)
    return path


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    return directory(tmp_path_factory.mktemp("llama"), Decoder, preset("llama_tiny"))


def test_help_describes_each_setting(call):
    code, out, _ = call("--help")
    assert code == 0
    for option in ("SOURCE", "--port", "--api-keys-file", "--engine.max-len", "--host"):
        assert option in out
    assert "JAXSCALE_API_KEYS" in out


def test_a_port_that_there_is_not_is_refused(call):
    code, _, err = call("x", "--port", "99999")
    assert code == 2 and "port 99999, expected 0 to 65535" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SOURCE"),
        (["nowhere"], "'nowhere' is no directory, and no name of"),
        (["."], "holds no model: none of config.json"),
        ([".", "--drain-seconds", "0"], "drain_seconds 0"),
        ([".", "--api-keys-file", "missing"], "missing"),
        ([".", "--api-keys-file", "empty"], "--api-keys-file empty holds no key"),
        ([".", "--chat-template", "missing"], "missing"),
        ([".", "--engine.num-slots", "0"], "num_slots 0"),
        ([".", "--lora-modules", "a=b", "c"], "lora_modules has 'c', expected NAME="),
        ([".", "--lora-modules", "a=b", "a=c"], "lora_modules names 'a' twice"),
    ],
)
def test_mistakes_are_explained(call, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text("\n \n")
    code, _, err = call(*arguments, "--port", "0")
    assert code == 2
    assert re.search(message, err, re.IGNORECASE), err


def test_devices_are_woken_before_a_mistake_ends_the_command(monkeypatch, tmp_path):
    """The interpreter must not end in the middle of that."""
    leaving, woken = threading.Event(), []

    def wake():
        leaving.wait(0.2)  # or until `main` has left, without waiting
        woken.append(not leaving.is_set())

    monkeypatch.setattr(serve, "_wake_devices", wake)
    with pytest.raises(UsageError, match="holds no model"):
        serve.main([str(tmp_path)])
    leaving.set()
    assert woken == [True]


def test_keys(tmp_path, monkeypatch):
    (tmp_path / "keys").write_text("# ours\na\n\n b \n  # c\n")
    monkeypatch.setenv("JAXSCALE_API_KEYS", "c,a")
    config = serve.ServeConfig(source=".", api_keys_file=str(tmp_path / "keys"))
    assert serve._keys(config) == ("c", "a", "b")


def test_an_encoder(tmp_path):
    path = directory(tmp_path / "bert", EncoderModel, encoder_preset("bert_tiny"))
    model = serve._loader(serve.ServeConfig(source=str(path)))[0]()
    assert isinstance(model, ServedEncoder) and model.name == "bert"
    model.close()


SIZES = EngineConfig(
    num_slots=2, buckets=(2,), prefill_tokens=(16,), page_size=8, max_len=64, steps=1
)


def answer(config, prompt, count):
    """Tokens and text by which the model that would be served continues a prompt."""
    model = serve._loader(config)[0]()
    params = SamplingParams(temperature=0.0, max_tokens=count)
    request = Request(prompt=model.encode(prompt), params=params)

    async def generate():
        outputs = [output async for output in model.backend.generate(request)]
        tokens = [token for output in outputs for token in output.tokens]
        return tokens, "".join(output.text for output in outputs)

    try:
        return asyncio.run(generate())
    finally:
        model.backend.close()


@pytest.mark.parametrize("quantization", [None, *exhaustive("int8")])
def test_a_model_on_four_devices(tmp_path, quantization):
    four = dataclasses.replace(preset("llama_tiny"), num_kv_heads=4)
    path = directory(tmp_path / "llama", Decoder, four)
    mesh = MeshConfig(tensor=4)
    config = serve.ServeConfig(
        source=str(path), engine=SIZES, mesh=mesh, quantization=quantization
    )
    tokens, _ = answer(config, "to be", 6)
    model = load(path, quantization=quantization)
    known = Tokenizer.from_file(path).encode("to be")
    logits = jax.jit(lambda row: model(row)[0])(jnp.array([known + tokens]))
    assert tokens == logits[len(known) - 1 : -1].argmax(-1).tolist()
    assert len(tokens) == 6


def test_a_model_that_does_not_fit(call, decoder):
    code, _, err = call(decoder, "--port", "0", "--engine.memory-fraction", "1e-6")
    assert code == 2 and "do not fit into 0.00 GiB of a device" in err


def test_a_longer_max_len_than_the_model_was_made_for(call, decoder):
    code, _, err = call(decoder, "--port", "0", "--engine.max-len", "100000")
    assert code == 2 and "max_len is 100000, expected at most" in err
    assert re.search(r"serving at http://127\.0\.0\.1:[1-9]\d*,", err)


@pytest.mark.parametrize(
    ("error", "code", "last"),
    [
        (ServerLost("the HTTP server has ended with 7"), 1, "HTTP server has ended"),
        (OSError("the disk is gone"), 2, "error: the disk is gone"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore"),
            1,
            "does not fit: RESOURCE_EXHAUSTED: Out of memory; lower --engine.memory-fr",
        ),
        (KeyError("a defect"), 1, "no server: 'a defect'"),
    ],
)
def test_a_start_that_fails_leaves_at_once(
    decoder, monkeypatch, capfd, error, code, last
):
    """What compiles would hold up the end of the interpreter."""

    def fail(*_, **__):
        raise error

    monkeypatch.setattr("jaxscale.inference.server.serve", fail)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as left:
        serve.main([str(decoder), "--port", "0"])
    *before, line = capfd.readouterr().err.strip().splitlines()
    assert left.value.code == code and line.startswith("jaxscale: ") and last in line
    assert ("Traceback" in "".join(before)) == isinstance(error, KeyError)


@pytest.mark.slow
def test_a_process(decoder, tmp_path):
    """It loads, answers, and ends well at SIGTERM, with a stream in the middle."""
    programs = tmp_path / "programs"
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, "-W", "error", "-m", "jaxscale", "serve", decoder),
            *("--port", str(port), "--name", "tiny", "--engine.num-slots", "2"),
            *("--engine.prefill-tokens", "16", "--engine.page-size", "8"),
            *("--engine.max-len", "64", "--engine.buckets", "2"),
            *("--engine.program-cache", str(programs)),
        ],
        env={**os.environ, "JAXSCALE_API_KEYS": "secret", "JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        headers = {"authorization": "Bearer secret"}
        with httpx2.Client(
            base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=120
        ) as client:
            ready(client, process)
            body = {"prompt": "to be", "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            (choice,) = answer.json()["choices"]
            assert choice["finish_reason"] in ("stop", "length")
            body |= {"max_tokens": 50, "stream": True, "ignore_eos": True}
            with client.stream("POST", "/v1/completions", json=body) as stream:
                process.send_signal(signal.SIGTERM)
                text = stream.read().decode()
            assert text.endswith("data: [DONE]\n\n") and "error" not in text
        assert process.wait(120) == 0
    finally:
        process.kill()
        _, err = process.communicate()
    assert "Traceback" not in err, err
    assert list(programs.glob("*.program"))  # for the next start


def ready(client, process, seconds=300):
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            if client.get("/ready").status_code == 200:
                return
        except httpx2.ConnectError:
            pass
        time.sleep(0.1)
    pytest.fail(f"not ready: {process.poll()}")
