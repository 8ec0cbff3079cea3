"""Documents, and the flat token array that training reads.

A corpus is tokenized once, into one int32 array in which `offsets` mark the documents;
with a cache directory that array is a memory-mapped file, so a process only reads the
tokens that it trains on.
"""

import dataclasses
import glob
import hashlib
import importlib
import json
import os
import pickle
import shutil
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int32, Int64

from jaxscale.models.tokenizer import Tokenizer
from jaxscale.training.data.text_files import RECORD_SUFFIXES, read_texts


TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py", ".txt.gz", *RECORD_SUFFIXES)

# Parts of the standard library that are not worth reading: tests, applications,
# generated tables, and packages that were installed next to it.
_STDLIB_EXCLUDED = frozenset(
    {
        "__phello__",
        "__pycache__",
        "dist-packages",
        "encodings",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "test",
        "tests",
        "turtledemo",
    }
)
_DOCUMENTS_A_BATCH = 256
# Part of the name of a cached corpus; another one than that of older files, which lack
# what is read here.
_CACHE_FORMAT = b"2"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One text and its name, by which it is split and reported.

    Example:
        >>> Document(name="a/readme.md", text="# A").name
        'a/readme.md'
    """

    name: str
    """Path relative to where the search began, with ``/`` on every system."""
    text: str
    """The whole text."""


def read_documents(
    paths: Sequence[str | Path],
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    text_field: str = "text",
) -> list[Document]:
    """The texts of the UTF-8 files that `paths` name, sorted by name.

    A plain file is one document. JSON lines and Parquet tables have one per record,
    named by file and line, as ``web.jsonl:17``.

    Args:
        paths: Files, directories (searched in depth) and glob patterns, in which ``**``
            stands for any number of directories.
        suffixes: Suffixes of the files that a directory contributes; files named
            directly or by a pattern may have any.
        text_field: Field of a record that holds its text.

    Raises:
        ValueError: a path matches nothing, a file is not UTF-8 or damaged, a record has
            no text, or all are empty.
        ImportError: pyarrow is missing for a Parquet table.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / "note.txt").write_text("to be or not to be")
        >>> read_documents([folder])
        [Document(name='note.txt', text='to be or not to be')]
    """
    return _read(find_files(paths, suffixes), paths, text_field)


def find_files(
    paths: Sequence[str | Path], suffixes: Sequence[str] = TEXT_SUFFIXES
) -> dict[Path, str]:
    """The files that `paths` name, each once, with the name of each.

    Raises:
        ValueError: a path matches nothing.
    """
    found: dict[Path, str] = {}
    for path in paths:
        for file, name in _files(str(path), suffixes):
            found.setdefault(file.resolve(), name)
    return found


def read_sources(
    paths: Sequence[str | Path],
    suffixes: Sequence[str] = TEXT_SUFFIXES,
    text_field: str = "text",
) -> list[list[Document]]:
    """The documents of each path; a file that two paths name belongs to the first.

    Raises:
        ValueError: as in `read_documents`, or a path adds no file.
    """
    seen: set[Path] = set()
    sources = []
    for i, path in enumerate(paths):
        found = {}
        for file, name in _files(str(path), suffixes):
            if file.resolve() not in seen:
                found.setdefault(file.resolve(), name)
        if not found:
            raise ValueError(
                f"paths[{i}] {str(path)!r} has no file that the paths before it do not "
                "name; leave it out, or put it first"
            )
        seen |= found.keys()
        sources.append(_read(found, [path], text_field))
    return sources


def _read(
    found: dict[Path, str], paths: Sequence[str | Path], text_field: str
) -> list[Document]:
    """The documents in files with names, in the order of these."""
    documents = [
        Document(name=f"{name}{place}", text=text)
        for file, name in sorted(found.items(), key=lambda item: (item[1], item[0]))
        for place, text in read_texts(file, text_field)
    ]
    documents = [document for document in documents if document.text]
    if not documents:
        raise ValueError(
            f"paths {[str(path) for path in paths]} hold only empty files; an empty "
            "corpus cannot be trained on"
        )
    return documents


def python_corpus() -> list[Document]:
    """CPython's documentation and library source: text that every Python carries.

    The reference pages come from `pydoc_data.topics`, the source from the directory of
    the standard library, without tests, applications, generated tables and installed
    packages: about nine million characters in five hundred documents. Releases of
    CPython differ slightly, and so do corpora made by different releases: compare
    losses only between runs on the same one.

    Raises:
        ValueError: this Python has no readable standard library, for example because
            it is zipped.

    Example:
        >>> names = [document.name for document in python_corpus()]
        >>> "Lib/json/decoder.py" in names, "topics/with" in names
        (True, True)
    """
    # Imported by name: the module has no type stubs.
    topics = importlib.import_module("pydoc_data.topics").topics
    documents = [
        Document(name=f"topics/{topic}", text=text)
        for topic, text in sorted(topics.items())
    ]
    root = Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if _STDLIB_EXCLUDED.intersection(relative.parts):
            continue
        text = file.read_text("utf-8")
        if text:
            documents.append(Document(name=f"Lib/{relative.as_posix()}", text=text))
    if len(documents) == len(topics):
        raise ValueError(
            f"the standard library at {root} holds no source files; name your own "
            "text with paths"
        )
    return documents


def split(
    documents: Sequence[Document], held_out_fraction: float
) -> tuple[list[Document], list[Document]]:
    """Training and held-out documents, split by a hash of their names.

    A document stays on its side when others are added or removed, on every machine.

    Args:
        documents: The documents.
        held_out_fraction: Approximate fraction of documents to hold out; 0 is none.

    Raises:
        ValueError: one side would be empty.

    Example:
        >>> documents = [Document(name=str(i), text="text") for i in range(1000)]
        >>> train, held_out = split(documents, 0.1)
        >>> len(train), len(held_out)
        (896, 104)
    """
    train, held_out = _sides(documents, held_out_fraction)
    if not train or (held_out_fraction > 0 and not held_out):
        raise ValueError(
            f"held_out_fraction {held_out_fraction} leaves {len(train)} documents to "
            f"train on and {len(held_out)} held out; documents are held out "
            "whole, so give more of them, another fraction, or 0 to hold out none"
        )
    return train, held_out


def split_sources(
    sources: Sequence[Sequence[Document]],
    held_out_fraction: float,
    names: Sequence[str],
) -> tuple[list[list[Document]], list[Document]]:
    """Training documents of each source and the held-out ones of all, sorted by name.

    Raises:
        ValueError: nothing would be held out, or a source has nothing left.
    """
    documents = [document for source in sources for document in source]
    _, held_out = split(documents, held_out_fraction)
    train = [_sides(source, held_out_fraction)[0] for source in sources]
    for i, (name, left) in enumerate(zip(names, train, strict=True)):
        if not left:
            raise ValueError(
                f"paths[{i}] {name!r}: held_out_fraction {held_out_fraction} leaves "
                "nothing to train on; whole files are held out, so give it more "
                "files, or another fraction"
            )
    return train, sorted(held_out, key=lambda document: document.name)


def _sides(
    documents: Sequence[Document], held_out_fraction: float
) -> tuple[list[Document], list[Document]]:
    sides: tuple[list[Document], list[Document]] = ([], [])
    for document in documents:
        digest = hashlib.blake2b(document.name.encode(), digest_size=8).digest()
        position = int.from_bytes(digest, "big") / 2**64
        sides[position < held_out_fraction].append(document)
    return sides


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCorpus:
    """The tokens of all documents in one array; make it with `tokenize`.

    Example:
        >>> corpus = TokenCorpus.from_ids([[5, 6, 7], [8, 9]])
        >>> len(corpus), corpus[1]
        (2, array([8, 9], dtype=int32))
    """

    tokens: Int32[np.ndarray, " num_tokens"]
    """Token ids of all documents, one document after the other."""
    offsets: Int64[np.ndarray, " boundaries"]
    """Document i is ``tokens[offsets[i]:offsets[i + 1]]``; none is empty."""
    names: tuple[str, ...]
    """The name of each document."""
    fingerprint: str
    """Equal for equal tokens; a saved position is only valid in the same corpus."""
    vocab_size: int
    """One more than the largest token id: the least vocabulary size of a model."""

    @classmethod
    def from_ids(
        cls,
        documents: Iterable[Sequence[int] | np.ndarray],
        names: Sequence[str] | None = None,
    ) -> "TokenCorpus":
        """The corpus of documents that are already token ids.

        Args:
            documents: The ids of each document.
            names: The name of each; by default its number.

        Raises:
            ValueError: there is no document, one is empty or not a list of ids, an id
                is negative or no int32, or the names are not as many.
        """
        arrays = [_checked(ids, i) for i, ids in enumerate(documents)]
        if not arrays:
            raise ValueError("documents is empty; a corpus needs at least one document")
        if names is not None and len(names) != len(arrays):
            raise ValueError(
                f"names has {len(names)} entries for {len(arrays)} documents; give one "
                "for each, or none"
            )
        offsets = np.cumsum([0, *(len(ids) for ids in arrays)], dtype=np.int64)
        tokens = np.concatenate(arrays)
        digest = hashlib.sha256(tokens.tobytes() + offsets.tobytes()).hexdigest()
        return cls(
            tokens=tokens,
            offsets=offsets,
            names=tuple(map(str, range(len(arrays))) if names is None else names),
            fingerprint=digest[:16],
            vocab_size=1 + int(tokens.max()),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return len(self.tokens)

    def save(self, directory: str | Path) -> None:
        """Write the corpus to `directory`, atomically."""
        target = Path(directory)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
        np.save(draft / "tokens.npy", self.tokens)
        np.save(draft / "offsets.npy", self.offsets)
        about = {
            name: getattr(self, name) for name in ("names", "fingerprint", "vocab_size")
        }
        (draft / "about.json").write_text(json.dumps(about))
        try:
            draft.rename(target)
        except OSError:
            shutil.rmtree(draft)
            # Another process was faster; its files say the same.
            if not target.is_dir():
                raise

    @classmethod
    def load(cls, directory: str | Path) -> "TokenCorpus":
        """The corpus that `save` wrote, with memory-mapped tokens.

        Raises:
            ValueError: an older version wrote it.
        """
        source = Path(directory)
        about = json.loads((source / "about.json").read_text())
        if "vocab_size" not in about:
            raise ValueError(
                f"directory {source} was written by an older version, without the "
                "vocab_size of its tokens; tokenize the text again"
            )
        return cls(
            tokens=np.load(source / "tokens.npy", mmap_mode="r"),
            offsets=np.load(source / "offsets.npy"),
            names=tuple(about["names"]),
            fingerprint=about["fingerprint"],
            vocab_size=about["vocab_size"],
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, document: int) -> Int32[np.ndarray, " _"]:
        return self.tokens[self.offsets[document] : self.offsets[document + 1]]


def tokenize(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    cache_dir: str | Path | None = None,
) -> TokenCorpus:
    """The tokens of `documents`, each with its beginning and end tokens.

    Args:
        documents: The documents.
        tokenizer: The tokenizer. Missing control tokens are left out, and documents
            begin with one only if its files say so (`Tokenizer.adds_bos`).
        cache_dir: Cache directory, keyed by texts and tokenizer; None keeps the result
            in memory only.

    Raises:
        ValueError: there is no document with text.
    """
    documents = [document for document in documents if document.text]
    if not documents:
        raise ValueError("documents hold no text; an empty corpus cannot be tokenized")
    cached = None
    if cache_dir is not None:
        cached = Path(cache_dir) / _cache_key(documents, tokenizer)
        if cached.is_dir():
            return TokenCorpus.load(cached)
    corpus = TokenCorpus.from_ids(
        _encode(documents, tokenizer), [document.name for document in documents]
    )
    if cached is not None:
        corpus.save(cached)
    return corpus


def _encode(
    documents: Sequence[Document], tokenizer: Tokenizer
) -> Iterator[Int32[np.ndarray, " _"]]:
    """The ids of each document; a few at a time, since lists of ints are large."""
    add_bos, add_eos = tokenizer.adds_bos, tokenizer.eos_id is not None
    for start in range(0, len(documents), _DOCUMENTS_A_BATCH):
        batch = documents[start : start + _DOCUMENTS_A_BATCH]
        texts = [document.text for document in batch]
        for ids in tokenizer.encode_batch(texts, add_bos=add_bos, add_eos=add_eos):
            yield np.asarray(ids, np.int32)


def _checked(ids: Sequence[int] | np.ndarray, number: int) -> Int32[np.ndarray, " _"]:
    """The token ids of one document."""
    array = np.asarray(ids)
    if array.size == 0:
        raise ValueError(f"documents[{number}] has no tokens; leave it out")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"documents[{number}] has shape {array.shape} and type {array.dtype}, "
            "expected one row of integers: token ids"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high > np.iinfo(np.int32).max - 1:
        raise ValueError(
            f"documents[{number}] holds {low if low < 0 else high}, which is no token "
            "id: ids are at least 0 and below 2**31 - 1"
        )
    return array.astype(np.int32)


def _cache_key(documents: Sequence[Document], tokenizer: Tokenizer) -> str:
    digest = hashlib.sha256(_CACHE_FORMAT + pickle.dumps(tokenizer, protocol=4))
    for document in documents:
        for part in (document.name, document.text):
            data = part.encode()
            digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()[:32]


def _files(path: str, suffixes: Sequence[str]) -> list[tuple[Path, str]]:
    """The files that one path means, each with its name."""
    if os.path.isfile(path):
        return [(Path(path), Path(path).name)]
    if os.path.isdir(path):
        files = [
            (file, file.relative_to(path).as_posix())
            for file in Path(path).rglob("*")
            if file.name.endswith(tuple(suffixes)) and file.is_file()
        ]
        advice = f"it has no file that ends in one of {tuple(suffixes)}"
    else:
        # The part before the first wildcard is where the search begins.
        fixed = Path(*_parts_before_wildcard(path))
        files = [
            (Path(file), Path(file).relative_to(fixed).as_posix())
            for file in glob.glob(path, recursive=True)
            if os.path.isfile(file)
        ]
        advice = "no such file, directory or match of the pattern"
    if not files:
        raise ValueError(f"paths: {path!r} matches no text: {advice}")
    return files


def _parts_before_wildcard(path: str) -> Iterator[str]:
    for part in Path(path).parts:
        if glob.has_magic(part):
            return
        yield part
