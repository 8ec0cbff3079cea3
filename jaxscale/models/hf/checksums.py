"""Checksums of the files of a directory, verified on reading if there are any.

The file is in the format of ``sha256sum``, so ``sha256sum -c`` checks it too.
"""

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


FILE = "checksums.sha256"
_LINE = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?([^/]+)")


def write_checksums(directory: Path, files: Iterable[Path] | None = None) -> None:
    """Write the checksums of files of a directory.

    Args:
        directory: The directory.
        files: Files in it; None is all of them, not those of folders.
    """
    chosen = directory.iterdir() if files is None else files
    chosen = sorted(f for f in chosen if f.is_file() and f.name != FILE)
    sums = zip(chosen, _sums(chosen), strict=True)
    text = "".join(f"{value}  {file.name}\n" for file, value in sums)
    (directory / FILE).write_text(text)


def remove_checksums(directory: Path) -> None:
    """Remove the checksums, before a file of the directory is written anew."""
    (directory / FILE).unlink(missing_ok=True)


def checked_bytes(file: Path) -> bytes:
    """The content of a file, verified against its checksum if there is one.

    Raises:
        ValueError: the file is not what was written.
    """
    content = file.read_bytes()
    wanted = _listed(file.parent).get(file.name)
    if wanted is not None and hashlib.sha256(content).hexdigest() != wanted:
        raise _changed(file)
    return content


def check_files(files: Iterable[Path]) -> None:
    """Verify files against their checksums, reading all of each.

    Raises:
        ValueError: one is not what was written.
    """
    lists: dict[Path, dict[str, str]] = {}
    listed = {}
    for file in files:
        wanted = lists.setdefault(file.parent, _listed(file.parent))
        if file.name in wanted:
            listed[file] = wanted[file.name]
    for (file, wanted), found in zip(listed.items(), _sums(listed), strict=True):
        if found != wanted:
            raise _changed(file)


def _listed(directory: Path) -> dict[str, str]:
    """The checksums of a directory by the name of the file; empty without any."""
    file = directory / FILE
    if not file.is_file():
        return {}
    text = file.read_bytes().decode(errors="replace")
    wanted = {}
    for number, line in enumerate(text.splitlines(), 1):
        found = _LINE.fullmatch(line)
        if found is None:
            raise ValueError(
                f"{file} is damaged: line {number} is no checksum; copy the directory "
                "again, or delete this file to read the others unchecked"
            )
        wanted[found[2]] = found[1]
        if not (directory / found[2]).is_file():
            raise ValueError(
                f"{directory} lacks {found[2]!r}, which {FILE} lists; copy the "
                f"directory again, or delete {FILE} if it was removed on purpose"
            )
    return wanted


def _sums(files: Iterable[Path]) -> list[str]:
    """The checksums of files, several at a time: 8B parameters take seconds."""

    def of(file: Path) -> str:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:
        return list(pool.map(of, files))


def _changed(file: Path) -> ValueError:
    return ValueError(
        f"{file} is not what was written, by its checksum in {FILE}: it is damaged or "
        f"was changed since; bring the file back, or delete {FILE} if the change was "
        "on purpose"
    )
