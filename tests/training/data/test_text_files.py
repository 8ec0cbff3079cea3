"""JSON lines, gzip and Parquet become documents; what is wrong with them is placed."""

import gzip
import json
import sys

import pytest

from jaxscale.models import Tokenizer
from jaxscale.training import DataConfig, PackedBatches, load_text
from jaxscale.training.data.corpus import Document, read_documents
from jaxscale.training.data.labeled_text import load_labeled


RECORDS = [{"text": "to be", "id": 1}, {"text": "or not ü", "id": 2}]


def lines(records):
    return "".join(json.dumps(record) + "\n" for record in records)


def test_each_record_is_a_document_named_by_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        lines(RECORDS) + "\n" + lines([{"text": "third"}])
    )
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines(RECORDS[:1]).encode()))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress("whole\r\nü".encode()))
    assert read_documents([tmp_path]) == [
        Document(name="a.jsonl:1", text="to be"),
        Document(name="a.jsonl:2", text="or not ü"),
        Document(name="a.jsonl:4", text="third"),
        Document(name="b.jsonl.gz:1", text="to be"),
        Document(name="c.txt.gz", text="whole\nü"),
    ]


def test_a_byte_order_mark_is_no_text(tmp_path):
    mark = b"\xef\xbb\xbf"
    (tmp_path / "a.jsonl").write_bytes(mark + lines(RECORDS).encode())
    (tmp_path / "b.jsonl").write_bytes(mark + b"\n" + lines(RECORDS[:1]).encode())
    (tmp_path / "c.txt").write_bytes(mark + b"whole")
    found = [(d.name, d.text) for d in read_documents([tmp_path])]
    assert found == [
        ("a.jsonl:1", "to be"),
        ("a.jsonl:2", "or not ü"),
        ("b.jsonl:2", "to be"),
        ("c.txt", "whole"),
    ]


def test_another_field(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text(lines([{"body": "x", "text": "y"}]))
    assert read_documents([file], text_field="body")[0].text == "x"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\n{"text": \n', r"a\.jsonl:2 is no JSON \(Expec"),
        (b'{"text": "a"}\n\n["b"]\n', r"a\.jsonl:3 is \['b'\], expected a JSON"),
        (
            b'{"txt": "a", "n": 1}\n',
            r"a\.jsonl:1 has no field 'text', only \['n', 'txt'",
        ),
        (b'{"text": null}\n', r"a\.jsonl:1: field 'text' is None, expected text"),
        (b'{"text": "\\ud800"}\n', r"a\.jsonl:1: field 'text' is no Unicode text"),
        (b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl:2 is not UTF-8 text"),
        (b"[" * 10**5, r"a\.jsonl:1 is no JSON"),
        (b'{"text": ""}\n', "hold only empty files"),
    ],
)
def test_a_bad_line_is_named(tmp_path, content, message):
    file = tmp_path / "a.jsonl"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_documents([file])


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-9], lambda data: b"plain text", lambda data: data[:3]],
)
def test_a_damaged_gzip_file_is_named(tmp_path, damage):
    file = tmp_path / "a.jsonl.gz"
    file.write_bytes(damage(gzip.compress(lines(RECORDS * 50).encode())))
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is no complete gzip file"):
        read_documents([file])


def test_records_make_sources_with_weights_and_an_exact_position(tmp_path):
    for name, word in (("web", "aa "), ("code", "bb ")):
        texts = [{"text": f"{word * 9}{i}"} for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text(lines(texts))
    config = DataConfig(
        paths=(str(tmp_path / "web.jsonl"), str(tmp_path / "code.jsonl")),
        weights=(3, 1),
        vocab_size=300,
        seq_len=16,
        batch_size=4,
        held_out_fraction=0.2,
        prefetch=0,
    )
    text = load_text(config)
    assert 40 < len(text.train) < 60 and text.held_out is not None
    assert text.held_out.names[0].startswith("code.jsonl:")
    batches = iter(PackedBatches(text.train, config))
    next(batches)
    position = batches.get_state()
    expected = next(batches).tokens
    again = iter(PackedBatches(load_text(config).train, config))
    again.set_state(position)
    assert (next(again).tokens == expected).all()


def test_labeled_records_of_files_with_one_name_are_all_kept(tmp_path):
    Tokenizer.train(["good bad"], 260).save(tmp_path / "tokenizer")
    for label in ("good", "bad"):
        (tmp_path / label).mkdir()
        records = [{"text": label, "stars": label}] * 40
        (tmp_path / label / "reviews.jsonl").write_text(lines(records))
    config = DataConfig(
        paths=(str(tmp_path / "good"), str(tmp_path / "bad")),
        label_field="stars",
        tokenizer=str(tmp_path / "tokenizer"),
        vocab_size=260,
        held_out_fraction=0.2,
    )
    text = load_labeled(config)
    for side in (text.train, text.held_out):  # the same lines of both files
        assert [label for _, label in side] == [0, 1] * (len(side) // 2)
    assert len(text.train) + len(text.held_out) == 80 and text.held_out


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"a\.parquet .*'\.\[parquet\]'"):
        read_documents([tmp_path])


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), file)
    assert read_documents([tmp_path]) == [
        Document(name="a.parquet:1", text="to be"),
        Document(name="a.parquet:2", text="or not ü"),
    ]
    with pytest.raises(ValueError, match=r"a\.parquet:1 has no field 'body'"):
        read_documents([tmp_path], text_field="body")
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"a\.parquet is no complete Parquet table"):
        read_documents([tmp_path])
