"""An engine that only waits, behind smg's gRPC protocol for vLLM. It runs in smg's environment.

    python smg_worker.py --port 9501 --role prefill|decode --model FOLDER [--step-s 0.005]

It gets token ids and streams token ids. A prefill worker tells subscribers which blocks of 16 tokens it has, as vLLM's
KV events do, and gives the decode worker the parameters of a transfer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc  # type: ignore[import-not-found]

BLOCK_SIZE = 16
TOKENS = [400 + 7 * number for number in range(64)]
TRANSFER = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e0",
    "remote_block_ids": [1, 2, 3],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "tp_size": 1,
}


class KvEvents:
    def __init__(self) -> None:
        self.subscribers: list[asyncio.Queue[Any]] = []
        self._known: set[int] = set()
        self._sequence = 0

    def store(self, token_ids: Any) -> int:
        """Adds a prompt's whole blocks. Returns how many of its first tokens were there before."""
        if not self.subscribers:
            return 0
        new: list[Any] = []
        parent, before_new, cached = None, None, 0
        for start in range(0, len(token_ids) - BLOCK_SIZE + 1, BLOCK_SIZE):
            tokens = tuple(token_ids[start : start + BLOCK_SIZE])
            own = hash((parent, tokens)) >> 1
            if own not in self._known:
                self._known.add(own)
                before_new = before_new if new else parent
                new.append(common_pb2.KvBlock(block_hash=own, token_ids=tokens, block_size=BLOCK_SIZE))
            elif not new:
                cached += BLOCK_SIZE
            parent = own
        if new:
            self._sequence += 1
            stored = common_pb2.KvBlocksStored(blocks=new, tier=common_pb2.KV_CACHE_TIER_DEVICE)
            if before_new is not None:
                stored.parent_block_hash = before_new
            event = common_pb2.KvCacheEvent(event_id=self._sequence, stored=stored)
            batch = common_pb2.KvEventBatch(sequence_number=self._sequence, timestamp=time.time(), events=[event])
            for one in self.subscribers:
                one.put_nowait(batch)
        return cached


class Engine(vllm_engine_pb2_grpc.VllmEngineServicer):
    def __init__(self, flags: argparse.Namespace) -> None:
        self._flags, self._events, self._running = flags, KvEvents(), 0

    async def Generate(self, request: Any, context: Any) -> Any:
        count = request.sampling_params.max_tokens or 16
        prompt_ids = request.tokenized.input_ids
        is_prefill = self._flags.role == "prefill"
        cached = self._events.store(prompt_ids) if is_prefill else 0
        self._running += 1
        try:
            for number in range(count if request.stream else 0):
                if number:
                    await asyncio.sleep(self._flags.step_s)
                chunk = vllm_engine_pb2.GenerateStreamChunk(
                    token_ids=[TOKENS[number % len(TOKENS)]],
                    prompt_tokens=len(prompt_ids),
                    completion_tokens=number + 1,
                )
                yield vllm_engine_pb2.GenerateResponse(chunk=chunk)
            complete = vllm_engine_pb2.GenerateComplete(
                output_ids=TOKENS[:count],
                finish_reason="length",
                prompt_tokens=len(prompt_ids),
                completion_tokens=count,
                cached_tokens=cached,
            )
            if is_prefill:
                complete.kv_transfer_params_json = json.dumps(TRANSFER)
            yield vllm_engine_pb2.GenerateResponse(complete=complete)
        finally:
            self._running -= 1

    async def SubscribeKvEvents(self, request: Any, context: Any) -> Any:
        events: asyncio.Queue[Any] = asyncio.Queue()
        self._events.subscribers.append(events)
        try:
            while True:
                yield await events.get()
        finally:
            self._events.subscribers.remove(events)

    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.HealthCheckResponse(healthy=True, message="ok")

    async def Abort(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetModelInfoResponse(
            model_path=self._flags.model,
            tokenizer_path=self._flags.model,
            served_model_name="model",
            is_generation=True,
            model_type="llama",
            architectures=["LlamaForCausalLM"],
            max_context_length=131072,
            max_req_input_len=131072,
            vocab_size=4096,
            eos_token_ids=[0],
        )

    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        return vllm_engine_pb2.GetServerInfoResponse(
            server_type="vllm-grpc",
            kv_connector="NixlConnector",
            kv_role="kv_both",
            kv_engine_id=f"e-{self._flags.role}",
            data_parallel_size=1,
            block_size=BLOCK_SIZE,
            kv_cache_dtype="auto",
            model_dtype="torch.bfloat16",
            max_num_seqs=1024,
        )

    async def GetLoads(self, request: Any, context: Any) -> Any:
        load = vllm_engine_pb2.SchedulerLoad(
            num_running_reqs=self._running,
            num_total_reqs=self._running,
            max_total_num_tokens=10**6,
            max_running_requests=1024,
        )
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp="2026-01-01T00:00:00Z", version="0.11", dp_rank_count=1, loads=[load]
        )


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int)
    parser.add_argument("--role")
    parser.add_argument("--model")
    parser.add_argument("--step-s", type=float, default=0.005)
    flags = parser.parse_args()
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", 64 * 2**20)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Engine(flags), server)
    server.add_insecure_port(f"127.0.0.1:{flags.port}")
    await server.start()
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
