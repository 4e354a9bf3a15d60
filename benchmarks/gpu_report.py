"""What a part of benchmarks.gpu has found: rows and bars, on disk after every one, so that a cut run keeps them. Pure
but for the file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of issue 6: the figure must be at least, or at most, so much."""

    name: str
    value: float
    bound: float
    is_least: bool = True

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_least else self.value <= self.bound


@dataclass
class Findings:
    part: str
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@final
class Report:
    """One part's findings, in FOLDER/PART.json."""

    def __init__(self, folder: Path, part: str, title: str, columns: Sequence[str]) -> None:
        self.findings = Findings(part, title, list(columns))
        self._path = folder / f"{part}.json"
        self._write()

    def row(self, *cells: Any) -> None:
        self.findings.rows.append([cell if isinstance(cell, str) else shown(cell) for cell in cells])
        print("| " + " | ".join(self.findings.rows[-1]) + " |", flush=True)
        self._write()

    def bar(self, name: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        bound = least if least is not None else most
        assert bound is not None
        self.findings.bars.append(Bar(name, value, bound, least is not None))
        print(bar_line(self.findings.bars[-1]), flush=True)
        self._write()

    def error(self, where: str, error: BaseException) -> None:
        self.findings.errors.append(f"{where}: {type(error).__name__}: {error}"[:500])
        print(self.findings.errors[-1], flush=True)
        self._write()

    def _write(self) -> None:
        # Whole or not at all: the part's process may be killed in here, and another one reads what it has left.
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps(asdict(self.findings), indent=1))
        os.replace(partial, self._path)


def read(path: Path) -> Findings:
    found = json.loads(path.read_text())
    bars = [Bar(**bar) for bar in found.pop("bars")]
    return Findings(**found, bars=bars)


def shown(value: float | int) -> str:
    """Four digits that count."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def bar_line(bar: Bar) -> str:
    sign = ">=" if bar.is_least else "<="
    return f"| {bar.name} {sign} {shown(bar.bound)} | {shown(bar.value)} | {'met' if bar.is_met else '**missed**'} |"


def table(findings: Findings) -> str:
    lines = [f"## {findings.part}: {findings.title}", "", "| " + " | ".join(findings.columns) + " |"]
    lines.append("|---" * len(findings.columns) + "|")
    lines += ["| " + " | ".join(row) + " |" for row in findings.rows]
    if findings.bars:
        lines += ["", "| bar | measured | |", "|---|---|---|", *map(bar_line, findings.bars)]
    lines += ["", *(f"- failed: {error}" for error in findings.errors)]
    return "\n".join(lines)
