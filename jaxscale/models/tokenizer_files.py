"""The files of a tokenizer's directory besides ``tokenizer.json``.

A ``tokenizer_config.json`` names the control tokens and has the other settings of a
tokenizer: maximum length, chat template.
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxscale.models.hf.checksums import checked_bytes
from jaxscale.models.hf.files import read_json_object


FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_MAP_FILE = "special_tokens_map.json"
_TEMPLATE_FILE = "chat_template.jinja"
# BERT's names for the tokens that begin and end a text.
_ALIASES = {"bos": "cls", "eos": "sep"}

# Far above those of any model, and far below what a process has no memory for.
_MOST_TOKENS = 2**24
_LONGEST_TOKEN = 2**16

# Files of directories without a tokenizer.json, DeBERTa-v3's first.
_OTHER_FILES = {
    "spm.model": "SentencePiece",
    "spiece.model": "SentencePiece",
    "sentencepiece.bpe.model": "SentencePiece",
    "tokenizer.model": "SentencePiece",
    "vocab.txt": "WordPiece",
}


def check_ids(file: Path) -> None:
    """Check ids and lengths of the tokens of a ``tokenizer.json``.

    The library, which checks the rest, allocates tables as long as the largest id and
    trees as deep as the longest token, and ends the process if there is no memory for
    them; of two tokens with one id it drops one.

    Raises:
        ValueError: the file is no JSON object, an id is no integer or too large, a
            token is too long, or two tokens have one id.
    """
    values = read_json_object(file)
    model, added = values.get("model"), values.get("added_tokens")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    pairs = list(vocab.items()) if isinstance(vocab, dict) else []
    if isinstance(vocab, list):  # of Unigram: tokens with their scores
        pieces = [item[0] for item in vocab if isinstance(item, list) and item]
        pairs = [(piece, i) for i, piece in enumerate(pieces)]
    tokens = (
        [t for t in added if isinstance(t, dict)] if isinstance(added, list) else []
    )
    for group in (pairs, [(t.get("content"), t.get("id")) for t in tokens]):
        owners: dict[int, Any] = {}
        for token, i in group:
            if type(i) is not int or not 0 <= i < _MOST_TOKENS:
                raise ValueError(
                    f"{file} gives {token!r:.80} the id {i!r:.40}, expected an integer "
                    f"from 0 to {_MOST_TOKENS - 1}; download it again"
                )
            if isinstance(token, str) and len(token) > _LONGEST_TOKEN:
                raise ValueError(
                    f"{file} has the token {token!r:.40} of {len(token)} characters, "
                    f"expected at most {_LONGEST_TOKEN}; download it again"
                )
            if owners.setdefault(i, token) != token:
                raise ValueError(
                    f"{file} gives {owners[i]!r:.80} and {token!r:.80} the same id "
                    f"{i}; download it again"
                )


def read_settings(directory: Path) -> dict[str, Any] | None:
    """Settings from the files beside a ``tokenizer.json``, None without any."""
    # Older directories name some control tokens only in a file of their own.
    files = [directory / name for name in (_MAP_FILE, CONFIG_FILE)]
    files = [file for file in files if file.is_file()]
    if not files:
        return None
    settings: dict[str, Any] = {}
    for file in files:
        settings |= read_json_object(file)
    template = directory / _TEMPLATE_FILE
    if template.is_file():
        settings["chat_template"] = checked_bytes(template).decode()
    return settings


def write_settings(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write what `read_settings` reads, in the places where it is usual."""
    kept = dict(settings)
    template = kept.pop("chat_template", None)
    if isinstance(template, str):
        (directory / _TEMPLATE_FILE).write_text(template, "utf-8")
    else:
        # A list holds named templates, for which there is no file; and the template
        # of another tokenizer must not stay beside this one.
        (directory / _TEMPLATE_FILE).unlink(missing_ok=True)
        kept |= {} if template is None else {"chat_template": template}
    (directory / CONFIG_FILE).write_text(json.dumps(kept, indent=2) + "\n")


def files_of(directory: Path) -> list[Path]:
    """The files in a directory that decide what its tokenizer does."""
    names = (FILE, CONFIG_FILE, _MAP_FILE, _TEMPLATE_FILE)
    return [directory / name for name in names if (directory / name).is_file()]


def configured(settings: Mapping[str, Any], role: str) -> str | None:
    """The control token that a ``tokenizer_config.json`` names for a role."""
    for name in (role, _ALIASES.get(role, role)):
        token = settings.get(f"{name}_token")
        # Older files store the token with its stripping rules around it.
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str):
                raise ValueError(
                    f"{name}_token {token!r} of {CONFIG_FILE} must be a string"
                )
            return token
    return None


def instead_of(file: Path) -> str:
    """Advice for an error message where `file` does not exist."""
    for name in _OTHER_FILES:
        if (file.parent / name).is_file():
            return (
                f"{name} beside it is in another format, that of "
                f"{_OTHER_FILES[name]}; convert it once, where transformers is "
                "installed, with AutoTokenizer.from_pretrained(path)"
                ".save_pretrained(path)"
            )
    return (
        f"give a {FILE} or a directory that holds one, or train one with "
        "Tokenizer.train"
    )


@functools.cache
def _byte_characters() -> dict[str, int]:
    """Characters for which byte-level vocabularies have bytes.

    References:
        ``bytes_to_unicode`` of GPT-2: bytes that can be printed stand for themselves.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    table = {chr(byte): byte for byte in plain}
    return table | {chr(256 + i): byte for i, byte in enumerate(others)}


def piece_bytes(piece: str) -> bytes:
    """The bytes of a vocabulary piece, if it is part of a character.

    Args:
        piece: Of a byte-level vocabulary, or ``<0xE4>`` as SentencePiece writes bytes.

    Example:
        >>> piece_bytes("<0xE4>").hex(), piece_bytes("Ã").hex()
        ('e4', 'c3')
    """
    single = re.fullmatch("<0x([0-9A-Fa-f]{2})>", piece)
    if single:
        return bytes([int(single[1], 16)])
    table = _byte_characters()
    if all(character in table for character in piece):
        return bytes(table[character] for character in piece)
    return piece.encode(errors="replace")
