from __future__ import annotations

from router.phases_page import PAGE, page


def test_the_page_shows_the_phases_as_they_are() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m router.phases_page"
