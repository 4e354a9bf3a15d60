"""Files of KV blocks: what stays, what leaves, and what hostile files and faults can do. The storm of
benchmarks/fault_storm/tiers.py runs in a short form."""

from __future__ import annotations

import mmap
import os
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_storm import store
from benchmarks.fault_storm.tier_pool import CONTENTS, content_of, hash_of
from benchmarks.fault_storm.tiers import storm
from pdserve.core.errors import ConfigError
from pdserve.engine.memory import block_files
from pdserve.engine.memory.block_files import PAGE, BlockFiles, FileCalls
from pdserve.engine.memory.slow_tier import FORGOTTEN_S, ReadSpeed

BLOCK_BYTES = 512
Open = Callable[..., BlockFiles]


@pytest.fixture
def open_files(tmp_path: Path) -> Any:
    """Closes the one before."""
    opened: list[BlockFiles] = []

    def begin(num_bytes: int = 2**17, contents: bytes = CONTENTS, calls: FileCalls | None = None) -> BlockFiles:
        for one in opened:
            one.close()
        opened.append(
            BlockFiles(
                tmp_path,
                "w",
                block_bytes=BLOCK_BYTES,
                num_bytes=num_bytes,
                most_slots=10**6,
                contents=contents,
                calls=calls,
            )
        )
        return opened[-1]

    yield begin
    for one in opened:
        one.close()


def add(files: BlockFiles, blocks: list[tuple[bytes, memoryview]]) -> None:
    for (block_hash, _), place in zip(blocks, files.write(blocks), strict=True):
        files.add(block_hash, place)


def write(files: BlockFiles, first: int, end: int) -> None:
    number = first
    while number < end:
        count = min(files.room, end - number)
        add(files, [(hash_of(one), memoryview(content_of(hash_of(one)))) for one in range(number, number + count)])
        number += count


def readable(files: BlockFiles, end: int) -> list[int]:
    """The numbers below `end` of the blocks that are verified. Raises AssertionError if one has wrong contents."""
    found = []
    for number in range(end):
        into = memoryview(bytearray(BLOCK_BYTES))
        for group in files.groups([hash_of(number)], 1):
            if files.read(group, [[into]]) == [True]:
                assert bytes(into) == content_of(hash_of(number)), f"block {number} is wrong"
                found.append(number)
    return found


def test_blocks_outlive_the_object(open_files: Open) -> None:
    write(open_files(), 0, 50)
    assert readable(open_files(), 60) == list(range(50))


def test_the_oldest_blocks_leave_first(open_files: Open) -> None:
    files = open_files()
    write(files, 0, 1000)
    found = readable(files, 1000)
    assert found == list(range(1000 - len(found), 1000))
    assert len(found) > files.num_slots - files.segment_slots
    assert set(files.take_left()) == {hash_of(number) for number in range(1000)} - set(files.hashes())
    assert files.num_bytes <= 2**17
    assert files.is_young(hash_of(999))
    assert not files.is_young(hash_of(found[0]))


def test_a_smaller_limit_removes_the_oldest(open_files: Open, tmp_path: Path) -> None:
    write(open_files(), 0, 200)
    files = open_files(2**17 - 2**15)
    found = readable(files, 200)
    assert found == list(range(200 - len(found), 200))
    assert len(found) > 70
    assert sum(path.stat().st_size for path in (tmp_path / "w").glob("*.kv")) <= 2**17 - 2**15
    write(files, 0, 200)  # in segments of another size
    assert readable(open_files(2**20), 200)[-50:] == list(range(150, 200))


def test_a_smaller_limit_holds_at_once(open_files: Open, tmp_path: Path) -> None:
    write(open_files(), 0, 200)
    for limit in (2**16, 3 * 2**14, 40_000):
        files = open_files(limit)
        assert files.num_bytes <= limit
        assert sum(path.stat().st_size for path in (tmp_path / "w").glob("*.kv")) <= limit


def test_a_restart_fills_the_last_segment(open_files: Open, tmp_path: Path) -> None:
    files = open_files()
    half = files.segment_slots // 2
    assert half > 0
    write(files, 0, half)
    again = open_files()
    assert again.room == files.segment_slots - half
    write(again, half, 2 * half)
    assert len(list((tmp_path / "w").glob("*.kv"))) == 1
    assert readable(open_files(), 200) == list(range(2 * half))


def test_one_read_supplies_neighbours(open_files: Open) -> None:
    files = open_files()
    write(files, 0, 12)
    backwards = [hash_of(number) for number in (5, 4, 3, 99, 9, 8)]
    groups = files.groups(backwards, 1)
    assert [group.indexes for group in groups] == [(2, 1, 0), (5, 4)]
    for group in groups:
        blocks = [[memoryview(bytearray(200)), memoryview(bytearray(312))] for _ in group.indexes]
        assert files.read(group, blocks) == [True] * len(blocks)
        for index, (first, second) in zip(group.indexes, blocks, strict=True):
            assert bytes(first) + bytes(second) == content_of(backwards[index])


def test_other_contents_are_never_read(open_files: Open, tmp_path: Path) -> None:
    write(open_files(), 0, 50)
    assert len(open_files(contents=b"another model")) == 0
    assert list((tmp_path / "w").glob("*.kv")) == []  # they would never be used again


def test_every_flipped_bit_is_noticed(open_files: Open, tmp_path: Path) -> None:
    """Of a segment of few blocks, wherever it is."""
    write(open_files(), 0, 3)
    [path] = (tmp_path / "w").glob("*.kv")
    whole = path.read_bytes()
    used = [*range(64), *range(68, 68 + 3 * 28, 3), *range(4096, 4096 + 3 * BLOCK_BYTES, 97)]
    for at in used:
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 8]) + whole[at + 1 :])
        found = readable(open_files(), 3)
        assert len(found) <= 2, f"byte {at} is not covered"
        path.write_bytes(whole)
    assert readable(open_files(), 3) == [0, 1, 2]


def test_a_segment_in_the_place_of_another_is_not_read(open_files: Open, tmp_path: Path) -> None:
    write(open_files(), 0, 100)
    first, second, *_ = sorted((tmp_path / "w").glob("*.kv"))
    os.replace(first, second)
    assert 0 not in readable(open_files(), 100)


@pytest.mark.parametrize("is_aligned", [False, True])
def test_pages_are_read_directly(tmp_path: Path, is_aligned: bool) -> None:
    """Past the page cache where the file system permits it, with the same result."""
    content = [os.urandom(2 * PAGE) for _ in range(5)]
    files = BlockFiles(
        tmp_path,
        "w",
        block_bytes=2 * PAGE,
        num_bytes=2**20,
        most_slots=10**6,
        contents=CONTENTS,
        is_aligned=is_aligned,
    )
    add(files, [(hash_of(number), memoryview(one)) for number, one in enumerate(content)])
    files.sync()
    assert files.read_bytes_s() > 0.0
    memory = memoryview(mmap.mmap(-1, 10 * PAGE))
    parts = [[memory[at * PAGE : (at + 1) * PAGE] for at in (number, number + 5)] for number in range(5)]
    [group] = files.groups([hash_of(number) for number in range(5)], 2)
    assert files.read(group, parts) == [True] * 5
    assert [b"".join(map(bytes, one)) for one in parts] == content
    files.close()


# --- hostile folders ----------------------------------------------------------------------------------------------


def plant(folder: Path, victim: Path) -> dict[str, str]:
    """Files that this process's user might find in its folder, by what must become of them."""
    names = iter(range(100, 200))

    def name() -> str:
        return f"{next(names):016d}.kv"

    fates = {}
    victim.write_bytes(b"precious" * 5000)
    (folder / (one := name())).symlink_to(victim)
    fates[one] = "left"
    os.link(victim, folder / (one := name()))
    fates[one] = "left"
    os.mkfifo(folder / (one := name()))
    fates[one] = "left"
    (folder / (one := name())).mkdir()
    fates[one] = "left"
    for content in (b"", b"short", os.urandom(2**14), struct.pack("<8sIIQQ", b"pdserve1", 2**31, 0, 2**40, 7) * 300):
        (folder / (one := name())).write_bytes(content)
        fates[one] = "removed"
    (folder / "9999999999999999.kv").write_bytes(b"x")
    fates["9999999999999999.kv"] = "left"
    (folder / "notes.txt").write_bytes(b"x")
    fates["notes.txt"] = "left"
    return fates


def test_hostile_files_are_not_followed(open_files: Open, tmp_path: Path) -> None:
    files = open_files()
    write(files, 0, 30)
    victim = tmp_path / "victim"
    fates = plant(tmp_path / "w", victim)
    files = open_files()
    assert readable(files, 30) == list(range(30))
    for name, fate in fates.items():
        assert os.path.lexists(tmp_path / "w" / name) == (fate == "left"), name
    write(files, 30, 2000)  # all segments are replaced meanwhile
    assert victim.read_bytes() == b"precious" * 5000
    assert readable(files, 2000)


def test_a_file_in_the_way_of_the_next_segment_is_skipped(open_files: Open, tmp_path: Path) -> None:
    files = open_files()
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    (tmp_path / "w" / f"{0:016d}.kv").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write(files, 0, 1)
    write(files, 0, 5)
    assert readable(files, 5) == list(range(5))
    assert victim.read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_files_of_another_user_are_left_alone(open_files: Open, tmp_path: Path) -> None:
    write(open_files(), 0, 3)
    [path] = (tmp_path / "w").glob("*.kv")
    os.chown(path, 12345, 12345)
    assert len(open_files()) == 0
    assert path.exists()
    os.chown(tmp_path / "w", 12345, 12345)
    with pytest.raises(ConfigError, match="of this user"):
        open_files()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o755),
        lambda path: (path.rmdir(), path.symlink_to("/tmp")),
        lambda path: (path.rmdir(), path.write_bytes(b"")),
        lambda path: os.mkfifo(path / "lock"),
        lambda path: (path / "lock").symlink_to("/etc/passwd"),
        lambda path: (path / "lock").mkdir(),
    ],
    ids=["readable by others", "link", "file", "pipe as lock", "link as lock", "folder as lock"],
)
def test_an_unsafe_folder_is_refused(open_files: Open, tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    (tmp_path / "w").mkdir(mode=0o700)
    spoil(tmp_path / "w")
    with pytest.raises(ConfigError, match="kv_disk_path"):
        open_files()


def test_a_folder_with_too_many_files_is_refused(
    open_files: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_files()
    monkeypatch.setattr(block_files, "MOST_FILES", 5)
    for number in range(10):
        (tmp_path / "w" / str(number)).touch()
    with pytest.raises(ConfigError, match="over 5 entries"):
        open_files()


def test_only_this_user_can_read_the_files(open_files: Open, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        write(open_files(), 0, 3)
    finally:
        os.umask(before)
    [path] = (tmp_path / "w").glob("*.kv")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "w").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "w" / "lock").stat().st_mode) == 0o600


# --- faults -------------------------------------------------------------------------------------------------------


class FullDisk(FileCalls):
    is_full = False

    def reserve(self, descriptor: int, num_bytes: int) -> None:
        if self.is_full:
            raise OSError(28, "no space")
        super().reserve(descriptor, num_bytes)


def test_a_full_disk_leaves_no_file(open_files: Open, tmp_path: Path) -> None:
    calls = FullDisk()
    files = open_files(calls=calls)
    calls.is_full = True
    for _ in range(5):
        with pytest.raises(OSError, match="no space"):
            write(files, 0, 1)
    assert list((tmp_path / "w").glob("*.kv")) == []
    calls.is_full = False
    write(files, 0, 1)
    assert readable(files, 1) == [0]


def test_a_storm_of_faults_gives_no_wrong_block(new_threads: Callable[[], list[threading.Thread]]) -> None:
    may_end = threading.Event()
    other = threading.Thread(target=may_end.wait, name="kv-of-another-test")
    other.start()
    result = storm(2000, 3, 1, lambda result: None)
    may_end.set()
    other.join()
    assert result.wrong == []
    assert result.operations >= 2000
    assert result.faults.total() > 0
    assert not [one for one in new_threads() if one.name.startswith("kv-disk")]


def test_a_storm_of_faults_on_the_store_gives_no_wrong_block(tmp_path: Path) -> None:
    for seed in range(2, 7):  # on a busy machine, a storm may end before the first of its reads
        folder = tmp_path / str(seed)
        folder.mkdir()
        result = store.StoreStorm(folder, seed).run(800)
        assert result.wrong == []
        if result.filled > 0:
            return
    pytest.fail("no storm has read a block")


@pytest.mark.slow
def test_a_long_storm_of_faults_on_the_store_gives_no_wrong_block() -> None:
    result = store.storm(10_000, 2, 5)
    assert result.wrong == []
    assert result.faults["found damaged, store"] > 0


@pytest.mark.slow
def test_a_long_storm_of_faults_gives_no_wrong_block() -> None:
    result = storm(100_000, 4, 30, lambda result: None)
    assert result.wrong == []


def test_a_slow_device_is_tried_again() -> None:
    speed = ReadSpeed(1e6)
    first_s = speed.predict_s(10**6, 0.0)
    for _ in range(30):
        speed.observe(10**6, 50.0, 0.0)
    assert speed.predict_s(10**6, 1.0) > 40.0
    assert speed.predict_s(10**6, FORGOTTEN_S) == first_s
