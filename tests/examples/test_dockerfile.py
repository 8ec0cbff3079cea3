"""The image is made of what is pinned, and holds what the recipes call."""

import re
import shlex
from pathlib import Path

import yaml


ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "examples/multihost"


def instructions():
    """Each instruction of the Dockerfile with its words."""
    text = (RECIPES / "Dockerfile").read_text()
    lines = [x for x in text.splitlines() if x.strip() and not x.startswith("#")]
    return [(line.split()[0], shlex.split(line)[1:]) for line in lines]


def test_versions_are_those_that_are_pinned():
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    (jax,) = [pin.split("==")[1] for pin in pins if pin.startswith("jax==")]
    found = dict(instructions())
    assert found["FROM"] == [
        f"python:{(ROOT / '.python-version').read_text()[:4]}-slim"
    ]
    installs = [words for name, words in instructions() if name == "RUN"]
    assert all(words[:2] == ["pip", "install"] for words in installs)
    assert f"jax[cuda13]=={jax}" in installs[0]
    # The plugin that tests compile with is of the same CUDA and version.
    cuda = (ROOT / "requirements-cuda.txt").read_text()
    versions = re.findall(r"^jax-cuda13-\w+==([\d.]+)", cuda, re.MULTILINE)
    assert versions and set(versions) == {jax}
    makefile = (ROOT / "Makefile").read_text()
    assert {"--no-deps", "--no-build-isolation"} <= {*installs[1]} & {*makefile.split()}


def test_the_image_holds_what_the_recipes_call():
    jobset = yaml.safe_load((RECIPES / "jobset.yaml").read_text())
    template = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
    (container,) = template["spec"]["containers"]
    head = (RECIPES / "Dockerfile").read_text()
    assert container["image"].removesuffix(":latest") in head
    copied = [words for name, words in instructions() if name == "COPY"]
    assert [".", "."] in copied  # and the commands are relative to it
    assert len([name for name, _ in instructions() if name == "WORKDIR"]) == 1
    left_out = (ROOT / ".dockerignore").read_text().split()
    path = container["command"][1]
    assert (ROOT / path).is_file()
    assert not any(path.startswith(f"{name}/") for name in left_out)


def test_what_git_ignores_is_not_copied():
    def names(file):
        lines = (ROOT / file).read_text().split()
        return {line.removeprefix("**/").removesuffix("/") for line in lines}

    assert names(".gitignore") <= names(".dockerignore")
