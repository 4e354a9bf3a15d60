"""Quotas that several routers share through a file."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from pdserve.core.access.key_file import Tenant
from pdserve.core.errors import ConfigError, Overloaded, QuotaExceeded
from router.service import router_group
from router.service.router_group import SharedCountsFile
from router.service.tenants import AnswerClaim, Quotas

ACME = Tenant(name="acme", tokens_per_minute=600, max_concurrent=3)  # ten tokens per second
MINUTE_S = 60.0


@pytest.fixture
def files(tmp_path: Path) -> Iterator[list[SharedCountsFile]]:
    found = [SharedCountsFile(tmp_path, member) for member in range(3)]
    yield found
    for one in found:
        one.close()


@pytest.fixture
def routers(files: list[SharedCountsFile]) -> list[Quotas]:
    return [Quotas(MINUTE_S, one.counts_of) for one in files]


def begin(quotas: Quotas, prompt: int, most: int, now_s: float = 0.0, tenant: Tenant = ACME) -> AnswerClaim:
    claim = quotas.open(tenant, now_s)
    try:
        claim.admit(prompt, (most,), now_s)
        return claim.take()
    finally:
        claim.close(now_s)


def test_all_routers_take_tokens_from_one_bucket(routers: list[Quotas]) -> None:
    first, second, third = routers
    answer = begin(first, 100, 50)
    begin(second, 200, 50)
    assert second.level("acme", 0.0) == 600 - 150 - 250
    assert first.level("acme", 10.0) == 600 - 150 - 250 + 100
    answer.end(is_free=True)
    assert second.level("acme", 10.0) == 600 - 250 + 100
    with pytest.raises(QuotaExceeded, match="450 tokens are left, and the request needs 500"):
        begin(third, 400, 100, 10.0)


def test_answers_in_progress_count_in_all_routers(routers: list[Quotas]) -> None:
    first, second, third = routers
    begin(first, 1, 1)
    answer = begin(second, 1, 1)
    begin(third, 1, 1)
    for quotas in routers:
        with pytest.raises(QuotaExceeded, match="3 of 3 answers are in progress"):
            begin(quotas, 1, 1)
    answer.release(1.0)
    begin(first, 1, 1)
    assert [one.running("acme") for one in routers] == [2, 0, 1]
    assert [one.all_running() for one in routers] == [{"acme": 2}, {"acme": 0}, {"acme": 1}]


def test_the_answers_of_a_crashed_router_count_until_it_starts_again(
    routers: list[Quotas], files: list[SharedCountsFile], tmp_path: Path
) -> None:
    for quotas in routers:
        begin(quotas, 1, 1)
    with pytest.raises(QuotaExceeded):
        begin(routers[0], 1, 1)
    files[2].close()
    successor = SharedCountsFile(tmp_path, 2)
    begin(routers[0], 1, 1)
    with pytest.raises(QuotaExceeded):
        begin(Quotas(MINUTE_S, successor.counts_of), 1, 1)
    successor.close()


def test_two_running_routers_never_have_one_number(routers: list[Quotas], tmp_path: Path) -> None:
    begin(routers[2], 1, 1)
    with pytest.raises(ConfigError, match=r"member: got 2, expected a number that no running router in .* has"):
        SharedCountsFile(tmp_path, 2)
    for _ in range(2):
        begin(routers[0], 1, 1)
    with pytest.raises(QuotaExceeded, match="3 of 3 answers"):
        begin(routers[0], 1, 1)


def hold(folder: Path) -> int:
    descriptor = os.open(folder / router_group.FILE, os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_calls_are_rejected_while_a_stopped_router_has_the_lock(
    routers: list[Quotas], files: list[SharedCountsFile], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, _ = routers
    answers = [begin(first, 100, 50, 1.0) for _ in range(2)]
    stopped = hold(tmp_path)
    for _ in range(3):
        with pytest.raises(Overloaded, match="does not release the counts") as caught:
            begin(first, 1, 1, 1.0)
        assert not isinstance(caught.value, QuotaExceeded)
        assert caught.value.retry_after_s == router_group.LOCK_RETRY_S
    for one in answers:
        one.emitted(10)
        one.end(is_free=False)
        one.release(1.0)
    assert first.running("acme") == 0
    assert len([one for one in caplog.records if "locked" in one.message]) == 1, "logged once"
    os.close(stopped)
    claims = [begin(second, 1, 1, 1.0)]
    with pytest.raises(QuotaExceeded, match="3 of 3 answers"):
        [begin(second, 1, 1, 1.0) for _ in range(2)]
    begin(first, 1, 1, 1.0, Tenant(name="other", max_concurrent=1)).release(1.0)  # writes the rest
    claims += [begin(second, 1, 1, 1.0)]
    assert second.level("acme", 1.0) == 600 - 2 * (100 + 10) - 4


async def test_what_ended_meanwhile_is_written_without_a_further_call(
    routers: list[Quotas], files: list[SharedCountsFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_group, "WRITE_CHECK_S", 0.01)
    answers = [begin(routers[0], 1, 1) for _ in range(3)]
    stopped = hold(tmp_path)
    answers[0].release(1.0)
    writing = asyncio.create_task(files[0].keep_written())
    assert files[0].unwritten
    os.close(stopped)
    async with asyncio.timeout(60.0):
        while files[0].unwritten:
            await asyncio.sleep(0.005)
    begin(routers[1], 1, 1)
    writing.cancel()


def test_new_limits_apply_in_all_routers(routers: list[Quotas]) -> None:
    first, second, _ = routers
    begin(first, 590, 10)
    less = Tenant(name="acme", tokens_per_minute=300)
    for quotas in (first, second):
        begin(quotas, 1, 1, 30.0, less)
    assert second.level("acme", 30.0) == 300 - 4, "of the 300 tokens that came back"
    none = Tenant(name="acme")
    begin(first, 1000, 1000, 30.0, none)
    begin(second, 1000, 1000, 30.0, none)
    for quotas in (first, second):
        begin(quotas, 1, 1, 30.0, less)
    assert first.level("acme", 30.0) == 300 - 4, "a bucket of a new limit is full, once"


def test_rows_of_idle_tenants_are_used_again(routers: list[Quotas], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_group, "MAX_ROWS", 2)
    first, second, _ = routers
    names = [Tenant(name=name, tokens_per_minute=600, max_concurrent=3) for name in ("a", "b", "c", "d")]
    begin(first, 10, 10, 1.0, names[0]).release(1.0)
    kept = begin(second, 10, 10, 0.5, names[1])
    begin(second, 10, 10, 2.0, names[2])
    assert first.level("b", 2.0) is None
    assert second.level("b", 0.5) == 580
    with pytest.raises(Overloaded, match="2 tenants have answers in progress"):
        begin(first, 10, 10, 3.0, names[0])
    kept.release(3.0)
    begin(first, 10, 10, 3.0, names[0]).release(3.0)
    assert first.level("a", 3.0) == 580, "its row was another one's meanwhile"


def contend(folder: Path, member: int, start: Barrier, calls: int) -> None:
    file = SharedCountsFile(folder, member)
    quotas = Quotas(MINUTE_S, file.counts_of)
    start.wait()
    admitted = most = 0
    for number in range(calls):
        try:
            answer = begin(quotas, 3, 2)
        except QuotaExceeded:
            continue
        admitted += 1
        counts = quotas._accounts["acme"].counts
        most = max(most, counts.running + counts.others)
        if number % 3:
            answer.emitted(2)
            answer.release(0.0)
    assert most <= 3, most
    Path(folder, f"admitted-{member}").write_text(f"{admitted} {quotas.running('acme')}")


def test_processes_that_call_at_the_same_time_never_exceed_a_quota(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_group, "LOCK_S", 30.0)  # on a busy machine, a process may lose its core with the lock
    context = multiprocessing.get_context("fork")
    start = context.Barrier(4)
    processes = [context.Process(target=contend, args=(tmp_path, one, start, 400)) for one in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60.0)
    assert [process.exitcode for process in processes] == [0] * 4
    results = [Path(tmp_path, f"admitted-{one}").read_text().split() for one in range(4)]
    admitted, running = (sum(int(one[at]) for one in results) for at in (0, 1))
    file = SharedCountsFile(tmp_path, 31)
    left = Quotas(MINUTE_S, file.counts_of)
    counts = file.counts_of("acme")
    with counts:
        assert counts.others == running == 3
        assert counts.level == 600 - 5 * admitted, "no charge is lost"
    assert left.running("acme") == 0
    file.close()
