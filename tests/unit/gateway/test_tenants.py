"""Tenants over HTTP, through OpenAI's own client: keys, quotas, and the cost of rejected keys."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2 as httpx
import openai
import pytest

from pdserve import Unauthenticated
from pdserve.core.access.key_file import key_hash, make_key
from pdserve.core.errors import Overloaded
from pdserve.gateway.door import KNOWN_S, MAX_CALLERS, MAX_CHECKS, MAX_REJECTED, REMEMBER_REJECTED_S, REMEMBER_S, Door
from tests.unit.gateway.conftest import Served, read_all, serve, until
from tests.unit.gateway.test_limits import code_of, post, status_of

ACME, BETA, FOREIGN = (make_key(bytes([number] * 32)) for number in range(3))
PER_MINUTE = 600


@dataclass(frozen=True)
class Tenanted:
    served: Served
    file: Path

    def client(self, key: str, max_retries: int = 0) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.served.url}/v1", api_key=key, max_retries=max_retries)


def write(path: Path, tenants: dict[str, dict[str, Any]]) -> None:
    other = path.with_suffix(".new")
    other.write_text(json.dumps({"tenants": tenants}))
    other.replace(path)


def keyed(key: str, **quotas: int) -> dict[str, Any]:
    return {**quotas, "keys": [{"sha256": key_hash(key)}]}


@pytest.fixture
def tenanted(tmp_path: Path) -> Iterator[Tenanted]:
    file = tmp_path / "keys.json"
    write(file, {"acme": keyed(ACME, tokens_per_minute=PER_MINUTE), "beta": keyed(BETA, max_concurrent=1)})
    with serve(token="operator", router={"key_file": str(file)}, worker={"toy_step_s": 0.01}) as served:
        yield Tenanted(served, file)


def complete(client: openai.OpenAI, prompt: str = "hello", max_tokens: int = 1, **fields: Any) -> Any:
    return client.completions.create(model="toy", prompt=prompt, max_tokens=max_tokens, **fields)


def test_the_live_view_explains_requests_of_tenants_to_the_operator_only(tenanted: Tenanted) -> None:
    complete(tenanted.client(ACME), extra_headers={"x-request-id": "a/b"})
    url = f"{tenanted.served.url}/ui/requests/{quote('acme/a/b', safe='')}"
    for key, status in (("operator", 200), (ACME, 403), (BETA, 403)):
        answer = httpx.get(url, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == status
        assert (answer.json().get("request_id") == "acme/a/b") is (status == 200)


def test_a_used_up_quota_is_a_rate_limit_error_with_the_time(tenanted: Tenanted) -> None:
    client = tenanted.client(ACME)
    complete(client, "x" * 580, 20, extra_body={"ignore_eos": True})
    with pytest.raises(openai.RateLimitError) as caught:
        complete(client, "x" * 580, 20)
    error = caught.value
    assert (error.status_code, error.code, error.type) == (429, "rate_limit_exceeded", "tokens")
    assert "tokens_per_minute of tenant acme" in error.message
    milliseconds = int(error.response.headers["retry-after-ms"])
    assert 1000 < milliseconds <= 60_000
    assert int(error.response.headers["retry-after"]) == -(-milliseconds // 1000)
    complete(tenanted.client(BETA), "x" * 580, 20)


def test_openais_client_waits_for_the_retry_time(tenanted: Tenanted) -> None:
    """A second after twenty tokens from a bucket of ten, which is longer than the client's own first wait."""
    began_s = time.monotonic()
    complete(tenanted.client(ACME), "x" * 10, 10, extra_body={"ignore_eos": True})
    assert complete(tenanted.client(ACME, max_retries=1), "x", 1).choices[0].text
    assert time.monotonic() - began_s > 1.0


def test_answers_in_progress_are_limited_over_http(tenanted: Tenanted) -> None:
    client = tenanted.client(BETA)
    stream = complete(client, max_tokens=1000, stream=True, extra_body={"ignore_eos": True})
    next(stream)
    with pytest.raises(openai.RateLimitError) as caught:
        complete(client)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "requests")
    assert "max_concurrent" in caught.value.message
    stream.close()


def test_a_revoked_key_is_rejected_despite_the_cache(tenanted: Tenanted) -> None:
    client = tenanted.client(ACME)
    complete(client)
    write(tenanted.file, {"acme": keyed(FOREIGN)})

    def is_rejected() -> bool:
        try:
            complete(client)
        except openai.AuthenticationError as error:
            return error.code == "invalid_api_key"
        except openai.RateLimitError:
            pass  # The key is still valid.
        return False

    until(is_rejected)
    complete(tenanted.client(FOREIGN))


def test_a_tenant_sees_no_metrics_of_others(tenanted: Tenanted) -> None:
    with pytest.raises(openai.PermissionDeniedError):
        tenanted.client(ACME).get(f"{tenanted.served.url}/metrics", cast_to=str)
    assert "pdserve_http_requests_total" in tenanted.client("operator").get(
        f"{tenanted.served.url}/metrics", cast_to=str
    )


@pytest.mark.parametrize("key", [FOREIGN, "x" * 5000, "Ω", ""], ids=["unknown", "long", "not ascii", "empty"])
def test_a_wrong_key_is_rejected_before_the_body_comes(
    tenanted: Tenanted, raw: Callable[[str], socket.socket], key: str
) -> None:
    connection = raw(tenanted.served.address)
    head = post(b"", content_length="4000000", authorization="KEY").replace(b"KEY", f"Bearer {key}".encode())
    connection.sendall(head)  # And none of the body is read.
    answer = read_all(connection)
    assert (status_of(answer), code_of(answer)) == (401, "invalid_api_key")


def test_a_flood_of_unknown_keys_does_not_block_a_tenant(tenanted: Tenanted) -> None:
    """Hundreds of different keys at a time, while a tenant that was accepted before is served."""
    address = tenanted.served.address

    async def flood(number: int) -> int:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        key = make_key(number.to_bytes(32, "big"))
        writer.write(post(b"", content_length="4000000", authorization=f"Bearer {key}"))
        answer = await reader.read()
        writer.close()
        return status_of(answer)

    async def all_of_them() -> tuple[set[int], list[str]]:
        client = openai.AsyncOpenAI(base_url=f"{tenanted.served.url}/v1", api_key=BETA, max_retries=0)
        await client.completions.create(model="toy", prompt="hello", max_tokens=1)
        flooding = [asyncio.create_task(flood(number)) for number in range(1000, 1400)]
        texts = []
        for _ in range(5):
            done = await client.completions.create(model="toy", prompt="hello", max_tokens=1)
            texts.append(done.choices[0].text)
        return set(await asyncio.gather(*flooding)), texts

    statuses, texts = asyncio.run(all_of_them())
    assert statuses <= {401, 429}
    assert 401 in statuses
    assert all(texts)


class GatedRouter:
    """Counts the checks. Each waits until the gate is open."""

    def __init__(self, valid: set[str]) -> None:
        self.valid, self.checked = valid, 0
        self.gate = asyncio.Event()
        self.gate.set()

    def with_token(self, token: str | None) -> Any:
        return _Presenting(self, token)


class _Presenting:
    def __init__(self, router: GatedRouter, token: str | None) -> None:
        self._router, self._token = router, token

    async def model(self) -> Any:
        self._router.checked += 1
        await self._router.gate.wait()
        if self._token not in self._router.valid:
            raise Unauthenticated("the bearer token is not valid")
        return "a model"


class SetClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_rejected_key_is_checked_once_a_second() -> None:
    router, clock = GatedRouter(set()), SetClock()
    door = Door(router, needs_token=False, clock=clock)  # type: ignore[arg-type]
    for _ in range(100):
        with pytest.raises(Unauthenticated):
            await door.admit("wrong")
    assert router.checked == 1
    clock.now_s = REMEMBER_REJECTED_S
    router.valid.add("wrong")
    await door.admit("wrong")
    assert router.checked == 2


async def test_accepted_keys_are_checked_during_a_flood() -> None:
    router, clock = GatedRouter({"good"}), SetClock()
    door = Door(router, needs_token=False, clock=clock)  # type: ignore[arg-type]
    await door.admit("good")
    clock.now_s = REMEMBER_S
    router.gate.clear()
    flood = [asyncio.create_task(door.admit(f"wrong {number}")) for number in range(MAX_CHECKS)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await door.admit("one more")
    good = asyncio.create_task(door.admit("good"))
    await asyncio.sleep(0)
    router.gate.set()
    assert (await good).model == "a model"
    assert {type(one) for one in await asyncio.gather(*flood, return_exceptions=True)} == {Unauthenticated}
    with pytest.raises(Unauthenticated):
        await door.admit("one more")


async def test_a_key_is_known_without_a_check_for_a_limited_time() -> None:
    """A revoked key would otherwise get 429 in place of 401 for as long as requests are shed."""
    router, clock = GatedRouter({"good"}), SetClock()
    door = Door(router, needs_token=False, clock=clock)  # type: ignore[arg-type]
    await door.admit("good")
    clock.now_s = REMEMBER_S + KNOWN_S - 1.0
    door.renew_all()  # which does not prolong it
    assert door.known("good") is not None
    clock.now_s = REMEMBER_S + KNOWN_S
    assert door.known("good") is None
    router.valid.clear()
    with pytest.raises(Unauthenticated):
        await door.admit("good")
    router.valid.add("new")
    await door.admit("new")
    door.renew_all()
    assert door.known("new") is not None
    clock.now_s += KNOWN_S
    assert door.known("new") is None


async def test_the_number_of_remembered_keys_is_limited() -> None:
    router = GatedRouter({f"good {number}" for number in range(MAX_CALLERS + 9)})
    door = Door(router, needs_token=False)  # type: ignore[arg-type]
    for number in range(MAX_CALLERS + 9):
        await door.admit(f"good {number}")
    for number in range(MAX_REJECTED + 9):
        with pytest.raises(Unauthenticated):
            await door.admit(f"wrong {number}")
    assert (len(door._known), len(door._rejected)) == (MAX_CALLERS, MAX_REJECTED)
