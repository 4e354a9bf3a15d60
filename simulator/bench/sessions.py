"""Sessions of a benchmark: when each turn is due, and its prompt. Pure.

A turn is due its pause after the end of the turn that it follows. Its prompt repeats the conversation: the prompt of
the last turn all of whose blocks it has, the answer to that, and new tokens. All turns that follow each other, those of
subagents too, are one task.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, final

from pdserve.core.errors import ConfigError
from simulator.bench.load import PromptMaker
from simulator.model import TraceRequest

MAX_PLANNED_IDS: Final = 50_000_000  # of blocks, of the requests of a turn, which are held until it ends


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTurn:
    number: int
    task: int  # number of the first turn of its session
    extends: int | None  # number of the turn whose conversation its prompt repeats
    request: TraceRequest


def planned_turns(requests: Iterable[TraceRequest]) -> list[SessionTurn]:
    """Raises ConfigError if they would fill the memory."""
    found: list[SessionTurn] = []
    ends: dict[tuple[int, int], int] = {}  # by task and last block, the last turn
    num_ids = 0
    for number, one in enumerate(requests):
        num_ids += len(one.block_ids)
        if num_ids > MAX_PLANNED_IDS:
            expected = f"at most {MAX_PLANNED_IDS}; send fewer --sessions or --requests"
            raise ConfigError("requests", f"{num_ids} blocks of prompts", expected)
        task = number if one.follows is None else found[one.follows].task
        extends = None
        if one.follows is not None:
            for last in range(len(one.block_ids) - 1, -1, -1):
                before = ends.get((task, one.block_ids[last]))
                if before is not None and one.block_ids[: last + 1] == found[before].request.block_ids:
                    extends = before
                    break
        if one.block_ids:
            ends[task, one.block_ids[-1]] = number
        found.append(SessionTurn(number=number, task=task, extends=extends, request=one))
    return found


@final
class SessionAgenda:
    """Which turn is sent next, and when. Times are seconds since the load began."""

    def __init__(self, turns: Sequence[SessionTurn], most_sessions: int | None = None) -> None:
        """With `most_sessions`, a session begins when fewer are running, whatever its time."""
        self._turns = turns
        self._due: list[tuple[float, int]] = []  # heap
        self._followers: dict[int, list[int]] = defaultdict(list)
        self._left: dict[int, int] = defaultdict(int)  # turns of each task that have not ended
        begins: list[int] = []
        first_s = turns[0].request.arrival_s if turns else 0.0
        for one in turns:
            self._left[one.task] += 1
            if one.request.follows is not None:
                self._followers[one.request.follows].append(one.number)
            else:
                begins.append(one.number)
        self._waiting: list[int] = []  # sessions that wait for the end of another one, the next one last
        if most_sessions is None:
            self._due = [(turns[number].request.arrival_s - first_s, number) for number in begins]
            heapq.heapify(self._due)
        else:
            self._waiting = begins[::-1]
            for _ in range(most_sessions):
                self._begin_next(0.0)

    @property
    def next_s(self) -> float | None:
        """When the next turn is due; None: not before one that is running has ended, or never."""
        return self._due[0][0] if self._due else None

    def pop(self) -> tuple[float, SessionTurn]:
        """The next turn, and when it is due."""
        due_s, number = heapq.heappop(self._due)
        return due_s, self._turns[number]

    def ended(self, turn: SessionTurn, now_s: float) -> list[SessionTurn]:
        """The turns that follow it, which are due after their pauses."""
        following = [self._turns[number] for number in self._followers.pop(turn.number, ())]
        for one in following:
            heapq.heappush(self._due, (now_s + one.request.pause_s, one.number))
        self._left[turn.task] -= 1
        if not self._left[turn.task]:
            del self._left[turn.task]
            self._begin_next(now_s)
        return following

    def _begin_next(self, now_s: float) -> None:
        if self._waiting:
            heapq.heappush(self._due, (now_s, self._waiting.pop()))


@final
class SessionPrompts:
    """Builds the prompts of one turn of a benchmark from the answers to earlier prompts."""

    def __init__(self, prompts: PromptMaker, block_tokens: int, turns: Sequence[SessionTurn]) -> None:
        self._prompts, self._block_tokens = prompts, block_tokens
        self._needed = Counter(one.extends for one in turns)  # how many prompts still repeat a conversation
        self._conversations: dict[int, array[int]] = {}  # token ids of a prompt and its answer
        self._seen: set[int] = set()  # blocks

    def prompt(self, turn: SessionTurn) -> tuple[list[int], int]:
        """Its token ids, and how many of them were in an earlier prompt or answer. To be called once."""
        request = turn.request
        fresh = self._prompts.token_ids(turn.number, request)
        known: list[int] = []
        if turn.extends is not None and turn.extends in self._conversations:
            known = self._conversations[turn.extends][: request.prompt_tokens].tolist()
            self._needed[turn.extends] -= 1
            if not self._needed[turn.extends]:
                del self._conversations[turn.extends]
        seen = 0
        while seen < len(request.block_ids) and request.block_ids[seen] in self._seen:
            seen += 1
        self._seen.update(request.block_ids)
        reusable = len(known) if known else min(seen * self._block_tokens, request.prompt_tokens)
        return known + fresh[len(known) :], reusable

    def answered(self, turn: SessionTurn, token_ids: Sequence[int], answer: Sequence[int]) -> None:
        """`answer`: token ids; tokens of the next prompt stand for missing ones."""
        if self._needed[turn.number]:
            self._conversations[turn.number] = array("q", [*token_ids, *answer])
