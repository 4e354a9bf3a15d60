"""What can be known of the image without building it: here is no container engine."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve import image_check
from pdserve.engine.vllm import checks
from tests.unit.deploy.manifests import ROOT

FILE = ROOT / "deploy/Containerfile"


STAGES = {
    "cpu": ("wheel", "build", "installed", "cpu"),
    "gpu": ("wheel", "build", "installed", "gpu"),
    "vllm": ("wheel", "vllm"),
}


def instructions(target: str = "cpu") -> list[tuple[str, str]]:
    """Those of the stages that a target is made of."""
    text = re.sub(r"\\\n", " ", FILE.read_text())
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found: list[tuple[str, str]] = []
    stage = ""
    for word, _, rest in (line.partition(" ") for line in lines):
        stage = rest.partition(" AS ")[2] if word == "FROM" else stage
        if stage in ("", *STAGES[target]):
            found.append((word, rest))
    return found


def test_every_copied_file_exists() -> None:
    ignore = (ROOT / "deploy/Containerfile.dockerignore").read_text().split()
    sources = [source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]]
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignore, source


def test_the_image_has_the_whole_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
    copied = {source for word, rest in instructions() if word == "COPY" for source in rest.split()[:-1]}
    assert packages <= copied
    for target in STAGES:
        extras = dict(rest.split("=", 1) for word, rest in instructions(target) if word == "ARG")["EXTRAS"]
        assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])


@pytest.mark.parametrize("target", STAGES)
def test_the_image_does_not_run_as_root(target: str) -> None:
    [user] = [rest for word, rest in instructions(target) if word == "USER"]
    uid, _, gid = user.partition(":")
    assert int(uid) > 0
    assert gid == "0"


def test_base_images_are_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    assert f">={arguments['PYTHON']}" == project["requires-python"]
    bases = [rest.split()[0] for word, rest in instructions() if word == "FROM"]
    assert set(bases) == {"python:${PYTHON}-slim-bookworm", "wheel", "installed"}


def test_the_image_with_vllm_is_made_as_the_environment_of_make_vllm_env() -> None:
    """It has what vLLM needs of a host (check_host), and runs as the other image does."""
    steps = instructions("vllm")
    makefile = (ROOT / "Makefile").read_text()
    [made] = re.findall(r"^VLLM \?= (.+)$", makefile, re.MULTILINE)
    [removed] = re.findall(r"pip uninstall -q -y ([\w ]+)\)?$", makefile, re.MULTILINE)
    assert dict(rest.split("=", 1) for word, rest in steps if word == "ARG")["VLLM"] == f'"{made}"'
    [installs] = [rest for word, rest in steps if word == "RUN" and "apt-get install" in rest]
    assert {"g++", "libnuma1", "util-linux"} <= set(installs.split())
    [packages] = [rest for word, rest in steps if word == "RUN" and "pip install" in rest]
    assert f"pip uninstall -y {removed} " in packages
    assert "$(grep '^ray==' /constraints.txt)" in packages
    assert re.search(r"^ray==[\d.]+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert "$$(grep '^ray==' constraints.txt)" in makefile
    assert "--constraint" not in packages, "vLLM's pins exclude ours"
    for word in ("ENV", "WORKDIR", "EXPOSE", "CMD", "USER"):
        assert [rest for one, rest in steps if one == word][-1] == [r for w, r in instructions() if w == word][-1], word
    assert steps[-1] == ("RUN", "python -m pdserve.image_check --vllm"), "checked as the user who runs it"


def test_the_image_check_names_a_missing_vllm(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_check, "everything_imports", lambda: iter(()))
    monkeypatch.setattr(checks, "PACKAGES", ("no-such-package",))
    assert image_check.main(["--vllm"]) == 1
    assert "vLLM cannot serve here: engine: got vllm, which is not installed" in capsys.readouterr().err


def test_the_image_finds_the_bundled_model() -> None:
    [code, *_] = re.findall(r"python -c '([^']+)'", FILE.read_text())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()) / "config.json").is_file()


def test_the_images_command_exists() -> None:
    [command] = [rest for word, rest in instructions() if word == "CMD"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert re.findall(r'"([^"]+)"', command)[0] in scripts


@pytest.mark.gpu_checks
def test_the_gpu_image_has_what_triton_and_the_transports_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"--target gpu --build-arg EXTRAS=(\S+)", FILE.read_text())
    wanted = [one for extra in extras.split(",") for one in project["optional-dependencies"][extra]]
    names = {re.split(r"[<>=]", one)[0] for one in wanted}
    assert {"torch", "triton"} <= names
    assert {"cupy", "nvidia-nccl"} <= {re.sub(r"-c(uda\d+x|u\d+)$", "", name) for name in names}
    steps = instructions("gpu")
    [installs] = [rest for word, rest in steps if word == "RUN" and "apt-get install" in rest]
    assert {"gcc", "libc6-dev"} <= set(installs.split())
    assert steps[-1] == ("RUN", "python -m pdserve.image_check --gpu"), "checked as the user who runs it"
    assert instructions("cpu")[-1] == ("RUN", "python -m pdserve.image_check")


@pytest.mark.gpu_checks
def test_the_image_check_compiles_a_kernel_and_imports_everything() -> None:
    """CuPy, which has no build for this machine, is all that it may miss."""
    done = subprocess.run(
        [sys.executable, "-m", "pdserve.image_check", "--gpu"], capture_output=True, text=True, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if line.startswith("image check: ")]
    assert [line for line in complaints if "cupy" not in line] == [], done.stderr
    assert done.returncode == int(bool(complaints)), done.stderr


@pytest.mark.gpu_checks
def test_the_image_check_detects_a_missing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert list(image_check.compiler_is_there()) == []
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    [complaint] = image_check.compiler_is_there()
    assert complaint.startswith("no C compiler")
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    [complaint] = image_check.compiler_is_there()
    assert "does not run" in complaint


@pytest.mark.gpu_checks
def test_the_image_check_detects_missing_nccl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """CuPy without an NCCL library imports all the same."""
    (tmp_path / "cupy/cuda").mkdir(parents=True)
    for name, text in (("__init__", ""), ("cuda/__init__", ""), ("cuda/nccl", "available = False")):
        (tmp_path / f"cupy/{name}.py").write_text(text)
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    [complaint] = image_check.cupy_is_there()
    assert complaint.startswith("CuPy finds no NCCL library")
    (tmp_path / "cupy/cuda/nccl.py").write_text("def get_unique_id(): ...\n")
    monkeypatch.delitem(sys.modules, "cupy.cuda.nccl")
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    importlib.invalidate_caches()
    assert list(image_check.cupy_is_there()) == []
    for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"):
        sys.modules.pop(name, None)


def installed(folder: Path, cuda: str | None, distributions: Sequence[str]) -> dict[str, str]:
    """The environment of a Python that sees torch's files and the metadata of some distributions, and nothing else."""
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(
        "raise ImportError('libnccl.so.2: undefined symbol: ncclCommQueryProperties')"
    )
    (folder / "torch/version.py").write_text(f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda!r}\nhip = None\n")
    for name in distributions:
        info = folder / f"{name.replace('-', '_')}-2.28.9.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.28.9\n")
    (folder / "half_removed-1.dist-info").mkdir()  # without a name
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.mark.gpu_checks
@pytest.mark.parametrize(
    ("cuda", "distributions", "complaint"),
    [
        ("13.0", ("cupy-cuda13x", "nvidia-nccl-cu13"), ""),
        ("13.0", (), ""),
        ("12.8", ("cupy-cuda12x", "nvidia-nccl-cu12"), ""),
        (None, (), ""),
        (
            "13.0",
            ("cupy-cuda12x", "nvidia-nccl-cu12", "nvidia-nccl-cu13"),
            "for CUDA 13, beside cupy-cuda12x and nvidia-nccl-cu12, which may have replaced files of the right one; "
            "run pip uninstall -y cupy-cuda12x nvidia-nccl-cu12 nvidia-nccl-cu13 && "
            "pip install -c constraints.txt '.[cuda13]'",
        ),
        (
            "13.0",
            ("cupy-cuda12x", "nvidia-nccl-cu13"),
            "for CUDA 13, beside cupy-cuda12x; run "
            "pip uninstall -y cupy-cuda12x && pip install -c constraints.txt '.[cuda13]'",
        ),
        (
            "12.8",
            ("NVIDIA_NCCL.cu13", "nvidia-nccl-cu12"),
            "for CUDA 12, beside nvidia-nccl-cu13, which may have replaced files of the right one; run "
            "pip uninstall -y nvidia-nccl-cu12 nvidia-nccl-cu13 && pip install -c constraints.txt '.[cuda12]'",
        ),
        (None, ("cupy-cuda13x",), "without CUDA, beside cupy-cuda13x; install a build of torch for CUDA 12 or 13"),
        ("11.8", ("cupy-cuda12x",), "for CUDA 11, beside cupy-cuda12x; install a build of torch for CUDA 12 or 13"),
    ],
)
def test_the_image_check_compares_cuda_versions(
    cuda: str | None, distributions: Sequence[str], complaint: str, tmp_path: Path
) -> None:
    code = "from pdserve import image_check; print(*image_check.cuda_versions_agree(), sep='\\n')"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=installed(tmp_path, cuda, distributions),
    )
    found = done.stdout.strip().removeprefix("torch is built ").removesuffix(" in the folder of the checkout")
    assert found == complaint


@pytest.mark.gpu_checks
def test_doctor_names_the_repair_of_another_cudas_nccl(tmp_path: Path) -> None:
    """Also if torch cannot be imported because of it."""
    env = installed(tmp_path, "13.0", ("cupy-cuda12x", "nvidia-nccl-cu12", "nvidia-nccl-cu13"))
    done = subprocess.run(
        [sys.executable, "-m", "pdserve", "doctor", "--skip-pairs", "--model", "toy"],
        capture_output=True,
        text=True,
        check=False,
        env=env,
    )
    [line] = [line for line in done.stdout.splitlines() if line[6:].startswith("cuda ")]
    assert line.startswith(
        "FAIL  cuda              torch is built for CUDA 13, beside cupy-cuda12x and nvidia-nccl-cu12"
    )
    assert "run pip uninstall -y cupy-cuda12x nvidia-nccl-cu12 nvidia-nccl-cu13" in line
    assert done.returncode == 1


@pytest.mark.gpu_checks
def test_the_image_check_detects_a_missing_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "brokenkit").mkdir()
    (tmp_path / "brokenkit/__init__.py").write_text("")
    (tmp_path / "brokenkit/one.py").write_text("import nowhere_at_all")
    (tmp_path / "brokenkit/two.py").write_text("import redis_of_nobody.x")
    monkeypatch.syspath_prepend(str(tmp_path))
    complaints = list(image_check.everything_imports(["brokenkit", "no_such_kit"]))
    assert [line.split()[0] for line in complaints] == ["brokenkit.one", "brokenkit.two", "no_such_kit"]
