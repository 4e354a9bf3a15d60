"""`pdserve doctor` names the engine of a model and asks vLLM's environment. The real one is asked by
tests/models/test_refused.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from pdserve.build import FULL_VERSION
from pdserve.cli.main import main
from pdserve.launch import engine_python, settings

SOUND = {"pdserve": FULL_VERSION, "vllm": "0.32.1", "build": "CPUs"}
GOOD = f"echo '{json.dumps(SOUND)}'"


@pytest.fixture(autouse=True)
def no_vllm_and_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_python, "vllm_python", lambda: None)
    monkeypatch.setattr(settings, "visible_gpus", lambda: ())


@pytest.fixture
def new_family(tmp_path: Path) -> str:
    """The folder of a model of an architecture that only vLLM may serve."""
    folder, source = tmp_path / "new-family", settings.bundled_model()
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["New"], "model_type": "new"}
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def environment(folder: Path, script: str) -> str:
    """A python whose answer is that of `script`."""
    python = folder / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return str(python)


def found(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, str]]:
    """The exit status, and the lines about engines and models."""
    code = main(["doctor", "--skip-pairs", "--port", "0", "--http", "0", *words])
    lines = capsys.readouterr().out.splitlines()
    return code, {line.split()[1]: line for line in lines if line.split()[1] in ("engine", "vllm", "model")}


def test_without_vllm_our_own_engine_serves(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = found(capsys)
    assert code == 0
    assert lines["engine"] == "ok    engine            torch, our own, chosen by auto"
    assert lines["vllm"].startswith(
        "warn  vllm              not installed; for models that our own engine does not know"
    )
    code, lines = found(capsys, "--engine", "vllm")
    assert code == 1
    assert lines["vllm"].startswith("FAIL  vllm              not installed; run `make vllm-env`")


def test_auto_names_vllm_for_a_model_of_another_family(
    new_family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = found(capsys, "--model", new_family)
    assert (code, lines["engine"][:4]) == (1, "FAIL")
    assert "got ['New'], expected" in lines["engine"]
    assert "make vllm-env" in lines["engine"]
    seen = tmp_path / "seen"
    python = environment(tmp_path, f'echo "$@" > {seen}\n{GOOD}')
    code, lines = found(capsys, "--model", new_family, "--engine-python", python)
    assert code == 0, lines
    assert "vllm, chosen by auto: our own engine does not know New" in lines["engine"]
    assert lines["vllm"] == f"ok    vllm              0.32.1, built for CPUs, {python}"
    assert seen.read_text() == f"-m pdserve.engine.vllm.checks {new_family}\n", "it is asked about the model"
    code, lines = found(capsys, "--model", new_family, "--engine", "own", "--engine-python", python)
    assert (code, lines["engine"][:4], lines["model"][:4]) == (1, "ok  ", "FAIL")


def test_a_model_that_vllm_rejects_is_a_finding(
    new_family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = SOUND | {"error": "architectures: got New, expected a decoder-only text model", "about": "model"}
    python = environment(tmp_path, f"echo a warning; echo '{json.dumps(answer)}'")
    code, lines = found(capsys, "--model", new_family, "--engine-python", python)
    assert (code, lines["vllm"][:4]) == (1, "ok  ")
    assert lines["model"].startswith("FAIL  model             architectures: got New, expected a decoder-only text")


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"echo '{json.dumps(SOUND | {'pdserve': '9.0.0'})}'", "its version is '9.0.0'"),
        ("echo ModuleNotFoundError: no pdserve >&2; exit 1", "ended with status 1: ModuleNotFoundError: no pdserve"),
        ("echo nonsense", "nonsense"),
        ("echo 7; echo '[]'; echo '{}'", "{}"),
        ("true", "it printed nothing"),
        ("exec yes", "printed more than 64 KiB"),
        (f"echo '{json.dumps({'pdserve': FULL_VERSION, 'error': 'vllm, in version 0.31', 'about': 'vllm'})}'", "0.31"),
        ("sleep 60 & wait", "gave no answer within"),
    ],
)
def test_an_unusable_environment_is_named(
    script: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pdserve.cli.doctor._VLLM_S", 1)
    python = environment(tmp_path, script)
    code, lines = found(capsys, "--engine", "vllm", "--engine-python", python)
    assert (code, lines["vllm"][:4]) == (1, "FAIL")
    assert expected in lines["vllm"]
    assert python in lines["vllm"]


def test_a_relative_python_is_that_of_the_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `up` reads the setting: not the program of this name on the PATH."""
    python = environment(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert python in found(capsys, "--engine", "vllm", "--engine-python", "python")[1]["vllm"]


def test_a_real_python_without_vllm_answers(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = found(capsys, "--engine", "vllm", "--engine-python", sys.executable)
    assert code == 1
    assert "got vllm, which is not installed" in lines["vllm"]


def test_the_build_for_cpus_on_a_host_with_gpus_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "visible_gpus", lambda: ("0",))
    python = environment(tmp_path, GOOD)
    code, lines = found(capsys, "--engine", "vllm", "--engine-python", python)
    assert (code, lines["vllm"][:4]) == (0, "warn")
    assert "make vllm-env VLLM='vllm>=0.32,<0.33'" in lines["vllm"]


def test_an_engine_that_cannot_serve_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert "an installed engine: torch, toy, vllm" in found(capsys, "--engine", "no-such")[1]["engine"]
    assert "the model toy has no weights" in found(capsys, "--engine", "vllm", "--model", "toy")[1]["engine"]


def test_a_mock_of_a_model_needs_no_weights(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).symlink_to(settings.bundled_model() / file)
    code, lines = found(capsys, "--model", str(folder), "--engine", "toy")
    assert code == 0
    assert lines["model"] == "ok    model             mine: a mock without weights, 2048 tokens of context"
    assert found(capsys, "--model", str(folder), "--engine", "own")[0] == 1
