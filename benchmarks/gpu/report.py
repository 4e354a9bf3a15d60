"""The findings of the parts of benchmarks.gpu: rows and bars. Each is written at once, so an interrupted run keeps it.

All parts write to FOLDER/benchmark.jsonl, because few files come back from a borrowed machine. Each line adds to the
findings of one part; a part's header line discards its earlier ones.

    python -m benchmarks.gpu.report FOLDER/benchmark.jsonl    # each part's rates on one line, its bars and errors
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, final

from benchmarks.gpu.failures import told
from benchmarks.harness import table_head, table_row

FILE: Final = "benchmark.jsonl"


@dataclass(frozen=True, slots=True)
class GpuBar:
    """A bar: the figure must be at least, or at most, this bound, which may be a goal beyond what is `expected`
    (claims.py)."""

    name: str
    value: float
    bound: float
    is_least: bool = True
    expected: Sequence[float] | None = None  # the slower and the faster end

    @property
    def is_met(self) -> bool:
        return self.value >= self.bound if self.is_least else self.value <= self.bound

    @property
    def verdict(self) -> str:
        if self.is_met:
            return "met"
        if self.expected is None:
            return "**missed**"
        return "as expected" if self.value >= self.expected[0] else "**below what is expected**"


@dataclass
class Findings:
    part: str
    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    bars: list[GpuBar] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@final
class Report:
    """The findings of one part. Parts run one after the other, so only one process writes at a time."""

    def __init__(self, folder: Path, part: str, title: str, columns: Sequence[str], *, goes_on: bool = False) -> None:
        """`goes_on`: adds to the findings of an earlier process."""
        self.findings = Findings(part, title, list(columns))
        self._path = folder / FILE
        if not goes_on:
            self._write(title=title, columns=self.findings.columns)

    def row(self, *cells: Any) -> None:
        self.findings.rows.append([cell if isinstance(cell, str) else shown(cell) for cell in cells])
        print(table_row(self.findings.rows[-1]), flush=True)
        self._write(row=self.findings.rows[-1])

    def bar(
        self,
        name: str,
        value: float,
        *,
        least: float | None = None,
        most: float | None = None,
        expected: tuple[float, float] | None = None,
    ) -> None:
        bound = least if least is not None else most
        assert bound is not None
        self.findings.bars.append(GpuBar(name, value, bound, least is not None, expected))
        print(bar_line(self.findings.bars[-1]), flush=True)
        self._write(bar=asdict(self.findings.bars[-1]))

    def error(self, where: str, error: BaseException) -> None:
        self.findings.errors.append(error_text(where, error, self._path.parent))
        print(self.findings.errors[-1], flush=True)
        self._write(error=self.findings.errors[-1])

    def _write(self, **what: Any) -> None:
        append(self._path, self.findings.part, **what)


def error_text(where: str, error: BaseException, folder: Path) -> str:
    """One line; the traceback is in the folder's traces.txt."""
    return f"{where}: {told(where, error, folder)}"


def append(path: Path, part: str, **what: Any) -> None:
    """Writes a line break first: a process that was killed may have left half a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" + json.dumps({"part": part, **what}))


def read(path: Path) -> dict[str, Findings]:
    """Findings by part, in the order in which the parts began."""
    found: dict[str, Findings] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            said = json.loads(line)
        except ValueError:  # empty or incomplete
            continue
        name = said["part"]
        if "title" in said:
            found[name] = Findings(name, said["title"], said["columns"])
        one = found.setdefault(name, Findings(name, "", ["what"]))
        one.rows += [said["row"]] if "row" in said else []
        one.bars += [GpuBar(**said["bar"])] if "bar" in said else []
        one.errors += [said["error"]] if "error" in said else []
    return found


def shown(value: float | int) -> str:
    """The number with four significant digits."""
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def bar_line(bar: GpuBar) -> str:
    sign = ">=" if bar.is_least else "<="
    expected = "" if bar.expected is None else " to ".join(map(shown, bar.expected))
    return f"| {bar.name} {sign} {shown(bar.bound)} | {expected} | {shown(bar.value)} | {bar.verdict} |"


def table(findings: Findings) -> str:
    lines = [f"## {findings.part}: {findings.title}", "", table_head(findings.columns), *map(table_row, findings.rows)]
    if findings.bars:
        lines += ["", table_head(("bar, goal", "expected", "measured", "")), *map(bar_line, findings.bars)]
    lines += ["", *(f"- failed: {error}" for error in findings.errors)]
    return "\n".join(lines)


def summary(findings: Findings) -> list[str]:
    """Rates of decode and prefill on one line, so that runs with different switches can be compared; bars if nothing
    was changed, errors."""
    rates = [f"{row[0]} {row[1]} x {row[2]}: {row[3]}" for row in findings.rows if row[0] in ("decode", "prefill")]
    lines = [f"{findings.part}: {', '.join(rates)} tok/s" if rates else f"{findings.part}: {len(findings.rows)} rows"]
    bars = [] if " " in findings.part else [bar_line(bar) for bar in findings.bars]
    return [*lines, *bars, *(f"failed: {error}" for error in findings.errors)]


if __name__ == "__main__":
    print("\n".join(line for one in read(Path(sys.argv[1])).values() for line in summary(one)))
