"""Files of results that several processes write, or one that is cut off."""

import threading

import pytest

from benchmarks.measure import records


def test_a_file_that_is_damaged_meanwhile_is_set_aside(tmp_path, capsys):
    record = records.load(records.RESULTS / "nvidia_h200" / "matmul.json")
    path = tmp_path / "matmul.json"
    path.write_text("{")
    records.add(record, path, None)
    assert records.load(path) == record
    assert (tmp_path / "matmul.json.damaged").read_text() == "{"
    assert "set aside" in capsys.readouterr().err


def test_processes_write_into_one_file(tmp_path):
    record = records.load(records.RESULTS / "nvidia_h200" / "matmul.json")
    path = tmp_path / "matmul.json"
    parts = [record | {"rows": [row]} for row in record["rows"]]
    threads = [
        threading.Thread(target=records.add, args=(part, path, ["none"]))
        for part in parts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(records.load(path)["rows"]) == len(record["rows"])


def test_what_is_written_while_it_is_cut_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "file"
    records.replace(path, "old")

    def cut(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(records.os, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            records.replace(path, "new")
    assert path.read_text() == "old"
