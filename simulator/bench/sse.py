"""Reads server-sent events, and the chunks of OpenAI's API in them. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

DONE: Final = "[DONE]"
MAX_EVENT_BYTES: Final = 4 * 2**20
MAX_COUNT: Final = 10**9  # tokens of one request
_DELTA_TEXTS: Final = ("content", "reasoning_content", "reasoning", "tool_calls")


class BrokenStream(Exception):
    """The server sent something that is not an event of OpenAI's API."""


@final
class EventReader:
    """Collects bytes until they are whole lines. Comments and fields other than `data` are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Raises BrokenStream if an event is too long or not UTF-8."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise BrokenStream(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                try:
                    yield line[5:].strip().decode()
                except UnicodeDecodeError:
                    raise BrokenStream("an event that is not UTF-8") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    has_tokens: bool  # a part of the answer, even if its text is still incomplete
    is_end: bool  # has the finish reason
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    error: str | None = None


def read_chunk(event: str) -> StreamChunk:
    """Raises BrokenStream."""
    try:
        found = json.loads(event)
    except (ValueError, RecursionError):
        raise BrokenStream("an event that is not JSON") from None
    if not isinstance(found, dict):
        raise BrokenStream("an event that is not a JSON object")
    error = found.get("error")
    usage = found.get("usage")
    counts = usage if isinstance(usage, dict) else {}
    details = counts.get("prompt_tokens_details")
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else None
    return StreamChunk(
        has_tokens=choice is not None and _has_tokens(choice),
        is_end=choice is not None and choice.get("finish_reason") is not None,
        prompt_tokens=_count(counts.get("prompt_tokens")),
        output_tokens=_count(counts.get("completion_tokens")),
        cached_tokens=_count(details.get("cached_tokens")) if isinstance(details, dict) else None,
        error=error_message(error) if error is not None else None,
    )


def _has_tokens(choice: dict[str, Any]) -> bool:
    """Some servers send a token without text; some send the role or the finish reason in a separate chunk."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        has_text = any(delta.get(name) for name in _DELTA_TEXTS)
        is_role = "role" in delta
    else:
        has_text, is_role = bool(choice.get("text")), False
    return has_text or bool(choice.get("token_ids")) or (choice.get("finish_reason") is None and not is_role)


def error_message(error: Any) -> str:
    """The message of OpenAI's error object, or the start of any other text, without control characters."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("error") or error
    words = " ".join(str(error)[:400].split())
    return "".join(char if char.isprintable() else "?" for char in words)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT else None
