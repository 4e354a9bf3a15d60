"""Draws docs/lifecycle.md from the lifecycle table: `python -m scripts.lifecycle_page > docs/lifecycle.md`. Pure but
for the print at the end."""

from __future__ import annotations

import sys
from typing import Final

from router.state.lifecycle import ENDED, LIVE, MOVES, NEEDS_SENDER, WITH_WORKERS, Move, Stage

MEANING: Final[dict[Stage, str]] = {
    Stage.QUEUED: "The request waits for a placement: its first, or another one after a lost attempt.",
    Stage.RESERVING: "The decode worker was asked to grant blocks and has not answered.",
    Stage.PREFILLING: "The prefill worker has the sequence and the grant.",
    Stage.MOVING: "The first token was sent to the client; the KV is not committed on the decode worker.",
    Stage.LANDED: "The KV is committed; the first token has not reached the router.",
    Stage.DECODING: "The decode worker has both and sends tokens step by step.",
    Stage.RESERVING_LOCAL: "The decode worker was asked to compute prompt and answer, and has not answered.",
    Stage.LOCAL: "The decode worker prefills the prompt itself and decodes.",
    Stage.FINISHED: "The answer is complete.",
    Stage.CANCELLED: "The client disconnected.",
    Stage.EXPIRED: "The deadline passed.",
    Stage.REJECTED: "Never placed: overload, or no worker is available.",
    Stage.FAILED: "All attempts were used, or the request itself is assumed to cause the failures.",
    Stage.FORGOTTEN: "No worker holds anything for it.",
}


def page() -> str:
    """The whole of docs/lifecycle.md."""
    lines = [
        "# Request lifecycle",
        "",
        "<!-- Made by `python -m scripts.lifecycle_page > docs/lifecycle.md`. Not edited. -->",
        "",
        "The router moves every request through this table (`MOVES` in `router/state/lifecycle.py`). An event that",
        "is not in it raises in tests, and is counted and dropped in production. Messages of an older attempt are",
        "counted and dropped before they reach the table.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> queued",
        *_arrows(),
        "    forgotten --> [*]",
        "```",
        "",
        "Transitions that apply to many stages are not in the figure:",
        "",
        *_general_rules(),
        "",
        "A request that has ended is kept until every worker that holds memory for it has sent Released or is gone.",
        "",
        "| stage | meaning |",
        "|---|---|",
        *[f"| {stage.value} | {MEANING[stage]} |" for stage in Stage],
        "",
        "## The table",
        "",
        "| stage | event | next stage |",
        "|---|---|---|",
        *[f"| {stage.value} | {move.value} | {after.value} |" for (stage, move), after in MOVES.items()],
        "",
        "## What needs the prefill worker",
        "",
        "A prefill worker's part in an attempt may end before it has sent everything. At these stages the attempt is",
        "lost with it, and the request is queued again. At the others the attempt goes on (`NEEDS_SENDER`).",
        "",
        "| prefill worker | the attempt is lost at |",
        "|---|---|",
        *[f"| {end.value} | {_stages(stages)} |" for end, stages in NEEDS_SENDER.items()],
        "",
    ]
    return "\n".join(lines)


def _stages(stages: frozenset[Stage]) -> str:
    return ", ".join(stage.value for stage in Stage if stage in stages)


def _arrows() -> list[str]:
    general = {move for move in Move if _is_general(move)}
    arrows = [
        f"    {stage.value} --> {after.value}: {move.value}"
        for (stage, move), after in MOVES.items()
        if move not in general
    ]
    # Moves from many stages are in the list below the figure, not in the figure.
    arrows += [f"    {stage} --> finished: {Move.LAST_TOKEN.value}" for stage in ("decoding", "local")]
    return [*arrows, f"    finished --> forgotten: {Move.RELEASED.value}"]


def _is_general(move: Move) -> bool:
    stages = {stage for stage, event in MOVES if event is move}
    return len(stages) > 3


def _general_rules() -> list[str]:
    groups = {frozenset(LIVE): "any live stage", frozenset(WITH_WORKERS): "any stage with workers"}
    groups[frozenset(ENDED)] = "any ended stage"
    rules = []
    for move in Move:
        if _is_general(move):
            stages = frozenset(stage for stage, event in MOVES if event is move)
            (after,) = {MOVES[stage, move] for stage in stages}
            rules.append(f"- {groups[stages]} -- {move.value} --> {after.value}")
    return rules


if __name__ == "__main__":
    sys.stdout.write(page())
