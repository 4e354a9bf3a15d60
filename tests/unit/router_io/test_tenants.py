"""A key file in front of a live router: which keys are valid, for what, and from when."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from pdserve import AsyncClient, InvalidRequest, PermissionDenied, Unauthenticated
from pdserve.client.retries import Retries
from pdserve.core.access.key_file import MAX_FILE_BYTES, Tenant, key_hash, make_key
from pdserve.core.errors import ConfigError, Overloaded
from pdserve.core.results import SessionPage
from pdserve.prefix.index import MemoryLookup
from pdserve.telemetry.metrics import Metrics
from pdserve.v1 import inference_pb2
from pdserve.wire import status
from router.recording.replay import decode_step, replay
from router.service import auth, sessions
from router.service.auth import Tenants, authorised
from router.state.interface import RequestArrived
from tests.unit.router_io.conftest import Connect, Front, until
from tests.unit.router_io.processes import Program

ACME, BETA, FOREIGN = (make_key(bytes([number] * 32)) for number in range(3))
OPERATOR = "the operator's token"


def write(path: Path, tenants: dict[str, tuple[str, ...]], mode: int = 0o600, **quotas: Any) -> None:
    found = {name: {"keys": [{"sha256": key_hash(key)} for key in keys], **quotas} for name, keys in tenants.items()}
    other = path.with_suffix(".new")
    other.write_text(json.dumps({"tenants": found}))
    other.chmod(mode)
    other.replace(path)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.json"
    write(path, {"acme": (ACME,), "beta": (BETA,)})
    return path


def presenting(front: Front, token: str | None) -> AsyncClient:
    return AsyncClient(front.server.address, token=token, retries=Retries(limit=0))


async def is_accepted(front: Front, token: str | None) -> bool:
    async with presenting(front, token) as client:
        try:
            await client.model()
        except Unauthenticated:
            return False
        return True


async def test_keys_serve_requests_and_the_token_allows_all(connect: Connect, decode: Program, keys: Path) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    for token in (ACME, BETA, OPERATOR):
        async with presenting(front, token) as client:
            assert (await client.generate("hello", max_tokens=3, temperature=0)).text
            assert await client.tokenize("hello")
    async with presenting(front, OPERATOR) as client:
        assert (await client.topology()).router_id == "router-0"
    async with presenting(front, ACME) as client:
        for call in (client.topology(), client.explain("x"), client.drain("d0"), client.undrain("d0")):
            with pytest.raises(PermissionDenied) as caught:
                await call
            assert "PDSERVE_TOKEN" in caught.value.message


@pytest.mark.parametrize("given", [None, "", FOREIGN, ACME[:-1], ACME + "x", ACME.swapcase(), "x" * 4000, "é", "\x7f"])
async def test_other_tokens_are_rejected(connect: Connect, decode: Program, keys: Path, given: str | None) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    metadata = () if given is None else (("authorization", f"Bearer {given}".encode().decode("latin-1")),)
    if given is not None and not (given.isascii() and given.isprintable()):
        metadata = (("authorization", "Bearer ?"),)  # gRPC's own client sends printable ASCII only
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_without_a_token_no_method_is_open(connect: Connect, decode: Program, keys: Path) -> None:
    front = await connect(key_file=str(keys))
    assert not await is_accepted(front, None)
    for token in (None, ACME, "", FOREIGN):
        metadata = () if token is None else (("authorization", f"Bearer {token}"),)
        stub = front.channel.unary_unary("/pdserve.v1.ClusterService/GetTopology")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(b"", metadata=metadata)
        expected = grpc.StatusCode.PERMISSION_DENIED if token == ACME else grpc.StatusCode.UNAUTHENTICATED
        assert caught.value.code() is expected


async def test_a_rejected_message_is_not_read(connect: Connect, keys: Path) -> None:
    front = await connect(key_file=str(keys), max_message_bytes=1024)
    request = inference_pb2.GenerateRequest(text="x" * 100_000)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await front.stub.Generate(request, metadata=(("authorization", f"Bearer {FOREIGN}"),)).read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_call_is_authorised_before_and_after_its_message(
    connect: Connect, decode: Program, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, methods = await connect(decode, key_file=str(keys)), []

    def counted(method: str, *args: Any) -> Tenant:
        methods.append(method.rpartition("/")[2])
        return authorised(method, *args)

    monkeypatch.setattr(auth, "authorised", counted)
    async with presenting(front, ACME) as client:
        await client.generate("hello", max_tokens=3, n=2)
        ids = await client.tokenize("hello")
        await client.detokenize(ids)
        await client.token_bytes(ids)
        await client.sessions()
        await client.end_session("s")
        await client.model()
    names = ["Generate", "Tokenize", "Detokenize", "GetTokenBytes", "ListSessions", "EndSession", "GetModel"]
    assert methods == [name for name in names for _ in range(2)]


async def test_a_call_is_authorised_after_its_message_before_anything_else(
    connect: Connect, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No model is known yet, and only callers may learn that."""
    front, allowed = await connect(key_file=str(keys)), [True]

    def once(*args: Any) -> Tenant:
        if not allowed.pop():
            raise Unauthenticated("revoked")
        return authorised(*args)

    monkeypatch.setattr(auth, "authorised", once)
    async with presenting(front, ACME) as client:
        for call in (client.generate("x"), client.tokenize("x"), client.detokenize([1]), client.token_bytes([1])):
            allowed[:] = [False, True]
            with pytest.raises(Unauthenticated):
                await call
            assert not allowed


async def test_revoked_keys_end_and_new_keys_begin(connect: Connect, decode: Program, keys: Path) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    write(keys, {"acme": (FOREIGN,)})
    await front.server._tenants.refresh()
    assert [await is_accepted(front, key) for key in (ACME, BETA, FOREIGN)] == [False, False, True]


async def test_a_call_that_began_before_its_key_was_removed_is_rejected(
    connect: Connect, decode: Program, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    has_begun, is_removed = asyncio.Event(), asyncio.Event()

    def note(*args: Any) -> Tenant:
        has_begun.set()
        return authorised(*args)

    async def late() -> AsyncIterator[bytes]:
        await is_removed.wait()
        yield inference_pb2.GenerateRequest(text="hello").SerializeToString()

    monkeypatch.setattr(auth, "authorised", note)
    async with grpc.aio.insecure_channel(front.server.address) as channel:
        method = channel.stream_stream("/pdserve.v1.InferenceService/Generate")
        call = method(late(), metadata=(("authorization", f"Bearer {ACME}"),))
        async with asyncio.timeout(60.0):
            await has_begun.wait()
            write(keys, {"beta": (BETA,)})
            await front.server._tenants.refresh()
            is_removed.set()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_change_is_noticed(connect: Connect, decode: Program, keys: Path) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    write(keys, {"acme": (FOREIGN,)})

    async def is_in_force() -> bool:
        return [await is_accepted(front, key) for key in (ACME, FOREIGN)] == [False, True]

    await until(is_in_force)


async def test_a_request_that_runs_outlives_its_key(connect: Connect, slow_decode: Program, keys: Path) -> None:
    front = await connect(slow_decode, key_file=str(keys), token=OPERATOR)
    async with presenting(front, ACME) as client, client.stream("hello", max_tokens=30, temperature=0) as stream:
        pieces = [await anext(stream)]
        write(keys, {"beta": (BETA,)})
        await front.server._tenants.refresh()
        assert not await is_accepted(front, ACME)
        pieces += [piece async for piece in stream]
    assert sum(len(piece.token_ids) for piece in pieces) == 30


Damage = Callable[[Path], object]
DAMAGE: dict[str, Damage] = {
    "cut": lambda path: path.write_text(path.read_text()[:-20]),
    "empty": lambda path: path.write_text(""),
    "removed": lambda path: path.unlink(),
    "unknown field": lambda path: path.write_text('{"tenant": {}}'),
    "writable by all": lambda path: path.chmod(0o602),
    "writable by the group": lambda path: path.chmod(0o620),
    "large": lambda path: os.truncate(path, MAX_FILE_BYTES + 1),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path, 0o600)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_an_invalid_file_keeps_the_old_one_valid(
    keys: Path, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    tenants = Tenants(str(keys))
    damage(keys)
    await tenants.refresh()
    await tenants.refresh()
    assert tenants.file is not None
    assert tenants.file.tenant_of(ACME) is not None
    assert [one.levelname for one in caplog.records] == ["ERROR"], "once for each wrong file"
    if keys.is_dir():
        keys.rmdir()
    write(keys, {"acme": (FOREIGN,)})
    await tenants.refresh()
    assert (tenants.file.tenant_of(ACME), tenants.file.tenant_of(FOREIGN) is None) == (None, False)


async def test_a_file_that_could_not_be_opened_once_is_read_later(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tenants = Tenants(str(keys))
    write(keys, {"beta": (BETA,)})

    def fail(*_: Any, **__: Any) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", fail)
        await tenants.refresh()
    assert tenants.file is not None
    assert tenants.file.tenant_of(ACME) is not None
    await tenants.refresh()
    assert tenants.file.tenant_of(ACME) is None, "the revoked key"


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_router_does_not_start_with_a_wrong_file(keys: Path, damage: Damage) -> None:
    damage(keys)
    with pytest.raises(ConfigError):
        Tenants(str(keys))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_rejected(keys: Path) -> None:
    os.chown(keys, 12345, -1)
    with pytest.raises(ConfigError) as caught:
        Tenants(str(keys))
    assert "12345" in caught.value.message


async def test_a_key_in_the_file_is_not_logged(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenants = Tenants(str(keys))
    keys.write_text(json.dumps({"tenants": {"acme": {"keys": [{"sha256": ACME}]}}}))
    await tenants.refresh()
    assert "sha256" in caplog.records[0].__dict__["why"]
    assert ACME not in str([one.__dict__ for one in caplog.records])


async def test_requests_without_targets_get_those_of_the_tenants_class(
    connect: Connect, decode: Program, keys: Path
) -> None:
    write(keys, {"acme": (ACME,)}, slo="quick")
    content = json.loads(keys.read_text()) | {"slo_classes": {"quick": {"ttft_s": 61.0, "tpot_s": 7.0, "itl_s": 50.0}}}
    keys.write_text(json.dumps(content))
    front = await connect(decode, key_file=str(keys), token=OPERATOR, slo_ttft_s=100.0, slo_tpot_s=100.0)
    targets = {}
    async with presenting(front, ACME) as client, presenting(front, OPERATOR) as operator:
        for name, slo in (("none", None), ("one", {"ttft_s": 99.0})):
            await client.generate("hello", max_tokens=2, request_id=name, slo=slo)
            found = await operator.explain(f"acme/{name}")
            assert found.tenant == "acme"
            targets[name] = (found.slo_ttft_s, found.slo_tpot_s)
        await operator.generate("hello", max_tokens=2, request_id="none")
        found = await operator.explain("none")
        assert (found.tenant, found.slo_ttft_s) == ("", 100.0)
    assert targets == {"none": (61.0, 7.0), "one": (99.0, 7.0)}


@pytest.mark.parametrize(
    ("most", "priority", "is_allowed"), [(None, 0, True), (None, 1, False), (3, 3, True), (3, 4, False)]
)
async def test_a_priority_is_limited(
    connect: Connect, decode: Program, keys: Path, most: int | None, priority: int, is_allowed: bool
) -> None:
    write(keys, {"acme": (ACME,)}, max_priority=most)
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    async with presenting(front, ACME) as client, presenting(front, OPERATOR) as operator:
        if is_allowed:
            await client.generate("hello", max_tokens=2, priority=priority)
        else:
            with pytest.raises(InvalidRequest) as caught:
                await client.generate("hello", max_tokens=2, priority=priority)
            assert (caught.value.field, f"at most {most or 0} for tenant acme") == ("priority", caught.value.expected)
        await operator.generate("hello", max_tokens=2, priority=priority)


async def test_a_recording_names_the_tenant_and_can_be_replayed(
    connect: Connect, decode: Program, keys: Path, tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    front = await connect(decode, key_file=str(keys), token=OPERATOR, record=str(record))
    async with presenting(front, ACME) as client:
        await client.generate("a prompt of more than one block of tokens", max_tokens=4, cache_salt="x")
    await front.server.stop()
    lines = record.read_text().splitlines()
    assert list(replay(lines)) == []
    arrived = [event for line in lines[1:] if isinstance(event := decode_step(line).event, RequestArrived)]
    assert [one.tenant for one in arrived] == ["acme"]


async def test_tenants_cannot_take_each_others_request_ids(connect: Connect, slow_decode: Program, keys: Path) -> None:
    front = await connect(slow_decode, key_file=str(keys), token=OPERATOR)
    async with (
        presenting(front, ACME) as one,
        presenting(front, BETA) as other,
        one.stream("hello", max_tokens=100, request_id="same", ignore_eos=True) as running,
    ):
        await anext(running)
        async with other.stream("hello", max_tokens=100, request_id="same", ignore_eos=True) as beside:
            await anext(beside)
            assert all(front.server.runtime.knows(f"{name}/same") for name in ("acme", "beta"))


async def test_the_requests_of_a_tenant_leave_room_for_others(
    connect: Connect, slow_decode: Program, tmp_path: Path
) -> None:
    """Also if the tenant has several keys and connections, and if many tenants call."""
    many = {f"t{number}": make_key(bytes([100 + number] * 32)) for number in range(12)}
    file = tmp_path / "keys.json"
    write(file, {"acme": (ACME, FOREIGN), "beta": (BETA,), **{name: (key,) for name, key in many.items()}})
    front = await connect(slow_decode, key_file=str(file), token=OPERATOR, max_held_bytes=8000)

    async def begin(key: str, size: int = 1000) -> grpc.aio.UnaryStreamCall[Any, Any] | None:
        request = inference_pb2.GenerateRequest(text="x" * size)
        request.sampling.max_tokens = 1000
        call = front.stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))
        try:
            assert (await call.read()).HasField("started")
        except grpc.aio.AioRpcError as error:
            if not isinstance(status.from_rpc_error(error), Overloaded):
                raise
            return None
        return call

    calls = [await begin(key) for key in (ACME, FOREIGN) * 4]
    assert len(calls) - calls.count(None) == 5  # two thirds of the bytes, and no more with a second key
    calls.append(await begin(BETA))
    assert calls[-1] is not None
    calls += [await begin(key, 200) for key in many.values()]
    assert calls[-1] is None
    calls.append(await begin(OPERATOR, 300))
    assert calls[-1] is not None
    for call in filter(None, calls):
        call.cancel()
    await until(lambda: front.server.runtime.num_calls == 0)


async def test_a_caller_learns_its_tenant(connect: Connect, decode: Program, keys: Path) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    for token, tenant in ((ACME, "acme"), (BETA, "beta"), (OPERATOR, "")):
        async with presenting(front, token) as client:
            assert (await client.model()).tenant == tenant


async def test_a_tenant_sees_its_own_sessions_only(connect: Connect, decode: Program, keys: Path) -> None:
    write(keys, {"acme": (ACME,), "beta": (FOREIGN,)})
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    prompt = "a prompt of some blocks " * 8
    async with presenting(front, ACME) as acme, presenting(front, FOREIGN) as other:
        done = await acme.generate(prompt, max_tokens=4, session_id="s")
        await acme.generate(prompt + done.text + " and more" * 4, max_tokens=4, session_id="s", reuse_within_s=60)
        await acme.generate("another", max_tokens=4, session_id="t")
        await other.generate(prompt, max_tokens=4, session_id="s")
        page = await acme.sessions()
        assert [(one.session_id, one.tenant, one.turns) for one in page.sessions] == [
            ("t", "acme", 1),
            ("s", "acme", 2),
        ]
        [row] = page.sessions[1].conversations
        assert (row.turns, row.running, row.is_over) == (2, 0, False)
        assert row.until_s is not None
        assert 0.0 < row.until_s - row.used_at_s <= 60.0
        first = await acme.sessions(limit=1)
        assert (len(first.sessions), first.has_more) == (1, True)
        rest = await acme.sessions(limit=1, after=first.sessions[0].cursor)
        assert ([one.session_id for one in rest.sessions], rest.has_more) == (["s"], False)
        assert [one.tenant for one in (await other.sessions()).sessions] == ["beta"]
        with pytest.raises(InvalidRequest, match="at most 100"):
            await other.sessions(limit=101)
    async with presenting(front, OPERATOR) as operator:
        assert {one.tenant for one in (await operator.sessions()).sessions} == {"acme", "beta"}


async def test_a_tenant_ends_its_own_sessions_only(connect: Connect, decode: Program, keys: Path) -> None:
    write(keys, {"acme": (ACME,), "beta": (FOREIGN,)})
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    async with (
        presenting(front, ACME) as acme,
        presenting(front, FOREIGN) as other,
        presenting(front, OPERATOR) as operator,
    ):
        await acme.generate("a prompt of some blocks " * 8, max_tokens=4, session_id="s")
        assert not await other.end_session("s")
        assert not await operator.end_session("s")
        [session] = (await acme.sessions()).sessions
        assert not session.conversations[0].is_over
        for _ in range(2):
            assert await acme.end_session("s")
        [session] = (await acme.sessions()).sessions
        assert session.conversations[0].is_over
        for name in ("", "s" * 129, "a\nb"):
            with pytest.raises(InvalidRequest, match="session_id"):
                await acme.end_session(name)


async def test_sessions_show_which_worker_has_their_prefix(connect: Connect, decode: Program) -> None:
    front = await connect(decode)
    done = await front.client.generate("a prompt of some blocks " * 8, max_tokens=4)

    async def is_cached() -> bool:
        [session] = (await front.client.sessions()).sessions
        [row] = session.conversations
        assert (session.is_named, row.prompt_tokens) == (False, done.usage.prompt_tokens)
        assert row.is_cached_known
        return [one.worker_id for one in row.cached] == [done.timings.decode_worker]

    await until(is_cached)


async def test_the_deadline_of_a_task_sets_the_targets_of_its_turns(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.state.conversations.LEAST_SEEN", 0.0)  # one turn is expected
    metrics = Metrics("router")
    front = await connect(decode, metrics=metrics, slo_ttft_s=80.0, slo_tpot_s=100.0)
    ordinary = {"session_id": "other", "request_id": "ordinary"}
    await front.client.generate("a prompt of some blocks " * 8, max_tokens=4, **ordinary)
    said = {"session_id": "s", "request_id": "loose", "slo_task_s": 3600.0}
    await front.client.generate("a prompt of some blocks " * 8, max_tokens=4, **said)
    found = [await front.client.explain(name) for name in ("ordinary", "loose")]
    assert [(one.slo_ttft_s, one.slo_tpot_s) for one in found] == [(80.0, 100.0), (320.0, 400.0)]
    [session, other] = (await front.client.sessions()).sessions
    assert session.task is not None
    assert other.task is None
    assert (session.task.state, session.task.turns, session.task.turns_left) == ("running", 1, 0.0)
    assert (session.task.ttft_s, session.task.tpot_s) == (320.0, 400.0)
    assert session.task.due_at_s - session.task.began_at_s == pytest.approx(3600.0, abs=1e-3)
    await front.client.generate("a prompt of some blocks " * 9, max_tokens=4, session_id="s", reuse_within_s=0)
    task = (await front.client.sessions(limit=1)).sessions[0].task
    assert task is not None
    assert (task.state, task.turns) == ("in_time", 2)
    await until(lambda: 'pdserve_tasks_total{outcome="in_time"} 1.0' in metrics.text())


async def test_a_list_of_sessions_lets_the_router_work(
    connect: Connect, decode: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is made in parts, by one caller at a time, and each page has few conversations."""
    front = await connect(decode)
    for name in "abc":
        await front.client.generate("a prompt of some blocks " * 8, max_tokens=4, session_id=name)
    other, turns = 0, list[int]()

    async def work() -> None:
        nonlocal other
        while True:
            await asyncio.sleep(0.0)
            other += 1

    async def inspect(self: MemoryLookup, hashes: object) -> dict[str, int]:
        turns.append(other)
        return {}

    monkeypatch.setattr(MemoryLookup, "inspect", inspect)
    working = asyncio.create_task(work())
    assert len((await front.client.sessions()).sessions) == 3
    working.cancel()
    assert turns[0] < turns[1] < turns[2]
    monkeypatch.setattr(sessions, "MAX_ROWS", 2)
    page = await front.client.sessions()
    assert ([one.session_id for one in page.sessions], page.has_more) == (["c", "b"], True)
    page = await front.client.sessions(after=page.sessions[-1].cursor)
    assert ([one.session_id for one in page.sessions], page.has_more) == (["a"], False)
    begun, release = asyncio.Event(), asyncio.Event()

    async def hang(self: MemoryLookup, hashes: object) -> dict[str, int]:
        begun.set()
        await release.wait()
        return {}

    monkeypatch.setattr(MemoryLookup, "inspect", hang)
    monkeypatch.setattr(sessions, "LOOKUPS_S", 60.0)
    monkeypatch.setattr(sessions, "WAIT_S", 0.05)
    first = asyncio.create_task(front.client.sessions())
    await begun.wait()
    with pytest.raises(Overloaded, match="other calls"):
        await front.client.sessions()
    release.set()
    assert len((await first).sessions) == 2


async def test_a_tenant_that_lists_sessions_leaves_places_to_others(
    connect: Connect, decode: Program, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = await connect(decode, key_file=str(keys), token=OPERATOR)
    write(keys, {"acme": (ACME,), "beta": (BETA,)})
    begun, release = asyncio.Event(), asyncio.Event()

    async def hang(self: MemoryLookup, hashes: object) -> dict[str, int]:
        begun.set()
        await release.wait()
        return {}

    monkeypatch.setattr(MemoryLookup, "inspect", hang)
    monkeypatch.setattr(sessions, "LOOKUPS_S", 60.0)
    monkeypatch.setattr(sessions, "WAIT_S", 60.0)
    async with presenting(front, ACME) as acme, presenting(front, BETA) as other:
        await acme.generate("a prompt of some blocks " * 8, max_tokens=4)
        many = [asyncio.create_task(acme.sessions()) for _ in range(20)]
        await begun.wait()
        await until(lambda: sum(one.done() for one in many) >= 14)
        waits = asyncio.create_task(other.sessions())
        release.set()
        assert (await waits).sessions == ()
        found = await asyncio.gather(*many, return_exceptions=True)
        assert {type(one) for one in found} == {SessionPage, Overloaded}
