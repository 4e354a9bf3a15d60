"""A worker takes the other role in the same process: what stays, what ends, and when it needs a new process."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import re
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.config import WorkerConfig
from pdserve.core.access.proof import Identity
from pdserve.core.errors import ConfigError, InvalidRequest
from pdserve.core.types import Role, Sampling
from pdserve.engine.toy import answer
from pdserve.prefix.embedded import EmbeddedRedis
from pdserve.prefix.registry import Registry
from pdserve.v1 import worker_pb2, worker_pb2_grpc
from pdserve.wire import peers
from pdserve.worker.host import SERVICE
from pdserve.worker.role_change import OF_PROGRAM, change_role, differing, needs_restart, with_settings
from tests.oracle import Oracle
from tests.support.adapters import write_adapter
from tests.support.cluster_secret import ROUTER, SECRET
from tests.unit.worker import conftest
from tests.unit.worker.conftest import DEADLINE_S, Running, config
from tests.unit.worker.test_adapters import of, serve, served
from tests.unit.worker.test_tensor_parallel import BUNDLED, COMMON, PROMPTS

PROMPT = list(range(10, 31))
TOY: dict[str, Any] = {"model": "toy"}
LOCAL = (("grpc.use_local_subchannel_pool", 1),)
SERVING = health_pb2.HealthCheckResponse.SERVING


async def change(worker: Running, **changes: Any) -> str:
    """To the other role, as the launcher asks for it."""
    before = worker.program.context.config
    role = worker.program.context.role.other
    return await change_role(worker.address, role, before, dataclasses.replace(before, **changes))


def role_of(worker: Running) -> Role:
    return worker.program.context.role


# --- what stays -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ranks",
    [
        {},
        pytest.param({"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
)
async def test_tokens_stay_exact_and_cached_prefixes_stay(
    start: Any, attach: Any, ask: Any, caplog: pytest.LogCaptureFixture, ranks: dict[str, Any]
) -> None:
    """With the bundled model: both workers of a pair take the other role, twice."""
    caplog.set_level(logging.INFO)
    settings = {**COMMON, "transport": "shm", **ranks}
    pair = [start(Role.PREFILL, **settings), start(Role.DECODE, **settings)]
    engines = [one.program.engine for one in pair]
    loads = [one for one in caplog.messages if one == "model loaded"]
    assert len(loads) == 2
    oracle, sampling = Oracle(BUNDLED), Sampling(max_tokens=16, temperature=0.0)
    prompts, cached = PROMPTS[2:], []
    for turn in range(3):
        router = await attach(*pair, name=f"router-{turn}")
        asked = [ask(f"{turn}-{at}", one, max_tokens=16, ignore_eos=True) for at, one in enumerate(prompts)]
        found = [await router.remote(one) for one in asked]
        oracle.assert_exact(prompts, found, sampling=[sampling] * len(prompts))
        cached.append([one.cached_tokens for one in router.all("first_token")])
        saved = [one.saved_bytes for one in router.all("transfer_ended") if one.saved_bytes]
        await router.close()
        if turn < 2:
            assert [await change(one) for one in pair] == ["", ""]
            assert len(saved) >= turn, "the decode worker has the prefixes that it computed as a prefill worker"
    full = [(len(one) - 1) // 16 * 16 for one in prompts]
    assert cached[0][0] == 0
    assert cached[1:] == [full, full], "the former decode worker has the prompts"
    assert [one.program.engine for one in pair] == engines
    assert [one for one in caplog.messages if one == "model loaded"] == loads, "no weights were read"
    assert [role_of(one) for one in pair] == [Role.PREFILL, Role.DECODE]
    assert len({one.context.incarnation for worker in pair for one in worker.programs}) == 6


async def test_what_a_disk_tier_reports_reaches_the_new_role(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdserve.worker.tiers.is_disk_worthwhile", lambda read_s, computed_s: True)
    worker = start(Role.DECODE, model="toy", kv_disk_path=str(tmp_path), kv_disk_bytes=2**27)
    assert not await change(worker)
    await worker.on_engine(lambda program: program.blocks._in_lower.add(b"a"))
    worker.program.disk.changed((), [b"a"])
    await worker.until(lambda program: b"a" not in program.blocks._in_lower, "the block has left the disk")


async def test_a_prefill_worker_learns_what_decode_steps_cost(start: Any, attach: Any, ask: Any) -> None:
    p = start(Role.PREFILL, **TOY, toy_step_s=0.002)
    assert p.program.cost.decode_base_s == p.program.cost.decode_per_row_s == 0.0
    prefill = p.program.cost.prefill_base_s, p.program.cost.prefill_per_token_s
    assert await change(p) == ""
    cost = p.program.cost
    assert cost.decode_base_s + 8 * cost.decode_per_row_s > 0.001
    assert (cost.prefill_base_s, cost.prefill_per_token_s) == prefill
    router = await attach(p)
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8)
    assert await change(p) == ""
    assert await change(p) == ""
    assert p.program.cost == cost, "measured once"


async def test_readiness_and_registration_follow_the_role(start: Any, attach: Any, ask: Any) -> None:
    with EmbeddedRedis.start() as redis:
        d = start(Role.DECODE, **TOY, redis=redis.url)
        await (await attach(d)).local(ask("r", PROMPT))
        held = set((await d.on_engine(lambda program: program.kv.snapshot())).stored)
        registry = Registry(redis.url, "default")
        async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=SERVICE))
            assert (await watch.read()).status == SERVING
            assert await change(d) == ""
            assert (await asyncio.wait_for(watch.read(), DEADLINE_S)).status != SERVING
            async with asyncio.timeout(DEADLINE_S):
                while (await watch.read()).status != SERVING:
                    pass
            watch.cancel()
        async with asyncio.timeout(DEADLINE_S):
            while [(one.role, one.incarnation) for one in await registry.read()] != [
                (Role.PREFILL, d.program.context.incarnation)
            ]:
                await asyncio.sleep(0.01)
        await registry.close()
        late = await attach(d, name="late", wants_kv_events=True)
        assert late.hellos[Role.PREFILL].role == worker_pb2.ROLE_PREFILL
        snapshot = await late.next("kv_events")
        assert (snapshot.is_snapshot, set(snapshot.stored)) == (True, held)
        assert held


async def test_loras_stay_and_more_can_be_loaded(start: Any, attach: Any, ask: Any, tmp_path: Path) -> None:
    for seed, name in enumerate(("a", "b")):
        write_adapter(tmp_path / name, seed=seed)
    d = start(Role.DECODE, **TOY, lora_folders=(str(tmp_path),))
    names = {"a": await serve(await attach(d), Role.DECODE, "a", tmp_path / "a", 1)}
    assert await change(d) == ""
    router = await attach(d, name="second")
    assert served(router, Role.PREFILL) == names
    names["b"] = await serve(router, Role.PREFILL, "b", tmp_path / "b", 2)
    assert await change(d) == ""
    router = await attach(d, name="third")
    assert served(router, Role.DECODE) == names
    for name, adapter in names.items():
        assert await router.local(of(ask(name, PROMPT), adapter)) == answer(PROMPT, 8, adapter=adapter)


# --- what ends ------------------------------------------------------------------------------------------------


async def test_requests_and_messages_of_the_former_role_end(start: Any, attach: Any, ask: Any) -> None:
    p, d = start(Role.PREFILL, **TOY), start(Role.DECODE, **TOY)
    router = await attach(p, d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("late", PROMPT)))
    grant = (await router.next("granted", "late")).grant
    former = d.program
    assert await change(d) == ""
    await router.wait_for(lambda: [1 for role, kind, _ in router.seen if (role, kind) == (Role.DECODE, "ended")])
    assert d.program.blocks.num_referenced == 0
    called: list[str] = []
    former.context.post(lambda: called.append("former"))
    d.program.context.post(lambda: called.append("present"))
    await d.until(lambda program: bool(called), "a call of the present program")
    assert called == ["present"]

    sequence = ask("late", PROMPT)
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=grant))
    lost = await router.next("transfer_ended", "late", Role.PREFILL)
    assert "has restarted since it granted" in lost.error, "the grant is of its former incarnation"
    assert await change(d) == ""
    await router.released("late", Role.PREFILL)
    sequence = ask("late", PROMPT, attempt=2)
    await router.send(Role.PREFILL, prefill=worker_pb2.Prefill(sequence=sequence, grant=grant))
    await router.released("late", Role.PREFILL, 2)
    assert "has restarted since it granted" in router.all("transfer_ended", "late", Role.PREFILL)[-1].error
    assert await (await attach(p, d, name="next")).remote(ask("next", PROMPT)) == answer(PROMPT, 8)


def held_by_this_process() -> Counter[str]:
    """Threads, descriptors and mappings of memory files, by kind. Without TCP sockets, which are those of the test's
    own channels: shm uses Unix sockets."""
    found = Counter(f"thread {re.sub('[0-9]+', '', one.name)}" for one in threading.enumerate())
    unix = {line.split()[6] for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]}
    for one in Path("/proc/self/fd").iterdir():
        try:
            kind, _, number = str(one.readlink()).partition(":[")
        except OSError:  # it was closed meanwhile
            continue
        if kind != "socket" or number.rstrip("]") in unix:
            found[f"descriptor {re.sub('[0-9]+', '', kind)}"] += 1
    found["mapping"] = Path("/proc/self/maps").read_text().count("memfd")
    return found


async def test_nothing_leaks(start: Any, attach: Any, ask: Any) -> None:
    pair = [start(Role.PREFILL, **TOY, transport="shm"), start(Role.DECODE, **TOY, transport="shm")]

    async def use(name: str) -> None:
        router = await attach(*pair, name=name)
        assert await router.remote(ask(name, PROMPT)) == answer(PROMPT, 8)
        await router.close()
        assert [await change(one) for one in pair] == ["", ""]

    for turn in range(2):  # some threads start once
        await use(f"first-{turn}")
    before = held_by_this_process()
    for turn in range(6):
        await use(f"then-{turn}")
    until_s = asyncio.get_running_loop().time() + DEADLINE_S
    while more := held_by_this_process() - before:  # connections end in the background
        assert asyncio.get_running_loop().time() < until_s, more
        await asyncio.sleep(0.05)
    for one in pair:
        await one.on_engine(lambda program: program.check() or program.blocks.check([]))


async def test_the_sender_of_a_decode_worker_ends_with_its_role(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    d = start(Role.DECODE, **TOY)
    sender, closed = d.program._sender, []
    close = sender.close
    monkeypatch.setattr(sender, "close", lambda: (closed.append(sender), close()))
    assert await change(d) == ""
    assert closed == [sender]


# --- when it needs a new process ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "changes", "why"),
    [
        (TOY, {"block_size": 8, "kv_blocks": 32, "max_batch": 4}, "block_size and kv_blocks"),
        ({"model": "toy-marked"}, {}, "model"),
    ],
)
async def test_it_names_what_it_cannot_change(
    start: Any, attach: Any, ask: Any, settings: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    d = start(Role.DECODE, **settings)
    router = await attach(d)
    assert await change(d, **changes) == why
    assert await router.local(ask("r", PROMPT)) == answer(PROMPT, 8), "it serves on the same stream"
    assert len(d.programs) == 1


async def test_settings_of_the_program_change_with_it(start: Any) -> None:
    d = start(Role.DECODE, **TOY)
    assert await change(d, max_batch_tokens=16, push="end", stall_s=7.5) == ""
    found = d.program.context.config
    assert (found.max_batch_tokens, found.push, found.stall_s, found.max_batch) == (16, "end", 7.5, 8)
    assert d.host._watchdog.stall_s == 7.5


def test_only_settings_of_the_program_travel_with_their_values() -> None:
    before = config(Role.DECODE)
    after = dataclasses.replace(before, push="end", max_batch=9, threads=3)
    changed = differing(before, after)
    assert changed == {"push": "end", "max_batch": "9", "threads": ""}
    assert with_settings(before, changed) == dataclasses.replace(after, threads=before.threads)
    assert {one.name for one in dataclasses.fields(WorkerConfig)} >= OF_PROGRAM
    with pytest.raises(ConfigError, match="max_batch: got 'many'"):
        with_settings(before, {"max_batch": "many"})
    with pytest.raises(InvalidRequest, match="at most 256"):
        with_settings(before, {str(number): "" for number in range(257)})


def test_engines_that_depend_on_the_role_need_a_new_process() -> None:
    def why(changed: dict[str, str], *, on_host: bool = True, ranks: tuple[str, ...] = (), **settings: Any) -> str:
        pool = type("Pool", (), {"is_on_host": on_host})
        engine: Any = type("Engine", (), {"pool": pool, "rank_addresses": ranks})
        return " ".join(needs_restart(WorkerConfig(model="folder", worker_id="d", **settings), engine, changed))

    assert why({"max_batch": "9", "push": "end"}) == ""
    assert why({"max_batch": "9", "push": "end"}, engine="vllm") == "max_batch"
    assert why({}, engine="vllm") == ""
    assert why({}, engine="installed") == "engine"
    assert why({}, on_host=False) == "device"
    assert why({}, ranks=("127.0.0.1:1",)) == "rank_pools"


# --- errors ---------------------------------------------------------------------------------------------------


async def test_only_the_launcher_may_ask(start: Any) -> None:
    d = start(Role.DECODE, **TOY)

    async def ask_as(identity: Identity | None) -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(d.address, options=LOCAL) as channel:
            metadata = ()
            if identity is not None:
                introduction = peers.introduce(identity, peers.CHANGE_ROLE, d.address)
                metadata = await peers.prove(channel, introduction)
            request = worker_pb2.ChangeRoleRequest(role=worker_pb2.ROLE_PREFILL)
            try:
                await worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

    assert await ask_as(None) is grpc.StatusCode.UNAUTHENTICATED
    assert await ask_as(ROUTER) is grpc.StatusCode.UNAUTHENTICATED
    assert len(d.programs) == 1
    assert await ask_as(Identity.of(SECRET, "launcher", "launcher", "1")) is grpc.StatusCode.OK
    assert role_of(d) is Role.PREFILL
    assert await ask_as(Identity.of(SECRET, "launcher", "launcher", "1")) is grpc.StatusCode.OK
    assert len(d.programs) == 2, "it has the role already"


async def test_a_failed_change_ends_the_process(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(context: Any, load: Callable[..., Any]) -> Any:
        raise ConfigError("push", "layers", "another one")

    d = start(Role.DECODE, **TOY)
    monkeypatch.setitem(conftest.BUILDS, Role.PREFILL, build)
    assert "the change of the role failed: ConfigError: push" in await change(d)
    await d.until_fatal()
    assert not d.host.is_healthy()


async def test_a_worker_that_ends_keeps_its_role(start: Any, attach: Any, ask: Any) -> None:
    d = start(Role.DECODE, **TOY, toy_step_s=0.03)
    router = await attach(d)
    await router.send(Role.DECODE, reserve=worker_pb2.Reserve(sequence=ask("r", PROMPT, max_tokens=40), is_local=True))
    await router.next("granted", "r")
    d.host.drain()
    assert "the worker ends" in await change(d)
    assert await router.finished("r") == answer(PROMPT, 40)
    assert len(d.programs) == 1
