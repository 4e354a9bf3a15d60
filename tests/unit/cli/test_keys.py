"""`pdserve keys` on a real file, which a router then reads."""

from __future__ import annotations

import json
import re
import stat
import threading
from pathlib import Path

import pytest

from pdserve.cli.main import main
from pdserve.core.access.key_file import key_hash, parse


def keys(*words: str, file: Path) -> int:
    return main(["keys", *words, "--file", str(file)])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def make(capsys: pytest.CaptureFixture[str], file: Path, *words: str) -> str:
    assert keys("new", *words, file=file) == 0
    return capsys.readouterr().out.strip()


def test_a_new_key_is_printed_once_and_only_its_hash_is_kept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quotas = ("--tokens-per-minute", "600", "--max-concurrent", "2")
    key = make(capsys, file, "acme", "--add", *quotas)
    assert re.fullmatch(r"pdk_[A-Za-z0-9_-]{43}", key)
    assert key not in file.read_text()
    tenant = parse(file.read_text()).tenant_of(key)
    assert tenant is not None
    assert (tenant.name, tenant.tokens_per_minute, tenant.max_concurrent) == ("acme", 600, 2)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert make(capsys, file, "acme") != key
    assert len(parse(file.read_text()).keys) == 2


def test_other_contents_of_the_file_are_kept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = {"slo_classes": {"quick": {"ttft_s": 1, "tpot_s": 0.1}}, "tenants": {"acme": {"slo": "quick"}}}
    file.write_text(json.dumps(content))
    file.chmod(0o640)
    make(capsys, file, "acme")
    found = json.loads(file.read_text())
    del found["tenants"]["acme"]["keys"]
    assert found == content
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_keys_are_listed_without_their_hashes(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = make(capsys, file, "beta", "--add", "--max-concurrent", "3")
    other = make(capsys, file, "acme", "--add")
    assert keys("list", file=file) == 0
    out = capsys.readouterr().out
    lines = [re.sub(r"  \d{4}-\d\d-\d\d$", "", line) for line in out.splitlines()]
    ids = [f"  {key_hash(key)[:12]}" for key in (other, one)]
    assert lines == ["acme: no quotas", ids[0], "beta: max_concurrent 3", ids[1]]
    assert one not in out


def test_revoking_a_key_keeps_the_others(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    revoked, kept = make(capsys, file, "acme", "--add"), make(capsys, file, "acme")
    assert keys("revoke", key_hash(revoked)[:12], file=file) == 0
    found = parse(file.read_text())
    assert (found.tenant_of(revoked), found.tenant_of(kept) is not None) == (None, True)
    assert keys("revoke", key_hash(revoked)[:12], file=file) == 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("new", "acmee"), "a tenant of"),
        (("new", "acme", "--add"), "not in the file"),
        (("new", "acme", "--max-concurrent", "2"), "--add"),
        (("new", "be ta", "--add"), "letters"),
        (("new", "other", "--add"), "other"),
        (("new", "beta", "--add", "--max-concurrent", "0"), "max_concurrent"),
        (("revoke", "0" * 12), "no key named"),
        (("revoke", "00"), "12 digits"),
        (("revoke", "pdk_" + "x" * 43), "no key named"),
    ],
)
def test_an_invalid_command_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    make(capsys, file, "acme", "--add")
    before = file.read_bytes()
    assert keys(*words, file=file) == 1
    error = capsys.readouterr().err
    assert says in error
    assert "x" * 43 not in error, "a key given by mistake is not repeated"
    assert file.read_bytes() == before
    assert [one.name for one in file.parent.iterdir()] == ["keys.json"]


def test_a_file_that_does_not_exist_is_named(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (("new", "acme"), ("list",), ("revoke", "0" * 12)):
        assert keys(*words, file=file) == 1
        assert str(file) in capsys.readouterr().err
    assert keys("new", "acme", "--add", file=file.parent / "no folder" / "keys.json") == 1


@pytest.mark.parametrize("text", ["", "[]", '{"tenants": {"other": {}}}'])
def test_an_invalid_file_is_not_changed(file: Path, capsys: pytest.CaptureFixture[str], text: str) -> None:
    file.write_text(text)
    assert keys("new", "acme", "--add", file=file) == 1
    assert file.read_text() == text


def test_a_file_that_others_can_write_is_rejected(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(capsys, file, "acme", "--add")
    file.chmod(0o666)
    assert keys("new", "acme", file=file) == 1
    assert "chmod go-w" in capsys.readouterr().err


def test_a_link_stays_a_link(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(capsys, file, "acme", "--add")
    link = file.parent / "link.json"
    link.symlink_to(file)
    make(capsys, link, "acme")
    assert link.is_symlink()
    assert len(parse(file.read_text()).keys) == 2


def test_concurrently_made_keys_are_all_kept(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(capsys, file, "acme", "--add")
    threads = [threading.Thread(target=keys, args=("new", "acme"), kwargs={"file": file}) for _ in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(parse(file.read_text()).keys) == 9
