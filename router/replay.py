"""Recordings of a router: what it was built with, each event and the commands it answered with. Pure.

A recording is JSON lines. The first is {"settings": ...}; each of the others is
{"now_s": t, "event": {"kind": ..., ...}, "commands": [{"kind": ..., ...}, ...]}. `Recorder` makes the lines and
the runtime writes them; `replay` feeds the events to a fresh RouterState and compares.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from router import codec
from router.commands import Command
from router.events import Event


def _kinds(union: Any) -> dict[str, type]:
    kinds: dict[str, type] = {}
    for one in typing.get_args(union):
        if isinstance(one, types.UnionType):
            kinds.update(_kinds(one))
        else:
            kinds[one.__name__] = one
    return kinds


EVENT_KINDS = _kinds(Event)
COMMAND_KINDS = _kinds(Command)
_KINDS = EVENT_KINDS | COMMAND_KINDS


def encode(item: Event | Command) -> dict[str, Any]:
    return {"kind": type(item).__name__, **codec.encode(item)}


def decode(data: dict[str, Any]) -> Event | Command:
    """Raises ValueError on an unknown kind or field, TypeError on a value of the wrong type."""
    kind = _KINDS.get(data.get("kind", ""))
    if kind is None:
        raise ValueError(f"unknown kind {data.get('kind')!r}")
    fields = {name: held for name, held in data.items() if name != "kind"}
    return cast("Event | Command", codec.decode(kind, fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of RouterState.handle."""

    now_s: float
    event: Event
    commands: tuple[Command, ...]


def encode_step(step: Step) -> str:
    """One line, without its newline."""
    line = {"now_s": step.now_s, "event": encode(step.event), "commands": [encode(one) for one in step.commands]}
    return json.dumps(line, separators=(",", ":"))


def decode_step(line: str) -> Step:
    data = json.loads(line)
    commands = tuple(cast("Command", decode(one)) for one in data["commands"])
    return Step(now_s=float(data["now_s"]), event=cast("Event", decode(data["event"])), commands=commands)


def read_steps(lines: Iterable[str]) -> Iterator[Step]:
    return (decode_step(line) for line in lines if line.strip())


def make_step(now_s: float, event: Event, commands: Sequence[Command]) -> Step:
    return Step(now_s=now_s, event=event, commands=tuple(commands))
