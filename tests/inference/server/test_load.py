"""What a directory says of how its model is served."""

import dataclasses
import shutil
import ssl
import subprocess
import types

import httpx2
import pytest
from flax import nnx

from jaxscale.inference.server import ServerConfig, background, load
from jaxscale.models import Decoder, Tokenizer, preset, save
from jaxscale.models.generation import GenerationConfig
from tests.inference.server.fake_engine import FakeEngine, text_model
from tests.inference.test_chat import CHATML


@pytest.fixture
def directory(tmp_path, monkeypatch):
    config = dataclasses.replace(preset("llama_tiny"), vocab_size=288)
    tokenizer = Tokenizer.train(["to be or not to be"], 280)
    save(Decoder(config, rngs=nnx.Rngs(0)), tmp_path, tokenizer=tokenizer)
    engine = types.SimpleNamespace(start=FakeEngine)
    monkeypatch.setattr(load, "make_engine", lambda *_, **__: engine)
    monkeypatch.setattr(load, "EngineBackend", lambda engine: engine)
    return tmp_path


def test_what_the_authors_of_a_model_advise(directory, capsys):
    """It is said at the start, and can be turned off."""
    advised = {"min_p": 0.1, "max_new_tokens": 9, "pad_token_id": 0}
    GenerationConfig(eos_ids=(2,), temperature=0.6, top_k=0, other=advised).save(
        directory
    )
    model = load.served(directory)
    assert model.defaults == {"temperature": 0.6, "min_p": 0.1, "max_tokens": 9}
    said = capsys.readouterr().err
    assert "temperature 0.6, min_p 0.1, max_tokens 9" in said
    assert "--no-sampling-defaults" in said
    assert load.served(directory, sampling_defaults=False).defaults == {}
    assert "temperature" not in capsys.readouterr().err


def test_formats_by_template_and_by_name(directory):
    found = load.served(directory, chat=load.ChatOptions(template=CHATML))
    assert (found.tool_format, found.reasoning_format) == ("hermes", None)
    thinks = load.ChatOptions(template=CHATML + "{# </think> #}")
    assert load.served(directory, chat=thinks).reasoning_format == "qwen3"
    named = dataclasses.replace(
        thinks, tool_format="qwen3_coder", reasoning_format="none"
    )
    found = load.served(directory, chat=named, aliases=("other",))
    assert (found.tool_format, found.reasoning_format) == ("qwen3_coder", None)
    assert found.aliases == ("other",) and found.chat is not None
    plain = load.served(directory)
    assert plain.chat is plain.tool_format is plain.reasoning_format is None


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_calls_by_https(tmp_path):
    both = tmp_path / "both.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(both)]
    subprocess.run([*make.split(), *names, *files], check=True, capture_output=True)
    key = str(tmp_path / "key.pem")
    config = ServerConfig(tls_certificate=str(both), tls_key=key)
    with background(lambda: text_model(FakeEngine()), config) as url:
        assert url.startswith("https://")
        trusts = ssl.create_default_context(cafile=str(both))
        answer = httpx2.get(f"{url}/v1/models", verify=trusts, timeout=60)
        assert answer.is_success
    with pytest.raises(ValueError, match="tls_key needs a tls_certificate"):
        ServerConfig(tls_key=key)
