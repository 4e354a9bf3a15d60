"""docs/transfer.md shows the current tables and invariants."""

from __future__ import annotations

from kvtransfer.protocol.session import State
from scripts.states_page import MEANING, PAGE, page
from tests.unit.kvtransfer.model.invariants import INVARIANTS


def test_the_page_is_generated_from_the_tables() -> None:
    text = PAGE.read_text()
    assert page(text) == text, "run python -m scripts.states_page"


def test_each_state_has_a_meaning() -> None:
    assert list(MEANING) == list(State)


def test_the_page_lists_the_models_invariants() -> None:
    text = " ".join(PAGE.read_text().split())
    for name, what in INVARIANTS.items():
        assert f"**{name}**: {what}" in text, name
