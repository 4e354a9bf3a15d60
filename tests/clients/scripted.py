"""A gateway before a scripted engine: agents call a tool, and answer after its result."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from typing import Any

import grpc

from pdserve.v1 import cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from tests.unit.client.conftest import WAIT_S, Script, delta, finished, started
from tests.unit.gateway.conftest import gateway

RESULT_TOOL = "final_result"  # pydantic-ai's, for a typed result


class AgentScript(Script):
    """Calls `name` with `arguments`, in the form of Hermes or as JSON if a grammar requires calls. After the tool's
    result it answers with `answer`."""

    def __init__(self, name: str, arguments: dict[str, Any], answer: str) -> None:
        super().__init__()
        self.name, self.arguments, self.answer = name, arguments, answer

    def GetModel(
        self, request: inference_pb2.GetModelRequest, context: grpc.ServicerContext
    ) -> inference_pb2.GetModelResponse:
        return inference_pb2.GetModelResponse(
            model="m",
            max_context_tokens=65536,
            vocab_size=300,
            eos_token_ids=[1],
            max_new_tokens=4096,
            has_chat_template=True,
            tool_format="hermes",
        )

    def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.GenerateResponse]:
        self.requests.append(request)
        text = self._text(request)
        yield started(request_id=f"r{len(self.requests)}")
        half = len(text) // 2
        yield delta(text[:half], *range(half))
        yield delta(text[half:], *range(half, len(text)))
        usage = inference_pb2.Usage(prompt_tokens=3, completion_tokens=len(text))
        yield finished(reason=inference_pb2.FINISH_REASON_STOP, usage=usage)

    def _text(self, request: inference_pb2.GenerateRequest) -> str:
        chat, form = request.chat, request.sampling.structured_output
        names = [json.loads(tool)["function"]["name"] for tool in chat.tools]
        if self.name in names and all(one.role != "tool" for one in chat.messages):
            name, arguments = self.name, self.arguments
        elif RESULT_TOOL in names:
            name, arguments = RESULT_TOOL, json.loads(self.answer)
        else:
            return self.answer
        call = json.dumps({"name": name, "arguments": arguments})
        is_required = form.WhichOneof("kind") == "json_schema"
        return f"[{call}]" if is_required else f"<tool_call>\n{call}\n</tool_call>"

    @property
    def talk(self) -> list[tuple[str, str]]:
        """Role and content of the messages of the last request."""
        return [(one.role, one.content) for one in self.requests[-1].chat.messages]


@contextmanager
def scripted_gateway(script: AgentScript) -> Iterator[str]:
    """Yields the URL of OpenAI's API."""
    server = grpc.server(futures.ThreadPoolExecutor(8))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(script, server)
    cluster_pb2_grpc.add_ClusterServiceServicer_to_server(script, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with gateway(f"127.0.0.1:{port}") as host:
            yield f"http://{host.address}/v1"
    finally:
        server.stop(None).wait(WAIT_S)
