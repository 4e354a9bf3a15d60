"""Draws tables of the code into docs/lifecycle.md, transfer.md, telemetry.md and models.md. `python -m
scripts.drawn_pages` rewrites them; all else here is pure."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from kvtransfer.protocol.session import FAULTS, OPEN, RECEIVER_MOVES, SENDER_MOVES, Event, Moves, State
from pdserve.core.results import MEANING, MEASURED_BY, Phase
from router.state.lifecycle import ENDED, LIVE, MOVES, NEEDS_SENDER, WITH_WORKERS, Move, Stage
from router.state.request import STANDS_FOR

COMMAND: Final = "python -m scripts.drawn_pages"
DOCS: Final = Path(__file__).parents[1] / "docs"
END: Final = "<!-- End of what is made. -->"

# ---- The lifecycle of a request

STAGES: Final[dict[Stage, str]] = {
    Stage.QUEUED: "The request waits for a placement: its first, or another one after a lost or migrated attempt.",
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


def lifecycle_page() -> str:
    """The whole of docs/lifecycle.md."""
    lines = [
        "# Request lifecycle",
        "",
        f"<!-- Made by `{COMMAND}`. Not edited. -->",
        "",
        "The router moves every request through this table (`MOVES` in `router/state/lifecycle.py`). An event that",
        "is not in it raises in tests, and is counted and dropped in production. Messages of an older attempt are",
        "counted and dropped before they reach the table.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> queued",
        *_stage_arrows(),
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
        *[f"| {stage.value} | {STAGES[stage]} |" for stage in Stage],
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


def _stage_arrows() -> list[str]:
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


# ---- The states of a transfer

STATES: Final[dict[State, str]] = {
    State.GRANTED: "Opened; nothing has arrived from the other side.",
    State.SENDING: "Blocks are being sent.",
    State.SENT: "Every block has arrived (receiver) or was sent (sender).",
    State.VERIFIED: "Every checksum and stamp matched: the receiver's owner may commit, the sender's may reuse.",
    State.ABORTING: "The receiver's owner aborted; a write may still be open.",
    State.QUARANTINED: "Aborting for longer than the grace time. The blocks stay reserved.",
    State.DRAINED: "Aborted, and no access is open.",
    State.FAILING: "Cannot complete; an access may still be open.",
    State.FAILED: "Cannot complete, and no access is open.",
}


def states() -> str:
    """The states of a transfer, in docs/transfer.md."""
    faults = ", ".join(fault.value for fault in FAULTS)
    rest = f"Not in the figure: from {', '.join(one.value for one in OPEN)}, any of {faults} leads to failing."
    lines = [
        "```mermaid",
        "stateDiagram-v2",
        "    [*] --> granted",
        *_state_arrows(RECEIVER_MOVES),
        "```",
        "",
        *textwrap.wrap(f"{rest} {_difference()}", 120),
        "",
        "| state | meaning |",
        "|---|---|",
        *[f"| {state.value} | {STATES[state]} |" for state in State],
    ]
    return "\n".join(lines)


def _state_arrows(moves: Moves) -> list[str]:
    return [
        f"    {state.value} --> {after.value}: {event.value}"
        for (state, event), after in moves.items()
        if event not in FAULTS
    ]


def _difference() -> str:
    """The difference between the sender's table and the receiver's."""
    others = sorted({after.value for (_, event), after in SENDER_MOVES.items() if event is Event.ABORTED})
    return f"The sender's table has the same moves, except that an abort leads to {' or '.join(others)}."


# ---- The phases of a request


def phases() -> str:
    """The phases of a request, in docs/telemetry.md."""
    lines = ["| phase | span and timing | meaning | measured by | stages |", "|---|---|---|---|---|"]
    for phase in Phase:
        stages = ", ".join(stage.value for stage, of in STANDS_FOR.items() if of is phase)
        name = phase.value
        cells = (name.replace("_", " "), f"`pdserve.{name}`, `{name}_s`", MEANING[phase], MEASURED_BY[phase], stages)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- The architectures that an engine serves


def architectures() -> str:
    """What `make test-models` tries, in docs/models.md."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    from pdserve.engine.model.config_schema import FAMILIES
    from tests.models.tiny import LAST_RUN, OTHER_FIELDS, OTHER_LOGITS, REFUSED, TINY

    def named(family: str) -> str:
        model_type = getattr(transformers, f"{family}Config").model_type
        return str(NAMES.get(model_type, family))

    exact = "exact tokens and logprobs"
    notes = {name: f"exact tokens; {reason}" for name, reason in OTHER_LOGITS.items()}
    for name, fields in OTHER_FIELDS.items():
        read = ", ".join(f"`{field}` {value} for {TINY[name][1][field]}" for field, value in fields.items())
        notes[name] = f"{exact}, where transformers reads {read}"
    rows = {}
    for name, (family, _) in TINY.items():
        engines = "own, vllm" if named(family) in FAMILIES else "vllm"
        rows[named(family)] = f"| `{named(family)}` | {engines} | {notes.get(name, exact)} |"
    for _, (family, _, why) in REFUSED.items():
        rows[named(family)] = f"| `{named(family)}` | none | refused: {why} |"
    head = ["| `architectures` | engines | float32, against transformers in float64 |", "|---|---|---|"]
    runs = [f"- `{test}`: {when}" for test, when in LAST_RUN.items()]
    lines = [*head, *(rows[name] for name in sorted(rows, key=str.lower)), "", "Last runs on a CPU:", "", *runs]
    return "\n".join(lines)


#: What is drawn between markers, by page and name.
SECTIONS: Final[Mapping[str, tuple[str, Callable[[], str]]]] = {
    "transfer.md": ("States", states),
    "telemetry.md": ("Phases", phases),
    "models.md": ("Architectures", architectures),
}


def with_section(page: str, old: str) -> str:
    """The text of the page with the drawn part replaced."""
    name, draw = SECTIONS[page]
    begin = f"<!-- {name}: made by `{COMMAND}`. Not edited. -->"
    before, marker, rest = old.partition(begin)
    assert marker, f"{page} has no line {begin}"
    return f"{before}{begin}\n\n{draw()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    pages = {name: with_section(name, (DOCS / name).read_text()) for name in SECTIONS}
    for name, text in {"lifecycle.md": lifecycle_page(), **pages}.items():
        (DOCS / name).write_text(text)
        sys.stdout.write(f"{DOCS / name}\n")
