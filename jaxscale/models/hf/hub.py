"""Models by their name on the Hugging Face hub."""

import difflib
import re
from pathlib import Path

from jaxscale.checks import pip_install


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_WITHOUT_OWNER = {
    "openai-community": ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"),
    "google-bert": (
        *("bert-base-uncased", "bert-base-cased", "bert-large-uncased"),
        *("bert-large-cased", "bert-base-multilingual-cased"),
    ),
    "distilbert": (
        *("distilbert-base-uncased", "distilbert-base-cased"),
        *("distilgpt2", "distilroberta-base"),
    ),
    "FacebookAI": ("roberta-base", "roberta-large"),
    "albert": ("albert-base-v2", "albert-large-v2", "albert-xlarge-v2"),
}
"""Models that the hub knew before its names had owners, by those that they have now."""
_OWNERS = {name: owner for owner, names in _WITHOUT_OWNER.items() for name in names}
_SMALL = ["*.json", "*.jinja"]
_FILES = [*_SMALL, "*.safetensors"]


def is_hub_name(source: str) -> bool:
    """Whether a text can be the name of a model on the hub.

    Example:
        >>> is_hub_name("openai-community/gpt2"), is_hub_name("gpt2"), is_hub_name("x")
        (True, True, False)
    """
    return bool(_NAME.fullmatch(source)) or source.partition("@")[0] in _OWNERS


def local_directory(source: str | Path, *, weights: bool = True) -> Path:
    """The directory of a model: one of this machine, or a download from the hub.

    A local path is used as it is. Otherwise a name ``OWNER/MODEL``, or
    ``OWNER/MODEL@REVISION``, is a model of the hub: its settings, tokenizer and
    safetensors are downloaded once, into the cache of `huggingface_hub`. The oldest
    models, ``gpt2`` and ``bert-base-uncased`` for example, need no owner. With
    ``HF_HUB_OFFLINE=1`` in the environment only the cache is used.

    Args:
        source: The directory, or the name.
        weights: False leaves out the weights of a download.

    Raises:
        FileNotFoundError: there is neither such a directory nor such a model, or the
            hub cannot be reached.
        ImportError: huggingface_hub is not installed.

    Example:
        >>> local_directory("tests/fixtures/models/gpt2").name
        'gpt2'
    """
    path = Path(source).expanduser()
    if source != "" and path.is_dir():
        return path
    if isinstance(source, Path) or not is_hub_name(source):
        close = difflib.get_close_matches(str(source), _OWNERS, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        raise FileNotFoundError(
            f"{str(source)!r} is no directory, and no name of a model on the Hugging "
            f"Face hub{guess}, which has the form OWNER/MODEL"
        )
    if "/" not in source.partition("@")[0]:
        source = f"{_OWNERS[source.partition('@')[0]]}/{source}"
    try:
        import huggingface_hub
    except ImportError as error:
        raise ImportError(
            f"{source!r} is no directory here; to take it from the Hugging Face hub, "
            f"huggingface_hub is needed: {pip_install('infer')}"
        ) from error
    name, _, revision = source.partition("@")
    try:
        found = huggingface_hub.snapshot_download(
            name,
            revision=revision or None,
            allow_patterns=_FILES if weights else _SMALL,
        )
    # Its errors share no base of their own; those of the network are many.
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FileNotFoundError(
            f"{source!r} is no directory here, and could not be taken from the Hugging "
            f"Face hub ({reason[0]}); check the name and the network, or log in with "
            "`hf auth login` where the model asks for it"
        ) from error
    return Path(str(found))
