"""Converts frozen dataclasses to JSON values and back, by their type hints. Pure.

One rule covers every event, command and setting, so a new field needs no code here. Fields with their default value
are omitted. Supported types: str, int, float, bool, None, bytes, enums, nested dataclasses, tuples (homogeneous, fixed
and named), mappings with string keys, optionals of these, and unions of scalars.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, TypeAlias

Decoder: TypeAlias = Callable[[Any], Any]

_EXACT: Final = frozenset({int, str, bool})  # types that JSON distinguishes


def encode(value: Any) -> Any:
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
                encoded[one.name] = encode(held)
        return encoded
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode(kind: Any, value: Any) -> Any:
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
