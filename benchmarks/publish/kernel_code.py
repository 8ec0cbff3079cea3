"""The code that kernels are made of, by which rows and `tests/manifest.json` age."""

import ast
import functools
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

import pallas_kernels
from pallas_kernels.mosaic import H200


PACKAGE = Path(pallas_kernels.__file__).parent

MANIFEST = "tests/manifest.json"
"""Hashes of the lowered modules of every op, from the root of the repository."""


def sources(op: str) -> list[Path]:
    """The package of an op, those that it imports, and what all ops share."""
    packages, todo = set(), {op, "mosaic"}
    files = {PACKAGE / "tuned" / f"{H200.name}.json", *PACKAGE.glob("*.py")}
    while todo:
        package = todo.pop()
        packages.add(package)
        for path in PACKAGE.joinpath(package).glob("**/*.py"):
            files.add(path)
            found = re.findall(r"pallas_kernels\.(\w+)", path.read_text())
            todo |= {n for n in found if PACKAGE.joinpath(n).is_dir()} - packages
    return sorted(files)


def digest(files: Iterable[Path]) -> str:
    """A hash of all syntax and tuned configs in files."""
    total = hashlib.sha256()
    for path in files:
        text = path.read_text()
        total.update((syntax(text) if path.suffix == ".py" else text).encode())
    return total.hexdigest()[:12]


@functools.cache
def syntax(text: str) -> str:
    """The code without comments, docstrings and places."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [
                part
                for part in body
                if not (
                    isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)
                )
            ]
    return ast.dump(tree)
