"""Runs the clients whose environments `make clients` has made, and prints a table of them.

    python -m tests.clients [CLIENT ...]

Exit code 1 if a test failed, or if a client was not run: one of those named, or of all.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Final

import pytest

from tests.clients.conftest import CLIENT

REQUIREMENTS: Final = Path(__file__).parent / "requirements"


class Outcomes:
    """Collects the outcomes of tests by client, as a plugin of pytest."""

    def __init__(self) -> None:
        self.of: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":  # a fixture may fail or skip too
            for name in {str(value) for key, value in report.user_properties if key == CLIENT}:
                self.of[name][report.outcome] += 1


def versions() -> dict[str, str]:
    """What is installed for each client: the first line of its list."""
    found = {}
    for file in sorted(REQUIREMENTS.iterdir()):
        lines = (line.partition("#")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
        found[file.stem] = next(filter(None, lines))
    return found


def table(names: list[str], of: dict[str, Counter[str]]) -> str:
    known = versions()
    lines = ["| client | version | passed | failed | |", "|---|---|---|---|---|"]
    for name in names:
        counts = of.get(name, Counter())
        says = "**failed**" if counts["failed"] else "passes" if counts["passed"] else "**not run**"
        lines.append(f"| {name} | {known[name]} | {counts['passed']} | {counts['failed']} | {says} |")
    return "\n".join(lines)


def main(chosen: list[str]) -> int:
    known = versions()
    if unknown := [name for name in chosen if name not in known]:
        print(f"no client named {', '.join(unknown)}: {REQUIREMENTS} has {', '.join(known)}", file=sys.stderr)
        return 2
    outcomes = Outcomes()
    code = pytest.main(["-q", "-m", "slow", str(Path(__file__).parent)], plugins=[outcomes])
    names = chosen or list(known)
    print("\n" + table(names, outcomes.of))
    return int(code != 0 or any(not outcomes.of[name]["passed"] for name in names))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
