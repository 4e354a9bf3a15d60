"""Frames of a stream of server-sent events, as OpenAI's clients read them. Pure."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any, Final

DONE: Final = b"data: [DONE]\n\n"
PADDED_BYTES: Final = 64
_PADDING: Final = ',"obfuscation":""'


def to_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def frame(value: Mapping[str, Any]) -> bytes:
    return b"data: " + to_json(value).encode() + b"\n\n"


def padded_frame(value: Mapping[str, Any]) -> bytes:
    """With random characters in `obfuscation`, up to a multiple of some bytes: an observer of encrypted chunks cannot
    tell the lengths of tokens."""
    num_bytes = len(to_json(value).encode()) + len(_PADDING)
    return frame({**value, "obfuscation": secrets.token_hex(PADDED_BYTES)[: -num_bytes % PADDED_BYTES]})
