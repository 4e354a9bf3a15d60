"""A router of pdserve as the server of a benchmark, called over gRPC with the SDK."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final, final

from pdserve.client.aio import AsyncClient
from pdserve.client.connect import Tls
from pdserve.client.options import Options
from pdserve.client.results import Explanation
from pdserve.client.retries import Retries
from pdserve.core.errors import ConfigError, DeadlineExceeded, NotFound, Overloaded, PdserveError
from simulator.bench.server import BenchAnswer, BenchOutcome, RequestOptions, ServerReply, most_chunks

log = logging.getLogger(__name__)
MAX_EXPLAINED: Final = 500  # requests of a turn; a router remembers the last 1,024
CHANNELS: Final = 4  # connections, because the streams of one share its flow control


@final
class GrpcServer:
    def __init__(
        self,
        name: str,
        address: str,
        *,
        sampling: RequestOptions,
        token: str | None = None,
        tls: Tls | None = None,
        insecure: bool = False,
        timeout_s: float,
        model: str = "",
    ) -> None:
        """Raises ConfigError."""
        self.name, self.address, self._model = name, address, model
        self._clients = [
            AsyncClient(address, token=token, tls=tls, insecure=insecure, timeout_s=timeout_s, retries=Retries(limit=0))
            for _ in range(CHANNELS)
        ]
        self._next = 0
        options: Options = {"temperature": sampling.temperature, "ignore_eos": sampling.ignore_eos}
        targets = {"ttft_s": sampling.slo_ttft_s, "tpot_s": sampling.slo_tpot_s}
        if given := {name: value for name, value in targets.items() if value is not None}:
            options["slo"] = given
        if sampling.slo_task_s is not None:
            options["slo_task_s"] = sampling.slo_task_s
        self._options = options

    async def connect(self) -> str:
        name = (await self._clients[0].model()).name
        if self._model and self._model != name:
            raise ConfigError("model", self._model, f"the model that {self.address} serves: {name}")
        return name

    def prepare(self, token_ids: Sequence[int], max_tokens: int, session_id: str = "") -> Any:
        options: Options = {**self._options, "max_tokens": max_tokens}
        if session_id:
            options["session_id"] = session_id
        return list(token_ids), options

    async def send(self, prepared: Any, reply: ServerReply) -> None:
        token_ids, options = prepared
        client = self._clients[self._next % CHANNELS]
        self._next += 1
        most = most_chunks(options["max_tokens"])
        try:
            async with client.stream(token_ids, **options) as stream:
                async for piece in stream:
                    now_s = time.perf_counter()
                    if piece.token_ids:
                        reply.chunk_s.append(now_s)
                        reply.token_ids += piece.token_ids
                    if max(len(reply.chunk_s), len(reply.token_ids)) > most:
                        reply.fail("too many parts in an answer")
                        return
                done = stream.completion
        except Overloaded as error:
            reply.reject(error.message)
        except DeadlineExceeded as error:
            reply.fail("timeout", error.message)
        except PdserveError as error:
            reply.fail(f"gRPC {error.reason}", error.message)
        else:
            reply.prompt_tokens, reply.output_tokens = done.usage.prompt_tokens, len(reply.token_ids)
            reply.cached_tokens = done.usage.cached_prompt_tokens
            reply.server_ttft_s, reply.server_tpot_s = done.timings.ttft_s, done.timings.tpot_s
            reply.request_id = done.request_id
            reply.prefill_worker, reply.decode_worker = done.timings.prefill_worker, done.timings.decode_worker
            reply.complete()

    async def end_session(self, session_id: str) -> str:
        try:
            return "" if await self._clients[0].end_session(session_id) else "it does not know the session"
        except PdserveError as error:
            return error.message

    async def with_predictions(self, answers: Sequence[BenchAnswer]) -> Sequence[BenchAnswer]:
        """Only for the last completed requests, because a router remembers a limited number, and for one answer per
        call."""
        asked = [one.request_id for one in answers if one.outcome is BenchOutcome.COMPLETED and one.request_id]
        found: dict[str, Explanation] = {}
        try:
            for name in asked[-MAX_EXPLAINED:]:
                with suppress(NotFound):
                    found[name] = await self._clients[0].explain(name)
        except PdserveError as error:  # the caller is not permitted to read them, or the router has stopped
            log.warning("no predictions of %s: %s", self.name, error.message)
        return [
            replace(
                one,
                predicted_ttft_s=found[one.request_id].predicted_ttft_s,
                predicted_tpot_s=found[one.request_id].predicted_tpot_s,
            )
            if one.request_id in found
            else one
            for one in answers
        ]

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
