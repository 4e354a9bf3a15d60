"""A cluster in the process of the test that uses it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from pdserve import AsyncClient, Client, ConfigError, NotFound, Unauthenticated
from pdserve.testing import Cluster, toy_answer

PROMPT = "def fib(n):\n    return fib(n - 1) + fib(n - 2)\n"


def threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name in {"router", "engine", "grpc"}}


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """Other tests of this process may have clusters of their own."""
    before = threads()
    yield
    assert threads() <= before


def wait_for_load(client: Client) -> str:
    """Returns a worker that runs a request."""
    deadline_s = time.monotonic() + 60.0
    while time.monotonic() < deadline_s:
        for one in client.topology().workers:
            if one.running:
                return one.worker_id
        time.sleep(0.005)
    raise AssertionError("no worker reports a running request")


def test_a_prompt_is_prefilled_on_one_worker_and_decoded_on_another() -> None:
    # The default policy may predict that an idle decode worker is faster alone.
    with Cluster(router={"policy": "round-robin"}) as cluster, Client(cluster.address) as client:
        done = client.generate(PROMPT * 2, max_tokens=6, temperature=0.0)
        assert (done.text, done.timings.path) == (toy_answer(PROMPT * 2, 6), "remote")
        assert cluster.worker_ids == ["prefill-0", "decode-0"]


async def test_async_clients_share_the_loop_of_the_test() -> None:
    async with Cluster(prefill=0) as cluster, AsyncClient(cluster.address) as client:
        done = await client.generate(PROMPT, max_tokens=6, temperature=0.0)
        assert (done.text, done.timings.path) == (toy_answer(PROMPT, 6), "local")


def test_a_proxy_of_the_environment_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nothing listens there
    # KV is transferred, so the prefill worker calls the decode worker.
    with Cluster(router={"policy": "round-robin"}) as cluster, Client(cluster.address) as client:
        done = client.generate(PROMPT * 2, max_tokens=6, temperature=0.0)
        assert (done.text, done.timings.path) == (toy_answer(PROMPT * 2, 6), "remote")


def test_requests_continue_when_a_worker_stops() -> None:
    with Cluster(prefill=0, decode=2, worker={"toy_step_s": 0.02}) as cluster, Client(cluster.address) as client:
        streams = [client.stream(PROMPT, max_tokens=60, temperature=0.0, seed=n) for n in range(2)]
        texts = [next(stream).text for stream in streams]
        used = wait_for_load(client)
        cluster.stop_worker(used)
        texts = [text + "".join(piece.text for piece in stream) for text, stream in zip(texts, streams, strict=True)]
        assert texts == [toy_answer(PROMPT, 60)] * 2
        assert len(cluster.worker_ids) == 1
        with pytest.raises(NotFound):
            cluster.stop_worker(used)


def test_settings_of_the_router_apply() -> None:
    with Cluster(prefill=0, router={"token": "secret"}) as cluster:
        with Client(cluster.address, token="secret") as client:
            assert client.generate("a", max_tokens=2, temperature=0.0).text == toy_answer("a", 2)
        with Client(cluster.address) as client, pytest.raises(Unauthenticated):
            client.generate("a")


@pytest.mark.parametrize(("settings", "field"), [({"decode": 0}, "decode"), ({"prefill": 17}, "prefill")])
def test_sizes_are_checked(settings: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        Cluster(**settings)


def test_a_wrong_setting_leaves_nothing_behind() -> None:
    with pytest.raises(ConfigError, match="max_queue"), Cluster(router={"max_queue": -1}):
        pass
