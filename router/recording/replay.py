"""Recordings of a router: its settings, and each event with the resulting commands. Pure.

A recording consists of JSON lines. The first is {"settings": ...}, and each of the others is
{"now_s": t, "event": {"is": ..., ...}, "commands": [{"is": ..., ...}, ...]}. The runtime writes the lines. `replay`
feeds the events to a new RouterState, and compares the commands.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from pdserve.core.errors import ConfigError
from router.recording import codec
from router.state.commands import Command
from router.state.events import Event
from router.state.settings import RouterSettings
from router.state.state import RouterState


class RecordingError(ConfigError):
    """A line of a recording is invalid; the first line is 1."""

    reason = "RECORDING"

    def __init__(self, line: int, seen: object, expected: str) -> None:
        text = str(seen)
        super().__init__(f"recording, line {line}", text if len(text) <= 60 else text[:60] + " ...", expected)
        self.line = line


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
    return {"is": type(item).__name__, **codec.encode(item)}


def decode(data: dict[str, Any]) -> Event | Command:
    """Raises ValueError on an unknown kind or field, TypeError on a value of the wrong type."""
    kind = _KINDS.get(data.get("is", ""))
    if kind is None:
        raise ValueError(f"unknown kind {data.get('is')!r}")
    fields = {name: held for name, held in data.items() if name != "is"}
    return cast("Event | Command", codec.decode(kind, fields))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of RouterState.handle."""

    now_s: float
    event: Event
    commands: tuple[Command, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A step whose replay returned other commands than the recorded ones."""

    number: int  # number of the step; the first is 1
    step: Step
    replayed: tuple[Command, ...]


def encode_settings(settings: RouterSettings) -> str:
    """The first line of a recording, without its newline."""
    return _dump({"settings": codec.encode(settings)})


def make_step(now_s: float, event: Event, commands: Sequence[Command]) -> Step:
    return Step(now_s=now_s, event=event, commands=tuple(commands))


def encode_step(step: Step) -> str:
    """One line, without its newline."""
    commands = [encode(one) for one in step.commands]
    return _dump({"now_s": step.now_s, "event": encode(step.event), "commands": commands})


def decode_settings(line: str) -> RouterSettings:
    """Raises ValueError if `line` is not the first of a recording."""
    data = json.loads(line)
    if not isinstance(data, dict) or "settings" not in data:
        raise ValueError("no settings")
    return cast("RouterSettings", codec.decode(RouterSettings, data["settings"]))


def decode_step(line: str) -> Step:
    """Raises ValueError, KeyError or TypeError on an invalid line."""
    data = json.loads(line)
    commands = tuple(cast("Command", decode(one)) for one in data["commands"])
    return Step(now_s=float(data["now_s"]), event=cast("Event", decode(data["event"])), commands=commands)


def read(lines: Iterable[str]) -> Iterator[Step]:
    """The steps of a recording, without its first line. Raises RecordingError at the first invalid line.

    A truncated last line (the router died while writing it) ends the recording.
    """
    rows = iter(lines)
    for number, line in enumerate(rows, start=2):
        try:
            step = decode_step(line)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if not line.endswith("\n") and next(rows, None) is None:
                return
            raise RecordingError(number, line.strip(), f"an event and its commands ({error})") from None
        yield step


def read_settings(line: str) -> RouterSettings:
    """Raises RecordingError if `line` is not the first of a recording."""
    try:
        return decode_settings(line)
    except (ValueError, TypeError, RecursionError, ConfigError) as error:
        raise RecordingError(1, line.strip(), f"the router's settings ({error})") from None


def replay(lines: Iterable[str]) -> Iterator[Difference]:
    """Feeds a recording to a new RouterState, and yields the differences.

    Raises RecordingError on an invalid recording.
    """
    rows = iter(lines)
    state = RouterState(read_settings(next(rows, "")))
    for number, step in enumerate(read(rows), start=1):
        commands = tuple(state.handle(step.event, step.now_s))
        if commands != step.commands:
            yield Difference(number=number, step=step, replayed=commands)


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))
