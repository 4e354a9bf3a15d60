"""The benchmark of a step's host time still fits the engine that it stubs."""

from __future__ import annotations

from pathlib import Path

import pytest

MODEL = next((Path(__file__).parents[3] / "pdserve/models").glob("stdlib-*"))


def test_steps_with_grammars_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks import step_host  # not when tests are collected: those in engine/gpu choose the interpreter first

    monkeypatch.setattr(step_host, "LARGE", 4096)  # of the bundled model
    monkeypatch.setattr(step_host.Stubs, "shape", (0, 4096))
    measured = step_host.measure(MODEL, rows=6, context=40, steps=3, with_grammar=5)
    assert len(measured.took) == len(measured.library_s) == len(measured.bytes_s) == 3
    for took, library_s in zip(measured.took, measured.library_s, strict=True):
        assert took.wall_s > library_s > 0.0
