"""Text to token ids and back: a ``tokenizer.json``, or byte-level BPE trained here.

It wraps the `tokenizers` library of Hugging Face, an optional dependency (extra
``infer`` or ``train``), and adds what a language model needs: the ids that begin, end
and pad a document, and encoding that never turns the text of a document into a control
token.
"""

import dataclasses
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from jaxscale.checks import pip_install
from jaxscale.models.hf.checksums import remove_checksums
from jaxscale.models.hf.hub import is_hub_name, local_directory
from jaxscale.models.tokenizer_files import (
    CONFIG_FILE,
    FILE,
    check_ids,
    configured,
    instead_of,
    piece_bytes,
    read_settings,
    write_settings,
)


_NUM_BYTES = 256
_LONGEST_RUN = 512
_ROLES = ("bos", "eos", "pad", "mask")

# What the published tokenizers call their control tokens; looked for when no
# tokenizer_config.json says it.
_USUAL_NAMES = {
    "bos": ("<|begin_of_text|>", "<s>", "<|endoftext|>", "[CLS]"),
    "eos": ("<|end_of_text|>", "</s>", "<|endoftext|>", "[SEP]"),
    "pad": ("<|finetune_right_pad_id|>", "<pad>", "<|pad|>", "[PAD]"),
    "mask": ("<mask>", "[MASK]"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncodedText:
    """An encoded text or pair, as a model for classification or embeddings takes it.

    Example:
        >>> text = EncodedText(
        ...     ids=[101, 7, 102],
        ...     types=[0, 0, 0],
        ...     spans=[(0, 0), (0, 5), (0, 0)],
        ...     control=[True, False, True],
        ... )
        >>> [token for token, control in zip(text.ids, text.control) if not control]
        [7]
    """

    ids: list[int]
    """Token ids, including the control tokens of the template."""
    types: list[int]
    """0 for tokens of the first text, 1 for those of the second."""
    spans: list[tuple[int, int]]
    """Character span of each token in its text; (0, 0) for control tokens."""
    control: list[bool]
    """True for the tokens that the template added."""

    @functools.cached_property
    def array(self) -> np.ndarray:
        """The ids as int32."""
        return np.array(self.ids, np.int32)

    @functools.cached_property
    def has_types(self) -> bool:
        """Whether a token has another type than 0."""
        return any(self.types)


class Tokenizer:
    """Encodes text as token ids and decodes them, with the ids of control tokens.

    Make one with `Tokenizer.from_file` or `Tokenizer.train`. It can be pickled, so data
    loaders may send it to worker processes.

    Example:
        >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
        >>> tokenizer.vocab_size
        260
        >>> ids = tokenizer.encode("to be, or 不 to be")
        >>> tokenizer.decode(ids)
        'to be, or 不 to be'
        >>> tokenizer.encode("to be", add_eos=True)[-1] == tokenizer.eos_id
        True
    """

    def __init__(
        self,
        backend: Any,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        pad_token: str | None = None,
        mask_token: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Wrap a `tokenizers.Tokenizer`.

        Args:
            backend: The `tokenizers.Tokenizer`; a copy of it is kept.
            bos_token: The token that begins a document, None if there is none.
            eos_token: The token that ends a document, None if there is none.
            pad_token: The padding token, None if there is none.
            mask_token: The mask token, None if there is none.
            settings: Other entries of ``tokenizer_config.json``, such as
                ``model_max_length`` or ``chat_template``, kept for `save`.

        Raises:
            ValueError: a control token is not in the vocabulary.
        """
        # A document that mentions "<|endoftext|>" must not end there.
        self._backend = _copy(backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._tokens = {
            "bos": bos_token,
            "eos": eos_token,
            "pad": pad_token,
            "mask": mask_token,
        }
        self._ids = {
            role: None if token is None else self.token_id(token)
            for role, token in self._tokens.items()
        }
        self._settings = dict(settings or {})
        self._control_backend: Any = None  # made when it is first needed
        self._vocab_size = 1 + max(self._backend.get_vocab().values(), default=-1)

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """The tokenizer of a ``tokenizer.json``, or of the directory that holds one.

        The control tokens are those that the ``tokenizer_config.json`` beside it names;
        without one, the usual names are looked for in the vocabulary.

        Args:
            path: A file in the format of the `tokenizers` library; a directory with a
                ``tokenizer.json``, for example a Hugging Face model directory; or the
                name of a model on the Hugging Face hub.

        Raises:
            FileNotFoundError: there is no such file.
            ValueError: the file is not a tokenizer, is not what its checksum says, an
                id or a token in it is too large, two tokens have one id, or its
                configuration names a control token that is not in the vocabulary.
            ImportError: the `tokenizers` library is not installed.
        """
        tokenizers = _require_tokenizers()
        file = Path(path)
        if isinstance(path, str) and not file.exists() and is_hub_name(path):
            file = local_directory(path, weights=False)
        if file.is_dir():
            file = file / FILE
        if not file.is_file():
            raise FileNotFoundError(
                f"path {str(path)!r} has no tokenizer: {file} does not exist; "
                + instead_of(file)
            )
        check_ids(file)
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        # The library raises plain Exception for whatever it cannot parse.
        except Exception as error:
            raise ValueError(
                f"path {file} is not a tokenizer of the tokenizers library: {error}; "
                f"convert it to a {FILE} first"
            ) from error
        found = read_settings(file.parent)
        if found is None:
            vocab = backend.get_vocab()
            tokens = {
                role: next((n for n in _USUAL_NAMES[role] if n in vocab), None)
                for role in _ROLES
            }
        else:
            tokens = {role: configured(found, role) for role in _ROLES}
        tokens = {f"{role}_token": token for role, token in tokens.items()}
        return cls(backend, **tokens, settings=found)

    from_pretrained = from_file
    """The same by the name that models have for it."""

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        special_tokens: Sequence[str] = ("<|endoftext|>",),
    ) -> "Tokenizer":
        """Train byte-level BPE on `texts`; the same texts give the same tokenizer.

        All 256 bytes are in the vocabulary, so every text can be encoded and comes back
        unchanged. The control tokens have the first ids.

        Args:
            texts: The documents; read once, one by one.
            vocab_size: Number of tokens to reach: control tokens, bytes and merges. A
                very small corpus runs out of pairs to merge and gives fewer.
            special_tokens: Control tokens. The usual names take their usual roles;
                ``"<|endoftext|>"`` both begins and ends documents, as in GPT-2.

        Raises:
            ValueError: `vocab_size` has no room for the bytes and the control tokens,
                or a control token is repeated.
            TypeError: `texts` is one string instead of many.
            ImportError: the `tokenizers` library is not installed.

        References:
            Sennrich et al., "Neural Machine Translation of Rare Words with Subword
            Units", arXiv 1508.07909; bytes as the base alphabet: GPT-2, section 2.2.
        """
        tokenizers = _require_tokenizers()
        if isinstance(texts, str):
            raise TypeError("texts must be an iterable of strings, got one string")
        if len(set(special_tokens)) != len(special_tokens):
            raise ValueError(f"special_tokens {tuple(special_tokens)} repeat a token")
        smallest = _NUM_BYTES + len(special_tokens)
        if vocab_size < smallest:
            raise ValueError(
                f"vocab_size {vocab_size} is too small: {_NUM_BYTES} bytes and "
                f"{len(special_tokens)} special tokens need at least {smallest}"
            )
        backend = tokenizers.Tokenizer(tokenizers.models.BPE())
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
            add_prefix_space=False
        )
        backend.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        pieces = (piece for text in texts for piece in _without_long_runs(text))
        backend.train_from_iterator(pieces, trainer=trainer)
        tokens = {
            role: next((n for n in _USUAL_NAMES[role] if n in special_tokens), None)
            for role in _ROLES
        }
        return cls(backend, **{f"{role}_token": tokens[role] for role in _ROLES})

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` for `from_file`.

        Other settings of the original files are kept: control tokens without a role
        here, ``model_max_length``, the chat template.

        Args:
            path: The directory; it is made if needed.
        """
        directory = Path(path)
        if directory.suffix == ".json" or directory.is_file():
            raise ValueError(
                f"path {str(path)!r} must be a directory: {FILE} and {CONFIG_FILE} "
                "are written into it"
            )
        directory.mkdir(parents=True, exist_ok=True)
        remove_checksums(directory)
        self._backend.save(str(directory / FILE))
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | self._settings
        for role in _ROLES:
            if configured(config, role) != self._tokens[role]:
                config[f"{role}_token"] = self._tokens[role]
        write_settings(directory, config)

    def to_json(self) -> str:
        """The text of its ``tokenizer.json``, which other libraries read."""
        return self._backend.to_str()

    def encode(
        self,
        text: str,
        *,
        add_bos: bool = False,
        add_eos: bool = False,
        control_tokens: bool = False,
    ) -> list[int]:
        """The token ids of `text`.

        The name of a control token inside the text is ordinary text; control tokens
        come only from the two switches. (Except if the vocabulary itself has that name
        as a piece, as SentencePiece's does: ``"[SEP]"`` in the text of DeBERTa-v3 is
        that token.)

        Args:
            text: One document.
            add_bos: Put `bos_id` before it.
            add_eos: Put `eos_id` after it.
            control_tokens: Parse names of control tokens. Only for trusted text, such
                as the output of a chat template.

        Raises:
            ValueError: the wanted control token does not exist.
        """
        if control_tokens:
            if self._control_backend is None:
                backend = _copy(self._backend)
                backend.encode_special_tokens = False
                self._control_backend = backend
            encoding = self._control_backend.encode(text, add_special_tokens=False)
            before = [self._control_id("bos")] if add_bos else []
            return (
                before + encoding.ids + ([self._control_id("eos")] if add_eos else [])
            )
        return self.encode_batch([text], add_bos=add_bos, add_eos=add_eos)[0]

    def encode_batch(
        self, texts: Sequence[str], *, add_bos: bool = False, add_eos: bool = False
    ) -> list[list[int]]:
        """`encode` for each of `texts`, on several threads."""
        before = [self._control_id("bos")] if add_bos else []
        after = [self._control_id("eos")] if add_eos else []
        # The template of the file, if any, is left out: it would add tokens unasked.
        encodings = self._backend.encode_batch_fast(
            list(texts), add_special_tokens=False
        )
        return [before + encoding.ids + after for encoding in encodings]

    def encode_inputs(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        max_length: int | None = None,
        spans: bool = True,
    ) -> list[EncodedText]:
        """Encode texts and pairs of texts with the template of the file, as BERT takes
        them.

        A single text becomes ``[CLS] text [SEP]``, a pair ``[CLS] a [SEP] b [SEP]``, or
        as the file says; without a template nothing is added.

        Args:
            texts: Each a text, or a pair: two sentences, a question and its context.
            max_length: Maximum tokens, control tokens included; longer texts are
                truncated at the end, of a pair the longer text first. None does not
                truncate.
            spans: False leaves `EncodedText.spans` empty, which saves time.

        Raises:
            ValueError: `max_length` leaves no room for the control tokens.

        Example:
            >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
            >>> [encoded.types for encoded in tokenizer.encode_inputs([("to", "be")])]
            [[0, 1]]
        """
        backend = self._backend
        if max_length is not None:
            most = max(
                backend.num_special_tokens_to_add(pair) for pair in (False, True)
            )
            if max_length <= most:
                raise ValueError(
                    f"max_length {max_length} must exceed the {most} control tokens of "
                    "a pair"
                )
            backend = _copy(backend)
            backend.enable_truncation(max_length)
        encodings = backend.encode_batch(list(texts), add_special_tokens=True)
        return [
            EncodedText(
                ids=encoding.ids,
                types=encoding.type_ids,
                spans=encoding.offsets if spans else [],
                control=list(map(bool, encoding.special_tokens_mask)),
            )
            for encoding in encodings
        ]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`; bytes that are not valid UTF-8 become U+FFFD.

        Ids past the vocabulary have no text: models often pad the vocabulary.

        Args:
            ids: Token ids.
            skip_special_tokens: Leave control tokens out of the text.

        Raises:
            ValueError: an id is negative.
        """
        ids = [int(i) for i in ids]
        if ids and min(ids) < 0:
            raise ValueError(
                f"ids contain {min(ids)}, expected token ids from 0 on; leave out what "
                "marks ignored places"
            )
        known = [i for i in ids if i < self._vocab_size]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    @functools.cached_property
    def joins_bytes(self) -> bool:
        """True if the bytes of tokens are those of each, joined: byte-level BPE."""
        from tokenizers.decoders import ByteLevel

        return isinstance(self._backend.decoder, ByteLevel)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, which may be part of a character.

        Args:
            token: Its id, below `vocab_size`.

        Example:
            >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
            >>> [tokenizer.token_bytes(i).hex() for i in tokenizer.encode("é")]
            ['c3', 'a9']
        """
        text = self.decode([token])
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text.encode()
        return piece_bytes(self._backend.id_to_token(token) or "")

    def continuation(
        self,
        prompt: Sequence[int],
        new: Sequence[int],
        *,
        skip_special_tokens: bool = True,
    ) -> str:
        """The text that the tokens `new` add to the text of the tokens `prompt`.

        Decoding `new` alone would lose the space before its first word where the
        vocabulary is SentencePiece's or WordPiece's, and characters whose bytes lie on
        both sides.

        Args:
            prompt: Token ids of what was given.
            new: Token ids of what follows, for example from
                `jaxscale.inference.generate`.
            skip_special_tokens: Leave control tokens out of the text.

        Raises:
            ValueError: an id is negative.

        Example:
            >>> tokenizer = Tokenizer.train(["to be or not to be"], vocab_size=260)
            >>> tokenizer.continuation(tokenizer.encode("to"), tokenizer.encode(" be"))
            ' be'
        """
        before, whole = (
            self.decode(ids, skip_special_tokens=skip_special_tokens)
            for ids in (prompt, [*prompt, *new])
        )
        # Not all of `before`: it may end in the first bytes of a character.
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(before, whole, strict=False)
        )
        return whole[len(list(same)) :]

    def token_id(self, token: str) -> int:
        """The id of one token given by name, for example ``"<|endoftext|>"``.

        Raises:
            ValueError: the token is not in the vocabulary.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            special = sorted(
                t.content for t in self._backend.get_added_tokens_decoder().values()
            )
            raise ValueError(
                f"token {token!r} is not in the vocabulary; its special tokens are "
                f"{special}"
            )
        return found

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id: the vocabulary size of an embedding."""
        return self._vocab_size

    @functools.cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, as the vocabulary writes it."""
        return max(map(len, self._backend.get_vocab()), default=0)

    @property
    def bos_id(self) -> int | None:
        """The id that begins a document, None if there is none."""
        return self._ids["bos"]

    @property
    def adds_bos(self) -> bool:
        """Whether documents and prompts begin with `bos_id`, according to the files.

        Decided by ``add_bos_token``, or the template of ``tokenizer.json``. Without
        both, a token that only begins documents is added, one that also ends them is
        not.
        """
        bos, said = self.bos_id, self._settings.get("add_bos_token")
        if bos is None or isinstance(said, bool):
            return bos is not None and bool(said)
        if self._backend.post_processor is not None:
            return bos in self._backend.encode("").ids[:1]
        return bos != self.eos_id

    @property
    def eos_id(self) -> int | None:
        """The id that ends a document, None if there is none."""
        return self._ids["eos"]

    @property
    def pad_id(self) -> int | None:
        """The id of the padding token, None if there is none."""
        return self._ids["pad"]

    @property
    def mask_id(self) -> int | None:
        """The id of the mask token, None if there is none."""
        return self._ids["mask"]

    @property
    def chat_template(self) -> str | list[dict[str, str]] | None:
        """The Jinja template that lays out a conversation, or several by name."""
        return self._settings.get("chat_template")

    @property
    def special_tokens(self) -> dict[str, str]:
        """Names of the control tokens in templates: ``"bos_token"`` and others."""
        named = {
            key: configured(self._settings, key.removesuffix("_token"))
            for key, value in self._settings.items()
            if key.endswith("_token") and isinstance(value, str | dict)
        }
        named |= {f"{role}_token": token for role, token in self._tokens.items()}
        return {key: token for key, token in named.items() if token is not None}

    @property
    def control_tokens(self) -> dict[str, int]:
        """The names of all control tokens, with their ids."""
        added = self._backend.get_added_tokens_decoder().items()
        return {token.content: i for i, token in added if token.special}

    @property
    def control_ids(self) -> list[int]:
        """The ids of all control tokens, those without a role among them."""
        return sorted(self.control_tokens.values())

    @property
    def max_length(self) -> int | None:
        """Maximum tokens of a sequence of its model, as set by `with_max_length`; None
        if not set, or set to a number that is no limit.
        """
        noted: Any = self._settings.get("model_max_length")
        # For no limit, files have a number of thirty digits.
        is_limit = isinstance(noted, int | float) and 1 <= noted < 10**9
        return int(noted) if is_limit else None

    def with_max_length(self, max_length: int) -> "Tokenizer":
        """Return this tokenizer with another maximum length.

        `save` writes it as ``model_max_length``, to which transformers and `Encoder`
        truncate; `encode_inputs` truncates only to its own argument.

        Args:
            max_length: Maximum tokens of a sequence.
        """
        settings = self._settings | {"model_max_length": max_length}
        return _restore(self._backend.to_str(), self._tokens, settings)

    def __repr__(self) -> str:
        tokens = ", ".join(f"{role}={self._tokens[role]!r}" for role in _ROLES)
        return f"Tokenizer(vocab_size={self.vocab_size}, {tokens})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The library's own pickle forgets encode_special_tokens.
        return _restore, (self._backend.to_str(), self._tokens, self._settings)

    def _control_id(self, role: str) -> int:
        found = self._ids[role]
        if found is None:
            raise ValueError(
                f"add_{role}: the tokenizer has no {role} token; name one with "
                f"Tokenizer(backend, {role}_token=...)"
            )
        return found


def _copy(backend: Any) -> Any:
    """A copy of the tokenizer, whose settings may be changed."""
    copied = _require_tokenizers().Tokenizer.from_str(backend.to_str())
    copied.encode_special_tokens = True
    return copied


def _restore(
    serialized: str, tokens: dict[str, str | None], settings: dict[str, Any]
) -> Tokenizer:
    """The tokenizer that was pickled."""
    backend = _require_tokenizers().Tokenizer.from_str(serialized)
    named = {f"{role}_token": token for role, token in tokens.items()}
    return Tokenizer(backend, **named, settings=settings)


def _without_long_runs(text: str) -> Iterator[str]:
    """The text in pieces, none of which has a long run without a word boundary.

    Training time is quadratic in the longest word, and a text without spaces is a
    single word. Ordinary text stays in one piece.
    """
    start = 0
    for run in re.finditer(rf"\S{{{_LONGEST_RUN},}}|\s{{{_LONGEST_RUN},}}", text):
        yield text[start : run.start()]
        for at in range(run.start(), run.end(), _LONGEST_RUN):
            yield text[at : min(at + _LONGEST_RUN, run.end())]
        start = run.end()
    yield text[start:]


def _require_tokenizers() -> ModuleType:
    """The `tokenizers` library, or an error that says how to install it."""
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError as error:
        raise ImportError(
            "jaxscale.models.Tokenizer needs the tokenizers library: "
            + pip_install("infer")
        ) from error
    return tokenizers
