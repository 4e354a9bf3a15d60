"""Traces of sessions, whose turns follow each other: pdserve's own form, and what Claude Code records.

Sessions JSONL has a row for each turn, in order of time:
  `session` (text), `at_s` (seconds, when the turn began), `input_tokens` (the whole prompt), `output_tokens`;
  `pause_s` (0): since the answer before in the session; `prefix` (text) and `prefix_tokens`: a beginning that sessions
  share; `ends_session` (false): the client said after the answer that the session had ended. Only the first turn's
  `at_s` counts, because later ones depend on the server.

Claude Code's JSONL has a row for each message. Several files may be joined to one (`cat *.jsonl`). Only lengths and
times are read: those of the usage that the service reported, and of the rows before each answer. They do not say that
a session has ended.

A prompt that is shorter than the one before, such as after a compaction, shares only the prefix with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, Final

from simulator.model import NumberedLine, TraceError, TraceRequest
from simulator.traces.rows import MAX_SPAN_S, MAX_TOKENS, check_tokens, date_s, json_object, json_row

SESSION_BLOCK_TOKENS: Final = 64
MAX_SESSION_TURNS: Final = 1_000_000  # of a file: their lengths are held, because turns are sorted
MAX_NAME_CHARS: Final = 256
_COLUMNS: Final = ("session", "at_s", "input_tokens", "output_tokens")
_OTHERS: Final = ("pause_s", "prefix", "prefix_tokens", "ends_session")
_INPUTS: Final = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
_OF_CLAUDE: Final = ("sessionId", "uuid", "parentUuid", "isSidechain", "leafUuid")


@dataclass(slots=True)
class _Session:
    name: str  # made of its number, because clients limit names
    begin_s: float  # of its next turn, if answers took no time
    prefix: str = ""
    prefix_tokens: int = 0
    last: int | None = None  # number of its request before
    prompt_tokens: int = 0  # of that
    ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Row:
    at_s: float
    session: _Session
    input_tokens: int
    output_tokens: int
    pause_s: float
    ends_session: bool = False


def is_sessions(first_line: str) -> bool:
    row = json_object(first_line)
    return row is not None and "session" in row and any(name in row for name in _COLUMNS[1:])


def is_claude_code(first_line: str) -> bool:
    row = json_object(first_line)
    return row is not None and "type" in row and any(name in row for name in _OF_CLAUDE)


def read_sessions(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """Raises TraceError at the first invalid row."""
    sessions: dict[str, _Session] = {}
    rows: list[_Row] = []
    for line, text in lines:
        given = json_row(text, name, line, _COLUMNS)
        if others := given.keys() - {*_COLUMNS, *_OTHERS}:
            raise TraceError(name, line, min(others), "a value", "only " + ", ".join((*_COLUMNS, *_OTHERS)))
        check = _Checked(given, name, line)
        at_s, pause_s = check.seconds("at_s"), check.seconds("pause_s")
        key, prefix, prefix_tokens = check.name("session"), check.name("prefix"), check.tokens("prefix_tokens", least=0)
        session = sessions.get(key)
        if session is None:
            session = sessions[key] = _Session(_name(sessions), at_s, prefix, prefix_tokens)
        else:
            session.begin_s += pause_s
        prompt, output, ends_session = (
            check.tokens("input_tokens"),
            check.tokens("output_tokens"),
            check.is_true("ends_session"),
        )
        rows.append(_Row(session.begin_s, session, prompt, output, pause_s, ends_session))
        _check_count(rows, name, line)
    yield from _paced(rows)


def read_claude_code(lines: Iterable[NumberedLine], name: str) -> Iterator[TraceRequest]:
    """Rows of other kinds than messages are skipped. Raises TraceError at an answer without lengths or times."""
    sessions: dict[str, _Session] = {}
    asked_s: dict[str, float] = {}  # the last row before an answer
    ended_s: dict[str, float] = {}  # the last row of an answer
    answered: dict[str, str] = {}  # by session, the answer whose rows are being read: each of its parts has one
    rows: list[_Row] = []
    for line, text in lines:
        given = json_row(text, name, line)
        kind, message = given.get("type"), given.get("message")
        if kind not in ("user", "assistant") or not isinstance(message, dict):
            continue
        agent = str(given.get("agentId") or "side") if given.get("isSidechain") is True else ""
        key = f"{given.get('sessionId')} {agent}"
        stamp = given.get("timestamp")
        at_s = date_s(stamp) if isinstance(stamp, str) and len(stamp) <= 64 else None
        if at_s is None:
            raise TraceError(name, line, "timestamp", stamp, "a date and time of ISO 8601")
        usage = message.get("usage")
        if kind == "user" or not isinstance(usage, dict):
            asked_s[key] = at_s
            continue
        answer = str(message.get("id"))
        if answered.get(key) == answer:
            ended_s[key] = at_s
            if rows and rows[-1].session is sessions.get(key):  # the last part has all of the tokens
                output = _Checked(usage, name, line).tokens("output_tokens", least=0)
                rows[-1] = replace(rows[-1], output_tokens=max(rows[-1].output_tokens, output))
            continue
        check = _Checked(usage, name, line)
        prompt = sum(check.tokens(one, least=0) for one in _INPUTS)
        output = max(1, check.tokens("output_tokens", least=0))
        answered[key] = answer
        began_s = asked_s.get(key, at_s)
        session = sessions.get(key)
        pause_s = 0.0
        if session is None:
            session = sessions[key] = _Session(_name(sessions), began_s)
        else:
            pause_s = max(0.0, began_s - ended_s[key])
            session.begin_s += pause_s
        ended_s[key] = at_s
        if prompt:  # an answer without a prompt is an error of the service
            rows.append(_Row(session.begin_s, session, min(prompt, MAX_TOKENS), output, pause_s))
            _check_count(rows, name, line)
    yield from _paced(rows)


def _paced(rows: list[_Row]) -> Iterator[TraceRequest]:
    """In order of the arrivals that they have if answers take no time; those of a session never change places."""
    rows.sort(key=lambda one: one.at_s)
    first_s = rows[0].at_s if rows else 0.0
    ids = count()
    prefixes: dict[str, list[int]] = {}
    for number, row in enumerate(rows):
        session = row.session
        if row.input_tokens < session.prompt_tokens or session.last is None:
            shared = prefixes.setdefault(session.prefix, []) if session.prefix else []
            wanted = min(session.prefix_tokens, row.input_tokens) // SESSION_BLOCK_TOKENS
            shared += [next(ids) for _ in range(wanted - len(shared))]
            session.ids = shared[:wanted]
        missing = -(-row.input_tokens // SESSION_BLOCK_TOKENS) - len(session.ids)
        session.ids += [next(ids) for _ in range(missing)]
        yield TraceRequest(
            arrival_s=row.at_s - first_s,
            prompt_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
            block_ids=tuple(session.ids),
            follows=session.last,
            pause_s=row.pause_s,
            session=session.name,
            ends_session=row.ends_session,
        )
        session.last, session.prompt_tokens = number, row.input_tokens


def _name(sessions: Mapping[str, _Session]) -> str:
    return f"s{len(sessions) + 1}"


def _check_count(rows: list[_Row], name: str, line: int) -> None:
    if len(rows) > MAX_SESSION_TURNS:
        raise TraceError(name, line, "row", f"{len(rows)} turns", f"at most {MAX_SESSION_TURNS}")


@dataclass(frozen=True, slots=True)
class _Checked:
    """Values of a row. Each method raises TraceError."""

    given: Mapping[str, Any]
    trace: str
    line: int

    def seconds(self, column: str) -> float:
        value = self.given.get(column, 0.0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or not 0.0 <= value <= MAX_SPAN_S:
            raise TraceError(self.trace, self.line, column, value, f"seconds from 0 to {MAX_SPAN_S:.0f}")
        return float(value)

    def tokens(self, column: str, *, least: int = 1) -> int:
        value = self.given.get(column) if least else self.given.get(column) or 0
        return check_tokens(value, self.trace, self.line, column, least=least)

    def name(self, column: str) -> str:
        value = self.given.get(column, "")
        if not isinstance(value, str) or len(value) > MAX_NAME_CHARS:
            raise TraceError(self.trace, self.line, column, value, f"a text of at most {MAX_NAME_CHARS} characters")
        return value

    def is_true(self, column: str) -> bool:
        value = self.given.get(column, False)
        if not isinstance(value, bool):
            raise TraceError(self.trace, self.line, column, value, "true or false")
        return value
