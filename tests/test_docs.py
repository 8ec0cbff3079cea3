"""The documentation builds without a warning and lists the five systems in order."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxscale


ROOT = Path(__file__).parents[1]
SYSTEMS = ["Flux", "ByteTransformer", "Flover", "MegaScale", "Tile-wise sparsity"]


@pytest.mark.slow
def test_docs_build_without_warnings(tmp_path):
    result = subprocess.run(
        [
            *(sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"),
            *("-d", tmp_path / "doctrees", ROOT / "docs", tmp_path / "html"),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "html/generated/jaxscale.sharding.html").read_text()
    for name in ("make_mesh", "AxisRules", "REPLICATED"):
        assert f'id="jaxscale.sharding.{name}"' in page
    assert "No axis is split" in page  # the string under a constant


def rows(text: str) -> list[str]:
    """The systems whose rows or items a text lists, in order."""
    pattern = rf"^\|? *(\d)(?:\.| \|) *(?:\*\*)?\[?({'|'.join(SYSTEMS)})\b"
    return [name for _, name in re.findall(pattern, text, re.MULTILINE)]


@pytest.mark.parametrize(
    "place", ["README.md", "docs/index.md", "jaxscale/__init__.py"]
)
def test_the_five_systems_stand_in_order(place):
    assert rows((ROOT / place).read_text()) == SYSTEMS


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page):
    for target in re.findall(r"\]\((?!\w+:|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_examples_run(page):
    """The Python of the first pages, top to bottom, as a reader would paste it."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    script = "\n".join(blocks)
    with jax.numpy_dtype_promotion("standard"):  # the default of a reader's session
        exec(compile(script, page, "exec"), {"__name__": "__main__"})


def test_version_is_stated_once():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'version = "{jaxscale.__version__}"' in project
    assert f"## [{jaxscale.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
