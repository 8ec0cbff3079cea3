"""Writes the API pages of each package: every public name, from its docstring.

Names are in the order of use, which is that of ``docs/api.md``. A large package has a
page for each of the tasks there. Sphinx finds no docstring of a constant that a package
imports from one of its files, so the pages name each object instead of leaving the list
to ``automodule``.
"""

import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any


TOP_PACKAGES = ("jaxscale", "pallas_kernels")
# For authors; the packages above them export what users need of them.
INTERNAL_PACKAGES = (
    "jaxscale.inference.encoder",
    "jaxscale.inference.engine",
    "jaxscale.inference.engine.scheduling",
    "jaxscale.inference.load",
    "jaxscale.inference.server.endpoints",
    "jaxscale.inference.server.schema",
    "jaxscale.models.families",
    "jaxscale.models.hf",
    "jaxscale.training.checkpoint",
    "jaxscale.training.data",
    "jaxscale.training.diagnosis",
    "jaxscale.training.monitoring",
    "jaxscale.training.planning",
    "pallas_kernels.mosaic",
)
# Their names fill more than 5,000 words; the task whose names are on the first page.
LARGE_PACKAGES = {
    "jaxscale.inference": "Generate text",
    "jaxscale.models": "Choose a model",
    "jaxscale.nn": "Layers and blocks",
    "jaxscale.pruning": "Make masks and look at them",
    "jaxscale.sharding": "Make a mesh and choose rules",
    "jaxscale.training": "Set up the run and start it",
}
TASKS = Path(__file__).with_name("api.md")


def packages() -> list[str]:
    """Every public package of the distribution."""
    found = list(TOP_PACKAGES)
    for top in TOP_PACKAGES:
        path = importlib.import_module(top).__path__
        found += [m.name for m in pkgutil.walk_packages(path, f"{top}.") if m.ispkg]
    return sorted(set(found) - set(INTERNAL_PACKAGES))


def write(folder: Path) -> None:
    """Write the pages into `folder`, and remove those of packages that are gone."""
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    written = {f"{n}.rst": text for p in packages() for n, text in pages(p).items()}
    for old in folder.rglob("*.rst"):
        if old.relative_to(folder).as_posix() not in written:
            old.unlink()
    for name, text in written.items():
        file = folder / name
        if not file.exists() or file.read_text() != text:
            file.write_text(text)


def tasks(package: str) -> dict[str, list[str]]:
    """The public names of a package by task, in the order of use."""
    found = {}
    blocks = re.findall(r"(?ms)^```\{names\} ([^\n]+)\n(.*?)^```$", TASKS.read_text())
    for task, names in blocks:
        full = [full_name(name).rpartition(".") for name in names.split()]
        if here := [name for owner, _, name in full if owner == package]:
            found[task] = here
    if first := LARGE_PACKAGES.get(package):
        found = {first: found[first]} | found
    return found


def pages(package: str) -> dict[str, str]:
    """The pages of one package by name, as reStructuredText."""
    module = importlib.import_module(package)
    lines = [package, "=" * len(package), "", f".. automodule:: {package}", ""]
    by_task = tasks(package)
    if package not in LARGE_PACKAGES:
        names = [name for each in by_task.values() for name in each]
        return {package: "\n".join([*lines, *_listed(module, names)])}
    (_, first), *rest = by_task.items()
    lines += [*_listed(module, first), "More", "----", "", ".. toctree::"]
    lines += ["   :maxdepth: 1", ""]
    made = {}
    for task, names in rest:
        name = f"parts/{package}-{re.sub(r'[^a-z]+', '-', task.lower()).strip('-')}"
        title = f"{package}: {task}"
        lines.append(f"   {name}")
        made[name] = "\n".join([title, "=" * len(title), "", *_listed(module, names)])
    return {package: "\n".join([*lines, ""])} | made


def _listed(module: ModuleType, names: Sequence[str]) -> list[str]:
    lines = [f".. currentmodule:: {module.__name__}", ""]
    for name in names:
        lines += [*_directive(module, name), ""]
    return lines


def docstring(module: ModuleType, name: str) -> str:
    """What the author wrote about a public name; of a constant, the string under it."""
    value = getattr(module, name)
    if inspect.isclass(value):
        text = value.__dict__.get("__doc__") or ""
        by_dataclass = text.startswith(f"{value.__name__}(")
        return "" if by_dataclass else text
    if inspect.isroutine(value) or inspect.ismodule(value):
        return value.__doc__ or ""
    top = module.__name__.partition(".")[0]
    for origin in list(sys.modules.values()):
        file = getattr(origin, "__file__", None)
        is_ours = getattr(origin, "__name__", "").partition(".")[0] == top
        if file and is_ours and origin.__dict__.get(name) is value:
            text = _strings_under_assignments(file).get(name)
            if text:
                return text
    return ""


def full_name(name: str) -> str:
    """The name from the top: the task list leaves out ``jaxscale``."""
    return name if name.partition(".")[0] in TOP_PACKAGES else f"jaxscale.{name}"


def summary(name: str) -> str:
    """The first sentence of what the author wrote about a name in full, as Markdown."""
    package, _, last = name.rpartition(".")
    text = docstring(importlib.import_module(package), last)
    line = " ".join(text.split("\n\n")[0].split())
    line = re.sub(r"(?<=[^.]\.) (?=[A-Z`]).*", "", line).rstrip(":.") + "."
    return re.sub(r":(\w+):`", r"{\1}`", line).replace("|", r"\|")


def _directive(module: ModuleType, name: str) -> list[str]:
    value = getattr(module, name)
    if inspect.isclass(value):
        return _class_directive(value, name)
    if inspect.isroutine(value):
        return [f".. autofunction:: {name}"]
    if inspect.ismodule(value):
        return [f".. automodule:: {value.__name__}", "   :members:"]
    text = docstring(module, name)
    return [f".. py:data:: {name}", "", *(f"   {line}" for line in text.splitlines())]


def _class_directive(value: type, name: str) -> list[str]:
    """The class, what its constructor takes, and the call of its instances.

    Sphinx finds neither of an NNX module, whose metaclass takes anything.
    """
    bases = ["   :show-inheritance:"] if value.__bases__ != (object,) else []
    init = own_method(value, "__init__")
    if init is None or not init.__doc__:
        lines = [f".. autoclass:: {name}", "   :members:", *bases]
    else:
        lines = [f".. autoclass:: {name}({_arguments(init)})", "   :members:", *bases]
        lines.append("   :class-doc-from: both")
    if own_method(value, "__call__") is not None:
        lines += ["", f"   .. automethod:: {name}.__call__"]
    if hasattr(value, "from_pretrained") and "from_pretrained" not in vars(value):
        lines += ["", f"   .. automethod:: {name}.from_pretrained"]
    return lines


def own_method(value: type, method: str) -> Any:
    """The method, inherited or not, if a file of these packages defines it."""
    found = inspect.unwrap(getattr(value, method, None) or object)
    top = (getattr(found, "__module__", "") or "").partition(".")[0]
    return found if inspect.isfunction(found) and top in TOP_PACKAGES else None


def _arguments(function: Any) -> str:
    """The arguments after the first, as the author wrote them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(definition, ast.FunctionDef)
    arguments = definition.args
    del (arguments.posonlyargs or arguments.args)[0]
    return ast.unparse(arguments)


@cache
def _strings_under_assignments(file: str) -> dict[str, str]:
    found = {}
    for statement, following in pairwise(ast.parse(Path(file).read_text()).body):
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
            text = inspect.cleandoc(str(following.value.value))
            found |= {t.id: text for t in targets if isinstance(t, ast.Name)}
    return found
