"""Whether a document meets its schema, judged without pdserve: by jsonschema, with strict readers of each format."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
import uuid
from collections.abc import Callable
from email.headerregistry import Address
from typing import Any
from urllib.parse import urlsplit

import jsonschema
from jsonschema.validators import validator_for
from pydantic import AnyUrl, TypeAdapter


def why_invalid(text: str, schema: Any) -> str:
    """Empty if the text is a valid document. Its objects must not repeat a listed name."""
    try:
        validator = validator_for(schema, jsonschema.Draft202012Validator)
        validator(schema, format_checker=FORMATS).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError) as error:
        return str(error)
    return ""


def _zoned_time(text: str) -> None:
    if datetime.time.fromisoformat(text).tzinfo is None:
        raise ValueError("no offset")


def _zoned_datetime(text: str) -> None:
    if datetime.datetime.fromisoformat(text).tzinfo is None or text[10] not in "Tt":
        raise ValueError("no offset")


def _date(text: str) -> None:
    datetime.date.fromisoformat(text)
    if len(text) != len("2024-02-29"):
        raise ValueError("another form of ISO 8601")


def _hostname(text: str) -> None:
    labels = text.split(".")
    if len(text) > 253 or not all(re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in labels):
        raise ValueError("not a host name")
    text.encode("idna")


def _email(text: str) -> None:
    address = Address(addr_spec=text)
    if len(address.username) > 64 or len(text) > 254 or "." not in address.domain:
        raise ValueError("not an address")
    _hostname(address.domain)


def _uri(text: str) -> None:
    TypeAdapter(AnyUrl).validate_python(text)
    assert urlsplit(text).port is None or urlsplit(text).scheme


def _duration(text: str) -> None:
    TypeAdapter(datetime.timedelta).validate_python(text, strict=False)
    if not re.fullmatch(r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?!$)(\d+H)?(\d+M)?(\d+S)?)?)", text):
        raise ValueError("not a duration")


READERS: dict[str, Callable[[str], object]] = {
    "date": _date,
    "time": _zoned_time,
    "date-time": _zoned_datetime,
    "duration": _duration,
    "email": _email,
    "hostname": _hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
    "uri": _uri,
}
FORMATS = jsonschema.FormatChecker(formats=())


def _check(name: str) -> None:
    def is_read(value: object) -> bool:
        if isinstance(value, str):
            READERS[name](value)
        return True

    FORMATS.checks(name, raises=Exception)(is_read)


for _name in READERS:
    _check(_name)
