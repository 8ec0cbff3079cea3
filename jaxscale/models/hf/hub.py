"""Models by their name on the Hugging Face hub."""

import re
from pathlib import Path

from jaxscale.checks import pip_install


_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
_FILES = ["*.json", "*.safetensors", "*.jinja"]


def local_directory(source: str | Path) -> Path:
    """The directory of a model: one of this machine, or a download from the hub.

    A local path is used as it is. Otherwise a name ``OWNER/MODEL``, or
    ``OWNER/MODEL@REVISION``, is a model of the hub: its settings, tokenizer and
    safetensors are downloaded once, into the cache of `huggingface_hub`. With
    ``HF_HUB_OFFLINE=1`` in the environment only the cache is used.

    Args:
        source: The directory, or the name.

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
    if isinstance(source, Path) or not _NAME.fullmatch(source):
        raise FileNotFoundError(
            f"{str(source)!r} is no directory, and no name of a model on the Hugging "
            "Face hub, which has the form OWNER/MODEL"
        )
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
            name, revision=revision or None, allow_patterns=_FILES
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
