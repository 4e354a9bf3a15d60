"""Flags and defaults that commands of the simulator share. Pure.

Fault flags inject faults into workers of a simulation: --kill d0@10:5, --slow p1@20:30x3, --stall d1@15:2,
--drain d1@15:5.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterable
from typing import Final

from pdserve.core.errors import ConfigError
from simulator.model import WorkerFault, WorkerFaultKind

DEFAULT_REQUESTS: Final = 2000  # of a trace that `pdserve plan` simulates
MAX_REQUESTS: Final = 100_000  # of `pdserve plan`
COMPARE_TOKEN_ENV: Final = "PDSERVE_COMPARE_TOKEN"

_FORMS: Final = {
    "kill": "WORKER@AT[:FOR]",
    "slow": "WORKER@AT[:FOR]xFACTOR",
    "stall": "WORKER@AT:FOR",
    "drain": "WORKER@AT[:FOR]",
}
_HELP: Final = {
    "kill": "kill a worker after AT seconds and restart it FOR seconds later (never); repeatable",
    "slow": "make the steps of a worker FACTOR times as long, for FOR seconds (to the end); repeatable",
    "stall": "stop all work of a worker for FOR seconds; repeatable",
    "drain": "drain a worker after AT seconds, and undrain it FOR seconds later (never); repeatable",
}
_KINDS: Final = {
    "kill": WorkerFaultKind.DIE,
    "slow": WorkerFaultKind.SLOW,
    "stall": WorkerFaultKind.STALL,
    "drain": WorkerFaultKind.DRAIN,
}
_SHAPE: Final = re.compile(r"(?P<worker>[^@]+)@(?P<at>[\d.]+)(?::(?P<for>[\d.]+))?(?:x(?P<factor>[\d.]+))?")


def add_ends_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--ended-sessions",
        type=float,
        metavar="SHARE",
        help="share of the sessions of --workload agents whose client says after the last turn that they have ended "
        "(0, as with Claude Code)",
    )


def add_fault_flags(parser: argparse._ActionsContainer) -> None:
    for name, form in _FORMS.items():
        parser.add_argument(f"--{name}", action="append", default=[], metavar=form, help=_HELP[name])


def faults(args: argparse.Namespace, worker_ids: Iterable[str]) -> tuple[WorkerFault, ...]:
    """Raises ConfigError, naming the flag and its form, or listing the workers."""
    known = list(worker_ids)
    found = [_parse(name, text) for name in _FORMS for text in getattr(args, name)]
    for one in found:
        if one.worker_id not in known:
            shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
            raise ConfigError("worker", one.worker_id, f"one of {shown}")
    return tuple(sorted(found, key=lambda one: one.at_s))


def _parse(name: str, text: str) -> WorkerFault:
    match = _SHAPE.fullmatch(text)
    wants_factor, wants_end = name == "slow", name == "stall"
    if (
        match is None
        or (match["factor"] is not None) != wants_factor
        or (wants_end and match["for"] is None)
        or not all(_is_number(match[part]) for part in ("at", "for", "factor") if match[part] is not None)
        or any(match[part] is not None and not float(match[part]) for part in ("for", "factor"))
    ):
        raise ConfigError(f"--{name}", text, f"{_FORMS[name]}, such as {_example(name)}")
    return WorkerFault(
        at_s=float(match["at"]),
        worker_id=match["worker"],
        kind=_KINDS[name],
        for_s=float(match["for"]) if match["for"] is not None else math.inf,
        factor=float(match["factor"] or 1.0),
    )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _example(name: str) -> str:
    return {"kill": "d0@10:5", "slow": "p0@20:30x3", "stall": "d0@15:2", "drain": "d0@15:5"}[name]


# --- defaults of simulate and plan ----------------------------------------------------------------------------
# They are shown in the help of both commands.

PROFILE: Final = "h100-sxm.llama-3.1-8b.bf16"
WORKERS: Final = 1  # of each role
SLO_TTFT_S: Final = 1.0
SLO_TPOT_S: Final = 0.02
