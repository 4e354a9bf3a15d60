"""An interpreter that is too old gets one line before anything is installed, and the newest one is found."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that the script reads."""
    folder = tmp_path / "checkout"
    (folder / "scripts").mkdir(parents=True)
    shutil.copy(ROOT / "scripts/python.py", folder / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "Makefile"):
        shutil.copy(ROOT / name, folder)
    return folder


def run(checkout: Path, word: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "scripts/python.py"), word]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=env)


def interpreter(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\nprintf '%s' '{says}'\n")
    path.chmod(0o755)
    return path


def ask_for(checkout: Path, oldest: str) -> None:
    text = (checkout / "pyproject.toml").read_text()
    assert 'requires-python = ">=3.11"' in text
    (checkout / "pyproject.toml").write_text(text.replace('">=3.11"', f'">={oldest}"'))


def test_this_interpreter_is_new_enough() -> None:
    assert run(ROOT, "check", PATH="").returncode == 0


def test_an_old_interpreter_names_the_needed_version(checkout: Path) -> None:
    ask_for(checkout, "3.99")
    done = run(checkout, "check", PATH="", HOME="/nonexistent")
    ours = "{}.{}".format(*sys.version_info[:2])
    assert done.returncode == 1
    assert done.stderr == (
        f"pdserve needs Python 3.99 or newer; {sys.executable} is {ours}. "
        "Choose another: make PYTHON=/path/to/python3.99 ...\n"
    )


@pytest.mark.skipif(shutil.which("make") is None, reason="this host has no make")
def test_make_demo_stops_before_it_installs_anything(checkout: Path) -> None:
    ask_for(checkout, "3.99")
    done = subprocess.run(
        ["make", "-C", str(checkout), "demo", f"PYTHON={sys.executable}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "MAKEFLAGS": ""},
    )
    assert done.returncode != 0
    assert "pdserve needs Python 3.99 or newer" in done.stderr
    assert not (checkout / ".venv").exists()


def test_the_newest_supported_interpreter_is_found(checkout: Path, tmp_path: Path) -> None:
    first, pyenv = tmp_path / "bin", tmp_path / "pyenv"
    interpreter(first, "python3.12", "3.12")
    interpreter(first, "python3.13", "")  # a shim of a version that is not active
    interpreter(first, "python3.99", "3.99")  # newer than what the pins have been tried with
    env = {"PATH": str(first), "PYENV_ROOT": str(pyenv)}
    assert run(checkout, "newest", **env).stdout == f"{first}/python3.12\n"
    newest = interpreter(pyenv / "versions/3.13.0/bin", "python3.13", "3.13")
    assert run(checkout, "newest", **env).stdout == f"{newest}\n"
    assert run(checkout, "newest", PATH="", PYENV_ROOT="/nonexistent").stdout == ""
