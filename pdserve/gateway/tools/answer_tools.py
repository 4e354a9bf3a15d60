"""The calls of one answer as OpenAI's clients read them: whole, or as deltas. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import Any, final

from pdserve.gateway.tools.plan import ToolPlan
from pdserve.gateway.tools.reading import Arguments, CallBegan, Event, Reasoning, Text


@final
class AnswerTools:
    """Belongs to one answer."""

    def __init__(self, plan: ToolPlan, reasoning: str | None = None) -> None:
        """`reasoning`: how the prompt ends."""
        self._reader = plan.reader(reasoning)
        self._most = plan.most_calls
        self._has_short_ids = plan.has_short_ids
        self.num_calls = 0
        self._is_dropped = False  # the last call is over the limit

    def feed(self, text: str) -> list[dict[str, Any]]:
        """The deltas that are complete after this text."""
        return self._deltas(self._reader.feed(text))

    def end(self) -> list[dict[str, Any]]:
        """After the last text, the deltas that were held back."""
        return self._deltas(self._reader.end())

    def _deltas(self, events: Iterable[Event]) -> list[dict[str, Any]]:
        found = (self._delta(one) for one in events)
        return [one for one in found if one is not None]

    def _delta(self, event: Event) -> dict[str, Any] | None:
        if isinstance(event, Text):
            return {"content": event.text}
        if isinstance(event, Reasoning):
            return {"reasoning_content": event.text}
        if isinstance(event, CallBegan):
            self._is_dropped = self._most is not None and self.num_calls >= self._most
            if self._is_dropped:
                return None
            self.num_calls += 1
            call = {
                "index": self.num_calls - 1,
                "id": secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}",
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
            return {"tool_calls": [call]}
        assert isinstance(event, Arguments)
        if self._is_dropped:
            return None
        return {"tool_calls": [{"index": self.num_calls - 1, "function": {"arguments": event.text}}]}


def message(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The whole message that deltas add up to. Without text, `content` is null."""
    content = reasoning = ""
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        content += delta.get("content", "")
        reasoning += delta.get("reasoning_content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({name: part[name] for name in ("id", "type")} | {"function": dict(part["function"])})
            else:
                calls[-1]["function"]["arguments"] += part["function"]["arguments"]
    found: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        found["reasoning_content"] = reasoning
    return found | ({"tool_calls": calls} if calls else {})
