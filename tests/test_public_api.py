"""The public names are a decision: a frozen list, each name documented.

After a deliberate change rewrite the list with ``python -m tests.test_public_api`` and
add a line to CHANGELOG.md.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
FROZEN = Path(__file__).with_name("public_api.json")


def packages() -> list[str]:
    """Every package of the distribution, by the files."""
    names = []
    for top in ("jaxscale", "pallas_kernels"):
        names.append(top)
        found = pkgutil.walk_packages([str(ROOT / top)], f"{top}.")
        names += [module.name for module in found if module.ispkg]
    return sorted(names)


def public_names() -> dict[str, list[str]]:
    """The public names of each package that has some."""
    return {
        name: sorted(importlib.import_module(name).__all__)
        for name in packages()
        if hasattr(importlib.import_module(name), "__all__")
    }


def test_names_are_as_frozen():
    frozen, current = json.loads(FROZEN.read_text()), public_names()
    pairs = {(p, n) for p, names in current.items() for n in names}
    frozen_pairs = {(p, n) for p, names in frozen.items() for n in names}
    added, removed = sorted(pairs - frozen_pairs), sorted(frozen_pairs - pairs)
    assert not added and not removed, (
        f"public names changed: new {added}, gone {removed}. If this is meant, run "
        "python -m tests.test_public_api and add a line to CHANGELOG.md"
    )


@pytest.mark.parametrize("package", packages())
def test_package_lists_its_names(package):
    module = importlib.import_module(package)
    assert module.__doc__
    if package != "jaxscale":
        assert module.__all__, f"{package} has no __all__"
        assert len(set(module.__all__)) == len(module.__all__)
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize("package", packages())
def test_every_name_is_documented(package):
    module = importlib.import_module(package)
    names = getattr(module, "__all__", [])
    missing = [n for n in names if not documentation(module, n)]
    assert not missing, f"{package}: no docstring on {missing}"


def documentation(module, name: str) -> str | None:
    """The docstring of a public name; of a constant, the string under it."""
    value = getattr(module, name)
    if inspect.isclass(value):
        own = value.__dict__.get("__doc__") or ""
        written_by_dataclass = own.startswith(f"{value.__name__}(")
        return None if written_by_dataclass else own
    if inspect.isroutine(value) or inspect.ismodule(value):
        return value.__doc__
    top = module.__name__.partition(".")[0]
    files = [m for m in list(sys.modules) if m == top or m.startswith(f"{top}.")]
    docs = (constants(sys.modules[m].__file__).get(name) for m in files)
    return next((doc for doc in docs if doc), None)


@cache
def constants(file: str) -> dict[str, str]:
    """Strings that stand under assignments at the top level of a file."""
    body = ast.parse(Path(file).read_text()).body
    found = {}
    for statement, following in pairwise(body):
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        elif isinstance(statement, ast.TypeAlias):
            targets = [statement.name]
        else:
            continue
        if isinstance(following, ast.Expr) and isinstance(
            following.value, ast.Constant
        ):
            found |= {t.id: following.value.value for t in targets if hasattr(t, "id")}
    return found


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
        assert not documentation(module, name), name
    for name in ("good", "Good", "GOOD"):
        assert documentation(module, name), name


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(public_names(), indent=2) + "\n")
