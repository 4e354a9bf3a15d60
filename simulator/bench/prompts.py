"""Makes the prompts of a benchmark. Pure.

A prompt is a list of random token ids. Requests with equal block ids in the trace share those tokens. Each turn has new
texts, so that prompts of earlier turns are not in a prefix cache. Both servers of a comparison get the same texts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Final, final

from pdserve.core.errors import ConfigError
from simulator.model import TraceRequest

#: These ids are ordinary tokens in all tokenizers that we know: neither special nor out of range.
DEFAULT_IDS: Final = (32, 127)
MAX_ID: Final = 2**31
_KEPT_BLOCKS: Final = 4096
_WORDS: Final = (
    *("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state"),
    *("family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system"),
    *("program", "question", "work", "number", "night", "point", "home", "water", "room", "mother", "area", "money"),
    *("story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word", "business", "issue", "side"),
    *("kind", "head", "house", "service", "friend", "father", "power", "hour", "game", "line", "end", "member", "law"),
    *("car", "city", "name", "team", "minute", "idea", "body", "back", "parent", "face", "level", "office", "door"),
)


@final
class PromptMaker:
    def __init__(self, *, seed: int, turn: str, block_tokens: int, ids: tuple[int, int] = DEFAULT_IDS) -> None:
        """`ids`: the first id and the one after the last. Raises ConfigError."""
        low, high = ids
        if not 0 <= low < high <= MAX_ID:
            raise ConfigError("token-ids", f"{low}:{high}", f"A:B with 0 <= A < B <= {MAX_ID}")
        self._ids = range(low, high)
        self._texts = f"{seed} {turn}"
        self._block_tokens = block_tokens
        self._block = lru_cache(maxsize=_KEPT_BLOCKS)(self._make_block)

    def token_ids(self, number: int, request: TraceRequest) -> list[int]:
        """The prompt of the request. `number` counts the requests of a turn."""
        found: list[int] = []
        for block_id in request.block_ids if self._block_tokens else ():
            if len(found) >= request.prompt_tokens:
                break
            found += self._block(block_id)
        del found[request.prompt_tokens :]
        if rest := request.prompt_tokens - len(found):
            found += random.Random(f"{self._texts} request {number}").choices(self._ids, k=rest)
        return found

    def _make_block(self, block_id: int) -> list[int]:
        return random.Random(f"{self._texts} block {block_id}").choices(self._ids, k=self._block_tokens)


def as_text(token_ids: Sequence[int]) -> str:
    """A word for each token id: a text of about as many tokens, for servers that take no token ids."""
    return " ".join([_WORDS[one % len(_WORDS)] for one in token_ids])
