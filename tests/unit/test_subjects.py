"""`make check` rejects commit subjects that say nothing, in any clone, and leaves older commits alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_subjects.py"
OLD = "x"


def git(folder: Path, *words: str) -> str:
    name = ("-c", "user.name=t", "-c", "user.email=t@localhost", "-c", "commit.gpgsign=false")
    return subprocess.run(["git", "-C", str(folder), *name, *words], capture_output=True, text=True, check=True).stdout


def commit(folder: Path, subject: str) -> str:
    git(folder, "commit", "-q", "--allow-empty", "-m", f"{subject}\n\nA body: with anything in it.")
    return git(folder, "rev-parse", "HEAD").strip()


def check(folder: Path, *words: str, **settings: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--root", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **settings)  # type: ignore[call-overload, no-any-return]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One old commit, whose subject would be rejected today."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    commit(folder, OLD)
    return folder


@pytest.mark.parametrize(
    ("subject", "reason"),
    [
        ("x", "does not begin with `room: `"),
        ("wip", "does not begin with `room: `"),
        ("Fix the router", "does not begin with `room: `"),
        ("Router: reject long prompts", "does not begin with `room: `"),
        ("router:reject long prompts", "does not begin with `room: `"),
        ("router: wip", "does not say what changed"),
        ("router: wip rejects long prompts", "does not say what changed"),
        ("router: fix", "does not say what changed"),
        ("fixup! router: reject long prompts", "does not begin with `room: `"),
        ("router: reject " + "very " * 12 + "long prompts", "has 87 characters, at most 72 are allowed"),
    ],
)
def test_bad_subjects_are_named_with_the_reason(repository: Path, subject: str, reason: str) -> None:
    base = git(repository, "rev-parse", "HEAD").strip()
    commit(repository, "router: reject oversized prompts before tokenizing")
    bad = commit(repository, subject)
    commit(repository, "fault storm: count 400 transfers over cables")
    done = check(repository, "--base", base)
    assert done.returncode == 1
    [line, advice] = done.stderr.splitlines()
    assert bad[:7] in line
    assert reason in line
    assert "git rebase -i" in advice


def test_commits_up_to_the_base_are_exempt(repository: Path) -> None:
    base = git(repository, "rev-parse", "HEAD").strip()
    assert check(repository, "--base", base).stdout == "0 commit subjects checked\n"
    commit(repository, "tests/cluster: judge answers in float64")
    done = check(repository, "--base", base)
    assert (done.returncode, done.stdout) == (0, "1 commit subjects checked\n")


def test_a_shallow_clone_is_checked_as_far_as_it_goes(repository: Path, tmp_path: Path) -> None:
    base = git(repository, "rev-parse", "HEAD").strip()
    for number in range(3):
        commit(repository, f"router: reject prompt {number}")
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "-q", "--depth", "2", f"file://{repository}", str(shallow))
    done = check(shallow, "--base", base)
    assert (done.returncode, done.stdout) == (0, "2 commit subjects checked\n")
    commit(shallow, "wip")
    assert check(shallow, "--base", base).returncode == 1


def test_a_rewritten_history_is_checked_at_its_end(repository: Path) -> None:
    commit(repository, "router: reject long prompts")
    done = check(repository, "--base", "1" * 40)
    assert done.returncode == 0
    assert "only the last commit is checked" in done.stdout
    commit(repository, "wip")
    assert check(repository, "--base", "1" * 40).returncode == 1


def test_without_git_the_check_is_skipped_with_a_message(repository: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    done = check(archive)
    assert (done.returncode, done.stdout) == (0, "commit subjects are not checked: there is no git history here\n")
    inner = repository / "unpacked"  # an archive inside a repository of something else
    inner.mkdir()
    done = check(inner)
    assert (done.returncode, "not the root" in done.stdout) == (0, True)
    done = check(repository, env={"PATH": str(archive)})
    assert (done.returncode, done.stdout) == (0, "commit subjects are not checked: git is not installed\n")
