"""docs/transfer.md shows the current tables and invariants."""

from __future__ import annotations

from kvtransfer.protocol.session import State
from scripts.drawn_pages import COMMAND, DOCS, STATES, with_section
from tests.unit.kvtransfer.model.invariants import INVARIANTS


def test_the_page_is_generated_from_the_tables() -> None:
    text = (DOCS / "transfer.md").read_text()
    assert with_section("transfer.md", text) == text, f"run {COMMAND}"


def test_each_state_has_a_meaning() -> None:
    assert list(STATES) == list(State)


def test_the_page_lists_the_models_invariants() -> None:
    text = " ".join((DOCS / "transfer.md").read_text().split())
    for name, what in INVARIANTS.items():
        assert f"**{name}**: {what}" in text, name
