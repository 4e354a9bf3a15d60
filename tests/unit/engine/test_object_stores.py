"""What a shared store keeps, finds, forgets and refuses."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import fsspec.implementations.memory
import pytest
import redis

from pdserve.core.errors import ConfigError
from pdserve.engine.memory.object_stores import files, open_object_store, redis_store
from pdserve.engine.memory.object_stores.files import STALE_S, FileStore, FolderStore, Listed, path_of, too_old
from pdserve.engine.memory.object_stores.interface import FULL, ROOT, ObjectStore, without_credentials
from pdserve.engine.memory.object_stores.redis_store import RedisStore
from pdserve.prefix.embedded import EmbeddedRedis

SIZE = 100
MANY = 20  # objects that a store keeps


def name(number: int) -> str:
    return f"{number:032x}"


def contents(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def put(store: ObjectStore, *numbers: int) -> None:
    store.put([(name(number), contents(number)) for number in numbers])
    store.make_room()


def sweep(store: ObjectStore) -> None:
    """At once."""
    assert isinstance(store, FileStore)
    store._unswept = store._most_bytes
    store.make_room()


@pytest.fixture(params=["redis", "folder", "fsspec"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    if request.param == "redis":
        with EmbeddedRedis.start() as server:
            opened = open_object_store(server.url, "room", SIZE, MANY * SIZE)
            yield opened
            opened.close()
        return
    url = f"file://{tmp_path}" if request.param == "folder" else f"memory://{tmp_path}/{ROOT}/inside"
    opened = open_object_store(url, "room", SIZE, MANY * SIZE)
    yield opened
    opened.close()


def test_objects_are_found_read_and_deleted(store: ObjectStore) -> None:
    put(store, *range(10))
    names = [name(number) for number in range(12)]
    assert store.are_there(names) == [True] * 10 + [False] * 2
    assert store.num_found(names) == 10
    assert store.num_found(names[10:]) == 0
    assert store.num_found(names[:10]) == 10
    assert store.get(names[8:]) == [contents(8), contents(9), None, None]
    store.delete([name(0), name(11)])
    assert store.get([name(0), name(1)]) == [None, contents(1)]
    store.delete([])


def test_a_search_stops_at_the_first_gap(store: ObjectStore) -> None:
    assert store.num_found([name(0)]) == 0
    for found in (1, 7, 13):
        put(store, *range(found))
        assert store.num_found([name(number) for number in range(14)]) == found


def test_objects_of_another_size_are_not_there(store: ObjectStore) -> None:
    store.put([(name(1), bytes(SIZE - 1)), (name(2), bytes(5 * SIZE)), (name(3), b"x")])
    names = [name(1), name(2), name(3)]
    assert store.are_there(names) == [False] * 3
    assert store.get(names) == [None] * 3
    put(store, 1, 2)  # and can be replaced
    assert store.get(names[:2]) == [contents(1), contents(2)]


def test_the_bound_is_kept(store: ObjectStore) -> None:
    for number in range(3 * MANY):
        put(store, number)
    there = store.are_there([name(number) for number in range(3 * MANY)])
    assert MANY // 2 <= sum(there) <= MANY + 2  # a folder is looked at from time to time
    assert there[-1]
    assert not there[0]


def test_only_so_much_is_removed() -> None:
    now_s = 10 * STALE_S
    listed = [Listed(str(number), 10, float(number)) for number in (3, 1, 2, 4)]
    assert too_old(listed, 40, now_s) == []
    assert too_old(listed, 32, now_s) == ["1", "2"]  # 8 too many, and an eighth of the bound
    stale = [Listed("killed", 10, 0.0, is_whole=False), Listed("running", 10, now_s, is_whole=False)]
    assert too_old([*listed, *stale], 40, now_s) == ["killed"]


def test_a_listing_survives_files_that_others_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_object_store(f"file://{tmp_path}", "room", SIZE, MANY * SIZE)
    put(store, *range(MANY + 5))
    real, removed = os.stat, []

    def gone(path: object, **options: object) -> os.stat_result:
        if not removed and path not in ("room", "."):
            removed.append(path)
            os.unlink(str(path), dir_fd=options["dir_fd"])  # type: ignore[arg-type]
        return real(path, **options)  # type: ignore[arg-type, call-overload, no-any-return]

    monkeypatch.setattr(files.os, "stat", gone)
    sweep(store)
    monkeypatch.undo()
    assert len(removed) == 1
    assert sum(store.are_there([name(number) for number in range(MANY + 5)])) <= MANY
    store.close()


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_any_number_of_objects_is_listed_in_parts(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MOST_LISTED", 16)
    monkeypatch.setattr(files, "PARTS", ("00", "40", "80", "c0"))
    store = open_object_store(f"{scheme}://{tmp_path}", "room", SIZE, 64 * SIZE)
    assert isinstance(store, FileStore)
    names = [f"{number % 4 * 64:02x}{number:030x}" for number in range(160)]  # 40 in each of four parts
    for one in names:
        store._write(one, bytes(SIZE))
    sweep(store)
    first = sum(store.are_there(names))
    assert 64 < first < 160
    for _ in range(60):
        sweep(store)
    assert 32 < sum(store.are_there(names)) <= 64
    store.close()


def test_a_read_renews_the_age(tmp_path: Path) -> None:
    store = open_object_store(f"file://{tmp_path}", "room", SIZE, MANY * SIZE)
    put(store, *range(MANY))
    for number in range(MANY):
        os.utime(tmp_path / path_of("room", name(number)), (0, number))
    store.get([name(0)])
    sweep(store)
    assert store.get([name(0)]) == [contents(0)]
    put(store, MANY)
    sweep(store)
    assert store.are_there([name(0), name(1)]) == [True, False]
    store.close()


def test_a_read_renews_an_age_of_the_future(tmp_path: Path) -> None:
    """The clock of the host, or of the file server, has gone back."""
    store = open_object_store(f"file://{tmp_path}", "room", SIZE, MANY * SIZE)
    put(store, 0)
    path = tmp_path / path_of("room", name(0))
    later_s = time.time() + 1e6
    os.utime(path, (later_s, later_s))
    store.get([name(0)])
    assert path.stat().st_mtime < later_s - 1e5
    store.close()


def test_a_folder_follows_no_links(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    root = tmp_path / "kv"
    root.mkdir()
    store = open_object_store(f"file://{root}", "room", SIZE, MANY * SIZE)
    put(store, 1)
    path = root / path_of("room", name(1))
    assert path.stat().st_mode & 0o777 == 0o600
    assert (root / ROOT).stat().st_mode & 0o777 == 0o700
    (outside / name(1)).write_bytes(contents(2))
    path.unlink()
    path.symlink_to(outside / name(1))
    assert store.are_there([name(1)]) == [False]
    with pytest.raises(OSError):
        store.get([name(1)])
    put(store, 1)  # takes the place of the link
    assert (outside / name(1)).read_bytes() == contents(2)
    path.unlink()
    path.parent.rmdir()
    path.parent.symlink_to(outside)
    with pytest.raises(OSError):
        put(store, 1)
    with pytest.raises(OSError):
        store.get([name(1)])
    sweep(store)
    assert (outside / name(1)).read_bytes() == contents(2)
    store.close()


def test_a_pipe_a_folder_or_a_killed_writer_harms_nothing(tmp_path: Path) -> None:
    store = open_object_store(f"file://{tmp_path}", "room", SIZE, MANY * SIZE)
    put(store, 1)
    folder = (tmp_path / path_of("room", name(1))).parent
    os.mkfifo(folder / name(2))
    (folder / name(3)).mkdir()
    num_open = len(os.listdir("/dev/fd"))
    assert store.get([name(1), name(2), name(3)]) == [contents(1), None, None]
    assert len(os.listdir("/dev/fd")) == num_open
    (folder / name(3)).rmdir()
    left = folder / f".{name(3)}.0011"
    left.write_bytes(b"torn")
    sweep(store)
    assert left.exists()
    os.utime(left, (0, time.time() - 2 * STALE_S))
    sweep(store)
    assert not left.exists()
    assert store.get([name(1)]) == [contents(1)]
    store.close()


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_object_store(f"file://{tmp_path}", "room", SIZE, MANY * SIZE)

    monkeypatch.setattr(files, "write_all", fail)
    with pytest.raises(OSError, match="no space"):
        put(store, 1)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
    monkeypatch.undo()
    put(store, *range(MANY))
    sweep(store)
    monkeypatch.setattr(files, "write_all", fail)
    with pytest.raises(OSError, match="no space"):
        put(store, MANY)
    store.make_room()
    assert MANY // 2 < sum(store.are_there([name(number) for number in range(MANY)])) < MANY
    store.close()


def test_a_full_redis_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is full far below its bound, as another program or a small limit may make it."""
    size = 10_000
    monkeypatch.setattr(redis_store, "MOST_REMOVED", 3)
    with EmbeddedRedis.start() as server, redis.Redis.from_url(server.url) as client:
        store = open_object_store(server.url, "room", size, 1000 * size)
        for number in range(40):
            store.put([(name(number), bytes(size))])
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", int(client.info("memory")["used_memory"]) - 1)
        with pytest.raises(OSError) as caught:
            store.put([(name(40), bytes(size))])
        assert caught.value.errno in FULL
        store.make_room()
        assert store.are_there([name(0), name(39)]) == [False, True]
        until_s = time.monotonic() + 60.0
        while not store.are_there([name(40)])[0]:  # memory is freed in the background
            with contextlib.suppress(OSError):
                store.put([(name(40), bytes(size))])
            store.make_room()
            assert time.monotonic() < until_s
        store.close()


def test_a_lowered_bound_is_kept_in_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends in the middle leaves no object without an age."""
    monkeypatch.setattr(redis_store, "MOST_REMOVED", 3)
    with EmbeddedRedis.start() as server:
        put(open_object_store(server.url, "room", SIZE, 100 * SIZE), *range(60))
        store = open_object_store(server.url, "room", SIZE, MANY * SIZE)
        assert isinstance(store, RedisStore)
        real = store.delete
        with monkeypatch.context() as patched:
            patched.setattr(store, "delete", lambda names: fail())
            with pytest.raises(OSError):
                store.make_room()
        assert store.delete == real
        store.make_room()
        assert sum(store.are_there([name(number) for number in range(60)])) == MANY
        store.close()


def fail(*_: object) -> None:
    raise OSError(28, "no space")


def test_redis_that_ends_is_an_os_error() -> None:
    with EmbeddedRedis.start() as server:
        store = open_object_store(server.url, "room", SIZE, MANY * SIZE)
        put(store, 1)
    with pytest.raises(OSError):
        store.get([name(1)])
    store.close()


def test_rooms_do_not_see_each_other(tmp_path: Path) -> None:
    one, other = (open_object_store(f"file://{tmp_path}", room, SIZE, MANY * SIZE) for room in ("a", "b"))
    put(one, 1)
    assert other.are_there([name(1)]) == [False]
    assert isinstance(one, FolderStore)
    one.close()
    other.close()


def test_no_credential_is_shown() -> None:
    url = "redis://user:hu%40sh@host:1/0"
    for text in (f"cannot reach {url}", "user:hu%40sh was refused", "the password hu@sh is wrong"):
        assert "hu%40sh" not in without_credentials(text, url)
        assert "hu@sh" not in without_credentials(text, url)


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="install it beside fsspec") as caught:
        open_object_store("sftp://user:hush@host/path", "room", SIZE, MANY * SIZE)
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("scheme", ["redis", "file", "s3"])
def test_a_url_that_cannot_be_split_is_an_error(scheme: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_object_store(f"{scheme}://user:hush@[::1:6379/0", "room", SIZE, MANY * SIZE)
    assert "hush" not in str(caught.value)


def test_a_file_system_gets_no_option_that_its_client_may_refuse() -> None:
    """Those of sftp:// hand all to the client."""

    class Strict(fsspec.implementations.memory.MemoryFileSystem):  # type: ignore[misc]
        protocol = "strict"

        def __init__(self) -> None:
            super().__init__()

    fsspec.register_implementation("strict", Strict, clobber=True)
    store = open_object_store("strict://bucket", "room", SIZE, MANY * SIZE)
    put(store, 1)
    assert store.get([name(1)]) == [contents(1)]
