"""A worker's log, read by the router on its Attach stream."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pdserve.core.errors import NotFound, Unavailable
from pdserve.core.live import MAX_LINES
from pdserve.v1 import worker_pb2
from router.service import worker_reports
from router.service.worker_reports import WorkerLogs
from tests.unit.router_io.conftest import Connect
from tests.unit.router_io.processes import Program

LINES = [worker_pb2.LogLine(at_unix_s=number, level="INFO", text=f"line {number}") for number in range(MAX_LINES + 1)]


async def test_a_real_worker_sends_its_last_lines(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    [worker] = (await front.client.topology()).workers
    lines = await front.client.worker_log(worker.worker_id)
    assert [one.at_unix_s for one in lines] == sorted(one.at_unix_s for one in lines)
    assert any("worker is ready" in one.text and worker.worker_id in one.text for one in lines)
    assert any("router attached" in one.text for one in lines)
    with pytest.raises(NotFound, match="nobody"):
        await front.client.worker_log("nobody")


async def test_callers_share_an_answer() -> None:
    sent: list[str] = []

    def send(worker_id: str, message: worker_pb2.AttachRequest) -> bool:
        assert message.HasField("read_log")
        sent.append(worker_id)
        return True

    logs = WorkerLogs(send)
    asking = [asyncio.create_task(logs.read("d0")) for _ in range(3)]
    gone = asyncio.create_task(logs.read("d0"))
    await asyncio.sleep(0)
    gone.cancel()  # a caller that leaves takes nothing from the others
    await asyncio.sleep(0)
    logs.reported("d0", LINES)
    answers: list[Sequence[worker_pb2.LogLine]] = await asyncio.gather(*asking)
    assert sent == ["d0"]
    assert all(one == LINES[1:] for one in answers)
    logs.reported("d0", LINES)  # of an answer without a request


async def test_a_worker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_reports, "ANSWER_S", 0.01)
    is_connected, sent = True, []

    def send(worker_id: str, message: worker_pb2.AttachRequest) -> bool:
        sent.append(worker_id)
        return is_connected

    logs = WorkerLogs(send)
    for _ in range(2):  # and the log is requested again
        with pytest.raises(Unavailable, match="did not answer"):
            await logs.read("d0")
    assert sent == ["d0", "d0"]
    is_connected = False
    with pytest.raises(Unavailable, match="not connected"):
        await logs.read("d0")
