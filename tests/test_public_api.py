"""The public names are a decision: a frozen list, each name documented.

After a deliberate change rewrite the list with ``python -m tests.test_public_api`` and
add a line to CHANGELOG.md.
"""

import importlib
import json
import re
from pathlib import Path

import pytest

from docs.api_pages import docstring, packages, page


FROZEN = Path(__file__).with_name("public_api.json")


def public_names() -> dict[str, list[str]]:
    """The public names of each package."""
    modules = {name: importlib.import_module(name) for name in packages()}
    return {n: sorted(getattr(m, "__all__", [])) for n, m in modules.items()}


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
    text = page(package)
    assert module.__doc__ and f".. automodule:: {package}" in text
    for name in names:
        assert re.search(rf":: {name}(\(.*\))?\n", text), (
            f"{name} is not on the API page of {package}"
        )


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
