"""What a stranger installs: the wheel, its imports without extras, the pinned list."""

import ast
import re
import subprocess
import sys
import tarfile
import textwrap
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxscale


ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = SETTINGS["project"], SETTINGS["build-system"]
EXTRAS = PROJECT["optional-dependencies"]
USERS = (ROOT / "requirements.txt").read_text().splitlines()
PINS = USERS + (ROOT / "requirements-dev.txt").read_text().splitlines()

# Modules that come with extras alone. What the base dependencies bring may be imported
# anywhere (flax brings orbax-checkpoint and rich).
ONLY_EXTRAS = {
    "parquet": ["pyarrow"],
    "train": [
        "grain",
        "huggingface_hub",
        "tensorboardX",
        "tokenizers",
        "tyro",
    ],
    "infer": ["huggingface_hub", "jinja2", "llguidance", "tokenizers"],
    "serve": [
        "fastapi",
        "httpx2",
        "prometheus_client",
        "pydantic",
        "uvicorn",
    ],
    "triton": ["jax_triton", "triton"],
    "docs": ["matplotlib", "myst_nb", "sphinx"],
    "notebooks": ["ipykernel", "jupytext"],
    "dev": [
        "beartype",
        "build",
        "hypothesis",
        "importlinter",
        "nbmake",
        "openai",
        "pytest",
        "schemathesis",
    ],
}
BASE_PACKAGES = [
    "jaxscale",
    "jaxscale.sharding",
    "jaxscale.nn",
    "jaxscale.models",
    "jaxscale.inference",
    "jaxscale.training",
    "pallas_kernels",
]


def run(*command, **kwargs) -> str:
    result = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
        **kwargs,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run(*build, "--outdir", out, ROOT, cwd=out)
    (file,) = out.glob("*.whl")
    return file


def test_wheel_holds_the_two_packages_and_nothing_else(wheel):
    assert wheel.name == f"jaxscale-{jaxscale.__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"jaxscale-{jaxscale.__version__}.dist-info"
    assert tops == {"jaxscale", "pallas_kernels", info}
    page = "jaxscale/inference/server/live.html"
    for needed in ("jaxscale/py.typed", "pallas_kernels/py.typed", page):
        assert needed in names
    for table in ROOT.glob("pallas_kernels/tuned/*.json"):
        assert f"pallas_kernels/tuned/{table.name}" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_an_index_shows_the_readme_without_dead_links(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        head, page = archive.read(name).decode().split("\n\n", 1)
    assert "Description-Content-Type: text/markdown" in head
    assert page.startswith("# jaxscale") and "make quickstart" in page
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href)=\"([^\"]*)\"", page)
    dead = ["".join(link) for link in links if not "".join(link).startswith("http")]
    assert not dead
    assert "docs/flux.md" in (ROOT / "README.md").read_text()  # which has such links


def test_source_archive_holds_no_tests(tmp_path):
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    run(*build, "--outdir", tmp_path, ROOT, cwd=tmp_path)
    (file,) = tmp_path.glob("*.tar.gz")
    top = file.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(file) as archive:
        names = [name.removeprefix(top) for name in archive.getnames()]
    assert "pallas_kernels/dispatch.py" in names and "jaxscale/nn/linear.py" in names
    assert {name.split("/")[0] for name in names} <= {
        "jaxscale",
        "pallas_kernels",
        *("README.md", "LICENSE", "CHANGELOG.md", "PKG-INFO"),
        *("pyproject.toml", ".gitignore"),  # hatchling always adds them
    }


# Requirements that no file of ours imports by their own name.
BY_OTHERS = {"uvloop": "uvicorn uses it where it is installed"}
MODULES = {
    "orbax_checkpoint": "orbax",
    "prometheus_client": "prometheus_client",
}


@pytest.mark.parametrize("extra", ["train", "infer", "serve", "quickstart"])
def test_what_an_extra_installs_is_imported(extra):
    text = "\n".join(path.read_text() for path in ROOT.glob("jaxscale/**/*.py"))
    for requirement in map(Requirement, EXTRAS[extra]):
        name = requirement.name.replace("-", "_")
        if name == "jaxscale" or name in BY_OTHERS:
            continue
        module = MODULES.get(name, name)
        pattern = rf"(import|from) {module}\b|import_module\(.{module}"
        assert re.search(pattern, text), f"{requirement} of {extra} is not imported"


# Files that an extra is for.
FOR_AN_EXTRA = {
    "infer": [
        "nn/*",
        "models/**/*",
        "inference/*",
        "inference/engine/*",
        "inference/encoder/*",
    ],
    "serve": ["inference/**/*", "cli/serve", "cli/bench_serve", "cli/options"],
    "train": ["training/**/*", "pruning/*", "cli/*", "!cli/serve", "!cli/bench_serve"],
    "quickstart": ["recipes/*"],
}
OTHERS_BRING = {"jaxlib", "ml_dtypes", "orbax", "pydantic_core", "rich", "starlette"}
OTHERS_BRING |= {"yaml"}
FROM_THEIR_OWN_EXTRA = {"pyarrow", "jax_triton"}
FROM_THEIR_OWN_EXTRA |= {"httpx"}  # which does instead of httpx2


def closure(extra):
    """The modules of an extra, with those of the extras that it names."""
    found = set()
    for requirement in map(Requirement, EXTRAS[extra]):
        if requirement.name == "jaxscale":
            found |= set().union(*map(closure, requirement.extras))
        else:
            name = requirement.name.replace("-", "_")
            found.add(MODULES.get(name, name))
    return found


@pytest.mark.parametrize("extra", FOR_AN_EXTRA)
def test_what_is_imported_comes_with_the_extra(extra):
    folder = ROOT / "jaxscale"
    files = set()
    for pattern in FOR_AN_EXTRA[extra]:
        chosen = set(folder.glob(f"{pattern.removeprefix('!')}.py"))
        assert chosen, pattern
        files = files - chosen if pattern.startswith("!") else files | chosen
    base = {Requirement(r).name for r in PROJECT["dependencies"]} | OTHERS_BRING
    known = base | closure(extra) | FROM_THEIR_OWN_EXTRA | {"jaxscale"}
    known |= {"pallas_kernels", *sys.stdlib_module_names}
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            missing = {name.partition(".")[0] for name in names} - known
            assert not missing, f"{file} imports {missing}, which {extra} lacks"


def test_notebooks_get_what_they_import_and_show():
    names = {Requirement(r).name for r in EXTRAS["notebooks"]}
    assert {"matplotlib", "jaxscale"} <= names
    assert any("train" in Requirement(r).extras for r in EXTRAS["notebooks"])


def test_subpackages_are_there_after_a_plain_import():
    script = """
        import sys, jaxscale
        assert "jaxscale.nn" not in sys.modules and "nn" in dir(jaxscale)
        assert jaxscale.nn.Linear and jaxscale.models.Decoder
        try:
            jaxscale.missing
        except AttributeError as error:
            print(error)
        """
    out = run(sys.executable, "-W", "error", "-c", textwrap.dedent(script), cwd=ROOT)
    said, _, packages = out.strip().partition("; what it has is in its packages: ")
    assert said == "module 'jaxscale' has no attribute 'missing'"
    assert packages.startswith("cli, inference, models, nn, ")


def test_imports_and_runs_without_any_extra(wheel, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--disable-pip-version-check", "--target", tmp_path, wheel)
    blocked = [module for modules in ONLY_EXTRAS.values() for module in modules]
    script = f"""
        import sys

        class Blocker:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] in {blocked!r}:
                    raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

        sys.meta_path.insert(0, Blocker())
        sys.path.insert(0, {str(tmp_path)!r})
        for package in {BASE_PACKAGES!r}:
            __import__(package)
            assert sys.modules[package].__file__.startswith({str(tmp_path)!r})
        try:
            import tyro
        except ModuleNotFoundError:
            print("blocked")
        """
    script = textwrap.dedent(script)
    out = run(sys.executable, "-W", "error", "-c", script, cwd=tmp_path)
    assert out.split() == ["blocked"]


@pytest.mark.parametrize("extra", ONLY_EXTRAS)
def test_missing_extras_are_named(extra):
    """A file that imports a module of an extra says how to get it."""
    modules = "|".join(ONLY_EXTRAS[extra])
    for file in [*ROOT.glob("jaxscale/*/*.py"), *ROOT.glob("pallas_kernels/**/*.py")]:
        text = file.read_text()
        imports = re.search(rf"^ *(import|from) ({modules})\b", text, re.MULTILINE)
        # A script, which a file that asks runs; kernels, which one that asks launches.
        if file.name in ("template_worker.py", "triton_kernels.py"):
            continue
        if imports and file.parent.name != "cli":  # the command line has its own way
            assert imports[0].startswith(" "), f"{file} imports {imports[2]} at the top"
            assert re.search(r"pip_install\(|jaxscale\[\w+\]", text), (
                f"{file} names no extra"
            )


def test_pins_are_names_and_versions_only():
    assert PINS
    for line in PINS:
        # Triton is built for Linux alone.
        pin = r"[A-Za-z0-9._-]+==[A-Za-z0-9.!+]+(; sys_platform == \"linux\")?"
        assert re.fullmatch(pin, line), line
    names = [canonicalize_name(line.split("==")[0]) for line in PINS]
    assert len(set(names)) == len(names)


def test_pins_satisfy_the_project():
    exact = (pin.partition(";")[0].split("==") for pin in PINS)
    pins = {canonicalize_name(name): version for name, version in exact}
    # The CUDA builds come with the GPU machine; triton has no build without one.
    extras = {name: EXTRAS[name] for name in EXTRAS if name[:4] not in ("cuda", "trit")}
    for source, requirements in {"base": PROJECT["dependencies"], **extras}.items():
        for requirement in map(Requirement, requirements):
            name = canonicalize_name(requirement.name)
            if name == "jaxscale":  # its other extras
                assert requirement.extras <= set(EXTRAS)
                continue
            assert name in pins, f"{requirement} of {source} is not pinned"
            assert requirement.specifier.contains(pins[name]), (requirement, pins[name])


def test_the_quickstart_installs_nothing_else():
    """Its pins are what its extra leads to, with what an editable install needs."""
    installed = {canonicalize_name(d.name): d for d in metadata.distributions()}
    needed = set()
    todo = [Requirement(f"jaxscale[{extra}]") for extra in ("quickstart", "train")]
    todo += map(Requirement, ("editables", *BUILD["requires"]))
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        extras = frozenset(requirement.extras)
        if name not in installed or (name, extras) in needed:
            continue
        needed.add((name, extras))
        texts = installed[name].requires or []
        if name == "jaxscale":  # that of this checkout
            own = [text for extra in extras for text in EXTRAS[extra]]
            texts = [*PROJECT["dependencies"], *own]
        for text in texts:
            found = Requirement(text)
            if found.marker is None or any(
                found.marker.evaluate({"extra": extra}) for extra in extras or {""}
            ):
                todo.append(found)
    pins = {canonicalize_name(line.split("==")[0]) for line in USERS}
    assert pins == {name for name, _ in needed} - {"jaxscale"}
    makefile = (ROOT / "Makefile").read_text()
    assert re.search(r"^quickstart: \$\(STAMP\)", makefile, re.MULTILINE)
    (runtime,) = re.findall(r"^\$\(STAMP\):(.*)$", makefile, re.MULTILINE)
    assert runtime.split() == ["requirements.txt", "pyproject.toml"]


def test_cuda_extras_take_the_pinned_jax():
    (pin,) = [line for line in PINS if line.startswith("jax==")]
    version = pin.split("==")[1]
    for name in ("cuda12", "cuda13"):
        (requirement,) = map(Requirement, EXTRAS[name])
        assert requirement.name == "jax" and requirement.extras == {name}
        assert requirement.specifier.contains(version)
    assert f'"jax[$(CUDA)]=={version}"' in (ROOT / "Makefile").read_text()


def test_ci_runs_the_commands_of_the_readme():
    steps = (ROOT / ".ci/run").read_text()
    for command in ("lint", "test", "quickstart"):
        assert re.search(rf"^make .*\b{command}\b", steps, re.MULTILINE), command
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run: .ci/run" in workflow
    version = (ROOT / ".python-version").read_text().strip()
    assert f'"{version}"' in workflow and PROJECT["requires-python"] == f">={version}"


def test_each_file_is_imported_once():
    """Tests, doctests and the packages themselves share one copy of each module."""
    files = [
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in ("jaxscale", "pallas_kernels", "tests", "conftest")
        and getattr(module, "__file__", None)
    ]
    assert files
    assert len(files) == len(set(files))
    assert all(Path(file).is_relative_to(ROOT) for file in files), files


NOTEBOOKS = sorted({path.stem for path in ROOT.glob("examples/*_*.*")})


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_equal_their_scripts(name):
    """`make format` keeps the pair in step; what is reviewed is the script."""
    import jupytext

    script, notebook = (
        jupytext.read(ROOT / "examples" / f"{name}.{end}") for end in ("py", "ipynb")
    )
    cells = [(cell.cell_type, cell.source) for cell in notebook.cells]
    assert cells == [(cell.cell_type, cell.source) for cell in script.cells]
    assert not any(cell.get("outputs") for cell in notebook.cells)
    assert "`pip install '.[notebooks" in cells[0][1] and "Colab" in cells[0][1]
    assert cells[-1][0] == "code" and "assert " in cells[-1][1]
