"""Answers of /v1/responses: whole, or as the events of a stream. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

from pdserve.client.results import Completion, Piece, TokenLogprob
from pdserve.core.types import RESPONSE_ID_PREFIX, FinishReason
from pdserve.gateway.api import logprobs, sse
from pdserve.gateway.api.errors import ErrorReply
from pdserve.gateway.api.logprobs import BytesOf
from pdserve.gateway.api.replies import Head, Writer
from pdserve.gateway.api.sdk_call import SdkCall
from pdserve.gateway.tools.answer_tools import AnswerTools

_Event = dict[str, Any]


@final
class ResponsesWriter(Writer):
    def __init__(self, head: Head, call: SdkCall, bytes_of: BytesOf) -> None:
        self._head, self._call = head, call
        self._output = _Output(head.request_id, call.shown.logprobs, bytes_of)
        self._tools = None if call.tools is None else AnswerTools(call.tools, head.reasoning)
        self._sequence = 0
        self._has_begun = False

    def answer(self, completions: Sequence[Completion]) -> dict[str, Any]:
        [one] = completions
        list(self._feed(one.text, one.logprobs))
        list(self._close(one.finish_reason))
        return self._response(one)

    def pieces(self, pieces: Iterable[Piece], prompt_tokens: int) -> Iterable[bytes]:
        yield from self._begin()
        for piece in pieces:
            for event in self._feed(piece.text, piece.logprobs):
                yield from self._frame(event)

    def end(self, completions: Sequence[Completion]) -> Iterable[bytes]:
        [one] = completions
        yield from self._begin()
        for event in self._close(one.finish_reason):
            yield from self._frame(event)
        response = self._response(one)
        yield from self._frame({"type": f"response.{response['status']}", "response": response})

    def error(self, reply: ErrorReply) -> Iterable[bytes]:
        failed = {
            **self._base("failed"),
            "error": {"code": "server_error", "message": reply.body["error"]["message"]},
            "output": self._output.shown(),
        }
        return self._frame({"type": "response.failed", "response": failed})

    # ------------------------------------------------------------------------------------------------------------

    def _begin(self) -> Iterable[bytes]:
        if not self._has_begun:
            self._has_begun = True
            for kind in ("response.created", "response.in_progress"):
                yield from self._frame({"type": kind, "response": {**self._base("in_progress"), "output": []}})

    def _feed(self, text: str, scored: Sequence[TokenLogprob]) -> Iterable[_Event]:
        deltas = [{"content": text}] if self._tools is None else self._tools.feed(text)
        for delta in deltas:
            yield from self._output.add(delta, scored)
            scored = ()

    def _close(self, reason: FinishReason) -> Iterable[_Event]:
        for delta in () if self._tools is None else self._tools.end():
            yield from self._output.add(delta, ())
        yield from self._output.close("completed" if reason is FinishReason.STOP else "incomplete")

    def _response(self, one: Completion) -> dict[str, Any]:
        is_whole = one.finish_reason is FinishReason.STOP
        used = one.usage
        return {
            **self._base("completed" if is_whole else "incomplete"),
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._output.shown(),
            "usage": {
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": {"cached_tokens": used.cached_prompt_tokens, "cache_write_tokens": 0},
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used.total_tokens,
            },
        }

    def _base(self, status: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": f"{RESPONSE_ID_PREFIX}{head.request_id}",
            "object": "response",
            "created_at": head.created_s,
            "model": head.model,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            **self._call.echoed,
        }

    def _frame(self, event: _Event) -> Iterable[bytes]:
        """Whole if it is a delta. Others may have the logprobs of the whole answer, and come in pieces."""
        if event["type"].endswith(".delta"):
            make = sse.padded_frame if self._call.shown.is_padded else sse.frame
            yield _name(event) + make(self._numbered(event))
        else:
            yield _name(event)
            yield from sse.frame_pieces(self._numbered(event))

    def _numbered(self, event: _Event) -> _Event:
        self._sequence += 1
        return {**event, "sequence_number": self._sequence - 1}


@final
class _Output:
    """The items of an answer, and the events of their changes."""

    def __init__(self, request_id: str, most: int | None, bytes_of: BytesOf) -> None:
        """`most` as in logprobs.chat_content; None: no logprobs are shown."""
        self._items: list[dict[str, Any]] = []  # with logprobs as in the pieces, which take less memory than as JSON
        self._request_id, self._most, self._bytes_of = request_id, most, bytes_of
        self._is_open = False  # the last item

    def shown(self) -> list[dict[str, Any]]:
        return list(map(self._shown, self._items))

    def add(self, delta: dict[str, Any], scored: Sequence[TokenLogprob]) -> Iterable[_Event]:
        if "content" in delta:
            yield from self._add_text(delta["content"], () if self._most is None else scored)
            return
        if "reasoning_content" in delta:
            yield from self._add_reasoning(delta["reasoning_content"])
            return
        for part in delta["tool_calls"]:
            function = part["function"]
            if "id" in part:
                yield from self.close("completed")
                yield from self._open(
                    {
                        "type": "function_call",
                        "id": f"fc_{self._request_id}_{len(self._items)}",
                        "call_id": part["id"],
                        "name": function["name"],
                        "arguments": "",
                        "status": "in_progress",
                    }
                )
            else:
                self._items[-1]["arguments"] += function["arguments"]
                yield self._event("response.function_call_arguments.delta", delta=function["arguments"])

    def close(self, status: str) -> Iterable[_Event]:
        """Ends the item that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            text = {"text": part["text"], "logprobs": self._scores(part["logprobs"])}
            yield self._event("response.output_text.done", content_index=0, **text)
            yield self._event("response.content_part.done", content_index=0, part=self._shown(part))
        elif item["type"] == "reasoning":
            yield self._event("response.reasoning_text.done", content_index=0, text=item["content"][0]["text"])
        else:
            yield self._event("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        yield {"type": "response.output_item.done", "output_index": len(self._items) - 1, "item": self._shown(item)}

    # ------------------------------------------------------------------------------------------------------------

    def _add_text(self, text: str, scored: Sequence[TokenLogprob]) -> Iterable[_Event]:
        if not (text or scored):
            return
        if not self._is_open or self._items[-1]["type"] != "message":
            yield from self.close("completed")
            message = {"type": "message", "id": f"msg_{self._request_id}_{len(self._items)}", "role": "assistant"}
            yield from self._open({**message, "status": "in_progress", "content": []})
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._items[-1]["content"].append(part)
            yield self._event("response.content_part.added", content_index=0, part=self._shown(part))
        [part] = self._items[-1]["content"]
        part["text"] += text
        part["logprobs"] += scored
        fields = {"delta": text, "logprobs": self._scores(scored)}
        yield self._event("response.output_text.delta", content_index=0, **fields)

    def _add_reasoning(self, text: str) -> Iterable[_Event]:
        if not self._is_open or self._items[-1]["type"] != "reasoning":
            yield from self.close("completed")
            item = {"type": "reasoning", "id": f"rs_{self._request_id}_{len(self._items)}", "summary": []}
            yield from self._open(
                {**item, "content": [{"type": "reasoning_text", "text": ""}], "status": "in_progress"}
            )
        self._items[-1]["content"][0]["text"] += text
        yield self._event("response.reasoning_text.delta", content_index=0, delta=text)

    def _open(self, item: dict[str, Any]) -> Iterable[_Event]:
        self._items.append(item)
        self._is_open = True
        yield {"type": "response.output_item.added", "output_index": len(self._items) - 1, "item": self._shown(item)}

    def _event(self, kind: str, **fields: Any) -> _Event:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}

    def _scores(self, scored: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        return logprobs.chat_content(scored, self._most or 0, self._bytes_of)

    def _shown(self, value: dict[str, Any]) -> dict[str, Any]:
        """A copy, whose logprobs are read while it is encoded."""
        return {
            name: self._scores(one)
            if name == "logprobs"
            else [self._shown(part) for part in one]
            if isinstance(one, list)
            else one
            for name, one in value.items()
        }


def _name(event: _Event) -> bytes:
    return f"event: {event['type']}\n".encode()
