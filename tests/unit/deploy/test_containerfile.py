"""What can be known of the image without building it: here is no container engine."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from tests.unit.deploy.manifests import ROOT

FILE = ROOT / "deploy/Containerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", FILE.read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def test_everything_that_is_copied_exists_and_is_not_ignored() -> None:
    ignore = (ROOT / "deploy/Containerfile.dockerignore").read_text().split()
    sources = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, source


def test_the_whole_project_is_in_it() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    assert packages <= copied
    extras = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")["EXTRAS"]
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


def test_it_runs_as_nobody_in_particular() -> None:
    [user] = [rest for word, rest in instructions() if word == "USER"]
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert gid == "0"


def test_its_bases_are_pinned_and_fit_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    assert f">={arguments['PYTHON']}" == project["requires-python"]
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert set(bases) == {"python:${PYTHON}-slim-bookworm"}


def test_the_bundled_model_is_found_where_the_image_looks_for_it() -> None:
    [code] = re.findall(r"python -c '([^']+)'", FILE.read_text())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()) / "config.json").is_file()


def test_its_command_is_one_that_exists() -> None:
    [command] = [rest for word, rest in instructions() if word == "CMD"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert re.findall(r'"([^"]+)"', command)[0] in scripts
