"""The public names are a decision: a frozen list, each name documented.

After a deliberate change rewrite the list with ``python -m tests.test_public_api`` and
add a line to CHANGELOG.md.
"""

import importlib
import inspect
import json
import re
from collections import Counter
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

from docs.api_pages import docstring, full_name, own_method, packages, pages, summary


FROZEN = Path(__file__).with_name("public_api.json")


def public_names() -> dict[str, list[str]]:
    """The public names of each package."""
    modules = {name: importlib.import_module(name) for name in packages()}
    return {n: sorted(getattr(m, "__all__", [])) for n, m in modules.items()}


def test_dir_shows_the_public_names_of_a_package():
    for package, names in public_names().items():
        if package.startswith("jaxscale."):
            assert dir(importlib.import_module(package)) == names


def test_names_are_as_frozen():
    frozen, current = (
        {(package, name) for package, names in table.items() for name in names}
        for table in (json.loads(FROZEN.read_text()), public_names())
    )
    added, removed = sorted(current - frozen), sorted(frozen - current)
    assert not added and not removed, (
        f"public names changed: new {added}, gone {removed}. If this is meant, run "
        "python -m tests.test_public_api and add a line to CHANGELOG.md"
    )


@pytest.mark.parametrize("package", packages())
def test_every_name_is_documented(package):
    module = importlib.import_module(package)
    names = module.__all__
    assert len(set(names)) == len(names)
    missing = [name for name in names if not docstring(module, name)]
    assert not missing, f"{package}: no docstring on {missing}"
    text = "".join(pages(package).values())
    assert module.__doc__ and f".. automodule:: {package}" in text
    for name in names:
        assert re.search(rf":: {name}(\(.*\))?\n", text), (
            f"{name} is not on the API page of {package}"
        )


def callables() -> dict[str, Any]:
    """Public functions, and constructors and calls of classes that are no records."""
    found = {}
    for package, names in public_names().items():
        for name in names:
            value = getattr(importlib.import_module(package), name)
            if inspect.isroutine(value):
                found[f"{package}.{name}"] = value
            elif inspect.isclass(value) and not issubclass(value, BaseException):
                methods = [] if is_dataclass(value) else ["__init__"]
                for method in [*methods, "__call__"]:
                    if (ours := own_method(value, method)) is not None:
                        found[f"{package}.{name}.{method}"] = ours
    return found


def test_several_arguments_are_explained():
    """Each stands under Args; a constructor's may stand under that of its class."""
    lost = []
    for name, function in callables().items():
        given = [*inspect.signature(function).parameters]
        section = (function.__doc__ or "").partition("Args:")[2]
        if name.endswith("__init__") and not section:
            package, owner, _ = name.rsplit(".", 2)
            text = getattr(importlib.import_module(package), owner).__doc__ or ""
            section = text.partition("Args:")[2]
        given = [word for word in given if word != "self"]
        known = re.findall(r"(?m)^ +\**(\w[\w, *]*):", section)
        known = re.findall(r"\w+", " ".join(known))
        if len(given) > 1:
            lost += [f"{name}: {word}" for word in given if word not in known]
    assert not lost


def test_every_name_stands_under_one_task():
    text = (Path(__file__).parents[1] / "docs/api.md").read_text()
    tasks = re.findall(r"(?ms)^```\{names\} [^\n]+\n(.*?)^```$", text)
    listed = Counter(full_name(name) for task in tasks for name in task.split())
    assert not [name for name, times in listed.items() if times > 1]
    public = {f"{p}.{name}" for p, names in public_names().items() for name in names}
    new, gone = sorted(public - set(listed)), sorted(set(listed) - public)
    assert not new and not gone, f"docs/api.md lacks {new}, and lists {gone}"


def test_summaries_are_one_sentence_without_markup_of_sphinx():
    first = summary("jaxscale.pruning.magnitude_scores")
    assert first == "{math}`w^2` of every weight."
    second = summary("jaxscale.inference.Overloaded")
    assert second == "The waiting queue is full; HTTP 429."


def test_undocumented_names_are_found(tmp_path, monkeypatch):
    """The check above can fail: for a function, a dataclass and a constant."""
    (tmp_path / "odd_package.py").write_text(
        "import dataclasses\n"
        "def bare(): pass\n"
        "def good():\n    'Good.'\n"
        "@dataclasses.dataclass\nclass Bare:\n    x: int\n"
        "@dataclasses.dataclass\nclass Good:\n    'Good.'\n    x: int\n"
        "BARE = 1\n"
        "GOOD = 2\n'Good.'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("odd_package")
    for name in ("bare", "Bare", "BARE"):
        assert not docstring(module, name), name
    for name in ("good", "Good", "GOOD"):
        assert docstring(module, name), name


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(public_names(), indent=2) + "\n")
