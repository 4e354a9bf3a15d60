"""Frames of a stream of server-sent events, as OpenAI's clients read them. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any, Final

import pydantic_core

DONE: Final = b"data: [DONE]\n\n"
PADDED_BYTES: Final = 64
_PADDING: Final = ',"obfuscation":""'


def to_json(value: Mapping[str, Any]) -> bytes:
    """Compact, in UTF-8. A seventh of the time of the standard library's encoder."""
    found: bytes = pydantic_core.to_json(value, inf_nan_mode="null")
    return found


def frame(value: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def padded_frame(value: Mapping[str, Any]) -> bytes:
    """With random characters in `obfuscation`, up to a multiple of some bytes: an observer of encrypted chunks cannot
    tell the lengths of tokens."""
    num_bytes = len(to_json(value)) + len(_PADDING)
    return frame({**value, "obfuscation": secrets.token_hex(PADDED_BYTES)[: -num_bytes % PADDED_BYTES]})
