"""``jaxscale bench-serve`` against a server on loopback."""

import json

from tests.cli.conftest import loading
from tests.inference.fake_server import FakeServer


def test_figures_files_and_exit_code(command, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    file, page = tmp_path / "new" / "figures.json", tmp_path / "page.html"
    arguments = ["--workload", "3/4", "--requests", "4", "--output", file]
    with FakeServer() as server:
        code, out, err = command(
            "bench-serve", "--url", server.url, *arguments, "--report", page
        )
        assert (code, err) == (
            0,
            loading("bench-serve"),
        ) and "completed 4 failed 0" in out
        server.behave = lambda number: 429 if number == 7 else None
        code, out, _ = command("bench-serve", "--url", server.url, *arguments)
    assert code == 1 and "completed 3 failed 1 rejected 1" in out
    assert "failed: HTTP 429" in out
    assert server.headers[0]["authorization"] == "bearer secret"
    record = json.loads(file.read_text())
    assert record["figures"]["rejected"] == 1 and len(record["requests"]) == 4
    assert record["settings"]["rate"] == "inf" and "secret" not in file.read_text()
    text = page.read_text()
    assert "Time to the first token" in text and "Requests under way" in text


def test_mistakes(command):
    code, _, err = command("bench-serve", "--url", "http://127.0.0.1:9")
    assert code == 2 and "does not answer" in err
    code, _, err = command("bench-serve", "--workload", "many")
    assert code == 2 and "workload 'many' is unknown" in err
    code, out, _ = command("bench-serve", "--help")
    assert code == 0 and "Maximum number of concurrent requests" in out
