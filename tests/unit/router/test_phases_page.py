from __future__ import annotations

from scripts.phases_page import PAGE, page


def test_the_generated_phase_table_is_current() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m scripts.phases_page"
