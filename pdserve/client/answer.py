"""Converts the messages of one Generate call to pieces and, at the end, a completion; records its span and metrics. No
I/O.

There is one span per call, including retries, and none unless the caller's program uses OpenTelemetry.
"""

from __future__ import annotations

from typing import Any

from pdserve.client import results
from pdserve.client.results import Completion, Piece, TokenLogprob
from pdserve.core.errors import InternalError, PdserveError
from pdserve.telemetry import names
from pdserve.telemetry.client_call import ClientCall
from pdserve.telemetry.request_attributes import request_attributes
from pdserve.v1 import inference_pb2


class AnswerBuilder:
    """One call's answer so far. An attempt that failed before its first token leaves nothing here."""

    def __init__(
        self,
        request: inference_pb2.GenerateRequest,
        server: tuple[str, int | None],
        *,
        is_stream: bool,
        keeps_pieces: bool = True,
    ) -> None:
        """`server`: the router's host and port. `keeps_pieces`: for the completion, which is empty otherwise."""
        self._call = ClientCall(_attributes(request, server), is_stream=is_stream)
        self.request_id = request.request_id
        self.prompt_tokens: int | None = None
        self.reasoning: str | None = None  # how the prompt ends; None: the router does not say
        self._num_answers = request.n if request.HasField("n") else 1
        self._keeps_pieces = keeps_pieces
        self._pieces: list[Piece] = []
        self._finished: list[inference_pb2.Finished] = []
        self._prompt_logprobs: list[TokenLogprob | None] = []
        if request.sampling.HasField("prompt_logprobs"):
            self._prompt_logprobs.append(None)  # nothing is returned before the first token
        self._completion: Completion | None = None
        self.has_begun = False  # a token or text has reached the caller, so a retry could repeat it

    @property
    def traceparent(self) -> str | None:
        return self._call.traceparent

    def take(self, message: inference_pb2.GenerateResponse) -> Piece | None:
        """Returns the piece that the message contains, if any."""
        event = message.WhichOneof("event")
        if event == "started":
            self.request_id = message.started.request_id
            self.prompt_tokens = message.started.prompt_tokens
            self.reasoning = message.started.reasoning if message.started.HasField("reasoning") else None
            self._call.answered_by(message.started.model)
        elif event == "delta" and (message.delta.text or message.delta.token_ids):
            piece = results.PIECE.decode(message.delta)
            self.has_begun = True
            if self._keeps_pieces:
                self._pieces.append(piece)
            self._call.took_chunk()
            return piece
        elif event == "prompt_logprobs":
            self._scored(message.prompt_logprobs)
        elif event == "finished":
            self._finished.append(message.finished)
            if len(self._finished) == self._num_answers:
                self._completion = self._complete()
        return None

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprob | None, ...]:
        """Available with the first piece."""
        return tuple(self._prompt_logprobs)

    def _scored(self, message: inference_pb2.PromptLogprobs) -> None:
        del self._prompt_logprobs[message.first_position :]
        self._prompt_logprobs += map(results.TOKEN_LOGPROB.decode, message.tokens)

    def _complete(self) -> Completion:
        choices = [
            results.choice([one for one in self._pieces if one.index == finished.index], finished)
            for finished in sorted(self._finished, key=lambda one: one.index)
        ]
        return results.completion(self.request_id, choices, self._finished, self._prompt_logprobs)

    def end(self) -> None:
        """The stream ended normally. Raises InternalError if no finish reason was received."""
        done = self._completion
        if done is None:
            error = InternalError("the server closed the stream without a finish reason")
            self.fail(error)
            raise error
        self._call.set(
            {
                names.RESPONSE_ID: done.request_id,
                names.RESPONSE_FINISH_REASONS: [one.finish_reason.value for one in done.choices],
                names.INPUT_TOKENS: done.usage.prompt_tokens,
                names.OUTPUT_TOKENS: done.usage.completion_tokens,
                names.CACHED_TOKENS: done.usage.cached_prompt_tokens,
            }
        )
        self._call.end()

    def fail(self, error: PdserveError) -> None:
        self._call.fail(error.reason, error.message)

    def drop(self) -> None:
        """The caller has stopped reading, which is not a failure."""
        self._call.end()

    @property
    def completion(self) -> Completion:
        if self._completion is None:
            raise RuntimeError("the stream has no completion: it was not read to its end")
        return self._completion


def _attributes(request: inference_pb2.GenerateRequest, server: tuple[str, int | None]) -> dict[str, Any]:
    host, port = server
    found = {**request_attributes(request), names.SERVER_ADDRESS: host}
    if port is not None:
        found[names.SERVER_PORT] = port
    if request.HasField("request_id"):
        found[names.REQUEST_ID] = request.request_id
    if request.HasField("session_id"):
        found[names.CONVERSATION_ID] = request.session_id
    return found
