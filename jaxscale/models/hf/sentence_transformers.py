"""Directories of sentence-transformers: how a model embeds sentences."""

from pathlib import Path
from typing import Any

from jaxscale.models.heads import Pooling
from jaxscale.models.hf.files import inside, read_json, read_json_object


_POOLINGS: dict[str, Pooling] = {
    # Values of "pooling_mode", and the flags that releases before 6 wrote.
    "cls": "first",
    "mean": "mean",
    "max": "max",
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
}


def sentence_settings(path: Path) -> dict[str, Any]:
    """Read how a directory embeds sentences.

    Args:
        path: The directory. Without a ``modules.json`` only the maximum length is
            known.

    Returns:
        The folder of the model as `path`, and what the files say of `normalize`,
        `pooling`, `max_length` (tokens, maybe more than the model allows) and
        `lower_case`.

    Raises:
        ValueError: the directory needs an unsupported setting.
    """
    settings: dict[str, Any] = {"path": path}
    file = path / "modules.json"
    if not file.is_file():
        return settings | {"max_length": _text_settings(path)["max_length"]}
    settings["normalize"] = False
    for module, folder in _modules(file):
        kind = module.rpartition(".")[2]
        if kind == "Transformer":
            settings["path"] = folder
        elif kind == "Pooling":
            config = folder / "config.json"
            settings["pooling"] = _pooling(read_json_object(config), config)
        elif kind == "Normalize":
            settings["normalize"] = True
        else:
            raise ValueError(
                f"{file} has the module {module!r}, which is not supported; "
                "expected Transformer, Pooling and Normalize"
            )
    _refuse_prompt(path / "config_sentence_transformers.json")
    return settings | _text_settings(settings["path"])


def _modules(file: Path) -> list[tuple[str, Path]]:
    """The class and the folder of each module that a ``modules.json`` lists."""
    modules = read_json(file)
    if not isinstance(modules, list) or not all(
        isinstance(module, dict) and isinstance(module.get("type"), str)
        for module in modules
    ):
        raise ValueError(
            f"{file} holds {modules!r:.80}, expected a list of modules, each with a "
            "'type' and a 'path'; download it again"
        )
    return [(m["type"], inside(file.parent, m.get("path", ""), file)) for m in modules]


def _pooling(config: dict[str, Any], file: Path) -> Pooling:
    modes = config.get("pooling_mode")
    if modes is None:
        modes = [
            name
            for name, value in config.items()
            if name.startswith("pooling_mode_") and value is True
        ]
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or str(modes[0]) not in _POOLINGS:
        raise ValueError(
            f"{file} sets {modes or 'no pooling_mode'}, which is not supported; "
            f"expected one of {sorted(_POOLINGS)}"
        )
    return _POOLINGS[modes[0]]


def _refuse_prompt(file: Path) -> None:
    """Refuse a default prompt, which would change the embedding of every text."""
    config = read_json_object(file) if file.is_file() else {}
    name, prompts = config.get("default_prompt_name"), config.get("prompts") or {}
    if not isinstance(prompts, dict):
        raise ValueError(f"prompts {prompts!r:.80} of {file} must be an object")
    prompt = prompts.get(name) if isinstance(name, str) else None
    if prompt:
        raise ValueError(
            f"{file} sets default_prompt_name {name!r}, which is not supported; set it "
            f"to null and begin each text with {prompt!r} yourself"
        )


def _text_settings(directory: Path) -> dict[str, Any]:
    """Maximum tokens of a text, and whether texts are lowercased."""
    # The first was named after the model once; newer releases write the last alone.
    files = sorted(directory.glob("sentence_*_config.json"))
    config = read_json_object(files[0]) if files else {}
    limit, key = config.get("max_seq_length"), "max_seq_length"
    file = directory / "tokenizer_config.json"
    if limit is None and file.is_file():
        limit, key = read_json_object(file).get("model_max_length"), "model_max_length"
    if limit is not None and (type(limit) not in (int, float) or not limit >= 1):
        raise ValueError(
            f"{key} {limit!r:.80} of {directory} must be a positive integer"
        )
    return {"max_length": limit, "lower_case": bool(config.get("do_lower_case"))}
