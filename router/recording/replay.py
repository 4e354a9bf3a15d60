"""Recordings of a router: its settings, and each event with the resulting commands. Pure.

A recording consists of JSON lines. The first is {"settings": ...}, and each of the others is
{"now_s": t, "event": {"is": ..., ...}, "commands": [{"is": ..., ...}, ...]}. The runtime writes the lines. `replay`
feeds the events to a new RouterState, and compares the commands.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias, TypeVar, cast

from pdserve.core.errors import ConfigError
from router.scaling.controller import Controller
from router.scaling.interface import Decision, Observed, ScalingSettings
from router.state.interface import Command, Event, RouterSettings
from router.state.state import RouterState

# --- values as JSON -------------------------------------------------------------------------------------------
# Converts frozen dataclasses to JSON values and back, by their type hints.
#
# One rule covers every event, command and setting, so a new field needs no code here. Fields with their default value
# are omitted. Supported types: str, int, float, bool, None, bytes, enums, nested dataclasses, tuples (homogeneous,
# fixed and named), mappings with string keys, optionals of these, and unions of scalars, also with tuples of texts.

Decoder: TypeAlias = Callable[[Any], Any]

_EXACT: Final = frozenset({int, str, bool})  # types that JSON distinguishes


def encode_value(value: Any) -> Any:
    """The JSON form of `value`. Dataclasses become objects without the name of their class."""
    if isinstance(value, Enum):  # before str, which some enums are
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value):
        encoded = {}
        for one in dataclasses.fields(value):
            held = getattr(value, one.name)
            if not _is_default(one, held):
                encoded[one.name] = encode_value(held)
        return encoded
    if isinstance(value, tuple | list):
        return [encode_value(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode_value(item) for key, item in value.items()}
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode_value(kind: Any, value: Any) -> Any:
    """The inverse of encode for a value of type `kind`. Raises TypeError or ValueError on anything else."""
    return _decoder(kind)(value)


def _is_default(one: dataclasses.Field[Any], held: Any) -> bool:
    if one.default is not dataclasses.MISSING:
        return bool(held == one.default) and type(held) is type(one.default)
    if one.default_factory is not dataclasses.MISSING:
        return bool(held == one.default_factory())
    return False


@functools.cache
def _decoder(kind: Any) -> Decoder:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:
        if set(arguments) <= _EXACT:
            return _exactly(*arguments)
        if tuple[str, ...] in arguments and (scalars := set(arguments) - {tuple[str, ...]}) <= _EXACT | {float}:
            return _words_or(_exactly(*scalars))
        inner = [one for one in arguments if one is not type(None)]
        if len(inner) != 1 or len(inner) == len(arguments):
            raise TypeError(f"cannot decode {kind}: only optionals are supported")
        return _optional(_decoder(inner[0]))
    if origin is tuple:
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return _many(_decoder(arguments[0]))
        return _fixed([_decoder(one) for one in arguments])
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_decoder(arguments[1]))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _record(kind)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = typing.get_type_hints(kind)
        fixed = _fixed([_decoder(hints[name]) for name in kind._fields])
        return lambda value: kind(*fixed(value))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind
    if kind is bytes:
        return bytes.fromhex
    if kind is float:
        return float
    if kind in _EXACT:
        return _exactly(kind)
    raise TypeError(f"cannot decode {kind}")


def _optional(inner: Decoder) -> Decoder:
    return lambda value: None if value is None else inner(value)


def _many(inner: Decoder) -> Decoder:
    return lambda value: tuple([inner(item) for item in value])


def _words_or(scalar: Decoder) -> Decoder:
    words = _many(_exactly(str))
    return lambda value: words(value) if isinstance(value, list) else scalar(value)


def _fixed(inner: list[Decoder]) -> Decoder:
    return lambda value: tuple([one(item) for one, item in zip(inner, value, strict=True)])


def _mapping(inner: Decoder) -> Decoder:
    return lambda value: {key: inner(item) for key, item in value.items()}


def _exactly(*kinds: type) -> Decoder:
    def check(value: Any) -> Any:
        if type(value) not in kinds:
            expected = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"expected {expected}, got {type(value).__name__}")
        return value

    return check


def _record(kind: type) -> Decoder:
    hints = typing.get_type_hints(kind)
    decoders: dict[str, Decoder] = {}

    def build(value: dict[str, Any]) -> Any:
        if not decoders:  # filled on first use, so that a type may contain itself
            decoders.update({one.name: _decoder(hints[one.name]) for one in dataclasses.fields(kind)})
        unknown = value.keys() - decoders.keys()
        if unknown:
            raise ValueError(f"{kind.__name__} has no field {sorted(unknown)[0]!r}")
        return kind(**{name: decoders[name](held) for name, held in value.items()})

    return build


# --- lines of a recording -------------------------------------------------------------------------------------


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
    return {"is": type(item).__name__, **encode_value(item)}


def decode(data: dict[str, Any]) -> Event | Command:
    """Raises ValueError on an unknown kind or field, TypeError on a value of the wrong type."""
    kind = _KINDS.get(data.get("is", ""))
    if kind is None:
        raise ValueError(f"unknown kind {data.get('is')!r}")
    fields = {name: held for name, held in data.items() if name != "is"}
    return cast("Event | Command", decode_value(kind, fields))


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
    return _dump({"settings": encode_value(settings)})


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
    return cast("RouterSettings", decode_value(RouterSettings, data["settings"]))


def decode_step(line: str) -> Step:
    """Raises ValueError, KeyError or TypeError on an invalid line."""
    data = json.loads(line)
    commands = tuple(cast("Command", decode(one)) for one in data["commands"])
    return Step(now_s=float(data["now_s"]), event=cast("Event", decode(data["event"])), commands=commands)


def read(lines: Iterable[str]) -> Iterator[Step]:
    """The steps of a recording, without its first line. Raises RecordingError at the first invalid line.

    A truncated last line (the router died while writing it) ends the recording.
    """
    return _decoded(iter(lines), decode_step, "an event and its commands")


Decoded = TypeVar("Decoded")


def _decoded(rows: Iterator[str], decode: Callable[[str], Decoded], expected: str) -> Iterator[Decoded]:
    for number, line in enumerate(rows, start=2):
        try:
            step = decode(line)
        except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
            if not line.endswith("\n") and next(rows, None) is None:
                return
            raise RecordingError(number, line.strip(), f"{expected} ({error})") from None
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


# --- decisions about the number of workers --------------------------------------------------------------------
# Another recording, of the launcher: {"scaling": ...} in its first line, then
# {"now_s": t, "observed": {...}, "decision": {...}} for each decision.


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingStep:
    """One call of Controller.decide."""

    now_s: float
    observed: Observed
    decision: Decision


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherDecision:
    """A step in which the replayed controller decided otherwise."""

    number: int  # the first is 1
    step: ScalingStep
    replayed: Decision


def is_scaling(first_line: str) -> bool:
    return first_line.startswith('{"scaling":')


def encode_scaling_settings(settings: ScalingSettings) -> str:
    return _dump({"scaling": encode_value(settings)})


def encode_scaling_step(step: ScalingStep) -> str:
    return _dump(encode_value(step))


def replay_scaling(lines: Iterable[str]) -> Iterator[OtherDecision]:
    """Feeds recorded observations to a new Controller. Raises RecordingError on an invalid recording."""
    rows = iter(lines)
    first = next(rows, "")
    try:
        settings = decode_value(ScalingSettings, json.loads(first)["scaling"])
    except (ValueError, KeyError, TypeError, RecursionError, ConfigError) as error:
        raise RecordingError(1, first.strip(), f"the controller's settings ({error})") from None
    controller = Controller(settings)
    steps = _decoded(rows, lambda line: decode_value(ScalingStep, json.loads(line)), "an observation and its decision")
    for number, step in enumerate(steps, start=1):
        decision = controller.decide(step.observed, step.now_s)
        if decision != step.decision:
            yield OtherDecision(number=number, step=step, replayed=decision)


def _dump(data: dict[str, Any]) -> str:
    return json.dumps(data, separators=(",", ":"))
