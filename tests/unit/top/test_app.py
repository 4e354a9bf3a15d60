"""The terminal's screen, driven with keys, in 80 columns and 24 lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static
from textual.widgets._footer import FooterKey

from pdserve import AsyncClient
from pdserve.client.results import Explanation
from pdserve.core.errors import NotFound, Unavailable
from pdserve.core.live import LiveFrame, LiveRequest, LogLine
from pdserve.testing import Cluster
from pdserve.top.app import Details, RecordingSource, RouterSource, TopApp
from pdserve.top.text import LEGEND, LETTERS
from tests.unit.top.given import ended, frame, request, worker

WAIT_S = 60.0


class FakeSource:
    """Frames from a queue; None ends them, and an error is raised."""

    name = "router:1"
    is_live = True

    def __init__(self) -> None:
        self.queue: asyncio.Queue[LiveFrame | Exception | None] = asyncio.Queue()
        self.drained: list[tuple[str, bool]] = []

    async def frames(self) -> AsyncIterator[LiveFrame]:
        while (item := await self.queue.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item

    async def explain(self, request_id: str) -> Explanation:
        raise NotFound("recent request", request_id)

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        return (LogLine(at_unix_s=1.8e9, level="WARNING", text=f"{worker_id} [b]is slow[/b]"),)

    async def drain(self, worker_id: str, *, is_drained: bool) -> None:
        self.drained.append((worker_id, is_drained))


def shown(app: TopApp, name: str) -> str:
    return str(app.screen_stack[0].query_one(f"#{name}", Static).content)


def rows(app: TopApp, name: str) -> list[list[str]]:
    table: DataTable[Any] = app.screen_stack[0].query_one(f"#{name}", DataTable)
    return [[str(cell) for cell in table.get_row(key)] for key in table.rows]


async def until(pilot: Pilot[Any], holds: Any) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds():
            await pilot.pause(0.01)


async def test_the_footer_and_the_legend_name_every_key_and_phase() -> None:
    app = TopApp(FakeSource())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: len(app.query("FooterKey")) >= 6)
        keys = list(app.query(FooterKey))
        assert [one.description for one in keys if one.key == "enter"] == ["details"]
        assert [one.description for one in keys if one.key == "tab"] == ["next table"]
        assert max(one.region.right for one in keys) <= 80
        assert set(LETTERS.values()) == {part.strip()[0] for part in LEGEND.split("  ")}
        assert "- messages" in shown(app, "legend")
        await pilot.press("tab")
        assert app.focused is app.query_one("#workers")


async def test_a_frame_fills_the_screen() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        assert "connecting" in shown(app, "head")
        source.queue.put_nowait(frame(100.0, request("abcdefghij"), ended("z", 99.0, "rejected", why="too late")))
        await until(pilot, lambda: "live" in shown(app, "head"))
        assert [row[:3] for row in rows(app, "workers")] == [["d0", "decode", "ready"], ["p0", "prefill", "ready"]]
        assert [row[:2] for row in rows(app, "requests")] == [["abcdefgh", "decoding"], ["z", "rejected"]]
        assert "too late" in shown(app, "notes")
        assert "rejected 1" in shown(app, "tiles")


async def test_the_head_names_versions() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        workers = (replace(worker("d0"), version="0.1.0+b"), replace(worker("p0"), version="0.1.0+a"))
        source.queue.put_nowait(replace(frame(100.0, workers=workers), version="0.1.0+a"))
        await until(pilot, lambda: "version" in shown(app, "head"))
        assert shown(app, "head") == "pdserve  router:1  live  version 0.1.0+a, d0 0.1.0+b"


@pytest.mark.parametrize("name", ["[/x]", "a/[/x]", "[b]x[/b]", "[red"])
async def test_ids_are_shown_unchanged(name: str) -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0, request(name), workers=(worker(name),)))
        await until(pilot, lambda: rows(app, "requests"))
        await pilot.pause()
        assert (rows(app, "requests")[0][0], rows(app, "workers")[0][0]) == (name[:8], name)


async def test_requests_with_the_same_id_have_separate_rows() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0, request("a", arrived_s=99.5), ended("a", 99.0, arrived_s=98.0)))
        await until(pilot, lambda: len(rows(app, "requests")) == 2)
        assert [row[:2] for row in rows(app, "requests")] == [["a", "decoding"], ["a", "served"]]
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Details))


async def test_keys_pause_drain_resume_and_quit() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0))
        await until(pilot, lambda: rows(app, "workers"))
        await pilot.press("p")
        source.queue.put_nowait(frame(101.0, workers=(worker("d0"),)))
        await until(pilot, source.queue.empty)
        assert "paused" in shown(app, "head")
        assert len(rows(app, "workers")) == 2
        await pilot.press("p")
        assert len(rows(app, "workers")) == 1
        await pilot.press("d")
        await pilot.press("r")
        assert source.drained == [("d0", True), ("d0", False)]
        await pilot.press("q")
    assert app.return_value == 0


async def test_the_cursor_stays_on_its_request() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0, request("a", arrived_s=1.0), request("b", arrived_s=2.0)))
        await until(pilot, lambda: len(rows(app, "requests")) == 2)
        await pilot.press("down")
        source.queue.put_nowait(frame(101.0, request("c", arrived_s=0.5), request("b", arrived_s=2.0)))
        await until(pilot, lambda: rows(app, "requests")[0][0] == "c")
        table: DataTable[Any] = app.query_one("#requests", DataTable)
        assert table.cursor_row == 1


async def test_the_first_request_stays_selected_until_another_is() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        table: DataTable[Any] = app.query_one("#requests", DataTable)

        async def draw(at_s: float, *requests: LiveRequest) -> list[str]:
            source.queue.put_nowait(frame(at_s, *requests))
            await until(pilot, lambda: str(rows(app, "requests")[:1]).startswith(f"[['{requests[0].request_id}'"))
            return [row[0] for row in rows(app, "requests")]

        await draw(100.0, request("a"), request("b", arrived_s=101.0))
        assert await draw(101.0, request("b", arrived_s=101.0), ended("a", 100.5)) == ["b", "a"]
        assert table.cursor_row == 0
        await pilot.press("down")
        assert await draw(102.0, request("c", arrived_s=101.5), ended("b", 101.8)) == ["c", "b", "a"]
        assert table.cursor_row == 2


async def test_a_long_note_takes_one_line() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0, ended("a", 99.0, "rejected", why="too late " * 20)))
        await until(pilot, lambda: "too late" in shown(app, "notes"))
        await pilot.pause()
        assert app.query_one("#notes", Static).size.height == 1


async def test_enter_shows_the_log_of_a_worker() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0, request("a")))
        await until(pilot, lambda: len(rows(app, "workers")) == 2)
        await pilot.press("tab", "enter")
        await until(pilot, lambda: isinstance(app.screen, Details) and app.screen.query("#details"))
        details = str(app.screen.query_one("#details", Static).content)
        assert details == "08:00:00Z WARNING  d0 [b]is slow[/b]"


async def test_enter_explains_a_request_and_escape_closes_it() -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(frame(100.0, request("a")))
        await until(pilot, lambda: rows(app, "requests"))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, Details))
        await until(pilot, lambda: app.screen.query("#details"))
        assert "recent request" in str(app.screen.query_one("#details", Static).content)
        source.queue.put_nowait(frame(101.0, request("a"), request("b")))  # the view behind continues
        await until(pilot, lambda: len(rows(app, "requests")) == 2)
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, Details))


@pytest.mark.parametrize(("end", "expected"), [(None, "ended the stream"), (Unavailable("no answer"), "no answer")])
async def test_the_end_of_the_stream_is_shown(end: Exception | None, expected: str) -> None:
    source = FakeSource()
    app = TopApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        source.queue.put_nowait(end)
        await until(pilot, lambda: expected in shown(app, "head"))


async def test_a_recording_is_played_to_its_end() -> None:
    app = TopApp(RecordingSource("run.jsonl", [frame(1.0), frame(1.01, request("a"))], {}))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "end of the recording" in shown(app, "head"))
        assert [row[0] for row in rows(app, "requests")] == ["a"]
        await pilot.press("d")
        await until(pilot, lambda: "recording" in shown(app, "notes"))


async def test_a_live_cluster_is_watched() -> None:
    with Cluster(prefill=1) as cluster:
        async with AsyncClient(cluster.address) as client:
            app = TopApp(RouterSource(client, cluster.address))
            async with app.run_test(size=(80, 24)) as pilot:
                done = await client.generate("watched in a terminal", max_tokens=4)
                expected = [done.request_id[:8], "served"]
                await until(pilot, lambda: expected in [row[:2] for row in rows(app, "requests")])
                await pilot.press("enter")
                await until(pilot, lambda: isinstance(app.screen, Details) and app.screen.query("#details"))
                assert "decision" in str(app.screen.query_one("#details", Static).content)
