"""Several messages in one, in either direction."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pdserve.core.attempt import AttemptKey
from pdserve.core.protocol import Released
from pdserve.core.types import Role
from pdserve.engine.toy import answer
from pdserve.v1 import worker_pb2

PROMPT = list(range(10, 70))


async def test_batches_are_read_and_sent_only_on_request(start: Any, attach: Any, ask: Any) -> None:
    router = await attach(start(Role.DECODE))
    assert router.hellos[Role.DECODE].reads_batches
    reserves = [worker_pb2.Reserve(sequence=ask(name, PROMPT, max_tokens=8), is_local=True) for name in ("a", "b")]
    messages = [worker_pb2.AttachRequest(reserve=one) for one in reserves]
    await router.send(Role.DECODE, batch=worker_pb2.AttachRequests(messages=messages))
    for name in ("a", "b"):
        assert await router.finished(name) == answer(PROMPT, 8)
        await router.released(name, Role.DECODE)
    assert not router.all("batch")


async def test_tokens_of_any_engine_are_sent_in_columns(start: Any, attach: Any, ask: Any) -> None:
    """The toy engine returns rows. Only those that begin or end an answer, or fill a block, need a message each."""
    router = await attach(start(Role.DECODE, kv_check="off", block_size=128))
    assert await router.local(ask("r", PROMPT, max_tokens=8)) == answer(PROMPT, 8)
    sent = router.all("tokens")
    assert [row.output_index for message in sent for row in message.rows] == [0, 7]
    assert [index for message in sent for index in message.plain.output_indexes] == [1, 2, 3, 4, 5, 6]


async def test_rows_with_logprobs_keep_them(start: Any, attach: Any, ask: Any) -> None:
    router = await attach(start(Role.DECODE, kv_check="off", block_size=128))
    sequence = ask("r", PROMPT, max_tokens=4)
    sequence.sampling.logprobs = 1
    await router.local(sequence)
    assert [token.HasField("logprob") for row in router.rows("r") for token in row.tokens] == [True] * 4


async def test_without_a_step_a_worker_sends_all_messages_at_once(start: Any, attach: Any) -> None:
    running = start(Role.DECODE, heartbeat_s=60.0)
    router = await attach(running)
    await router.next("load")  # the engine thread knows the router
    (session,) = await running.on_engine(lambda program: list(program.outbox._routers))
    engine, delivered = running.host._engine, []

    class Outlet:
        def send(self, sent: Mapping[int, list[worker_pb2.AttachResponse]]) -> None:
            delivered.append([one.WhichOneof("message") for one in sent[session]])
            running.host.send(sent)

        offer = running.host.offer

    def report(program: Any) -> None:
        engine._outlet = Outlet()
        program.outbox.report(Released(key=AttemptKey(session, "r", 1)))
        program.reports.changed()
        program.reports._reported_at_s = -math.inf  # so that a load report is due

    await running.on_engine(report)
    await router.next("released", "r")
    assert delivered == [["released", "load"]]
