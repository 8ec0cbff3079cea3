"""Text files: plain ones, and those with one record per text.

A plain file is one document. A file of JSON lines (``.jsonl``) or a Parquet table holds
records, of which one field is the text; any file but Parquet may be compressed by gzip
(``.gz``).
"""

import codecs
import contextlib
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxscale.checks import pip_install


RECORD_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
"""Suffixes of files with records."""


def holds_records(file: Path) -> bool:
    """True if `file` has one record per text, by its suffix.

    Example:
        >>> holds_records(Path("web/part-1.jsonl.gz")), holds_records(Path("note.txt"))
        (True, False)
    """
    return file.name.endswith(RECORD_SUFFIXES)


def read_texts(file: Path, field: str) -> Iterator[tuple[str, str]]:
    """The texts of a file, each with the suffix of its name.

    Args:
        file: A plain file, JSON lines or a Parquet table.
        field: Field of a record that holds its text.

    Raises:
        ValueError: the file is damaged, not UTF-8, or a record has no such text; the
            message says where.
        ImportError: pyarrow is missing for a Parquet table.
    """
    if not holds_records(file):
        text = _decoded(_content(file), str(file))
        # Line ends as Python reads them in text files.
        yield "", text.replace("\r\n", "\n").replace("\r", "\n")
        return
    for place, record in read_records(file):
        yield place.removeprefix(str(file)), text_of(record, field, place)


def read_records(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    r"""The records of a file in their order, each with its place ``file:line``.

    Rows of a Parquet table count from 1 too.

    Raises:
        ValueError: the file is damaged, or a line is no JSON object.
        ImportError: pyarrow is missing for a Parquet table.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "notes.jsonl"
        >>> _ = file.write_text('{"text": "to be"}\n{"text": "or not"}\n')
        >>> [record["text"] for _, record in read_records(file)]
        ['to be', 'or not']
    """
    if file.name.endswith(".parquet"):
        yield from _parquet(file)
        return
    with _opened(file) as lines:
        for number, line in enumerate(lines, 1):
            place = f"{file}:{number}"
            if not line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"").strip():
                continue
            try:
                record = json.loads(_decoded(line, place, first=number == 1))
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(
                    f"paths: {place} is no JSON ({error}); each line of JSON lines is "
                    "an object of its own"
                ) from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"paths: {place} is {record!r:.60}, expected a JSON object, as "
                    '{"text": "..."}'
                )
            yield place, record


def text_of(record: Mapping[str, Any], field: str, place: str) -> str:
    """The text in a field of a record.

    Raises:
        ValueError: there is no such field, or it is no text.
    """
    if field not in record:
        raise ValueError(
            f"paths: {place} has no field {field!r}, only {sorted(record)}; name the "
            "field of the text in data.text_field"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(
            f"paths: {place}: field {field!r} is {text!r:.60}, expected text"
        )
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a pair, as JSON may spell it
        raise ValueError(
            f"paths: {place}: field {field!r} is no Unicode text ({error.reason})"
        ) from error
    return text


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Iterator[bytes]]:
    """The lines of a file, which may be compressed."""
    with _whole(file), contextlib.ExitStack() as stack:
        if file.name.endswith(".gz"):
            yield stack.enter_context(gzip.open(file))
        else:
            yield stack.enter_context(file.open("rb"))


@contextlib.contextmanager
def _whole(file: Path) -> Iterator[None]:
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(
            f"paths: {file} is no complete gzip file ({error}); download it again"
        ) from error


def _content(file: Path) -> bytes:
    with _opened(file) as opened:
        return b"".join(opened)


def _decoded(data: bytes, place: str, *, first: bool = True) -> str:
    """The text of some bytes of a file; the `first` ones may begin with a byte order
    mark.

    Some editors write a byte order mark, which is not part of the text.
    """
    try:
        return data.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"paths: {place} is not UTF-8 text ({error.reason} at byte "
            f"{error.start}); convert it or leave it out"
        ) from error


def _parquet(file: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise ImportError(
            f"paths: {file} is a Parquet table, for which pyarrow is needed; "
            + pip_install("parquet")
        ) from error
    number = 0
    try:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                number += 1
                yield f"{file}:{number}", record
    except pyarrow.ArrowException as error:
        raise ValueError(
            f"paths: {file} is no complete Parquet table ({error}); download it again"
        ) from error
