"""Which releases serve together."""

from __future__ import annotations

import pytest

from pdserve.core.version import is_compatible


@pytest.mark.parametrize(
    ("other", "expected"),
    [("1.2.3", True), ("1.2.9", True), ("", True), ("1.3.3", False), ("2.2.3", False), ("1", False), ("1.20.3", False)],
)
def test_only_the_patch_number_may_differ(other: str, expected: bool) -> None:
    assert is_compatible("1.2.3", other) is expected
