"""Draws the table of phases in docs/telemetry.md: `python -m scripts.phases_page` rewrites it there. Pure but for the
reading and writing at the end."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from pdserve.core.results import MEANING, MEASURED_BY, Phase
from router.state.request import STANDS_FOR

PAGE: Final = Path(__file__).parents[1] / "docs/telemetry.md"
BEGIN: Final = "<!-- Phases: made by `python -m scripts.phases_page`. Not edited. -->"
END: Final = "<!-- End of what is made. -->"


def section() -> str:
    """The generated part, including its markers."""
    lines = [BEGIN, "", "| phase | span and timing | meaning | measured by | stages |", "|---|---|---|---|---|"]
    for phase in Phase:
        stages = ", ".join(stage.value for stage, of in STANDS_FOR.items() if of is phase)
        name = phase.value
        cells = (
            name.replace("_", " "),
            f"`pdserve.{name}`, `{name}_s`",
            MEANING[phase],
            MEASURED_BY[phase],
            stages,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", END])


def page(old: str) -> str:
    """The page with the generated part replaced."""
    before, _, rest = old.partition(BEGIN)
    return before + section() + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
    sys.stdout.write(f"{PAGE}\n")
