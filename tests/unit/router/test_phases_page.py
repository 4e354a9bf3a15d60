from __future__ import annotations

from scripts.drawn_pages import COMMAND, DOCS, with_section


def test_the_generated_phase_table_is_current() -> None:
    text = (DOCS / "telemetry.md").read_text()
    assert with_section("telemetry.md", text) == text, f"run {COMMAND}"
