"""A router of pdserve as the server of a benchmark, called over gRPC with the SDK."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final, final

from pdserve.client.aio import AsyncClient
from pdserve.client.connect import Tls
from pdserve.client.options import Options
from pdserve.client.retry import Retries
from pdserve.core.errors import ConfigError, DeadlineExceeded, Overloaded, PdserveError
from simulator.bench.server import AskedSampling, ServerReply, most_chunks

CHANNELS: Final = 4  # connections, because the streams of one share its flow control


@final
class GrpcServer:
    def __init__(
        self,
        name: str,
        address: str,
        *,
        sampling: AskedSampling,
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
        self._options = options

    async def connect(self) -> str:
        name = (await self._clients[0].model()).name
        if self._model and self._model != name:
            raise ConfigError("model", self._model, f"the model that {self.address} serves: {name}")
        return name

    def prepare(self, token_ids: Sequence[int], max_tokens: int) -> Any:
        return list(token_ids), max_tokens

    async def ask(self, prepared: Any, reply: ServerReply) -> None:
        token_ids, max_tokens = prepared
        client = self._clients[self._next % CHANNELS]
        self._next += 1
        most, count = most_chunks(max_tokens), 0
        options: Options = {**self._options, "max_tokens": max_tokens}
        try:
            async with client.stream(token_ids, **options) as stream:
                async for piece in stream:
                    now_s = time.perf_counter()
                    if piece.token_ids:
                        reply.chunk_s.append(now_s)
                        count += len(piece.token_ids)
                    if len(reply.chunk_s) > most:
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
            reply.prompt_tokens, reply.output_tokens = done.usage.prompt_tokens, count
            reply.server_ttft_s, reply.server_tpot_s = done.timings.ttft_s, done.timings.tpot_s
            reply.complete()

    async def close(self) -> None:
        for client in self._clients:
            await client.close()
