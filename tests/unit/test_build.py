"""The build of an installation: a checkout's commit, or the one that a wheel was built from."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from pdserve.build import BUILD_FILE, FULL_VERSION, build_of
from pdserve.core.installation import VERSION

ROOT = Path(__file__).parents[2]


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    return subprocess.run(["git", *who, *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "checkout"
    (folder / "pdserve").mkdir(parents=True)
    (folder / "pdserve" / "a").touch()
    git(folder, "init", "-q", "-b", "some/branch")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "a")
    return folder


@pytest.mark.parametrize("state", ["branch", "packed", "detached", "worktree", "packed worktree"])
def test_the_build_is_the_commit_of_the_checkout(checkout: Path, state: str, tmp_path: Path) -> None:
    folder = checkout
    if "worktree" in state:
        folder = tmp_path / "further"
        git(checkout, "worktree", "add", "-q", "-b", "other", str(folder))
        git(folder, "commit", "-q", "--allow-empty", "-m", "b")
    if "packed" in state:
        git(checkout, "pack-refs", "--all")
    if state == "detached":
        git(checkout, "checkout", "-q", "--detach")
    assert build_of(folder / "pdserve") == git(folder, "rev-parse", "HEAD")[:10]


@pytest.mark.parametrize(
    ("written", "expected"),
    [("0123456789\n", "0123456789"), ("r7.1", "r7.1"), ("", "unknown"), ("a b", "unknown"), ("x" * 21, "unknown")],
)
def test_a_wheel_has_its_build_in_a_file(tmp_path: Path, written: str, expected: str) -> None:
    (tmp_path / BUILD_FILE).write_text(written)
    assert build_of(tmp_path) == expected


def test_without_a_checkout_the_build_is_unknown(tmp_path: Path) -> None:
    assert build_of(tmp_path / "pdserve") == "unknown"
    (tmp_path / ".git").mkdir()
    for head in ("", "ref: refs/heads/gone", "ref: ", "no hash", "ref: ../../.."):
        (tmp_path / ".git" / "HEAD").write_text(head)
        assert build_of(tmp_path / "pdserve") == "unknown"


def test_processes_state_version_and_build() -> None:
    assert f"{VERSION}+{build_of(ROOT / 'pdserve')}" == FULL_VERSION
