"""Gathers the messages of one Generate call into pieces and, at the end, a completion. No I/O."""

from __future__ import annotations

from pdserve.client import results
from pdserve.client.results import Completion, Piece
from pdserve.core.errors import InternalError
from pdserve.v1 import inference_pb2


class Answer:
    """One call's answer so far. A try that failed before its first token leaves nothing here."""

    def __init__(self) -> None:
        self.request_id = ""
        self.prompt_tokens: int | None = None
        self._pieces: list[Piece] = []
        self._completion: Completion | None = None

    @property
    def has_begun(self) -> bool:
        """A token or text has reached the caller, so that trying again could repeat it."""
        return bool(self._pieces)

    def take(self, message: inference_pb2.GenerateResponse) -> Piece | None:
        """Returns the piece that the message carries, if it carries one."""
        event = message.WhichOneof("event")
        if event == "started":
            self.request_id = message.started.request_id
            self.prompt_tokens = message.started.prompt_tokens
        elif event == "delta" and (message.delta.text or message.delta.token_ids):
            piece = results.piece(message.delta)
            self._pieces.append(piece)
            return piece
        elif event == "finished":
            self._completion = results.completion(self.request_id, self._pieces, message.finished)
        return None

    def check_ended(self) -> None:
        if self._completion is None:
            raise InternalError("the server closed the stream without a finish reason")

    @property
    def completion(self) -> Completion:
        if self._completion is None:
            raise RuntimeError("the stream has no completion: it was not read to its end")
        return self._completion
