"""The arrows between the packages hold, and a reversed arrow is noticed."""

import itertools
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
LINT_IMPORTS = Path(sys.executable).with_name("lint-imports")


def lint(root: Path) -> subprocess.CompletedProcess:
    return subprocess.run(
        [LINT_IMPORTS, "--config", ROOT / "pyproject.toml", "--no-cache"],
        cwd=root,
        env={"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_dependencies_run_one_way():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("pallas_kernels/dispatch.py", "jaxscale.sharding"),
        ("pallas_kernels/matmul/api.py", "flax"),
        ("jaxscale/nn/linear.py", "jaxscale.models"),
        ("jaxscale/training/loop/late.py", "jaxscale.inference"),
        ("jaxscale/inference/llm/late.py", "jaxscale.training"),
        ("jaxscale/training/loop/late.py", "jaxscale.pruning"),
        ("jaxscale/training/loop/late.py", "jaxscale.training.planning"),
        ("jaxscale/training/checkpoint/late.py", "jaxscale.training.run"),
        ("jaxscale/training/data/late.py", "jaxscale.training.losses"),
        ("jaxscale/training/monitoring/late.py", "jaxscale.training.loop"),
        ("jaxscale/inference/engine/late.py", "jaxscale.inference.server"),
        ("jaxscale/inference/encoder/late.py", "jaxscale.inference.engine"),
        ("benchmarks/measure/late.py", "benchmarks.publish"),
        ("jaxscale/models/decoder/late.py", "jaxscale.models.hf"),
        ("jaxscale/inference/engine/scheduling/late.py", "jax"),
        ("jaxscale/supervision/driver.py", "numpy"),
    ],
)
def test_a_reversed_arrow_is_caught(tmp_path, module, forbidden):
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = ["jaxscale", "pallas_kernels"]
    for contract in config["tool"]["importlinter"]["contracts"]:
        names += contract.get("source_modules", [])
        names += contract.get("forbidden_modules", [])
        inside = [f"{name}." for name in contract.get("containers", [])] or [""]
        layers = re.split(r"[|:\s]+", " ".join(contract.get("layers", [])).strip())
        names += [a + b for a, b in itertools.product(inside, layers) if b]
    for name in names:
        package = tmp_path
        for part in name.split("."):
            package /= part
            package.mkdir(exist_ok=True)
            (package / "__init__.py").touch()
    file = tmp_path / module
    file.parent.mkdir(exist_ok=True)
    (file.parent / "__init__.py").touch()
    assert lint(tmp_path).returncode == 0  # the copy itself is clean
    file.write_text(
        textwrap.dedent(f"""
            def late():
                import {forbidden}
                return {forbidden}
            """)
    )
    result = lint(tmp_path)
    assert result.returncode != 0
    arrow = f"{module.removesuffix('.py').replace('/', '.')} -> {forbidden}"
    assert arrow in result.stdout.replace("\n", ""), result.stdout


def test_packages_are_imported_without_modules_that_only_posix_has():
    """The tuner alone of the kernels locks files, and it is not loaded either."""
    code = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(['fcntl', 'grp', 'pwd', 'resource']))\n"
        "import pallas_kernels.attention, pallas_kernels.paged_attention\n"
        "import jaxscale.inference, jaxscale.pruning, jaxscale.training\n"
        "import jaxscale.observability, jaxscale.recipes, jaxscale.supervision\n"
        "print('pallas_kernels.tuning' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "False"
