"""Files become documents, which are split by their names."""

import dataclasses

import numpy as np
import pytest

from jaxscale.models import Tokenizer
from jaxscale.training import DataConfig, PackedBatches
from jaxscale.training.data import corpus as corpus_module
from jaxscale.training.data.corpus import (
    Document,
    TokenCorpus,
    python_corpus,
    read_documents,
    split,
    tokenize,
)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_text("first ü", "utf-8")
    (tmp_path / "b" / "c.md").write_text("second")
    (tmp_path / "b" / "d.bin").write_bytes(b"\xff\xfe")
    (tmp_path / "b" / "empty.txt").write_text("")
    return tmp_path


def names(documents):
    return [document.name for document in documents]


def test_a_directory_is_searched_in_depth_for_text(folder):
    documents = read_documents([folder])
    assert documents == [
        Document(name="a.txt", text="first ü"),
        Document(name="b/c.md", text="second"),
    ]
    assert names(read_documents([folder], suffixes=(".md",))) == ["b/c.md"]


def test_files_and_patterns(folder):
    assert names(read_documents([folder / "b" / "c.md"])) == ["c.md"]
    assert names(read_documents([f"{folder}/**/*.md"])) == ["b/c.md"]
    assert names(read_documents([f"{folder}/b/*.md", folder])) == ["a.txt", "c.md"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "nowhere' matches no text: no such file"),
        ("*.rst", r"\*\.rst' matches no text"),
        ("b/d.bin", r"d\.bin is not UTF-8 text \(invalid start byte at byte 0\)"),
        ("b/empty.txt", "hold only empty files"),
    ],
)
def test_unusable_paths_are_named(folder, path, message):
    with pytest.raises(ValueError, match=message):
        read_documents([folder / path])


def test_a_directory_without_text_is_an_error(folder):
    with pytest.raises(ValueError, match=r"no file that ends in one of \('\.rst',\)"):
        read_documents([folder], suffixes=(".rst",))


def test_python_corpus_is_text_written_by_people():
    documents = python_corpus()
    found = set(names(documents))
    assert {"topics/with", "Lib/argparse.py", "Lib/asyncio/events.py"} <= found
    assert not any("/test/" in name or "site-packages" in name for name in found)
    assert sum(len(document.text) for document in documents) > 5_000_000
    assert len(found) == len(documents) > 300


def test_split_depends_on_names_alone():
    documents = [Document(name=str(i), text="x") for i in range(300)]
    train, held_out = split(documents, 0.2)
    assert not set(names(train)) & set(names(held_out))
    assert set(names(train)) | set(names(held_out)) == set(names(documents))
    assert 30 < len(held_out) < 90
    other_train, other_held_out = split(documents[::-2], 0.2)
    assert set(names(other_held_out)) <= set(names(held_out))
    assert set(names(other_train)) <= set(names(train))
    assert split(documents, 0.0) == (documents, [])


def test_a_split_with_an_empty_side_is_an_error():
    documents = [Document(name="only", text="x")]
    with pytest.raises(ValueError, match=r"held_out_fraction 0\.01 leaves 1 documents"):
        split(documents, 0.01)
    with pytest.raises(ValueError, match="leaves 0 documents to train on"):
        split(documents, 0.999)


def test_tokens_decode_to_the_documents_and_end_each_with_eos():
    documents = python_corpus()[:20]
    tokenizer = Tokenizer.train((d.text for d in documents), 400)
    corpus = tokenize(documents, tokenizer)
    assert corpus.names == tuple(names(documents))
    assert len(corpus) == 20
    for i, document in enumerate(documents):
        *text, end = corpus[i].tolist()
        assert end == tokenizer.eos_id
        assert tokenizer.decode(text) == document.text


def test_a_beginning_of_its_own_is_added():
    special = ("<s>", "</s>")
    tokenizer = Tokenizer.train(["to be or not to be"], 270, special_tokens=special)
    corpus = tokenize([Document(name="a", text="to be")], tokenizer)
    first, *text, last = corpus[0].tolist()
    assert (first, last) == (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.decode(text) == "to be"


def test_the_cache_is_used_and_depends_on_text_and_tokenizer(tmp_path, monkeypatch):
    documents = python_corpus()[:5]
    tokenizer = Tokenizer.train((d.text for d in documents), 300)
    other = Tokenizer.train((d.text for d in documents), 310)
    made = tokenize(documents, tokenizer, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1

    with monkeypatch.context() as patch:
        patch.setattr(corpus_module, "_encode", pytest.fail)
        loaded = tokenize(documents, tokenizer, tmp_path / "cache")
    assert isinstance(loaded.tokens, np.memmap)
    np.testing.assert_array_equal(loaded.tokens, made.tokens)
    np.testing.assert_array_equal(loaded.offsets, made.offsets)
    assert (loaded.names, loaded.fingerprint) == (made.names, made.fingerprint)

    tokenize(documents[:4], tokenizer, tmp_path / "cache")
    tokenize(documents, other, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_saving_twice_leaves_one_whole_corpus(tmp_path):
    corpus = TokenCorpus.from_ids([[1, 2], [3]], ["a", "b"])
    corpus.save(tmp_path / "x")
    corpus.save(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert TokenCorpus.load(tmp_path / "x").names == ("a", "b")


def test_empty_corpora_are_refused():
    with pytest.raises(ValueError, match="documents hold no text"):
        tokenize([Document(name="a", text="")], Tokenizer.train(["a"], 260))
    with pytest.raises(ValueError, match="documents is empty"):
        TokenCorpus.from_ids([])
    with pytest.raises(ValueError, match=r"documents\[1\] has no tokens"):
        TokenCorpus.from_ids([[1], []])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([3, -5], "holds -5"),
        ([1, 2**40 + 3], "holds 1099511627779"),
        (np.array([2**31 - 1], np.uint32), "holds 2147483647"),
        ([1.5, 2.0], "type float64"),
        ([True], "type bool"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (7, r"shape \(\)"),
    ],
)
def test_what_is_no_token_id_is_refused(ids, message, no_shape_hook):
    with pytest.raises(ValueError, match=rf"documents\[1\].*{message}"):
        TokenCorpus.from_ids([[1], ids])


def test_as_many_names_as_documents():
    with pytest.raises(ValueError, match="names has 1 entries for 2 documents"):
        TokenCorpus.from_ids([[1], [2]], ["a"])


def test_ids_outside_the_vocabulary_are_refused(tmp_path):
    TokenCorpus.from_ids([[1, 2], [9]]).save(tmp_path / "x")
    corpus = TokenCorpus.load(tmp_path / "x")
    assert corpus.vocab_size == 10
    config = DataConfig(vocab_size=10, seq_len=2, batch_size=1, max_sequences=1)
    PackedBatches(corpus, config)
    with pytest.raises(ValueError, match=r"token id 9, outside.*vocab_size 9"):
        PackedBatches(corpus, dataclasses.replace(config, vocab_size=9))


def test_fingerprints_tell_corpora_apart():
    one = TokenCorpus.from_ids([[1, 2], [3]])
    assert (
        one.fingerprint == TokenCorpus.from_ids([[1, 2], [3]], ["a", "b"]).fingerprint
    )
    assert one.fingerprint != TokenCorpus.from_ids([[1], [2, 3]]).fingerprint
    assert one.fingerprint != TokenCorpus.from_ids([[1, 2], [4]]).fingerprint
