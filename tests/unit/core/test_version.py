"""Which releases serve together, and how versions are shown."""

from __future__ import annotations

import pytest

from pdserve.core.installation import is_compatible, mismatch, release, versions_text


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ("1.2.3", True),
        ("1.2.9", True),
        ("1.2.9+0123456789", True),
        ("1.2.3+unknown", True),
        ("", True),
        ("1.3.3", False),
        ("1.3.3+a.1.2", False),
        ("2.2.3", False),
        ("1", False),
        ("1.20.3", False),
        ("+1.2.3", False),
    ],
)
@pytest.mark.parametrize("build", ["", "+abc", "+unknown"])
def test_only_the_patch_number_and_the_build_may_differ(other: str, expected: bool, build: str) -> None:
    assert is_compatible(f"1.2.3{build}", other) is expected


def test_a_build_follows_the_version() -> None:
    assert [release(one) for one in ("1.2.3+abc", "1.2.3", "")] == ["1.2.3", "1.2.3", ""]
    assert "0.9.9" in mismatch("1.2.3+abc", "0.9.9" + "x" * 1000)
    assert len(mismatch("1.2.3+abc", "x" * 1000)) < 200


def test_workers_of_another_version_or_build_are_named() -> None:
    same = [("p0", "1.2.3+a"), ("d0", "")]
    assert versions_text("1.2.3+a", same) == "version 1.2.3+a"
    assert versions_text("1.2.3+a", [*same, ("d1", "1.2.3+b")]) == "version 1.2.3+a, d1 1.2.3+b"
    assert versions_text("1", [(f"d{one}", "2") for one in range(7)]) == "version 1, d0 2, d1 2, d2 2, d3 2, 3 more"
    assert versions_text("", same) == ""
