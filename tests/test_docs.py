"""The documentation builds, lists the five systems, and its code and commands work."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxscale
from conftest import COMPILE_FAST
from docs import (
    flover_pictures,
    front_pictures,
    megascale_pictures,
    model_zoo,
    scaling_pictures,
    tilewise_pictures,
)
from jaxscale import cli
from jaxscale.cli import (
    diagnose,
    export,
    generate,
    plan,
    prune,
    report,
    schedule,
    serve,
    supervise,
    train,
)
from jaxscale.recipes import runs
from jaxscale.training import TrainConfig
from tests.pages import blocks as python
from tests.search import Search


ROOT = Path(__file__).parents[1]
SYSTEMS = ["Flux", "ByteTransformer", "Flover", "MegaScale", "Tile-wise sparsity"]


@pytest.mark.slow
def test_docs_build_without_warnings(tmp_path):
    """One build, and all that is checked of it.

    It has no pages of source code, and on each page the first level of the navigation,
    which would take a third of the time.
    """
    extensions = "myst_nb,sphinx.ext.autodoc,sphinx.ext.napoleon"
    result = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"),
            *("-D", f"extensions={extensions}"),
            *("-D", "html_theme_options.max_navbar_depth=1"),
            *("-D", "html_theme_options.collapse_navbar=1"),
            *("-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "html"),
        ],
        capture_output=True,
        text=True,
        timeout=1400,  # a minute of CPU time, where others may compute too
        check=False,
    )
    assert result.returncode == 0, result.stderr
    check_objects(tmp_path / "html")
    check_lengths(tmp_path / "html")
    search = Search(tmp_path / "html")
    assert {query: search.pages(query)[0] for query in FOUND} == FOUND


def check_objects(html: Path) -> None:
    page = (html / "generated/jaxscale.sharding.html").read_text()
    for name in ("make_mesh", "AxisRules", "REPLICATED"):
        assert f'id="jaxscale.sharding.{name}"' in page
    assert "Rules that split no axis" in page  # the string under a constant
    assert "<math" in (html / "flux.html").read_text()
    page = (html / "flux.html").read_text().lower()
    assert not re.search("<script[^>]*mathjax|mathjax[^<]*</script", page)
    page = (html / "generated/parts/jaxscale.nn-tensor-parallelism.html").read_text()
    assert 'id="jaxscale.nn.JoinedLinear.__call__"' in page
    page = (html / "generated/jaxscale.nn.html").read_text()
    found = re.findall(r'<dt class="sig[^>]* id="jaxscale\.nn\.(\w+)"', page)
    assert found[:3] == ["Attention", "MLP", "Linear"]
    text = re.sub("<[^>]+>", "", page.partition('id="jaxscale.nn.Linear"')[2])
    for part in (
        "in_features: int",
        "Features of the input.",
        "use_bias: bool = False",
    ):
        assert part in text[:4000]


def check_lengths(html: Path) -> None:
    """In words that are not behind a fold; a package that grows is split by task."""
    long = {}
    for path in html.rglob("*.html"):
        article = re.search(
            '(?s)<article class="bd-article".*</article>', path.read_text()
        )
        if article and path.stem != "genindex":
            shown = re.sub("(?s)<details>.*?</details>|<[^>]+>", " ", article[0])
            long[path.stem] = len(shown.split())
    assert len(long) > 80
    assert not {name: words for name, words in long.items() if words >= 5000}


FOUND = {
    "activation checkpointing": "training-step",
    "baseline": "benchmarks",
    "driver": "install",
    "fault tolerance": "supervision",
    "FlashAttention": "bytetransformer-kernel",
    "GEMM": "flux",
    "gradient accumulation": "training",
    "matmul": "flux",
    "mixed precision": "training",
    "multi-node": "hosts",
    "OpenAI-compatible server": "serving",
    "optimizer state": "training-step",
    "sequence packing": "bytetransformer",
    "Slurm": "hosts",
    "throughput": "training",
    "varlen": "kernels",
}
"""What the search must find first: a page for each word of the field."""


def rows(text: str) -> list[str]:
    """The systems whose rows or items a text lists, in order."""
    pattern = rf"^\|? *(\d)(?:\.| \|) *(?:\*\*)?\[?({'|'.join(SYSTEMS)})\b"
    return [name for _, name in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.parametrize(
    "place", ["README.md", "docs/index.md", "jaxscale/__init__.py"]
)
def test_the_five_systems_stand_in_order(place):
    assert rows((ROOT / place).read_text()) == SYSTEMS


OTHERS = ("ray",)  # what pages show and is not installed
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


SIMULATED = "JAX_NUM_CPU_DEVICES=8"
"""What a page says whose code needs several devices."""
ON_ONE_DEVICE = (
    *("README.md", "docs/index.md", "docs/models.md", "docs/bytetransformer.md"),
    *("docs/tilewise.md", "docs/tensor.md", "docs/pipelines.md", "docs/data.md"),
    *("docs/observing.md", "docs/training.md"),
)


@pytest.mark.slow
def test_examples_run_on_one_device():
    """The Python of these pages, top to bottom, as a reader would paste it."""
    assert not [
        page for page in ON_ONE_DEVICE if SIMULATED in (ROOT / page).read_text()
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    environment["XLA_FLAGS"] = " ".join(COMPILE_FAST)
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    result = subprocess.run(
        [sys.executable, "-m", "tests.pages", *ON_ONE_DEVICE],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1400,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize(
    "page", ["docs/own_model.md", "docs/scaling.md", "docs/hosts.md"]
)
def test_examples_run_on_eight_devices(page):
    """The same, where the page says how they are simulated."""
    assert SIMULATED in (ROOT / page).read_text()
    script = "\n".join(blocks(ROOT / page))
    assert script
    with jax.numpy_dtype_promotion("standard"):  # the default of a reader's session
        exec(compile(script, page, "exec"), {"__name__": "__main__"})


def test_the_readme_is_for_a_person():
    text = (ROOT / "README.md").read_text()
    lines = re.sub("<!--.*?-->", "", text).splitlines()
    assert len(lines) <= 160
    assert max(map(len, lines)) <= 220
    (snippet,) = blocks(ROOT / "README.md")
    assert len(snippet.splitlines()) <= 14
    tables = re.findall(r"(?m)^<!-- (?:table|plot):(\S+)", text)
    assert tables == ["headlines"] and "python -m benchmarks" not in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_made_a_table_is_folded_away(page):
    """Commands and commits stand in a fold under the table, in lines that fit."""
    generated = re.findall(r"(?s)<!-- table:.*?<!-- /table -->", page.read_text())
    for table in generated:
        shown = re.sub(r"(?s)<details>.*?</details>", "", table)
        assert "python -m" not in shown and "commit" not in shown
        for line in table.splitlines():
            assert len(line) <= 160 or line.startswith(("|", "<!--"))


@pytest.mark.parametrize(
    "system", ["flux", "bytetransformer", "flover", "megascale", "tilewise"]
)
def test_pages_of_systems_begin_with_a_problem_and_a_picture(system):
    first, _, rest = (ROOT / f"docs/{system}.md").read_text().partition("\n## ")
    assert "](_static/" in first and len(first.split()) < 350
    assert len(rest.split()) < 3000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_are_short(page):
    """What a person reads: without what `make tables` writes, and without code."""
    text = re.sub(r"(?s)<!-- table:.*?<!-- /table -->|```.*?```", "", page.read_text())
    limit = 10_000 if page.name == "CHANGELOG.md" else 2000
    assert len(text.split()) < limit


def test_the_zoo_is_current():
    assert model_zoo.PATH.read_text() == model_zoo.text()


def test_what_pjit_became_computes_what_it_says():
    """All spellings on that page, one after the other, against a single device."""
    page = (ROOT / "docs/scaling.md").read_text()
    section = page.partition("## What pjit became")[2].partition("\n## ")[0]
    here: dict[str, Any] = {}
    for block in python(section):
        exec(compile(block, "docs/scaling.md", "exec"), here)
    x, w = (np.asarray(here[name]) for name in "xw")
    y = np.maximum(x @ w, 0)
    for name, value, spec in [
        ("y", y, P("data", "tensor")),
        ("typed_y", y, P("data", "tensor")),
        ("z", y @ w.T, P("data", None)),
        ("typed_z", y @ w.T, P("data", None)),
    ]:
        np.testing.assert_allclose(here[name], value, rtol=1e-5, atol=1e-5)
        sharding = here[name].sharding
        assert sharding.is_equivalent_to(NamedSharding(sharding.mesh, spec), 2)
        assert len(sharding.device_set) == 8
    assert str(jax.typeof(here["typed_y"])) == "float32[8@data,32@tensor]"


def test_the_batches_of_hosts_become_a_global_array():
    page = (ROOT / "docs/hosts.md").read_text()
    section = page.partition("## The batch of each host")[2].partition("\n## ")[0]
    here: dict[str, Any] = {}
    for block in python(section):
        exec(compile(block, "docs/hosts.md", "exec"), here)
    tokens = here["tokens"]
    np.testing.assert_array_equal(tokens, np.arange(32)[:, None] + np.arange(16))
    assert (
        tokens.sharding == here["batch_sharding"]
        and len(tokens.sharding.device_set) == 8
    )


# Arrays that the text around names, with their shapes.
GIVEN = {
    "flux.md": "b b_scale x",
    "kernels.md": "b bias bk bq bv cu cu_seqlens k ks kv layer lengths pages q qs "
    "residual scale source table target to_keys to_queries v vs w wk wq wv x",
    "tilewise-kernel.md": "dense mask w_down w_gate w_up x",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_of_the_code_are_defined(page):
    """From top to bottom, as a reader would paste the blocks of a page."""
    ruff = [Path(sys.executable).with_name("ruff"), "check", "--isolated", "-"]
    found = subprocess.run(
        [*ruff, "--select=F821", "--output-format=concise", "--stdin-filename=page.py"],
        input="\n".join(blocks(page)),
        capture_output=True,
        text=True,
        check=False,
    )
    names = set(re.findall(r"Undefined name `(\w+)`", found.stdout))
    assert "All checks passed" in found.stdout or names
    assert names <= set(GIVEN.get(page.name, "").split())


def blocks(page: Path) -> list[str]:
    return python(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_imports_what_exists(page):
    for block in blocks(page):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module not in OTHERS:
                assert node.module
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module}.{alias.name}"


class Parsed(Exception):
    """The command line has understood its arguments."""


NAMES = "train|export|generate|prune|quickstart|serve|plan|schedule|report|diagnose"


def commands() -> list[str]:
    """Every call of the command line that pages and help texts show."""
    texts = [*(page.read_text() for page in PAGES), train._help()]
    found = re.findall(
        rf"^ *(?:\$ )?(?:JAX_\w+=\S+ )*jaxscale ((?:{NAMES})(?: .*?)?)(?: > \S+ &)?$",
        "\n".join(texts),
        re.MULTILINE,
    )
    return sorted(set(found))


@pytest.mark.parametrize("command", commands())
def test_commands_are_understood(command, tmp_path, monkeypatch):
    devices = [1]
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))

    def check(config, *_, **options):
        if isinstance(config, TrainConfig):
            config.check_mesh(config.mesh.sizes(devices[-1]))
        raise Parsed

    monkeypatch.setattr(train, "simulate_devices", lambda n: devices.append(n or 1))
    monkeypatch.setattr(train, "train", check)
    published = Path(__file__).parent / "fixtures" / "models" / "llama3_gqa"
    monkeypatch.setattr(runs, "local_directory", lambda source, **_: published)
    monkeypatch.setattr(generate, "complete", check)
    monkeypatch.setattr(prune, "run", check)
    monkeypatch.setattr(serve, "run", check)
    monkeypatch.setattr(export, "export", check)
    monkeypatch.setattr(supervise, "_supervise", lambda words, *_: cli.main(words[3:]))
    for module in (diagnose, plan, report, schedule):

        def parse_only(*arguments, parse=module.parse, **options):
            parse(*arguments, **options)
            raise Parsed

        monkeypatch.setattr(module, "parse", parse_only)
    monkeypatch.chdir(tmp_path)
    for page in PAGES:  # the files that pages tell the reader to write
        for block in blocks(page):
            if name := re.match(r"# (\w+\.py)\n", block):
                (tmp_path / name[1]).write_text(block)
                # Not another test's module of this name, which comes back at the end.
                monkeypatch.setitem(sys.modules, name[1].removesuffix(".py"), None)
                del sys.modules[name[1].removesuffix(".py")]
    with pytest.raises(Parsed):
        cli.main(shlex.split(command, comments=True))


@pytest.mark.parametrize(
    "pictures", [flover_pictures, scaling_pictures, tilewise_pictures]
)
def test_pictures_are_current(pictures):
    assert pictures.PATH.read_text() == pictures.svg()


@pytest.mark.parametrize("path", front_pictures.PICTURES, ids=lambda path: path.stem)
def test_pictures_of_the_front_are_current_and_shown(path):
    assert path.read_text() == front_pictures.PICTURES[path]()
    assert any(f"_static/{path.name})" in page.read_text() for page in PAGES)


@pytest.mark.parametrize(
    "path", megascale_pictures.PICTURES, ids=lambda path: path.stem
)
def test_megascales_pictures_are_current_and_shown(path):
    assert path.read_text() == megascale_pictures.PICTURES[path]()
    assert f"_static/{path.name}" in (ROOT / "docs/megascale.md").read_text()


def test_the_schedule_of_the_page_is_what_the_command_draws(tmp_path):
    options = "--stages 4 --microbatches 8 --chunks 2"
    assert options in (ROOT / "docs/pipelines.md").read_text()
    path = tmp_path / "s.svg"
    cli.main(["schedule", *options.split(), "--svg", str(path)])
    assert scaling_pictures.SCHEDULE.read_text() == path.read_text()


def test_pictures_adapt_to_dark_pages():
    """But the schedule, which is what the command draws."""
    paths = {*(ROOT / "docs/_static").rglob("*.svg")} - {scaling_pictures.SCHEDULE}
    lack = [
        path.name for path in paths if "prefers-color-scheme:" not in path.read_text()
    ]
    assert len(paths) > 20 and not lack


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_install_this_library_and_name_owners_of_models(page):
    """The jaxscale of PyPI is another, and so is a model without its owner."""
    text = page.read_text()
    assert not re.search(r"pip install (?:-\S+ )*['\"]?jaxscale", text)
    loaded = r"(?:from_pretrained|\bload|snapshot_download)\(\s*\"([^\"]+)\""
    assert all("/" in name for name in re.findall(loaded, text))


def test_version_is_stated_once():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{jaxscale.__version__}"' in project
    assert f"## [{jaxscale.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
