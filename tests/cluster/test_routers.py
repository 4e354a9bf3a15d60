"""`pdserve up --routers 2`: two routers behind one port answer as one."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from pdserve import Client
from pdserve.cli.main import main
from pdserve.client.retries import Retries
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.errors import PdserveError, QuotaExceeded
from tests.cluster.cluster import Cluster

pytestmark = pytest.mark.timeout(300)

NAMES = ("router-0", "router-1")
TOKEN = "the-token-of-this-operator"
KEY = make_key(bytes(32))
MOST = 4  # answers of the tenant in progress
WITHIN_S = 60.0


def until(holds: Callable[[], Any], within_s: float = WITHIN_S) -> Any:
    deadline_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < deadline_s, "the condition did not come true in time"
        time.sleep(0.01)
    return found


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("records")
    return [folder / f"run-{member}.jsonl" for member in range(2)]


@pytest.fixture(scope="module")
def cluster(records: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(
        f'{{"tenants": {{"acme": {{"max_concurrent": {MOST}, "keys": [{{"sha256": "{key_hash(KEY)}"}}]}}}}}}'
    )
    keys.chmod(0o600)
    flags = (
        "--http",
        "0",
        "--model",
        "toy",
        "--routers",
        "2",
        "--key-file",
        str(keys),
        "--record",
        str(records[0].with_name("run.jsonl")),
    )
    steps = ("--set", "decode_worker.toy_step_s=0.01", "--set", "worker.heartbeat_s=0.1")
    with Cluster(*flags, *steps, env={"PDSERVE_TOKEN": TOKEN}) as cluster:
        cluster.client.close()
        cluster.client = Client(cluster.target, token=TOKEN)
        yield cluster


def connected(cluster: Cluster, token: str = TOKEN) -> dict[str, Client]:
    """A client of each router, because the kernel chooses one for a connection."""
    found: dict[str, Client] = {}

    def have_both() -> bool:
        client = Client(cluster.target, token=TOKEN, retries=Retries(limit=0, resume_s=0.0))
        name = client.topology().router_id
        if name in found:
            client.close()
        else:
            found[name] = client
        return len(found) == 2

    until(have_both)
    return {name: found[name].with_token(token) for name in NAMES}


@pytest.fixture
def clients(cluster: Cluster) -> Iterator[dict[str, Client]]:
    found = connected(cluster)
    yield found
    for client in found.values():
        client.close()


def test_each_router_answers_for_both(clients: dict[str, Client]) -> None:
    done = {name: client.generate(f"a request to {name}", max_tokens=2) for name, client in clients.items()}
    for client in clients.values():
        for name, one in done.items():
            explained = client.explain(one.request_id)
            assert (explained.router_id, explained.outcome) == (name, "served")
    streams = [client.stream("busy", max_tokens=500) for client in clients.values()]
    for stream in streams:
        next(stream)
    for client in clients.values():
        assert client.topology().running_requests == 2
        frame = next(iter(client.watch(0.1)))
        assert (frame.running, {row.outcome for row in frame.requests}) == (2, {"", "served"})
    for stream in streams:
        stream.close()
    until(lambda: clients["router-0"].topology().running_requests == 0)


def test_a_worker_that_is_drained_by_one_gets_no_work_from_the_other(clients: dict[str, Client]) -> None:
    first, second = clients.values()
    first.drain("p0")
    until(lambda: all(one.is_drained for one in second.topology().workers if one.worker_id == "p0"))
    prompt = "a prompt that is long enough to be computed by the prefill worker " * 4
    assert second.generate(prompt, max_tokens=1).timings.prefill_worker == ""
    second.undrain("p0")
    until(lambda: not any(one.is_drained for one in first.topology().workers))
    assert first.generate(f"now {prompt}", max_tokens=1).timings.prefill_worker == "p0"


def test_a_quota_holds_for_both_together(clients: dict[str, Client]) -> None:
    tenants = [client.with_token(KEY) for client in clients.values()]
    streams = [tenants[number % 2].stream("busy", max_tokens=1000) for number in range(MOST)]
    for stream in streams:
        next(stream)
    for client in tenants:
        with pytest.raises(QuotaExceeded, match=f"{MOST} of {MOST} answers"):
            client.generate("one more", max_tokens=1)
    streams[0].close()

    def is_free() -> bool:
        try:
            return len(tenants[1].generate("one more", max_tokens=1).token_ids) == 1
        except QuotaExceeded:
            return False

    until(is_free)
    for stream in streams[1:]:
        stream.close()


def has_both_workers(client: Client) -> bool:
    return sum(one.is_connected for one in client.topology().workers) == 2


def test_the_other_serves_while_a_killed_one_is_started_again(cluster: Cluster, clients: dict[str, Client]) -> None:
    killed = cluster.running.pid("router-1")
    answers = [client.stream("busy", max_tokens=100) for client in clients.values()]
    for stream in answers:
        next(stream)
    os.kill(killed, signal.SIGKILL)
    assert len(list(answers[0])) > 0, "requests of the other router go on"
    with pytest.raises(PdserveError) as caught:
        list(answers[1])
    assert caught.value.reason == "UNAVAILABLE"
    with Client(cluster.target, token=TOKEN) as client:
        assert len(client.generate("meanwhile", max_tokens=3).token_ids) == 3
    assert len(clients["router-1"].generate("a retry", max_tokens=3).token_ids) == 3
    cluster.running.wait_restarted("router-1", killed)
    with_both = connected(cluster)
    for client in with_both.values():
        until(partial(has_both_workers, client))
        client.close()


def complete(connection: HTTPConnection, number: int) -> int:
    """Requests until the answer is complete, and returns how often. As clients do, it asks again after a rejection, or
    if its connection has ended before the answer."""
    headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
    body = json.dumps({"prompt": f"number {number}", "max_tokens": 3})
    for attempt in range(1, 4):
        try:
            connection.request("POST", "/v1/completions", body, headers)
            answer = connection.getresponse()
            found = json.loads(answer.read())
        except (HTTPException, OSError):
            connection.close()
            continue
        if answer.status == 200:
            assert found["usage"]["completion_tokens"] == 3
            return attempt
        assert answer.status == 503, found
    raise AssertionError("three attempts have failed")


def test_http_is_served_while_one_drains_and_is_started_again(cluster: Cluster, clients: dict[str, Client]) -> None:
    host, port = cluster.running.http_url.removeprefix("http://").removesuffix("/v1").split(":")
    drained = cluster.running.pid("router-0")
    running = clients["router-0"].stream("busy", max_tokens=100)
    first = next(running)
    kept = [HTTPConnection(host, int(port), timeout=WITHIN_S) for _ in range(8)]
    assert [complete(one, number) for number, one in enumerate(kept)] == [1] * 8
    os.kill(drained, signal.SIGTERM)
    turns = 0
    while cluster.running.pid("router-0") == drained:
        for number, one in enumerate(kept):
            complete(one, number)
        turns += 1
    assert turns > 1
    for one in kept:
        one.close()
    assert sum(len(piece.token_ids) for piece in (first, *running)) == 100, "a running request ends as usual"
    for client in connected(cluster).values():
        client.close()


def ask(host: str, port: str) -> str:
    """The status of a request on a new connection. A connection may be reset in the instant in which its router leaves
    the port, and that router may still say that it ends."""
    connection = HTTPConnection(host, int(port), timeout=WITHIN_S)
    try:
        headers = {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({"prompt": "new", "max_tokens": 1}), headers)
        answer = connection.getresponse()
        body = answer.read().decode()
    except (HTTPException, OSError):
        return "reset"
    finally:
        connection.close()
    return "served" if answer.status == 200 else body


def test_a_rolling_restart_fails_no_new_connection(cluster: Cluster, clients: dict[str, Client]) -> None:
    host, port = cluster.running.http_url.removeprefix("http://").removesuffix("/v1").split(":")
    for name in NAMES:
        before, seen = cluster.running.pid(name), []
        os.kill(before, signal.SIGTERM)
        while cluster.running.pid(name) == before:
            seen.append(ask(host, port))
        seen += [ask(host, port) for _ in range(30)]
        failed = [one for one in seen if one not in ("served", "reset") and "shutting" not in one]
        assert not failed
        assert seen.count("served") >= len(seen) - 3
    for client in connected(cluster).values():
        assert has_both_workers(client), "from its first connection on"
        client.close()


def test_each_records_what_it_has_decided(cluster: Cluster, clients: dict[str, Client], records: list[Path]) -> None:
    for client in clients.values():
        client.generate("recorded", max_tokens=2)
    cluster.stop()
    for record in records:
        assert main(["replay", str(record)]) == 0
