"""The live view's endpoints, over real sockets."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2 as httpx
import pytest

from pdserve.core.types import Role
from pdserve.gateway.api.http_input import foreign, is_own_host
from tests.unit.gateway.conftest import WAIT_S, Served, serve, until

OWN = {"x-pdserve-ui": "1"}


def frames(answer: Any) -> Iterator[dict[str, Any]]:
    for line in answer.iter_lines():
        if line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))


def test_the_stream_begins_with_a_greeting_and_shows_what_ended(toy: Served) -> None:
    done = toy.sdk.generate("shown in the live view", max_tokens=5)
    with httpx.stream("GET", f"{toy.url}/ui/events", timeout=WAIT_S) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        stream = frames(answer)
        hello = next(stream)["hello"]
        assert (hello["model"], hello["is_operator"], hello["period_s"]) == (toy.model, True, 0.25)
        first, second = next(stream), next(stream)
    [row] = [one for one in first["requests"] if one["request_id"] == done.request_id]
    assert (row["outcome"], row["output_tokens"], row["stage"]) == ("served", 5, "ended")
    assert row["ttft_s"] == pytest.approx(done.timings.ttft_s, abs=1e-6)
    assert [name for name, _, _ in row["phases"]][-1] in ("decode", "messages")
    assert {one["role"] for one in first["workers"]} == {"prefill", "decode"}
    assert second["at_s"] > first["at_s"]
    assert done.request_id not in [one["request_id"] for one in second["requests"]]


def test_a_request_is_explained(toy: Served) -> None:
    done = toy.sdk.generate("explained in the live view", max_tokens=2)
    found = httpx.get(f"{toy.url}/ui/requests/{done.request_id}").json()
    assert (found["request_id"], found["outcome"]) == (done.request_id, "served")
    assert sum(one["is_chosen"] for one in found["candidates"]) == 1
    missing = httpx.get(f"{toy.url}/ui/requests/nothing")
    assert missing.status_code == 404


def test_a_worker_is_drained_and_resumed(toy: Served) -> None:
    def prefill() -> Any:
        return next(one for one in toy.sdk.topology().workers if one.role == Role.PREFILL)

    def is_drained(expected: bool) -> bool:
        return prefill().is_drained is expected

    name = prefill().worker_id
    for command, expected in (("drain", True), ("undrain", False)):
        answer = httpx.post(f"{toy.url}/ui/workers/{name}/{command}", headers=OWN)
        assert (answer.status_code, answer.content) == (204, b"")
        until(partial(is_drained, expected))  # After the worker's next report.
    assert httpx.post(f"{toy.url}/ui/workers/nobody/drain", headers=OWN).status_code == 404


def test_a_workers_log_is_read(toy: Served) -> None:
    name = toy.sdk.topology().workers[0].worker_id
    logging.getLogger("x").warning("of the worker's process")  # Which is this process.
    found = httpx.get(f"{toy.url}/ui/workers/{name}/log").json()
    assert [(one["level"], one["text"]) for one in found["lines"]][-1] == ("WARNING", "x: of the worker's process")
    assert httpx.get(f"{toy.url}/ui/workers/nobody/log").status_code == 404


def test_pages_of_other_sites_cannot_drain_a_worker(toy: Served) -> None:
    url = f"{toy.url}/ui/workers/p0/drain"
    assert httpx.post(url).status_code == 403
    asked = httpx.request(
        "OPTIONS", url, headers={"origin": "https://evil.example", "access-control-request-headers": "x-pdserve-ui"}
    )
    assert asked.status_code == 405
    assert not [name for name in asked.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        *((one, True) for one in ("127.0.0.1:8000", "127.0.0.1", "[::1]:8000", "[::1]", "localhost:8000", "LOCALHOST")),
        *((one, True) for one in ("a.localhost:1", "build7", "build7:8000", "10.0.0.1:80", "")),
        *((one, False) for one in ("evil.example", "evil.example:8000", "evil.example.", "127.0.0.1.evil.example:80")),
        *((one, False) for one in ("localhost.evil.example", "evil.example:localhost", "1.2.3.4.5", "[a.b]:80")),
    ],
)
def test_unregistrable_host_names_are_local(host: str, is_own: bool) -> None:
    assert is_own_host(host) is is_own


def test_a_name_that_resolves_to_this_host_is_not_served_without_a_token(toy: Served) -> None:
    """DNS rebinding: a page of evil.example, whose address has become 127.0.0.1."""
    for method, path in (("GET", "ui/events"), ("GET", "v1/models"), ("POST", "ui/workers/p0/drain")):
        for token in ({}, {"authorization": "Bearer anything"}):
            headers = {"host": "evil.example:8000", **OWN, **token}
            answer = httpx.request(method, f"{toy.url}/{path}", headers=headers)
            assert answer.status_code == 403
            assert "localhost" in answer.json()["error"]["message"]
    assert httpx.get(f"{toy.url}/v1/models", headers={"host": "localhost:1"}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [
        *({"sec-fetch-site": one} for one in ("cross-site", "same-site", "Same-Site", "unknown")),
        *({"origin": one} for one in ("null", "", "http://evil.example", "http://localhost", "http://localhost:7999")),
        *(
            {"origin": one}
            for one in ("https://localhost:8000", "http://localhost:8000.evil.example", "localhost:8000")
        ),
        *({"origin": one} for one in ("http://127.0.0.1:8000", "http://a.localhost:8000", "http://x@localhost:8000")),
        *({"origin": one, "sec-fetch-site": "same-origin"} for one in ("null", "", "https://", "localhost:8000")),
        *(
            {"origin": "http://localhost:8000", "sec-fetch-site": one}  # another port or scheme behind the same proxy
            for one in ("cross-site", "same-site", "", "same-origin, same-site")
        ),
        *({"origin": one, "sec-fetch-site": "none"} for one in ("https://localhost:8000", "null")),
        {"origin": "https://localhost:8000", "cookie": "a=b"},
        {"origin": "https://localhost:8000", "x-forwarded-proto": "https"},  # a page of the same name can send it
    ],
)
def test_a_page_of_another_origin_cannot_start_requests(sent: dict[str, str], toy: Served) -> None:
    """It could not read the answer, but it could start requests and use up the viewer slots."""
    for method, path in (("POST", "v1/completions"), ("POST", "tokenize"), ("GET", "ui/events")):
        headers = {"host": "localhost:8000", "content-type": "application/json", **sent}
        answer = httpx.request(method, f"{toy.url}/{path}", headers=headers, content=b'{"prompt": "x"}')
        assert answer.status_code == 403
        assert "another origin" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("host", "origin", "scheme", "is_own"),
    [
        ("localhost:8000", "http://localhost:8000", "http", True),
        ("LOCALHOST:8000", "http://localhost:8000", "http", True),
        ("localhost", "http://localhost", "http", True),
        ("localhost:80", "http://localhost", "http", True),
        ("[::1]:8000", "http://[::1]:8000", "http", True),
        ("localhost:8000", "https://localhost:8000", "https", True),
        ("localhost:443", "https://localhost", "https", True),
        ("localhost:8000", "http://localhost:8000", "https", False),
        ("localhost:443", "http://localhost", "http", False),
        ("localhost:80", "https://localhost", "https", False),
    ],
)
def test_an_origin_is_scheme_host_and_port(host: str, origin: str, scheme: str, is_own: bool) -> None:
    assert (foreign({"host": host, "origin": origin}, scheme) == "") is is_own


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("localhost", "https://localhost"),  # TLS ends at a proxy, which keeps the host
        ("build7:8443", "https://build7:8443"),
        ("build7", "https://build7:8443"),  # which drops the port
        ("127.0.0.1:8000", "https://llm.example.com"),  # which names the gateway (nginx, unless told otherwise)
        ("127.0.0.1:8000", "http://127.0.0.1:9000"),  # a forwarded port
    ],
)
def test_the_own_page_works_behind_a_proxy(host: str, origin: str, toy: Served) -> None:
    """As Chromium, Firefox and Safari send the page's requests to an https or a loopback address."""
    sent = {"host": host, "sec-fetch-site": "same-origin", "sec-fetch-mode": "cors", "sec-fetch-dest": "empty"}
    worker = toy.sdk.topology().workers[0].worker_id
    for command in ("drain", "undrain"):
        url = f"{toy.url}/ui/workers/{worker}/{command}"
        assert httpx.post(url, headers={**sent, "origin": origin, **OWN}).status_code == 204
        assert httpx.post(url, headers={**sent, "origin": origin}).status_code == 403  # without the page's own header
        assert httpx.post(url, headers={**sent, "origin": "null", **OWN}).status_code == 403
    assert httpx.get(f"{toy.url}/v1/models", headers=sent).status_code == 200  # browsers send no origin here
    rebound = {**sent, "host": "evil.example", "origin": "https://evil.example", **OWN}
    assert httpx.post(f"{toy.url}/ui/workers/{worker}/drain", headers=rebound).status_code == 403


def test_the_own_page_can_start_requests(toy: Served) -> None:
    own = {"origin": toy.url, "sec-fetch-site": "same-origin"}
    body = {"prompt": "x", "max_tokens": 1}
    assert httpx.post(f"{toy.url}/v1/completions", headers=own, json=body).status_code == 200
    assert httpx.get(f"{toy.url}/v1/models", headers={"sec-fetch-site": "none"}).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [{}, {"content-type": ""}, *({"content-type": one} for one in ("text/plain", "application/x-www-form-urlencoded"))],
)
def test_a_body_needs_its_content_type(sent: dict[str, str], toy: Served) -> None:
    """Pages of other origins send these types without asking; curl sends the last one."""
    for path in ("v1/chat/completions", "v1/completions", "v1/responses", "tokenize", "detokenize"):
        answer = httpx.post(f"{toy.url}/{path}", headers=sent, content=b'{"prompt": "x"}')
        assert answer.status_code == 400
        assert "-H 'content-type: application/json'" in answer.json()["error"]["message"]


def test_a_proxys_name_is_served_with_a_token() -> None:
    with serve(token="operator") as served:
        headers = {"host": "llm.example.com", "authorization": "Bearer operator"}
        assert httpx.get(f"{served.url}/v1/models", headers=headers).status_code == 200


def test_the_view_needs_the_operators_token() -> None:
    with serve(token="operator") as served:
        for headers in ({}, {"authorization": "Bearer other"}):
            for method, path in (("GET", "events"), ("GET", "requests/x"), ("POST", "workers/p0/drain")):
                answer = httpx.request(method, f"{served.url}/ui/{path}", headers={**headers, **OWN})
                assert answer.status_code == 401
        with httpx.stream(
            "GET", f"{served.url}/ui/events", headers={"authorization": "Bearer operator"}, timeout=WAIT_S
        ) as answer:
            assert answer.status_code == 200
            assert "hello" in next(frames(answer))


def test_closed_viewers_make_room(toy: Served) -> None:
    for _ in range(20):  # More than a router allows at a time.
        with httpx.stream("GET", f"{toy.url}/ui/events", timeout=WAIT_S) as answer:
            assert answer.status_code in (200, 429), answer.read()
