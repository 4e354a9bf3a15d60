"""The screen of `pdserve top`: tiles, workers, requests and notes, and where its frames come from. Fits 80 columns and
24 lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, ClassVar, Final, Protocol, final

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Static

from pdserve.client.aio import AsyncClient
from pdserve.client.results import Explanation
from pdserve.core.errors import InvalidRequest, NotFound, PdserveError
from pdserve.core.live import LiveFrame, LogLine
from pdserve.top import text
from pdserve.top.text import History

# --- sources --------------------------------------------------------------------------------------------------
# A router, or a recording that is played.

PERIOD_S: Final = 0.5


class FrameSource(Protocol):
    name: str
    is_live: bool

    def frames(self) -> AsyncIterator[LiveFrame]:
        """Raises PdserveError if the router cannot be watched."""
        ...

    async def explain(self, request_id: str) -> Explanation:
        """Raises NotFound."""
        ...

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        """Raises PdserveError if it cannot be read."""
        ...

    async def drain(self, worker_id: str, *, is_drained: bool) -> None: ...


@final
class RouterSource:
    is_live = True

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.name = name
        self._client = client

    async def frames(self) -> AsyncIterator[LiveFrame]:
        async with aclosing(self._client.watch(PERIOD_S)) as frames:
            async for one in frames:
                yield one

    async def explain(self, request_id: str) -> Explanation:
        return await self._client.explain(request_id)

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        return await self._client.worker_log(worker_id)

    async def drain(self, worker_id: str, *, is_drained: bool) -> None:
        await (self._client.drain(worker_id) if is_drained else self._client.undrain(worker_id))


@final
class RecordingSource:
    is_live = False

    def __init__(
        self, name: str, frames: Sequence[LiveFrame], explanations: Mapping[str, Explanation], speed: float = 1.0
    ) -> None:
        self.name = name
        self._frames, self._explanations, self._speed = frames, explanations, speed

    async def frames(self) -> AsyncIterator[LiveFrame]:
        before_s: float | None = None
        for one in self._frames:
            if before_s is not None:
                await asyncio.sleep(max(one.at_s - before_s, 0.0) / self._speed)
            before_s = one.at_s
            yield one

    async def explain(self, request_id: str) -> Explanation:
        found = self._explanations.get(request_id)
        if found is None:
            raise NotFound("recorded request", request_id)
        return found

    async def worker_log(self, worker_id: str) -> Sequence[LogLine]:
        raise NotFound("recorded log of worker", worker_id)

    async def drain(self, worker_id: str, *, is_drained: bool) -> None:
        raise InvalidRequest("worker", worker_id, "a running cluster: this is a recording")


# --- screen ---------------------------------------------------------------------------------------------------

WINDOW_S: Final = 10.0
BAR_CHARS: Final = 24
MAX_ROWS: Final = 200
MAX_WORKERS_SHOWN: Final = 8  # further ones scroll
_COLORS: Final = {"P": "dark_orange", "T": "magenta", "D": "dodger_blue1", "x": "red", "!": "red"}
_WORKERS: Final = ("worker", "role", "state", "run", "wait", "KV", "step")
_REQUESTS: Final = ("request", "state", "placement", "tokens", "TTFT", f"last {WINDOW_S:.0f} s")


@final
class Details(ModalScreen[None]):
    """A page of text over the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,enter,q", "dismiss", "close")]
    DEFAULT_CSS = (
        "Details { align: center middle; } Details > VerticalScroll { width: 90%; height: 80%; border: solid; }"
    )

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self._lines = lines

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(Text("\n".join(self._lines)), id="details")


class Table(DataTable[Any]):
    """The footer shows the keys of the focused table."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "details"),
        Binding("tab", "app.focus_next", "next table"),
    ]


@final
class TopApp(App[int]):
    TITLE = "pdserve top"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #head, #tiles, #notes, #legend { height: auto; padding: 0 1; text-wrap: nowrap; text-overflow: ellipsis; }
    #workers { height: auto; } #requests { height: 1fr; }
    DataTable > .datatable--header { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "leave", "quit"),
        Binding("p,space", "pause", "pause"),
        Binding("d", "drain(True)", "drain worker"),
        Binding("r", "drain(False)", "resume worker"),
    ]

    def __init__(self, source: FrameSource) -> None:
        super().__init__()
        self._source = source
        self._history = History()
        self._is_paused = False
        self._status = "connecting"
        self._message = ""
        self._ids: dict[str, str] = {}  # of the requests that are shown, by the key of their row

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="tiles")
        yield Table(id="workers", cursor_type="row")
        yield Table(id="requests", cursor_type="row")
        yield Static(text.LEGEND, id="legend")
        yield Static(id="notes")
        yield Footer()

    def on_mount(self) -> None:
        for table, names in ((self._worker_table, _WORKERS), (self._request_table, _REQUESTS)):
            for name in names:
                table.add_column(name, key=name)
        self._worker_table.styles.max_height = MAX_WORKERS_SHOWN + 1
        self._request_table.focus()
        self._draw()
        self.run_worker(self._follow(), exclusive=True)

    # -- frames ----------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        try:
            async for frame in self._source.frames():
                self._history.ingest(frame)
                self._status = "live" if self._source.is_live else "playback"
                if not self._is_paused:
                    self._draw()
            self._status = "the router has ended the stream" if self._source.is_live else "end of the recording"
        except PdserveError as error:
            self._status = f"lost: {error.message}"
        self._draw()

    def _draw(self) -> None:
        if not self.screen_stack or not self.screen_stack[0].query("#notes"):  # it is being closed
            return
        frame, tiles = self._history.frame, self._history.tiles()
        status = "paused" if self._is_paused else self._status
        versions = "" if frame is None else text.frame_versions(frame)
        self._static("head").update(Text(f"pdserve  {self._source.name}  {status}  {versions}", style="bold"))
        if frame is None or tiles is None:
            return
        self._static("tiles").update(Text("\n".join(text.tile_lines(tiles))))
        self._fill(self._worker_table, [(one.worker_id, text.worker_row(one)) for one in frame.workers])
        shown = self._history.requests()[:MAX_ROWS]
        by_key = {f"{one.arrived_s} {one.request_id}": one for one in shown}  # later requests may use an id again
        self._ids = {key: one.request_id for key, one in by_key.items()}
        rows = [(key, text.request_row(one, frame.at_s, WINDOW_S, BAR_CHARS)) for key, one in by_key.items()]
        self._fill(self._request_table, [(key, (*row[:-1], _colored(row[-1]))) for key, row in rows])
        notes = [f"{frame.at_s - one.at_s:4.0f} s ago  {one.text}" for one in list(self._history.notes)[-2:]]
        lines = [self._message] if self._message else notes
        self._static("notes").update(Text("\n".join(lines)))

    def _fill(self, table: DataTable[Any], rows: list[tuple[str, tuple[Any, ...]]]) -> None:
        """Replaces the rows and keeps the cursor on its row."""
        keys = [key.value for key in table.rows]
        # The top row stays selected until the user selects another one. If its request stayed selected instead, the
        # screen would scroll with it as it moves down. A worker stays selected, because `d` drains the selected one.
        first = 1 if table is self._request_table else 0
        at = keys[table.cursor_row] if first <= table.cursor_row < len(keys) else None
        scroll = table.scroll_y
        table.clear()
        for key, cells in rows:
            # As Text, because a plain string would be parsed as markup, and callers choose the ids.
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), key=key)
        names = [key for key, _ in rows]
        if at in names:
            table.move_cursor(row=names.index(at), animate=False, scroll=False)
        table.scroll_to(y=scroll, animate=False)

    # -- commands --------------------------------------------------------------------------------------------------

    def action_leave(self) -> None:
        self.exit(0)

    def action_pause(self) -> None:
        self._is_paused = not self._is_paused
        self._draw()

    async def action_drain(self, is_drained: bool) -> None:
        keys = [key.value for key in self._worker_table.rows]
        if not keys:
            return
        worker_id = str(keys[max(self._worker_table.cursor_row, 0)])
        try:
            await self._source.drain(worker_id, is_drained=is_drained)
            self._message = f"{worker_id}: {'drains' if is_drained else 'resumes'}"
        except PdserveError as error:
            self._message = error.message
        self._draw()
        self.set_timer(5.0, self._forget_message)

    def _forget_message(self) -> None:
        self._message = ""

    async def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        name = str(event.row_key.value)
        try:
            if event.data_table is not self._request_table:
                lines = text.log_lines(await self._source.worker_log(name))
            elif (request_id := self._ids.get(name)) is not None:
                lines = text.explanation_lines(await self._source.explain(request_id))
            else:  # the row has just disappeared
                return
        except PdserveError as error:
            lines = [error.message]
        self.push_screen(Details(lines))

    # -- widgets ---------------------------------------------------------------------------------------------------

    def _static(self, name: str) -> Static:
        return self.screen_stack[0].query_one(f"#{name}", Static)

    @property
    def _worker_table(self) -> DataTable[Any]:
        return self.screen_stack[0].query_one("#workers", DataTable)

    @property
    def _request_table(self) -> DataTable[Any]:
        return self.screen_stack[0].query_one("#requests", DataTable)


def _colored(bar: str) -> Text:
    found = Text(no_wrap=True)
    for letter in bar:
        found.append(letter, _COLORS.get(letter, ""))
    return found
