"""Temporary folders whose owner may be killed, in a folder that others may write to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pdserve import owned_folder
from pdserve.owned_folder import OwnedFolder, sweep

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="locks files")


@pytest.fixture
def orphan(tmp_path: Path) -> Path:
    """The folder of a process that was killed."""
    code = (
        "import sys, pathlib; from pdserve.owned_folder import OwnedFolder as F; "
        "f = F.make('ray', pathlib.Path(sys.argv[1])); (f.path / 'file').write_text('x'); "
        "print(f.path, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        folder = Path(owner.stdout.readline().strip())
        assert sweep(tmp_path) == [], "its owner lives"
        owner.kill()
    assert (folder / "file").exists()
    return folder


def test_the_folder_of_a_killed_owner_is_removed(orphan: Path) -> None:
    assert sweep(orphan.parent) == [orphan]
    assert not orphan.exists()


def test_programs_that_may_be_killed_make_no_other_folders() -> None:
    """No start would remove them."""
    root = Path(owned_folder.__file__).parent
    makes = re.compile(r"\bTemporaryDirectory\(|\bmkdtemp\(")
    found = {path.name for path in root.rglob("*.py") if makes.search(path.read_text())}
    assert found == {"owned_folder.py", "image_check.py"}  # the second ends in seconds, before any cluster


def test_a_folder_of_a_block_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with owned_folder.owned_folder("vllm") as path:
        assert path.parent == tmp_path
        assert sweep(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def test_a_living_owner_keeps_its_folder_and_removes_it(tmp_path: Path) -> None:
    folder = OwnedFolder.make("ray", tmp_path)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert sweep(tmp_path) == []
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(owned_folder.fcntl is None, reason="a system without locks")
def test_files_of_a_running_cluster_do_not_age(tmp_path: Path) -> None:
    """systemd-tmpfiles skips a folder that it cannot lock."""
    folder = OwnedFolder.make("sockets", tmp_path)
    descriptor = os.open(folder.path, os.O_RDONLY)
    try:
        with pytest.raises(BlockingIOError):
            owned_folder.fcntl.flock(descriptor, owned_folder.fcntl.LOCK_EX | owned_folder.fcntl.LOCK_NB)
        folder.remove()
        owned_folder.fcntl.flock(descriptor, owned_folder.fcntl.LOCK_EX | owned_folder.fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def test_links_are_not_followed(orphan: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    precious = tmp_path_factory.mktemp("precious")
    (precious / "owner.lock").touch()
    (precious / "kept").touch()
    precious.chmod(0o700)
    (orphan / "link").symlink_to(precious)
    trap = orphan.parent / "pdserve-run-ray-trap"
    trap.symlink_to(precious)
    inner = orphan.parent / "pdserve-run-ray-inner"
    inner.mkdir(mode=0o700)
    (inner / "owner.lock").symlink_to(precious / "owner.lock")
    assert sweep(orphan.parent) == [orphan]
    assert trap.is_symlink()
    assert inner.exists()
    assert (precious / "kept").exists()


def test_folders_that_others_may_write_to_are_left(orphan: Path) -> None:
    orphan.chmod(0o770)
    assert sweep(orphan.parent) == []


def test_folders_of_others_are_left(orphan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: orphan.stat().st_uid + 1)
    assert sweep(orphan.parent) == []


def test_other_folders_are_left(tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "pdserve-bench-x").mkdir(mode=0o700)
    (tmp_path / "pdserve-run-file-x").touch()
    assert sweep(tmp_path) == []
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("times", [(0, 0), (2**33, 2**33)])  # long ago, and before the clock has gone back
def test_a_folder_that_was_never_locked_is_removed_once_it_is_old(tmp_path: Path, times: tuple[int, int]) -> None:
    folder = tmp_path / "pdserve-run-ray-x"
    folder.mkdir(mode=0o700)
    assert sweep(tmp_path) == []
    os.utime(folder, times)
    assert sweep(tmp_path) == [folder]


def test_a_folder_removed_by_a_concurrent_sweep_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = iter([False, True, True])
    monkeypatch.setattr(owned_folder, "_take", lambda lock: next(takes))
    folder = OwnedFolder.make("ray", tmp_path)
    assert folder.path.is_dir()
