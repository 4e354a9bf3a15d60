"""Converts between dataclasses and protobuf messages by the names and types of their fields.

A `Codec` pairs one dataclass with one message. It is built at import, and raises TypeError then if a field of either
side has no counterpart on the other, so a new field is added to the .proto file and to the dataclass, and nowhere
else. The rules, by the type of the dataclass's field:

    bool, int, float, str, bytes    the field of the same name
    X | None                        `optional` in the .proto file, or a message field that may be absent
    an Enum                         the enum value of the member's name; None is ..._UNSPECIFIED
    a dataclass                     a message, by the codec in `nested`
    tuple[X, ...]                   a repeated field of X
    AttemptKey                      the fields request_id and attempt; `peer` names the other end and is not sent

A float whose name ends in `_s` is a duration: decoding raises InvalidRequest unless it lies between 0 and a day.
`special` gives the two directions of a field that no rule fits.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeVar, cast, final

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pdserve.core.attempt import AttemptKey
from pdserve.core.durations import check_duration
from pdserve.core.errors import InvalidRequest

Value = TypeVar("Value")
Wire = TypeVar("Wire", bound=Message)
Member = TypeVar("Member", bound=Enum)

KEY_FIELDS: Final = ("request_id", "attempt")
_SCALARS: Final[Mapping[type, tuple[int, ...]]] = {
    bool: (FieldDescriptor.CPPTYPE_BOOL,),
    int: (
        FieldDescriptor.CPPTYPE_INT32,
        FieldDescriptor.CPPTYPE_INT64,
        FieldDescriptor.CPPTYPE_UINT32,
        FieldDescriptor.CPPTYPE_UINT64,
    ),
    float: (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT),
    str: (FieldDescriptor.CPPTYPE_STRING,),
    bytes: (FieldDescriptor.CPPTYPE_STRING,),
}


@dataclass(frozen=True, slots=True)
class Special:
    """The conversion of one field. Both functions take and return values of the field, never None."""

    encode: Callable[[Any], Any]
    decode: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class _Field:
    """One field of the pair; None in place of a function if the value is sent unchanged."""

    name: str  # of the dataclass
    wire: str  # of the message
    default: Any  # the value that is left out, because the message has the same default
    may_be_absent: bool  # None on one side, absent on the other
    encode: Callable[[Any], Any] | None
    decode: Callable[[Any], Any] | None


@final
class Codec(Generic[Value, Wire]):
    def __init__(
        self,
        kind: type[Value],
        message: type[Wire],
        *,
        special: Mapping[str, Special] | None = None,
        nested: Collection[Codec[Any, Any]] = (),
        renamed: Mapping[str, str] | None = None,
        given: Collection[str] = (),
        ignored: Collection[str] = (),
        unknown: Mapping[str, Enum] | None = None,
        is_lenient: bool = False,
    ) -> None:
        """`renamed` maps fields of the dataclass to fields of the message. `given` are fields of the dataclass that are
        passed to `decode`, and `ignored` are fields of the message that another function reads. `unknown` is the value
        of an enum field if a newer peer sends an unknown value; without it decoding raises InvalidRequest. With
        `is_lenient`, for messages from a server to a client, durations have no bound, and an unknown enum value becomes
        None if the field may be None. Raises TypeError if the two sides do not match."""
        self.kind, self.message = kind, message
        self._special, self._unknown, self._is_lenient = special or {}, unknown or {}, is_lenient
        self._nested = {one.kind: one for one in nested}
        renamed = renamed or {}
        descriptors: dict[str, Any] = {one.name: one for one in message.DESCRIPTOR.fields}
        hints = typing.get_type_hints(kind)
        self._key = next((name for name, hint in hints.items() if hint is AttemptKey), None)
        self._fields: list[_Field] = []
        covered = {*ignored, *(KEY_FIELDS if self._key else ())}
        for one in dataclasses.fields(kind):  # type: ignore[arg-type]  # every `kind` is a dataclass
            if one.name in given or one.name == self._key:
                continue
            wire = renamed.get(one.name, one.name)
            if wire not in descriptors:
                raise TypeError(f"{kind.__name__}.{one.name} has no field {wire} in {message.DESCRIPTOR.full_name}")
            covered.add(wire)
            self._fields.append(self._pair(one.name, hints[one.name], descriptors[wire]))
        if missing := descriptors.keys() ^ covered:
            raise TypeError(f"{message.DESCRIPTOR.full_name} and {kind.__name__} differ in {sorted(missing)}")

    def encode(self, value: Value) -> Wire:
        """The message of `value`."""
        fields: dict[str, Any] = {}
        for one in self._fields:
            held = getattr(value, one.name)
            if one.may_be_absent:
                if held is None:
                    continue
            elif held == one.default:
                continue
            fields[one.wire] = held if one.encode is None else one.encode(held)
        if self._key is not None:
            key = getattr(value, self._key)
            fields["request_id"], fields["attempt"] = key.request_id, key.attempt
        return self.message(**fields)

    def decode(self, message: Wire, peer: int | str = "", **given: Any) -> Value:
        """The dataclass of `message`, with the `given` fields; `peer` is its sender, for an AttemptKey.

        Raises InvalidRequest, naming the field.
        """
        values = given
        for one in self._fields:
            if one.may_be_absent and not message.HasField(one.wire):
                values[one.name] = None
                continue
            held = getattr(message, one.wire)
            values[one.name] = held if one.decode is None else one.decode(held)
        if self._key is not None:
            held_key: Any = message
            values[self._key] = AttemptKey(peer, held_key.request_id, held_key.attempt)
        return self.kind(**values)

    # ------------------------------------------------------------------------------------------------------------

    def _pair(self, name: str, hint: Any, field: FieldDescriptor) -> _Field:
        is_repeated = field.is_repeated
        hint, is_optional = _without_none(hint)
        special = self._special.get(name)
        if special is not None:
            encode: Callable[[Any], Any] | None = special.encode
            decode: Callable[[Any], Any] | None = special.decode
            may_be_absent = is_optional and field.has_presence
        elif is_repeated:
            encode, decode = self._repeated(name, hint, field)
            may_be_absent = False
        else:
            encode, decode = self._single(name, hint, field, is_optional)
            may_be_absent = is_optional and not _is_enum(hint)
            if may_be_absent and not field.has_presence:
                raise TypeError(f"{field.full_name} must be optional: {self.kind.__name__}.{name} may be None")
        default = () if is_repeated else None if field.has_presence or is_optional else field.default_value
        if _is_enum(hint) and not is_optional:
            default = None
        return _Field(name, field.name, default, may_be_absent, encode, decode)

    def _repeated(
        self, name: str, hint: Any, field: FieldDescriptor
    ) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any]]:
        arguments = typing.get_args(hint)
        if typing.get_origin(hint) is not tuple or len(arguments) != 2 or arguments[1] is not Ellipsis:
            raise TypeError(f"{self.kind.__name__}.{name} is {hint}, but {field.full_name} is repeated")
        encode, decode = self._single(name, arguments[0], field, is_optional=False)
        if encode is None or decode is None:
            return None, tuple
        return (
            lambda values: [encode(one) for one in values],
            lambda values: tuple([decode(one) for one in values]),
        )

    def _single(
        self, name: str, hint: Any, field: FieldDescriptor, is_optional: bool
    ) -> tuple[Callable[[Any], Any] | None, Callable[[Any], Any] | None]:
        if _is_enum(hint):
            return _enum_pair(hint, field, is_optional, self._unknown.get(name), self._is_lenient)
        if dataclasses.is_dataclass(hint):
            inner = self._nested.get(cast("type[Any]", hint))
            if inner is None or inner.message.DESCRIPTOR is not field.message_type:
                raise TypeError(f"{self.kind.__name__}.{name} needs a codec for {field.full_name}")
            return inner.encode, inner.decode
        if field.cpp_type not in _SCALARS.get(hint, ()):
            raise TypeError(f"{self.kind.__name__}.{name} is {hint}, which {field.full_name} cannot hold")
        if hint is float and name.endswith("_s") and not self._is_lenient:
            return None, _duration(field.name)
        return None, None


def numbers_of(kind: type[Member], enum: Any) -> dict[Member, int]:
    """The number of each member in the descriptor of a protobuf enum. Raises TypeError where their members differ."""
    numbers = {one.name: one.number for one in enum.values}
    unspecified = next(name for name, number in numbers.items() if number == 0)
    prefix = unspecified.removesuffix("UNSPECIFIED")
    if {prefix + one.name for one in kind} != numbers.keys() - {unspecified}:
        raise TypeError(f"{kind.__name__} and {enum.full_name} have different members")
    return {one: numbers[prefix + one.name] for one in kind}


def _without_none(hint: Any) -> tuple[Any, bool]:
    """The type without `| None`, and whether it had one."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        inner = [one for one in typing.get_args(hint) if one is not type(None)]
        if len(inner) == 1:
            return inner[0], True
    return hint, False


def _is_enum(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Enum)


def _enum_pair(
    kind: type[Enum], field: Any, is_optional: bool, unknown: Enum | None, is_lenient: bool
) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """Members by name: FinishReason.STOP is FINISH_REASON_STOP, and the value 0 is unspecified."""
    to_member: dict[int, Enum | None] = {number: one for one, number in numbers_of(kind, field.enum_type).items()}
    to_number: dict[Enum | None, int] = {one: number for number, one in to_member.items()}
    if is_optional:
        to_number[None] = 0
        to_member[0] = None

    def decode(number: int) -> Enum | None:
        member = to_member.get(number, unknown)
        if member is None and not (is_optional and (number == 0 or is_lenient)):
            raise InvalidRequest(field.name, number, "a value that the .proto names")
        return member

    return to_number.__getitem__, decode


def _duration(field: str) -> Callable[[float], float]:
    def decode(seconds: float) -> float:
        check_duration(field, seconds)
        return seconds

    return decode
