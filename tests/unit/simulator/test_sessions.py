"""Traces of sessions: pdserve's own form, and Claude Code's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simulator.model import TraceError, TraceRequest
from simulator.traces import sessions
from simulator.traces.files import FileTrace

BLOCK = sessions.SESSION_BLOCK_TOKENS


def written(folder: Path, *rows: Any) -> FileTrace:
    path = folder / "sessions.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return FileTrace(path)


def row(session: str, at_s: float, tokens: int, **fields: Any) -> dict[str, Any]:
    return {"session": session, "at_s": at_s, "input_tokens": tokens, "output_tokens": 5, **fields}


def test_turns_follow_each_other(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        row("a", 100.0, 200, prefix="tools", prefix_tokens=130),
        row("b", 101.0, 150, prefix="tools", prefix_tokens=130),
        row("a", 103.0, 300, pause_s=0.5),
        row("b", 103.5, 300, pause_s=9.0),
        row("a", 104.0, 130, pause_s=0.1, ends_session=True),  # a compaction
    )
    assert (trace.block_tokens, trace.format.name, trace.format.has_sessions) == (BLOCK, "sessions JSONL", True)
    found = list(trace)
    assert found[:2] == [
        TraceRequest(arrival_s=0.0, prompt_tokens=200, output_tokens=5, block_ids=(0, 1, 2, 3), session="s1"),
        TraceRequest(
            arrival_s=0.5,
            prompt_tokens=300,
            output_tokens=5,
            block_ids=(0, 1, 2, 3, 4),
            follows=0,
            pause_s=0.5,
            session="s1",
        ),
    ]
    assert [(one.session, one.ends_session) for one in found[2:]] == [("s1", True), ("s2", False), ("s2", False)]
    shortened = found[2]
    assert (shortened.arrival_s, shortened.follows, shortened.pause_s) == (pytest.approx(0.6), 1, 0.1)
    assert shortened.block_ids[:2] == (0, 1)
    assert shortened.block_ids[2] > 4
    assert found[3].block_ids[:2] == (0, 1)
    assert (found[4].follows, found[4].arrival_s) == (3, 10.0)
    assert [one.arrival_s for one in found] == sorted(one.arrival_s for one in found)
    assert list(trace) == found


@pytest.mark.parametrize(
    ("given", "column"),
    [
        (row("a", -1.0, 5), "at_s"),
        (row("a", float("nan"), 5), "at_s"),
        (row("a", True, 5), "at_s"),
        (row("a", 1.0, 0), "input_tokens"),
        (row("a", 1.0, 5, pause_s="x"), "pause_s"),
        (row("a", 1.0, 5, prefix_tokens=-1), "prefix_tokens"),
        (row("a" * 300, 1.0, 5), "session"),
        (row("a", 1.0, 10**9), "input_tokens"),
        (row("a", 1.0, 5, text="x"), "text"),
        (row("a", 1.0, 5, ends_session=1), "ends_session"),
        ({"session": "a", "at_s": 1.0}, "input_tokens"),
        ("[]", "row"),
        ("{" * 5000, "row"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, given: Any, column: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(written(tmp_path, row("a", 0.0, 5), given))
    assert (caught.value.line, caught.value.column) == (2, column)


def test_turns_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSION_TURNS", 2)
    with pytest.raises(TraceError, match="at most 2"):
        list(written(tmp_path, *[row("a", 0.0, 5)] * 3))


# --- Claude Code --------------------------------------------------------------------------------------------------


def said(kind: str, at: str, *, session: str = "s", **fields: Any) -> dict[str, Any]:
    message = {"role": kind, "content": "secret", **fields.pop("message", {})}
    return {"type": kind, "sessionId": session, "timestamp": f"2026-01-01T00:00:{at}Z", "message": message, **fields}


def answered(at: str, name: str, fresh: int, cached: int, output: int, **fields: Any) -> dict[str, Any]:
    usage = {
        "input_tokens": fresh,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": output,
    }
    return said("assistant", at, message={"id": name, "usage": usage}, **fields)


def test_claude_codes_sessions_are_read(tmp_path: Path) -> None:
    trace = written(
        tmp_path,
        {"type": "queue-operation", "timestamp": "2026-01-01T00:00:00Z", "sessionId": "s", "content": "x"},
        said("user", "01"),
        answered("03", "m1", 1000, 0, 1),
        answered("04", "m1", 1000, 0, 50),  # the next part of the same answer
        said("user", "09"),  # a tool's result
        answered("10", "m2", 10, 1050, 20),
        said("user", "06", isSidechain=True, agentId="x"),
        answered("07", "m3", 300, 0, 7, isSidechain=True, agentId="x"),
        said("user", "30", session="t"),
        answered("31", "m4", 0, 0, 0, session="t"),  # an error of the service
        {"type": "system", "content": "x"},
    )
    assert trace.format.name == "Claude Code JSONL"
    found = list(trace)
    assert [(one.arrival_s, one.prompt_tokens, one.output_tokens, one.follows, one.pause_s) for one in found] == [
        (0.0, 1000, 50, None, 0.0),
        (5.0, 1060, 20, 0, 5.0),
        (5.0, 300, 7, None, 0.0),
    ]
    assert found[1].block_ids[: len(found[0].block_ids)] == found[0].block_ids


@pytest.mark.parametrize(
    ("given", "column"),
    [
        (said("user", "xx"), "timestamp"),
        (answered("01", "m", -1, 0, 1), "input_tokens"),
        (answered("01", "m", 1, 0, 10**9), "output_tokens"),
        ("x", "row"),
    ],
)
def test_a_wrong_row_of_claude_code_is_named(tmp_path: Path, given: Any, column: str) -> None:
    with pytest.raises(TraceError) as caught:
        list(written(tmp_path, {"type": "summary", "leafUuid": "1"}, given))
    assert (caught.value.line, caught.value.column) == (2, column)
