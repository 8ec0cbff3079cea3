"""The timeline of an engine, as the load generator has it recorded."""

import json

import pytest

from jaxscale.inference.load.server_trace import server_trace
from tests.inference.server.conftest import LiveServer
from tests.inference.server.fake_engine import FakeEngine


def test_a_recording_is_a_file(tmp_path, capsys):
    path = tmp_path / "new" / "trace.json"
    with LiveServer(FakeEngine(), allow_trace=True, api_keys=("secret",)) as server:
        with pytest.raises(ValueError, match=r"says .*no valid API key"):
            server_trace(server.url, str(path)).__enter__()
        key = {"authorization": "Bearer secret"}
        for _ in range(2):  # a second one begins anew
            with server_trace(server.url, str(path), "secret"):
                server.engine.timelines[-1].phase("schedule")
                answer = server.post("/v1/completions", {"prompt": "or"}, headers=key)
                assert answer.status_code == 200
    names = [event["name"] for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("schedule") == 1
    assert "host schedule" in capsys.readouterr().out


def test_where_it_is_not_allowed(server, tmp_path):
    with (
        pytest.raises(ValueError, match="does not let clients record"),
        server_trace(server.url, str(tmp_path / "trace.json")),
    ):
        pass
    with (
        pytest.raises(ConnectionError, match="does not answer"),
        server_trace("http://127.0.0.1:9", "trace.json"),
    ):
        pass
